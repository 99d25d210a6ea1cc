"""The physical layout behind a sub-parameter rule: F's view, the sub-parameters' sizes, and who holds how much.

The rule changed its meaning with the metadata version. From 0.4 on it states widths and the per-rank widths
are recorded beside it. Before, the partition axis could hold a *count* of equal sub-parameters, and nothing said
how they were cut; the layout is then derived from the recorded shard shapes where only one answer fits them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_affine.errors import CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import ParamAffineMap, sub_param_map
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.uc_info import SubParamRule, UcInfo

__all__ = ["SubParamLayout", "resolve_sub_params"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubParamLayout:
    """``sizes[i]`` is sub-parameter i's extent along ``partition_dim`` of F, ``widths[i][r]`` rank r's part of it."""

    logical_shape: Shape
    partition_dim: int
    sizes: tuple[int, ...]
    widths: tuple[tuple[int, ...], ...]

    def to_map(self) -> ParamAffineMap:
        """The map of F in its view shape, every shard in the view shape of its rank."""
        return sub_param_map(self.logical_shape, self.sizes, self.widths, self.partition_dim)

    def stored_shape(self, rule: SubParamRule) -> object:
        """The view shape as current DeepSpeed writes it: unchanged, but a legacy count spelled out as widths."""
        if isinstance(rule.shape[rule.partition_dim], tuple):
            return rule.stored_shape
        shape: list[object] = list(rule.stored_shape)
        shape[rule.partition_dim] = self.sizes
        return tuple(shape)


def resolve_sub_params(
    info: UcInfo, rule: SubParamRule, pattern: str, name: str, shapes: Sequence[Shape]
) -> SubParamLayout:
    """The one layout that agrees with the rule, the recorded widths and the recorded shard shapes, or a refusal."""
    if info.version >= keys.WIDTHS_VERSION:
        return _recorded(info, rule, pattern, name, shapes)
    return _legacy(rule, name, shapes)


def _recorded(info: UcInfo, rule: SubParamRule, pattern: str, name: str, shapes: Sequence[Shape]) -> SubParamLayout:
    sizes = rule.shape[rule.partition_dim]
    if not isinstance(sizes, tuple):
        raise CheckpointFormatError(
            f"Parameter {name}: {keys.SUB_PARAMS} states {rule.stored_shape!r} with {sizes!r} at partition axis "
            f"{rule.partition_dim}; metadata version {info.version} states a tuple of widths there. If the file was "
            f"written by older code, its {keys.VERSION} is wrong.",
            param=name,
        )
    widths = info.shard_widths.get(pattern)
    if widths is None:
        raise CheckpointFormatError(
            f"Parameter {name}: {keys.SUB_PARAMS} matches it with {pattern!r}, but {keys.SHARD_WIDTHS} has no entry of "
            f"that name; metadata version {info.version} records one. Without it the per-rank widths are unknown.",
            param=name,
        )
    _check_widths(name, sizes, widths, len(shapes))
    known = [None if axis == rule.partition_dim else dim for axis, dim in enumerate(rule.shape)]
    logical = _fill(name, rule, known, sum(sizes), shapes)
    extents = tuple(sum(row[rank] for row in widths) for rank in range(len(shapes)))
    for rank, (shape, extent) in enumerate(zip(shapes, extents, strict=True)):
        view = _with(logical, rule.partition_dim, extent)
        if math.prod(view) != math.prod(shape):
            raise InvalidMapError(
                f"Parameter {name}, tp rank {rank}: the shard has shape {shape} ({math.prod(shape)} elements), but "
                f"its recorded shard widths describe {view} ({math.prod(view)}); the metadata belongs to another "
                "parameter or another run.",
                param=name,
                rank=rank,
            )
    return SubParamLayout(logical, rule.partition_dim, sizes, widths)


def _check_widths(name: str, sizes: Shape, widths: tuple[Shape, ...], tp_degree: int) -> None:
    if len(widths) != len(sizes):
        raise InvalidMapError(
            f"Parameter {name}: {keys.SHARD_WIDTHS} lists {len(widths)} sub-parameters, {keys.SUB_PARAMS} lists "
            f"{len(sizes)} ({sizes}); they must agree.",
            param=name,
        )
    for index, (size, row) in enumerate(zip(sizes, widths, strict=True)):
        if len(row) != tp_degree:
            raise InvalidMapError(
                f"Parameter {name}, sub-parameter {index}: {len(row)} shard widths for {tp_degree} tp ranks.",
                param=name,
            )
        if sum(row) != size:
            raise InvalidMapError(
                f"Parameter {name}, sub-parameter {index}: shard widths {list(row)} sum to {sum(row)}, its size is "
                f"{size}.",
                param=name,
            )


def _legacy(rule: SubParamRule, name: str, shapes: Sequence[Shape]) -> SubParamLayout:
    dim = rule.partition_dim
    spec = rule.shape[dim]
    known = [None if axis == dim else extent for axis, extent in enumerate(rule.shape)]
    full = sum(spec) if isinstance(spec, tuple) else None
    logical = _fill(name, rule, known, full, shapes)
    extents = _extents(name, rule, logical, shapes)
    if sum(extents) != logical[dim]:
        raise InvalidMapError(
            f"Parameter {name}: the shards hold {sum(extents)} along axis {dim} of its view {rule.stored_shape!r}, but "
            f"the sub-parameters sum to {logical[dim]}; the metadata belongs to another parameter or another run.",
            param=name,
        )
    if isinstance(spec, tuple):
        sizes = spec
    else:
        count = 1 if spec is None else spec
        if count < 1 or logical[dim] % count:
            raise InvalidMapError(
                f"Parameter {name}: {keys.SUB_PARAMS} counts {count} equal sub-parameters along axis {dim}, whose "
                f"extent {logical[dim]} is no multiple of that.",
                param=name,
            )
        sizes = (logical[dim] // count,) * count
    return SubParamLayout(logical, dim, sizes, _derived_widths(name, sizes, extents))


def _derived_widths(name: str, sizes: Shape, extents: Shape) -> tuple[Shape, ...]:
    """The per-rank widths that legacy metadata implies; only an even cut, or equal sub-parameters, has one answer."""
    ranks = len(extents)
    if len(set(extents)) == 1 and not any(size % ranks for size in sizes):
        return tuple((size // ranks,) * ranks for size in sizes)
    # Whatever rule cut these shards depended on a sub-parameter's size alone, so equal ones were cut equally.
    if len(set(sizes)) == 1 and not any(extent % len(sizes) for extent in extents):
        return (tuple(extent // len(sizes) for extent in extents),) * len(sizes)
    raise UnsupportedLayoutError(
        f"Parameter {name}: sub-parameters of {list(sizes)} rows are held as {list(extents)} rows by {ranks} tp ranks, "
        f"and metadata before version {keys.WIDTHS_VERSION} does not say how each was cut; several cuts fit. Add "
        f"{keys.SHARD_WIDTHS} (and version {keys.WIDTHS_VERSION}) to the metadata, or convert with an affine_map.",
        param=name,
    )


def _extents(name: str, rule: SubParamRule, logical: Shape, shapes: Sequence[Shape]) -> Shape:
    others = math.prod(dim for axis, dim in enumerate(logical) if axis != rule.partition_dim)
    extents = []
    for rank, shape in enumerate(shapes):
        numel = math.prod(shape)
        if numel % others if others else numel:
            raise InvalidMapError(
                f"Parameter {name}, tp rank {rank}: a shard of shape {shape} is no whole number of slices of the view "
                f"{rule.stored_shape!r} ({others} elements each).",
                param=name,
                rank=rank,
            )
        extents.append(numel // others if others else 0)
    return tuple(extents)


def _fill(
    name: str, rule: SubParamRule, known: list[int | tuple[int, ...] | None], full: int | None, shapes: Sequence[Shape]
) -> Shape:
    """The view with every placeholder resolved; ``full`` is the partition axis' extent where the rule states it."""
    dim = rule.partition_dim
    dims: list[int | None] = [extent if isinstance(extent, int) else None for extent in known]
    dims[dim] = full
    holes = [axis for axis, extent in enumerate(dims) if extent is None]
    total = sum(math.prod(shape) for shape in shapes)
    stored = next((shape for shape in shapes if math.prod(shape)), None)
    if len(holes) > 1 and stored is not None and len(stored) == len(dims):
        # A view of the parameter's own rank leaves every axis but the cut one as it is stored.
        for axis in holes:
            dims[axis] = None if axis == dim else stored[axis]
        holes = [dim] if full is None else []
    if not holes:
        return tuple(extent for extent in dims if extent is not None)
    product = math.prod(extent for extent in dims if extent is not None)
    if len(holes) > 1 or not product:
        raise UnsupportedLayoutError(
            f"Parameter {name}: the sub-parameter view {rule.stored_shape!r} leaves {len(holes)} extents open, which "
            f"shards of shapes {list(shapes)} do not determine. State the extents in the metadata.",
            param=name,
        )
    if total % product:
        raise InvalidMapError(
            f"Parameter {name}: the shards hold {total} elements in shapes {list(shapes)}, which is no multiple of the "
            f"{product} that the sub-parameter view {rule.stored_shape!r} states; the metadata belongs to another "
            "parameter or another run.",
            param=name,
        )
    dims[holes[0]] = total // product
    return tuple(extent for extent in dims if extent is not None)


def _with(shape: Shape, axis: int, extent: int) -> Shape:
    return (*shape[:axis], extent, *shape[axis + 1 :])
