"""One partition of an optimizer, loaded: what its weights and states will be is settled first, then written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import AffineError, Faults, UnsupportedLayoutError
from deepspeed_affine.hooks.offered import Offered
from deepspeed_affine.hooks.optimizers import Fragment, Partition, zero3_part
from deepspeed_affine.hooks.policies import Strictness
from deepspeed_affine.hooks.report import Reporting
from deepspeed_affine.hooks.state_forms import (
    Kept,
    first_number,
    keeps_factors,
    keeps_step_in_group,
    kept_states,
    number_in_form,
    state_dtype,
    used_states,
)
from deepspeed_affine.hooks.stored_params import FP32, STEP

if TYPE_CHECKING:
    import torch

    from deepspeed_affine.hooks.layouts import LiveParam

__all__ = ["Copy", "DirectLoad", "PartitionLoad", "Planning", "group_index"]

ACCUMULATOR = "initial_accumulator_value"


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one state of one parameter, from ``start`` of this rank's flattened shard on, and where they go."""

    live: LiveParam
    state: str
    start: int
    out: torch.Tensor


@dataclass(slots=True)
class Planning:
    """What a load is made from, the same for all of its parts. ``lives`` has the parameters whose weights are taken."""

    offered: Offered
    lives: Mapping[str, LiveParam]
    strictness: Strictness
    faults: Faults
    report: Reporting
    _stepped: frozenset[str] | None = None

    def was_stepped(self, live: LiveParam) -> bool:
        """Whether the saved optimizer had the parameter, and states: then some are stored, or were lost since."""
        if self._stepped is None:
            names = frozenset(name for model in self.offered.models for group in model.groups for name in group)
            self._stepped = names if any(self.offered.state_names(name) for name in names) else frozenset()
        return live.universal in self._stepped

    def check_part(self, live: LiveParam, state: str, start: int, numel: int) -> bool:
        """Whether these elements can be taken; what is wrong with them is noted, and how many bytes they are."""
        try:
            part = self.offered.part(live, state, start, numel)
        except AffineError as fault:
            self.faults.add(fault)
            return False
        if part is not None:
            self.report.bytes_read += part.nbytes
            if state == FP32 and part.covered < numel:
                self.report.padding[live.name] += numel - part.covered
        elif state != FP32:
            self.report.left(f"{state} of {live.name}", "is held scaled, and its states start from zero")
        return True


