"""Who holds which elements of F, and which addresses nobody does, read off a map whether or not it is valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import merge
from typing import TYPE_CHECKING

from deepspeed_affine.ir.algebra import lattices
from deepspeed_affine.ir.canonical import fold_keys
from deepspeed_affine.ir.lattice import Lattice, contains, iterate
from deepspeed_affine.ir.regions import Region, complement, offsets_in_order, refine

if TYPE_CHECKING:
    from deepspeed_affine.ir.map import ParamAffineMap

__all__ = ["Holders", "gaps", "holder_regions", "uncovered_offsets", "uncovered_regions"]


def _source_lattices(layout: ParamAffineMap) -> list[Lattice]:
    return [x for _, piece in layout.pieces() for x in lattices(piece, "source")]


def _uncovered(layout: ParamAffineMap) -> list[Lattice]:
    return fold_keys(complement(_source_lattices(layout), 0, layout.numel))


def uncovered_regions(layout: ParamAffineMap) -> list[Region]:
    return [Region.of(lattice) for lattice in _uncovered(layout)]


def uncovered_offsets(layout: ParamAffineMap) -> Iterator[int]:
    return offsets_in_order(_uncovered(layout))


def gaps(layout: ParamAffineMap, rank: int) -> list[Region]:
    held = [x for piece in layout.pieces_by_rank[rank] for x in lattices(piece, "dest")]
    return [Region.of(lattice) for lattice in fold_keys(complement(held, 0, layout.shard_numel(rank)))]


def _cells(layout: ParamAffineMap) -> list[tuple[Lattice, frozenset[int]]]:
    items = [(x, frozenset((rank,))) for rank, piece in layout.pieces() for x in lattices(piece, "source")]
    by_holders: dict[frozenset[int], list[Lattice]] = {}
    for lattice, holders in refine(items):
        by_holders.setdefault(holders, []).append(lattice)
    cells = [(lattice, holders) for holders, row in by_holders.items() for lattice in fold_keys(row)]
    return sorted(cells, key=lambda cell: cell[0])


def holder_regions(layout: ParamAffineMap) -> list[tuple[Region, frozenset[int]]]:
    return [(Region.of(lattice), holders) for lattice, holders in _cells(layout)]


class Holders(Mapping[int, frozenset[int]]):
    """Offset of F to the ranks holding it; knows regions, and lists offsets only when iterated."""

    def __init__(self, layout: ParamAffineMap) -> None:
        self._cells = _cells(layout)

    def __getitem__(self, offset: int) -> frozenset[int]:
        for lattice, holders in self._cells:
            if lattice.key > offset:
                break
            if contains(lattice, offset) is not None:
                return holders
        raise KeyError(offset)

    def __iter__(self) -> Iterator[int]:
        for key, _ in merge(*[iterate(lattice) for lattice, _ in self._cells]):
            yield key

    def __len__(self) -> int:
        return sum(lattice.numel for lattice, _ in self._cells)

    def items(self) -> HolderItems:  # type: ignore[override]
        return HolderItems(self._cells)


class HolderItems:
    """Offsets and holders in increasing order, walked region by region."""

    def __init__(self, cells: list[tuple[Lattice, frozenset[int]]]) -> None:
        self._cells = cells

    def __iter__(self) -> Iterator[tuple[int, frozenset[int]]]:
        return merge(*[_named(lattice, holders) for lattice, holders in self._cells], key=lambda item: item[0])

    def __len__(self) -> int:
        return sum(lattice.numel for lattice, _ in self._cells)


def _named(lattice: Lattice, holders: frozenset[int]) -> Iterator[tuple[int, frozenset[int]]]:
    for key, _ in iterate(lattice):
        yield key, holders
