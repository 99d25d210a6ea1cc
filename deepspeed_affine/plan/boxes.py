"""Which lattices may share an element, found by their bounding boxes and not by trying all pairs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from deepspeed_affine.ir import overlapping
from deepspeed_affine.ir.ints import coordinates
from deepspeed_affine.ir.lattice import Lattice

__all__ = ["Box", "bounding_box", "touching"]

Box = tuple[tuple[int, int], ...]
"""One half-open interval per axis."""


def bounding_box(lattice: Lattice, shape: Sequence[int]) -> Box:
    """A box of a tensor of this shape that holds every key of the lattice; as tight as its digits allow.

    A lattice that runs past the end of an axis is bounded by the rows it touches, whole.
    """
    low = coordinates(lattice.key, shape)
    reach = [0] * len(shape)
    for extent, stride, _ in lattice.digits:
        for axis, step in enumerate(coordinates(stride, shape)):
            reach[axis] += (extent - 1) * step
    if all(start + more < extent for start, more, extent in zip(low, reach, shape, strict=True)):
        return tuple([(start, start + more + 1) for start, more in zip(low, reach, strict=True)])
    high = coordinates(lattice.last, shape)
    box: list[tuple[int, int]] = []
    for axis, extent in enumerate(shape):
        if low[axis] != high[axis]:
            box.append((low[axis], high[axis] + 1))
            box += [(0, more) for more in shape[axis + 1 :]]
            return tuple(box)
        box.append((low[axis], min(low[axis] + 1, extent)))
    return tuple(box)


def touching(left: Sequence[Box], right: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield the index pairs of boxes that overlap, each once.

    Intervals are met one axis at a time, the axis with the fewest overlaps first, and equal intervals are met once for
    all boxes that have them: a grid of p by p cells against another costs about p*p steps and not p**4.
    """
    if left and right:
        yield from _touching(left, right, list(range(len(left))), list(range(len(right))), tuple(range(len(left[0]))))


def _touching(
    left: Sequence[Box], right: Sequence[Box], ours: list[int], theirs: list[int], axes: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    if not axes:
        yield from ((i, j) for i in ours for j in theirs)
        return
    grouped = [(axis, _by_interval(left, ours, axis), _by_interval(right, theirs, axis)) for axis in axes]
    axis, one, other = min(grouped, key=lambda each: _crossings(left, right, ours, theirs, each[0]))
    rest = tuple([each for each in axes if each != axis])
    some, others = list(one), list(other)
    for i, j in overlapping(some, others):
        mine, yours = one[some[i]], other[others[j]]
        if len(mine) == 1 and len(yours) == 1:
            a, b = left[mine[0]], right[yours[0]]
            if all(a[each][0] < b[each][1] and b[each][0] < a[each][1] for each in rest):
                yield mine[0], yours[0]
        else:
            yield from _touching(left, right, mine, yours, rest)


def _by_interval(boxes: Sequence[Box], members: Sequence[int], axis: int) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for member in members:
        found[boxes[member][axis]].append(member)
    return found


def _crossings(left: Sequence[Box], right: Sequence[Box], ours: list[int], theirs: list[int], axis: int) -> int:
    """How many pairs overlap on one axis."""
    starts = sorted([right[j][axis][0] for j in theirs])
    stops = sorted([right[j][axis][1] for j in theirs])
    return sum([bisect_left(starts, left[i][axis][1]) - bisect_right(stops, left[i][axis][0]) for i in ours])
