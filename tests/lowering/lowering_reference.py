"""A few lines of torch that apply a map literally, independent of the package's own executor."""

import torch


def rebuild(param_map, shards):
    """F from the shards, every piece copied as ``torch.as_strided`` says; NaN marks what nobody wrote."""
    dtype = next(shard.dtype for shard in shards.values() if shard is not None)
    full = torch.full((param_map.numel,), float("nan"), dtype=dtype)
    for rank, pieces in param_map.pieces_by_rank.items():
        flat = shards[rank].contiguous().reshape(-1).clone()
        for piece in pieces:
            block = torch.as_strided(flat, piece.shape, piece.dest_strides, piece.dest_offset)
            target = torch.as_strided(full, piece.shape, piece.source_strides, piece.source_offset)
            target.copy_(block / piece.scale)
    return full.view(param_map.logical_shape)


def extract(param_map, full, rank):
    """Rank ``rank``'s shard of F, every piece copied as ``torch.as_strided`` says."""
    shape = param_map.shard_shapes[rank]
    numel = 1
    for extent in shape:
        numel *= extent
    shard = torch.full((numel,), float("nan"), dtype=full.dtype)
    flat = full.contiguous().reshape(-1).clone()
    for piece in param_map.pieces_by_rank[rank]:
        block = torch.as_strided(flat, piece.shape, piece.source_strides, piece.source_offset)
        torch.as_strided(shard, piece.shape, piece.dest_strides, piece.dest_offset).copy_(block * piece.scale)
    return shard.view(shape)


def same_bytes(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(
            left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
        )
    )
