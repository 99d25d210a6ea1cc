"""Writing files elsewhere: uploads that are invisible until they are whole, and checked before they count.

An object store shows an object when its upload is completed, so files go straight to their names. Other file systems
get them under a private name, which is changed at the end. Either way a file that was given up leaves nothing behind,
and one that is finished was compared with what was sent: by the digest the store gives it where that is one of MD5, as
S3's are, else by reading it back.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed_affine.storage.remote import Place
from deepspeed_affine.storage.remote_read import CHUNK_BYTES

__all__ = ["PART_BYTES", "RemoteSink", "Upload", "Uploaded", "memory_of"]

PART_BYTES = 8 << 20
"""Sent at a time; held in memory until then by every file that is being written, a few times over."""
_MOST_PARTS = 9000
_HELD = 4
"""How many times over a part is in memory while it is sent: here, in fsspec's buffer, and on its way."""


def memory_of(size: int) -> int:
    """The most bytes that writing one file of this size holds in memory."""
    return _HELD * min(size, part_bytes_of(size, PART_BYTES))


def part_bytes_of(size: int, part_bytes: int) -> int:
    """What a file of this size is sent in at a time: stores take a limited number of parts."""
    return max(part_bytes, -(-size // _MOST_PARTS))


@dataclass(frozen=True, slots=True)
class Uploaded:
    """An object that was written and found good. ``tag`` changes whenever it is written anew; empty where the store
    gives none."""

    nbytes: int
    crc32: int
    tag: str


class RemoteSink:
    """Objects below one place. ``uploaded`` has every finished one by its path; ``begin`` is called before each is
    begun."""

    sequential = True

    def __init__(
        self,
        folder: Place,
        private: Place,
        *,
        begin: Callable[[str], None] = lambda path: None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.folder = folder
        self.uploaded: dict[str, Uploaded] = {}
        self._begin = begin
        self._private = private
        self._part_bytes = part_bytes

    def create(self, path: str, size: int) -> Upload:
        self._begin(path)
        private = self._private.below(f"{secrets.token_hex(8)}.part")
        return Upload(self, path, self.folder.below(path), private, size, self._part_bytes)


class Upload:
    """One object that is being written, front to back, by one thread."""

    def __init__(self, sink: RemoteSink, path: str, place: Place, private: Place, size: int, part_bytes: int) -> None:
        self.place = place
        self.size = size
        self._sink = sink
        self._path = path
        self._part_bytes = part_bytes_of(size, part_bytes)
        self._digest = _PartDigest(place.protocols & {"s3", "s3a"})
        self._crc = 0
        self._position = 0
        self._small = bytearray()
        self._file: Any = None
        self._written_to = place if place.streams else private
        self._open = True

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if offset != self._position or offset + len(view) > self.size:
            raise ValueError(
                f"{self.place.url}: {len(view)} bytes for byte {offset}, after {self._position} of {self.size}; an "
                "object is written front to back"
            )
        self._crc = zlib.crc32(view, self._crc)
        if self.size <= self._part_bytes:
            self._small += view
            self._position += len(view)
            return
        while view:
            # A part is sent as soon as it is full, so what is written at a time must end where parts end.
            piece = view[: self._part_bytes - self._position % self._part_bytes]
            if self._file is None:
                self._file = self._opened()
            self._digest.add(piece)
            self._position += len(piece)
            if self._position % self._part_bytes == 0 or self._position == self.size:
                self._digest.end_part()
            self.place.once(partial(self._file.write, piece))
            view = view[len(piece) :]

    def finish(self) -> None:
        if self._position != self.size:
            raise ValueError(f"{self.place.url}: ends at byte {self._position}, expected {self.size} bytes")
        if self._file is None:
            self._digest.add(self._small)
            self.place.put(bytes(self._small), self._written_to)
        else:
            self.place.once(self._file.close)
            if self._written_to is not self.place:
                self._written_to.move_to(self.place)
        self._open = False
        self._file = None
        self._small = bytearray()
        try:
            tag = self._verified()
        except BaseException:
            with suppress(OSError):
                self.place.delete()
            raise
        self._sink.uploaded[self._path] = Uploaded(self.size, self._crc, tag)

    def abandon(self) -> None:
        if not self._open:
            return
        self._open = False
        self._small = bytearray()
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):
                if self.place.streams:
                    file.discard()
            with suppress(Exception):
                # Closing would complete the upload.
                file.closed = True
            if not self.place.streams:
                with suppress(Exception):
                    file.close()
        if not self.place.streams:
            with suppress(OSError):
                self._written_to.delete()

    def _opened(self) -> Any:
        target = self._written_to
        target.make_parent()
        return target.attempt(lambda: target.system.open(target.path, "wb", block_size=self._part_bytes))

    def _verified(self) -> str:
        """The object's tag, once it is known to hold what was sent."""
        found = self.place.info()
        if found.size != self.size:
            raise self._differs(f"has {found.size} bytes after its upload, {self.size} were sent")
        if found.tag and found.tag == self._digest.text():
            return found.tag
        crc = 0
        for start in range(0, self.size, CHUNK_BYTES):
            crc = zlib.crc32(self.place.read(start, min(start + CHUNK_BYTES, self.size)), crc)
        if crc != self._crc:
            raise self._differs("reads back otherwise than it was sent")
        return found.tag

    def _differs(self, fact: str) -> OSError:
        return OSError(errno.EIO, f"{fact}; expected the same. The store or the way to it is at fault", self.place.url)


class _PartDigest:
    """The tag S3 gives to an object: the MD5 of its bytes, or of the MD5s of the parts it was sent in.

    Empty where ``wanted`` says that the store has no such tags.
    """

    def __init__(self, wanted: object) -> None:
        self._wanted = bool(wanted)
        self._now = _md5()
        self._parts: list[bytes] = []

    def add(self, data: bytes | bytearray | memoryview) -> None:
        if self._wanted:
            self._now.update(data)

    def end_part(self) -> None:
        self._parts.append(self._now.digest())
        self._now = _md5()

    def text(self) -> str:
        if not self._wanted:
            return ""
        if not self._parts:
            return str(self._now.hexdigest())
        return f"{_md5(b''.join(self._parts)).hexdigest()}-{len(self._parts)}"


def _md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)
