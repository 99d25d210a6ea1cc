"""A sink that writes nothing: what would be written is compared with what is there.

A conversion into it proves that an existing output is, byte for byte, what the conversion would make; it reads the
source once, the output once, and takes no other memory than a conversion.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from deepspeed_affine.errors import AffineError
from deepspeed_affine.storage.files import ByteReader, join

__all__ = ["ComparingSink", "same_bytes"]


class ComparingSink:
    """Takes the files of a conversion and compares them with those below ``root``, whose sizes are given.

    ``unlike`` maps every file that is not the same to the lowest offset at which a difference was seen; no more of it
    is read then. A file that cannot be read is not the same.
    """

    sequential = False

    def __init__(self, root: str, sizes: Mapping[str, int], reader: ByteReader) -> None:
        self.unlike: dict[str, int] = {}
        self._root = root
        self._sizes = sizes
        self._reader = reader
        self._lock = threading.Lock()
        self._local = threading.local()

    def create(self, path: str, size: int) -> _ComparedFile:
        found = self._sizes[path]
        if found != size:
            self.differs(path, min(found, size))
        return _ComparedFile(self, path)

    def differs(self, path: str, offset: int) -> None:
        with self._lock:
            self.unlike[path] = min(offset, self.unlike.get(path, offset))

    def compare(self, path: str, offset: int, data: memoryview) -> None:
        if path in self.unlike:
            return
        held = self._buffer(len(data))
        try:
            self._reader.read_into(join(self._root, path), offset, held.data)
        except AffineError:
            self.differs(path, offset)
            return
        expected = np.frombuffer(data, np.uint8)
        if not same_bytes(held, expected):
            self.differs(path, offset + int(np.argmax(held != expected)))

    def _buffer(self, count: int) -> npt.NDArray[np.uint8]:
        held: npt.NDArray[np.uint8] | None = getattr(self._local, "held", None)
        if held is None or len(held) < count:
            held = self._local.held = np.empty(count, np.uint8)
        return held[:count]


class _ComparedFile:
    def __init__(self, sink: ComparingSink, path: str) -> None:
        self._sink = sink
        self._path = path

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self._sink.compare(self._path, offset, memoryview(data).cast("B"))

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def same_bytes(left: npt.NDArray[np.uint8], right: npt.NDArray[np.uint8]) -> bool:
    """Whether two arrays of bytes, equally long, hold the same; as wide words as far as those go."""
    whole = len(left) // 8 * 8
    return np.array_equal(left[:whole].view(np.uint64), right[:whole].view(np.uint64)) and np.array_equal(
        left[whole:], right[whole:]
    )
