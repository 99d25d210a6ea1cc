"""DeepSpeed's optimizer dictionaries, read as stored fragments of named parameters.

Input is the object graph of an ``*_optim_states.pt`` file, in which tensors are descriptions of stored tensors
and classes may be inert stand-ins. Output is a table: for every parameter, every state it really has, and for
every shard the fragments that make it up. Whatever states an optimizer keeps are carried under their own names;
none is assumed to exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, UnsupportedLayoutError
from deepspeed_affine.lowering.reading import as_count, as_mapping, as_stored, refuse, shape_numel
from deepspeed_affine.lowering.state_table import ParamStates, Place, ShardKey, StateTable, StoredScalar
from deepspeed_affine.lowering.turns import as_dealt
from deepspeed_affine.lowering.zero import Fragment, zero3_interval

__all__ = [
    "ParamStates",
    "Place",
    "ShardKey",
    "StateTable",
    "StoredScalar",
    "read_zero3",
    "read_zero12",
    "shape_numel",
]

FP32 = "fp32"
MUON_STATE = "momentum_buffer"


def read_zero12(
    table: StateTable,
    optimizer: Mapping[str, Any],
    place: Callable[[str], Place],
    shapes: Mapping[str, Any],
    *,
    file: str,
    turns: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Every slice that one ZeRO-1, ZeRO-2 or BF16_Optimizer file records is in ``table``.

    A slice is an interval of its group's flat partition. Padding between and after parameters lies in no slice.
    A Muon group may instead keep its momentum whole for every parameter that touches the partition, one after
    the other without padding; ``shapes`` (the shard shapes of this rank) says how long each is. ``turns`` has the
    shard shapes of every group in the order in which they lie, where the run had ``round_robin_gradients``.
    """
    mappings = _required(optimizer, "param_slice_mappings", list, file)
    masters = [
        as_stored(master, "an entry of 'single_partition_of_fp32_groups'", file, dimensions=1)
        for master in _required(optimizer, "single_partition_of_fp32_groups", list, file)
    ]
    states = _group_states(optimizer, file)
    if len(masters) != len(mappings):
        raise CheckpointFormatError(
            f"{file}: {len(mappings)} parameter groups have slice mappings but {len(masters)} have fp32 partitions; "
            "both must list every group. The file is damaged: use another checkpoint.",
            file=file,
        )
    partitions = _partition_lengths(optimizer, masters, file)
    for group, mapping in enumerate(mappings):
        group_state = states(group)
        if not group_state:
            table.stateless_groups.add(group)
        flat: dict[str, Any] = {FP32: masters[group], **group_state}
        slices = _slices(as_mapping(mapping, "an entry of 'param_slice_mappings'", file), file)
        if turns is not None and "zero_stage" in optimizer:
            # BF16_Optimizer, which records no stage, knows no turns.
            dealt = as_dealt(turns, optimizer, group, file)
            rank = next((place(name).rank for name in dealt.sizes), 0)
            slices = dealt.slices(slices, rank, max(partitions[group]), file=file)
        table.add_group(group, [place(name) for name, (_, numel) in slices.items() if numel], flat, file)
        whole = {
            state: offsets
            for state, value in flat.items()
            if state != FP32
            and _is_flat(value)
            and (offsets := _whole_offsets(state, value.shape[0], partitions[group], slices, shapes, file))
        }
        for name, (start, numel) in slices.items():
            at = place(name)
            for state, value in flat.items():
                if state in whole:
                    fragment = Fragment(value, whole[state][name], shape_numel(shapes[name]), at.rank)
                    table.add_whole(at, state, fragment, group)
                elif _is_flat(value):
                    # It may be longer than the weights: of some padding only the last rank's file says that it was cut.
                    table.add_fragment(at, state, Fragment(value, start, numel, at.rank), group)
                elif _is_scalar(value):
                    table.add_scalar(at, state, value, group, file)
                elif value is None:
                    table.empty_states.add(state)
                else:
                    raise _unmapped(name, state, value, file)


