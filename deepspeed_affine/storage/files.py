"""Reading bytes of files at offsets: no maps, so that a file cut short is an error and never the end of the process.

Every function takes a local path or, with fsspec installed, a URL; the module for URLs is imported when one is given.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.urls import absolute, is_url, join, name_of, parent_of

if TYPE_CHECKING:
    from deepspeed_affine.storage.remote import Place
    from deepspeed_affine.storage.remote_read import RemoteReader

__all__ = [
    "ByteReader",
    "FolderEntry",
    "MetadataFile",
    "absolute",
    "catalogue",
    "file_size",
    "is_file",
    "is_folder",
    "is_url",
    "join",
    "list_folder",
    "name_of",
    "open_metadata",
    "parent_of",
    "read_small",
]

_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
MOST_OPEN = 32
"""Idle descriptors kept; opening one again costs little, and folders have more files than a process may open."""


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One entry of a folder; ``size`` is in bytes and None for what is no regular file."""

    name: str
    size: int | None
    is_folder: bool = False


class MetadataFile(Protocol):
    """An open file to read small parts of; closing it is the caller's.

    ``version`` is text that changes when the file is written anew: the time of its last change, or an object's tag.
    """

    @property
    def size(self) -> int: ...

    @property
    def is_regular(self) -> bool: ...

    @property
    def version(self) -> str: ...

    def pread(self, count: int, offset: int) -> bytes:
        """Up to ``count`` bytes at ``offset``; fewer only where the file ends, or as the system likes."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """A hint: these (start, stop) will be read soon. Worth a call where every read is a journey."""

    def close(self) -> None: ...


class _LocalFile:
    def __init__(self, path: str) -> None:
        # Without O_NONBLOCK a named pipe would wait for a writer that never comes.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        self.size = status.st_size
        self.is_regular = stat.S_ISREG(status.st_mode)
        self.version = str(status.st_mtime_ns)

    def pread(self, count: int, offset: int) -> bytes:
        return os.pread(self._fd, count, offset)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        pass

    def close(self) -> None:
        os.close(self._fd)


def open_metadata(path: str) -> MetadataFile:
    """The file at ``path``, open for small reads; raises OSError or ValueError as ``open`` does."""
    if is_url(path):
        from deepspeed_affine.storage.remote_read import RemoteFile

        return RemoteFile(path)
    return _LocalFile(path)


def read_small(path: str, most: int) -> bytes:
    """The first ``most`` bytes of the file at ``path``, or all of it; raises OSError or ValueError as ``open`` does."""
    file = open_metadata(path)
    try:
        return file.pread(most, 0)
    finally:
        file.close()


def list_folder(path: str) -> list[FolderEntry]:
    """The entries of the folder itself, in order of their names; raises OSError as ``os.scandir`` does."""
    if is_url(path):
        return [FolderEntry(entry.name, entry.size, entry.is_folder) for entry in _place(path).entries()]
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                regular, folder = entry.is_file(), entry.is_dir()
                found.append(FolderEntry(entry.name, entry.stat().st_size if regular else None, folder))
            except OSError:
                # A link to itself; one to nothing is no error.
                found.append(FolderEntry(entry.name, None))
    return sorted(found, key=lambda entry: entry.name)


def catalogue(path: str) -> tuple[list[FolderEntry], object]:
    """What ``list_folder`` gives, and an object to hold on to: as long as it lives, metadata of a URL's files that was
    read is not read again, and its files are taken to be as they were listed."""
    if not is_url(path):
        return list_folder(path), None
    from deepspeed_affine.storage.remote_read import catalogue

    keeper, entries = catalogue(path)
    return [FolderEntry(entry.name, entry.size, entry.is_folder) for entry in entries], keeper


def is_file(path: str) -> bool:
    """True where a file is at ``path``."""
    return _found(path)[0] if is_url(path) else os.path.isfile(path)


def is_folder(path: str) -> bool:
    """True where a folder is at ``path``."""
    return _found(path)[1] if is_url(path) else os.path.isdir(path)


def file_size(path: str) -> int:
    """The size in bytes of the file at ``path``; raises OSError where there is none."""
    if is_url(path):
        size = _place(path).info().size
        if size is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return size
    return os.stat(path).st_size


def _found(url: str) -> tuple[bool, bool]:
    try:
        entry = _place(url).info()
    except (FileNotFoundError, NotADirectoryError):
        return False, False
    return entry.size is not None, entry.is_folder


def _place(url: str) -> Place:
    from deepspeed_affine.storage.remote import place_of

    return place_of(url)


class _Handle:
    __slots__ = ("fd", "users")

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.users = 0


class ByteReader:
    """Reads byte ranges of any number of files from any number of threads, with at most ``MOST_OPEN`` idle handles.

    What it returns is what the file held at that moment. A file that has become shorter, is gone or cannot be read
    raises CheckpointFormatError naming it. Where a URL cannot be reached, or not any more, OSError names it: that says
    nothing of the file.
    """

    def __init__(self) -> None:
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._remote: RemoteReader | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> ByteReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """After this no descriptor is open; the object may still be used."""
        with self._lock:
            for path in [path for path, handle in self._handles.items() if not handle.users]:
                os.close(self._handles.pop(path).fd)
            if self._remote is not None:
                self._remote.close()

    def size(self, path: str) -> int:
        """The file's size in bytes, now."""
        try:
            return file_size(path)
        except OSError as error:
            raise _unreadable(path, error) from error

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """``out`` (contiguous, writable, any format) holds the bytes of the file from ``offset`` on."""
        view = out.cast("B") if out.format != "B" or out.ndim != 1 else out
        if is_url(path):
            try:
                self._elsewhere().read_into(path, offset, view)
            except OSError as error:
                raise _unreadable(path, error) from error
            return
        handle = self._take(path)
        try:
            done = 0
            while done < len(view):
                try:
                    got = os.preadv(handle.fd, [view[done:]], offset + done)
                except OSError as error:
                    raise _unreadable(path, error) from error
                if not got:
                    raise CheckpointFormatError(
                        f"{path}: ends at byte {offset + done}, expected to reach byte {offset + len(view)}. The file "
                        "became shorter after its metadata was read: let nothing write to it and run again.",
                        file=path,
                    )
                done += got
        finally:
            self._give_back(path, handle)

    def read(self, path: str, offset: int, count: int) -> bytes:
        """``count`` bytes of the file from ``offset`` on."""
        buffer = bytearray(count)
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def _elsewhere(self) -> RemoteReader:
        from deepspeed_affine.storage.remote_read import RemoteReader

        with self._lock:
            if self._remote is None:
                self._remote = RemoteReader()
            return self._remote

    def _take(self, path: str) -> _Handle:
        with self._lock:
            handle = self._handles.get(path)
            if handle is None:
                try:
                    handle = self._handles[path] = _Handle(path)
                except OSError as error:
                    raise _unreadable(path, error) from error
            self._handles.move_to_end(path)
            handle.users += 1
            return handle

    def _give_back(self, path: str, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if len(self._handles) <= MOST_OPEN:
                return
            for name, held in self._handles.items():
                if not held.users:
                    os.close(self._handles.pop(name).fd)
                    return


def _unreadable(path: str, error: OSError) -> CheckpointFormatError | OSError:
    # What may pass (a disk, a network, a limit) is no fault of the file, and keeps what is finished.
    if not isinstance(error, _GONE):
        return OSError(error.errno, f"cannot be read ({error.strerror or error})", path)
    return CheckpointFormatError(
        f"{path}: cannot be read ({error.strerror or error}); expected the file its metadata was read from. Check that "
        "it is still there and readable.",
        file=path,
    )
