"""Filling an interval of a full tensor from the stored pieces it is made of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from deepspeed_affine.execute.sources import FlatSources
from deepspeed_affine.ir import AffinePiece, meet
from deepspeed_affine.plan.conversion import TensorFile

if TYPE_CHECKING:
    import torch

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

    def __init__(self, task: TensorFile, sources: FlatSources) -> None:
        self._task = task
        self._sources = sources
        self._window = _Window(task.pieces)
        self._classes: list[tuple[_Window, list[_Window]]] = []
        if task.fill == "average":
            by_primary: dict[int, tuple[_Window, list[_Window]]] = {}
            for replica in task.replicas:
                entry = by_primary.setdefault(id(replica.primary), (_Window(replica.primary), []))
                entry[1].append(_Window(replica.pieces))
            # An averaged parameter held once is still summed from zero and divided by one, as DeepSpeed does.
            self._classes = list(by_primary.values()) or [(self._window, [])]

    def contiguous(self, start: int, stop: int) -> torch.Tensor | None:
        """The stored elements themselves, when the interval is one dense run of one storage as it stands."""
        if self._task.fill != "copy":
            return None
        pairs = self._window.touching(start, stop)
        stored, target = next(pairs)
        if next(pairs, None) is not None or stored.scale != 1.0:
            return None
        if target.numel != stop - start or not (_dense(stored) and _dense(target)):
            return None
        view = self._sources.view(stored)
        return view.reshape(-1) if _dtype_name(view) == self._task.dtype else None

    def fill(self, start: int, stop: int, out: torch.Tensor) -> None:
        """``out`` (flat, of the file's dtype, ``stop - start`` long) holds F's elements ``[start, stop)``."""
        if self._task.fill == "zero":
            out.zero_()
            return
        for stored, target in self._window.touching(start, stop):
            view = _target(out, target)
            view.copy_(self._sources.view(stored))
            if stored.scale != 1.0:
                view.div_(stored.scale)
        for primary, others in self._classes:
            for _, target in primary.touching(start, stop):
                _target(out, target).add_(0)
            for other in others:
                for stored, target in other.touching(start, stop):
                    addend = self._sources.view(stored)
                    _target(out, target).add_(addend if stored.scale == 1.0 else addend / stored.scale)
            for _, target in primary.touching(start, stop):
                _target(out, target).div_(len(others) + 1)


def _target(out: torch.Tensor, piece: AffinePiece) -> torch.Tensor:
    return out.as_strided(piece.shape, piece.dest_strides, out.storage_offset() + piece.dest_offset)


def _dense(piece: AffinePiece) -> bool:
    expected = 1
    for extent, stride in zip(reversed(piece.shape), reversed(piece.dest_strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
