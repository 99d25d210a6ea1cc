"""Reading the stored elements of a piece: byte ranges in, an array of the piece's shape out.

Elements are moved as unsigned words of their width and never interpreted, so every dtype, and every NaN, arrives as it
was stored. Each thread reads through one buffer of fixed size.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.ir.ints import row_major_strides
from deepspeed_affine.plan.conversion import SourceStorage
from deepspeed_affine.storage.files import ByteReader

__all__ = ["PieceReader", "ReadLog", "Words", "piece_view", "word_of"]

Words = npt.NDArray[Any]

SCRATCH_BYTES = 4 << 20
SHORT_RUN_BYTES = 4096
"""Gaps shorter than this are read with the runs they lie between: a call costs as much as reading this."""


class ReadLog(Protocol):
    """Where reads are noted: bytes ``[start, stop)`` of a storage and their CRC-32."""

    def add(self, index: int, start: int, stop: int, crc32: int) -> None: ...


def word_of(itemsize: int) -> tuple[np.dtype[Any], int]:
    """The unsigned word that elements of ``itemsize`` bytes are moved as, and how many of them an element has."""
    return (np.dtype(f"<u{itemsize}"), 1) if itemsize <= 8 else (np.dtype("<u8"), itemsize // 8)


def piece_view(memory: Words, piece: AffinePiece, itemsize: int) -> Words:
    """The elements of flat ``memory`` that the piece's dest side addresses, as words of the piece's shape."""
    word, per = word_of(itemsize)
    shape, strides = piece.shape, tuple(stride * itemsize for stride in piece.dest_strides)
    if per > 1:
        shape, strides = (*shape, per), (*strides, word.itemsize)
    view: Words = np.ndarray(shape, word, memory, piece.dest_offset * itemsize, strides)
    return view


class PieceReader:
    """Reads pieces whose dest side addresses a plan's storages; safe to share between threads.

    Memory is one buffer of ``SCRATCH_BYTES`` a thread, whatever the size of a storage or a piece.
    """

    def __init__(self, storages: Sequence[SourceStorage], reader: ByteReader) -> None:
        self._storages = storages
        self._reader = reader
        self._local = threading.local()

    def storage(self, index: int) -> SourceStorage:
        return self._storages[index]

    def read(self, index: int, start: int, out: memoryview) -> None:
        """``out`` holds the bytes of storage ``index`` from byte ``start`` on."""
        storage = self._storages[index]
        self._reader.read_into(storage.file, storage.byte_offset + start, out)

    def fill(self, piece: AffinePiece, out: Words, log: ReadLog | None = None) -> int | None:
        """``out`` (words, of the piece's shape with an axis for the words of wide elements, any strides) holds the
        stored elements.

        Returns the CRC-32 of ``out``'s bytes where it came for nothing, else None.
        """
        (index,) = piece.locations
        _, per = word_of(self._storages[index].itemsize)
        shape, strides, offset = piece.shape, piece.dest_strides, piece.dest_offset
        if per > 1:
            shape, strides, offset = (*shape, per), (*(stride * per for stride in strides), 1), offset * per
        return self._fill(index, shape, strides, offset, out, log)

    def take(self, piece: AffinePiece) -> Words:
        """The stored elements in an array of their own, with a last axis for the words of wide elements."""
        (index,) = piece.locations
        word, per = word_of(self._storages[index].itemsize or 1)
        out = np.empty(piece.shape if per == 1 else (*piece.shape, per), word)
        self.fill(piece, out)
        return out

    def _fill(
        self,
        index: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        out: Words,
        log: ReadLog | None,
    ) -> int | None:
        numel = math.prod(shape)
        if not numel:
            return None
        width = out.itemsize
        if out.flags.c_contiguous and _in_order(shape, strides):
            start = offset * width
            self.read(index, start, out.reshape(-1).data.cast("B"))
            return _note(log, index, start, out) if log is not None else None
        reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
        low = offset + sum(min(step, 0) for step in reach)
        span = offset + sum(max(step, 0) for step in reach) + 1 - low
        scratch = self._scratch()
        axis = max(range(len(shape)), key=lambda at: abs(reach[at]))
        inner = span - abs(reach[axis])
        sparse = (abs(strides[axis]) - inner) * width >= SHORT_RUN_BYTES and shape[axis] > 1
        if span * width <= len(scratch) and not sparse:
            buffer = scratch[: span * width]
            self.read(index, low * width, buffer.data)
            if log is not None:
                _note(log, index, low * width, buffer)
            stored: Words = np.ndarray(
                shape, out.dtype, buffer, (offset - low) * width, tuple(stride * width for stride in strides)
            )
            np.copyto(out, stored)
            return None
        room = max(0, len(scratch) // width - inner)
        rows = 1 if sparse else min(shape[axis], room // abs(strides[axis]) + 1)
        for start in range(0, shape[axis], rows):
            count = min(rows, shape[axis] - start)
            self._fill(
                index,
                (*shape[:axis], count, *shape[axis + 1 :]) if count > 1 else (*shape[:axis], *shape[axis + 1 :]),
                strides if count > 1 else (*strides[:axis], *strides[axis + 1 :]),
                offset + start * strides[axis],
                _along(out, axis, start, count),
                log,
            )
        return None

    def _scratch(self) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] | None = getattr(self._local, "scratch", None)
        if found is None:
            found = self._local.scratch = np.empty(SCRATCH_BYTES, np.uint8)
        return found


def _note(log: ReadLog, index: int, start: int, data: Words) -> int:
    crc = zlib.crc32(data.reshape(-1).data.cast("B"))
    log.add(index, start, start + data.nbytes, crc)
    return crc


def _along(out: Words, axis: int, start: int, count: int) -> Words:
    """A view of ``count`` places of one axis; a single one loses the axis."""
    place: Any = (*(slice(None),) * axis, slice(start, start + count))
    found: Words = out[place]
    return found if count > 1 else found.squeeze(axis)


def _in_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    dense = row_major_strides(shape)
    return all(extent == 1 or stride == step for extent, stride, step in zip(shape, strides, dense, strict=True))
