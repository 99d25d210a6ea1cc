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
from typing import Any

from deepspeed_affine.storage.remote import Place
from deepspeed_affine.storage.remote_read import CHUNK_BYTES

__all__ = ["PART_BYTES", "RemoteSink", "Upload", "Uploaded"]

PART_BYTES = 8 << 20
"""Sent at a time and held in memory until then, by every file that is being written, up to three times over."""
_MOST_PARTS = 9000


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
        self._part_bytes = max(part_bytes, -(-size // _MOST_PARTS))
        self._digest = _PartDigest() if place.protocols & {"s3", "s3a"} else None
        self._crc = 0
        self._position = 0
        self._pending = bytearray()
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
        while view:
            part = view[: self._part_bytes - len(self._pending)]
            self._pending += part
            self._position += len(part)
            view = view[len(part) :]
            if len(self._pending) == self._part_bytes and self._position < self.size:
                self._send()

    def finish(self) -> None:
        if self._position != self.size:
            raise ValueError(f"{self.place.url}: ends at byte {self._position}, expected {self.size} bytes")
        if self._file is None:
            data = bytes(self._pending)
            self._note(data)
            self.place.put(data, self._written_to)
        else:
            self._send()
            self.place.once(self._file.close)
            if self._written_to is not self.place:
                self._written_to.move_to(self.place)
        self._open = False
        self._file = None
        self._pending = bytearray()
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
        self._pending = bytearray()
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

    def _send(self) -> None:
        if self._file is None:
            target = self._written_to
            target.make_parent()
            self._file = target.attempt(lambda: target.system.open(target.path, "wb", block_size=self._part_bytes))
        data = bytes(self._pending)
        self._note(data)
        self._pending.clear()
        self.place.once(lambda: self._file.write(data))

    def _note(self, data: bytes) -> None:
        if self._digest is not None:
            self._digest.add(data, whole=self._file is None)

    def _verified(self) -> str:
        """The object's tag, once it is known to hold what was sent."""
        found = self.place.info()
        if found.size != self.size:
            raise self._differs(f"has {found.size} bytes after its upload, {self.size} were sent")
        if self._digest is not None and found.tag == self._digest.text():
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
    """The tag S3 gives to an object whose parts are known: their MD5, or the MD5 of those of several parts."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._whole = False

    def add(self, data: bytes, *, whole: bool) -> None:
        self._whole = whole
        self._parts.append(hashlib.md5(data, usedforsecurity=False).digest())

    def text(self) -> str:
        if self._whole:
            return self._parts[0].hex()
        joined = hashlib.md5(b"".join(self._parts), usedforsecurity=False)
        return f"{joined.hexdigest()}-{len(self._parts)}"
