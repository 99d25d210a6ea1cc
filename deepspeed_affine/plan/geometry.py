"""What the target of one pair of maps needs of the source, worked out once for all parameters that lie alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed_affine.ir import ParamAffineMap, Region
from deepspeed_affine.ir.lattice import Lattice
from deepspeed_affine.plan.holdings import Holdings, Need, needs
from deepspeed_affine.plan.replicas import copied, ratio
from deepspeed_affine.plan.segments import TransferSegment
from deepspeed_affine.plan.transfer import (
    PlanBudget,
    check_maps,
    check_supply,
    check_valid,
    folded,
    pair_budget,
    restricted,
    restricted_numel,
)

__all__ = ["Geometry", "geometry_of"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What each target location needs from each class of source locations, and the segments worked out so far."""

    needs: list[Need]
    shape: tuple[int, ...]
    unfilled: Mapping[int, tuple[Region, ...]]
    segments: dict[tuple[tuple[int, ...], int], tuple[TransferSegment, ...]]

    def between(self, numbers: tuple[int, ...], source: int) -> tuple[TransferSegment, ...]:
        """The segments of some needs of one target location, all served by one source location."""
        key = (numbers, source)
        if key not in self.segments:
            copies: dict[tuple[int, int, float], list[Lattice]] = defaultdict(list)
            for number in numbers:
                need = self.needs[number]
                copies[source, need.target, ratio(need)] += copied(need, source, self.shape)
            self.segments[key] = folded(copies)
        return self.segments[key]


def geometry_of(
    target: ParamAffineMap, source: ParamAffineMap, rows: int | None, *, partial: bool, budget: PlanBudget
) -> Geometry:
    """The geometry of moving between two maps, checked: both are whole, and the source has what the target needs.

    ``rows`` is the real height of F where that is not its own. Raises what ``plan_transfer`` raises of them.
    """
    check_maps(target, source, budget)
    check_valid(target, source, partial)
    ours, theirs = restricted(target, source, rows)
    pairs = pair_budget(budget)
    held = Holdings(theirs, None if partial else restricted_numel(source, rows), pairs)
    found = needs(ours, held, ours.ranks, pairs)
    wanted = {rank: sum([piece.numel for piece in ours.pieces_by_rank[rank]]) for rank in ours.ranks}
    check_supply(ours, found, wanted)
    for need in found:
        # Refused here, where it can still be said of which parameter.
        ratio(need)
    unfilled = {rank: tuple(ours.gaps(rank)) for rank in ours.ranks if wanted[rank] < ours.shard_numel(rank)}
    return Geometry(found, held.shape, unfilled, {})
