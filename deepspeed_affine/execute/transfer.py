"""Carrying out a transfer plan in memory: strided copies from source shards into target shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch

from deepspeed_affine.errors import Faults, IntegrityError, PolicyError, UnsupportedLayoutError
from deepspeed_affine.execute.memory import as_words, dense, strided_view, times, word_view
from deepspeed_affine.execute.shard_memory import multiplies, overfilled, sharing, unfit, unsound, unusable
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.plan.segments import TransferSegment
from deepspeed_affine.plan.transfer_plan import TransferPlan, misfilled

__all__ = ["run_plan"]

Flats = Mapping[int, torch.Tensor]


def run_plan(
    plan: TransferPlan,
    sources: Mapping[int, torch.Tensor],
    targets: Mapping[int, torch.Tensor],
    scale_power: int = 1,
) -> None:
    """``targets`` (rank to shard, dense) hold what the plan moves into them from ``sources``; the rest is as it was.

    Bytes are copied as they are, and where a segment is scaled multiplied once by its scale to ``scale_power`` (-1 and
    -2 for Adam's moments), rounding once. A plan for more target ranks than are given fills those that are. What does
    not fit is refused before a byte is written: a source rank that is needed and missing, shards of another size or
    dtype, targets that are not dense or share memory, integers to be scaled, a plan that fills an address twice.
    """
    if type(scale_power) is not int:
        raise PolicyError(f"scale_power is {shown(scale_power)}; expected an integer.")
    segments = [each for each in plan.segments if each.target_rank in targets and each.numel]
    if not all(each.is_sound for each in segments):
        raise unsound("the plan")
    _check_plan(plan, segments, targets)
    read = _sources(segments, sources)
    written = {rank: shard.detach().view(-1) for rank, shard in targets.items()}
    _check_kinds(segments, read, written, scale_power)
    for segment in segments:
        _copy(segment, read[segment.source_rank], written[segment.target_rank], scale_power)


def _check_plan(plan: TransferPlan, segments: Sequence[TransferSegment], targets: Flats) -> None:
    """The targets are dense, and the plan fills every address they have once or says that it does not."""
    faults = Faults()
    numels = {rank: sum([each.numel for each in plan.unfilled.get(rank, ())]) for rank in targets}
    for segment in segments:
        numels[segment.target_rank] += segment.numel
    for rank, shard in targets.items():
        where = f"target shard of rank {rank}"
        fault = unusable(shard, where, True) or unfit(shard.numel(), where, numels[rank], "target")
        if fault is not None:
            faults.add(fault)
    wrong = misfilled(segments, {rank: plan.unfilled.get(rank, ()) for rank in targets})
    if wrong is not None:
        faults.add(overfilled(f"target shard of rank {wrong}", rank=wrong))
    faults.raise_if_any()


def _sources(segments: Sequence[TransferSegment], sources: Flats) -> dict[int, torch.Tensor]:
    """The source shards that are read, flat."""
    faults = Faults()
    reach: dict[int, int] = defaultdict(int)
    for segment in segments:
        reach[segment.source_rank] = max(reach[segment.source_rank], segment.source_reach)
    found = {}
    for rank, numel in sorted(reach.items()):
        if rank not in sources:
            raise IntegrityError(
                f"The plan reads from rank {rank}, whose shard was not given; given are ranks {sorted(sources)}. "
                "Give every source shard the plan names.",
                rank=rank,
            )
        found[rank] = dense(sources[rank])
        where = f"source shard of rank {rank}"
        fault = unusable(found[rank], where, False) or unfit(found[rank].numel(), where, numel, "source")
        if fault is not None:
            faults.add(fault)
    faults.raise_if_any()
    return found


def _check_kinds(segments: Sequence[TransferSegment], sources: Flats, targets: Flats, scale_power: int) -> None:
    """Source and target of every segment have one dtype, which can be scaled where that is asked for, and no memory
    in common."""
    for segment in segments:
        theirs, ours = sources[segment.source_rank].dtype, targets[segment.target_rank].dtype
        if theirs != ours:
            raise IntegrityError(
                f"Source rank {segment.source_rank} holds {theirs}, target rank {segment.target_rank} {ours}; expected "
                "one dtype. Convert one side first.",
                rank=segment.target_rank,
            )
        if segment.scale == 1.0 or not scale_power:
            continue
        if not multiplies(ours):
            raise UnsupportedLayoutError(
                f"Target rank {segment.target_rank} holds a block times {segment.scale}, which {ours} cannot carry; "
                "expected a floating dtype of eight bits or more.",
                rank=segment.target_rank,
            )
        times(torch.empty(0), Fraction(segment.scale) ** scale_power)
    faults = Faults()
    sides = (("source", sources), ("target", targets))
    faults.extend(sharing([(side, f"rank {rank}", flat) for side, held in sides for rank, flat in held.items()]))
    faults.raise_if_any()


def _copy(segment: TransferSegment, source: torch.Tensor, target: torch.Tensor, scale_power: int) -> None:
    """The segment's block of ``target`` (flat) holds that of ``source`` (flat), scaled where the segment says so."""
    shape = segment.shape
    factor = Fraction(segment.scale) ** scale_power
    if factor == 1:
        read = word_view(as_words(source), source, shape, segment.source_offset, segment.source_strides)
        word_view(as_words(target), target, shape, segment.target_offset, segment.target_strides).copy_(read)
    else:
        block = strided_view(source, shape, segment.source_offset, segment.source_strides)
        strided_view(target, shape, segment.target_offset, segment.target_strides).copy_(times(block, factor))
