"""Convert-path lowering: DeepSpeed's name patterns and the recorded shard shapes, turned into one map.

The order in which the patterns are asked is that of DeepSpeed's converter, and so is which pattern counts as
used; the answer is geometry and no longer depends on what the parameter means. Ranks of the map are TP indices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, contiguous_split_map, replicated_map, sub_param_map
from deepspeed_affine.ir.ints import as_extents
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.categories import categorise
from deepspeed_affine.lowering.lowered import Category, LoweredParam, Rule
from deepspeed_affine.lowering.reading import naming
from deepspeed_affine.lowering.sub_params import resolve_sub_params
from deepspeed_affine.lowering.uc_info import UcInfo

__all__ = ["lower_param", "unused_patterns"]

Shape = tuple[int, ...]


def lower_param(
    info: UcInfo | Mapping[str, Any],
    name: str,
    shapes: Sequence[Sequence[int] | None],
    tp_degree: int | None = None,
) -> LoweredParam:
    """The canonical, validated map of ``name`` and everything else its metadata decides.

    ``shapes[r]`` is the recorded shape of tp rank r's shard, or None where no file records one (a stored map then
    supplies it). Metadata that contradicts itself or the shapes raises; so does a layout nothing describes.
    """
    info = info if isinstance(info, UcInfo) else UcInfo.parse(info)
    degree = len(shapes) if tp_degree is None else tp_degree
    if len(shapes) != degree or not shapes:
        raise CheckpointFormatError(
            f"Parameter {name}: {len(shapes)} shard shapes for {degree} tp ranks; expected one for each.", param=name
        )
    with naming(name):
        recorded = [None if shape is None else as_extents(shape, "A recorded shard shape") for shape in shapes]
    found = info.affine_map(name)
    category = categorise(info, name, superseded=found is not None)
    rule, pattern = category.rule, category.pattern
    if found is not None:
        key, stored = found
        param_map = _checked_map(name, key, stored, recorded)
        rule, pattern = Rule.AFFINE_MAP, key
        view = None
    else:
        reason = info.unsupported_reason(name)
        if reason is not None:
            raise UnsupportedLayoutError(
                f"Parameter {name}: {keys.UNSUPPORTED} lists it ({reason}), and no affine_map describes it. Save the "
                "checkpoint with a map of this parameter (deepspeed_affine's hooks write one), or probe its "
                "partition function.",
                param=name,
            )
        with naming(name):
            param_map, view = _from_category(info, category, name, _complete(name, recorded))
    with naming(name):
        param_map = _proved(param_map)
    truncate_rows, notes = _vocabulary(info, category, name, param_map.logical_shape)
    return LoweredParam(
        name=name,
        map=param_map,
        rule=rule,
        pattern=pattern,
        category=category,
        truncate_rows=truncate_rows,
        stored_sub_param_shape=view,
        map_seen_by_stock=found is not None and info.maps_under_params,
        notes=notes,
    )


def unused_patterns(info: UcInfo, lowered: Iterable[LoweredParam]) -> tuple[str, ...]:
    """The patterns that decided nothing about any of ``lowered``, sorted: usually a typing error in one of them."""
    unused = set(info.category_patterns())
    for param in lowered:
        unused.difference_update(param.category.used)
    return tuple(sorted(unused))


def _complete(name: str, recorded: Sequence[Shape | None]) -> list[Shape]:
    missing = [rank for rank, shape in enumerate(recorded) if shape is None]
    if missing:
        raise CheckpointFormatError(
            f"Parameter {name}: no shard shape is recorded for tp rank(s) {missing}, and no affine_map states one; "
            "the model-state file of that rank is missing or does not list the parameter.",
            param=name,
            rank=missing[0],
        )
    return [shape for shape in recorded if shape is not None]


def _checked_map(name: str, key: str, stored: ParamAffineMap, recorded: Sequence[Shape | None]) -> ParamAffineMap:
    ranks = sorted(stored.shard_shapes)
    if ranks != list(range(len(recorded))):
        raise InvalidMapError(
            f"Parameter {name}: its affine_map {key!r} describes ranks {ranks}, the checkpoint has {len(recorded)} tp "
            "ranks (0 first); the map belongs to a run of another topology.",
            param=name,
        )
    for rank, shape in enumerate(recorded):
        if shape is not None and math.prod(shape) != math.prod(stored.shard_shapes[rank]):
            raise InvalidMapError(
                f"Parameter {name}, tp rank {rank}: the shard has shape {shape} ({math.prod(shape)} elements), its "
                f"affine_map {key!r} describes {stored.shard_shapes[rank]} ({math.prod(stored.shard_shapes[rank])}).",
                param=name,
                rank=rank,
            )
    return stored


def _from_category(
    info: UcInfo, category: Category, name: str, shapes: list[Shape]
) -> tuple[ParamAffineMap, object | None]:
    if category.rule in (Rule.TP_REPLICATED, Rule.AVERAGE):
        return _replicated(name, category, shapes), None
    if category.rule is Rule.TWO_SUB_PARAMS:
        return _two_sub_params(name, shapes), None
    if category.rule is Rule.SUB_PARAMS and category.sub_params is not None and category.pattern is not None:
        layout = resolve_sub_params(info, category.sub_params, category.pattern, name, shapes)
        # The shards keep the shape they are stored in; only F takes the view's.
        return _with_shapes(layout.to_map(), shapes), layout.stored_shape(category.sub_params)
    return _concatenated(name, category, shapes), None


def _replicated(name: str, category: Category, shapes: list[Shape]) -> ParamAffineMap:
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise InvalidMapError(
                f"Parameter {name}: {category.rule.value} (pattern {category.pattern!r}) says every tp rank holds the "
                f"whole, but rank 0 has shape {shapes[0]} and rank {rank} has {shape}.",
                param=name,
                rank=rank,
            )
    return replicated_map(shapes[0], len(shapes))


def _two_sub_params(name: str, shapes: list[Shape]) -> ParamAffineMap:
    full = _joined_shape(name, shapes, 0, keys.TWO_SUB_PARAMS)
    heights = _sizes(shapes, full, 0)
    # DeepSpeed halves each shard with torch.chunk, which gives the odd row to the first half.
    firsts = [(height + 1) // 2 for height in heights]
    seconds = [height // 2 for height in heights]
    return _with_shapes(sub_param_map(full, (sum(firsts), sum(seconds)), (firsts, seconds), 0), shapes)


def _concatenated(name: str, category: Category, shapes: list[Shape]) -> ParamAffineMap:
    axis = 1 if category.rule is Rule.ROW_PARALLEL else 0
    if len(shapes) == 1 and axis < max(1, len(shapes[0])):
        return replicated_map(shapes[0], 1)
    full = _joined_shape(name, shapes, axis, category.rule.value)
    return _with_shapes(contiguous_split_map(full, _sizes(shapes, full, axis), axis), shapes)


def _sizes(shapes: list[Shape], full: Shape, axis: int) -> list[int]:
    """What each rank adds to ``full`` along ``axis``; a shard without elements adds nothing while others have some."""
    if any(math.prod(shape) for shape in shapes):
        return [shape[axis] if math.prod(shape) else 0 for shape in shapes]
    return [shape[axis] if len(shape) == len(full) else 0 for shape in shapes]


def _joined_shape(name: str, shapes: list[Shape], axis: int, rule: str) -> Shape:
    """The shape of the shards joined along ``axis``; a shard without elements may have any shape."""
    filled = [(rank, shape) for rank, shape in enumerate(shapes) if math.prod(shape)]
    if not filled:
        filled = [(rank, shape) for rank, shape in enumerate(shapes) if len(shape) == len(shapes[0])]
    first_rank, first = filled[0]
    if len(first) <= axis:
        raise UnsupportedLayoutError(
            f"Parameter {name}: {rule} joins the shards along axis {axis}, but tp rank {first_rank} holds a tensor of "
            f"{len(first)} dimension(s). If every rank holds the whole, list it under {keys.TP_REPLICATED}.",
            param=name,
            rank=first_rank,
        )
    for rank, shape in filled:
        if len(shape) != len(first) or any(
            extent != expected
            for position, (extent, expected) in enumerate(zip(shape, first, strict=True))
            if position != axis
        ):
            raise InvalidMapError(
                f"Parameter {name}: {rule} joins the shards along axis {axis}, but rank {first_rank} has shape {first} "
                f"and rank {rank} has {shape}; they may differ along that axis only.",
                param=name,
                rank=rank,
            )
    return (*first[:axis], sum(shape[axis] for _, shape in filled), *first[axis + 1 :])


def _with_shapes(built: ParamAffineMap, shapes: Sequence[Shape]) -> ParamAffineMap:
    """``built`` with the shards' recorded shapes; the addresses are flat, so the pieces stay as they are."""
    pieces: dict[int, Sequence[AffinePiece]] = {rank: built.pieces_by_rank[rank] for rank in range(len(shapes))}
    return ParamAffineMap(built.logical_shape, dict(enumerate(shapes)), pieces)


