"""A folder of output files that appears when it is complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.storage.durable import fsync_folder, fsync_folders
from deepspeed_affine.storage.private import PrivateFolder

__all__ = ["new_folder"]


@contextmanager
def new_folder(folder: str, *, durable: bool = False) -> Iterator[str]:
    """Inside the block, the path of a private folder beside ``folder``; after it, that folder has the name.

    An exception leaves nothing, and what a killed run has left the next one removes. Raises PolicyError where something
    is at ``folder`` already, where its parent does not exist, and while another process makes it.
    """
    target = os.path.abspath(folder)
    if not os.path.isdir(os.path.dirname(target)):
        raise PolicyError(f"{folder}: is to be made in a folder that does not exist; make that first.", file=folder)
    if os.path.lexists(target):
        raise PolicyError(f"{folder}: exists; expected no such folder, since nothing is overwritten.", file=folder)
    private = PrivateFolder.take(target)
    if private.journals() or os.path.lexists(private.marker) or os.path.lexists(private.old):
        private.release()
        raise PolicyError(
            f"{private.path}: belongs to a conversion or an artifact that is not finished; expected none. Finish it, "
            "or choose another name.",
            file=private.path,
        )
    try:
        private.clear()
        os.mkdir(private.files)
        yield private.files
        if durable:
            fsync_folders(private.files)
        os.rename(private.files, target)
    except BaseException:
        private.remove()
        raise
    private.remove()
    if durable:
        fsync_folder(os.path.dirname(target))
