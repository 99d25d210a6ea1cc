"""Writing an object graph again, byte for byte as torch.save would have with every class at hand."""

from __future__ import annotations

import os
import zlib
from typing import Any

from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.pt_writer import PlacedStorage, PtLayout, archive_name
from deepspeed_affine.storage.refs import StorageRef

__all__ = ["save_objects"]

CHUNK_BYTES = 8 << 20


def save_objects(
    path: str | os.PathLike[str], obj: Any, *, reader: ByteReader | None = None, maps: object = None
) -> None:
    """Write to ``path`` the file ``torch.save`` would write of what ``obj`` stands for, equal byte for byte.

    ``obj`` may mix references, stand-ins and plain data. Storages are streamed from their files and stay shared
    where they were shared; memory does not grow with them. ``maps`` is not used.
    """
    layout = PtLayout(obj, archive_name(path))
    own = ByteReader() if reader is None else reader
    try:
        with open(path, "wb", buffering=0) as file:
            _write(_File(file.fileno(), os.fspath(path)), layout, own)
    finally:
        if reader is None:
            own.close()


def _write(file: _File, layout: PtLayout, reader: ByteReader) -> None:
    crcs: dict[str, int] = {}
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max((placed.nbytes for placed in layout.storages), default=0))))
    for part in layout.sequence(crcs):
        if not isinstance(part, PlacedStorage):
            file.write(part)
            continue
        if part.source is None:
            raise ValueError(f"{file.name}: storage {part.key} is a placeholder; only stored tensors can be copied")
        crcs[part.key] = _copy(part.source, part.nbytes, reader, file, buffer)


def _copy(source: StorageRef, nbytes: int, reader: ByteReader, file: _File, buffer: memoryview) -> int:
    crc = 0
    for start in range(0, nbytes, len(buffer)):
        chunk = buffer[: min(len(buffer), nbytes - start)]
        reader.read_into(source.path, source.byte_offset + start, chunk)
        crc = zlib.crc32(chunk, crc)
        file.write(chunk)
    return crc


class _File:
    """A descriptor written front to back; its errors name the file."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            try:
                view = view[os.write(self.fd, view) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.name) from error
