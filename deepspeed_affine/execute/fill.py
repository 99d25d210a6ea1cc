"""Filling an interval of a full tensor from the stored pieces it is made of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from deepspeed_affine.execute.gather import PieceReader, ReadLog, Words, piece_view, word_of
from deepspeed_affine.execute.typed import as_tensor, convert_dtype
from deepspeed_affine.ir import AffinePiece, meet
from deepspeed_affine.plan.conversion import TensorFile

__all__ = ["IntervalFiller", "chunk_bounds"]


def chunk_bounds(task: TensorFile, chunk_elements: int) -> Iterator[tuple[int, int]]:
    """Consecutive intervals ``[start, stop)`` of F's flat addresses that cover what is written, each at most
    ``chunk_elements`` long and, where rows are shorter than that, made of whole rows."""
    row = 1
    for extent in task.map_shape[1:]:
        row *= extent
    step = chunk_elements // row * row if 0 < row <= chunk_elements else chunk_elements
    for start in range(0, task.numel, step):
        yield start, min(start + step, task.numel)


class _Window:
    """Pieces in order of F, searchable by the interval they may touch."""

    def __init__(self, pieces: Sequence[AffinePiece]) -> None:
        self.pieces = sorted((piece for piece in pieces if piece.numel), key=lambda piece: piece.source_offset)
        self.starts = [piece.source_offset for piece in self.pieces]
        self.reach = list(accumulate((piece.source_end for piece in self.pieces), max))

    def touching(self, start: int, stop: int) -> Iterator[tuple[AffinePiece, AffinePiece]]:
        """``(stored, target)`` sub-pieces inside ``[start, stop)``; the target's dest side counts from ``start``."""
        first = bisect_right(self.reach, start)
        last = bisect_left(self.starts, stop)
        interval = AffinePiece((stop - start,), start, (1,), 0, (1,), (0,))
        for piece in self.pieces[first:last]:
            if piece.source_end > start:
                yield from meet(piece, interval)


class IntervalFiller:
    """Fills intervals of one tensor file; cheap to make, shared between threads."""

    def __init__(self, task: TensorFile, pieces: PieceReader) -> None:
        self._task = task
        self._pieces = pieces
        self._word, _ = word_of(task.itemsize)
        self._window = _Window(task.pieces)
        self._classes: list[tuple[_Window, list[_Window]]] = []
        if task.fill == "average":
            by_primary: dict[int, tuple[_Window, list[_Window]]] = {}
            for replica in task.replicas:
                entry = by_primary.setdefault(id(replica.primary), (_Window(replica.primary), []))
                entry[1].append(_Window(replica.pieces))
            # An averaged parameter held once is still summed from zero and divided by one, as DeepSpeed does.
            self._classes = list(by_primary.values()) or [(self._window, [])]

    def words(self, buffer: Words, numel: int) -> Words:
        """``numel`` elements at the start of ``buffer`` (bytes), as the words ``fill`` takes."""
        return buffer[: numel * self._task.itemsize].view(self._word)

    def fill(self, start: int, stop: int, out: Words, log: ReadLog | None = None) -> int | None:
        """``out`` (flat words of the file's dtype) holds F's elements ``[start, stop)``.

        Returns the CRC-32 of its bytes where reading gave it for nothing, else None.
        """
        if self._task.fill == "zero":
            out.fill(0)
            return None
        crc = None
        for stored, target in self._window.touching(start, stop):
            crc = self._copy(stored, target, out, log)
            if target.numel != stop - start:
                crc = None
        if self._classes:
            self._average(start, stop, out, log)
            return None
        return crc

    def _copy(self, stored: AffinePiece, target: AffinePiece, out: Words, log: ReadLog | None) -> int | None:
        view = self._view(out, target)
        (index,) = stored.locations
        kind = self._pieces.storage(index).dtype
        if kind == self._task.dtype:
            crc = self._pieces.fill(stored, view, log)
        else:
            crc = None
            convert_dtype(self._take(stored, log), kind, self._task.dtype, view)
        if stored.scale == 1.0:
            return crc
        as_tensor(view, self._task.dtype).div_(stored.scale)
        return None

    def _average(self, start: int, stop: int, out: Words, log: ReadLog | None) -> None:
        dtype = self._task.dtype
        for primary, others in self._classes:
            targets = [target for _, target in primary.touching(start, stop)]
            for target in targets:
                as_tensor(self._view(out, target), dtype).add_(0)
            for other in others:
                for stored, target in other.touching(start, stop):
                    (index,) = stored.locations
                    addend = as_tensor(self._take(stored, log), self._pieces.storage(index).dtype)
                    as_tensor(self._view(out, target), dtype).add_(
                        addend if stored.scale == 1.0 else addend / stored.scale
                    )
            for target in targets:
                as_tensor(self._view(out, target), dtype).div_(len(others) + 1)

    def _take(self, stored: AffinePiece, log: ReadLog | None) -> Words:
        (index,) = stored.locations
        word, per = word_of(self._pieces.storage(index).itemsize)
        taken = np.empty(stored.shape if per == 1 else (*stored.shape, per), word)
        self._pieces.fill(stored, taken, log)
        return taken

    def _view(self, out: Words, piece: AffinePiece) -> Words:
        return piece_view(out, piece, self._task.itemsize)
