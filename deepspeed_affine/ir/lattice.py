"""Exact set algebra on strided integer sets, whatever their strides.

A lattice is the set ``key + sum(i_k * stride_k)`` for ``0 <= i_k < n_k``. Every element also carries a *mate*: a
second integer that is affine in the same indices (the address on the other side of a piece). All functions here
work on *proper* lattices: digits in order of falling stride, each stride larger than the span of the digits
after it, so that elements in increasing order are indices in lexicographic order. ``proper`` splits anything
else, interleaved digits included, into proper lattices.

Intersection, and difference (``ir.difference``), descend through windows. Take the operand with the larger outer
stride; its outer index enumerates disjoint windows of the line. Against the other operand, the windows repeat with a
period, so one window per residue is solved and the answer is repeated by one digit. The work follows the size of the
answer and not the number of elements: where strides divide each other the period is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd
from typing import NamedTuple

from deepspeed_affine.errors import BudgetExceededError

__all__ = [
    "Budget",
    "Lattice",
    "Meeting",
    "ceil_div",
    "coalesce",
    "contains",
    "intersect",
    "iterate",
    "period_of",
    "proper",
    "span",
    "units",
    "windows",
]

Digit = tuple[int, int, int]
"""``(extent, key stride, mate stride)``; the extent is two or more."""

DEFAULT_STEPS = 2_000_000


class Lattice(NamedTuple):
    """A proper lattice and the mate of each of its elements."""

    key: int
    mate: int
    digits: tuple[Digit, ...]

    @property
    def numel(self) -> int:
        count = 1
        for extent, _, _ in self.digits:
            count *= extent
        return count

    @property
    def last(self) -> int:
        """The largest key."""
        return self.key + span(self.digits)


class Meeting(NamedTuple):
    """Common elements of two lattices with both mates; digits are ``(extent, key, mate of a, mate of b)``."""

    key: int
    mate_a: int
    mate_b: int
    digits: tuple[tuple[int, int, int, int], ...]


_STEPS = (
    "steps; its strides interleave without a short common period. Describe the layout with strides that divide each "
    "other."
)


class Budget:
    """Counts steps of work and stops with ``BudgetExceededError`` when they exceed what was granted.

    ``counted`` says what they are steps of, and what to do.
    """

    __slots__ = ("_counted", "_granted", "_left", "_what")

    def __init__(self, what: str, granted: int = DEFAULT_STEPS, counted: str = _STEPS) -> None:
        self._what = what
        self._counted = counted
        self._granted = granted
        self._left = granted

    @property
    def used(self) -> int:
        return self._granted - self._left

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise BudgetExceededError(f"{self._what} needs more than {self._granted} {self._counted}")


def span(digits: Iterable[Digit]) -> int:
    """Distance from the first to the last key."""
    total = 0
    for extent, stride, _ in digits:
        total += (extent - 1) * stride
    return total


def iterate(lattice: Lattice) -> Iterator[tuple[int, int]]:
    """Yield ``(key, mate)`` of every element in increasing key order."""
    if not lattice.digits:
        yield lattice.key, lattice.mate
        return
    (extent, stride, mate), inner = lattice.digits[0], lattice.digits[1:]
    for index in range(extent):
        yield from iterate(Lattice(lattice.key + index * stride, lattice.mate + index * mate, inner))


def coalesce(digits: list[Digit]) -> tuple[Digit, ...]:
    """Fuse neighbouring digits that step through one longer run on both sides; the digits come sorted."""
    if len(digits) < 2:
        return tuple(digits)
    fused: list[Digit] = []
    for extent, stride, mate in digits:
        if fused:
            outer, outer_stride, outer_mate = fused[-1]
            if outer_stride == extent * stride and outer_mate == extent * mate:
                fused[-1] = (outer * extent, stride, mate)
                continue
        fused.append((extent, stride, mate))
    return tuple(fused)


def proper(key: int, mate: int, digits: Iterable[Digit], budget: Budget | None = None) -> list[Lattice]:
    """Return disjoint-by-index proper lattices holding each index of the given digits exactly once.

    An interleaved digit (its stride does not clear the span of those below) is cut into residue classes that do.
    Two of the results share a key only if the input named that key twice.
    """
    kept = [digit for digit in digits if digit[0] != 1]
    reach = 0
    for extent, stride, _ in reversed(kept):
        if extent == 0 or stride <= reach:
            break
        reach += (extent - 1) * stride
    else:
        return [Lattice(key, mate, coalesce(kept))]
    ordered = sorted(kept, key=lambda digit: (digit[1], digit[2]))
    if any(extent == 0 for extent, _, _ in ordered):
        return []
    reach = 0
    starts = [(key, mate)]
    built: list[Digit] = []
    for extent, stride, mate_stride in ordered:
        classes = min(reach // stride + 1, extent)
        if classes > 1:
            return _cut_interleaved(starts, built, (extent, stride, mate_stride), ordered, budget)
        reach += (extent - 1) * stride
        built.append((extent, stride, mate_stride))
    return [Lattice(key, mate, coalesce(built[::-1]))]


def _cut_interleaved(
    starts: list[tuple[int, int]],
    below: list[Digit],
    digit: Digit,
    ordered: list[Digit],
    budget: Budget | None,
) -> list[Lattice]:
    """Cut ``digit`` into residues that clear the span below it, then treat the digits above in each class."""
    budget = budget or Budget("Splitting an interleaved piece")
    extent, stride, mate_stride = digit
    (key, mate), above = starts[0], ordered[len(below) + 1 :]
    reach = span(below)
    classes = min(reach // stride + 1, extent)
    budget.spend(classes)
    result: list[Lattice] = []
    for residue in range(classes):
        count = (extent - residue + classes - 1) // classes
        digits = [*below, *above]
        if count > 1:
            digits.append((count, classes * stride, classes * mate_stride))
        result += proper(key + residue * stride, mate + residue * mate_stride, digits, budget)
    return result


def ceil_div(value: int, divisor: int) -> int:
    return -((-value) // divisor)


def contains(lattice: Lattice, key: int) -> int | None:
    """The mate of ``key``, or None when the lattice does not hold it."""
    rest = key - lattice.key
    mate = lattice.mate
    if rest < 0:
        return None
    for extent, stride, mate_stride in lattice.digits:
        index = rest // stride
        if index >= extent:
            index = extent - 1
        rest -= index * stride
        mate += index * mate_stride
    return mate if rest == 0 else None


def units(lattice: Lattice, first: int, last: int) -> Lattice:
    """The lattice with its outer index kept to ``first..last``."""
    (_, stride, mate), inner = lattice.digits[0], lattice.digits[1:]
    count = last - first + 1
    digits = ((count, stride, mate), *inner) if count > 1 else inner
    return Lattice(lattice.key + first * stride, lattice.mate + first * mate, digits)


def intersect(a: Lattice, b: Lattice, budget: Budget | None = None) -> list[Meeting]:
    """Return the common keys of two proper lattices with both mates, exactly and without repetition."""
    budget = budget or Budget("Intersecting two pieces")
    return _intersect(a, b, budget)


def _intersect(a: Lattice, b: Lattice, budget: Budget) -> list[Meeting]:
    budget.spend()
    if not a.digits:
        mate = contains(b, a.key)
        return [] if mate is None else [Meeting(a.key, a.mate, mate, ())]
    if not b.digits:
        mate = contains(a, b.key)
        return [] if mate is None else [Meeting(b.key, mate, b.mate, ())]
    b_last = b.last
    if b_last < a.key or a.last < b.key:
        return []
    if a.digits == b.digits and a.key == b.key:
        return [
            Meeting(
                a.key, a.mate, b.mate, tuple([(n, s, u, w[2]) for (n, s, u), w in zip(a.digits, b.digits, strict=True)])
            )
        ]
    if a.digits[0][1] == b.digits[0][1]:
        return _intersect_in_step(a, b, budget)
    if len(a.digits) == 1 and len(b.digits) == 1:
        return _progressions(a, b)
    if a.digits[0][1] < b.digits[0][1]:
        return [
            Meeting(key, mate_a, mate_b, tuple([(n, s, u, w) for n, s, w, u in digits]))
            for key, mate_b, mate_a, digits in _intersect(b, a, budget)
        ]
    (_, stride, a_step), (_, b_stride, b_step) = a.digits[0], b.digits[0]
    result: list[Meeting] = []
    for window, facing, repeats in windows(a, b, b_last):
        if facing is None:
            budget.spend()
            continue
        found = _intersect(window, facing, budget)
        if repeats > 1:
            shift = period_of(a, b) * stride
            digit = (repeats, shift, shift // stride * a_step, shift // b_stride * b_step)
            found = [Meeting(m.key, m.mate_a, m.mate_b, (digit, *m.digits)) for m in found]
        result += found
    return result


def _intersect_in_step(a: Lattice, b: Lattice, budget: Budget) -> list[Meeting]:
    """Units of one stride: those of ``a`` face those of ``b`` at one or two fixed distances, each solved once."""
    ((extent, stride, a_step), *_), ((b_extent, _, b_step), *_) = a.digits, b.digits
    a_inner, b_inner = a.digits[1:], b.digits[1:]
    delta = b.key - a.key
    result: list[Meeting] = []
    for ahead in range(ceil_div(-delta - span(b_inner), stride), (span(a_inner) - delta) // stride + 1):
        first = max(0, -ahead)
        count = min(extent, b_extent - ahead) - first
        if count <= 0:
            continue
        unit = Lattice(a.key + first * stride, a.mate + first * a_step, a_inner)
        facing = Lattice(b.key + (first + ahead) * stride, b.mate + (first + ahead) * b_step, b_inner)
        found = _intersect(unit, facing, budget)
        if count > 1:
            digit = (count, stride, a_step, b_step)
            found = [Meeting(m.key, m.mate_a, m.mate_b, (digit, *m.digits)) for m in found]
        result += found
    return result


def period_of(a: Lattice, b: Lattice) -> int:
    """After how many windows of ``a`` the repetitions of ``b`` look the same again."""
    stride, b_stride = a.digits[0][1], b.digits[0][1]
    return b_stride // gcd(stride, b_stride)


def windows(a: Lattice, b: Lattice, b_last: int) -> Iterator[tuple[Lattice, Lattice | None, int]]:
    """Yield the windows of ``a``'s outer index that may touch ``b``, the units of ``b`` each faces, and how many alike.

    A window that stands for several is followed by the others one period apart.
    """
    (extent, stride, _), (b_extent, b_stride, _) = a.digits[0], b.digits[0]
    a_reach, b_reach = span(a.digits[1:]), span(b.digits[1:])
    first = max(0, ceil_div(b.key - a_reach - a.key, stride))
    last = min(extent - 1, (b_last - a.key) // stride)
    # A window is interior when every repetition of b that could touch it exists, so that b looks periodic from it.
    inner_first = max(first, ceil_div(b.key + b_reach - b_stride + 1 - a.key, stride))
    inner_last = min(last, (b.key + b_extent * b_stride - 1 - a_reach - a.key) // stride)
    edges = [*range(first, min(inner_first, last + 1)), *range(max(inner_last + 1, inner_first, first), last + 1)]
    period = period_of(a, b)
    jobs = [(index, 1) for index in edges]
    count = inner_last - inner_first + 1
    for residue in range(min(period, max(count, 0))):
        jobs.append((inner_first + residue, (count - residue + period - 1) // period))
    for index, repeats in jobs:
        window = units(a, index, index)
        low = max(0, ceil_div(window.key - b_reach - b.key, b_stride))
        high = min(b_extent - 1, (window.key + a_reach - b.key) // b_stride)
        yield window, units(b, low, high) if low <= high else None, repeats


def _progressions(a: Lattice, b: Lattice) -> list[Meeting]:
    """Two single progressions meet in one progression of stride lcm, found by the extended Euclid."""
    (a_extent, stride, a_step), (_, b_stride, b_step) = a.digits[0], b.digits[0]
    common = gcd(stride, b_stride)
    delta = b.key - a.key
    if delta % common:
        return []
    modulus = b_stride // common
    index = (delta // common * pow(stride // common, -1, modulus)) % modulus if modulus > 1 else 0
    lowest = max(0, ceil_div(delta, stride))
    index += ceil_div(lowest - index, modulus) * modulus
    top = min(a_extent - 1, (b.last - a.key) // stride)
    if index > top:
        return []
    count = (top - index) // modulus + 1
    key = a.key + index * stride
    b_index = (key - b.key) // b_stride
    digits = ()
    if count > 1:
        shift = modulus * stride
        digits = ((count, shift, modulus * a_step, shift // b_stride * b_step),)  # type: ignore[assignment]
    return [Meeting(key, a.mate + index * a_step, b.mate + b_index * b_step, digits)]
