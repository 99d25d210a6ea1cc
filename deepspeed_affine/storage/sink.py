"""Where output files are written: a folder here, and the same two protocols for objects elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

__all__ = ["LocalFile", "LocalSink", "Sink", "SinkFile"]


class SinkFile(Protocol):
    """One output file that is being written; exactly one of ``finish`` and ``abandon`` ends it."""

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """All of ``data`` is in the file from ``offset`` on. A sequential sink takes its files front to back."""

    def finish(self) -> None:
        """After this the file is whole, durable if the sink was asked for that, and closed."""

    def abandon(self) -> None:
        """After this the file is closed and nothing of it is left; never raises, and does nothing to a finished one."""


class Sink(Protocol):
    """Creates output files.

    Where ``sequential`` is True every file is written from its first byte to its last by one thread, without gaps;
    else by any threads, in any order.
    """

    @property
    def sequential(self) -> bool: ...

    def create(self, path: str, size: int) -> SinkFile:
        """A new file of ``size`` bytes; ``path`` is relative to the output, with "/" between its parts."""


class LocalSink:
    """Files of one folder. Each has its size from the start; one that exists already raises FileExistsError."""

    sequential = False

    def __init__(self, folder: str, *, durable: bool = True) -> None:
        self.folder = folder
        self.durable = durable
        self._made: set[str] = set()
        self._lock = threading.Lock()

    def create(self, path: str, size: int) -> LocalFile:
        target = os.path.join(self.folder, *path.split("/"))
        parent = os.path.dirname(target)
        with self._lock:
            if parent not in self._made:
                os.makedirs(parent, exist_ok=True)
                self._made.add(parent)
        return LocalFile(target, size, durable=self.durable)


class LocalFile:
    """One file of a LocalSink, for any number of threads at once."""

    def __init__(self, path: str, size: int, *, durable: bool = True) -> None:
        self.path = path
        self.size = size
        self._durable = durable
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with _naming(path):
                os.ftruncate(self._fd, size)
        except BaseException:
            self.abandon()
            raise

    def fileno(self) -> int:
        """The open descriptor, for hints to the system; -1 once the file is closed."""
        return self._fd

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if offset < 0 or offset + len(view) > self.size:
            raise ValueError(f"{self.path}: {len(view)} bytes at {offset} do not fit into its {self.size} bytes")
        done = 0
        with _naming(self.path):
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], offset + done)

    def finish(self) -> None:
        with _naming(self.path):
            if self._durable:
                os.fsync(self._fd)
            self._close()

    def abandon(self) -> None:
        if self._fd < 0:
            return
        # Its bytes are not wanted, so that they could not be stored is no news.
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            os.unlink(self.path)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Gives an error of a descriptor the name of its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error
