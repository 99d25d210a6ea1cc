"""Proof by bytes: a difference is found wherever it is, and measured as a person would."""

import math
from itertools import pairwise

import pytest
import torch
from held import Held
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.execute import compare
from deepspeed_affine.execute.prove import measure_drift, shards_identical
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.plan.conversion import Replica, ShardPieces, TensorFile


def run(start, numel, address, where):
    return AffinePiece((numel,), start, (1,), address, (1,), (where,))


def file(shape, primary, pieces, dtype="float32"):
    replica = Replica(primary, pieces, "tp 0", "tp 1")
    return TensorFile("p", "w", "fp32", dtype, 4, shape, shape, None, "param", primary, (replica,))


@st.composite
def two_cuttings(draw):
    """One vector, cut into runs in two ways, some elements of the second copy changed."""
    numel = draw(st.integers(1, 40))
    cuttings = []
    for where in (0, 1):
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=5))})
        pieces = [run(a, b - a, a, where) for a, b in pairwise(cuts)]
        cuttings.append(tuple(draw(st.permutations(pieces))))
    changed = draw(st.sets(st.integers(0, numel - 1)))
    return numel, cuttings, changed


@given(two_cuttings(), st.sampled_from([1, 3, 1 << 20]))
def test_differences_are_found_counted_and_placed(world, block):
    numel, (primary, pieces), changed = world
    left = torch.arange(numel, dtype=torch.float32) + 1
    right = left.clone()
    for place in changed:
        right[place] += 0.5
    before = compare.BLOCK_ELEMENTS
    compare.BLOCK_ELEMENTS = block
    try:
        found = measure_drift(file((numel,), primary, pieces), Held(left, right))
    finally:
        compare.BLOCK_ELEMENTS = before
    if not changed:
        assert found == []
        return
    (drift,) = found
    assert drift.differing == len(changed)
    assert drift.compared == numel
    assert drift.first == (min(changed),)
    assert drift.max_abs == 0.5


@given(st.integers(0, 23), st.sampled_from([1, 2, 5, 7, 24]))
def test_the_first_element_is_in_the_tensors_coordinates(place, block):
    shape = (2, 3, 4)
    left = torch.zeros(24)
    right = torch.zeros(24)
    transposed = AffinePiece((4, 2, 3), 0, (1, 12, 4), 0, (6, 3, 1), (1,))
    right.as_strided((4, 2, 3), (6, 3, 1))[place % 4, place // 12, place // 4 % 3] = 1.0
    before = compare.BLOCK_ELEMENTS
    compare.BLOCK_ELEMENTS = block
    try:
        (drift,) = measure_drift(file(shape, (run(0, 24, 0, 0),), (transposed,)), Held(left, right))
    finally:
        compare.BLOCK_ELEMENTS = before
    assert drift.first == (place // 12, place // 4 % 3, place % 4)
    assert drift.differing == 1


@pytest.mark.parametrize(
    ("dtype", "ulp"),
    [("float32", 1), ("float16", 1), ("bfloat16", 1), ("float64", None), ("int32", None), ("bool", None)],
)
def test_measures_by_dtype(dtype, ulp):
    kind = getattr(torch, dtype)
    left = torch.ones(4).to(kind)
    right = left.clone()
    bits = right.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()])
    bits[2] ^= 1
    (drift,) = measure_drift(file((4,), (run(0, 4, 0, 0),), (run(0, 4, 0, 1),), dtype), Held(left, right))
    assert drift.first == (2,)
    assert drift.max_ulp == ulp
    assert "(2,)" in drift.describe()
    assert ("ulp" in drift.describe()) == (ulp is not None)


def test_bytes_are_compared_and_not_numbers():
    nan, other = torch.tensor([math.nan]), torch.tensor([math.nan])
    other.view(torch.int32)[0] ^= 1
    pieces = (run(0, 1, 0, 0),), (run(0, 1, 0, 1),)
    assert measure_drift(file((1,), *pieces), Held(nan, nan.clone())) == []
    assert len(measure_drift(file((1,), *pieces), Held(nan, other))) == 1
    (zero,) = measure_drift(file((1,), *pieces), Held(torch.tensor([0.0]), torch.tensor([-0.0])))
    assert zero.max_abs == 0.0
    assert zero.max_ulp == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_wide_elements_are_compared_whole(dtype):
    left = torch.tensor([1 + 2j, 3 + 4j], dtype=dtype)
    right = left.clone()
    pieces = (run(0, 2, 0, 0),), (run(0, 2, 0, 1),)
    assert measure_drift(file((2,), *pieces), Held(left, right)) == []
    right[1] = 3 + 5j
    assert not torch.equal(left, right)
    (drift,) = measure_drift(file((2,), *pieces), Held(left, right))
    assert drift.first == (1,)


@given(st.integers(1, 12), st.integers(2, 4), st.data())
def test_shards_are_identical_only_if_every_byte_is(numel, ranks, data):
    flats = [torch.arange(numel, dtype=torch.float32) for _ in range(ranks)]
    shards = [ShardPieces((run(0, numel, 0, rank),), f"tp {rank}") for rank in range(ranks)]
    assert shards_identical(shards, Held(*flats))
    flats[data.draw(st.integers(0, ranks - 1))][data.draw(st.integers(0, numel - 1))] += 1
    assert not shards_identical(shards, Held(*flats))
