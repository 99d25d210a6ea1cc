"""Folders that a command is to read, and are not there."""

from __future__ import annotations

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.storage.files import is_file, is_folder, join, name_of, parent_of
from deepspeed_affine.storage.private import private_path
from deepspeed_affine.storage.urls import is_url

__all__ = ["missing_folder", "require_folder", "require_path"]


def require_path(option: str, path: str) -> None:
    """``path`` says something; nothing at all would be the folder that the command runs in."""
    if not path:
        raise PolicyError(f"{option}: is empty; expected a path. Is a shell variable not set?")


def require_folder(path: str) -> None:
    """Raises the fault of ``path`` (absolute) where no folder is there."""
    fault = missing_folder(path)
    if fault is not None:
        raise fault


def missing_folder(path: str) -> CheckpointFormatError | None:
    """What to tell about ``path`` (absolute) where no folder is there; None for a folder, and where nobody can tell."""
    try:
        if is_folder(path):
            return None
        if is_file(path):
            message = f"{path}: is a file; expected a folder. Check the path."
        elif is_folder(private := _private(path)):
            message = (
                f"{path}: does not exist; {name_of(private)} beside it holds what a conversion to it has done so far. "
                "Where that is not running any more it was interrupted: run the same command again, and it resumes."
            )
        else:
            message = f"{path}: does not exist. Check the path."
    except OSError:
        return None
    return CheckpointFormatError(message, file=path)


def _private(path: str) -> str:
    return join(parent_of(path), f".{name_of(path)}.partial") if is_url(path) else private_path(path)
