"""The unit of a transfer: one strided copy from a source shard into a target shard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir.ints import as_extents, as_integer, product, shown

__all__ = ["TransferSegment"]


@dataclass(frozen=True, slots=True)
class TransferSegment:
    """One strided copy: element k of the source block becomes, times ``scale``, element k of the target block.

    Offsets and strides are elements of the shards on either side, as ``torch.as_strided`` takes them; ``shape`` is
    shared. ``scale`` is the exact ratio of the target's and the source's scale, applied in one multiplication, and is
    to be raised to a state's power where a state and not a parameter is moved.
    """

    source_rank: int
    source_offset: int
    source_strides: tuple[int, ...]
    target_rank: int
    target_offset: int
    target_strides: tuple[int, ...]
    shape: tuple[int, ...]
    scale: float = 1.0

    @property
    def numel(self) -> int:
        return product(self.shape)

    @property
    def exact(self) -> bool:
        """Whether multiplying by the scale loses nothing: it is a power of two, or its negative."""
        return abs(math.frexp(self.scale)[0]) == 0.5

    @property
    def source_reach(self) -> int:
        """How many elements of the source shard are read up to the last; the segment has elements."""
        spans = [(extent - 1) * stride for extent, stride in zip(self.shape, self.source_strides, strict=True)]
        return self.source_offset + sum(spans) + 1

    @property
    def is_sound(self) -> bool:
        """Whether the members fit together. Planning and reading make no other; whoever makes one by hand may."""
        numbers = (self.source_rank, self.source_offset, self.target_rank, self.target_offset)
        return (
            len(self.shape) == len(self.source_strides) == len(self.target_strides)
            and min(*numbers, *self.source_strides, *self.target_strides, *self.shape) >= 0
            and _is_scale(self.scale)
        )

    @property
    def row(self) -> tuple[object, ...]:
        """All members, in order."""
        source = (self.source_rank, self.source_offset, self.source_strides)
        return (*source, self.target_rank, self.target_offset, self.target_strides, self.shape, self.scale)

    def to_dict(self) -> dict[str, Any]:
        """Plain scalars, in DeepSpeed 0.19.8's form; the scale is left out when it is 1."""
        entry: dict[str, Any] = {
            "shape": list(self.shape),
            "source": [self.source_rank, self.source_offset, list(self.source_strides)],
            "target": [self.target_rank, self.target_offset, list(self.target_strides)],
        }
        if self.scale != 1.0:
            entry["scale"] = self.scale
        return entry

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> TransferSegment:
        """Read what ``to_dict`` wrote, checked; anything else is an ``InvalidMapError``."""
        if not isinstance(entry, Mapping):
            raise InvalidMapError(f"A transfer segment is {shown(entry)}; expected a mapping.")
        unknown = set(map(str, entry)) - {"shape", "source", "target", "scale"}
        if unknown:
            raise InvalidMapError(
                f"A transfer segment has members {sorted(unknown)}, which this version does not know."
            )
        shape = as_extents(entry.get("shape"), "A segment's shape")
        sides = []
        for side in ("source", "target"):
            listed = entry.get(side)
            if not isinstance(listed, (list, tuple)) or len(listed) != 3:
                raise InvalidMapError(f"A segment's {side} is {shown(listed)}; expected [rank, offset, strides].")
            strides = as_extents(listed[2], f"A segment's {side} strides")
            if len(strides) != len(shape):
                raise InvalidMapError(
                    f"A segment of shape {shape} has {side} strides {strides}; expected one per axis."
                )
            rank = as_integer(listed[0], f"A segment's {side} rank")
            sides.append((rank, as_integer(listed[1], f"A segment's {side} offset"), strides))
        scale = entry.get("scale", 1.0)
        if not _is_scale(scale):
            raise InvalidMapError(f"A segment's scale is {shown(scale)}; expected a finite number other than zero.")
        return cls(*sides[0], *sides[1], shape, float(scale))


def _is_scale(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value) and value != 0
    except OverflowError:
        return False
