"""Two descriptions of one tensor: equal to the bit or not, and where, however either is cut."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from held import Held
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.execute import compare as module
from deepspeed_affine.execute.compare import (
    Difference,
    IntervalComparer,
    compare_pieces,
    compare_tensors,
    merged,
    pieces_equal,
    stored_tensor,
)
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.ir.ints import coordinates, row_major_strides
from deepspeed_affine.plan.conversion import TensorFile
from deepspeed_affine.storage.refs import StorageRef, TensorRef

SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def task(shape, pieces, dtype="float32"):
    itemsize = getattr(torch, dtype).itemsize
    return TensorFile("p", "w", "exp_avg", dtype, itemsize, shape, shape, None, "param", tuple(pieces))


def whole(shape, where=0):
    strides = row_major_strides(shape)
    return AffinePiece(shape, 0, strides, 0, strides, (where,))


@st.composite
def described(draw, shape, full):
    """``(pieces, storages)``: ``full`` scattered over storages with gaps, cut along an axis, axes in any order."""
    axis = draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[axis], *draw(st.lists(st.integers(0, shape[axis]), max_size=3))})
    order = draw(st.permutations(range(len(shape))))
    strides = row_major_strides(shape)
    pieces, flats = [], []
    for start, stop in pairwise(cuts):
        part = full.narrow(axis, start, stop - start)
        pad, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        extents = tuple(part.shape[at] for at in order)
        stored = torch.full((pad + step * part.numel() + 1,), 77, dtype=full.dtype)
        inner = row_major_strides(extents)
        stored.as_strided(extents, [step * one for one in inner], pad).copy_(part.permute(*order))
        pieces.append(
            AffinePiece(
                extents,
                start * strides[axis],
                [strides[at] for at in order],
                pad,
                [step * one for one in inner],
                (len(flats),),
            )
        )
        flats.append(stored)
    return draw(st.permutations(pieces)), flats


@st.composite
def two_descriptions(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8", "complex128"]))
    full = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(getattr(torch, dtype))
    return shape, dtype, draw(described(shape, full)), draw(described(shape, full))


def flip(pieces, flats, address, bit):
    """One bit of the stored element of F at ``address`` is flipped."""
    for piece in pieces:
        for source, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True):
            if source == address:
                data = flats[next(iter(piece.locations))].view(torch.uint8)
                size = flats[next(iter(piece.locations))].element_size()
                data[dest * size + bit // 8] ^= 1 << bit % 8
                return
    raise AssertionError


@given(two_descriptions(), st.integers(1, 12), st.data())
@settings(max_examples=150)
def test_every_flipped_bit_is_found_and_placed(world, chunk, data):
    shape, dtype, (left, ours), (right, theirs) = world
    one, other = task(shape, left, dtype), task(shape, right, dtype)
    readers = Held(*ours), Held(*theirs)
    options = {"chunk_bytes": chunk * one.itemsize, "workers": data.draw(st.sampled_from([1, 3]))}
    assert compare_tensors([(one, other)], *readers, **options) == [None]
    changed = sorted(data.draw(st.sets(st.integers(0, math.prod(shape) - 1), min_size=1, max_size=4)))
    for address in changed:
        flip(right, theirs, address, data.draw(st.integers(0, 8 * one.itemsize - 1)))
    (found,) = compare_tensors([(one, other)], *readers, **options)
    assert found.first == changed[0]
    assert found.differing == len(changed)
    assert found.coordinates(shape) == coordinates(changed[0], shape)


@given(two_descriptions(), st.data())
def test_an_interval_sees_its_own_elements_only(world, data):
    shape, dtype, (left, ours), (right, theirs) = world
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel - 1))
    stop = data.draw(st.integers(start + 1, numel))
    address = data.draw(st.integers(0, numel - 1))
    flip(left, ours, address, 0)
    comparer = IntervalComparer(task(shape, left, dtype), Held(*ours), task(shape, right, dtype), Held(*theirs))
    found = comparer.compare(start, stop)
    assert (found is not None) == (start <= address < stop)
    assert found is None or found.first == address


def test_bytes_are_compared_and_not_numbers():
    nan, other = torch.tensor([math.nan]), torch.tensor([math.nan])
    other.view(torch.int32)[0] ^= 1
    pair = [(task((1,), [whole((1,))]), task((1,), [whole((1,))]))]
    assert compare_tensors(pair, Held(nan), Held(nan.clone())) == [None]
    assert compare_tensors(pair, Held(nan), Held(other))[0].differing == 1
    (zero,) = compare_tensors(pair, Held(torch.tensor([0.0])), Held(torch.tensor([-0.0])))
    assert (zero.max_abs, zero.max_ulp, zero.values) == (0.0, 0, ("0", "-0"))
    (inf,) = compare_tensors(pair, Held(torch.tensor([1.0])), Held(torch.tensor([math.nan])))
    assert inf.max_abs == math.inf


@pytest.mark.parametrize(
    ("dtype", "ulp", "distance"),
    [
        ("float32", 1, 2**-23),
        ("float16", 1, 2**-10),
        ("bfloat16", 1, 2**-7),
        ("float64", None, 2**-52),
        ("int32", None, 1.0),
        ("bool", None, math.nan),
        ("complex64", None, math.nan),
        ("complex128", None, math.nan),
        ("float8_e4m3fn", None, 0.125),
    ],
)
def test_measures_by_dtype(dtype, ulp, distance):
    left = torch.ones(4).to(getattr(torch, dtype))
    right = left.clone()
    right.view(torch.uint8)[2 * left.element_size()] ^= 1
    one = task((2, 2), [whole((2, 2))], dtype)
    (found,) = compare_tensors([(one, one)], Held(left), Held(right))
    assert found.coordinates((2, 2)) == (1, 0)
    assert found.max_ulp == ulp
    assert found.max_abs == distance or (math.isnan(distance) and math.isnan(found.max_abs))
    text = found.describe((2, 2), 4)
    assert "(1, 0)" in text
    assert "1 of 4 elements" in text
    assert ("ulp" in text) == (ulp is not None)
    for text, tensor in zip(found.values, (left, right), strict=True):
        wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
        shown = torch.tensor([complex(text) if tensor.dtype.is_complex else float(eval(text))], dtype=wide)
        assert shown.to(tensor.dtype).view(torch.uint8).tolist() == tensor[2:3].view(torch.uint8).tolist()
    assert found.values[0] != found.values[1]


def test_the_largest_distance_and_the_first_place_of_all_chunks():
    left = torch.ones(1000)
    right = left.clone()
    right[700] = 5.0
    right[300] = 1.5
    one = task((10, 100), [whole((10, 100))])
    (found,) = compare_tensors([(one, one)], Held(left), Held(right), chunk_bytes=400, workers=4)
    assert (found.first, found.differing, found.max_abs) == (300, 2, 4.0)
    assert found.values == ("1", "1.5")


def test_several_tensors_answer_in_order():
    flats = [torch.full((50,), float(n)) for n in range(4)]
    changed = [flat.clone() for flat in flats]
    changed[2][7] = -1.0
    tasks = [task((50,), [whole((50,), where)]) for where in range(4)]
    told = []
    found = compare_tensors(
        list(zip(tasks, tasks, strict=True)),
        Held(*flats),
        Held(*changed),
        chunk_bytes=64,
        workers=3,
        advance=told.append,
    )
    assert [one is None for one in found] == [True, True, False, True]
    assert found[2].first == 7
    assert sum(told) == 4 * 200


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_scalars_and_tensors_without_elements(shape):
    one = task(shape, [whole(shape)])
    left = torch.ones(max(1, math.prod(shape)))
    assert compare_tensors([(one, one)], Held(left), Held(left.clone())) == [None]
    (found,) = compare_tensors([(one, one)], Held(left), Held(left + 1))
    assert (found is None) == (math.prod(shape) == 0)


def test_other_dtypes_and_sizes_are_refused():
    one = task((4,), [whole((4,))])
    for other in (task((5,), [whole((5,))]), task((4,), [whole((4,))], "bfloat16")):
        with pytest.raises(PolicyError, match="cannot be compared"):
            IntervalComparer(one, Held(torch.ones(4)), other, Held(torch.ones(5)))


def test_reads_are_bounded_and_each_side_is_read_once():
    numel = 1 << 20
    flat = torch.arange(numel, dtype=torch.float32)
    left, right = Held(flat), Held(flat)
    columns = AffinePiece((256, numel // 256), 0, (1, 256), 0, (numel // 256, 1), (0,))
    other = Held(flat.reshape(-1, 256).t().contiguous().reshape(-1))
    one = task((numel,), [whole((numel,))])
    assert compare_tensors([(one, one)], left, right, chunk_bytes=1 << 16) == [None]
    for side in (left, right):
        assert max(stop - start for _, start, stop in side.reads) <= 1 << 16
        assert side.bytes_read == flat.nbytes
    assert compare_tensors([(one, task((numel,), [columns]))], left, other, chunk_bytes=1 << 18) == [None]
    assert max(stop - start for _, start, stop in other.reads) <= 4 << 20


def test_values_of_another_dtype_are_compared_as_the_files_would_hold_them():
    stored = torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16)
    wide = stored.float()
    one = task((3,), [whole((3,))])
    assert compare_tensors([(one, one)], Held(stored), Held(wide)) == [None]
    wide.view(torch.int32)[1] ^= 1
    assert compare_tensors([(one, one)], Held(stored), Held(wide))[0].first == 1


@given(two_descriptions(), st.sampled_from([1, 3, 1 << 20]), st.data())
def test_pieces_of_equal_shape_are_compared_pairwise(world, block, data):
    shape, _, (pieces, ours), _ = world
    theirs = [flat.clone() for flat in ours]
    pairs = [(piece, piece) for piece in pieces]
    before, module.BLOCK_ELEMENTS = module.BLOCK_ELEMENTS, block
    try:
        assert compare_pieces(pairs, Held(*ours), Held(*theirs)) is None
        assert pieces_equal(pairs, Held(*ours), Held(*theirs))
        address = data.draw(st.integers(0, math.prod(shape) - 1))
        flip(pieces, theirs, address, 3)
        found = compare_pieces(pairs, Held(*ours), Held(*theirs))
        assert (found.first, found.differing) == (address, 1)
        assert not pieces_equal(pairs, Held(*ours), Held(*theirs))
    finally:
        module.BLOCK_ELEMENTS = before


def test_merging():
    one, other = Difference(5, 2, 0.5, 3, ("a", "b")), Difference(1, 1, 2.0, None, ("c", "d"))
    assert merged([None, one, None, other]) == Difference(1, 3, 2.0, None, ("c", "d"))
    assert merged([None]) is None
    assert math.isnan(merged([one, Difference(9, 1, math.nan, None, ("", ""))]).max_abs)


def test_a_stored_view_is_described_as_it_lies():
    flat = torch.arange(24, dtype=torch.float32)
    storage = StorageRef("memory", "0", "float32", 24, 0, None, "cpu")
    ref = TensorRef(storage, 2, (3, 4), (1, 5))
    dense = stored_tensor(TensorRef(StorageRef("m", "0", "float32", 12, 0, None, "cpu"), 0, (3, 4), (4, 1)), 0)
    held = Held(flat.as_strided((3, 4), (1, 5), 2).contiguous().reshape(-1))
    assert compare_tensors([(stored_tensor(ref, 0), dense)], Held(flat), held) == [None]
    expanded = stored_tensor(TensorRef(storage, 3, (6, 4), (0, 1)), 0)
    assert expanded.shape == (1, 4)
    assert np.prod(expanded.shape) == expanded.numel == 4
