"""Brute force over explicit offsets: what every property test of the IR is compared with. Small worlds only."""

from __future__ import annotations

import itertools
from collections import Counter

from deepspeed_affine.ir import AffinePiece, ParamAffineMap


def pairs(piece: AffinePiece) -> list[tuple[int, int]]:
    """``(offset in F, shard address)`` of every element, straight from the definition of a strided view."""
    found = []
    for index in itertools.product(*[range(n) for n in piece.shape]):
        source = piece.source_offset + sum(i * s for i, s in zip(index, piece.source_strides, strict=True))
        dest = piece.dest_offset + sum(i * s for i, s in zip(index, piece.dest_strides, strict=True))
        found.append((source, dest))
    return found


def relation(layout: ParamAffineMap) -> Counter[tuple[int, int, int, frozenset[int], float]]:
    """All ``(rank, offset, address, locations, scale)`` the map states, with how often it states them."""
    return Counter(
        (rank, source, dest, piece.locations, piece.scale)
        for rank, piece in layout.pieces()
        for source, dest in pairs(piece)
    )


def holders(layout: ParamAffineMap) -> dict[int, frozenset[int]]:
    found: dict[int, frozenset[int]] = {}
    for rank, source, _, _, _ in relation(layout):
        found[source] = found.get(source, frozenset()) | {rank}
    return found


def is_valid(layout: ParamAffineMap, *, whole_shards: bool = True, whole_parameter: bool = True) -> bool:
    """P1, P5 and P6 by looking at every element."""
    stated = relation(layout)
    for rank in layout.ranks:
        written = Counter(address for row, count in stated.items() if row[0] == rank for address in [row[2]] * count)
        if any(count > 1 for count in written.values()):
            return False
        if whole_shards and len(written) != layout.shard_numel(rank):
            return False
    held = holders(layout)
    if whole_parameter and len(held) != layout.numel:
        return False
    scales: dict[int, float] = {}
    return all(locations == held[s] and scales.setdefault(s, scale) == scale for _, s, _, locations, scale in stated)
