"""Writing a .pt file whose every byte offset is known before its first data byte.

``PtLayout`` turns an object holding ``NewTensor`` placeholders into the file torch.save would write, less the data.
Data may then be written in any order, by any thread or process, and the checksums are given at the end.
"""

from __future__ import annotations

import io
import math
import os
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.storage.dtypes import ITEM_SIZES, item_size, storage_class_name
from deepspeed_affine.storage.pickler import StandInPickler
from deepspeed_affine.storage.refs import Global
from deepspeed_affine.storage.serialization_id import serialization_id

__all__ = ["NewTensor", "PlacedStorage", "PtLayout", "TensorFileWriter", "archive_name"]

_ALIGNMENT = 64
_MAX32 = 0xFFFFFFFF
_UTF8_NAME = 0x800
_SIZES_FOLLOW = 0x8
Segment = tuple[int, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor to be written: contiguous, alone in its storage. Two equal ones are still two tensors."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise InvalidMapError(f"a new tensor has dtype {self.dtype!r}; expected a name such as 'float32'")
        if not all(type(extent) is int and extent >= 0 for extent in self.shape):
            raise InvalidMapError(f"a new tensor has shape {self.shape}; expected non-negative ints")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * item_size(self.dtype)


@dataclass(frozen=True, slots=True)
class PlacedStorage:
    """Where the bytes of one placeholder go; ``byte_offset`` is absolute and 64-byte aligned."""

    key: str
    tensor: NewTensor
    nbytes: int
    byte_offset: int


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    header_offset: int
    data_offset: int
    size: int
    data: bytes | None

    def zip64_extra(self) -> bytes:
        extra = b"" if self.size < _MAX32 else struct.pack("<2Q", self.size, self.size)
        extra += b"" if self.header_offset < _MAX32 else struct.pack("<Q", self.header_offset)
        return struct.pack("<2H", 1, len(extra)) + extra if extra else b""

    def flags(self) -> int:
        return _UTF8_NAME | (_SIZES_FOLLOW if self.size else 0)

    def local_header(self) -> bytes:
        name, extra = self.name.encode(), self.zip64_extra()
        padding = self.data_offset - self.header_offset - 30 - len(name) - len(extra) - 4
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        head = struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, self.flags(), 0, 0, 0, 0, 0, 0, len(name), len(extra))
        return head + name + extra

    def descriptor(self, crc: int) -> bytes:
        if not self.size:
            return b""
        sizes = "<4sL2Q" if self.zip64_extra() else "<4s3L"
        return struct.pack(sizes, b"PK\x07\x08", crc, self.size, self.size)

    def end(self) -> int:
        return self.data_offset + self.size + len(self.descriptor(0))

    def central_entry(self, crc: int) -> bytes:
        name, extra = self.name.encode(), self.zip64_extra()
        size, offset = min(self.size, _MAX32), min(self.header_offset, _MAX32)
        fixed = (0, 0, 0, 0, self.flags(), 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, offset)
        return struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", *fixed) + name + extra


