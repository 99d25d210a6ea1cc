"""The folders of an output: made, cleared of what is not finished, and compared with what they should hold."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container, Mapping

from deepspeed_affine.errors import IntegrityError
from deepspeed_affine.storage.journal import Finished
from deepspeed_affine.storage.manifest import MANIFEST_NAME, ManifestFile

__all__ = ["is_present", "make_folders", "prune", "remove_empty", "require_files"]


def remove_empty(folders: list[str]) -> None:
    """After this ``folders`` (outermost first) are gone, as far as nobody else uses them."""
    for folder in reversed(folders):
        try:
            os.rmdir(folder)
        except OSError:
            return


def make_folders(path: str) -> list[str]:
    """Make ``path`` and what is missing above it; return the folders made, outermost first."""
    missing = []
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        missing.append(path)
        path = os.path.dirname(path)
    missing.reverse()
    made: list[str] = []
    for folder in missing:
        try:
            os.mkdir(folder)
        except OSError as exc:
            if isinstance(exc, FileExistsError):
                if os.path.isdir(folder):
                    continue
                exc = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
            remove_empty(made)
            raise exc from None
        made.append(folder)
    return made


def is_present(files: str, entry: Finished) -> bool:
    """Whether the file is there, with the size it had when it was finished."""
    try:
        found = os.lstat(os.path.join(files, *entry.path.split("/")))
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == entry.nbytes


def prune(files: str, finished: Container[str]) -> None:
    """After this ``files`` holds the finished files and nothing else: not what was being written at a crash."""
    for folder, folders, names in os.walk(files, topdown=False):
        inside = os.path.relpath(folder, files).replace(os.sep, "/")
        for name in names:
            if (name if inside == "." else f"{inside}/{name}") not in finished:
                os.unlink(os.path.join(folder, name))
        for name in folders:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                os.unlink(path)
            elif not os.listdir(path):
                os.rmdir(path)


def require_files(files: str, manifest: Mapping[str, ManifestFile]) -> None:
    """What is about to be published is what the manifest lists, to the byte count."""
    for path, expected in manifest.items():
        try:
            size = os.stat(os.path.join(files, *path.split("/"))).st_size
        except OSError as error:
            raise IntegrityError(
                f"{path}: was written to {files} and cannot be found there ({error.strerror}); expected "
                f"{expected.nbytes} bytes. Nothing was published: run again.",
                file=path,
            ) from error
        if size != expected.nbytes:
            raise IntegrityError(
                f"{path}: has {size} bytes in {files}, expected {expected.nbytes} as they were written. Nothing was "
                "published: run again.",
                file=path,
            )
    for folder, _, names in os.walk(files):
        inside = os.path.relpath(folder, files).replace(os.sep, "/")
        for name in names:
            path = name if inside == "." else f"{inside}/{name}"
            # NFS keeps a removed file under such a name for as long as it is open.
            if path not in manifest and path != MANIFEST_NAME and not name.startswith(".nfs"):
                raise IntegrityError(
                    f"{path}: is in {files} and not of this conversion; expected only its own files. Nothing was "
                    "published: find what writes there, then run again.",
                    file=path,
                )