def read_zero3(
    table: StateTable,
    optimizer: Mapping[str, Any],
    param_shapes: Sequence[Mapping[str, Any]],
    place: Callable[[str], Place],
    dp_degree: int,
    *,
    file: str,
    model_file: str,
) -> None:
    """Every partition that one ZeRO-3 file stores is in ``table``.

    Sub-group ``i`` stores ``ceil(numel / count)`` elements of each of its parameters in turn; ``count`` and this
    rank's place come from the sub-group's partition record, or are the data-parallel degree and rank.
    """
    masters = [
        as_stored(master, "an entry of 'fp32_flat_groups'", file, dimensions=1)
        for master in _required(optimizer, "fp32_flat_groups", list, file)
    ]
    inner = _required(optimizer, "optimizer_state_dict", Mapping, file)
    states = _required(inner, "state", Mapping, file)
    partitions = _partitions(optimizer.get("ds_zero_partition_groups"), dp_degree, file)
    if len(masters) != len(param_shapes):
        raise CheckpointFormatError(
            f"{file}: {len(masters)} fp32 sub-groups are stored but {model_file} lists {len(param_shapes)}. The files "
            "come from different saves, or the optimizer was offloaded to NVMe.",
            file=file,
        )
    for index, shapes in enumerate(param_shapes):
        group_state = _group_state(states.get(index), index, file)
        if not group_state:
            table.stateless_groups.add(index)
        count, own_rank = partitions[index] if index < len(partitions) else (dp_degree, None)
        flat: dict[str, Any] = {FP32: masters[index], **group_state}
        table.add_group(index, [place(name) for name, shape in shapes.items() if shape_numel(shape)], flat, file)
        start = 0
        for name, shape in shapes.items():
            at = place(name)
            rank = at.rank if own_rank is None else own_rank
            held, reserved = zero3_interval(shape_numel(shape), count, rank)
            for state, value in flat.items():
                if _is_flat(value):
                    _require_no_more(name, state, value, masters[index].shape[0], file)
                    table.add_fragment(at, state, Fragment(value, start, held, rank), index)
                elif _is_scalar(value):
                    table.add_scalar(at, state, value, index, file)
                elif value is None:
                    table.empty_states.add(state)
                else:
                    raise _unmapped(name, state, value, file)
            start += reserved
        if masters[index].shape[0] != start:
            raise CheckpointFormatError(
                f"{file}: fp32 sub-group {index} holds {masters[index].shape[0]} elements; the recorded shapes of its "
                f"{len(shapes)} parameters need {start} on each of {count} ranks. The model-state and optimizer files "
                "come from different saves: take all of them from one.",
                file=file,
            )


def _partition_lengths(optimizer: Mapping[str, Any], masters: Sequence[Any], file: str) -> list[set[int]]:
    """The lengths a flat partition of each group may have: with and without the padding at its end."""
    paddings = optimizer.get("group_paddings") or []
    if not isinstance(paddings, (list, tuple)):
        raise refuse(file, "'group_paddings'", paddings, "a list with one number a group")
    lengths = []
    for group, master in enumerate(masters):
        length = master.shape[0]
        padding = as_count(paddings[group], "an entry of 'group_paddings'", file) if group < len(paddings) else 0
        lengths.append({length, length + padding})
    return lengths


def _partitions(records: Any, dp_degree: int, file: str) -> list[tuple[int, int | None]]:
    """For each sub-group into how many parts it is cut, and which of them the file holds if that is recorded."""
    if not isinstance(records or [], (list, tuple)):
        raise refuse(file, "'ds_zero_partition_groups'", records, "a list with one dictionary a sub-group")
    found: list[tuple[int, int | None]] = []
    for record in records or []:
        entry = as_mapping(record, "an entry of 'ds_zero_partition_groups'", file)
        rank = entry.get("partition_rank")
        count = as_count(entry.get("partition_count", dp_degree), "'partition_count' of a sub-group", file, least=1)
        own = rank if rank is None else as_count(rank, "'partition_rank' of a sub-group", file)
        if own is not None and own >= count:
            raise refuse(file, "'partition_rank' of a sub-group", own, f"a number below its 'partition_count' {count}")
        found.append((count, own))
    return found


def _group_state(value: Any, group: int, file: str) -> Mapping[str, Any]:
    """The optimizer's states of one group; empty before the first step."""
    if value is None:
        return {}
    states = as_mapping(value, f"the optimizer's state of group {group}", file)
    if FP32 in states:
        raise UnsupportedLayoutError(
            f"{file}: the optimizer calls one of its states {FP32!r}, which is the file name of the weights. Rename "
            "the state in the optimizer, and save again.",
            file=file,
        )
    return states