def _place(name: str, cursor: int, size: int, data: bytes | None) -> _Record:
    unplaced = _Record(name, cursor, 0, size, data)
    start = cursor + 30 + len(name.encode()) + len(unplaced.zip64_extra()) + 4
    return _Record(name, cursor, -(-start // _ALIGNMENT) * _ALIGNMENT, size, data)


@dataclass(frozen=True, slots=True, eq=False)
class _NewStorage:
    key: str
    cls: Global
    count: int


class _LayoutPickler(StandInPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[NewTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _NewStorage):
            return ("storage", obj.cls, obj.key, "cpu", obj.count)
        return None

    def save(self, obj: Any) -> None:
        if type(obj) is NewTensor and id(obj) not in self._memo:
            key = str(len(self.tensors))
            self.tensors.append(obj)
            self.save_reduce(*_reduce(obj, key), obj=obj)
        else:
            super().save(obj)


def _reduce(tensor: NewTensor, key: str) -> tuple[Any, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(tensor.shape):
        strides.insert(0, step)
        step *= max(extent, 1)
    hooks: OrderedDict[Any, Any] = OrderedDict()
    view = (0, tensor.shape, tuple(strides), False, hooks)
    legacy = storage_class_name(tensor.dtype)
    if legacy is not None:
        storage = _NewStorage(key, Global("torch", legacy), tensor.numel)
        return Global("torch._utils", "_rebuild_tensor_v2"), (storage, *view)
    storage = _NewStorage(key, Global("torch.storage", "UntypedStorage"), tensor.nbytes)
    return Global("torch._utils", "_rebuild_tensor_v3"), (storage, *view, Global("torch", tensor.dtype))


def archive_name(path: str | os.PathLike[str]) -> str:
    """Return the folder torch.save puts inside the archive it writes to ``path``."""
    text = os.fspath(path)
    if not text.isascii():
        return "archive"
    name = text.replace("\\", "/").rpartition("/")[2]
    stem, dot, _ = name.rpartition(".")
    return (stem if dot else name) or "archive"


class PtLayout:
    """The bytes of a .pt file around its tensors' data, and where that data goes.

    ``root`` is any object graph of plain data, stand-ins and ``NewTensor`` placeholders; ``folder`` is the archive's
    inner folder, for which see ``archive_name``. The finished file equals torch.save's of the same object.
    """

    __slots__ = ("_records", "_tail_start", "file_size", "folder", "storages")

    def __init__(self, root: Any, folder: str = "archive") -> None:
        buffer = io.BytesIO()
        pickler = _LayoutPickler(buffer)
        pickler.dump(root)
        self.folder = folder
        records: list[_Record] = []
        cursor = 0
        small = (
            ("data.pkl", buffer.getvalue()),
            (".format_version", b"1"),
            (".storage_alignment", str(_ALIGNMENT).encode()),
            ("byteorder", sys.byteorder.encode()),
        )
        for name, data in small:
            records.append(_place(f"{folder}/{name}", cursor, len(data), data))
            cursor = records[-1].end()
        placed = []
        for index, tensor in enumerate(pickler.tensors):
            record = _place(f"{folder}/data/{index}", cursor, tensor.nbytes, None)
            placed.append(PlacedStorage(str(index), tensor, tensor.nbytes, record.data_offset))
            records.append(record)
            cursor = record.end()
        self.storages: tuple[PlacedStorage, ...] = tuple(placed)
        self._records = tuple(records)
        self._tail_start = cursor
        self.file_size = sum(map(len, self._tail([0] * len(records)))) + cursor

    def header(self) -> list[Segment]:
        """Return the metadata that precedes each record's data, and the data of the small records, with offsets."""
        segments = []
        for record in self._records:
            data = record.data or b""
            if data:
                data += record.descriptor(zlib.crc32(data))
            segments.append((record.header_offset, record.local_header() + data))
        return segments

    def trailer(self, crcs: Mapping[str, int]) -> list[Segment]:
        """Return what is written last: the checksum after each storage, the closing records and the directory.

        ``crcs`` maps each storage's key to the CRC-32 of its bytes; empty storages need none.
        """
        missing = [placed.key for placed in self.storages if placed.nbytes and placed.key not in crcs]
        if missing:
            raise InvalidMapError(f"storages {', '.join(missing)} of {self.folder!r} have no checksum; expected all")
        sums = [zlib.crc32(r.data) if r.data is not None else 0 for r in self._records]
        segments = []
        first = len(self._records) - len(self.storages)
        for position, placed in enumerate(self.storages, first):
            if placed.nbytes:
                record = self._records[position]
                sums[position] = crcs[placed.key]
                segments.append((record.data_offset + record.size, record.descriptor(sums[position])))
        segments.append((self._tail_start, b"".join(self._tail(sums))))
        return segments

    def _tail(self, sums: list[int]) -> Iterable[bytes]:
        version = _place(f"{self.folder}/version", self._tail_start, 2, b"3\n")
        summed = [(record, crc) for record, crc in zip(self._records, sums, strict=True)]
        summed.append((version, zlib.crc32(b"3\n")))
        names = [record.name[len(self.folder) + 1 :] for record, _ in summed]
        digits = serialization_id(names, (crc for record, crc in summed if record.size)).encode()
        fingerprint = _place(f"{self.folder}/.data/serialization_id", version.end(), len(digits), digits)
        summed.append((fingerprint, zlib.crc32(digits)))
        for record, crc in summed[-2:]:
            data = record.data or b""
            yield record.local_header() + data + record.descriptor(crc)
        directory = b"".join(record.central_entry(crc) for record, crc in summed)
        yield directory
        count, size, offset = len(summed), len(directory), fingerprint.end()
        yield struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0x31E, 45, 0, 0, count, count, size, offset)
        yield struct.pack("<4sLQL", b"PK\x06\x07", 0, offset + size, 1)
        short = min(count, 0xFFFF)
        yield struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, short, short, min(size, _MAX32), min(offset, _MAX32), 0)


class TensorFileWriter:
    """A file of a given layout, written at offsets: one process creates it, any may open it and write data.

    Until ``finish`` has run the file is no valid archive.
    """

    def __init__(self, path: str | os.PathLike[str], layout: PtLayout, *, create: bool = True) -> None:
        self.path = os.fspath(path)
        self.layout = layout
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self.fd = os.open(self.path, flags, 0o666)
        self._places = {placed.key: placed for placed in layout.storages}
        if create:
            try:
                os.ftruncate(self.fd, layout.file_size)
                for offset, data in layout.header():
                    self._write_at(offset, data)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, key: str, byte_offset: int, data: Any) -> None:
        """Put ``data`` (anything with the buffer protocol) at ``byte_offset`` of the storage; safe from any thread."""
        view = memoryview(data).cast("B")
        placed = self._places[key]
        if byte_offset < 0 or byte_offset + len(view) > placed.nbytes:
            raise InvalidMapError(
                f"{self.path}: bytes {byte_offset} to {byte_offset + len(view)} do not fit storage {key!r} of "
                f"{placed.nbytes} bytes",
                file=self.path,
            )
        self._write_at(placed.byte_offset + byte_offset, view)

    def finish(self, crcs: Mapping[str, int]) -> None:
        """Complete the archive with the CRC-32 of every storage; all its data must have been written."""
        for offset, data in self.layout.trailer(crcs):
            self._write_at(offset, data)

    def sync(self) -> None:
        """After this the file's bytes are on the disk."""
        os.fsync(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            try:
                done += os.pwrite(self.fd, view[done:], offset + done)
            except OSError as exc:
                raise OSError(exc.errno, exc.strerror, self.path) from exc
