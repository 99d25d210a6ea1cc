"""Reading pieces: every element is the stored one, in bounded reads, and no byte is read twice where runs are long."""

import zlib

import numpy as np
import pytest
import torch
from held import Held, Runs
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.execute import gather
from deepspeed_affine.execute.gather import word_of
from deepspeed_affine.ir import AffinePiece

DTYPES = ["uint8", "bfloat16", "float32", "float64", "complex64", "complex128"]


@st.composite
def pieces(draw):
    """A piece with any strides that keep addresses apart, in any order of its axes."""
    rank = draw(st.integers(0, 4))
    shape = [draw(st.integers(1, 6)) for _ in range(rank)]
    order = draw(st.permutations(range(rank)))
    strides, span = [0] * rank, 1
    for axis in order:
        strides[axis] = span * draw(st.integers(1, 3)) + draw(st.integers(0, 2)) * (span > 1)
        span = strides[axis] * shape[axis]
    offset = draw(st.integers(0, 5))
    source = [1] * rank
    for axis in reversed(range(rank - 1)):
        source[axis] = source[axis + 1] * shape[axis + 1]
    return AffinePiece(tuple(shape), 0, tuple(source), offset, tuple(strides), (0,)), offset + span + 1


@given(pieces(), st.sampled_from(DTYPES), st.sampled_from([64, 256, 4 << 20]), st.sampled_from([16, 4096]))
def test_every_piece_is_what_is_stored(drawn, dtype, scratch, short):
    piece, size = drawn
    kind = getattr(torch, dtype)
    stored = torch.arange(size * kind.itemsize, dtype=torch.int64).to(torch.uint8).view(kind)
    held = Held(stored)
    before = gather.SCRATCH_BYTES, gather.SHORT_RUN_BYTES
    gather.SCRATCH_BYTES, gather.SHORT_RUN_BYTES = scratch, short
    try:
        found = held.take(piece)
    finally:
        gather.SCRATCH_BYTES, gather.SHORT_RUN_BYTES = before
    addresses = [
        piece.dest_offset + sum(i * stride for i, stride in zip(place, piece.dest_strides, strict=True))
        for place in np.ndindex(*piece.shape)
    ]
    raw = stored.view(torch.uint8).reshape(-1, kind.itemsize)
    assert found.tobytes() == raw[addresses].numpy().tobytes()
    assert all(stop - start <= max(scratch, found.nbytes) for _, start, stop in held.reads)


@given(pieces(), st.sampled_from(DTYPES))
def test_every_read_is_noted_with_its_sum(drawn, dtype):
    piece, size = drawn
    kind = getattr(torch, dtype)
    stored = torch.arange(size * kind.itemsize, dtype=torch.int64).to(torch.uint8).view(kind)
    held, runs = Held(stored), Runs()
    word, per = word_of(kind.itemsize)
    out = np.empty((*piece.shape, per) if per > 1 else piece.shape, word)
    crc = held.fill(piece, out, runs)
    assert crc is None or crc == zlib.crc32(out.tobytes())
    assert [run[:3] for run in runs.runs] == held.reads
    for _, start, stop, crc in runs.runs:
        assert crc == zlib.crc32(stored.view(torch.uint8).numpy()[start:stop])


@pytest.mark.parametrize(("rows", "columns", "left", "right"), [(64, 4096, 0, 2048), (3, 1 << 20, 5, 1 << 19)])
def test_long_runs_are_read_once_and_nothing_between_them(rows, columns, left, right):
    stored = torch.arange(rows * columns, dtype=torch.int32).view(torch.float32)
    piece = AffinePiece((rows, right - left), 0, (right - left, 1), left, (columns, 1), (0,))
    held = Held(stored)
    found = held.take(AffinePiece(piece.shape, 0, piece.source_strides, left, (columns, 1), (0,)))
    assert found.tobytes() == stored.reshape(rows, columns)[:, left:right].contiguous().numpy().tobytes()
    if columns > 2 * (right - left) - 1:
        assert held.bytes_read <= 2.05 * found.nbytes


def test_sparse_rows_cost_only_their_own_bytes():
    stored = torch.zeros(64 * 65536, dtype=torch.float32)
    held = Held(stored)
    piece = AffinePiece((64, 2048), 0, (2048, 1), 7, (65536, 1), (0,))
    held.take(piece)
    assert held.bytes_read == piece.numel * 4
    assert len(held.reads) == 64


def test_memory_is_one_buffer_a_thread():
    stored = torch.zeros(9 << 20, dtype=torch.float32)
    held = Held(stored)
    # Transposed: every element of a row lies in another row of the storage.
    piece = AffinePiece((512, 3), 0, (3, 1), 0, (1, 3 << 20), (0,))
    held.take(piece)
    assert max(stop - start for _, start, stop in held.reads) <= gather.SCRATCH_BYTES