class PartitionLoad:
    """The load of one partition: ``check`` reads metadata alone, ``allocate`` makes states, ``copies`` fill them."""

    def __init__(self, partition: Partition, planning: Planning, with_states: bool) -> None:
        self.partition = partition
        self.planning = planning
        self.with_states = with_states
        self.options = _options(partition)
        self.kept = kept_states(partition.optimizer, self.options)
        self.states: dict[str, torch.dtype] = {}
        self.numbers: dict[str, Any] = {}
        self._taken: list[tuple[Fragment, LiveParam, str]] = []

    # ---------------------------------------------------------------- before anything is written

    def check(self) -> None:
        """What this partition will hold is settled, and everything that stands against it is noted."""
        for fragment in self.partition.fragments:
            live = self.planning.lives.get(fragment.name)
            if live is not None and self.planning.check_part(live, FP32, fragment.start, fragment.numel):
                self._taken.append((fragment, live, FP32))
        if not self.with_states:
            return
        for name in self._speaking():
            self._settle_numbers(self.planning.lives[name])
        for fragment in self.partition.fragments:
            live = self.planning.lives.get(fragment.name)
            if live is not None:
                self._check_states(fragment, live)
        for fragment in self.partition.whole:
            live = self.planning.lives.get(fragment.name)
            if live is not None:
                self._take_states(fragment, live, self.partition.is_whole)
        if self.states and keeps_factors(self.partition.optimizer, self.partition.tensor):
            self.planning.faults.add(
                UnsupportedLayoutError(
                    f"optimizer states of {', '.join(self.partition.members)}: are kept for every element in the "
                    f"checkpoint, and a {type(self.partition.optimizer).__name__} without ZeRO keeps them for rows and "
                    "columns; one does not follow from the other. Load with ZeRO, or say "
                    "load_optimizer_states=False.",
                    param=next(iter(self.partition.members), None),
                )
            )

    def _speaking(self) -> list[str]:
        """The parameters that say which states and which step the partition has: those in it, or, where it holds
        none of any, one of those it would hold some of with another number of ranks."""
        here = [fragment.name for fragment in (*self.partition.fragments, *self.partition.whole)]
        known = [name for name in dict.fromkeys(here) if name in self.planning.lives]
        if known or here:
            return known
        others = [name for name in self.partition.members if name in self.planning.lives]
        found = next((name for name in others if self._tensor_states(self.planning.lives[name])), None)
        if found is None:
            return []
        for state in self._tensor_states(self.planning.lives[found]):
            self._add(self.planning.lives[found], state)
        return [found]

    def _tensor_states(self, live: LiveParam) -> list[str]:
        numbers = self.planning.offered.numbers(live)
        return [state for state in self.planning.offered.state_names(live.universal) if state not in numbers]

    def _check_states(self, fragment: Fragment, live: LiveParam) -> None:
        planning, name = self.planning, live.name
        stored = self._tensor_states(live)
        wanted = self._wanted()
        if not stored and wanted.required and not planning.was_stepped(live):
            why = "the checkpoint has none for it: it was frozen, saved before the first step, or saved without ZeRO"
            planning.report.left(f"optimizer states of {name}", f"{why}. They start from zero")
            return
        for state in wanted.required:
            if state not in stored:
                self._lacks(live, state)
        for state in stored:
            if self.kept is not None and state not in self.kept:
                kind = type(self.partition.optimizer).__name__
                planning.strictness.has_more(
                    f"optimizer state {state!r} of {name}",
                    f"is in the checkpoint, and {kind} keeps no such state",
                    planning.faults,
                    planning.report,
                    param=name,
                )
        self._take_states(fragment, live, lambda state: not self.partition.is_whole(state))

    def _lacks(self, live: LiveParam, state: str) -> None:
        kind = type(self.partition.optimizer).__name__
        self.planning.strictness.lacks(
            f"optimizer state {state!r} of {live.name}",
            f"is kept by the engine's {kind}, and the checkpoint has none",
            self.planning.faults,
            self.planning.report,
            param=live.name,
        )

    def _wanted(self) -> Kept:
        """The states the optimizer cannot do without: by its class, or those it has already."""
        if self.kept is not None:
            return self.kept
        tensor = self.partition.tensor
        has = [name for name, value in self.partition.states.items() if getattr(value, "shape", None) == tensor.shape]
        return Kept(tuple(has) if tensor.dim() else ())

    def _take_states(self, fragment: Fragment, live: LiveParam, mine: Callable[[str], bool]) -> None:
        for state in self._tensor_states(live):
            if not mine(state) or (self.kept is not None and state not in self.kept):
                continue
            if self.planning.check_part(live, state, fragment.start, fragment.numel):
                self._add(live, state)
                self._taken.append((fragment, live, state))
                self.planning.report.states[state] += 1

    def _add(self, live: LiveParam, state: str) -> None:
        if self.kept is None or state in self.kept:
            self.states.setdefault(state, self.planning.offered.dtype(live, state))

    def _settle_numbers(self, live: LiveParam) -> None:
        """The partition's one number of each kind; the parameters in it must agree on it."""
        found = self.planning.offered.numbers(live)
        wants = self.kept.numbers if self.kept is not None else tuple(found)
        if not self._tensor_states(live) and not found:
            return
        for state in wants:
            value: Any = found.get(state)
            if value is None and state == STEP:
                value = self.planning.offered.group_step(live)
            if value is None:
                self._lacks(live, state)
                continue
            known = self.numbers.setdefault(state, value)
            if float(known) != float(value):
                self.planning.faults.add(
                    UnsupportedLayoutError(
                        f"parameter {live.name!r}: was saved at {state} {float(value):g} and others of its group at "
                        f"{float(known):g}; the engine's optimizer steps them as one tensor, with one {state}. Put "
                        "them in groups of their own, or say load_optimizer_states=False.",
                        param=live.name,
                    )
                )

    # ---------------------------------------------------------------- writing

    def allocate(self) -> None:
        """Every state the partition will have exists, zero, in the place DeepSpeed may already have links to."""
        import torch

        if not self.with_states:
            return
        partition, tensor = self.partition, self.partition.tensor
        if not self.states and not self.numbers and not partition.states:
            return
        entry = partition.optimizer.state[tensor]
        for state, value in entry.items():
            if torch.is_tensor(value) and value.dim() and state not in self.states:
                value.fill_(self.options.get(ACCUMULATOR, 0.0) if state == "sum" else 0.0)
        for state, stored in self.states.items():
            shape = self._shape(state)
            old = entry.get(state)
            if torch.is_tensor(old) and old.shape == shape:
                old.zero_()
            else:
                kind = state_dtype(partition.optimizer, tensor, stored)
                entry[state] = torch.zeros(shape, dtype=kind, device=tensor.device)
        self._complete(entry)
        self._write_numbers(entry)

    def _shape(self, state: str) -> tuple[int, ...]:
        partition = self.partition
        return (partition.whole_numel,) if partition.is_whole(state) else tuple(partition.tensor.shape)

    def _complete(self, entry: dict[str, Any]) -> None:
        """An optimizer that finds some of its states takes all of them to be there; those nobody had begin now."""
        import torch

        if self.kept is None:
            return
        tensor = self.partition.tensor
        for state in used_states(self.kept, self.options):
            if state not in entry:
                kind = state_dtype(self.partition.optimizer, tensor, tensor.dtype)
                value = self.options.get(ACCUMULATOR, 0.0) if state == "sum" else 0.0
                entry[state] = torch.full(self._shape(state), value, dtype=kind, device=tensor.device)
                if state not in self.kept.required:
                    self.planning.report.left(f"optimizer state {state!r}", "the checkpoint has none. It starts afresh")

    def _write_numbers(self, entry: dict[str, Any]) -> None:
        optimizer, tensor = self.partition.optimizer, self.partition.tensor
        known = self.kept.numbers if self.kept is not None else (STEP,) if STEP in entry and not self.numbers else ()
        for state, value in {**{state: first_number(state) for state in known}, **self.numbers}.items():
            if state == STEP and keeps_step_in_group(optimizer, self.options, entry):
                optimizer.param_groups[group_index(self.partition)][STEP] = int(value)
            else:
                entry[state] = number_in_form(optimizer, self.options, tensor, state, entry.get(state), value)

    def copies(self) -> Iterator[Copy]:
        """What is to be read into the weights and states, which exist now."""
        for fragment, live, state in self._taken:
            tensor = self.partition.tensor
            if state != FP32:
                tensor = self.partition.optimizer.state[tensor][state]
            yield Copy(live, state, fragment.start, fragment.of(tensor))


