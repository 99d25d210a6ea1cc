"""What a source holds, prepared once: classes of elements with one holder set, and every holder's copy of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deepspeed_affine.ir import ParamAffineMap, overlapping
from deepspeed_affine.ir.algebra import lattices
from deepspeed_affine.ir.canonical import fold_pairs
from deepspeed_affine.ir.difference import subtract
from deepspeed_affine.ir.lattice import Budget, Lattice, Meeting, intersect, proper
from deepspeed_affine.ir.regions import distinct
from deepspeed_affine.plan.boxes import Box, bounding_box, touching

__all__ = ["HoldingClass", "Holdings", "Need", "common", "needs"]


@dataclass(frozen=True, slots=True)
class HoldingClass:
    """All elements of F with one holder set and one scale; ``copies[rank]`` leads from F to that rank's shard."""

    holders: tuple[int, ...]
    scale: float
    copies: dict[int, list[Lattice]]


@dataclass(frozen=True, slots=True)
class Need:
    """What one target rank must get from one class: pieces of F with the addresses they go to, each element once.

    ``scale`` is the target's; ``found`` pairs the pieces with the copy of the class's lowest holder.
    """

    target: int
    scale: float
    source: HoldingClass
    found: list[Meeting]

    @property
    def numel(self) -> int:
        return sum([_numel(meeting) for meeting in self.found])

    def pieces(self) -> list[Lattice]:
        """The needed elements as lattices from F to the target's shard."""
        return [Lattice(m.key, m.mate_a, tuple([(n, s, u) for n, s, u, _ in m.digits])) for m in self.found]


class Holdings:
    """The classes of one map, with the copies of their lowest holders indexed by where they lie in F.

    ``held`` is the number of elements of F the map is known to hold, None where it is not known. ``pair_budget`` counts
    the pairs of pieces that are compared where a rank holds elements at two addresses.
    """

    __slots__ = ("boxes", "classes", "first", "shape")

    def __init__(self, layout: ParamAffineMap, held: int | None, pair_budget: Budget) -> None:
        found: dict[tuple[frozenset[int], float], dict[int, list[Lattice]]] = defaultdict(lambda: defaultdict(list))
        for rank, piece in layout.pieces():
            if piece.numel:
                found[piece.locations, piece.scale][rank] += lattices(piece, "source")
        self.shape = layout.logical_shape
        self.classes = [
            HoldingClass(tuple(sorted(holders)), scale, copies)
            for (holders, scale), copies in zip(
                found, _without_repeats(list(found.values()), held, pair_budget), strict=True
            )
        ]
        self.first = [(each, x) for each in self.classes for x in each.copies[each.holders[0]]]
        self.boxes: list[Box] = [bounding_box(x, self.shape) for _, x in self.first]


def _without_repeats(
    classes: Sequence[dict[int, list[Lattice]]], held: int | None, pair_budget: Budget
) -> list[dict[int, list[Lattice]]]:
    """The copies, with each element once where a rank holds one at two addresses of its shard.

    All copies of a class have the same elements, so the shortest is as long as the class unless every holder repeats
    some; lengths that add up to what is held show that none does, and so does a copy that is one lattice.
    """
    shortest = [min(copies.values(), key=_total) for copies in classes]
    sizes = [_total(copy) for copy in shortest]
    if sum(sizes) != held:
        sizes = [_total(distinct(copy)) for copy in shortest]
    return [
        {rank: copy if _total(copy) == size else _once(copy, pair_budget) for rank, copy in copies.items()}
        for copies, size in zip(classes, sizes, strict=True)
    ]


def _total(keyed: Iterable[Lattice]) -> int:
    return sum([lattice.numel for lattice in keyed])


def _once(keyed: list[Lattice], pair_budget: Budget) -> list[Lattice]:
    """Every element with one of its addresses: which one depends on what is held, and not on how it was cut."""
    folded = fold_pairs(
        [x for held in keyed for x in proper(held.mate, held.key, [(n, u, s) for n, s, u in held.digits])]
    )
    ordered = [x for mate, key, digits in folded for x in proper(key, mate, [(n, u, s) for n, s, u in digits])]
    hulls = [(x.key, x.last + 1) for x in ordered]
    before: dict[int, list[Lattice]] = defaultdict(list)
    for i, j in overlapping(hulls, hulls):
        if j < i:
            pair_budget.spend()
            before[i].append(ordered[j])
    kept: list[Lattice] = []
    for number, lattice in enumerate(ordered):
        rest = [lattice]
        for other in before[number]:
            rest = [x for piece in rest for x in subtract(piece, other)]
        kept += rest
    return kept


def needs(target: ParamAffineMap, source: Holdings, ranks: Iterable[int], pair_budget: Budget) -> list[Need]:
    """What each of the target's ``ranks`` needs, by class of the source, in the order of ranks and holders.

    Near-linear in the pieces and in the pairs of pieces whose bounding boxes overlap, which ``pair_budget`` counts.
    """
    wanted = [
        (rank, piece.scale, lattice)
        for rank in ranks
        for piece in target.pieces_by_rank[rank]
        if piece.numel
        for lattice in lattices(piece, "source")
    ]
    boxes = [bounding_box(lattice, source.shape) for _, _, lattice in wanted]
    found: dict[tuple[int, float, int], list[Meeting]] = defaultdict(list)
    classes: dict[int, HoldingClass] = {}
    steps = Budget("Meeting the pieces of two maps")
    for i, j in touching(boxes, source.boxes):
        pair_budget.spend()
        rank, scale, lattice = wanted[i]
        held, copy = source.first[j]
        meetings = intersect(lattice, copy, steps)
        if meetings:
            classes[id(held)] = held
            found[rank, scale, id(held)] += meetings
    result = [Need(rank, scale, classes[number], meetings) for (rank, scale, number), meetings in found.items()]
    return sorted(result, key=lambda need: (need.target, need.source.holders, need.source.scale, need.scale))


def common(pieces: Sequence[Lattice], copy: Sequence[Lattice], shape: Sequence[int]) -> Iterator[tuple[int, Meeting]]:
    """Yield ``(index of the piece, meeting)`` for every meeting of pieces of F with one holder's copy of its class."""
    steps = Budget("Meeting the pieces of two maps")
    boxes = [bounding_box(x, shape) for x in pieces]
    for i, j in touching(boxes, [bounding_box(x, shape) for x in copy]):
        for meeting in intersect(pieces[i], copy[j], steps):
            yield i, meeting


def _numel(meeting: Meeting) -> int:
    count = 1
    for digit in meeting.digits:
        count *= digit[0]
    return count
