"""Plan a parameter's move from one sharding to another without building it: M_t after the inverse of M_s.

Both maps address F, which is only the place where they meet: every segment of a plan leads from an address in a source
shard to an address in a target shard. Segments are grouped by source and target rank first and then folded in all
dimensions together, so that their number follows the two topologies and not the size of the parameter (the affine
draft, S8.2). Names follow ``deepspeed.checkpoint.affine_transfer`` of DeepSpeed 0.19.8 where the concept is the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from deepspeed_affine.errors import BudgetExceededError, InvalidMapError, PolicyError
from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.ir.canonical import fold_pairs
from deepspeed_affine.ir.difference import subtract
from deepspeed_affine.ir.ints import as_integer, coordinates, product, shown
from deepspeed_affine.ir.lattice import Budget, Lattice, proper
from deepspeed_affine.plan.checks import about, check_flags
from deepspeed_affine.plan.collector import collector_paused
from deepspeed_affine.plan.holdings import Holdings, Need, needs
from deepspeed_affine.plan.placement import as_itemsize
from deepspeed_affine.plan.replicas import Copies, Policy, ReplicaSelector, check_policy, chosen, selected
from deepspeed_affine.plan.segments import TransferSegment
from deepspeed_affine.plan.transfer_plan import PlanStatistics, TransferPlan

__all__ = [
    "PlanBudget",
    "as_budget",
    "check_bytes",
    "check_maps",
    "check_segments",
    "check_supply",
    "check_valid",
    "folded",
    "pair_budget",
    "plan_transfer",
    "restricted",
    "restricted_numel",
]


@dataclass(frozen=True, slots=True)
class PlanBudget:
    """Limits on a plan; exceeding one is a ``BudgetExceededError`` and never a shortened plan.

    ``max_pair_checks`` counts pairs of pieces whose bounding boxes overlap, ``max_plan_bytes`` is of compact JSON.
    """

    max_ndim: int = 64
    max_pieces_per_map: int = 1 << 20
    max_pair_checks: int = 1 << 22
    max_segments: int = 1 << 20
    max_plan_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        for limit in fields(self):
            as_integer(getattr(self, limit.name), limit.name)


@collector_paused()
def plan_transfer(
    target_map: ParamAffineMap,
    source_map: ParamAffineMap,
    limits: PlanBudget | None = None,
    *,
    policy: Policy = "balanced",
    replica_selector: ReplicaSelector | None = None,
    same_ranks: bool = False,
    valid_rows: int | None = None,
    partial: bool = False,
    target_ranks: Iterable[int] | None = None,
    itemsize: int = 4,
) -> TransferPlan:
    """Return the copies from shards laid out by ``source_map`` into shards laid out by ``target_map``.

    Any pieces the maps can express are planned: permuted and strided ones, replicas cut differently on each side,
    scaled ones. ``same_ranks`` says that rank r is one process on both sides, which then copies what it holds itself.
    ``valid_rows`` is a vocabulary's real height where the two F differ in padding: rows beyond it are never read, and
    the target's are reported as ``unfilled``. ``partial`` accepts a target that does not describe all of F or of its
    shards, and a source that holds only what the target needs. ``target_ranks`` plans for these alone. ``itemsize``
    (bytes of an element) only serves the balance's thresholds. ``replica_selector`` is called for every block several
    ranks hold and returns one of the candidates' ranks; it replaces the policy.

    Raises InvalidMapError where a map contradicts itself or the two describe different parameters, PolicyError for a
    selector's wrong answer, BudgetExceededError beyond ``limits``. Near-linear in pieces and segments, whatever size.
    """
    budget = as_budget(limits)
    check_policy(policy)
    check_flags(same_ranks=same_ranks, partial=partial)
    itemsize = as_itemsize(itemsize, "The itemsize")
    check_maps(target_map, source_map, budget)
    check_valid(target_map, source_map, partial)
    target, source = restricted(target_map, source_map, valid_rows)
    ranks = _planned_ranks(target, target_ranks)
    pairs = pair_budget(budget)
    held = Holdings(source, None if partial else restricted_numel(source_map, valid_rows), pairs)
    found = needs(target, held, ranks, pairs)
    wanted = {rank: sum([piece.numel for piece in target.pieces_by_rank[rank]]) for rank in ranks}
    check_supply(target, found, wanted)
    if replica_selector is not None:
        if not callable(replica_selector):
            raise PolicyError(f"replica_selector is {shown(replica_selector)}; expected a function.")
        copies = selected(found, held.shape, replica_selector)
    else:
        copies = chosen(found, held.shape, policy, same_ranks, itemsize)
    before = sum([len(each) for each in copies.values()])
    segments = folded(copies)
    check_segments(None, segments, budget)
    unfilled = {}
    for rank in ranks:
        if wanted[rank] < target.shard_numel(rank):
            unfilled[rank] = tuple(target.gaps(rank))
    plan = TransferPlan(segments, target_map.logical_shape, sum([each.numel for each in segments]), unfilled)
    nbytes = len(plan.to_json())
    check_bytes(None, nbytes, budget)
    target_pieces = sum([len(target.pieces_by_rank[rank]) for rank in ranks])
    statistics = PlanStatistics(len(held.first), target_pieces, pairs.used, before, len(segments), nbytes)
    object.__setattr__(plan, "statistics", statistics)
    return plan


def as_budget(limits: object) -> PlanBudget:
    """The limits, those of ``PlanBudget()`` for None; PolicyError for anything else."""
    if limits is None:
        return PlanBudget()
    if not isinstance(limits, PlanBudget):
        raise PolicyError(f"limits is {shown(limits)}; expected a PlanBudget.")
    return limits


def pair_budget(budget: PlanBudget) -> Budget:
    """What counts the pairs of pieces that are compared."""
    advice = (
        "comparisons of two pieces, which is max_pair_checks. Raise the limit in PlanBudget, or describe the layouts "
        "in fewer pieces."
    )
    return Budget("Planning a transfer", budget.max_pair_checks, advice)


def check_maps(target: ParamAffineMap, source: ParamAffineMap, budget: PlanBudget) -> None:
    """Both are maps, within the limits; InvalidMapError or BudgetExceededError otherwise."""
    for side, layout in (("source", source), ("target", target)):
        if not isinstance(layout, ParamAffineMap):
            raise InvalidMapError(f"The {side} map is {shown(layout)}; expected a ParamAffineMap.")
        axes = len(layout.logical_shape)
        pieces = sum([len(row) for row in layout.pieces_by_rank.values()])
        for what, count, limit in (("axes", axes, "max_ndim"), ("pieces", pieces, "max_pieces_per_map")):
            if count > getattr(budget, limit):
                raise BudgetExceededError(
                    f"The {side} map has {count} {what}, more than {limit} {getattr(budget, limit)}. Raise the limit "
                    "in PlanBudget, or describe the layout in fewer pieces."
                )


def check_valid(target: ParamAffineMap, source: ParamAffineMap, partial: bool) -> None:
    """Neither map contradicts itself, and unless the move is ``partial`` both describe all of F and of their shards.

    Only the source's shards may have addresses that nothing describes.
    """
    with about("The target map"):
        target.validate(partial=partial)
    with about("The source map"):
        source.validate(partial=True, whole_parameter=not partial)


def check_segments(param: str | None, segments: Sequence[TransferSegment], budget: PlanBudget) -> None:
    """The plan of ``param`` (None where it has no name) has no more segments than it may."""
    if len(segments) > budget.max_segments:
        raise BudgetExceededError(
            f"{_plan_of(param)} has {len(segments)} segments, more than max_segments {budget.max_segments}. Raise the "
            "limit in PlanBudget, or describe the layouts in fewer pieces.",
            param=param,
        )


def check_bytes(param: str | None, nbytes: int, budget: PlanBudget) -> None:
    """The plan of ``param`` takes no more bytes of JSON than it may."""
    if nbytes > budget.max_plan_bytes:
        raise BudgetExceededError(
            f"{_plan_of(param)} takes {nbytes} bytes of JSON, more than max_plan_bytes {budget.max_plan_bytes}. Raise "
            "the limit in PlanBudget, or plan for fewer target_ranks at a time.",
            param=param,
        )


def _plan_of(param: str | None) -> str:
    return "The plan" if param is None else f"parameter {param!r}: its plan"


def restricted(
    target: ParamAffineMap, source: ParamAffineMap, valid_rows: int | None
) -> tuple[ParamAffineMap, ParamAffineMap]:
    """Target and source over the same elements: those of the first ``valid_rows`` rows, or all, which must agree."""
    ours, theirs = target.logical_shape, source.logical_shape
    if valid_rows is None:
        if ours != theirs:
            hint = ""
            if ours and ours[1:] == theirs[1:]:
                hint = " For two paddings of one vocabulary pass its real height as valid_rows."
            raise InvalidMapError(
                f"The source describes a parameter of shape {theirs}, the target one of {ours}.{hint}"
            )
        return target, source
    rows = as_integer(valid_rows, "valid_rows")
    if not ours or len(ours) != len(theirs) or ours[1:] != theirs[1:] or rows > min(ours[0], theirs[0]):
        raise InvalidMapError(
            f"valid_rows is {rows} for a source of shape {theirs} and a target of shape {ours}; expected shapes that "
            "differ in their first axis only, with at least so many rows each."
        )
    return target.restrict_rows(0, rows), source.restrict_rows(0, rows)


def restricted_numel(layout: ParamAffineMap, valid_rows: int | None) -> int:
    """How many elements of F are in the first ``valid_rows`` rows, or in all."""
    return layout.numel if valid_rows is None else valid_rows * product(layout.logical_shape[1:])


def _planned_ranks(target: ParamAffineMap, target_ranks: Iterable[int] | None) -> tuple[int, ...]:
    if target_ranks is None:
        return target.ranks
    if not isinstance(target_ranks, Iterable):
        raise PolicyError(f"target_ranks is {shown(target_ranks)}; expected some of the target map's ranks.")
    ranks = sorted({as_integer(rank, "A target rank") for rank in target_ranks})
    for rank in ranks:
        target.shard_numel(rank)
    return tuple(ranks)


def check_supply(target: ParamAffineMap, found: Sequence[Need], wanted: Mapping[int, int]) -> None:
    """Every target rank gets as many elements as it wants; otherwise InvalidMapError names the first that lacks."""
    got: dict[int, int] = defaultdict(int)
    for need in found:
        got[need.target] += need.numel
    for rank, count in wanted.items():
        if got[rank] == count:
            continue
        held = [x for need in found if need.target == rank for x in need.pieces()]
        missing = next(
            rest
            for piece in target.pieces_by_rank[rank]
            if piece.numel
            for lattice in proper(
                piece.source_offset, 0, [(n, s, 0) for n, s in zip(piece.shape, piece.source_strides, strict=True)]
            )
            for rest in _remaining(lattice, held)
        )
        raise InvalidMapError(
            f"Target rank {rank} needs {count} elements, of which the source holds {got[rank]}; the first that none of "
            f"its ranks holds is {coordinates(missing.key, target.logical_shape)} of the parameter. Expected a source "
            "that holds all that the target describes: shards are missing, or the maps are of different models.",
            rank=rank,
        )


def _remaining(lattice: Lattice, held: Iterable[Lattice]) -> list[Lattice]:
    left = [lattice]
    for other in held:
        left = [x for piece in left for x in subtract(piece, other)]
    return left


def folded(copies: Copies) -> tuple[TransferSegment, ...]:
    """The copies as segments, maximally merged within each pair of ranks, in order of target rank and address."""
    segments = []
    for (source, target, scale), keyed in copies.items():
        for target_offset, source_offset, digits in fold_pairs(keyed):
            segments.append(
                TransferSegment(
                    source,
                    source_offset,
                    tuple([d[2] for d in digits]),
                    target,
                    target_offset,
                    tuple([d[1] for d in digits]),
                    tuple([d[0] for d in digits]),
                    scale,
                )
            )
    segments.sort(key=lambda each: (each.target_rank, each.target_offset, each.source_rank, each.source_offset))
    return tuple(segments)
