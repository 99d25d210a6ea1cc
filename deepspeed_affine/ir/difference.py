"""Set difference of lattices: the same descent through windows as their intersection."""

from __future__ import annotations

from math import gcd

from deepspeed_affine.ir.lattice import (
    Budget,
    Lattice,
    ceil_div,
    coalesce,
    contains,
    period_of,
    proper,
    span,
    units,
    windows,
)

__all__ = ["subtract"]


def subtract(a: Lattice, b: Lattice, budget: Budget | None = None) -> list[Lattice]:
    """Return the elements of ``a`` whose key ``b`` does not hold, each once, with their mates."""
    budget = budget or Budget("Subtracting one piece from another")
    return _subtract(a, b, budget)


def _subtract(a: Lattice, b: Lattice, budget: Budget) -> list[Lattice]:
    budget.spend()
    a_last, b_last = a.last, b.last
    if b_last < a.key or a_last < b.key:
        return [a]
    if not a.digits:
        return [a] if contains(b, a.key) is None else []
    if (
        a.key == b.key
        and len(a.digits) == len(b.digits)
        and all(x[0] == y[0] and x[1] == y[1] for x, y in zip(a.digits, b.digits, strict=True))
    ):
        return []
    if not b.digits or a.digits[0][1] >= b.digits[0][1]:
        return _subtract_by_own_windows(a, b, b_last, budget)
    return _subtract_by_other_windows(a, b, budget)


def _subtract_by_own_windows(a: Lattice, b: Lattice, b_last: int, budget: Budget) -> list[Lattice]:
    extent, stride, a_step = a.digits[0]
    a_reach = span(a.digits[1:])
    first = max(0, ceil_div(b.key - a_reach - a.key, stride))
    last = min(extent - 1, (b_last - a.key) // stride)
    if last < first:
        return [a]
    result: list[Lattice] = []
    if first > 0:
        result.append(units(a, 0, first - 1))
    if last < extent - 1:
        result.append(units(a, last + 1, extent - 1))
    if not b.digits:
        for index in range(first, last + 1):
            result += _subtract(units(a, index, index), b, budget)
        return result
    period = period_of(a, b)
    for window, facing, repeats in windows(a, b, b_last):
        rest = [window] if facing is None else _subtract(window, facing, budget)
        result += _repeat(rest, repeats, period * stride, period * a_step)
    return result


def _subtract_by_other_windows(a: Lattice, b: Lattice, budget: Budget) -> list[Lattice]:
    """The subtrahend is the coarser one: walk its windows, and give each the units of ``a`` that start before the next.

    Units are ordered and disjoint, so only the first unit of a cell can also reach back into the previous window.
    """
    extent, stride, a_step = a.digits[0]
    b_extent, b_stride, _ = b.digits[0]
    a_reach, b_reach = span(a.digits[1:]), span(b.digits[1:])

    def first_unit(window: int) -> int:
        return ceil_div(b.key + window * b_stride - a_reach - a.key, stride)

    result: list[Lattice] = []
    head = min(max(first_unit(0), 0), extent)
    if head > 0:
        result.append(units(a, 0, head - 1))
    # Windows whose cell lies wholly inside a, and which have a window before them, look alike up to the period.
    low = max(1, ceil_div(a.key + a_reach - b.key - stride + 1, b_stride))
    while low < b_extent and first_unit(low) < 0:
        low += 1
    high = min(b_extent - 2, (a.key + (extent + 1) * stride - b.key) // b_stride)
    while high >= low and first_unit(high + 1) > extent:
        high -= 1
    period = stride // gcd(stride, b_stride)
    count = max(high - low + 1, 0)
    jobs = [(low + residue, (count - residue + period - 1) // period) for residue in range(min(period, count))]
    reached = max(0, (a.key - b.key) // b_stride - 2)
    end = min(b_extent, (a.last - b.key) // b_stride + 2)
    jobs += [(window, 1) for window in (*range(reached, min(low, end)), *range(max(high + 1, low, reached), end))]
    for window, repeats in jobs:
        budget.spend()
        start = max(first_unit(window), 0)
        stop = extent if window == b_extent - 1 else min(first_unit(window + 1), extent)
        if start >= stop:
            continue
        rest: list[Lattice] = []
        reaches_back = window > 0 and a.key + start * stride <= b.key + (window - 1) * b_stride + b_reach
        if reaches_back:
            rest += _subtract(units(a, start, start), units(b, window - 1, window), budget)
            start += 1
        if start < stop:
            rest += _subtract(units(a, start, stop - 1), units(b, window, window), budget)
        result += _repeat(rest, repeats, period * b_stride, period * b_stride // stride * a_step)
    return result


def _repeat(lattices: list[Lattice], repeats: int, shift: int, mate_shift: int) -> list[Lattice]:
    if repeats == 1:
        return lattices
    digit = (repeats, shift, mate_shift)
    repeated: list[Lattice] = []
    for lattice in lattices:
        digits = (digit, *lattice.digits)
        if shift > span(lattice.digits):
            repeated.append(Lattice(lattice.key, lattice.mate, coalesce(list(digits))))
        else:
            repeated += proper(lattice.key, lattice.mate, digits)
    return repeated
