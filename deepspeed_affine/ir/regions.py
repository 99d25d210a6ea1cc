"""Answers in regions and not in elements: what is held by whom, and what by nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir.algebra import lattices, overlapping
from deepspeed_affine.ir.difference import subtract
from deepspeed_affine.ir.ints import as_extents, as_integer, coordinates, product, row_major_strides
from deepspeed_affine.ir.lattice import Budget, Lattice, coalesce, intersect, iterate, proper, span
from deepspeed_affine.ir.piece import AffinePiece

__all__ = ["Region", "complement", "distinct", "offsets_in_order", "refine", "relocate"]

Held = tuple[Lattice, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Region:
    """A strided block of addresses of one tensor: ``offset + sum(i_k * strides[k])``, each address once."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", as_integer(self.offset, "A region's offset"))
        object.__setattr__(self, "shape", as_extents(self.shape, "A region's shape"))
        object.__setattr__(self, "strides", as_extents(self.strides, "A region's stride"))
        if len(self.shape) != len(self.strides):
            raise InvalidMapError(f"A region of shape {self.shape} has strides {self.strides}; expected one per axis.")

    @property
    def numel(self) -> int:
        return product(self.shape)

    def offsets(self) -> Iterator[int]:
        """Yield the addresses in increasing order."""
        for lattice in proper(self.offset, 0, zip(self.shape, self.strides, (0,) * len(self.shape), strict=True)):
            for key, _ in iterate(lattice):
                yield key

    def box(self, tensor_shape: Sequence[int]) -> tuple[slice, ...] | None:
        """The region as one slice per axis of a tensor of this shape, or None when it is not a box of it."""
        first = coordinates(self.offset, tensor_shape)
        last = coordinates(
            self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)), tensor_shape
        )
        extents = [stop - start + 1 for start, stop in zip(first, last, strict=True)]
        if self.numel == 0 or min(extents, default=1) < 1 or product(extents) != self.numel:
            return None
        mine = proper(self.offset, 0, zip(self.shape, self.strides, (0,) * len(self.shape), strict=True))
        strides = row_major_strides(tensor_shape)
        theirs = proper(self.offset, 0, zip(extents, strides, (0,) * len(extents), strict=True))
        return tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True)) if mine == theirs else None

    @classmethod
    def of(cls, lattice: Lattice) -> Region:
        return cls(lattice.key, tuple([d[0] for d in lattice.digits]), tuple([d[1] for d in lattice.digits]))


def keys_only(lattice: Lattice) -> Lattice:
    """The same keys without mates, in the one form a set of keys cut this way has."""
    return Lattice(lattice.key, 0, coalesce([(n, s, 0) for n, s, _ in lattice.digits]))


def run(start: int, stop: int) -> Lattice:
    return Lattice(start, 0, ((stop - start, 1, 0),) if stop - start > 1 else ())


def _under(digit: tuple[int, int, int], inner: Iterable[Lattice]) -> list[Lattice]:
    return [Lattice(x.key, x.mate, coalesce([digit, *x.digits])) for x in inner]


def _clusters(ordered: Sequence[Lattice]) -> Iterator[tuple[int, int]]:
    """Index ranges of lattices, sorted by first key, whose hulls chain together."""
    start, reach = 0, -1
    for number, lattice in enumerate(ordered):
        if number > start and lattice.key > reach:
            yield start, number
            start, reach = number, -1
        reach = max(reach, lattice.last)
    if ordered:
        yield start, len(ordered)


def _common_outer(group: Sequence[Lattice]) -> tuple[int, int, int] | None:
    """The outer digit all share, if what is under it stays within one of its steps.

    Interleaved columns of one matrix are the everyday case: under their common row digit they are disjoint runs, so
    a problem of overlapping hulls becomes one of sorted intervals.
    """
    if not group[0].digits:
        return None
    digit = group[0].digits[0]
    low = high = group[0].key
    for lattice in group:
        if not lattice.digits or lattice.digits[0] != digit:
            return None
        low = min(low, lattice.key)
        high = max(high, lattice.key + span(lattice.digits[1:]))
    return digit if high - low < digit[1] else None


def _stripped(group: Sequence[Lattice]) -> list[Lattice]:
    return [Lattice(x.key, x.mate, x.digits[1:]) for x in group]


def complement(held: Iterable[Lattice], start: int, stop: int, budget: Budget | None = None) -> list[Lattice]:
    """Return disjoint lattices of every key in ``[start, stop)`` that none of ``held`` has, lowest first."""
    budget = budget or Budget("Listing uncovered regions")
    ordered = sorted({keys_only(lattice) for lattice in held})
    result: list[Lattice] = []
    cursor = start
    for first, last in _clusters(ordered):
        group = ordered[first:last]
        following = ordered[last].key if last < len(ordered) else stop
        gaps, low, high = _gaps_within(group, cursor, following, budget)
        if low > cursor:
            result.append(run(cursor, low))
        result += gaps
        cursor = high
    if cursor < stop:
        result.append(run(cursor, stop))
    return result


