"""The one form of a layout: a function of the relation alone, whatever pieces it arrived in.

Within one rank and one label (locations and scale) a layout is a set of points (shard address, offset in F), no two at
one shard address. The set is folded digit by digit. The first digit runs along (1, 1): maximal chains of neighbouring
addresses. The first points of chains of one length form the next set, and its direction leads from its lowest point to
the lowest point that lies beyond it on both sides; what has no neighbour in that direction is folded again in the same
way. Each step is a function of the set, so two descriptions of one layout meet in one form. No two of the resulting
pieces can be joined along a digit: a piece that continues another would have lengthened its chain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from deepspeed_affine.errors import BudgetExceededError
from deepspeed_affine.ir.algebra import lattices
from deepspeed_affine.ir.chains import Point, absorbed, chains, listed_chains
from deepspeed_affine.ir.difference import subtract
from deepspeed_affine.ir.ints import row_major_strides
from deepspeed_affine.ir.lattice import Budget, Lattice, iterate, proper
from deepspeed_affine.ir.piece import AffinePiece
from deepspeed_affine.ir.validate import check_addresses

if TYPE_CHECKING:
    from deepspeed_affine.ir.map import ParamAffineMap

__all__ = ["canonical_map", "canonical_pieces", "fold_keys", "fold_pairs", "layout_id", "maximal_runs"]

Digits = tuple[tuple[int, int, int], ...]
"""``(extent, dest stride, source stride)``, inner digit first."""

LISTED_PER_LATTICE = 8
"""Sets of up to so many points for each of their lattices are listed; the result is the same, only faster."""

FRUITLESS_ROUNDS = 128
"""Rounds that may find no more than the chain they started from before the rest of a set stays unfolded.

