"""From stored pieces of F to the elements of a tensor that is to be written: the target's maps, composed with them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from deepspeed_affine.ir import AffinePiece, meet
from deepspeed_affine.plan.conversion import TensorFile, overlapping_pairs

__all__ = ["Placed", "StoredShard", "flat_tensor", "without_padding"]


class StoredShard:
    """Where every element of one rank's shard is stored: asked for one interval of it after another.

    ``shard`` leads from F to the shard, ``stored`` from F to storages; elements that ``stored`` does not have are
    nowhere. ``power`` is the power of the shard's scale that applies. A question costs the pieces it touches.
    """

    __slots__ = ("_pieces", "_reach", "_starts")

    def __init__(self, shard: Sequence[AffinePiece], stored: Sequence[AffinePiece], power: int = 1) -> None:
        found = [
            AffinePiece(
                put.shape,
                put.dest_offset,
                put.dest_strides,
                held.dest_offset,
                held.dest_strides,
                held.locations,
                # Equal scales of both sides leave the bytes as they are.
                1.0 if held.scale == put.scale**power else held.scale / put.scale**power,
            )
            for put, held in overlapping_pairs(shard, stored)
        ]
        found.sort(key=lambda piece: piece.source_offset)
        self._pieces = found
        self._starts = [piece.source_offset for piece in found]
        self._reach = list(accumulate((piece.source_end for piece in found), max))

    def between(self, start: int, stop: int, offset: int) -> Iterator[AffinePiece]:
        """Pieces from ``offset`` on, where the shard's ``start`` is to lie, to storages; their scale divides."""
        first, last = bisect_right(self._reach, start), bisect_left(self._starts, stop)
        for piece in self._pieces[first:last]:
            if piece.source_end <= start:
                continue
            if len(piece.shape) == 1 and piece.source_strides == (1,):
                low, high = max(start, piece.source_offset), min(stop, piece.source_end)
                stored = piece.dest_offset + (low - piece.source_offset) * piece.dest_strides[0]
                yield _moved(piece, (high - low,), low - start + offset, (1,), stored, piece.dest_strides)
                continue
            window = AffinePiece((stop - start,), start, (1,), offset, (1,), (0,))
            for held, put in meet(piece, window):
                yield _moved(piece, held.shape, put.dest_offset, put.dest_strides, held.dest_offset, held.dest_strides)


@dataclass(frozen=True, slots=True)
class Placed:
    """Elements ``[start, start + numel)`` of a shard, at ``offset`` of a flat tensor."""

    shard: StoredShard
    start: int
    numel: int
    offset: int


def flat_tensor(path: str, state: str, dtype: str, itemsize: int, numel: int, parts: Iterable[Placed]) -> TensorFile:
    """A flat tensor of ``numel`` elements in file ``path``, filled from ``parts``; what they leave out is padding."""
    pieces = [
        piece
        for part in parts
        if part.numel
        for piece in part.shard.between(part.start, part.start + part.numel, part.offset)
    ]
    pieces.sort(key=lambda piece: piece.source_offset)
    return TensorFile(
        path=path,
        param="",
        state=state,
        dtype=dtype,
        itemsize=itemsize,
        shape=(numel,),
        map_shape=(numel,),
        entries=None,
        tensor_key="",
        pieces=tuple(pieces),
    )


def without_padding(stored: Sequence[AffinePiece], numel: int) -> tuple[AffinePiece, ...]:
    """``stored`` without the elements of F from ``numel`` on."""
    if all(piece.source_end <= numel for piece in stored):
        return tuple(stored)
    kept = AffinePiece((numel,), 0, (1,), 0, (1,), (0,))
    return tuple(found for piece in stored for found, _ in meet(piece, kept))


def _moved(
    piece: AffinePiece,
    shape: tuple[int, ...],
    offset: int,
    strides: tuple[int, ...],
    stored_offset: int,
    stored_strides: tuple[int, ...],
) -> AffinePiece:
    return AffinePiece(shape, offset, strides, stored_offset, stored_strides, piece.locations, piece.scale)