def _gaps_within(group: Sequence[Lattice], before: int, after: int, budget: Budget) -> tuple[list[Lattice], int, int]:
    """The gaps of one cluster, with the hull they fill: that of the cluster, or a little of the free space around it.

    Between the repetitions of a common outer digit the same run is free each time; taking the run before the first or
    after the last as one more repetition makes the gap beside a column split one box.
    """
    budget.spend(len(group))
    low, high = group[0].key, max(x.last for x in group) + 1
    if len(group) == 1 and len(group[0].digits) <= 1 and group[0].numel == high - low:
        return [], low, high
    digit = _common_outer(group)
    if digit is None:
        rest = [run(low, high)]
        for lattice in group:
            budget.spend(len(rest))
            rest = [x for piece in rest for x in subtract(piece, lattice, budget)]
        return sorted(rest), low, high
    extent, stride, _ = digit
    inner = _stripped(group)
    inner_high = max(x.last for x in inner) + 1
    gaps = _under(digit, complement(inner, low, inner_high, budget))
    width = low + stride - inner_high
    if width:
        between, times = inner_high, extent - 1
        if low - width >= before:
            between, times, low = between - stride, times + 1, low - width
        if high + width <= after:
            times, high = times + 1, high + width
        gap = run(between, between + width)
        gaps += _under((times, stride, 0), [gap]) if times > 1 else [gap]
    return sorted(gaps), low, high


def refine(items: Iterable[Held], budget: Budget | None = None) -> list[Held]:
    """Return disjoint lattices, each with the union of the tags of all items that hold it."""
    budget = budget or Budget("Working out who holds what")
    tags: dict[Lattice, frozenset[int]] = {}
    for lattice, tag in items:
        key = keys_only(lattice)
        tags[key] = tags[key] | tag if key in tags else tag
    ordered = sorted(tags)
    result: list[Held] = []
    for first, last in _clusters(ordered):
        group = ordered[first:last]
        budget.spend(len(group))
        digit = _common_outer(group) if len(group) > 1 else None
        if len(group) == 1:
            result.append((group[0], tags[group[0]]))
        elif digit is not None:
            inner = refine(zip(_stripped(group), [tags[x] for x in group], strict=True), budget)
            result += [(_under(digit, [x])[0], tag) for x, tag in inner]
        else:
            result += _refine_pairwise([(x, tags[x]) for x in group], budget)
    return result


def _refine_pairwise(items: Sequence[Held], budget: Budget) -> list[Held]:
    cells: list[Held] = []
    for lattice, tag in items:
        rest = [lattice]
        following: list[Held] = []
        for cell, holders in cells:
            budget.spend()
            if cell.last < lattice.key or lattice.last < cell.key or not rest:
                following.append((cell, holders))
                continue
            common = [
                Lattice(m.key, 0, coalesce([(n, s, 0) for n, s, _, _ in m.digits]))
                for piece in rest
                for m in intersect(cell, piece, budget)
            ]
            if not common:
                following.append((cell, holders))
                continue
            following += [(x, holders | tag) for x in common]
            following += [(x, holders) for x in _without([cell], common, budget)]
            rest = [x for piece in rest for x in subtract(piece, cell, budget)]
        cells = following + [(x, tag) for x in rest]
    return cells


def _without(left: list[Lattice], right: Iterable[Lattice], budget: Budget) -> list[Lattice]:
    for lattice in right:
        left = [x for piece in left for x in subtract(piece, lattice, budget)]
    return left


def distinct(held: Iterable[Lattice], budget: Budget | None = None) -> list[Lattice]:
    """Return disjoint lattices holding every key of the input once."""
    held = list(held)
    if len(held) < 2:
        return [keys_only(lattice) for lattice in held]
    return [lattice for lattice, _ in refine([(x, frozenset((0,))) for x in held], budget)]


def relocate(pieces_by_rank: Mapping[int, Sequence[AffinePiece]]) -> dict[int, list[AffinePiece]]:
    """Return the same pieces, cut where needed, with locations that are exactly the holders of their elements."""
    keyed = {
        rank: [(piece, keyed) for piece in pieces for keyed in lattices(piece, "source")]
        for rank, pieces in pieces_by_rank.items()
    }
    cells = refine([(x, frozenset((rank,))) for rank, row in keyed.items() for _, x in row])
    exact = dict(cells)
    hulls = [(cell.key, cell.last + 1) for cell, _ in cells]
    result: dict[int, list[AffinePiece]] = {}
    for rank, row in keyed.items():
        out: list[AffinePiece] = []
        unsettled = []
        for piece, lattice in row:
            holders = exact.get(keys_only(lattice))
            if holders is None:
                unsettled.append((piece, lattice))
            else:
                out.append(_piece(lattice.key, lattice.mate, lattice.digits, holders, piece.scale))
        for i, j in overlapping([(x.key, x.last + 1) for _, x in unsettled], hulls):
            piece, lattice = unsettled[i]
            for m in intersect(lattice, cells[j][0]):
                digits = [(n, s, u) for n, s, u, _ in m.digits]
                out.append(_piece(m.key, m.mate_a, digits, cells[j][1], piece.scale))
        result[rank] = out
    return result


def _piece(
    key: int, mate: int, digits: Iterable[tuple[int, int, int]], locations: frozenset[int], scale: float
) -> AffinePiece:
    rows = list(digits)
    return AffinePiece([d[0] for d in rows], key, [d[1] for d in rows], mate, [d[2] for d in rows], locations, scale)


def offsets_in_order(found: Iterable[Lattice]) -> Iterator[int]:
    """Yield the keys of disjoint lattices in increasing order, one at a time."""
    for key, _ in merge(*[iterate(lattice) for lattice in found]):
        yield key
