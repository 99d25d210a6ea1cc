"""One strided block of a parameter, addressed on both of its sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir.ints import INT64_MAX, as_extents, as_integer, product, shown

if TYPE_CHECKING:
    import torch

__all__ = ["AffinePiece"]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AffinePiece:
    """A block of elements, described where it lives in the full tensor and where it lives in the shard.

    ``source_*`` addresses the logical side (the full tensor F) and ``dest_*`` the shard side; each pair is the
    argument list of ``torch.as_strided``, counted in elements, and ``shape`` serves both. ``locations`` is the set of
    ranks holding the block, and the shard holds it times ``scale``. The value is checked on construction and never
    changes, so a piece that exists can be applied: no negative number, no stride of another length, no offset beyond
    64 bits, no zero stride along an axis that has more than one element (that would read one element of F twice, or
    write one shard address twice), and a scale that can be undone.
    """

    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    dest_offset: int
    dest_strides: tuple[int, ...]
    locations: frozenset[int]
    scale: float

    def __init__(
        self,
        shape: Iterable[int],
        source_offset: int,
        source_strides: Iterable[int],
        dest_offset: int,
        dest_strides: Iterable[int],
        locations: Iterable[int],
        scale: float = 1.0,
    ) -> None:
        put = object.__setattr__
        put(self, "shape", as_extents(shape, "A piece's shape"))
        put(self, "source_offset", as_integer(source_offset, "A piece's source offset"))
        put(self, "source_strides", as_extents(source_strides, "A piece's source stride"))
        put(self, "dest_offset", as_integer(dest_offset, "A piece's dest offset"))
        put(self, "dest_strides", as_extents(dest_strides, "A piece's dest stride"))
        put(self, "locations", _as_locations(locations))
        put(self, "scale", _as_scale(scale))
        self._check("source", self.source_offset, self.source_strides)
        self._check("dest", self.dest_offset, self.dest_strides)

    def _check(self, side: str, offset: int, strides: tuple[int, ...]) -> None:
        shape = self.shape
        if len(strides) != len(shape):
            raise InvalidMapError(
                f"A piece of shape {shape} has {len(strides)} {side} strides {strides}; expected one per axis."
            )
        last = offset
        for extent, stride in zip(shape, strides, strict=True):
            if extent == 0:
                return
            last += (extent - 1) * stride
        for extent, stride in zip(shape, strides, strict=True):
            if stride == 0 and extent > 1:
                raise InvalidMapError(
                    f"A piece of shape {shape} has {side} strides {strides}: a zero stride along {extent} elements "
                    f"names one {side} address {extent} times; expected a stride of one or more."
                )
        if last > INT64_MAX or product(shape) > INT64_MAX:
            raise InvalidMapError(
                f"A piece of shape {shape} at {side} offset {offset} with strides {strides} reaches offset "
                f"{shown(last)}, which does not fit in 64 signed bits."
            )

    @property
    def numel(self) -> int:
        return product(self.shape)

    @property
    def source_end(self) -> int:
        """One past the last offset of F the piece names; the offset itself when it is empty."""
        return _end(self.shape, self.source_offset, self.source_strides)

    @property
    def dest_end(self) -> int:
        """One past the last shard address the piece names; the offset itself when it is empty."""
        return _end(self.shape, self.dest_offset, self.dest_strides)

    def source_view(self, full_param: torch.Tensor) -> torch.Tensor:
        """This piece's elements as a view of the full parameter, without copying.

        The tensor's first element is F's first, wherever in its storage it begins; it must be dense.
        """
        from deepspeed_affine.execute.memory import strided_view

        return strided_view(full_param, self.shape, self.source_offset, self.source_strides)

    def dest_view(self, shard: torch.Tensor) -> torch.Tensor:
        """This piece's elements as a view of the shard that holds it, without copying."""
        from deepspeed_affine.execute.memory import strided_view

        return strided_view(shard, self.shape, self.dest_offset, self.dest_strides)

    def source_offsets(self) -> Iterator[int]:
        """Yield the offset into F of every element, in the order of the piece's own indices."""
        return _offsets(self.shape, self.source_offset, self.source_strides)

    def dest_offsets(self) -> Iterator[int]:
        """Yield the shard address of every element, in the same order as ``source_offsets``."""
        return _offsets(self.shape, self.dest_offset, self.dest_strides)

    def to_dict(self) -> dict[str, Any]:
        """Serialise to plain scalars; ``scale`` is left out when it is 1."""
        entry: dict[str, Any] = {
            "shape": list(self.shape),
            "source": [self.source_offset, list(self.source_strides)],
            "dest": [self.dest_offset, list(self.dest_strides)],
            "locations": sorted(self.locations),
        }
        if self.scale != 1.0:
            entry["scale"] = self.scale
        return entry

    def __repr__(self) -> str:
        scale = "" if self.scale == 1.0 else f", scale={self.scale!r}"
        return (
            f"AffinePiece(shape={self.shape}, source=({self.source_offset}, {self.source_strides}), "
            f"dest=({self.dest_offset}, {self.dest_strides}), locations={sorted(self.locations)}{scale})"
        )


def _as_locations(locations: object) -> frozenset[int]:
    if type(locations) is frozenset and all(type(rank) is int and rank >= 0 for rank in locations) and locations:
        return locations
    if isinstance(locations, (str, bytes)) or not isinstance(locations, Iterable):
        raise InvalidMapError(f"A piece's locations are {shown(locations)}; expected a set of ranks.")
    ranks = frozenset([as_integer(rank, "A piece's location") for rank in locations])
    if not ranks:
        raise InvalidMapError("A piece's locations name no rank; expected at least the rank that lists it.")
    return ranks


def _as_scale(scale: object) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise InvalidMapError(f"A piece's scale is {shown(scale)} of type {type(scale).__name__}; expected a number.")
    try:
        factor = float(scale)
    except OverflowError:
        raise InvalidMapError(f"A piece's scale is {shown(scale)}; expected a finite number.") from None
    if factor == 0.0:
        raise InvalidMapError("A piece's scale is zero, which cannot be undone; expected a non-zero number.")
    if not math.isfinite(factor):
        raise InvalidMapError(f"A piece's scale is {factor}, which cannot be undone; expected a finite number.")
    return factor


def _end(shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> int:
    end = offset + 1
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 0:
            return offset
        end += (extent - 1) * stride
    return end


def _offsets(shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Iterator[int]:
    if not shape:
        yield offset
        return
    if len(shape) == 1:
        if shape[0]:
            yield from range(offset, offset + shape[0] * (strides[0] or 1), strides[0] or 1)
        return
    for index in range(shape[0]):
        yield from _offsets(shape[1:], offset + index * strides[0], strides[1:])
