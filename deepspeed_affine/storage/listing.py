"""Everything that lies below a folder, here or behind a URL."""

from __future__ import annotations

import os
import stat

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.files import is_folder
from deepspeed_affine.storage.urls import absolute, is_url

__all__ = ["list_files"]


def list_files(path: str) -> dict[str, int | None]:
    """The size of every file below the folder at ``path`` by its name relative to it, with "/" between folders; None
    for what is neither a file nor a folder. In order of names.

    Raises CheckpointFormatError where there is no folder, or a part of it cannot be listed.
    """
    folder = absolute(path)
    try:
        found = _elsewhere(folder) if is_url(folder) else _here(folder)
    except OSError as error:
        where = error.filename or folder
        raise CheckpointFormatError(
            f"{where}: cannot be listed ({error.strerror or error}); expected a folder. Check the path.", file=where
        ) from error
    return dict(sorted(found.items()))


def _here(folder: str) -> dict[str, int | None]:
    def refuse(error: OSError) -> None:
        raise error

    found: dict[str, int | None] = {}
    ways: dict[str, frozenset[str]] = {}
    for inside, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        relative = os.path.relpath(inside, folder).replace(os.sep, "/")
        start = "" if relative == "." else f"{relative}/"
        way = ways[inside] = ways.get(os.path.dirname(inside), frozenset()) | {os.path.realpath(inside)}
        circular = [name for name in folders if _leads_back(os.path.join(inside, name), way)]
        folders[:] = [name for name in folders if name not in circular]
        found.update((start + name, None) for name in circular)
        # NFS keeps a removed file under such a name for as long as it is open.
        kept = (name for name in names if not name.startswith(".nfs"))
        found.update((start + name, _size(os.path.join(inside, name))) for name in kept)
    return found


def _leads_back(path: str, way: frozenset[str]) -> bool:
    """Whether this is a link to a folder on the way to it, or to one that such a folder lies in."""
    if not os.path.islink(path):
        return False
    there = os.path.realpath(path)
    return any(os.path.commonpath([here, there]) == there for here in way)


def _size(path: str) -> int | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _elsewhere(url: str) -> dict[str, int | None]:
    from deepspeed_affine.storage.remote import place_of

    found = {name: entry.size for name, entry in place_of(url).walk().items()}
    if not found and not is_folder(url):
        raise FileNotFoundError(2, os.strerror(2), url)
    return found
