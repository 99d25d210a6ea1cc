"""Parts of a shard read from a stored full tensor equal the same part of the extracted shard."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.execute.shards import ShardPart
from deepspeed_affine.ir import (
    AffinePiece,
    ParamAffineMap,
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.universal import read_state

LAYOUTS = {
    "columns": contiguous_split_map((7, 6), [2, 4], 1),
    "rows": contiguous_split_map((7, 6), [3, 4], 0),
    "whole": replicated_map((7, 6), 2),
    "fused": sub_param_map((7, 6), [4, 3], [[1, 3], [2, 1]], 0),
    "segments": segmented_map((7, 6), [(4, False), (3, True)], 0, 2, split_widths=[[1, 3]]),
    "blocks": block_gather_map((8, 6), {0: [3, 0], 1: [2, 1]}, 2, 0),
}


def stored_tensor(tmp_path, full, name="fp32"):
    torch.save({"param": full}, tmp_path / f"{name}.pt")
    return read_state(str(tmp_path / f"{name}.pt")).tensor


def read(part, dtype=torch.float32, **options):
    out = torch.full((part.numel,), float("nan"), dtype=dtype)
    with ByteReader() as reader:
        part.fill(out, reader, **options)
    return out


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_interval_of_every_shard(tmp_path, layout, transposed):
    full = torch.randn(layout.logical_shape)
    if transposed:
        full = full.t().contiguous().t()
    stored = stored_tensor(tmp_path, full)
    for rank in layout.ranks:
        shard = layout.extract(full, rank).flatten()
        for start in range(shard.numel() + 1):
            for stop in range(start, shard.numel() + 1, 5):
                part = ShardPart(stored, layout, rank, start, stop - start)
                assert part.covered == part.numel == stop - start
                assert part.nbytes == 4 * part.numel
                assert torch.equal(read(part), shard[start:stop])


@given(st.data())
def test_any_interval_in_another_dtype(tmp_path_factory, data):
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.get))
    kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    kind, wanted = data.draw(kinds), data.draw(kinds)
    full = torch.arange(layout.numel).reshape(layout.logical_shape).to(kind) / 3
    stored = stored_tensor(tmp_path_factory.mktemp("f"), full)
    rank = data.draw(st.sampled_from(layout.ranks))
    shard = layout.extract(full, rank).flatten().to(wanted)
    start = data.draw(st.integers(0, shard.numel()))
    stop = data.draw(st.integers(start, shard.numel()))
    assert torch.equal(read(ShardPart(stored, layout, rank, start, stop - start), wanted), shard[start:stop])


def test_rows_that_are_not_stored_are_zero_and_counted(tmp_path):
    layout = contiguous_split_map((8, 3), [4, 4], 0)
    full = torch.randn(7, 3)
    stored = stored_tensor(tmp_path, full)
    part = ShardPart(stored, layout, 1, 0, 12)
    assert part.covered == 9
    assert torch.equal(read(part), torch.cat([full[4:], torch.zeros(1, 3)]).flatten())
    assert torch.equal(read(ShardPart(stored, layout, 1, 9, 3)), torch.zeros(3))


@pytest.mark.parametrize(("power", "factor"), [(1, 0.25), (0, 1.0), (-1, 4.0), (-2, 16.0)])
def test_scaled_pieces(tmp_path, power, factor):
    pieces = {rank: [AffinePiece((5,), 0, (1,), 0, (1,), (0, 1), 0.25)] for rank in range(2)}
    layout = ParamAffineMap((5,), {0: (5,), 1: (5,)}, pieces)
    full = torch.randn(5)
    part = ShardPart(stored_tensor(tmp_path, full), layout, 1, 1, 3)
    assert torch.equal(read(part, power=power), full[1:4] * factor)


def test_only_the_bytes_it_needs_are_read(tmp_path, monkeypatch):
    layout = contiguous_split_map((64, 4096), [32, 32], 0)
    stored = stored_tensor(tmp_path, torch.randn(64, 4096))
    taken = []
    into = ByteReader.read_into
    monkeypatch.setattr(ByteReader, "read_into", lambda self, *a: (taken.append(len(a[2])), into(self, *a))[1])
    part = ShardPart(stored, layout, 1, 5 * 4096, 3 * 4096)
    read(part)
    assert sum(taken) == part.nbytes == 3 * 4096 * 4
