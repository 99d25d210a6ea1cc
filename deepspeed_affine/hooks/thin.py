"""Probing of large weights: a function that cuts one axis of a matrix is run on a matrix one element wide.

What that shows is widened to the real matrix and then checked there, on every rank, with markers that are one row or
one column spread out. A function that treats the other axis in any special way fails the check and is probed whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed_affine.ir import AffinePiece, ParamAffineMap
from deepspeed_affine.lowering import probe

__all__ = ["found_map", "shape_on"]

Shape = tuple[int, ...]
Cut = Callable[[torch.Tensor, int], Any]

THIN_FROM = 1 << 18
"""Elements of F from which on a matrix is probed thin: below, probing it whole takes no time."""


def found_map(cut: Cut, full: Shape, degree: int) -> ParamAffineMap:
    """The canonical map of ``cut`` at shape ``full`` over ``degree`` ranks."""
    if len(full) == 2 and math.prod(full) >= THIN_FROM:
        for axis in (1, 0):
            found = _widened(cut, full, degree, axis)
            if found is not None:
                return found
    return probe(cut, full, degree)


def shape_on(cut: Cut, full: Shape, rank: int) -> Shape:
    """The shape of ``rank``'s shard of an F of shape ``full``; nothing is allocated."""
    found = cut(torch.empty(full, device="meta"), rank)
    return tuple(found.shape)


def _widened(cut: Cut, full: Shape, degree: int, axis: int) -> ParamAffineMap | None:
    """The map found with ``axis`` one element wide, made as wide as F; None where the function does not allow that."""
    try:
        shapes = [shape_on(cut, full, rank) for rank in range(degree)]
        thin = probe(cut, _with(full, axis, 1), degree)
    except Exception:
        return None
    expected = [thin.shard_shapes[rank] for rank in range(degree)]
    if any(len(shape) != 2 or _with(shape, axis, full[axis]) != shapes[rank] for rank, shape in enumerate(expected)):
        return None
    if not all(_holds_at_full_size(cut, full, thin, rank, axis) for rank in range(degree)):
        return None
    pieces = {
        rank: [_wide(piece, full, shapes[rank], axis) for piece in thin.pieces_by_rank[rank]] for rank in range(degree)
    }
    found = ParamAffineMap(full, dict(enumerate(shapes)), pieces)
    found.validate()
    return found.canonical()


def _wide(piece: AffinePiece, full: Shape, shard: Shape, axis: int) -> AffinePiece:
    if axis == 0:
        return AffinePiece(
            (full[0], *piece.shape),
            piece.source_offset,
            (full[1], *piece.source_strides),
            piece.dest_offset,
            (shard[1], *piece.dest_strides),
            piece.locations,
            piece.scale,
        )
    return AffinePiece(
        (*piece.shape, full[1]),
        piece.source_offset * full[1],
        (*_times(piece.source_strides, full[1]), 1),
        piece.dest_offset * full[1],
        (*_times(piece.dest_strides, full[1]), 1),
        piece.locations,
        piece.scale,
    )


def _holds_at_full_size(cut: Cut, full: Shape, thin: ParamAffineMap, rank: int, axis: int) -> bool:
    """Whether the function takes, of the real matrix, the rows (or columns) that it takes of the thin one, each with
    all its elements in order. Positions are small enough to be exact as floats."""
    if max(full) > 1 << 24 or any(piece.scale != 1.0 for _, piece in thin.pieces()):
        return False
    other = 1 - axis
    places = torch.arange(full[other], dtype=torch.float32).reshape(_with((1, 1), other, full[other]))
    kept = thin.extract(places.clone(), rank)
    across = torch.arange(full[axis], dtype=torch.float32).reshape(_with((1, 1), axis, full[axis]))
    with torch.no_grad():
        along = cut(places.expand(full), rank).cpu()
        over = cut(across.expand(full), rank).cpu()
    return bool(torch.equal(along, kept.expand(along.shape)) and torch.equal(over, across.expand(over.shape)))


def _times(strides: Iterable[int], factor: int) -> Shape:
    return tuple(stride * factor for stride in strides)


def _with(shape: Shape, axis: int, extent: int) -> Shape:
    return (*shape[:axis], extent, *shape[axis + 1 :])
