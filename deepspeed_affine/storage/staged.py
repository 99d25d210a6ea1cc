"""Output that appears whole or not at all, without resuming: a private folder beside the target, and one rename."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from types import TracebackType

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.storage.durable import fsync_folder, fsync_tree
from deepspeed_affine.storage.targets import refuse_existing
from deepspeed_affine.storage.trees import make_folders, remove_empty

__all__ = ["StagedFolder"]


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
        self._made_parents = make_folders(self.parent)
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
        remove_empty(self._made_parents)


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
