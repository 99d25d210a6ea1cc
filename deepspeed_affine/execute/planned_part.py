"""A rank's part of a tensor that lies in pieces over many files, read into memory: F is never built.

What converting and then loading would give, in one step: stored elements are divided by the scale of the ranks that
stored them and multiplied by that of the rank that holds them now, each rounded in the dtype it would have there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from deepspeed_affine.execute.gather import PieceReader, Words, piece_view, word_of
from deepspeed_affine.execute.shards import wanted_pieces
from deepspeed_affine.execute.typed import as_tensor, convert_dtype
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, meet, overlapping
from deepspeed_affine.plan.conversion import SourceStorage, TensorFile
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.files import ByteReader

if TYPE_CHECKING:
    import torch

__all__ = ["PlannedPart"]

BLOCK_ELEMENTS = 1 << 20
"""How many elements are converted at a time, so that memory stays bounded."""


class PlannedPart:
    """Elements ``[start, start + numel)`` of rank ``rank``'s flattened shard, as pieces of the storages behind F.

    ``task`` says how F would be made, its pieces leading to ``storages``; elements beyond those it would write (the
    source's vocabulary padding) are never read. ``covered`` elements have a source. The cost is near-linear in pieces,
    whatever the number of elements.
    """

    def __init__(
        self,
        task: TensorFile,
        storages: Sequence[SourceStorage],
        layout: ParamAffineMap,
        rank: int,
        start: int,
        numel: int,
    ) -> None:
        self.task = task
        self.storages = storages
        self.numel = numel
        wanted = list(_written(wanted_pieces(layout.pieces_by_rank[rank], start, numel), task.numel))
        touching = overlapping([_hull(piece) for piece in wanted], [_hull(piece) for piece in task.pieces])
        self.parts = [pair for i, j in touching for pair in meet(task.pieces[j], wanted[i])]
        self.covered = sum(piece.numel for piece in wanted)

    @property
    def nbytes(self) -> int:
        """How many bytes it needs, where they are stored."""
        return self.covered * _storage(self.task.pieces[0], self.storages).itemsize if self.covered else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """F's, as a conversion would write it."""
        return self.task.shape

    @property
    def path(self) -> str:
        """The first of the files that F would be gathered from; empty where nothing of it is stored."""
        return _storage(self.task.pieces[0], self.storages).file if self.task.pieces else ""

    def fill(self, out: torch.Tensor, reader: ByteReader, *, power: int = 1) -> None:
        """``out`` (flat, ``numel`` elements, any device and dtype) holds the elements, times the ``power``-th power of
        this rank's scale; those without a source are zero."""
        import torch

        if self.covered < self.numel:
            out.zero_()
        if not self.covered:
            return
        if out.device.type != "cpu" or not out.is_contiguous():
            staged = torch.zeros(self.numel, dtype=out.dtype)
            self.fill(staged, reader, power=power)
            out.copy_(staged)
            return
        name = str(out.dtype).removeprefix("torch.")
        word, _ = word_of(item_size(name))
        pieces = PieceReader(self.storages, reader)
        memory: Words = out.detach().view(torch.uint8).numpy().view(word)
        for source, target in self.parts:
            kind = _storage(source, self.storages).dtype
            scale = target.scale**power if power else 1.0
            if kind == name and source.scale == 1.0:
                pieces.fill(source, piece_view(memory, target, item_size(name)))
                if scale != 1.0:
                    as_tensor(piece_view(memory, target, item_size(name)), name).mul_(scale)
                continue
            for stored, place in _blocks(source, target):
                view = piece_view(memory, place, item_size(name))
                self._convert(pieces.take(stored), kind, source.scale, name, view)
                if scale != 1.0:
                    as_tensor(view, name).mul_(scale)

    def _convert(self, words: Words, kind: str, scale: float, name: str, out: Words) -> None:
        """Stored words, as F would hold them, become ``out``."""
        if scale != 1.0:
            words = self._unscaled(words, kind, scale)
            kind = self.task.dtype
        if kind == name:
            out[...] = words
        else:
            convert_dtype(words, kind, name, out)

    def _unscaled(self, words: Words, kind: str, scale: float) -> Words:
        import torch

        tensor = as_tensor(words, kind).to(dtype=getattr(torch, self.task.dtype), copy=True).div_(scale)
        word, per = word_of(item_size(self.task.dtype))
        shape = tuple(tensor.shape) if per == 1 else (*tensor.shape, per)
        found: Words = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(word).reshape(shape)
        return found


def _written(pieces: Iterable[AffinePiece], numel: int) -> Iterator[AffinePiece]:
    """What of the pieces lies in the first ``numel`` elements of F."""
    real = AffinePiece((numel,), 0, (1,), 0, (1,), (0,))
    for piece in pieces:
        if piece.source_end <= numel:
            yield piece
        elif piece.source_offset < numel:
            yield from (part for part, _ in meet(piece, real))


def _blocks(source: AffinePiece, target: AffinePiece) -> Iterator[tuple[AffinePiece, AffinePiece]]:
    """A pair of pieces of one shape, cut along its longest axis into pairs of bounded size."""
    if source.numel <= BLOCK_ELEMENTS:
        yield source, target
        return
    axis = max(range(len(source.shape)), key=lambda at: source.shape[at])
    extent = source.shape[axis]
    rows = max(1, BLOCK_ELEMENTS * extent // source.numel)
    for start in range(0, extent, rows):
        count = min(rows, extent - start)
        yield from _blocks(_rows(source, axis, start, count), _rows(target, axis, start, count))


def _rows(piece: AffinePiece, axis: int, start: int, count: int) -> AffinePiece:
    return AffinePiece(
        (*piece.shape[:axis], count, *piece.shape[axis + 1 :]),
        piece.source_offset + start * piece.source_strides[axis],
        piece.source_strides,
        piece.dest_offset + start * piece.dest_strides[axis],
        piece.dest_strides,
        piece.locations,
        piece.scale,
    )


def _hull(piece: AffinePiece) -> tuple[int, int]:
    return piece.source_offset, piece.source_end


def _storage(piece: AffinePiece, storages: Sequence[SourceStorage]) -> SourceStorage:
    (index,) = piece.locations
    return storages[index]
