"""Output that appears whole or not at all: a private folder beside the target, and one rename."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from types import TracebackType

from deepspeed_affine.errors import PolicyError

__all__ = ["StagedFolder", "fsync_folder", "fsync_tree", "refuse_existing", "replace_text", "sync_file"]


class StagedFolder:
    """A folder that gets its name when it is complete.

    Files are written under ``path``, beside the target and so on its file system. ``publish`` makes all of it durable
    and renames it once; leaving the ``with`` block without that removes it. Nothing that exists is overwritten: an
    empty folder at the target is taken over, anything else is refused, at the start and again at the rename.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = os.path.abspath(os.fspath(target))
        self.parent, self.name = os.path.split(self.target)
        if not self.name:
            raise PolicyError(f"{self.target}: cannot be an output folder; expected a path to create. Choose another.")
        refuse_existing(self.target)
        self._made_parents = _make_folders(self.parent)
        try:
            self.path = tempfile.mkdtemp(prefix=f".{self.name[:100]}.", suffix=".partial", dir=self.parent)
        except BaseException:
            self._remove_parents()
            raise
        # mkdtemp keeps others out; a published folder is as open as any other new one.
        os.chmod(self.path, 0o777 & ~_umask())
        self._open = True

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def publish(self, *, durable: bool = True, files_synced: bool = False) -> None:
        """After this the folder is at its target, whole and (unless told otherwise) on the disk.

        ``files_synced`` says that whoever wrote the files has synced each, so that only folders are left to sync.
        """
        if not self._open:
            raise PolicyError(f"{self.target}: was published or discarded before; expected one publication.")
        if durable:
            fsync_tree(self.path, files=not files_synced)
        refuse_existing(self.target)
        try:
            os.rename(self.path, self.target)
        except OSError as exc:
            if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                refuse_existing(self.target)
            raise
        self._open = False
        if durable:
            fsync_folder(self.parent)

    def keep(self) -> None:
        """After this leaving the ``with`` block removes nothing; the private folder is the caller's."""
        self._open = False

    def discard(self) -> None:
        """After this nothing private is left; does nothing once published."""
        if self._open:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)
            self._remove_parents()

    def _remove_parents(self) -> None:
        """Folders made on the way to the target go again, unless somebody else uses them by now."""
        _remove_empty(self._made_parents)


def refuse_existing(target: str) -> None:
    """Nothing is at ``target``, or an empty folder; anything else raises PolicyError."""
    try:
        with os.scandir(target) as found:
            taken = any(True for _ in found)
    except FileNotFoundError:
        taken = os.path.islink(target)
    except NotADirectoryError:
        taken = os.path.lexists(target)
    if taken:
        raise PolicyError(
            f"{target}: exists already; expected a path to create. Choose another output folder, or move or remove "
            "this one.",
            file=target,
        )


def _remove_empty(folders: list[str]) -> None:
    for folder in reversed(folders):
        try:
            os.rmdir(folder)
        except OSError:
            return


def _make_folders(path: str) -> list[str]:
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
            _remove_empty(made)
            raise exc from None
        made.append(folder)
    return made


def _umask() -> int:
    # The only portable way to read it is to set it; Linux also tells.
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022


def fsync_folder(path: str) -> None:
    """After this the folder's own entries are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: str) -> None:
    """After this the bytes of the file are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(path: str, *, files: bool = True) -> None:
    """After this every folder under ``path``, ``path`` itself and (unless told otherwise) every file is on the disk."""
    for folder, _, names in os.walk(path):
        for name in names if files else ():
            sync_file(os.path.join(folder, name))
        fsync_folder(folder)


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """After this the small file at ``path`` holds ``text``; a reader, or a crash, sees the old text or the new."""
    target = os.path.abspath(os.fspath(path))
    parent, name = os.path.split(target)
    fd, private = tempfile.mkstemp(prefix=f".{name[:100]}.", suffix=".partial", dir=parent)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(private, 0o666 & ~_umask())
        os.replace(private, target)
    except BaseException:
        os.unlink(private)
        raise
    fsync_folder(parent)
