"""Optimizer states of a checkpoint saved without ZeRO: in its model-state file, by position and not by name.

A plain optimizer numbers the parameters it was given, and DeepSpeed's optimizers for half precision keep one flat
tensor a group. Both follow the order of the groups, so the engine's own say which is which, where every shape agrees.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.hooks.stored_params import FP32
from deepspeed_affine.storage.refs import TensorRef

if TYPE_CHECKING:
    from deepspeed_affine.hooks.layouts import LiveParam

__all__ = ["positional_states"]

Entry = dict[str, Any]


def positional_states(
    root: Mapping[str, Any], groups: Sequence[Sequence[LiveParam]], apart: Collection[str] = ()
) -> dict[str, Entry] | None:
    """By universal name the states, and master weights, of the parameters of ``groups``; None where groups of other
    numbers or shapes were saved. Empty where none were saved this way. A group with a parameter in ``apart`` is left
    out: what was saved in its place is another rank's. Raises UnsupportedLayoutError for a state of another kind."""
    saved = root.get("optimizer")
    if not isinstance(saved, Mapping):
        return {}
    inner = saved.get("optimizer_state_dict", saved)
    states = inner.get("state") if isinstance(inner, Mapping) else None
    cut = inner.get("param_groups") if isinstance(inner, Mapping) else None
    if not isinstance(states, Mapping) or not isinstance(cut, (list, tuple)):
        return {}
    numbers = [group.get("params") for group in cut if isinstance(group, Mapping)]
    if any(not isinstance(row, (list, tuple)) for row in numbers):
        return None
    # A group of frozen parameters alone was given to the optimizer and never stepped: it holds nothing.
    stepped = [at for at, row in enumerate(numbers) if not states or any(number in states for number in row or ())]
    groups = [members for members in groups if members]
    if len(stepped) != len(groups):
        return None
    flat, each = (_of_groups(saved.get(key), len(numbers)) for key in ("fp32_groups_flat", "fp32_groups"))
    found: dict[str, Entry] = {}
    for at, members in zip(stepped, groups, strict=True):
        row = numbers[at]
        if any(live.universal in apart for live in members):
            continue
        entries: dict[str, Entry] | None
        if flat[at] is not None and len(row or ()) == 1:
            entries = _flat_group(members, flat[at], states.get((row or (0,))[0], {}))
        else:
            entries = _one_by_one(members, row or (), states, each[at])
        if entries is None:
            return None
        found.update(entries)
    return found


def _flat_group(members: Sequence[LiveParam], master: Any, states: Any) -> dict[str, Entry] | None:
    total = sum(prod(live.layout.logical_shape) for live in members)
    if not isinstance(master, TensorRef) or master.shape != (total,) or not isinstance(states, Mapping):
        return None
    found: dict[str, Entry] = {}
    start = 0
    for live in members:
        shape = live.layout.logical_shape
        entry = found[live.universal] = {FP32: _narrow(master, start, shape)}
        for state, value in states.items():
            whole = isinstance(value, TensorRef) and value.shape == master.shape
            entry[state] = _narrow(value, start, shape) if whole else value
        start += prod(shape)
    return found


def _of_groups(value: Any, count: int) -> Sequence[Any]:
    """The master weights of every group, None where they were not kept this way."""
    return value if isinstance(value, (list, tuple)) and len(value) == count else [None] * count


def _one_by_one(
    members: Sequence[LiveParam], row: Sequence[Any], states: Mapping[Any, Any], masters: Any
) -> dict[str, Entry] | None:
    if len(row) != len(members):
        # Frozen parameters may have been given to the optimizer too; they have no states.
        row = [number for number in row if number in states]
    if len(row) != len(members):
        return None
    found: dict[str, Entry] = {}
    kept = masters if isinstance(masters, (list, tuple)) and len(masters) == len(members) else [None] * len(members)
    for live, number, master in zip(members, row, kept, strict=True):
        entry = {**(states.get(number) or {}), FP32: master}
        for state, value in entry.items():
            if isinstance(value, TensorRef) and value.shape and value.shape != live.layout.logical_shape:
                return None
            if not isinstance(value, (TensorRef, bool, int, float, type(None))):
                raise UnsupportedLayoutError(
                    f"optimizer state {state!r} of {live.name}: is a {type(value).__name__} in the checkpoint; "
                    "expected a tensor or a number. Say load_optimizer_states=False, or keep it out of the states.",
                    param=live.name,
                )
        found[live.universal] = {state: value for state, value in entry.items() if value is not None}
    return found


def _narrow(tensor: TensorRef, start: int, shape: tuple[int, ...]) -> TensorRef:
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return replace(tensor, offset=tensor.offset + start, shape=shape, strides=strides)
