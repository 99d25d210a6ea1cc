"""Restore-path lowering: the metadata an AutoTP layer puts on its parameter, turned into the target's map.

``output_shape`` and ``target_partition_shape`` describe a destination and not a layout; they stay outside, as
planner inputs, and are not looked at here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from deepspeed_affine.errors import CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import ParamAffineMap, contiguous_split_map, replicated_map, sub_param_map
from deepspeed_affine.ir.codec import map_from_dict
from deepspeed_affine.ir.ints import INT64_MAX, as_extents, as_integer, shown
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.uc_info import metadata_version

__all__ = ["lower_layer_meta"]

Shape = tuple[int, ...]


def lower_layer_meta(
    meta: Mapping[str, Any] | None,
    tp_degree: int,
    full_shape: Sequence[int],
    *,
    param: str | None = None,
) -> ParamAffineMap | None:
    """The canonical map over ``tp_degree`` ranks that ``meta`` describes, or None where it describes no layout.

    ``meta`` is the restore metadata of the target's parameter and ``full_shape`` the shape of F. None means that
    DeepSpeed too falls back to the entries stored beside F. Metadata that contradicts itself or F raises: a stored
    map that does not fit is never passed over in silence.
    """
    if not meta:
        return None
    if not isinstance(meta, Mapping):
        raise CheckpointFormatError(
            f"Restore metadata is {shown(meta)}; expected the dictionary a layer puts on its parameter.", param=param
        )
    degree = as_integer(tp_degree, "The tensor-parallel degree")
    if not degree:
        raise InvalidMapError("The tensor-parallel degree is 0; expected at least one rank.", param=param)
    return _Meta(meta, degree, as_extents(full_shape, "The shape of F"), param).lower()


class _Meta:
    """One parameter's metadata with everything a message needs."""

    def __init__(self, meta: Mapping[str, Any], tp_degree: int, full_shape: Shape, param: str | None) -> None:
        self.meta = meta
        self.tp_degree = tp_degree
        self.full_shape = full_shape
        self.param = param
        self.subject = f"Parameter {param}" if param else "The parameter's restore metadata"

    def lower(self) -> ParamAffineMap | None:
        conversion = self.meta.get("conversion") or {}
        if not isinstance(conversion, Mapping):
            self._invalid(f"its conversion entry is {shown(conversion)} and no dictionary")
        reason = conversion.get("unsupported_reason")
        if reason:
            raise UnsupportedLayoutError(
                f"{self.subject}: the layer could not describe its layout ({reason}); probe its partition function and "
                "pass the map instead.",
                param=self.param,
            )
        stored = conversion.get(keys.AFFINE_MAP)
        found = self._stored_map(stored) if stored is not None else self._described()
        if found is None:
            return None
        try:
            found.validate()
        except InvalidMapError as fault:
            raise InvalidMapError(f"{self.subject}: {fault.message}", param=self.param, rank=fault.rank) from fault
        return found.canonical()

    def _stored_map(self, stored: Any) -> ParamAffineMap:
        found = stored if isinstance(stored, ParamAffineMap) else map_from_dict(stored, self.param)
        if found.numel != math.prod(self.full_shape):
            self._invalid(
                f"its affine_map describes {found.logical_shape} ({found.numel} elements), the universal tensor has "
                f"shape {self.full_shape}"
            )
        ranks = sorted(found.shard_shapes)
        if ranks != list(range(self.tp_degree)):
            self._invalid(f"its affine_map describes ranks {ranks}, the engine has {self.tp_degree} tp ranks")
        return found

    def _described(self) -> ParamAffineMap | None:
        dim = self._integer("partition_dim")
        if self.meta.get("replicated", False):
            if dim is not None:
                self._invalid(f"it says replicated and partition_dim {dim} at once")
            return replicated_map(self.full_shape, self.tp_degree)
        logical = self.meta.get("logical_shape")
        if dim is None or logical is None:
            return None
        shape = self._extents(logical, "logical_shape")
        if math.prod(shape) != math.prod(self.full_shape):
            self._invalid(f"its logical_shape {shape} has another number of elements than F's {self.full_shape}")
        axis, sizes = self._sub_params(dim, shape)
        if not -len(shape) <= axis < len(shape):
            self._invalid(f"its partition_dim {axis} is no axis of {shape}")
        axis %= len(shape)
        if sizes is not None:
            return self._sub_param_map(shape, axis, sizes)
        partition_sizes = self.meta.get("partition_sizes")
        if partition_sizes is not None:
            widths = self._extents(partition_sizes, "partition_sizes")
            self._check_widths(widths, shape[axis], f"partition_sizes {list(widths)}")
            return contiguous_split_map(shape, widths, axis)
        return contiguous_split_map(shape, self._even(shape[axis], f"axis {axis}", "partition_sizes"), axis)

    def _sub_params(self, dim: int, shape: Shape) -> tuple[int, Shape | None]:
        """The partition axis and the sub-parameters' sizes along it, or None for a parameter that is one block."""
        sizes = self.meta.get("sub_param_sizes")
        if sizes is not None:
            return dim, self._extents(sizes, "sub_param_sizes")
        spec = self.meta.get("sub_param_shape")
        if spec is None:
            return dim, None
        if hasattr(spec, "shape") and hasattr(spec, "partition_dim"):
            spec, dim = spec.shape, self._as_integer(spec.partition_dim, "sub_param_shape's partition_dim")
        if not isinstance(spec, list | tuple) or not -len(spec) <= dim < len(spec) or len(spec) != len(shape):
            self._invalid(
                f"its sub_param_shape {shown(spec)} does not fit logical_shape {shape} and partition_dim {dim}"
            )
        entry = spec[dim]
        if isinstance(entry, list | tuple):
            return dim, self._extents(entry, "sub_param_shape")
        extent = shape[dim]
        if entry is None or entry == -1 or entry == extent:
            return dim, (extent,)
        entry = self._as_integer(entry, "sub_param_shape's entry")
        # Metadata of before 0.4 states a count here; as a width it would account for a fraction of the axis.
        if self._version() < keys.WIDTHS_VERSION and entry > 0 and extent % entry == 0:
            return dim, (extent // entry,) * entry
        return self._invalid(
            f"its sub_param_shape {shown(spec)} states {shown(entry)} along axis {dim}, whose extent is {extent}"
        )

    def _sub_param_map(self, shape: Shape, axis: int, sizes: Shape) -> ParamAffineMap:
        if sum(sizes) != shape[axis]:
            self._invalid(f"its sub-parameters {list(sizes)} sum to {sum(sizes)}, axis {axis} has {shape[axis]}")
        recorded = self.meta.get(keys.SHARD_WIDTHS)
        if self._version() < keys.WIDTHS_VERSION:
            widths = [self._even(size, "a sub-parameter", keys.SHARD_WIDTHS) for size in sizes]
        elif recorded is None:
            raise CheckpointFormatError(
                f"{self.subject}: it has sub-parameters {list(sizes)} but no {keys.SHARD_WIDTHS}; metadata version "
                f"{self._version()} records them.",
                param=self.param,
            )
        else:
            if not isinstance(recorded, list | tuple):
                self._invalid(f"its {keys.SHARD_WIDTHS} {shown(recorded)} is no list of per-rank widths")
            widths = [self._extents(row, keys.SHARD_WIDTHS) for row in recorded]
            if len(widths) != len(sizes):
                self._invalid(f"it has {len(sizes)} sub-parameters and {len(widths)} rows of {keys.SHARD_WIDTHS}")
            for size, row in zip(sizes, widths, strict=True):
                self._check_widths(row, size, f"{keys.SHARD_WIDTHS} {list(row)}")
        return sub_param_map(shape, sizes, widths, axis)

    def _even(self, size: int, what: str, missing: str) -> Shape:
        if size % self.tp_degree:
            raise UnsupportedLayoutError(
                f"{self.subject}: {what} of extent {size} does not divide into {self.tp_degree} tp ranks and the "
                f"metadata records no {missing}, so where it was cut is unknown.",
                param=self.param,
            )
        return (size // self.tp_degree,) * self.tp_degree

    def _check_widths(self, widths: Shape, total: int, what: str) -> None:
        if len(widths) != self.tp_degree:
            self._invalid(f"its {what} name {len(widths)} ranks, the engine has {self.tp_degree}")
        if sum(widths) != total:
            self._invalid(f"its {what} sum to {sum(widths)}, expected {total}")

    def _extents(self, value: Any, what: str) -> Shape:
        values = value if isinstance(value, list | tuple) else (value,)
        extents = tuple(self._as_integer(entry, what) for entry in values)
        if any(extent < 0 for extent in extents):
            self._invalid(f"its {what} {shown(value)} is no list of extents")
        return extents

    def _integer(self, key: str) -> int | None:
        value = self.meta.get(key)
        return None if value is None else self._as_integer(value, key)

    def _as_integer(self, value: Any, what: str) -> int:
        number = None if isinstance(value, bool) or not hasattr(value, "__index__") else int(value)
        if number is None or abs(number) > INT64_MAX:
            self._invalid(f"its {what} holds {shown(value)}, which is no extent")
        return number

    def _version(self) -> float:
        return metadata_version(self.meta.get(keys.VERSION))

    def _invalid(self, fact: str) -> NoReturn:
        raise InvalidMapError(f"{self.subject}: {fact}; the metadata belongs to another parameter.", param=self.param)
