"""The private folder beside an output: everything about an output that is not finished, and a lock on it.

For ``/p/universal`` it is ``/p/.universal.partial``, always the same name, so that a later run finds it, and always on
the output's file system. Inside are ``lock``, one ``journal-N.jsonl`` and ``lock-N`` a writer, ``files`` (what becomes
the output), ``publication.json`` while it is being published, and ``old`` (an output that is being replaced).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
from contextlib import suppress

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.storage.durable import write_all
from deepspeed_affine.storage.records import parse_object

__all__ = ["FileLock", "PrivateFolder", "private_path"]

_OURS = re.compile(
    r"lock(?:-[0-9]+)?|journal-[0-9]+\.jsonl(?:\.tmp)?|files|old|publication\.json(?:\.tmp)?|pointer\.tmp", re.ASCII
)
_MARK = b'{"deepspeed_affine": "lock"'
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
_MOST_TRIES = 100
_USUAL_NAME_LIMIT = 255


def private_path(target: str) -> str:
    """The private folder of the output at ``target`` (absolute); no name is too long for it."""
    parent, name = os.path.split(target)
    private = f".{name}.partial"
    try:
        limit = os.pathconf(parent, "PC_NAME_MAX")
    except (OSError, ValueError):
        limit = _USUAL_NAME_LIMIT
    if len(os.fsencode(private)) > limit:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        start = os.fsencode(name)[: max(0, limit - len(f"..{digest}.partial"))].decode("utf-8", "ignore")
        private = f".{start}.{digest}.partial"
    return os.path.join(parent, private)


class FileLock:
    """An exclusive lock on one file, held until ``release`` or the end of the process.

    ``held`` is False where the file system knows no locks; then nothing keeps others out.
    """

    def __init__(self, path: str, fd: int, held: bool) -> None:
        self.path = path
        self.held = held
        self._fd = fd

    @classmethod
    def take(cls, path: str) -> FileLock | None:
        """The lock on the file at ``path``, which is made if need be; None while another process holds it.

        Raises FileNotFoundError when the folder is gone, or its file was removed in the meantime: look again.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            held = _flock(fd)
            if held is None:
                os.close(fd)
                return None
            # Its holder may have removed it between our open and our lock; then it locks nothing any more.
            if os.stat(path).st_ino != os.fstat(fd).st_ino:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        except BaseException:
            with suppress(OSError):
                os.close(fd)
            raise
        return cls(path, fd, held)

    def sign(self) -> None:
        """After this the file tells others who holds the lock, if the disk has room for that."""
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode("ascii")
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            write_all(self._fd, _MARK + b", " + text[1:])

    def release(self) -> None:
        """After this others may have it; does nothing the second time."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _flock(fd: int) -> bool | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


class PrivateFolder:
    """The private folder of one output, locked for this process."""

    def __init__(self, path: str, target: str, lock: FileLock) -> None:
        self.path = path
        self.target = target
        self.lock = lock
        self.files = os.path.join(path, "files")
        self.old = os.path.join(path, "old")
        self.marker = os.path.join(path, "publication.json")
        self.pointer = os.path.join(path, "pointer.tmp")

    @classmethod
    def take(cls, target: str) -> PrivateFolder:
        """The folder of ``target``, made or taken over.

        Raises PolicyError while another process has it, and for a folder that is not of our making.
        """
        path = private_path(target)
        for _ in range(_MOST_TRIES):
            with suppress(FileExistsError):
                os.mkdir(path)
            found = cls._take(path, target)
            if found is not None:
                return found
        raise PolicyError(f"{path}: appears and disappears; another conversion of {target} is running. Wait for it.")

    @classmethod
    def take_existing(cls, target: str) -> PrivateFolder | None:
        """The folder of ``target`` if there is one; raises as ``take``."""
        path = private_path(target)
        while os.path.lexists(path):
            found = cls._take(path, target)
            if found is not None:
                return found
        return None

    @classmethod
    def _take(cls, path: str, target: str) -> PrivateFolder | None:
        try:
            _require_ours(path)
            lock = FileLock.take(os.path.join(path, "lock"))
            if lock is None:
                raise _running(path, target)
            try:
                # What is in it was another's until now.
                _require_ours(path)
                lock.sign()
            except BaseException:
                lock.release()
                raise
        except FileNotFoundError:
            return None
        return cls(path, target, lock)

    def journal(self, index: int) -> str:
        return os.path.join(self.path, f"journal-{index}.jsonl")

    def journals(self) -> list[str]:
        """The journals there are, in order of their indices."""
        return _numbered(self.path, r"journal-([0-9]+)\.jsonl")

    def require_no_writers(self) -> None:
        """No process of an earlier job is alive that still writes into the folder; its locks are removed."""
        for path in _numbered(self.path, r"lock-([0-9]+)"):
            lock = FileLock.take(path)
            if lock is None:
                raise PolicyError(
                    f"{self.path}: a process of an earlier conversion of {self.target} still writes into it"
                    f"{_holder(path)}; expected none. Stop it, or wait until it has ended.",
                    file=self.path,
                )
            os.unlink(path)
            lock.release()

    def is_bare(self) -> bool:
        """Whether nothing in it is worth anything: no file, no journal, no output."""
        rest = {name for name in _names(self.path) if not re.fullmatch(r"lock|lock-[0-9]+|.*\.tmp", name)}
        return not rest or (rest == {"files"} and not os.listdir(self.files))

    def clear(self) -> None:
        """After this only the lock is left. Never called while an earlier output is inside."""
        # A folder of files that no journal vouches for is started over without a question.
        for path in self.journals():
            os.unlink(path)
        _remove_tree(self.files)
        self.sweep()

    def sweep(self) -> None:
        """After this no half-written small file is left."""
        for entry in _names(self.path):
            if entry.endswith(".tmp"):
                os.unlink(os.path.join(self.path, entry))

    def remove(self) -> bool:
        """The folder is gone and the lock free; False where something of it could not be removed.

        What says how to go on (the marker of a publication, then the lock) goes last, so that a folder that is left,
        by a kill or because something in it cannot be removed, is still known for what it is.
        """
        try:
            for path in self.journals():
                os.unlink(path)
            _remove_tree(self.files)
            _remove_tree(self.old)
            last = (os.path.basename(self.marker), os.path.basename(self.lock.path))
            for name in (*(name for name in _names(self.path) if name not in last and not _is_nfs(name)), *last):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, name))
            # NFS keeps an open file under another name until it is closed. Whoever comes in between makes a
            # lock of its own, and the folder stays for it.
            with suppress(OSError):
                os.rmdir(self.path)
            self.lock.release()
            with suppress(OSError):
                os.rmdir(self.path)
        except OSError:
            return False
        finally:
            self.lock.release()
        return True

    def release(self) -> None:
        """After this the folder is another's to take."""
        self.lock.release()


