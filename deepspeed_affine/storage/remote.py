"""Files elsewhere, named by URLs and reached through fsspec: listing, ranges, small objects, moving and deleting.

Credentials, endpoints and everything else about a connection are fsspec's business: its environment variables and the
files in ``~/.config/fsspec``. What fails for a passing reason is tried again a few times; what fails for good raises
an OSError that says why, so that local files and objects are reported alike.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.storage.urls import join, name_of, parent_of

__all__ = ["DELAYS", "Entry", "Place", "attempt", "forget_systems", "place_of"]

DELAYS = (0.2, 1.0, 4.0)
"""Seconds before what failed is tried again."""

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "adl": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "hdfs": "pyarrow",
    "arrow_hdfs": "pyarrow",
    "http": "aiohttp",
    "https": "aiohttp",
    "webhdfs": "requests",
    "smb": "smbprotocol",
    "oss": "ossfs",
    "oci": "ocifs",
    "hf": "huggingface_hub",
}
_STREAMED = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
_TAGS = ("ETag", "etag", "generation")
_WEAK_TAGS = ("mtime", "LastModified", "last_modified", "created")
_PERMANENT_ERRNO = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    NotADirectoryError: errno.ENOTDIR,
    IsADirectoryError: errno.EISDIR,
    FileExistsError: errno.EEXIST,
}
_PERMANENT = (*_PERMANENT_ERRNO, NotImplementedError, ImportError, TypeError, ValueError, AttributeError)
_PERMANENT_NAMES = frozenset({"NoCredentialsError", "PartialCredentialsError", "ParamValidationError"})
_FOR_GOOD = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINVAL})

_T = TypeVar("_T")
_systems: dict[str, tuple[Any, str]] = {}
_shared: dict[str, Any] = {}
_lock = threading.Lock()
_one_by_one = threading.RLock()


@dataclass(frozen=True, slots=True)
class Entry:
    """One object or folder. ``tag`` changes whenever the object is written anew, ``weak_tag`` as a rule; both may be
    empty."""

    name: str
    size: int | None
    is_folder: bool = False
    tag: str = ""
    weak_tag: str = ""


def attempt(action: Callable[[], _T], lock: AbstractContextManager[Any] | None, delays: Iterable[float]) -> _T:
    """What ``action`` returns, tried again after failures that may pass; raises OSError with its reason otherwise."""
    waits = iter(delays)
    while True:
        try:
            with nullcontext() if lock is None else lock:
                return action()
        except CheckpointFormatError:
            raise
        except Exception as error:
            delay = None if _is_permanent(error) else next(waits, None)
            if delay is None:
                raise _as_os_error(error) from error
        time.sleep(delay)


def _is_permanent(error: Exception) -> bool:
    if getattr(error, "errno", None) in _FOR_GOOD or type(error).__name__ in _PERMANENT_NAMES:
        return True
    return isinstance(error, _PERMANENT)


def _as_os_error(error: Exception) -> OSError:
    said = " ".join(str(error).split()) or type(error).__name__
    for kind, number in _PERMANENT_ERRNO.items():
        if isinstance(error, kind):
            # Object stores put only the path here.
            return kind(number, os.strerror(number) if kind is FileNotFoundError else said)
    known = getattr(error, "errno", None)
    return OSError(known if isinstance(known, int) else errno.EIO, said)


def forget_systems() -> None:
    """After this connections are made anew: for a process in which credentials or endpoints have changed."""
    with _lock:
        _systems.clear()
        _shared.clear()


def _connect(folder: str, url: str) -> tuple[Any, str]:
    with _lock:
        found = _systems.get(folder)
    if found is not None:
        return found
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise PolicyError(
            f"{url}: is a URL, and fsspec, which reads and writes those, is not installed. Run: pip install "
            "'deepspeed-affine[remote]'",
            file=url,
        ) from error
    try:
        found = url_to_fs(folder)
    except ImportError as error:
        raise _no_package(url, error) from error
    except ValueError as error:
        raise PolicyError(
            f"{url}: is no URL fsspec can open ({error}); expected one such as s3://bucket/folder. Check its spelling; "
            "a local path that looks like a URL is told apart by a leading './'.",
            file=url,
        ) from error
    except Exception as error:
        raise _as_os_error(error) from error
    system, path = found
    kind = f"{type(system)} {system.storage_args!r} {system.storage_options!r}"
    with _lock:
        # The first one made is everybody's: fsspec makes one, with its own connections, for every thread that asks.
        return _systems.setdefault(folder, (_shared.setdefault(kind, system), path))


def _no_package(url: str, error: ImportError) -> PolicyError:
    schemes = [part.split("://")[0] for part in url.split("::")]
    wanted = [_PACKAGES[scheme] for scheme in schemes if scheme in _PACKAGES]
    remedy = f"Run: pip install {' '.join(dict.fromkeys(wanted))}" if wanted else "Install what it names"
    return PolicyError(f"{url}: its protocol needs a package that is not installed ({error}). {remedy}", file=url)


def place_of(url: str) -> Place:
    """Where ``url`` points, an ``absolute`` one; PolicyError where fsspec or the protocol's package is missing."""
    name, parent = name_of(url), parent_of(url)
    if not name or parent == url:
        return Place(*_connect(url, url), url)
    return Place(*_connect(parent, url), parent).below(name)


