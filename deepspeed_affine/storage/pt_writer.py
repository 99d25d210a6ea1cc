"""Writing a .pt file whose every byte offset is known before its first data byte.

``PtLayout`` turns an object graph into the file torch.save would write, less its tensors' data. Data may then be
written in any order, by any thread or process, with the checksums given at the end; or front to back.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.storage.refs import StorageRef
from deepspeed_affine.storage.serialization_id import serialization_id
from deepspeed_affine.storage.tensor_pickler import NewTensor, TensorPickler
from deepspeed_affine.storage.zip_writer import Record, directory, directory_size

__all__ = ["NewTensor", "PlacedStorage", "PtLayout", "archive_name"]

Segment = tuple[int, bytes]
_ID_DIGITS = 40


@dataclass(frozen=True, slots=True)
class PlacedStorage:
    """Where the bytes of one storage go; ``byte_offset`` is absolute and 64-byte aligned.

    They are those of ``source``, or where that is None whatever the caller fills ``tensor`` with.
    """

    key: str
    nbytes: int
    byte_offset: int
    tensor: NewTensor | None
    source: StorageRef | None


def archive_name(path: str | os.PathLike[str]) -> str:
    """Return the folder torch.save puts inside the archive it writes to ``path``."""
    text = os.fspath(path)
    if not text.isascii():
        return "archive"
    name = text.replace("\\", "/").rpartition("/")[2]
    stem, dot, _ = name.rpartition(".")
    return (stem if dot else name) or "archive"


_SMALL = tuple(
    (name, data, zlib.crc32(data))
    for name, data in ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", sys.byteorder.encode()))
)
_VERSION = b"3\n"
_VERSION_CRC = zlib.crc32(_VERSION)


class PtLayout:
    """The bytes of a .pt file around its tensors' data, and where that data goes.

    ``root`` is any object graph of plain data, stand-ins, ``NewTensor`` placeholders and references to stored
    tensors; storages that were shared stay shared. ``folder`` is the archive's inner folder, for which see
    ``archive_name``. The finished file equals torch.save's of what ``root`` stands for. It holds no data: memory
    does not grow with the tensors.
    """

    __slots__ = ("_gaps", "_records", "_sums", "file_size", "folder", "storages")

    def __init__(self, root: Any, folder: str = "archive") -> None:
        pickler = TensorPickler()
        data = pickler.dumps(root)
        self.folder = folder
        self._records: list[Record] = []
        # What the file holds before, between and after the data of the storages that have any.
        self._gaps: list[Segment] = []
        self._sums = [zlib.crc32(data)]
        literal = [self._add("data.pkl", 0, len(data)).whole(data, self._sums[0])]
        for name, content, crc in _SMALL:
            literal.append(self._add(name, self._records[-1].end, len(content)).whole(content, crc))
            self._sums.append(crc)
        start, placed = 0, []
        for index, source in enumerate(pickler.sources):
            record = self._add(f"data/{index}", self._records[-1].end, source.nbytes)
            self._sums.append(0)
            literal.append(record.header())
            tensor, ref = (source, None) if isinstance(source, NewTensor) else (None, source)
            placed.append(PlacedStorage(str(index), record.size, record.data_offset, tensor, ref))
            if record.size:
                self._gaps.append((start, b"".join(literal)))
                start, literal = record.end, []
        self._gaps.append((start, b"".join(literal)))
        self.storages: tuple[PlacedStorage, ...] = tuple(placed)
        version = self._add("version", self._records[-1].end, len(_VERSION))
        self._sums.append(_VERSION_CRC)
        fingerprint = self._add(".data/serialization_id", version.end, _ID_DIGITS)
        self.file_size = fingerprint.end + directory_size(self._records)

    def _add(self, name: str, offset: int, size: int) -> Record:
        record = Record(f"{self.folder}/{name}".encode(), offset, size)
        self._records.append(record)
        return record

    def header(self) -> list[Segment]:
        """Return all that is known before the data, with offsets."""
        return [segment for segment in self._gaps if segment[1]]

    def trailer(self, crcs: Mapping[str, int]) -> list[Segment]:
        """Return what is written last: the checksum after each storage, the closing records and the directory.

        ``crcs`` maps each storage's key to the CRC-32 of its bytes; empty storages need none.
        """
        missing = [placed.key for placed in self.storages if placed.nbytes and placed.key not in crcs]
        if missing:
            raise InvalidMapError(f"storages {', '.join(missing)} of {self.folder!r} have no checksum; expected all")
        segments = [(placed.byte_offset + placed.nbytes, self._descriptor(placed, crcs)) for placed in self._filled()]
        end = (self._records[-2].header_offset, self._end(crcs))
        if segments and not self._gaps[-1][1]:
            end = (segments[-1][0], segments.pop()[1] + end[1])
        return [*segments, end]

    def sequence(self, crcs: Mapping[str, int]) -> Iterator[bytes | PlacedStorage]:
        """Yield the file front to back: bytes to write, and storages whose data is to be written at that place.

        ``crcs`` must hold a storage's CRC-32, by its key, when the iterator is asked for what follows that storage.
        """
        pending = b""
        for placed, (_, gap) in zip(self._filled(), self._gaps, strict=False):
            yield pending + gap
            yield placed
            if placed.key not in crcs:
                raise InvalidMapError(f"storage {placed.key} of {self.folder!r} has no checksum; expected it by now")
            pending = self._descriptor(placed, crcs)
        yield pending + self._gaps[-1][1] + self._end(crcs)

    def _filled(self) -> list[PlacedStorage]:
        return [placed for placed in self.storages if placed.nbytes]

    def _descriptor(self, placed: PlacedStorage, crcs: Mapping[str, int]) -> bytes:
        return self._records[1 + len(_SMALL) + int(placed.key)].descriptor(crcs[placed.key])

    def _end(self, crcs: Mapping[str, int]) -> bytes:
        sums = self._sums.copy()
        for position, placed in enumerate(self.storages, 1 + len(_SMALL)):
            if placed.nbytes:
                sums[position] = crcs[placed.key]
        prefix = len(self.folder.encode()) + 1
        *others, fingerprint = self._records
        names = [record.name[prefix:].decode() for record in others]
        filled = (crc for record, crc in zip(others, sums, strict=True) if record.size)
        digits = serialization_id(names, filled).encode()
        sums.append(zlib.crc32(digits))
        version = others[-1].whole(_VERSION, _VERSION_CRC)
        closing = directory(self._records, sums, fingerprint.end)
        return version + fingerprint.whole(digits, sums[-1]) + closing