class DirectLoad:
    """The load of a parameter that no optimizer steps: frozen, or in none of its groups."""

    def __init__(self, param: Any, live: LiveParam, planning: Planning) -> None:
        import torch.distributed as dist

        self.param = param
        self.live = live
        self.planning = planning
        partitioned = hasattr(param, "ds_tensor")
        self.start, self.numel = zero3_part(param, dist) if partitioned else (0, int(param.numel()))
        self.place: torch.Tensor = param.ds_tensor if partitioned else param

    def check(self) -> None:
        """Its weights fit; states that were saved for it are reported, since nothing takes them."""
        planning, live = self.planning, self.live
        planning.check_part(live, FP32, self.start, self.numel)
        if planning.offered.state_names(live.universal):
            planning.report.left(f"optimizer states of {live.name}", "no optimizer of the engine steps it")

    def copies(self) -> Iterator[Copy]:
        """What is to be read into it, in its own dtype."""
        if self.numel:
            yield Copy(self.live, FP32, self.start, self.place.data.view(-1).narrow(0, 0, self.numel))


def _options(partition: Partition) -> Mapping[str, Any]:
    groups = partition.optimizer.param_groups
    found: Mapping[str, Any] = groups[group_index(partition)] if groups else {}
    return found


def group_index(partition: Partition) -> int:
    """The group of the inner optimizer that steps the partition.

    DeepSpeed builds Adagrad anew with all partitions in one group, so that the number of the group is not enough.
    """
    groups = partition.optimizer.param_groups
    for at, group in enumerate(groups):
        if any(member is partition.tensor for member in group["params"]):
            return at
    return min(partition.group, len(groups) - 1)
