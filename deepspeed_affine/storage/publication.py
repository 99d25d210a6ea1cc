"""Publishing an output: the steps from a complete private folder to its final name, and what a kill between them left.

The steps are: a marker is written; the files get their name by one rename (an output that is replaced changes places
with them, or, where the file system cannot do that, is moved away first); the folder they are in is synced;
``latest_universal`` is replaced; what was replaced is removed; the private folder is removed. Whatever the moment,
the name has nothing, the complete old output or the complete new one, and the marker says how to go on.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.storage import rename
from deepspeed_affine.storage.durable import fsync_folder, replace_file, replace_text
from deepspeed_affine.storage.manifest import MANIFEST_NAME
from deepspeed_affine.storage.private import PrivateFolder
from deepspeed_affine.storage.records import Fields, canonical, parse_object
from deepspeed_affine.storage.targets import (
    LATEST,
    ORDINARY,
    UNIVERSAL,
    OutputKind,
    is_taken,
    refuse_existing,
    require_replaceable,
)

__all__ = ["LATEST", "Recovery", "finish_publication", "point_at", "publish"]

_MARKER_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Trace:
    """What a folder can be told by after it has moved: its inode, and a digest of its manifest (empty without one)."""

    inode: int
    manifest: str

    @classmethod
    def of(cls, folder: str) -> _Trace:
        try:
            with open(os.path.join(folder, MANIFEST_NAME), "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()
        except OSError:
            digest = ""
        return cls(os.stat(folder).st_ino, digest)


@dataclass(frozen=True, slots=True)
class _Marker:
    """A publication that has begun: the traces of the new output and of the one it replaces, if it does."""

    new: _Trace
    old: _Trace | None
    kind: OutputKind = UNIVERSAL

    def write(self, private: PrivateFolder, *, durable: bool) -> None:
        said = {
            "format": _MARKER_FORMAT,
            "new": _spelled(self.new),
            "old": self.old and _spelled(self.old),
            "latest": self.kind.latest,
        }
        replace_file(private.marker, canonical(said), f"{private.marker}.tmp", durable=durable)

    @classmethod
    def read(cls, private: PrivateFolder) -> _Marker | None:
        """The marker in the folder, None without one; CheckpointFormatError for one that cannot be understood."""
        try:
            with open(private.marker, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        try:
            fields = Fields(parse_object(data))
            if fields.count("format") != _MARKER_FORMAT:
                raise ValueError(f"format {fields.count('format')} is not {_MARKER_FORMAT}")
            old = _trace(fields, "old") if parse_object(data).get("old") is not None else None
            kind = ORDINARY if parse_object(data).get("latest") == ORDINARY.latest else UNIVERSAL
            return cls(_trace(fields, "new"), old, kind)
        except ValueError as error:
            raise CheckpointFormatError(
                f"{private.marker}: says nothing this version understands of a publication that was interrupted "
                f"({error}). Look into {private.path}: 'files' and 'old' there are outputs, new or replaced. Move away "
                "what you want to keep, then remove that folder.",
                file=private.marker,
            ) from error

    def is_old(self, folder: str) -> bool:
        """Whether the folder is the output that is replaced, and not the new one."""
        if self.old is None:
            return False
        found = _Trace.of(folder)
        if self.old.manifest != self.new.manifest and found.manifest in (self.old.manifest, self.new.manifest):
            return found.manifest == self.old.manifest
        if self.old.inode != self.new.inode and found.inode in (self.old.inode, self.new.inode):
            return found.inode == self.old.inode
        raise PolicyError(
            f"{folder}: may be the new output or the one it was to replace; nothing tells which. Compare it with the "
            "folder under the output's name, move away what you want to keep, then remove the private folder.",
            file=folder,
        )


def _spelled(trace: _Trace) -> dict[str, object]:
    return {"inode": trace.inode, "manifest": trace.manifest}


def _trace(fields: Fields, name: str) -> _Trace:
    inner = Fields(fields.objects(name), name)
    return _Trace(inner.count("inode"), inner.text("manifest"))


class _Stage(enum.Enum):
    BEFORE = "nothing has moved"
    EXCHANGED = "the new output has the name, the old one lies where the new one was"
    MOVED_AWAY = "the old output is moved away, nothing has the name yet"
    PUBLISHED = "the new output has the name"


def _stage(private: PrivateFolder, marker: _Marker) -> _Stage:
    has_files = os.path.lexists(private.files)
    if os.path.lexists(private.old):
        return _Stage.MOVED_AWAY if has_files else _Stage.PUBLISHED
    if not has_files:
        return _Stage.PUBLISHED
    return _Stage.EXCHANGED if marker.is_old(private.files) else _Stage.BEFORE


def publish(
    private: PrivateFolder,
    target: str,
    *,
    overwrite: bool,
    durable: bool,
    protect: Iterable[str] = (),
    kind: OutputKind = UNIVERSAL,
) -> tuple[str, ...]:
    """``private.files`` is at ``target``, ``latest_universal`` names it, and the private folder is gone.

    Returns what could not be tidied up, for the user to know. Raises PolicyError where something is at ``target``
    that may not be replaced, and leaves everything as it was; and with a message saying that the output is complete
    where only ``latest_universal`` could not be written, which the next run makes up for.
    """
    replaces = is_taken(target)
    if replaces:
        if not overwrite:
            refuse_existing(target, kind)
        require_replaceable(target, protect, kind)
    marker = _Marker(_Trace.of(private.files), _Trace.of(target) if replaces else None, kind)
    marker.write(private, durable=durable)
    try:
        _move(private, target, marker)
    except BaseException:
        _take_back(private, target, marker)
        raise
    return _complete(private, target, kind, durable=durable)


def _move(private: PrivateFolder, target: str, marker: _Marker) -> None:
    if marker.old is not None:
        if rename.exchange(private.files, target):
            os.rename(private.files, private.old)
            return
        os.rename(target, private.old)
    try:
        # This replaces an empty folder and nothing else.
        os.rename(private.files, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            refuse_existing(target, marker.kind)
        raise


def _take_back(private: PrivateFolder, target: str, marker: _Marker) -> None:
    """As far as it is not published, the old output has the name again and nothing remembers the attempt."""
    stage = _stage(private, marker)
    if stage is _Stage.MOVED_AWAY:
        _restore(private, target)
        stage = _Stage.BEFORE
    if stage is _Stage.BEFORE:
        os.unlink(private.marker)


def _restore(private: PrivateFolder, target: str) -> None:
    if is_taken(target):
        raise PolicyError(
            f"{target}: was made by something else while the output that was there is replaced; that is kept as "
            f"{private.old}. Move one of them away, then run again.",
            file=target,
        )
    os.rename(private.old, target)


def _complete(private: PrivateFolder, target: str, kind: OutputKind, *, durable: bool) -> tuple[str, ...]:
    if durable:
        try:
            fsync_folder(os.path.dirname(target))
            fsync_folder(private.path)
        except OSError as error:
            raise PolicyError(
                f"{target}: was written and is complete, but the system does not confirm that its name is on the "
                f"disk ({error.strerror}). Check the disk, then run the same command again.",
                file=target,
            ) from error
    point_at(target, private.pointer, durable=durable, kind=kind)
    if private.remove():
        return ()
    return (f"{private.path} could not be removed; nothing in it is needed any more",)


def point_at(target: str, private: str | None = None, *, durable: bool = True, kind: OutputKind = UNIVERSAL) -> None:
    """``latest_universal`` beside the output, or the file of its ``kind``, names it: DeepSpeed's loader looks there.

    ``private`` is a path to write it under first; without one a name beside it is made up.
    """
    folder, name = os.path.split(target)
    pointer = os.path.join(folder, kind.latest)
    try:
        if private is None:
            replace_text(pointer, name)
        else:
            replace_file(pointer, os.fsencode(name), private, durable=durable)
    except OSError as error:
        raise PolicyError(
            f"{pointer}: could not be written ({error.strerror}), while {target} was written and is complete. Write "
            f"{name!r} into that file, or load with an explicit tag.",
            file=pointer,
        ) from error


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found of an interrupted publication: ``said`` for the user, empty where there was none.

    ``gone`` says that the private folder was done with; it is no longer locked, and removed unless that failed.
    """

    said: str = ""
    gone: bool = False


