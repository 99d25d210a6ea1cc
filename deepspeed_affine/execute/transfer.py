"""Carrying out a transfer plan in memory: strided copies from source shards into target shards."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch

from deepspeed_affine.errors import IntegrityError
from deepspeed_affine.execute.memory import as_words, dense, strided_view, times, word_view
from deepspeed_affine.plan.segments import TransferSegment
from deepspeed_affine.plan.transfer_plan import TransferPlan

__all__ = ["copy_segment", "run_plan"]


def run_plan(
    plan: TransferPlan,
    sources: Mapping[int, torch.Tensor],
    targets: Mapping[int, torch.Tensor],
    scale_power: int = 1,
) -> None:
    """``targets`` (rank to shard, dense) hold what the plan moves into them from ``sources``; the rest is as it was.

    Bytes are copied as they are, and where a segment is scaled multiplied once by its scale to ``scale_power`` (-1 and
    -2 for Adam's moments), rounding once. A plan for more target ranks than are given fills those that are. Raises
    IntegrityError for a source rank that is needed and missing, and for shards of different dtypes.
    """
    flats = {rank: dense(shard) for rank, shard in sources.items()}
    for segment in plan.segments:
        if segment.target_rank not in targets:
            continue
        if segment.source_rank not in flats:
            raise IntegrityError(
                f"The plan reads from rank {segment.source_rank}, whose shard was not given; given are ranks "
                f"{sorted(flats)}. Give every source shard the plan names.",
                rank=segment.source_rank,
            )
        copy_segment(segment, flats[segment.source_rank], targets[segment.target_rank], scale_power)


def copy_segment(segment: TransferSegment, source: torch.Tensor, target: torch.Tensor, scale_power: int = 1) -> None:
    """The segment's block of ``target`` (dense) holds that of ``source`` (dense), scaled where the segment says so."""
    if source.dtype != target.dtype:
        raise IntegrityError(
            f"Source rank {segment.source_rank} holds {source.dtype}, target rank {segment.target_rank} "
            f"{target.dtype}; expected one dtype. Convert one side first.",
            rank=segment.target_rank,
        )
    shape = segment.shape
    factor = Fraction(segment.scale) ** scale_power
    flat = target.detach().view(-1)
    if factor == 1:
        read = word_view(as_words(source), source, shape, segment.source_offset, segment.source_strides)
        word_view(as_words(flat), flat, shape, segment.target_offset, segment.target_strides).copy_(read)
    else:
        block = strided_view(source, shape, segment.source_offset, segment.source_strides)
        strided_view(flat, shape, segment.target_offset, segment.target_strides).copy_(times(block, factor))