@lru_cache(maxsize=1024)
def _proved(param_map: ParamAffineMap) -> ParamAffineMap:
    """Remembered because a model's layers repeat: most parameters share their geometry with many others."""
    param_map.validate()
    return param_map.canonical()


def _vocabulary(info: UcInfo, category: Category, name: str, shape: Shape) -> tuple[int | None, tuple[str, ...]]:
    """How many rows of F the universal file keeps, and what the user should hear about it."""
    if category.vocabulary is None:
        return None, ()
    if info.original_vocab_size is None:
        raise CheckpointFormatError(
            f"Parameter {name} matches {keys.VOCABULARY} ({category.vocabulary!r}), but {keys.ORIGINAL_VOCAB} is "
            "missing, so its padding cannot be told from its data. Add it to universal_checkpoint_info.",
            param=name,
        )
    if not shape:
        raise InvalidMapError(
            f"Parameter {name} matches {keys.VOCABULARY} ({category.vocabulary!r}) but is a scalar.", param=name
        )
    rows, original = shape[0], info.original_vocab_size
    if info.padded_vocab_size is not None and rows != info.padded_vocab_size:
        raise InvalidMapError(
            f"Parameter {name}: the shards hold {rows} vocabulary rows together, {keys.PADDED_VOCAB} states "
            f"{info.padded_vocab_size}; one of them belongs to another run.",
            param=name,
        )
    if rows < original:
        return original, (f"{name} has {rows} rows, fewer than {keys.ORIGINAL_VOCAB} {original}: nothing is cut off",)
    if rows > original:
        return original, (f"{name} keeps {original} of {rows} vocabulary rows",)
    return original, ()
