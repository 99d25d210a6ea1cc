"""The files of a conversion as what a writer needs: fixed bytes, extents of data, and what the sums of those decide."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.execute.fill import IntervalFiller, chunk_bounds
from deepspeed_affine.execute.gather import PieceReader, ReadLog
from deepspeed_affine.plan.conversion import CopiedFile, ObjectFile, SourceStorage, TensorFile
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.pt_writer import NewTensor, PtLayout, archive_name

__all__ = [
    "Extent",
    "OutputFile",
    "RawExtent",
    "Segment",
    "TensorExtent",
    "copied_output",
    "object_output",
    "tensor_output",
]

Segment = tuple[int, bytes]
Buffer = npt.NDArray[np.uint8]


class Extent(ABC):
    """A run of data in an output file, made of intervals that can be read in any order by any thread."""

    __slots__ = ("key", "nbytes", "offset")

    def __init__(self, key: str, offset: int, nbytes: int) -> None:
        self.key = key
        self.offset = offset
        self.nbytes = nbytes

    @abstractmethod
    def intervals(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        """Consecutive byte intervals that cover the extent, none longer than ``chunk_bytes`` (or one element)."""

    @abstractmethod
    def read(self, start: int, stop: int, buffer: Buffer, log: ReadLog | None) -> tuple[memoryview, int]:
        """The bytes ``[start, stop)``, in ``buffer``, and their CRC-32."""


class TensorExtent(Extent):
    """The elements of a tensor, gathered from pieces; those that no piece names are zero where ``has_gaps`` says that
    there may be such."""

    __slots__ = ("_filler", "_has_gaps", "_task")

    def __init__(self, key: str, offset: int, task: TensorFile, pieces: PieceReader, *, has_gaps: bool = False) -> None:
        super().__init__(key, offset, task.nbytes)
        self._task = task
        self._has_gaps = has_gaps
        self._filler = IntervalFiller(task, pieces)

    def intervals(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        width = self._task.itemsize
        for start, stop in chunk_bounds(self._task, max(1, chunk_bytes // width)):
            yield start * width, stop * width

    def read(self, start: int, stop: int, buffer: Buffer, log: ReadLog | None) -> tuple[memoryview, int]:
        width = self._task.itemsize
        words = self._filler.words(buffer, (stop - start) // width)
        if self._has_gaps:
            words.fill(0)
        crc = self._filler.fill(start // width, stop // width, words, log)
        view: memoryview = words.data.cast("B")
        return view, zlib.crc32(view) if crc is None else crc


class RawExtent(Extent):
    """Bytes of a source file as they are; ``index`` names the storage they are, for the log, None for none."""

    __slots__ = ("_file", "_from", "_index", "_reader")

    def __init__(
        self, key: str, offset: int, nbytes: int, file: str, start: int, index: int | None, reader: ByteReader
    ) -> None:
        super().__init__(key, offset, nbytes)
        self._file = file
        self._from = start
        self._index = index
        self._reader = reader

    def intervals(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        for start in range(0, self.nbytes, chunk_bytes):
            yield start, min(start + chunk_bytes, self.nbytes)

    def read(self, start: int, stop: int, buffer: Buffer, log: ReadLog | None) -> tuple[memoryview, int]:
        view = buffer[: stop - start].data
        self._reader.read_into(self._file, self._from + start, view)
        crc = zlib.crc32(view)
        if log is not None and self._index is not None:
            log.add(self._index, start, stop, crc)
        return view, crc


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to write. ``head`` lists the bytes known at once; ``extents`` are in file order.

    ``planned`` is the part of the plan's ``bytes_out`` that it stands for; ``copied_from`` the file whose permissions
    and times it keeps.
    """

    path: str
    size: int
    planned: int
    head: tuple[Segment, ...]
    extents: tuple[Extent, ...]
    layout: PtLayout | None = field(default=None, repr=False)
    copied_from: str | None = None

    def tail(self, crcs: Mapping[str, int]) -> list[Segment]:
        """What the sums of the extents decide."""
        return [] if self.layout is None else self.layout.trailer(crcs)


def tensor_output(task: TensorFile, pieces: PieceReader) -> OutputFile:
    """The file of one tensor, equal to what torch.save writes."""
    tensor = NewTensor(task.dtype, task.shape, task.requires_grad)
    root: Any = tensor
    if task.entries is not None:
        root = {key: tensor if key == task.tensor_key else value for key, value in task.entries}
    layout = PtLayout(root, archive_name(task.path))
    extents = tuple(TensorExtent(placed.key, placed.byte_offset, task, pieces) for placed in layout.storages)
    return OutputFile(task.path, layout.file_size, task.nbytes, tuple(layout.header()), extents, layout)


def object_output(
    file: ObjectFile, storages: Sequence[SourceStorage], reader: ByteReader, pieces: PieceReader
) -> OutputFile:
    """The file of a re-pickled object graph: its storages streamed from their files, its new tensors gathered."""
    try:
        layout = PtLayout(file.root, archive_name(file.path))
    except RecursionError as error:
        raise UnsupportedLayoutError(
            f"{file.path}: the objects it is written from are nested deeper than Python can write. Save without them.",
            file=file.path,
        ) from error
    index = {(storage.file, storage.key): at for at, storage in enumerate(storages)}
    filled = {id(tensor): task for tensor, task in file.filled}
    extents: list[Extent] = []
    for placed in layout.storages:
        source, task = placed.source, filled.get(id(placed.tensor))
        if task is not None:
            has_gaps = sum(piece.numel for piece in task.pieces) < task.numel
            extents.append(TensorExtent(placed.key, placed.byte_offset, task, pieces, has_gaps=has_gaps))
            continue
        if source is None:
            raise UnsupportedLayoutError(f"{file.path}: holds a tensor that no file stores", file=file.path)
        extents.append(
            RawExtent(
                placed.key,
                placed.byte_offset,
                placed.nbytes,
                source.path,
                source.byte_offset,
                index.get((source.path, source.key)),
                reader,
            )
        )
    return OutputFile(file.path, layout.file_size, file.nbytes, tuple(layout.header()), tuple(extents), layout)


def copied_output(file: CopiedFile, storages: Sequence[SourceStorage], reader: ByteReader) -> OutputFile:
    """A source file as it is, cut where its storages begin and end so that their sums come with the copy."""
    index = {(storage.file, storage.key): at for at, storage in enumerate(storages)}
    extents: list[Extent] = []
    at = 0

    def until(stop: int, storage: int | None) -> None:
        nonlocal at
        if stop > at:
            extents.append(RawExtent(str(len(extents)), at, stop - at, file.source, at, storage, reader))
            at = stop

    for stored in sorted(file.storages, key=lambda item: item.byte_offset):
        if stored.byte_offset >= at:
            until(stored.byte_offset, None)
            until(stored.byte_offset + stored.nbytes, index.get((stored.file, stored.key)))
    until(file.nbytes, None)
    return OutputFile(file.path, file.nbytes, file.nbytes, (), tuple(extents), copied_from=file.source)
