"""Run by pytest in your own CI: proves that a partition function is what its affine map says.

pytest examples/test_partition_in_your_ci.py
"""

import torch

from deepspeed_affine.parity import assert_partition

HEAD_DIM, HEADS, KV_HEADS, WIDTH, RANKS = 4, 6, 3, 24, 2


def split_fused_qkv(weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Three key/value heads over two ranks: two heads, and one. Each brings its query heads along."""
    per_kv = HEADS // KV_HEADS
    query, key, value = weight.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
    first, last = (0, 2) if rank == 0 else (2, 3)
    heads = slice(first * HEAD_DIM, last * HEAD_DIM)
    query_heads = slice(first * per_kv * HEAD_DIM, last * per_kv * HEAD_DIM)
    return torch.cat([query[query_heads], key[heads], value[heads]])


def test_the_fused_projection_is_cut_at_whole_heads():
    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    layout = assert_partition(split_fused_qkv, (rows, WIDTH), RANKS)
    assert layout.shard_shapes[0] == (32, WIDTH)
    assert layout.shard_shapes[1] == (16, WIDTH)
    # One block of query rows; key and value rows are alike and lie evenly apart, so they fold into one strided piece.
    assert [len(layout.pieces_by_rank[rank]) for rank in range(RANKS)] == [2, 2]
