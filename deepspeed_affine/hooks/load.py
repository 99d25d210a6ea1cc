"""Restoring a live engine from a universal checkpoint, whatever topology, ZeRO stage or optimizer it was saved with.

DeepSpeed's own loading is not used. Everything is looked at first, on all ranks together, and nothing is written
before every rank has found that the checkpoint fits. Then each rank reads the bytes its own fragments need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed_affine.errors import AffineError, Faults, PolicyError
from deepspeed_affine.hooks.agreement import together, union_of_names
from deepspeed_affine.hooks.buffers import BufferLoad
from deepspeed_affine.hooks.given import require_engine, require_info, require_threads
from deepspeed_affine.hooks.globals import Globals, place_of, plan_globals
from deepspeed_affine.hooks.layouts import LiveParam, described
from deepspeed_affine.hooks.matching import Matching, aliases_of, match_params, of_another_model
from deepspeed_affine.hooks.offered import LOST, Offered
from deepspeed_affine.hooks.optimizers import Partition, inner_optimizer, partitions
from deepspeed_affine.hooks.param_groups import (
    GroupPlan,
    foreign_options,
    in_saved_order,
    match_groups,
    take_hyperparameters,
)
from deepspeed_affine.hooks.partition_load import Copy, DirectLoad, PartitionLoad, Planning, group_index
from deepspeed_affine.hooks.policies import Strictness, first_line
from deepspeed_affine.hooks.refresh import after_writing, before_writing
from deepspeed_affine.hooks.report import LoadReport, Reporting
from deepspeed_affine.hooks.sources import open_checkpoint
from deepspeed_affine.hooks.state_forms import kept_states
from deepspeed_affine.hooks.suspect import check_order
from deepspeed_affine.hooks.topology import is_partitioned_layer, tensor_parallel_of
from deepspeed_affine.hooks.torch_modes import usual_modes
from deepspeed_affine.hooks.wholeness import check_agreed
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.policy import ScaledStates

__all__ = ["load_checkpoint"]

CHUNK_ELEMENTS = 1 << 24
"""The most that one thread reads at a time; what a device other than the CPU needs is held that long."""


@usual_modes()
def load_checkpoint(
    engine: Any,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    missing: str = "raise",
    unexpected: str = "raise",
    scaled_states: str = "refuse",
    info: Mapping[str, Any] | None = None,
    threads: int = 4,
    check_replicas: bool = False,
) -> LoadReport:
    """``engine`` continues where the checkpoint ``load_dir/tag`` was saved; the report says what it took.

    Weights, optimizer states, steps, every parameter group's hyperparameters, scheduler, loss scaler, counters, client
    state, frozen parameters and buffers, into any topology and ZeRO stage. The checkpoint is a universal folder or one
    as an engine saves it: then each rank reads its part of every file, and nothing is converted. Without ``tag`` it is
    the one that ``latest`` names, else ``latest_universal`` (first, where the engine's configuration says
    ``load_universal``), or ``load_dir`` itself.

    ``missing`` and ``unexpected`` say what becomes of parameters, buffers and states that only the engine or only the
    checkpoint has: "raise", "warn" or "ignore". ``scaled_states`` is for states of parameters held scaled: "refuse",
    "reset" or "power". ``info`` is the ``universal_checkpoint_info`` of a model whose layers were cut by hand; by
    default the module's own attribute, or what the checkpoint was saved with. One saved without is read by it too.
    ``check_replicas`` compares what several ranks saved a copy of, as a conversion does, and reads all of it for that.

    Every rank calls it. Where any rank finds a fault, every rank raises one error listing the faults of all, and the
    engine is unchanged. Memory beyond the engine's is one chunk a thread; ``threads`` read at once.
    """
    with together(str(load_dir)):
        require_engine(engine, "load_checkpoint")
        require_info(info, "load_checkpoint")
        require_threads(threads)
        strictness = Strictness(missing, unexpected)
        policy = _scaled_policy(scaled_states)
        offered, identity = open_checkpoint(engine, load_dir, tag, policy, info)
        path = offered.folder.path
        cut = partitions(engine)
    options = {
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "scaled_states": scaled_states,
        "info": info if info is None else "given",
        "check_replicas": check_replicas,
    }
    check_agreed(path, identity, options)
    try:
        report = Reporting(path)
        with_states = load_optimizer_states and not load_module_only
        load = _Load(engine, offered, strictness, report, cut, with_states, check_replicas)
        load.describe(info)
        with together(path, partial(first_line, path)) as faults:
            load.check(faults)
            beside = plan_globals(
                engine,
                offered,
                report,
                with_optimizer=with_states,
                with_scheduler=load_lr_scheduler_states,
                with_module_only=load_module_only,
                groups_in_order=load.keeps_order,
            )
        load.write(threads, beside)
    finally:
        offered.close()
    return report.finished(beside.client_state)


def _scaled_policy(word: str) -> ScaledStates:
    try:
        return ScaledStates(word)
    except ValueError:
        words = ", ".join(repr(policy.value) for policy in ScaledStates)
        raise PolicyError(f"scaled_states is {word!r}; expected one of {words}.") from None


@dataclass(slots=True)
class _Load:
    """One load in the making."""

    engine: Any
    offered: Offered
    strictness: Strictness
    report: Reporting
    cut: Sequence[Partition]
    with_states: bool
    check_replicas: bool
    lives: Mapping[str, LiveParam] = None  # type: ignore[assignment]
    refused: Sequence[AffineError] = ()
    known: set[str] = None  # type: ignore[assignment]
    parts: Sequence[PartitionLoad] = ()
    direct: Sequence[DirectLoad] = ()
    buffers: Sequence[BufferLoad] = ()
    groups: Sequence[GroupPlan] = ()

    # ---------------------------------------------------------------- before anything is written

    def describe(self, info: Mapping[str, Any] | None) -> None:
        """How every parameter is cut is known, and what any rank's model has; collectives, which all ranks enter."""
        found, refused = described(self.engine.module, info=self._info(info), mpu=self.engine.mpu)
        self.lives, self.refused = found, list(refused.values())
        aliases = aliases_of(self.engine.module)
        names = {live.universal for live in found.values()}
        names.update(name for group in aliases.values() for name in group)
        names.update(name for name, _ in self.engine.module.named_buffers(remove_duplicate=False))
        self.known = union_of_names(names)

    def _info(self, info: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if info is not None:
            return info
        module = self.engine.module
        own = getattr(module, "universal_checkpoint_info", None)
        if isinstance(own, Mapping):
            return own
        saved = self.offered.info
        if saved is None or tensor_parallel_of(module, self.engine.mpu).degree == 1:
            return None
        if any(is_partitioned_layer(layer) for layer in module.modules()):
            return None
        # Patterns go by name and hold at any degree; a map is of the degree that was saved.
        return {key: value for key, value in saved.items() if key != keys.AFFINE_MAP}

    def check(self, faults: Faults) -> None:
        """What will be written is settled; everything that stands against it is in ``faults``."""
        faults.extend(self.refused)
        check_order(self.offered, faults)
        if self.known.isdisjoint(self.offered.names):
            faults.add(of_another_model(self.report.path, self.known, self.offered.names))
            return
        if self.check_replicas:
            self.offered.check_copies(self.known, faults)
        matching = match_params(self.lives, aliases_of(self.engine.module), self.known, self.offered)
        self._one_sided(matching, faults)
        if self.with_states:
            for what, why in self.offered.place(self._groups(matching.taken)).items():
                if what == LOST:
                    self.strictness.lacks(what, why, faults, self.report)
                else:
                    self.report.left(what, why)
        if self.offered.by_position:
            self.report.restored.append("optimizer states by position (saved without ZeRO, they have no names)")
        self.report.weights = dict.fromkeys(matching.taken)
        planning = Planning(self.offered, matching.taken, self.strictness, faults, self.report)
        self.parts = [PartitionLoad(partition, planning, self.with_states) for partition in self.cut]
        stepped = {name for partition in self.cut for name in partition.members}
        parameters = dict(self.engine.module.named_parameters())
        self.direct = [
            DirectLoad(parameters[name], live, planning) for name, live in matching.taken.items() if name not in stepped
        ]
        for part in self.parts:
            part.check()
        for load in self.direct:
            load.check()
        self.buffers = list(
            BufferLoad.all_of(self.engine.module, planning, self.offered.own_module(*place_of(self.engine)))
        )
        if self.with_states:
            self._match_groups(faults)

    def _groups(self, taken: Mapping[str, LiveParam]) -> list[list[LiveParam]]:
        """The parameters of every group, in the order in which an optimizer without ZeRO would number them."""
        groups: dict[int, dict[str, LiveParam]] = {}
        for partition in self.cut:
            row = groups.setdefault(partition.group, {})
            row.update((name, taken[name]) for name in partition.members if name in taken)
        return [list(groups[at].values()) for at in sorted(groups)]

    def _one_sided(self, matching: Matching, faults: Faults) -> None:
        for name, why in matching.missing.items():
            self.strictness.lacks(f"parameter {name}", why, faults, self.report, param=name)
        for name, why in matching.unexpected.items():
            self.strictness.has_more(f"parameter {name}", why, faults, self.report, param=name)
        self.report.restored += matching.untied

    def _match_groups(self, faults: Faults) -> None:
        optimizer = inner_optimizer(self.engine)
        groups = getattr(optimizer, "param_groups", None)
        if not groups:
            return
        if not self.offered.param_groups:
            self.report.left("hyperparameters", "the checkpoint holds none")
            return
        self._compare_options(optimizer, groups, faults)
        try:
            self.offered.check_hyperparameters()
            self.groups = match_groups(groups, self._members(), self.offered.param_groups, self.offered.group_names)
        except AffineError as fault:
            faults.add(fault)

    def _members(self) -> list[set[str]]:
        """The parameters of every group of the engine, under the names they may have been saved by."""
        members: list[set[str]] = [set() for _ in getattr(inner_optimizer(self.engine), "param_groups", None) or ()]
        for partition in self.cut:
            for name in partition.members:
                live = self.lives.get(name)
                members[group_index(partition)] |= {name, live.universal if live is not None else name}
        return members

    @property
    def keeps_order(self) -> bool:
        """Whether the engine's groups continue the saved ones one by one."""
        return in_saved_order(self._members(), self.offered.group_names)

    def _compare_options(self, optimizer: Any, groups: Sequence[Mapping[str, Any]], faults: Faults) -> None:
        """Of an optimizer whose states are not known by its class, its options say whether another was saved."""
        if all(kept_states(optimizer, group) is not None for group in groups):
            return
        foreign = foreign_options(groups, self.offered.param_groups)
        if foreign:
            self.strictness.has_more(
                f"options {', '.join(foreign)} of the optimizer that was saved",
                f"are none of the engine's {type(optimizer).__name__}, whose states are not known here: those in the "
                "checkpoint may be another optimizer's",
                faults,
                self.report,
            )

    # ---------------------------------------------------------------- writing

    def write(self, threads: int, beside: Globals) -> None:
        """The engine holds what was settled. A rank that cannot read ends all of them, with the engine half loaded."""
        import torch

        path = self.report.path
        with together(path, partial(_half_loaded, path)), torch.no_grad():
            before_writing(self.engine)
            if self.groups:
                # Which states are needed depends on them.
                take_hyperparameters(inner_optimizer(self.engine).param_groups, self.groups, self.report)
            for part in self.parts:
                part.allocate()
            copies = [copy for part in self.parts for copy in part.copies()]
            copies += [copy for load in self.direct for copy in load.copies()]
            with ThreadPoolExecutor(max(1, threads)) as pool:
                for _ in pool.map(self._fill, _chunks(copies)):
                    pass
            for buffer in self.buffers:
                buffer.write()
        with together(path, partial(_half_loaded, path)):
            after_writing(self.engine, self.cut)
            beside.apply(self.engine, self.report)

    def _fill(self, copy: Copy) -> None:
        self.offered.fill(copy.live, copy.state, copy.start, copy.out)


def _half_loaded(path: str, faults: Sequence[AffineError]) -> str:
    return f"{path} was loaded in part, and the engine is of no use before it is loaded again: {len(faults)} fault(s)."


def _chunks(copies: Sequence[Copy]) -> Iterator[Copy]:
    for copy in copies:
        numel = copy.out.numel()
        for at in range(0, numel, CHUNK_ELEMENTS):
            count = min(CHUNK_ELEMENTS, numel - at)
            yield Copy(copy.live, copy.state, copy.start + at, copy.out.narrow(0, at, count))
