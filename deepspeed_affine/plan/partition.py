"""How ZeRO lays the shards of a parameter group out flat and cuts them over data-parallel ranks, to be written.

The other way round, from what a file records to a map, is ``lowering.zero``'s. Everything counts elements.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, compose_maps

__all__ = [
    "ALIGNMENT",
    "FlatGroup",
    "Run",
    "aligned_elements",
    "over_storages",
    "reserved_numel",
    "sub_group_counts",
    "zero3_runs",
]

WIDEST_ALIGNMENT = 16
"""Bytes to which ``parameter_alignment`` rounds the place of a parameter."""

ALIGNMENT = 2
"""ZeRO-1, ZeRO-2 and BF16_Optimizer pad a group to a multiple of this for every data-parallel rank."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[start, start + numel)`` of shard ``index``, at ``offset`` of a rank's partition."""

    index: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One parameter group of ZeRO-1, ZeRO-2 or BF16_Optimizer: shards end to end, padded, cut into equal parts.

    ``param_alignment`` is what the place of every shard but the first is a multiple of (``parameter_alignment``); 1
    leaves no room between them. ``numels`` are in the order in which the shards lie.

    ``paddings`` follow each shard so that the next, which lies from its entry of ``begins`` on, is aligned; nothing
    follows the last, which ends at ``end``.
    """

    numels: tuple[int, ...]
    dp: int
    param_alignment: int = 1
    paddings: tuple[int, ...] = field(init=False, repr=False, compare=False)
    begins: tuple[int, ...] = field(init=False, repr=False, compare=False)
    end: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dp < 1 or self.param_alignment < 1 or any(numel < 0 for numel in self.numels):
            raise InvalidMapError(
                f"a flat group of {self.numels} elements over {self.dp} ranks, aligned to {self.param_alignment}; "
                "expected no negative number, and at least one rank."
            )
        paddings: list[int] = []
        begins: list[int] = []
        end = 0
        for index, numel in enumerate(self.numels):
            begins.append(end)
            end += numel
            paddings.append(0 if index == len(self.numels) - 1 else -end % self.param_alignment)
            end += paddings[-1]
        for name, value in (("paddings", tuple(paddings)), ("begins", tuple(begins)), ("end", end)):
            object.__setattr__(self, name, value)

    @property
    def partition_size(self) -> int:
        """How many elements every rank has, padding included."""
        return -(-self.end // (ALIGNMENT * self.dp)) * ALIGNMENT

    def padding_of(self, rank: int) -> int:
        """How many elements at the end of the rank's partition lie behind the last shard."""
        size = self.partition_size
        return max(0, min(size, (rank + 1) * size - self.end))

    def runs(self) -> Iterator[tuple[int, Run]]:
        """``(rank, run)`` of everything the ranks' partitions hold, shard by shard; linear in shards and ranks."""
        size = self.partition_size
        for index, (begin, numel) in enumerate(zip(self.begins, self.numels, strict=True)):
            at = begin
            while at < begin + numel:
                rank = at // size
                end = min(begin + numel, (rank + 1) * size)
                yield rank, Run(index, at - begin, end - at, at - rank * size)
                at = end

    def runs_of(self, rank: int) -> Iterator[Run]:
        """What the rank's partition holds, in order; shards it holds nothing of are left out, and cost nothing."""
        low, high = rank * self.partition_size, (rank + 1) * self.partition_size
        for index in range(max(0, bisect_right(self.begins, low) - 1), bisect_left(self.begins, high)):
            begin, numel = self.begins[index], self.numels[index]
            start, stop = max(begin, low), min(begin + numel, high)
            if start < stop:
                yield Run(index, start - begin, stop - start, start - low)


def aligned_elements(itemsize: int) -> int:
    """How many elements of that width ``parameter_alignment`` rounds the place of a parameter to."""
    return WIDEST_ALIGNMENT // math.gcd(WIDEST_ALIGNMENT, itemsize)


def reserved_numel(numel: int, dp: int) -> int:
    """How many elements every ZeRO-3 rank reserves for a shard; the last ranks may hold fewer."""
    return -(-numel // dp)


def zero3_runs(numels: Sequence[int], dp: int, rank: int) -> tuple[list[Run], int]:
    """What a ZeRO-3 rank's flat sub-group holds of each shard, in order, and how long the sub-group is."""
    runs: list[Run] = []
    offset = 0
    for index, numel in enumerate(numels):
        reserved = reserved_numel(numel, dp)
        held = min(reserved, numel - rank * reserved)
        if held > 0:
            runs.append(Run(index, rank * reserved, held, offset))
        offset += reserved
    return runs, offset


def sub_group_counts(numels: Sequence[int], dp: int, size: int) -> tuple[int, ...]:
    """How many parameters each sub-group of a ZeRO-3 parameter group has, in order, with ``sub_group_size`` ``size``.

    A sub-group is closed by the parameter with which a rank's part of it reaches that size; a group without parameters
    has none.
    """
    counts: list[int] = []
    held = count = 0
    for numel in numels:
        held, count = held + reserved_numel(numel, dp), count + 1
        if held >= size:
            counts.append(count)
            held = count = 0
    return (*counts, count) if count else tuple(counts)


def over_storages(outer: ParamAffineMap, intervals: Mapping[int, Sequence[tuple[int, int, int]]]) -> ParamAffineMap:
    """The map from F to what holds intervals of the flattened shards of ``outer``.

    ``intervals[rank]`` lists ``(location, start, stop)``: elements ``[start, stop)`` of that rank's shard are all that
    the location holds, from its first address on.
    """
    inner = {}
    for rank in outer.ranks:
        shapes = {location: (stop - start,) for location, start, stop in intervals[rank]}
        pieces = {
            location: [AffinePiece((stop - start,), start, (1,), 0, (1,), [location])]
            for location, start, stop in intervals[rank]
        }
        inner[rank] = ParamAffineMap(outer.shard_shapes[rank], shapes, pieces)
    return compose_maps(outer, inner)
