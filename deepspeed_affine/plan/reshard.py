"""From stored pieces of F to the elements of a tensor that is to be written: the target's maps, composed with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepspeed_affine.ir import AffinePiece, meet
from deepspeed_affine.plan.conversion import TensorFile, overlapping_pairs

__all__ = ["Placed", "flat_tensor", "without_padding"]


@dataclass(frozen=True, slots=True)
class Placed:
    """Elements ``[start, start + numel)`` of a shard, at ``offset`` of a flat tensor.

    ``shard`` leads from F to the shard, ``stored`` from F to storages; elements that ``stored`` does not have stay
    zero. ``power`` is the power of the shard's scale that applies.
    """

    shard: Sequence[AffinePiece]
    stored: Sequence[AffinePiece]
    start: int
    numel: int
    offset: int
    power: int = 1


def flat_tensor(path: str, state: str, dtype: str, itemsize: int, numel: int, parts: Iterable[Placed]) -> TensorFile:
    """A flat tensor of ``numel`` elements in file ``path``, filled from ``parts``; what they leave out is padding."""
    pieces = [piece for part in parts for piece in _pieces(part)]
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


def _pieces(part: Placed) -> list[AffinePiece]:
    """From addresses in the flat tensor to addresses in storages; a piece's scale divides what is stored."""
    if not part.numel:
        return []
    window = AffinePiece((part.numel,), part.start, (1,), part.offset, (1,), (0,))
    wanted = [
        # What of F it is, and where it goes: the two sides that are still of use.
        AffinePiece(
            held.shape, held.source_offset, held.source_strides, put.dest_offset, put.dest_strides, (0,), held.scale
        )
        for piece in part.shard
        if piece.numel and piece.dest_end > part.start and piece.dest_offset < part.start + part.numel
        for held, put in meet(piece, window, on=("dest", "source"))
    ]
    return [
        AffinePiece(
            put.shape,
            put.dest_offset,
            put.dest_strides,
            stored.dest_offset,
            stored.dest_strides,
            stored.locations,
            # Equal scales of both sides leave the bytes as they are.
            1.0 if stored.scale == put.scale**part.power else stored.scale / put.scale**part.power,
        )
        for put, stored in overlapping_pairs(wanted, part.stored)
    ]
