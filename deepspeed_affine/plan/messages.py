"""What two processes send each other of a plan: its segments cut to a bounded size and packed into messages.

Everything here follows from the plan alone, so that both ends know every message without asking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.plan.model import ModelPlan
from deepspeed_affine.plan.segments import TransferSegment

__all__ = [
    "ALIGNMENT",
    "DIRECT_BYTES",
    "LEAST_BYTES",
    "Message",
    "Part",
    "cut",
    "is_run",
    "messages",
    "segments_by_pair",
]

ALIGNMENT = 16
"""Every part of a message starts at a multiple of the widest element's bytes, and so can be read as what it is."""

LEAST_BYTES = 4 << 10
"""The smallest bound on a message that is worth anything."""

DIRECT_BYTES = 1 << 20
"""From this size on a block that lies in one run of memory is a message of its own and is not packed."""

Pair = tuple[int, int]
"""``(source process, target process)``."""


@dataclass(frozen=True, slots=True)
class Part:
    """One block of a message: of which parameter, the copy it is a part of, and where in the message, in bytes."""

    param: str
    block: TransferSegment
    start: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.block.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """Blocks that travel together, one after another. ``nbytes`` is what is sent, the gaps of alignment included."""

    parts: tuple[Part, ...]
    nbytes: int

    @property
    def payload(self) -> int:
        """The bytes of elements in it."""
        return sum([part.nbytes for part in self.parts])


def segments_by_pair(plan: ModelPlan) -> dict[Pair, list[tuple[str, TransferSegment]]]:
    """Every segment that has elements by who sends it to whom, in order of parameter names and the plan's own."""
    found: dict[Pair, list[tuple[str, TransferSegment]]] = {}
    for name in sorted(plan.plans):
        for segment in plan.plans[name].segments:
            if segment.numel:
                found.setdefault((segment.source_rank, segment.target_rank), []).append((name, segment))
    return dict(sorted(found.items()))


def messages(
    segments: Iterable[tuple[str, TransferSegment]], itemsizes: Mapping[str, int], limit: int
) -> Iterator[Message]:
    """Yield the messages that carry a pair's segments, each of at most ``limit`` bytes, every element in one.

    Small blocks share a message; a large one that is a run of memory on either side has its own, so that this side
    needs no copy of it. Raises PolicyError for a limit below ``LEAST_BYTES``. Linear in segments and messages.
    """
    if limit < LEAST_BYTES:
        raise PolicyError(f"A message has at most {limit} bytes; expected {LEAST_BYTES} or more.")
    direct = min(DIRECT_BYTES, limit // 4)
    parts: list[Part] = []
    end = 0
    for name, segment in segments:
        itemsize = itemsizes[name]
        for block in cut(segment, limit // itemsize):
            nbytes = block.numel * itemsize
            runs = is_run(block.shape, block.source_strides) or is_run(block.shape, block.target_strides)
            if nbytes >= direct and runs:
                yield Message((Part(name, block, 0, itemsize),), nbytes)
                continue
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if start + nbytes > limit:
                yield Message(tuple(parts), end)
                parts, start = [], 0
            parts.append(Part(name, block, start, itemsize))
            end = start + nbytes
    if parts:
        yield Message(tuple(parts), end)


def cut(segment: TransferSegment, room: int) -> Iterator[TransferSegment]:
    """Yield the segment in parts of at most ``room`` elements, cut along its outer axes, in order."""
    if segment.numel <= room:
        yield segment
        return
    extent, inner = segment.shape[0], segment.numel // segment.shape[0]
    rows = max(1, room // inner)
    for first in range(0, extent, rows):
        axes = (min(rows, extent - first), *segment.shape[1:])
        drop = 1 if inner > room else 0
        yield from cut(
            TransferSegment(
                segment.source_rank,
                segment.source_offset + first * segment.source_strides[0],
                segment.source_strides[drop:],
                segment.target_rank,
                segment.target_offset + first * segment.target_strides[0],
                segment.target_strides[drop:],
                axes[drop:],
                segment.scale,
            ),
            room,
        )


def is_run(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the block's elements, in row-major order, are neighbours in memory."""
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True
