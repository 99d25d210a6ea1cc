"""Restore methods for one engine's parameters and optimizer, where DeepSpeed's own loader calls them by name.

The loader asks each parameter (ZeRO-1, ZeRO-2, BF16_Optimizer) or the optimizer (ZeRO-3) for this rank's part of a
universal folder. These answer from the target's own map instead of from entries stored beside F. Versions pass
different arguments after the folder; what a version does not pass is known here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import AffineError, InvalidMapError
from deepspeed_affine.hooks.optimizers import zero3_part
from deepspeed_affine.hooks.state_forms import number_in_form
from deepspeed_affine.hooks.stored_params import FP32, STEP, StoredParams
from deepspeed_affine.lowering.policy import ScaledStates

if TYPE_CHECKING:
    import torch

    from deepspeed_affine.hooks.instances import Instances
    from deepspeed_affine.hooks.layouts import LiveParam

__all__ = ["HOOK", "Restorer"]

HOOK = "load_hp_checkpoint_state"
"""The name of the method DeepSpeed calls, on a parameter or on the ZeRO-3 optimizer."""


class Restorer:
    """Fills one engine's master weights and optimizer states from a universal folder."""

    def __init__(
        self,
        engine: Any,
        params: Mapping[str, LiveParam],
        refused: Mapping[str, AffineError],
        scaled_states: ScaledStates,
    ) -> None:
        self.optimizer = engine.optimizer
        self.refused = refused
        self.scaled_states = scaled_states
        # Under ZeRO-3 before 0.19.4 a folder is all the hook is given.
        self._named = dict(engine.module.named_parameters())
        self._live = {id(param): params[name] for name, param in self._named.items() if name in params}
        self._source: StoredParams | None = None

    @property
    def is_stage3(self) -> bool:
        return hasattr(self.optimizer, "fp32_partitioned_groups_flat")

    @property
    def groups(self) -> list[list[torch.nn.Parameter]]:
        """The low-precision parameters of every parameter group; under ZeRO-3 of every sub-group."""
        for name in ("fp16_groups", "bit16_groups", "bf16_groups"):
            found = getattr(self.optimizer, name, None)
            if found is not None:
                return [list(group) for group in found]
        return []

    def bind(self, instances: Instances) -> None:
        """Every parameter of the optimizer, or the ZeRO-3 optimizer itself, answers DeepSpeed's loader from here on."""
        if self.is_stage3:
            instances.put(self.optimizer, HOOK, MethodType(self._restore_partition, self.optimizer))
            return
        for group in self.groups:
            for param in group:
                instances.put(param, HOOK, MethodType(self._restore_fragment, param))

    def live(self, param: Any) -> LiveParam:
        """How ``param`` is cut, or why that is not known; InvalidMapError for one that the model did not have."""
        found = self._live.get(id(param))
        if found is None:
            name = next((name for name, each in self._named.items() if each is param), "?")
            if name in self.refused:
                raise self.refused[name]
            raise InvalidMapError(
                f"parameter {name!r}: the model did not have it when deepspeed_affine was attached. Detach, and attach "
                "again after the last change to the model.",
                param=name,
            )
        return found

    def source(self, zero: str) -> StoredParams:
        """The universal folder whose ``zero`` folder this is; what was known of another one is forgotten."""
        if self._source is None or self._source.zero != zero:
            self.forget()
            self._source = StoredParams(zero, self.scaled_states)
        return self._source

    def forget(self) -> None:
        """After this no file of a universal folder is open."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def flat(self, group: int) -> torch.Tensor:
        """The tensor of master weights the inner optimizer steps for parameter group ``group``: its states' key too."""
        found: torch.Tensor = self.optimizer.optimizer.param_groups[group]["params"][0]
        return found

    def link(self) -> None:
        """Every fragment's links lead to its own master weights and states again, every ZeRO-3 sub-group counts alone.

        Before 0.19.8 DeepSpeed leaves the link to the weights on the last moment it read, and those to the moments on
        copies that no step updates. Its ZeRO-3 loader gives all sub-groups one tensor as their step, which every one
        of them then increments.
        """
        if self.is_stage3:
            for index, flat in enumerate(self.optimizer.fp32_partitioned_groups_flat):
                state = self.optimizer.optimizer.state.get(flat, {})
                if STEP in state:
                    group = self.optimizer.sub_group_to_group_id[index]
                    state[STEP] = self._number(group, flat, STEP, state[STEP])
            return
        for group in self.groups:
            for param in group:
                mapping = getattr(param, "_hp_mapping", None)
                if mapping is None:
                    continue
                flat = self.flat(mapping.param_group_index)
                mapping.hp_fragment = _part_of(flat, mapping)
                states = self.optimizer.optimizer.state.get(flat)
                if states:
                    mapping.set_optim_state_fragment(flat, states)

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """While this lasts, a parameter group of which this rank holds nothing has one fragment of no elements.

        DeepSpeed takes a group's step and the names of its states from the fragments it fills, and stops at a group
        without any. Such a rank needs both as the others do.
        """
        from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment

        added = []
        if not self.is_stage3:
            for index, group in enumerate(self.groups):
                if group and all(getattr(param, "_hp_mapping", None) is None for param in group):
                    param = max(group, key=lambda each: each.numel())
                    nothing = fragment_address(numel=0, start=0)
                    param._hp_mapping = tensor_fragment(  # type: ignore[attr-defined]
                        lp_fragment=param.detach().view(-1).narrow(0, 0, 0),
                        lp_fragment_address=nothing,
                        hp_fragment=self.flat(index).detach().narrow(0, 0, 0),
                        hp_fragment_address=nothing,
                        gradient_dict={},
                        offload_gradient_dict={},
                        use_offload=False,
                        param_group_index=index,
                    )
                    added.append(param)
        try:
            yield
        finally:
            for param in added:
                param._hp_mapping = None  # type: ignore[attr-defined]

    def _restore_fragment(self, param: Any, folder: str, *args: Any, **kwargs: Any) -> Any:
        """The fragment of ``param`` this rank holds is filled; returns the step, None where none is stored."""
        import torch

        live = self.live(param)
        stored = self.source(_zero_of(folder, live.name))
        mapping = param._hp_mapping
        start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        flat = self.flat(mapping.param_group_index)
        mapping.hp_fragment = _part_of(flat, mapping)
        mapping.optim_fragment = {}
        step = None
        for state in stored.states(live):
            value = stored.number(live, state)
            if value is not None:
                value = self._number(mapping.param_group_index, flat, state, value)
            if state == STEP:
                step = value
            elif value is not None:
                # One number for the whole group, which the loader has no word for.
                self.optimizer.optimizer.state[flat][state] = value
            elif state == FP32:
                stored.fill(live, state, start, mapping.hp_fragment)
            else:
                values = torch.empty(numel, dtype=stored.dtype(live, state), device=flat.device)
                stored.fill(live, state, start, values)
                mapping.optim_fragment[state] = values
        return step

    def _restore_partition(
        self, optimizer: Any, folder: str, key: str, param: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """This rank's ZeRO-3 partition of state ``key``, its padding zero."""
        import torch
        from deepspeed import comm

        if param is None:
            param = self._param_of(folder)
        live = self.live(param)
        stored = self.source(_zero_of(folder, live.name))
        partition = torch.zeros(param.partition_numel(), dtype=stored.dtype(live, key))
        start, held = zero3_part(param, comm)
        if held > 0:
            stored.fill(live, key, start, partition[:held])
        return partition

    def _number(self, group: int, flat: torch.Tensor, state: str, value: Any) -> Any:
        """A new ``value`` in the form in which the inner optimizer keeps that state."""
        import torch

        inner = self.optimizer.optimizer
        old = inner.state.get(flat, {}).get(state)
        return number_in_form(
            inner, inner.param_groups[group], flat, state, None if torch.is_tensor(old) else old, value
        )

    def _param_of(self, folder: str) -> Any:
        at = folder.find(os.sep)
        while at >= 0:
            found = self._named.get(folder[at + 1 :])
            if found is not None:
                return found
            at = folder.find(os.sep, at + 1)
        raise InvalidMapError(
            f"{folder}: is no folder of a parameter this model has. The checkpoint is of another model, or the model "
            "changed since deepspeed_affine was attached: detach, and attach again."
        )


def _part_of(flat: torch.Tensor, mapping: Any) -> torch.Tensor:
    return flat.detach().narrow(0, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)


def _zero_of(folder: str, name: str) -> str:
    """The folder of all parameters, given one parameter's; a name is data and may itself hold separators."""
    suffix = os.sep + name
    return folder[: -len(suffix)] if folder.endswith(suffix) else os.path.dirname(folder)
