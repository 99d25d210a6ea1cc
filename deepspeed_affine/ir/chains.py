"""Maximal chains of points: the one local rule from which the canonical form is built.

A point is a pair of addresses, (shard address, offset in F), and a direction v is a difference of two points. Points x
and x + v of a set are neighbours; a chain is a maximal path of neighbours. Which chains a set has in a direction
depends on the set alone, so a form made of chains cannot remember how its input was cut.

Sets arrive as lattices and stay lattices: a column of a billion rows is one of them. ``chains`` joins lattices
end to start by intersecting them, and cuts off the parts that do not join. Small sets are simply listed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from deepspeed_affine.ir.algebra import overlapping
from deepspeed_affine.ir.difference import subtract
from deepspeed_affine.ir.lattice import Budget, Lattice, Meeting, coalesce, intersect, proper

__all__ = ["Point", "absorbed", "chains", "listed_chains"]

Point = tuple[int, int]
"""``(shard address, offset in F)``; as a direction, the difference of two."""

Interval = tuple[int, int]

_CROWDED = 4
"""Overlaps for each segment from which on another projection is looked for."""

_MODULI = 6
"""How many of the commonest strides are tried as moduli."""

Segment = tuple[int, Lattice]
"""Chains of one length, by the lattice of their first points."""


def listed_chains(runs: Mapping[Point, int], direction: Point) -> dict[int, list[Point]]:
    """First points of the maximal chains of a listed set, by chain length.

    The set comes as disjoint runs of neighbours: the first point of each, and how many points it has.
    """
    dest, source = direction
    continued = {(point[0] + length * dest, point[1] + length * source) for point, length in runs.items()}
    found: dict[int, list[Point]] = defaultdict(list)
    for point, length in runs.items():
        if point in continued:
            continue
        while (more := runs.get((point[0] + length * dest, point[1] + length * source))) is not None:
            length += more
        found[length].append(point)
    return dict(found)


def chains(lattices: Sequence[Lattice], direction: Point, budget: Budget) -> dict[int, list[Lattice]]:
    """First points of the maximal chains of a set of disjoint lattices, by chain length."""
    segments = [absorbed(1, lattice, direction) for lattice in _stacked(lattices)]
    apart: set[tuple[Segment, Segment]] = set()
    while True:
        segments = _compressed(segments, direction)
        budget.spend(len(segments))
        used: set[int] = set()
        fresh: list[Segment] = []
        for i, j in overlapping(*_hulls(segments, direction)):
            pair = (segments[i], segments[j])
            if i in used or j in used or pair in apart:
                continue
            budget.spend()
            joined = _with_itself(pair[0], direction, budget) if i == j else _end_to_start(*pair, direction, budget)
            if joined is None:
                apart.add(pair)
            else:
                used.update((i, j))
                fresh += joined
        if not used:
            break
        segments = [segment for number, segment in enumerate(segments) if number not in used] + fresh
    found: dict[int, list[Lattice]] = defaultdict(list)
    for length, lattice in segments:
        found[length].append(lattice)
    return dict(found)


def _hulls(segments: Sequence[Segment], direction: Point) -> tuple[list[Interval], list[Interval]]:
    """Intervals for where chains end and for where they start; a chain ends at a start only where both overlap.

    Equal points are equal in every projection. Most sets are apart in their shard addresses; columns of one matrix
    overlap there and are apart modulo the length of a row, so the projection with the fewest overlaps is taken.
    """
    best, fewest = _projected(segments, direction, 0, 0)
    if fewest <= _CROWDED * len(segments):
        return best
    strides = Counter((side, d[1 + side]) for _, x in segments for d in x.digits for side in (0, 1))
    for axis, modulus in [(1, 0), *[each for each, _ in strides.most_common(_MODULI)]]:
        hulls, overlaps = _projected(segments, direction, axis, modulus)
        if overlaps < fewest:
            best, fewest = hulls, overlaps
    return best


def _projected(
    segments: Sequence[Segment], direction: Point, axis: int, modulus: int
) -> tuple[tuple[list[Interval], list[Interval]], int]:
    """The intervals in one coordinate (modulo ``modulus`` unless it is zero), and how many pairs overlap."""
    starts = [_interval(x, axis, modulus, 0) for _, x in segments]
    ends = [_interval(x, axis, modulus, n * direction[axis]) for n, x in segments]
    lows, highs = sorted([a for a, _ in starts]), sorted([b for _, b in starts])
    return (ends, starts), sum([bisect_left(lows, b) - bisect_right(highs, a) for a, b in ends])


def _interval(lattice: Lattice, axis: int, modulus: int, shift: int) -> Interval:
    low, reach = lattice[axis] + shift, 0  # type: ignore[operator]
    for digit in lattice.digits:
        step = digit[1 + axis]
        if not modulus or step % modulus:
            reach += (digit[0] - 1) * abs(step)
            low += min(0, (digit[0] - 1) * step)
    if not modulus:
        return low, low + reach + 1
    low %= modulus
    return (low, low + reach + 1) if low + reach < modulus else (0, modulus)


def _stacked(lattices: Sequence[Lattice]) -> list[Lattice]:
    """The same points, with translates at equal steps taken together as one lattice with one more digit.

    A transposed matrix that arrives column by column has as many lattices as columns, whose hulls all overlap; stacked,
    it is one. Which translates are taken together does not matter: chains depend on the points alone.
    """
    groups: dict[object, list[Lattice]] = defaultdict(list)
    for lattice in lattices:
        groups[lattice.digits].append(lattice)
    found: list[Lattice] = []
    for group in groups.values():
        group.sort()
        at = 0
        while at < len(group):
            first, count = group[at], 1
            if at + 2 < len(group):
                step = (group[at + 1].key - first.key, group[at + 1].mate - first.mate)
                if min(step) > 0:
                    while at + count < len(group) and group[at + count][:2] == (
                        first.key + count * step[0],
                        first.mate + count * step[1],
                    ):
                        count += 1
            stack = proper(first.key, first.mate, [*first.digits, (count, *step)]) if count > 2 else []
            if 0 < len(stack) < count:
                found += stack
                at += count
            else:
                found.append(first)
                at += 1
    return found


def _compressed(segments: list[Segment], direction: Point) -> list[Segment]:
    """Everything that hashing alone can join or merge, done until nothing changes."""
    while True:
        count = len(segments)
        segments = _merged_starts(_joined_alike(segments, direction))
        segments = [absorbed(length, lattice, direction) for length, lattice in segments]
        if len(segments) == count:
            return segments


def _shifted(lattice: Lattice, direction: Point, times: int) -> Lattice:
    return Lattice(lattice.key + times * direction[0], lattice.mate + times * direction[1], lattice.digits)


def absorbed(length: int, lattice: Lattice, direction: Point) -> Segment:
    """Take a digit that steps by exactly one chain length into the chain."""
    for position, (extent, stride, mate) in enumerate(lattice.digits):
        if (stride, mate) == (length * direction[0], length * direction[1]):
            rest = lattice.digits[:position] + lattice.digits[position + 1 :]
            return absorbed(length * extent, Lattice(lattice.key, lattice.mate, rest), direction)
    return length, lattice


def _joined_alike(segments: Sequence[Segment], direction: Point) -> list[Segment]:
    """Join segments whose first points form translates of one lattice, by hashing where each one ends."""
    by_start = {(x.digits, x.key, x.mate): length for length, x in segments}
    followed = {(x.digits, x.key + n * direction[0], x.mate + n * direction[1]) for n, x in segments}
    result = []
    for length, lattice in segments:
        if (lattice.digits, lattice.key, lattice.mate) in followed:
            continue
        while True:
            end = _shifted(lattice, direction, length)
            more = by_start.get((end.digits, end.key, end.mate))
            if more is None:
                break
            length += more
        result.append((length, lattice))
    return result


def _merged_starts(segments: Sequence[Segment]) -> list[Segment]:
    """Merge segments of one length whose lattices continue each other along a digit."""
    current = list(segments)
    for position in range(max([len(x.digits) for _, x in current], default=0)):
        groups: dict[object, dict[Point, Lattice]] = defaultdict(dict)
        result: list[Segment] = []
        for length, x in current:
            if len(x.digits) <= position:
                result.append((length, x))
                continue
            digit = x.digits[position]
            groups[(length, x.digits[:position], digit[1:], x.digits[position + 1 :])][(x.key, x.mate)] = x
        for key, group in groups.items():
            length = key[0]  # type: ignore[index]
            ends = {
                (
                    x.key + x.digits[position][0] * x.digits[position][1],
                    x.mate + x.digits[position][0] * x.digits[position][2],
                )
                for x in group.values()
            }
            for start, x in group.items():
                if start in ends:
                    continue
                extent, stride, mate = x.digits[position]
                more = group.get((x.key + extent * stride, x.mate + extent * mate))
                while more is not None:
                    extent += more.digits[position][0]
                    more = group.get((x.key + extent * stride, x.mate + extent * mate))
                digits = (*x.digits[:position], (extent, stride, mate), *x.digits[position + 1 :])
                result += [(length, y) for y in proper(x.key, x.mate, digits)]
        current = result
    return current


def _end_to_start(first: Segment, second: Segment, direction: Point, budget: Budget) -> list[Segment] | None:
    """Join where chains of ``first`` end at starts of ``second``; None when none do."""
    (n, a), (m, b) = first, second
    ends = _shifted(a, direction, n)
    if ends.last < b.key or b.last < ends.key:
        return None
    joint = [x for meeting in intersect(ends, b, budget) for x in _agreeing(meeting, budget)]
    if not joint:
        return None
    heads = [_shifted(x, direction, -n) for x in joint]
    result = [absorbed(n + m, x, direction) for x in heads]
    result += [(n, x) for x in _without(a, heads, budget)]
    result += [(m, x) for x in _without(b, joint, budget)]
    return result


def _with_itself(segment: Segment, direction: Point, budget: Budget) -> list[Segment] | None:
    """Join chains of one lattice that end at starts of the same lattice, first links first."""
    length, lattice = segment
    ends = _shifted(lattice, direction, length)
    if ends.key > lattice.last:
        return None
    after = [x for meeting in intersect(ends, lattice, budget) for x in _agreeing(meeting, budget)]
    if not after:
        return None
    heads = [y for x in after for y in _without(_shifted(x, direction, -length), after, budget)]
    tails = [_shifted(x, direction, length) for x in heads]
    result = [absorbed(2 * length, x, direction) for x in heads]
    return result + [(length, x) for x in _without(lattice, [*heads, *tails], budget)]


def _without(lattice: Lattice, taken: Iterable[Lattice], budget: Budget) -> list[Lattice]:
    left = [lattice]
    for other in taken:
        left = [y for x in left for y in subtract(x, other, budget)]
    return left


def _agreeing(meeting: Meeting, budget: Budget) -> list[Lattice]:
    """The part of a meeting at which both mates are one number too.

    Their difference is affine in the indices. Indices it does not depend on stay digits; of the others all but one are
    listed and the last is solved for.
    """
    apart = meeting.mate_b - meeting.mate_a
    free = [(n, s, u) for n, s, u, w in meeting.digits if u == w]
    bound = sorted([(n, s, u, u - w) for n, s, u, w in meeting.digits if u != w])
    starts = [(meeting.key, meeting.mate_a, apart)]
    for extent, stride, mate, slope in bound[:-1]:
        budget.spend(len(starts) * extent)
        starts = [(k + i * stride, m + i * mate, rest - i * slope) for k, m, rest in starts for i in range(extent)]
    found = []
    for key, mate, rest in starts:
        if bound:
            extent, stride, step, slope = bound[-1]
            index, odd = divmod(rest, slope)
            if odd or not 0 <= index < extent:
                continue
            key, mate = key + index * stride, mate + index * step
        elif rest:
            continue
        found.append(Lattice(key, mate, coalesce(free)))
    return found