def _whole_offsets(
    state: str,
    stored: int,
    partition: set[int],
    slices: Mapping[str, tuple[int, int]],
    shapes: Mapping[str, Any],
    file: str,
) -> dict[str, int] | None:
    """Where each parameter starts in a state kept whole per parameter, or None for an ordinary flat partition.

    Told apart by length: a flat partition is as long as the group's fp32 partition, a whole-parameter buffer as
    long as all parameters that touch the partition together.
    """
    if (stored in partition and state != MUON_STATE) or any(name not in shapes for name in slices):
        return None
    offsets: dict[str, int] = {}
    total = 0
    for name in sorted(slices, key=lambda key: slices[key][0]):
        offsets[name] = total
        total += shape_numel(shapes[name])
    same = all(offsets[name] == start and shape_numel(shapes[name]) == numel for name, (start, numel) in slices.items())
    if same or stored != total:
        return None
    if stored in partition:
        raise UnsupportedLayoutError(
            f"{file}: optimizer state {state!r} has {stored} elements, which is the length both of its partition and "
            "of its parameters together, so its layout cannot be told from the file. Save with another data-parallel "
            "degree and convert that.",
            file=file,
        )
    return offsets


def _group_states(optimizer: Mapping[str, Any], file: str) -> Callable[[int], Mapping[str, Any]]:
    base = optimizer.get("base_optimizer_state")
    if isinstance(base, list):
        raise UnsupportedLayoutError(
            f"{file}: saved with elastic_checkpoint, which keeps no parameter groups, so a universal checkpoint would "
            "lose every hyperparameter. Load it in DeepSpeed, set elastic_checkpoint to false and save again.",
            file=file,
        )
    if isinstance(base, Mapping) and isinstance(base.get("state"), Mapping):
        states = base["state"]
        return lambda group: _group_state(states.get(group), group, file)
    raise CheckpointFormatError(
        f"{file}: 'base_optimizer_state' is {type(base).__name__}; a dictionary with 'state' is "
        "expected. Not an optimizer file of ZeRO stage 1 or 2, or a damaged one.",
        file=file,
    )


def _required(mapping: Mapping[str, Any], key: str, kind: type, file: str) -> Any:
    value = mapping.get(key)
    if not isinstance(value, kind):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise CheckpointFormatError(
            f"{file}: {key!r} is {found}; a {kind.__name__.lower()} is expected. The file was not written by a "
            "DeepSpeed ZeRO optimizer of 0.16 or later, or it is damaged.",
            file=file,
        )
    return value


def _slices(mapping: Mapping[str, Any], file: str) -> dict[str, tuple[int, int]]:
    """Where each parameter's slice lies in its group's partition; no element is in two slices."""
    slices = {name: _slice(address, name, file) for name, address in mapping.items()}
    reached, before = 0, ""
    for name, (start, numel) in sorted(slices.items(), key=lambda item: item[1]):
        if numel and start < reached:
            raise CheckpointFormatError(
                f"{file}: the slices of parameters {before!r} and {name!r} overlap at element {start} of their "
                "partition; every element belongs to one. The slice table is damaged: use another checkpoint.",
                param=name,
                file=file,
            )
        if numel:
            reached, before = start + numel, name
    return slices


def _slice(address: Any, name: str, file: str) -> tuple[int, int]:
    start, numel = getattr(address, "start", None), getattr(address, "numel", None)
    if type(start) is not int or type(numel) is not int or start < 0 or numel < 0:
        found = address if start is None else f"{numel!r} elements from {start!r} on"
        raise CheckpointFormatError(
            f"{file}: the slice of parameter {name!r} is {found}; a start and a number of elements are "
            "expected. The file is damaged: use another checkpoint.",
            param=name,
            file=file,
        )
    return start, numel


def _is_flat(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) == 1


def _is_scalar(value: Any) -> bool:
    if isinstance(value, (bool, int, float)):
        return True
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and not shape


def _require_no_more(name: str, state: str, value: Any, most: int, file: str) -> None:
    """What lies behind the partition's elements would be lost without a word."""
    if value.shape[0] > most:
        raise UnsupportedLayoutError(
            f"parameter {name!r}: optimizer state {state!r} has {value.shape[0]} elements in {file}, and its partition "
            f"has {most}; one each is expected, so it cannot be placed in the full tensor. Convert with an optimizer "
            "that keeps element-wise states, or drop this state before saving.",
            param=name,
            file=file,
        )


def _unmapped(name: str, state: str, value: Any, file: str) -> UnsupportedLayoutError:
    shape = getattr(value, "shape", None)
    found = f"a tensor of shape {tuple(shape)}" if isinstance(shape, tuple) else f"a {type(value).__name__}"
    return UnsupportedLayoutError(
        f"parameter {name!r}: optimizer state {state!r} is {found} in {file}; a flat partition or a number is "
        "expected, so its elements cannot be placed in the full tensor. Convert with an optimizer that keeps "
        "element-wise states, or drop this state before saving.",
        param=name,
        file=file,
    )