A scrambled set (a random permutation of blocks) has no structure to find, and looking for it costs a pass per block.
The number of rounds is a property of the set, so the form stays one.
"""

UNFOLDED = 2**20


def canonical_map(layout: ParamAffineMap) -> ParamAffineMap:
    from deepspeed_affine.ir.map import ParamAffineMap

    rows = {}
    for rank in layout.ranks:
        check_addresses(layout.pieces_by_rank[rank])
        rows[rank] = [_along_axes(piece, layout.logical_shape) for piece in _canonical(layout.pieces_by_rank[rank])]
    return ParamAffineMap(layout.logical_shape, layout.shard_shapes, rows)


def canonical_pieces(pieces: Iterable[AffinePiece], logical_shape: Sequence[int] | None = None) -> list[AffinePiece]:
    """Return the canonical pieces of one rank's shard, in order of shard address.

    The same for every cutting and order of one layout, and maximally merged in N dimensions among pieces of equal
    locations and scale. Shard addresses named twice are an ``InvalidMapError``. ``BudgetExceededError`` is possible in
    three cases only: strides of different pieces interleave without a common period shorter than 2,000,000 steps, a
    set of more than 2**20 blocks has no repetition in it, or thousands of strided blocks stand in no order at all (the
    columns of a large matrix, permuted at random).

    With ``logical_shape`` a digit that runs over whole rows of F is written as rows and columns, so that a block of a
    matrix reads as one. ``ParamAffineMap.canonical`` does so; without it every digit is as long as it can be.
    """
    listed = list(pieces)
    check_addresses(listed)
    found = _canonical(listed)
    return found if logical_shape is None else [_along_axes(piece, tuple(logical_shape)) for piece in found]


def layout_id(canonical: ParamAffineMap) -> str:
    text = json.dumps(canonical.to_dict(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(pieces: Iterable[AffinePiece]) -> list[AffinePiece]:
    found = []
    for locations, scale, keyed in _by_label(pieces):
        for point, digits in _fold_from_unit(keyed):
            found.append(_piece(point, digits, locations, scale))
    return sorted(found, key=lambda piece: (piece.dest_offset, piece.source_offset))


def _by_label(pieces: Iterable[AffinePiece]) -> Iterator[tuple[frozenset[int], float, list[Lattice]]]:
    groups: dict[tuple[frozenset[int], float], list[Lattice]] = {}
    budget = Budget("Folding a layout")
    for piece in pieces:
        groups.setdefault((piece.locations, piece.scale), []).extend(lattices(piece, "dest", budget))
    for (locations, scale), keyed in groups.items():
        if keyed:
            yield locations, scale, keyed


def _piece(point: Point, digits: Digits, locations: frozenset[int], scale: float) -> AffinePiece:
    outer_first = sorted(digits, key=lambda digit: (-digit[1], -digit[2]))
    return AffinePiece(
        [d[0] for d in outer_first],
        point[1],
        [d[2] for d in outer_first],
        point[0],
        [d[1] for d in outer_first],
        locations,
        scale,
    )


def _along_axes(piece: AffinePiece, logical_shape: tuple[int, ...]) -> AffinePiece:
    """The same piece with digits cut where they cross whole rows of F; a function of the piece and the shape."""
    steps = sorted({stride for stride in row_major_strides(logical_shape) if stride > 1})
    digits: list[tuple[int, int, int]] = []
    reach = 0
    rows = list(zip(piece.shape, piece.source_strides, piece.dest_strides, strict=True))
    for extent, source, dest in sorted(rows, key=lambda digit: digit[1]):
        for step in steps:
            count = step // source
            starts_within = piece.source_offset % step + reach < source
            if count > 1 and step % source == 0 and extent > count and extent % count == 0 and starts_within:
                digits.append((count, source, dest))
                reach += (count - 1) * source
                extent, source, dest = extent // count, step, dest * count
        digits.append((extent, source, dest))
        reach += (extent - 1) * source
    if len(digits) == len(rows):
        return piece
    digits.sort(key=lambda digit: (-digit[2], -digit[1]))
    return AffinePiece(
        [d[0] for d in digits],
        piece.source_offset,
        [d[1] for d in digits],
        piece.dest_offset,
        [d[2] for d in digits],
        piece.locations,
        piece.scale,
    )


Folded = Iterator[tuple[Point, Digits]]


def _fold_from_unit(keyed: Sequence[Lattice]) -> Folded:
    budget = Budget("Folding a layout")
    for length, starts in sorted(_chains(keyed, (1, 1), budget).items()):
        yield from _fold(starts, ((length, 1, 1),) if length > 1 else (), budget)


def fold_keys(keyed: Iterable[Lattice]) -> list[Lattice]:
    """Return the one maximally merged form of a set of addresses, given as disjoint lattices, lowest first."""
    doubled = [Lattice(x.key, x.key, tuple([(n, s, s) for n, s, _ in x.digits])) for x in keyed]
    if not doubled:
        return []
    return sorted(
        lattice
        for point, digits in _fold_from_unit(doubled)
        for lattice in proper(point[0], 0, [(extent, stride, 0) for extent, stride, _ in digits])
    )


def fold_pairs(keyed: Iterable[Lattice]) -> list[tuple[int, int, Digits]]:
    """Return the one maximally merged form of a set of address pairs, given as lattices with mates, lowest key first.

    Each entry is ``(key, mate, digits)`` with digits ``(extent, key stride, mate stride)``, the largest key stride
    first. No two of the lattices may name one key.
    """
    folded = [
        (*point, tuple(sorted(digits, key=lambda digit: (-digit[1], -digit[2]))))
        for point, digits in _fold_from_unit(list(keyed))
    ]
    return sorted(folded)


def _chains(keyed: Sequence[Lattice], direction: Point, budget: Budget) -> dict[int, list[Lattice]]:
    segments = [absorbed(1, lattice, direction) for lattice in keyed]
    if not _short([starts for _, starts in segments]):
        return chains(keyed, direction, budget)
    found = listed_chains({point: length for length, starts in segments for point in iterate(starts)}, direction)
    return {length: [Lattice(*point, ()) for point in points] for length, points in found.items()}


def _short(keyed: Sequence[Lattice]) -> bool:
    limit = LISTED_PER_LATTICE * len(keyed)
    count = 0
    for lattice in keyed:
        count += lattice.numel
        if count > limit:
            return False
    return True


def _fold(starts: Sequence[Lattice], digits: Digits, budget: Budget) -> Folded:
    """Fold the set of first points of equal blocks, whose inner digits are given."""
    left = list(starts)
    if _short(left):
        yield from _fold_listed([point for lattice in left for point in iterate(lattice)], digits)
        return
    fruitless = 0
    while left:
        first = min((lattice.key, lattice.mate) for lattice in left)
        second = min([point for lattice in left for point in _lowest_beyond(lattice, first[1])], default=None)
        if second is None:
            # Nothing lies beyond the lowest point on both sides, so no digit can begin there.
            yield first, digits
            lone = Lattice(*first, ())
            left = [y for x in left for y in (subtract(x, lone, budget) if x.key <= first[0] <= x.last else [x])]
            fruitless += 1
        else:
            direction = (second[0] - first[0], second[1] - first[1])
            found = _chains(left, direction, budget)
            left = found.pop(1, [])
            fruitless += sum([x.numel for row in found.values() for x in row]) == 1
            for length, row in sorted(found.items()):
                yield from _fold(row, (*digits, (length, *direction)), budget)
        if fruitless >= FRUITLESS_ROUNDS:
            for point in _listed(left):
                yield point, digits
            return


def _fold_listed(points: Iterable[Point], digits: Digits) -> Folded:
    """``_fold`` for points at hand; the rounds are the same."""
    left = sorted(points)
    alive = set(left)
    fruitless = 0
    while left and fruitless < FRUITLESS_ROUNDS:
        first = left[0]
        second = next((point for point in left if point[1] > first[1]), None)
        if second is None:
            yield first, digits
            fruitless += 1
            left = left[1:]
            alive.discard(first)
            continue
        dest, source = second[0] - first[0], second[1] - first[1]
        linked = [(d, s) for d, s in left if (d + dest, s + source) in alive]
        found: dict[int, list[Point]] = {}
        for d, s in linked:
            if (d - dest, s - source) in alive:
                continue
            length = 1
            while (d + length * dest, s + length * source) in alive:
                length += 1
            found.setdefault(length, []).append((d, s))
        for length, heads in sorted(found.items()):
            yield from _fold_listed(heads, (*digits, (length, dest, source)))
        fruitless += sum([len(heads) for heads in found.values()]) == 1
        alive.difference_update(linked, [(d + dest, s + source) for d, s in linked])
        left = [point for point in left if point in alive]
    for point in left:
        yield point, digits


def _lowest_beyond(lattice: Lattice, mate: int) -> list[Point]:
    """The lowest point whose mate exceeds ``mate``, if there is one.

    Mates rise along every digit, and keys rise with the indices read as one number, so each index in turn is the least
    that the digits after it can still make up for.
    """
    key, at = lattice.key, lattice.mate
    reach = sum((extent - 1) * step for extent, _, step in lattice.digits)
    if at + reach <= mate:
        return []
    for extent, stride, step in lattice.digits:
        reach -= (extent - 1) * step
        index = max(0, -((at + reach - mate - 1) // step))
        key, at = key + index * stride, at + index * step
    return [(key, at)]


def _listed(left: Sequence[Lattice]) -> list[Point]:
    count = sum(lattice.numel for lattice in left)
    if count > UNFOLDED:
        raise BudgetExceededError(
            f"A layout leaves {count} blocks without repetition, more than the {UNFOLDED} that are listed one by one. "
            "Describe it with regular strides."
        )
    return sorted(point for lattice in left for point in iterate(lattice))


def maximal_runs(
    pieces: Iterable[AffinePiece],
    logical_shape: Sequence[int] | None = None,
    shard_shape: Sequence[int] | None = None,
) -> list[AffinePiece]:
    """Return one rank's maximal 1-D runs, in order of shard address: the unit that the affine draft counts.

    A run is a maximal interval along one axis, carried whole over the other axes: a row range is one contiguous block,
    a column range is a block of strided rows. Runs are never merged across a change of locations or scale. The shapes
    give the axes; without them only contiguous runs are found.
    """
    listed = list(pieces)
    check_addresses(listed)
    steps: list[Point] = [(1, 1)]
    if logical_shape is not None and shard_shape is not None and len(logical_shape) == len(shard_shape):
        pairs = zip(row_major_strides(tuple(shard_shape)), row_major_strides(tuple(logical_shape)), strict=True)
        steps += [step for step in reversed(list(pairs)) if step != (1, 1) and min(step) > 0]
    found = []
    budget = Budget("Listing maximal runs")
    for locations, scale, keyed in _by_label(listed):
        rows: list[tuple[list[Lattice], Digits]] = [(keyed, ())]
        for step in steps:
            longer = []
            for starts, digits in rows:
                for length, firsts in _chains(starts, step, budget).items():
                    longer.append((firsts, (*digits, (length, *step)) if length > 1 else digits))
            rows = longer
        found += [_piece(p, digits, locations, scale) for starts, digits in rows for p in _listed(starts)]
    return sorted(found, key=lambda piece: (piece.dest_offset, piece.source_offset))