def _is_nfs(name: str) -> bool:
    """Whether this is what NFS makes of a file that is removed while somebody has it open; it goes by itself."""
    return name.startswith(".nfs")


def _names(path: str) -> list[str]:
    return sorted(os.listdir(path))


def _numbered(path: str, pattern: str) -> list[str]:
    found = []
    for name in os.listdir(path):
        match = re.fullmatch(pattern, name, re.ASCII)
        if match is not None:
            found.append((int(match[1]), name))
    return [os.path.join(path, name) for _, name in sorted(found)]


def _remove_tree(path: str) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def _require_ours(path: str) -> None:
    """Raise PolicyError unless everything at ``path`` is what this program puts there, so that it may be removed."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise _foreign(path, "it is no folder")
    names = [name for name in _names(path) if not _is_nfs(name)]
    unknown = next((name for name in names if _OURS.fullmatch(name) is None), None)
    if unknown is not None:
        raise _foreign(path, f"it holds {unknown!r}")
    if not names:
        return
    for name in names:
        mode, folder = os.lstat(os.path.join(path, name)).st_mode, name in ("files", "old")
        if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
            raise _foreign(path, f"{name!r} in it is no {'folder' if folder else 'file'}")
    if "lock" not in names or not _is_lock(os.path.join(path, "lock")):
        raise _foreign(path, "it has no lock file of this program")


def _is_lock(path: str) -> bool:
    with open(path, "rb") as file:
        start = file.read(len(_MARK))
    # A crash may leave the beginning of it, or nothing.
    return _MARK.startswith(start)


def _foreign(path: str, fact: str) -> PolicyError:
    return PolicyError(
        f"{path}: is not a folder this program made: {fact}. Unfinished output is kept under that name, so move it "
        "away, or choose another output folder.",
        file=path,
    )


def _running(path: str, target: str) -> PolicyError:
    return PolicyError(
        f"{target}: another conversion of this output is running{_holder(os.path.join(path, 'lock'))}; expected one "
        "at a time. Wait for it, or stop it.",
        file=target,
    )


def _holder(path: str) -> str:
    """Who holds the lock, as a remark; empty where that cannot be read."""
    try:
        with open(path, "rb") as file:
            found = parse_object(file.read(4096))
        return f" (process {found['pid']} on {found['host']})"
    except (OSError, ValueError, KeyError):
        return ""
