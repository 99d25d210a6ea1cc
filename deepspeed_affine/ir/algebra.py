"""Meeting and composing pieces: the one place where two descriptions of the same numbers are brought together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir.lattice import Budget, Lattice, Meeting, intersect, proper
from deepspeed_affine.ir.map import ParamAffineMap
from deepspeed_affine.ir.piece import AffinePiece

__all__ = ["compose", "compose_maps", "inverse", "lattices", "meet", "overlapping"]

Side = Literal["source", "dest"]


def lattices(piece: AffinePiece, on: Side, budget: Budget | None = None) -> list[Lattice]:
    """The piece as proper lattices keyed by one side, with the other side as the mate."""
    if on == "source":
        key, strides, mate, mates = piece.source_offset, piece.source_strides, piece.dest_offset, piece.dest_strides
    elif on == "dest":
        key, strides, mate, mates = piece.dest_offset, piece.dest_strides, piece.source_offset, piece.source_strides
    else:
        raise InvalidMapError(f"A piece has no side {on!r}; expected 'source' or 'dest'.")
    return proper(key, mate, zip(piece.shape, strides, mates, strict=True), budget)


def meet(
    a: AffinePiece, b: AffinePiece, on: tuple[Side, Side] = ("source", "source")
) -> list[tuple[AffinePiece, AffinePiece]]:
    """Return pairs of sub-pieces of ``a`` and ``b``, of one shape, whose k-th elements share their address.

    The address is ``a``'s ``on[0]`` side and ``b``'s ``on[1]`` side. Together the pairs hold every common address;
    each keeps its piece's locations and scale. Exact for any strides, permuted and interleaved pieces included; a flat
    interval against a d-dimensional piece gives at most 2d-1 pairs.
    """
    budget = Budget("Intersecting two pieces")
    pairs = []
    for left in lattices(a, on[0], budget):
        for right in lattices(b, on[1], budget):
            for meeting in intersect(left, right, budget):
                pairs.append((_part(a, on[0], meeting, 0), _part(b, on[1], meeting, 1)))
    return pairs


def _part(piece: AffinePiece, on: Side, meeting: Meeting, operand: int) -> AffinePiece:
    shape = tuple([digit[0] for digit in meeting.digits])
    keys = tuple([digit[1] for digit in meeting.digits])
    mate = meeting.mate_b if operand else meeting.mate_a
    mates = tuple([digit[3] if operand else digit[2] for digit in meeting.digits])
    if on == "source":
        return AffinePiece(shape, meeting.key, keys, mate, mates, piece.locations, piece.scale)
    return AffinePiece(shape, mate, mates, meeting.key, keys, piece.locations, piece.scale)


def inverse(piece: AffinePiece, locations: Iterable[int] | None = None) -> AffinePiece:
    """The piece read the other way: its logical side becomes its shard side, and the scale its reciprocal."""
    return AffinePiece(
        piece.shape,
        piece.dest_offset,
        piece.dest_strides,
        piece.source_offset,
        piece.source_strides,
        piece.locations if locations is None else locations,
        1.0 / piece.scale,
    )


def overlapping(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield index pairs of half-open hulls that overlap, in time near-linear in the inputs and the answer.

    ``right`` is sorted by start. Where its ends rise too, the answers are ranges; else it is indexed by the running
    maximum of its ends, kept as a tree of maxima, so that a long hull early in the order does not force a scan of
    everything after it.
    """
    order = sorted(
        (index for index in range(len(right)) if right[index][0] < right[index][1]), key=lambda i: right[i][0]
    )
    if not order:
        return
    starts = [right[index][0] for index in order]
    stops = [right[index][1] for index in order]
    if all(a <= b for a, b in pairwise(stops)):
        for number, (start, stop) in enumerate(left):
            if start < stop:
                for position in range(bisect_right(stops, start), bisect_left(starts, stop)):
                    yield number, order[position]
        return
    size = 1
    while size < len(order):
        size *= 2
    tree = [-1] * (2 * size)
    tree[size : size + len(stops)] = stops
    for node in range(size - 1, 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
    for number, (start, stop) in enumerate(left):
        if stop <= start:
            continue
        limit = bisect_right(starts, stop - 1)
        stack = [(1, 0, size)]
        while stack:
            node, low, high = stack.pop()
            if low >= limit or tree[node] <= start:
                continue
            if high - low == 1:
                yield number, order[low]
                continue
            middle = (low + high) // 2
            stack.append((2 * node + 1, middle, high))
            stack.append((2 * node, low, middle))


def compose(outer_pieces: Iterable[AffinePiece], inner_pieces: Iterable[AffinePiece]) -> list[AffinePiece]:
    """Return pieces from F straight to the storage behind a shard.

    ``outer`` goes F -> shard and ``inner`` shard -> storage (a ZeRO fragment, a region of a file). The result's logical
    side is F, its shard side the storage, its locations are the inner ones, its scale the product. Shard addresses that
    only one of the two names are left out.
    """
    outer, inner = list(outer_pieces), list(inner_pieces)
    hulls = [(piece.dest_offset, piece.dest_end) for piece in outer]
    targets = [(piece.source_offset, piece.source_end) for piece in inner]
    result = []
    for i, j in overlapping(hulls, targets):
        for upper, lower in meet(outer[i], inner[j], on=("dest", "source")):
            result.append(
                AffinePiece(
                    upper.shape,
                    upper.source_offset,
                    upper.source_strides,
                    lower.dest_offset,
                    lower.dest_strides,
                    lower.locations,
                    upper.scale * lower.scale,
                )
            )
    return result


def compose_maps(outer: ParamAffineMap, inner_by_rank: Mapping[int, ParamAffineMap]) -> ParamAffineMap:
    """Return the map from F to the storages behind every shard.

    ``inner_by_rank[r]`` describes how rank ``r``'s shard, flattened, lies over storages; its location ids name the
    storages and become the ranks of the result. Storages of one id in several inner maps must have one shape. The
    locations of the result are exact again: where the outer map replicates a block, over ranks or within one shard,
    the result's locations are all storages that hold it.
    """
    from deepspeed_affine.ir.regions import relocate

    shapes: dict[int, tuple[int, ...]] = {}
    raw: dict[int, list[AffinePiece]] = {}
    for rank in outer.ranks:
        inner = inner_by_rank.get(rank)
        if inner is None:
            raise InvalidMapError(
                f"Rank {rank} has no inner map; expected one for each of {list(outer.ranks)}.", rank=rank
            )
        shard = outer.shard_numel(rank)
        if inner.numel != shard:
            raise InvalidMapError(
                f"Rank {rank} holds a shard of {shard} elements, but its inner map describes {inner.numel}.", rank=rank
            )
        for location, shape in inner.shard_shapes.items():
            if shapes.setdefault(location, shape) != shape:
                raise InvalidMapError(
                    f"Location {location} has shape {shapes[location]} in one inner map and {shape} in another."
                )
            raw.setdefault(location, [])
            raw[location] += compose(outer.pieces_by_rank[rank], inner.pieces_by_rank[location])
    return ParamAffineMap(outer.logical_shape, shapes, relocate(raw))