@dataclass(frozen=True, slots=True)
class Place:
    """A path of one file system; ``url`` is what the user calls it. Every method raises OSError with its reason."""

    system: Any
    path: str
    url: str

    def below(self, relative: str) -> Place:
        """The place so called inside this one; names are plain, whatever characters they have."""
        start = f"{self.path.rstrip('/')}/" if self.path else ""
        return Place(self.system, start + relative, join(self.url, relative))

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def protocols(self) -> frozenset[str]:
        found = self.system.protocol
        return frozenset((found,) if isinstance(found, str) else found)

    @property
    def streams(self) -> bool:
        """Whether an object being written is invisible until it is whole, and can be given up without a trace."""
        return bool(self.protocols & _STREAMED)

    def attempt(self, action: Callable[[], _T]) -> _T:
        """``attempt``, one call at a time where the file system may not stand several; errors name the URL."""
        return self._attempt(action, DELAYS)

    def once(self, action: Callable[[], _T]) -> _T:
        """``attempt`` for what cannot be done twice."""
        return self._attempt(action, ())

    def _attempt(self, action: Callable[[], _T], delays: Iterable[float]) -> _T:
        try:
            return attempt(action, None if self._is_concurrent else _one_by_one, delays)
        except OSError as error:
            if error.filename is None:
                error.filename = self.url
            raise

    @property
    def _is_concurrent(self) -> bool:
        return bool(getattr(self.system, "async_impl", False)) or bool(self.protocols & {"memory", "file"})

    def info(self) -> Entry:
        """What is there; FileNotFoundError where nothing is."""

        def ask() -> Mapping[str, Any]:
            self.system.invalidate_cache(self.system._parent(self.path))
            found: Mapping[str, Any] = self.system.info(self.path)
            return found

        return _entry(self.attempt(ask))

    def entries(self) -> list[Entry]:
        """What lies directly in this folder, in order of names; FileNotFoundError where there is no such folder."""

        def ask() -> list[Mapping[str, Any]]:
            self.system.invalidate_cache()
            return list(self.system.ls(self.path, detail=True))

        found: dict[str, Entry] = {}
        own = self.path.strip("/")
        for raw in self.attempt(ask):
            entry = _entry(raw)
            if raw["name"].strip("/") == own:
                if entry.size is not None and not raw["name"].endswith("/"):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                continue
            if entry.size is None and not entry.is_folder:
                # A symbolic link: what it points to counts.
                entry = self._followed(entry)
            before = found.get(entry.name)
            if before is None or before.size is None:
                found[entry.name] = entry
        return [found[name] for name in sorted(found)]

    def _followed(self, entry: Entry) -> Entry:
        try:
            return self.below(entry.name).info()
        except OSError:
            return entry

    def walk(self) -> dict[str, Entry]:
        """Every object below this folder by its path relative to it; empty where there is none."""

        def ask() -> Mapping[str, Mapping[str, Any]]:
            self.system.invalidate_cache()
            found: Mapping[str, Mapping[str, Any]] = self.system.find(self.path, detail=True)
            return found

        try:
            raw = self.attempt(ask)
        except FileNotFoundError:
            return {}
        own = self.path.strip("/")
        found: dict[str, Entry] = {}
        for name, said in raw.items():
            inside = name.strip("/")
            if inside == own and not name.endswith("/"):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            entry = _entry(said)
            # Names with a slash at their end are markers of folders.
            if entry.size is not None and not name.endswith("/") and inside.startswith(f"{own}/" if own else ""):
                found[inside[len(own) :].lstrip("/")] = entry
        return found

    def remove_empty_folders(self) -> None:
        """Where folders are more than parts of names, this one and those in it are gone as far as they are empty."""
        if self.streams:
            return
        with suppress(OSError):
            for entry in self.entries():
                if entry.is_folder:
                    self.below(entry.name).remove_empty_folders()
            if not self.entries():
                self.once(lambda: self.system.rmdir(self.path))

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); CheckpointFormatError where the object ends before."""
        if start >= stop:
            return b""
        try:
            data = self.attempt(lambda: self.system.cat_file(self.path, start=start, end=stop))
        except OSError as error:
            if error.errno != errno.EINVAL and "range" not in str(error).lower():
                raise
            # Some stores refuse a range that begins at the end, where others give nothing.
            size = self.info().size
            if size is None or size > start:
                raise
            data = b""
        return self._whole(data, start, stop)

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        """Several ranges, fetched at once where the file system can."""
        wanted = list(ranges)
        if len(wanted) < 2 or not getattr(self.system, "async_impl", False):
            return [self.read(start, stop) for start, stop in wanted]
        starts, stops = [start for start, _ in wanted], [stop for _, stop in wanted]
        paths = [self.path] * len(wanted)
        found = self.attempt(lambda: self.system.cat_ranges(paths, starts, stops, on_error="raise"))
        return [self._whole(data, start, stop) for data, (start, stop) in zip(found, wanted, strict=True)]

    def _whole(self, data: Any, start: int, stop: int) -> bytes:
        if len(data) != stop - start:
            raise CheckpointFormatError(
                f"{self.url}: ends at byte {start + min(len(data), stop - start)}, expected to reach byte {stop}. The "
                "object is cut short, or became shorter after its metadata was read: let nothing write to it and run "
                "again.",
                file=self.url,
            )
        return bytes(data)

    def read_all(self) -> bytes:
        """All bytes of a small object."""
        return bytes(self.attempt(lambda: self.system.cat_file(self.path)))

    def put(self, data: bytes, private: Place | None = None) -> None:
        """The object holds ``data``; for small objects.

        What was there is replaced at once, without a moment in between, where the store works so or where ``private``,
        a place on the same file system, is given to write it to first.
        """
        if private is not None and not self.streams and "memory" not in self.protocols:
            private.put(data)
            private.move_to(self)
            return
        self.make_parent()
        self.attempt(lambda: self.system.pipe_file(self.path, data))

    def make_parent(self) -> None:
        """Where folders are more than parts of names, the one this place is in exists."""
        if not self.streams:
            parent = self.system._parent(self.path)
            if parent.strip("/"):
                self.attempt(lambda: self.system.makedirs(parent, exist_ok=True))

    @property
    def renames(self) -> bool:
        """Whether a name can be changed without copying."""
        from fsspec.spec import AbstractFileSystem

        # Not AbstractFileSystem's own: it copies, and takes brackets and stars in names for patterns.
        return not self.streams and type(self.system).mv is not AbstractFileSystem.mv

    def move_to(self, target: Place) -> None:
        """The object has the other name: by renaming where there is such a thing, else copied first, then deleted."""
        if self.renames:
            target.make_parent()
            self.attempt(lambda: self.system.mv(self.path, target.path))
        else:
            self.copy_to(target)
            self.delete()

    def copy_to(self, target: Place) -> None:
        """The object is there too; its bytes stay with the store where it can copy by itself."""
        target.make_parent()
        self.attempt(lambda: self.system.cp_file(self.path, target.path))

    def delete(self) -> None:
        """The object is gone, as it may have been before."""
        remove = getattr(self.system, "rm_file", None) or self.system._rm
        with suppress(FileNotFoundError):
            self.attempt(lambda: remove(self.path))


def _entry(raw: Mapping[str, Any]) -> Entry:
    kind, size = raw.get("type"), raw.get("size")
    regular = kind == "file" and isinstance(size, int)
    tag = next((str(raw[key]) for key in _TAGS if raw.get(key)), "")
    weak = next((str(raw[key]) for key in _WEAK_TAGS if raw.get(key)), "")
    name = str(raw["name"]).rstrip("/").rpartition("/")[2]
    return Entry(name, size if regular else None, kind == "directory", tag.strip('"'), tag.strip('"') or weak)
