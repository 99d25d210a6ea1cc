"""A transfer plan as data: the copies of one parameter, in memory, as JSON, and by its id."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir import Region
from deepspeed_affine.ir.fingerprint import PRIME, Fingerprint
from deepspeed_affine.ir.ints import INT64_MAX, as_extents, as_integer, shown
from deepspeed_affine.plan.segments import TransferSegment

__all__ = ["PlanStatistics", "TransferPlan", "misfilled"]

RANK = re.compile(r"0|[1-9][0-9]{0,18}")
"""A rank as JSON has it for a key."""


_HASHED_TOGETHER = 4096
"""Segments whose text is made at a time."""


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """What the planner looked at; pair checks and segments before merging tell a large model from a cut-up one."""

    source_pieces: int
    target_pieces: int
    pair_checks: int
    segments_before_merge: int
    segments: int
    plan_bytes: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The copies that move one parameter, in order of target rank and address; every target element is in one.

    ``unfilled`` has, for target ranks that have such, the addresses that get nothing: a vocabulary's padding rows,
    which the target must initialise itself, and what a partial target map leaves out. The statistics do not count for
    equality.
    """

    segments: tuple[TransferSegment, ...]
    logical_shape: tuple[int, ...]
    moved_elements: int
    unfilled: Mapping[int, tuple[Region, ...]] = field(default_factory=dict, hash=False)
    statistics: PlanStatistics | None = field(default=None, compare=False)

    @property
    def exact(self) -> bool:
        """Whether no segment's scale rounds."""
        return all(segment.exact for segment in self.segments)

    def to_dict(self) -> dict[str, Any]:
        """Plain scalars, in DeepSpeed 0.19.8's form; ``unfilled`` is left out when it is empty."""
        entry: dict[str, Any] = {
            "logical_shape": list(self.logical_shape),
            "segments": [segment.to_dict() for segment in self.segments],
        }
        if self.unfilled:
            entry["unfilled"] = {
                rank: [[region.offset, list(region.shape), list(region.strides)] for region in regions]
                for rank, regions in self.unfilled.items()
            }
        return entry

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> TransferPlan:
        """Read what ``to_dict`` wrote, also by way of JSON; anything else is an ``InvalidMapError``.

        Proved with it: each address of a target rank up to the last is in exactly one segment, or unfilled.
        """
        if not isinstance(entry, Mapping) or not isinstance(entry.get("segments"), (list, tuple)):
            raise InvalidMapError(f"A transfer plan is {shown(entry)}; expected a mapping with a list of segments.")
        unknown = set(map(str, entry)) - {"logical_shape", "segments", "unfilled"}
        if unknown:
            raise InvalidMapError(f"A transfer plan has members {sorted(unknown)}, which this version does not know.")
        segments = tuple([TransferSegment.from_dict(each) for each in entry["segments"]])
        shape = as_extents(entry.get("logical_shape"), "A plan's logical shape")
        unfilled = entry.get("unfilled", {})
        if not isinstance(unfilled, Mapping):
            raise InvalidMapError(f"A plan's unfilled addresses are {shown(unfilled)}; expected a mapping from rank.")
        gaps: dict[int, tuple[Region, ...]] = {}
        for rank, rows in unfilled.items():
            if gaps.setdefault(_rank_key(rank), found := tuple(_regions(rows))) is not found:
                raise InvalidMapError(f"A plan's unfilled addresses name rank {shown(rank)} twice; expected it once.")
        wrong = misfilled(segments, gaps)
        if wrong is not None:
            raise InvalidMapError(
                f"A plan's segments for target rank {wrong} overlap, or leave out addresses below the last; expected "
                "each in one segment, or unfilled. The plan is damaged: plan again.",
                rank=wrong,
            )
        return cls(segments, shape, sum([each.numel for each in segments]), gaps)

    def to_json(self) -> bytes:
        """``to_dict`` as compact JSON, the same for equal plans."""
        return json.dumps(self.to_dict(), separators=(",", ":"), sort_keys=True).encode()

    @property
    def most_bytes(self) -> int:
        """What ``to_json`` takes at the most, in bytes, without making it."""
        numbers = 4 + 3 * max([len(each.shape) for each in self.segments], default=0)
        regions = sum([1 + 2 * len(each.shape) for rows in self.unfilled.values() for each in rows])
        others = regions + len(self.unfilled) + len(self.logical_shape) + 2
        return len(self.segments) * (96 + 20 * numbers) + 32 * others

    def plan_id(self) -> str:
        """A sha256 of all that makes plans equal: one value for equal plans, in any process, read from JSON or made."""
        gaps = [(rank, [(x.offset, x.shape, x.strides) for x in self.unfilled[rank]]) for rank in sorted(self.unfilled)]
        digest = hashlib.sha256(repr((self.logical_shape, gaps)).encode())
        for first in range(0, len(self.segments), _HASHED_TOGETHER):
            rows = [each.row for each in self.segments[first : first + _HASHED_TOGETHER]]
            digest.update(repr(rows).encode())
        return digest.hexdigest()


def misfilled(segments: Iterable[TransferSegment], unfilled: Mapping[int, Iterable[Region]]) -> int | None:
    """The first target rank of whose addresses ``0`` to ``n - 1`` some are filled twice or neither filled nor unfilled.

    ``n`` is how many elements the rank's segments and regions have. Linear in both, whatever their sizes.
    """
    values, numels = defaultdict[int, int](int), defaultdict[int, int](int)
    at = _point()
    for segment in segments:
        values[segment.target_rank] += at.block(segment.target_offset, segment.shape, segment.target_strides)
        numels[segment.target_rank] += segment.numel
    for rank, regions in unfilled.items():
        for region in regions:
            values[rank] += at.block(region.offset, region.shape, region.strides)
            numels[rank] += region.numel
    for rank in sorted(values):
        if numels[rank] > INT64_MAX or (values[rank] - at.progression(numels[rank], 1)) % PRIME:
            return rank
    return None


@cache
def _point() -> Fingerprint:
    """The one secret point at which this process proves plans: preparing one takes longer than a small plan."""
    return Fingerprint()


def _rank_key(rank: object) -> int:
    return as_integer(int(rank) if isinstance(rank, str) and RANK.fullmatch(rank) else rank, "A rank")


def _regions(rows: object) -> Iterable[Region]:
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, (list, tuple)) and len(row) == 3 for row in rows):
        raise InvalidMapError(f"A plan's unfilled addresses are {shown(rows)}; expected [offset, shape, strides] each.")
    return [Region(*row) for row in rows]
