"""Intersection and difference of strided sets against enumeration."""

from __future__ import annotations

import random

import pytest

from deepspeed_affine.errors import BudgetExceededError
from deepspeed_affine.ir.difference import subtract
from deepspeed_affine.ir.lattice import Budget, Lattice, intersect, iterate, proper

Raw = tuple[int, int, list[tuple[int, int, int]]]


def random_block(rng: random.Random, *, nested: bool) -> Raw:
    digits = []
    reach = 1
    for _ in range(rng.randint(0, 3)):
        extent = rng.randint(1, 5)
        stride = reach * rng.randint(1, 3) + rng.randint(0, 2) if nested else rng.randint(1, 15)
        digits.append((extent, stride, rng.randint(-5, 20)))
        reach = max(reach, stride * extent)
    rng.shuffle(digits)
    return rng.randint(0, 20), rng.randint(0, 50), digits


def listed(block: Raw) -> list[tuple[int, int]]:
    key, mate, digits = block
    found = [(key, mate)]
    for extent, stride, step in digits:
        found = [(k + i * stride, m + i * step) for k, m in found for i in range(extent)]
    return sorted(found)


@pytest.mark.parametrize("block", range(20))
def test_meet_and_difference_are_exact(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        rng = random.Random(seed)
        raw = [random_block(rng, nested=seed % 2 == 0) for _ in range(2)]
        cut = [proper(*each) for each in raw]
        for each, parts in zip(raw, cut, strict=True):
            assert sorted(pair for part in parts for pair in iterate(part)) == listed(each)
        for a in cut[0]:
            for b in cut[1]:
                left, right = dict(iterate(a)), dict(iterate(b))
                common = []
                for m in intersect(a, b):
                    rows = [(m.key, m.mate_a, m.mate_b)]
                    for n, s, u, w in m.digits:
                        rows = [(k + i * s, x + i * u, y + i * w) for k, x, y in rows for i in range(n)]
                    common += rows
                assert sorted(common) == sorted((k, left[k], right[k]) for k in left if k in right)
                rest = subtract(a, b)
                assert sorted(p for part in rest for p in iterate(part)) == sorted(
                    (k, v) for k, v in left.items() if k not in right
                )
                assert all(keys == sorted(set(keys)) for keys in [[k for k, _ in iterate(part)] for part in rest])


def test_every_interval_of_a_small_box_meets_it_in_at_most_2d_minus_1_boxes() -> None:
    worst: dict[int, int] = {}
    for shape in [(7,), (3, 4), (3, 2, 3), (3, 2, 3, 2)]:
        # A gap after every digit keeps the axes apart; without it they would fuse to one run.
        spaced, step = [], 1
        for extent in reversed(shape):
            spaced.append((extent, step, 0))
            step *= extent + 1
        (box,) = proper(0, 0, spaced)
        for start in range(box.last + 1):
            for stop in range(start + 1, box.last + 2):
                found = intersect(box, Lattice(start, 0, ((stop - start, 1, 0),) if stop - start > 1 else ()))
                worst[len(shape)] = max(worst.get(len(shape), 0), len(found))
    assert worst == {1: 1, 2: 3, 3: 5, 4: 7}


def test_nested_strides_cost_the_same_for_any_number_of_elements() -> None:
    costs = []
    for rows in (10**2, 10**5, 10**9):
        (matrix,) = proper(0, 0, [(rows, 64, 48), (48, 1, 1)])
        (columns,) = proper(8, 0, [(rows, 64, 16), (16, 1, 1)])
        budget = Budget("test")
        assert len(intersect(matrix, columns, budget)) == 1
        assert len(subtract(matrix, columns, budget)) == 2
        costs.append(budget.used)
    assert costs[0] == costs[1] == costs[2]


def test_block_cyclic_against_another_period_costs_by_period() -> None:
    """3 blocks of 5 against 7 blocks of 4: one period is 420 addresses, whatever the length."""
    counts = []
    for repeats in (40, 4000, 4 * 10**6):
        a = Lattice(0, 0, ((repeats * 28, 15, 5), (5, 1, 1)))
        b = Lattice(0, 0, ((repeats * 15, 28, 4), (4, 1, 1)))
        counts.append(len(intersect(a, b)))
    assert counts[0] == counts[1] == counts[2] < 100


def test_a_budget_stops_interleaving_that_has_no_short_period() -> None:
    with pytest.raises(BudgetExceededError, match="more than 2000000 steps"):
        proper(0, 0, [(10**9, 1, 0), (10**9, 1, 1)])
