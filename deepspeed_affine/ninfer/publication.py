"""An artifact's files under private names until all are complete; then continuations appear, and the entry last.

The private folder beside the entry holds them, locked, with a note of which artifact's files are being published. A run
that finds the note of one that was killed removes the continuations that are that artifact's, by their headers, and no
other file.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Sequence
from contextlib import suppress

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.ninfer.errors import OutputExistsError, WriterError
from deepspeed_affine.ninfer.framing import ENTRY_MAGIC, HEADER_BYTES, PART_MAGIC, Header
from deepspeed_affine.storage.durable import fsync_folder, replace_file
from deepspeed_affine.storage.private import PrivateFolder
from deepspeed_affine.storage.records import parse_object

__all__ = ["PrivateFiles"]

_NOTE = "ninfer"
_USUAL_NAME_LIMIT = 255
_AT_FDCWD = -100
_NOREPLACE = 1
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class PrivateFiles:
    """The private files of one artifact, locked for this process; ``names`` are their final ones, the entry first."""

    def __init__(self, private: PrivateFolder, target: str, names: Sequence[str], artifact_id: bytes) -> None:
        self._private = private
        self._folder = os.path.dirname(target)
        self._names = tuple(names)
        self._id = artifact_id

    @classmethod
    def take(cls, target: str, names: Sequence[str], artifact_id: bytes) -> PrivateFiles:
        """Nothing is left of an earlier run that did not complete, and no file has one of the names.

        ``target`` is the absolute path of the entry. Raises OutputExistsError where a file has one of the names, and
        PolicyError while another process writes this artifact or where the private folder is not of our making.
        """
        if not os.path.isdir(os.path.dirname(target)):
            raise WriterError(
                f"{target}: is to be written in a folder that does not exist; expected one that does. Make it first.",
                file=target,
            )
        private = PrivateFolder.take(target)
        try:
            # What an earlier run of another kind has left there is not ours to remove.
            _recover(private, target)
        except BaseException:
            private.release()
            raise
        try:
            private.clear()
            with suppress(FileNotFoundError):
                os.unlink(private.marker)
            limit = _longest_name(os.path.dirname(target))
            for name in names:
                path = os.path.join(os.path.dirname(target), name)
                if len(os.fsencode(name)) > limit:
                    raise WriterError(
                        f"{path}: has a name of {len(os.fsencode(name))} bytes; expected at most {limit}. Choose a "
                        "shorter one.",
                        file=path,
                    )
                if os.path.lexists(path):
                    raise _exists(path)
            os.mkdir(private.files)
        except BaseException:
            private.remove()
            raise
        return cls(private, target, names, artifact_id)

    def path(self, number: int) -> str:
        """Where file ``number`` is while it is written."""
        return os.path.join(self._private.files, f"{number:04d}")

    def publish(self, *, durable: bool) -> None:
        """Every file has its name, the entry last; raises OutputExistsError where somebody took one meanwhile."""
        note = {_NOTE: {"artifact_id": self._id.hex(), "parts": list(self._names[1:])}}
        replace_file(
            self._private.marker, json.dumps(note).encode("ascii"), f"{self._private.marker}.tmp", durable=durable
        )
        if durable:
            fsync_folder(self._private.files)
        try:
            for number in (*range(1, len(self._names)), 0):
                if number == 0 and durable:
                    fsync_folder(self._folder)
                _give_name(self.path(number), os.path.join(self._folder, self._names[number]))
        except BaseException:
            _withdraw(os.path.join(self._folder, self._names[0]), self._names[1:], self._id.hex())
            raise
        if durable:
            fsync_folder(self._folder)
        self._private.remove()

    def discard(self) -> None:
        """Nothing of this run is left."""
        self._private.remove()


def _longest_name(folder: str) -> int:
    """The most bytes a file name may have there; continuations have longer ones than their entry."""
    try:
        found = os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError):
        found = 0
    return found if found > 0 else _USUAL_NAME_LIMIT


def _give_name(private: str, path: str) -> None:
    """The file is at ``path``, where nothing was before."""
    try:
        os.link(private, path, follow_symlinks=False)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(private, path)


def _rename_new(private: str, path: str) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    number = errno.ENOSYS
    if renameat2 is not None:
        renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
        if renameat2(_AT_FDCWD, os.fsencode(private), _AT_FDCWD, os.fsencode(path), _NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
    if number == errno.EEXIST:
        raise _exists(path)
    raise WriterError(
        f"{path}: this file system neither links files nor renames without replacing ({os.strerror(number)}), so that "
        "nothing can be published safely. Write to another file system and copy the files.",
        file=path,
    )


def _exists(path: str) -> OutputExistsError:
    return OutputExistsError(
        f"{path}: exists; expected no such file, since nothing is overwritten. Remove it, or choose another name.",
        file=path,
    )


def _recover(private: PrivateFolder, target: str) -> None:
    """No continuation of a run that was killed before its entry appeared is left."""
    if private.journals():
        raise PolicyError(
            f"{private.path}: belongs to a conversion to {target} that has not finished; expected none. Finish it, or "
            "choose another name.",
            file=private.path,
        )
    try:
        with open(private.marker, "rb") as file:
            noted = parse_object(file.read())
    except FileNotFoundError:
        return
    except ValueError:
        noted = {}
    found = noted.get(_NOTE)
    artifact_id = found.get("artifact_id") if isinstance(found, dict) else None
    parts = found.get("parts") if isinstance(found, dict) else None
    if not isinstance(artifact_id, str) or not isinstance(parts, list):
        raise PolicyError(
            f"{private.marker}: is no note of an artifact being published; expected one. Move the folder away, or "
            "choose another name.",
            file=private.marker,
        )
    if not all(isinstance(name, str) and os.path.basename(name) == name for name in parts):
        raise PolicyError(
            f"{private.marker}: names a part that is no file beside the entry; expected file names. Move the folder "
            "away, or choose another name.",
            file=private.marker,
        )
    _withdraw(target, parts, artifact_id)


def _withdraw(target: str, parts: Sequence[str], artifact_id: str) -> None:
    """Continuations of that artifact have no name any more, unless its entry has: then it is complete."""
    if _header(target) == (ENTRY_MAGIC, artifact_id):
        return
    for number, name in enumerate(parts, 1):
        path = os.path.join(os.path.dirname(target), name)
        if _header(path, number) == (PART_MAGIC, artifact_id):
            os.unlink(path)


def _header(path: str, number: int | None = None) -> tuple[bytes, str] | None:
    """``(magic, artifact id)`` of the regular file at ``path``; None where there is none, or of another index."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        data = os.pread(fd, HEADER_BYTES, 0)
    except OSError:
        return None
    finally:
        os.close(fd)
    if len(data) < HEADER_BYTES:
        return None
    magic, index, artifact_id = Header.fields(data)
    return (magic, artifact_id.hex()) if number is None or index == number else None