def finish_publication(private: PrivateFolder, target: str) -> Recovery:
    """Nothing is half-way any more: the new output has the name, or the old one (or nothing) as before publishing.

    In the first case ``latest_universal`` names it and the private folder is gone; in the second the private folder
    is as it was before. PolicyError where somebody else changed things in between so that neither can be had.
    """
    marker = _Marker.read(private)
    if marker is None:
        if os.path.lexists(private.old):
            raise PolicyError(
                f"{private.old}: is an output that was replaced, or was to be; nothing says which. Compare it with "
                f"{target}, move it away or remove it, then run again.",
                file=private.old,
            )
        return Recovery()
    stage = _stage(private, marker)
    if stage in (_Stage.BEFORE, _Stage.MOVED_AWAY):
        _take_back(private, target, marker)
        return Recovery(f"{target}: an earlier run was stopped while it published; what was there before is there")
    if stage is _Stage.EXCHANGED:
        os.rename(private.files, private.old)
    return _published(private, target, marker)


def _published(private: PrivateFolder, target: str, marker: _Marker) -> Recovery:
    has_old = os.path.lexists(private.old)
    if is_taken(target) and os.path.isdir(target) and _Trace.of(target).manifest == marker.new.manifest:
        _complete(private, target, marker.kind, durable=True)
        return Recovery(f"{target}: an earlier run was stopped while it published; that is finished now", gone=True)
    if not has_old:
        # Somebody has moved the output on since.
        private.remove()
        return Recovery(gone=True)
    _restore(private, target)
    private.remove()
    return Recovery(f"{target}: what an earlier run had replaced is back, because its output is gone", gone=True)
