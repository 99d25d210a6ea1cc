"""Paths and URLs by their text alone: which is which, and their parts."""

from __future__ import annotations

import os
import re

from deepspeed_affine.errors import PolicyError

__all__ = ["absolute", "is_url", "join", "name_of", "parent_of"]

_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://", re.ASCII)


def is_url(path: str | os.PathLike[str]) -> bool:
    """True for ``scheme://...`` and chains of them, such as ``simplecache::s3://...``; all else is a local path."""
    return _URL.match(os.fspath(path)) is not None


def absolute(path: str | os.PathLike[str]) -> str:
    """``path`` in the form all of storage works with: an absolute local path, or a URL, without a slash at its end."""
    text = os.fspath(path)
    if "\0" in text:
        raise PolicyError(
            f"{text!r}: holds a NUL character, which no path may; expected a path. Check how it was made."
        )
    if not is_url(text):
        parts = text.split(os.sep)
        if os.pardir in parts:
            # ".." leads out of the folder a link points to, not out of the one it lies in.
            up = len(parts) - parts[::-1].index(os.pardir)
            text = os.path.join(os.path.realpath(os.sep.join(parts[:up])), *parts[up:])
        return os.path.abspath(text)
    before, scheme, place, after = _parts(text)
    return before + scheme + (place.rstrip("/") or place[:1]) + after


def join(folder: str, *names: str) -> str:
    """The path of what is called so inside the folder; names are plain, or have "/" between folders."""
    if not is_url(folder):
        return os.path.join(folder, *names)
    before, scheme, place, after = _parts(folder)
    start = place.rstrip("/")
    # The root of file:// is the slash itself; that of memory:// and the like is nothing.
    start = f"{start}/" if place else ""
    return before + scheme + start + "/".join(names) + after


def name_of(path: str) -> str:
    """The last part of the path; empty for a root."""
    return os.path.basename(_parts(path)[2]) if is_url(path) else os.path.basename(path)


def parent_of(path: str) -> str:
    """The folder that ``path`` (absolute) is in; that of a root is itself."""
    if not is_url(path):
        return os.path.dirname(path)
    before, scheme, place, after = _parts(path)
    above, slash, _ = place.rpartition("/")
    return before + scheme + (above or slash) + after


def _parts(url: str) -> tuple[str, str, str, str]:
    """(outer protocols without a path, "scheme://", the path in it, the URLs it lies in): the path is what moves."""
    parts = url.split("::")
    at = next(index for index, part in enumerate(parts) if "://" in part)
    scheme, place = parts[at].split("://", 1)
    before = "".join(f"{part}::" for part in parts[:at])
    return before, f"{scheme}://", place, "".join(f"::{part}" for part in parts[at + 1 :])
