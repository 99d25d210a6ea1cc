"""Getting bytes and names onto the disk, and small files replaced at once."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress

__all__ = [
    "fsync_folder",
    "fsync_folders",
    "is_no_space",
    "replace_file",
    "replace_text",
    "sync_file",
    "write_all",
]

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_no_space(error: BaseException | None) -> bool:
    """Whether ``error`` says that the disk, a quota or a file-size limit is full."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def write_all(fd: int, data: bytes | memoryview) -> None:
    """After this all of ``data`` is written at the descriptor's position; a disk that fills up half-way raises."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def fsync_folder(path: str) -> None:
    """After this the folder's own entries are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: str) -> None:
    """After this the bytes of the file are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_folders(path: str) -> None:
    """After this the entries of every folder under ``path``, and its own, are on the disk; files are not synced."""
    for folder, _, _ in os.walk(path, topdown=False):
        fsync_folder(folder)


def replace_file(path: str, data: bytes, private: str, *, durable: bool = True) -> None:
    """After this the small file at ``path`` holds ``data``; a reader, or a crash, sees the old content or the new.

    It is written under ``private`` first, on the same file system; what is there is overwritten.
    """
    fd = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        finally:
            os.close(fd)
        os.replace(private, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(private)
        raise
    if durable:
        fsync_folder(os.path.dirname(path))


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """``replace_file`` through a private file beside ``path``."""
    target = os.path.abspath(os.fspath(path))
    parent, name = os.path.split(target)
    folder = tempfile.mkdtemp(prefix=f".{name[:60]}.", suffix=".partial", dir=parent)
    try:
        replace_file(target, text.encode("utf-8", "surrogateescape"), os.path.join(folder, "new"))
    finally:
        with suppress(OSError):
            os.rmdir(folder)
