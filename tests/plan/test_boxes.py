"""Bounding boxes hold their lattices, and touching finds every overlapping pair once without trying all."""

import random

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.ir.ints import coordinates, product
from deepspeed_affine.ir.lattice import iterate, proper
from deepspeed_affine.plan import boxes
from deepspeed_affine.plan.boxes import bounding_box, touching


@given(st.integers(0, 2**32))
def test_a_box_holds_its_lattice_and_is_tight_for_blocks(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))
    numel = product(shape)
    digits = [(rng.randint(2, 3), rng.randint(1, 9), 0) for _ in range(rng.randint(0, 2))]
    for lattice in proper(rng.randrange(numel), 0, digits):
        if lattice.last >= numel:
            continue
        box = bounding_box(lattice, shape)
        for key, _ in iterate(lattice):
            assert all(a <= at < b for at, (a, b) in zip(coordinates(key, shape), box, strict=True))
        if not lattice.digits:
            assert product([b - a for a, b in box]) == 1


@given(st.integers(0, 2**32))
def test_touching_is_all_overlapping_pairs_once(seed):
    rng = random.Random(seed)
    axes = rng.randint(0, 3)

    def some():
        starts = [[rng.randint(0, 6) for _ in range(axes)] for _ in range(rng.randint(0, 9))]
        return [tuple((a, a + rng.randint(1, 3)) for a in row) for row in starts]

    left, right = some(), some()
    expected = [
        (i, j)
        for i, a in enumerate(left)
        for j, b in enumerate(right)
        if all(p[0] < q[1] and q[0] < p[1] for p, q in zip(a, b, strict=True))
    ]
    assert sorted(touching(left, right)) == expected


def test_grids_and_diagonals_are_met_without_trying_all_pairs(monkeypatch):
    seen = 0
    plain = boxes.overlapping

    def counted(left, right):
        nonlocal seen
        for pair in plain(left, right):
            seen += 1
            yield pair

    monkeypatch.setattr(boxes, "overlapping", counted)
    side = 64

    def grid(rows, columns):
        return [
            ((i * rows, (i + 1) * rows), (j * columns, (j + 1) * columns)) for i in range(side) for j in range(side)
        ]

    assert len(list(touching(grid(4, 4), grid(4, 4)))) == side * side
    assert seen <= 2 * side * side
    seen = 0
    diagonal = [((i, i + 1), (i, i + 1)) for i in range(side * side)]
    columns = [((0, side * side), (j, j + 1)) for j in range(side * side)]
    assert len(list(touching(diagonal, columns))) == side * side
    assert seen <= 2 * side * side
