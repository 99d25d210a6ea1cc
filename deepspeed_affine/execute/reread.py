"""Files read again from their first byte to their last, for nothing but their checksums."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping

from deepspeed_affine.errors import AffineError
from deepspeed_affine.execute.convert import CHUNK_BYTES
from deepspeed_affine.execute.pulling import run_jobs
from deepspeed_affine.storage.crc import crc32_combine
from deepspeed_affine.storage.files import ByteReader, join

__all__ = ["sum_files"]

SEGMENT_BYTES = 64 << 20
"""Longer files are read by several threads."""


class _File:
    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self.sums: dict[int, int] = {}
        self.fault: AffineError | None = None

    def whole(self) -> int | AffineError:
        if self.fault is not None:
            return self.fault
        crc = 0
        for start in range(0, self.size, SEGMENT_BYTES):
            crc = crc32_combine(crc, self.sums[start], min(SEGMENT_BYTES, self.size - start))
        return crc


def sum_files(
    sizes: Mapping[str, int],
    root: str,
    reader: ByteReader,
    workers: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, int | AffineError]:
    """The CRC-32 of the first ``sizes[path]`` bytes of each file below ``root``, or why they cannot be read.

    Every byte is read once. Memory is one chunk a thread. ``advance`` is told the bytes read, from any thread.
    """
    files = {path: _File(join(root, path), size) for path, size in sizes.items()}
    local = threading.local()

    def read(file: _File, start: int) -> None:
        stop = min(start + SEGMENT_BYTES, file.size)
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(chunk_bytes))
        crc = 0
        for at in range(start, stop, chunk_bytes):
            part = local.buffer[: min(chunk_bytes, stop - at)]
            try:
                reader.read_into(file.path, at, part)
            except AffineError as fault:
                file.fault = fault
                return
            crc = zlib.crc32(part, crc)
            advance(len(part))
        file.sums[start] = crc

    def jobs() -> Iterator[Callable[[], None]]:
        for file in files.values():
            for start in range(0, file.size, SEGMENT_BYTES):
                yield lambda file=file, start=start: read(file, start)  # type: ignore[misc]

    run_jobs(jobs(), workers)
    return {path: file.whole() for path, file in files.items()}
