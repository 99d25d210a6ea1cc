"""Filling intervals: any chunking of F gives F, and every element is what its piece says."""

import zlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from converting import bits
from held import Held, Runs
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.execute.fill import IntervalFiller, chunk_bounds
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.plan.conversion import Replica, TensorFile


def task(shape, pieces, *, rows=None, dtype="float32", fill="copy", replicas=()):
    written = shape if rows is None else (rows, *shape[1:])
    width = getattr(torch, dtype).itemsize
    return TensorFile(
        "zero/w/fp32.pt", "w", "fp32", dtype, width, written, shape, None, "param", pieces, replicas, fill
    )


def gathered(file, pieces, chunk):
    filler = IntervalFiller(file, pieces)
    parts = []
    for start, stop in chunk_bounds(file, chunk):
        assert 0 < stop - start <= chunk
        buffer = np.full((stop - start) * file.itemsize + 3, 0xA5, np.uint8)
        words = filler.words(buffer, stop - start)
        log = Runs()
        crc = filler.fill(start, stop, words, log)
        assert crc is None or crc == zlib.crc32(words)
        assert buffer[words.nbytes :].tolist() == [0xA5] * 3
        for index, low, high, crc in log.runs:
            assert crc == zlib.crc32(pieces.flats[index].view(torch.uint8).numpy()[low:high])
        parts.append(torch.from_numpy(words.view(np.uint8)).view(getattr(torch, file.dtype)))
    return torch.cat(parts) if parts else torch.empty(0)


@st.composite
def worlds(draw):
    """F cut into rectangles of random places, each stored with random strides in one of three storages."""
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    cut_rows = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    cut_columns = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=3))})
    full = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    storages = [torch.full((500,), float("nan")) for _ in range(3)]
    free = [0, 0, 0]
    pieces = []
    for top, bottom in pairwise(cut_rows):
        for left, right in pairwise(cut_columns):
            where = draw(st.integers(0, 2))
            height, width = bottom - top, right - left
            step = draw(st.integers(1, 2))
            strides = (width * step, step) if draw(st.booleans()) else (step, height * step)
            scale = draw(st.sampled_from([1.0, 1.0, 0.5]))
            offset = free[where] + draw(st.integers(0, 3))
            piece = AffinePiece((height, width), top * columns + left, (columns, 1), offset, strides, (where,), scale)
            block = full[top:bottom, left:right] * scale
            storages[where].as_strided((height, width), strides, offset).copy_(block)
            free[where] = offset + height * width * step
            pieces.append(piece)
    return full, tuple(draw(st.permutations(pieces))), storages


@given(worlds(), st.integers(1, 60))
def test_every_chunking_gives_the_tensor(world, chunk):
    full, pieces, storages = world
    file = task(tuple(full.shape), pieces)
    assert bits(gathered(file, Held(*storages), chunk)) == bits(full)


@given(worlds(), st.integers(1, 60), st.integers(0, 7))
def test_rows_cut_off_are_not_read(world, chunk, rows):
    full, pieces, storages = world
    rows = min(rows, full.shape[0])
    sources = Held(*storages)
    file = task(tuple(full.shape), pieces, rows=rows)
    assert bits(gathered(file, sources, chunk)) == bits(full[:rows].contiguous())
    if not rows:
        assert sources.bytes_read == 0


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 100))
def test_bounds_tile_and_keep_rows_whole_where_they_fit(rows, columns, chunk):
    bounds = list(chunk_bounds(task((rows, columns), ()), chunk))
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds)][: len(bounds)]
    assert (bounds[-1][1] if bounds else 0) == rows * columns
    assert all(stop - start <= chunk for start, stop in bounds)
    if columns <= chunk:
        assert all(start % columns == 0 for start, _ in bounds)


@given(st.integers(1, 9), st.integers(2, 5), st.integers(1, 9))
def test_average_counts_every_holder_once(numel, holders, chunk):
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(n)) for n in range(holders)]
    pieces = [AffinePiece((numel,), 0, (1,), 0, (1,), (n,)) for n in range(holders)]
    primary = (pieces[0],)
    replicas = tuple(Replica(primary, (piece,), "a", "b") for piece in pieces[1:])
    file = task((numel,), primary, fill="average", replicas=replicas)
    total = torch.zeros(numel)
    for value in values:
        total = total + value
    assert bits(gathered(file, Held(*values), chunk)) == bits(total / holders)


def test_average_of_holders_that_cut_differently():
    left, right = torch.arange(6.0), torch.arange(6.0) + 2
    halves = (AffinePiece((2,), 0, (1,), 0, (1,), (1,)), AffinePiece((4,), 2, (1,), 2, (1,), (1,)))
    whole = (AffinePiece((6,), 0, (1,), 0, (1,), (0,)),)
    file = task((6,), whole, fill="average", replicas=(Replica(whole, halves, "a", "b"),))
    for chunk in range(1, 7):
        assert gathered(file, Held(left, right), chunk).tolist() == (left + 1).tolist()


def test_average_where_only_some_elements_are_shared():
    own = (AffinePiece((2,), 0, (1,), 0, (1,), (0,)),)
    shared = (AffinePiece((2,), 2, (1,), 2, (1,), (0,)),)
    other = (AffinePiece((2,), 2, (1,), 0, (1,), (1,)),)
    file = task((4,), (*own, *shared), fill="average", replicas=(Replica(shared, other, "a", "b"),))
    found = gathered(file, Held(torch.tensor([1.0, 2.0, 4.0, 6.0]), torch.tensor([8.0, 8.0])), 3)
    assert found.tolist() == [1.0, 2.0, 6.0, 7.0]


def test_zeros_read_nothing():
    sources = Held(torch.ones(6))
    file = task((6,), (AffinePiece((6,), 0, (1,), 0, (1,), (0,)),), fill="zero")
    assert gathered(file, sources, 4).tolist() == [0.0] * 6
    assert sources.bytes_read == 0


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_another_dtype_is_converted(dtype):
    stored = torch.tensor([1.5, -2.25, 1e30])
    file = task((3,), (AffinePiece((3,), 0, (1,), 0, (1,), (0,)),), dtype=dtype)
    found = gathered(file, Held(stored), 2)
    assert bits(found) == bits(stored.to(getattr(torch, dtype)))


def test_a_dense_run_is_read_where_it_belongs_and_summed_once():
    stored = torch.arange(10.0)
    dense = task((2, 4), (AffinePiece((2, 4), 0, (4, 1), 1, (4, 1), (0,)),))
    pieces, runs = Held(stored), Runs()
    words = np.empty(4, np.uint32)
    crc = IntervalFiller(dense, pieces).fill(4, 8, words, runs)
    assert crc == zlib.crc32(stored[5:9].numpy())
    assert runs.runs == [(0, 20, 36, crc)]
    assert pieces.reads == [(0, 20, 36)]
    for other in (
        task((2, 4), (AffinePiece((2, 4), 0, (4, 1), 1, (1, 2), (0,)),)),
        task((2, 4), (AffinePiece((2, 4), 0, (4, 1), 1, (4, 1), (0,), 0.5),)),
        task(
            (2, 4), (AffinePiece((2, 2), 0, (4, 1), 0, (2, 1), (0,)), AffinePiece((2, 2), 2, (4, 1), 4, (2, 1), (0,)))
        ),
        replace(dense, fill="zero"),
    ):
        assert IntervalFiller(other, Held(stored)).fill(4, 8, words, Runs()) is None
