"""What follows from a plan alone, for one process: what it needs of each shard, and its turns in a transfer.

It is worked out once for as long as the plan lives, because weights are moved again and again by the same plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from deepspeed_affine.plan.messages import Message, messages, segments_by_pair
from deepspeed_affine.plan.model import ModelPlan
from deepspeed_affine.plan.rounds import rounds
from deepspeed_affine.plan.segments import TransferSegment
from deepspeed_affine.plan.transfer_plan import misfilled

__all__ = ["Needs", "Schedule", "Turn", "needs_of", "schedule_of"]

Segments = tuple[tuple[str, TransferSegment], ...]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Needs:
    """What the plan says of a process's shards.

    ``source`` is how many elements of a source shard are read up to the last; ``target`` how many a target shard has:
    every one is in one segment or is unfilled, except of parameters in ``misfilled``; of those in ``unsound`` a segment
    of this process contradicts itself. ``scaled`` names parameters with scaled segments, ``scales`` has those that are
    not 1, and ``first`` and ``last`` are the lowest process the plan names, or 0, and the highest.
    """

    digest: str
    source: Mapping[str, int]
    target: Mapping[str, int]
    misfilled: frozenset[str]
    unsound: frozenset[str]
    scaled: frozenset[str]
    scales: tuple[float, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a process does in the round of this number."""

    number: int
    sent: Message | None = None
    target: int = -1
    received: Message | None = None
    source: int = -1


@dataclass(frozen=True, slots=True)
class Schedule:
    """A process's turns by round, how many rounds there are for all, what it copies itself, and all its bytes."""

    turns: Mapping[int, Turn]
    rounds: int
    local: Segments
    total: int


def needs_of(plan: ModelPlan, rank: int, digest: Callable[[], str]) -> Needs:
    """What ``plan`` needs of process ``rank``; linear in the plan's segments, once."""
    return _kept(plan, ("needs", rank), lambda: _needs(plan, rank, digest()))


def schedule_of(plan: ModelPlan, rank: int, itemsizes: Mapping[str, int], limit: int) -> Schedule:
    """The turns of process ``rank``, messages having at most ``limit`` bytes.

    Of messages between others only the number is kept. Linear in segments and messages, once.
    """
    key = ("schedule", rank, limit, tuple(sorted(itemsizes.items())))
    return _kept(plan, key, lambda: _schedule(plan, rank, itemsizes, limit))


def _needs(plan: ModelPlan, rank: int, digest: str) -> Needs:
    source: dict[str, int] = {}
    target: dict[str, int] = {}
    filled: dict[str, list[TransferSegment]] = {}
    scaled, scales, unsound, first, last = set(), set(), set(), 0, -1
    for name, each in plan.plans.items():
        for segment in each.segments:
            first = min(first, segment.source_rank, segment.target_rank)
            last = max(last, segment.source_rank, segment.target_rank)
            if not segment.numel:
                continue
            concerned = rank in (segment.source_rank, segment.target_rank) or segment.scale != 1.0
            if concerned and not segment.is_sound:
                unsound.add(name)
                continue
            if segment.source_rank == rank:
                source[name] = max(source.get(name, 0), segment.source_reach)
            if segment.target_rank == rank:
                target[name] = target.get(name, 0) + segment.numel
                filled.setdefault(name, []).append(segment)
            if segment.scale != 1.0:
                scaled.add(name)
                scales.add(segment.scale)
        unfilled = sum([region.numel for region in each.unfilled.get(rank, ())])
        if unfilled:
            target[name] = target.get(name, 0) + unfilled
    wrong = [
        name
        for name, segments in filled.items()
        if misfilled(segments, {rank: plan.plans[name].unfilled.get(rank, ())}) is not None
    ]
    return Needs(
        digest,
        source,
        target,
        frozenset(wrong),
        frozenset(unsound),
        frozenset(scaled),
        tuple(sorted(scales)),
        first,
        last,
    )


def _schedule(plan: ModelPlan, rank: int, itemsizes: Mapping[str, int], limit: int) -> Schedule:
    counts: dict[tuple[int, int], int] = {}
    own: dict[tuple[int, int], list[Message]] = {}
    pairs = segments_by_pair(plan)
    for pair, segments in pairs.items():
        if pair[0] == pair[1]:
            continue
        made = messages(segments, itemsizes, limit)
        if rank in pair:
            own[pair] = list(made)
            counts[pair] = len(own[pair])
        else:
            counts[pair] = sum(1 for _ in made)
    when = rounds(counts)
    sends: dict[int, tuple[Message, int]] = {}
    receives: dict[int, tuple[Message, int]] = {}
    for (sender, receiver), listed in own.items():
        for number, message in zip(when[sender, receiver], listed, strict=True):
            if sender == rank:
                sends[number] = (message, receiver)
            else:
                receives[number] = (message, sender)
    turns = {
        number: Turn(number, *sends.get(number, (None, -1)), *receives.get(number, (None, -1)))
        for number in sorted({*sends, *receives})
    }
    local = tuple(pairs.get((rank, rank), ()))
    total = sum([each.numel * itemsizes[name] for name, each in local])
    total += sum([message.payload for message, _ in (*sends.values(), *receives.values())])
    return Schedule(turns, 1 + max([numbers[-1] for numbers in when.values()], default=-1), local, total)


_KEPT: dict[int, tuple[weakref.ref[ModelPlan], dict[Any, Any]]] = {}


def _kept(plan: ModelPlan, key: Any, work: Callable[[], Value]) -> Value:
    """What ``work`` returned for this very plan when it was first asked for."""
    number = id(plan)
    known = _KEPT.get(number)
    if known is None or known[0]() is not plan:
        known = _KEPT[number] = (weakref.ref(plan, lambda _: _KEPT.pop(number, None)), {})
    if key not in known[1]:
        known[1][key] = work()
    return cast(Value, known[1][key])
