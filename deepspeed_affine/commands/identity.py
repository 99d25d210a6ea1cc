"""What makes two conversions the same one: the source's content, the options that change the output, the software.

An identity is plain JSON without paths, times or numbers of workers, so a copied checkpoint converted on another
machine has the same one. It is what a resumed run and a finished output are compared by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deepspeed_affine._version import __version__
from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults
from deepspeed_affine.storage.files import open_metadata
from deepspeed_affine.storage.folder import CheckpointFile, CheckpointFolder
from deepspeed_affine.storage.records import plain
from deepspeed_affine.storage.zip_reader import read_directory

__all__ = ["conversion_identity", "software_versions", "source_identity"]

_READERS = 8
"""Enough to hide the latency of a network file system; each reads a few kilobytes a file."""


def conversion_identity(
    folder: CheckpointFolder, options: Mapping[str, str | int | bool | None], *, deepspeed: str
) -> dict[str, Any]:
    """The identity of converting ``folder`` with ``options`` to what DeepSpeed ``deepspeed`` would have written.

    ``options`` are those that change the output, and no others. Raises CheckpointFormatError listing every source file
    that cannot be read or is damaged.
    """
    return {
        "source": source_identity(folder.files),
        "options": plain(options),
        "software": software_versions(deepspeed),
    }


def software_versions(deepspeed: str) -> dict[str, str]:
    """The versions an output depends on: ours, the DeepSpeed whose habits are followed, and torch if installed."""
    found = {"deepspeed_affine": __version__, "deepspeed": deepspeed}
    with suppress(PackageNotFoundError):
        found["torch"] = version("torch")
    return found


def source_identity(files: Sequence[CheckpointFile]) -> list[dict[str, Any]]:
    """Name, size and digest of every file, by name; see ``_digest`` for what that says of the content."""
    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(_described, sorted(files, key=lambda file: file.name)))
    faults = Faults()
    faults.extend(entry for entry in found if isinstance(entry, AffineError))
    faults.raise_if_any()
    return [entry for entry in found if not isinstance(entry, AffineError)]


def _described(file: CheckpointFile) -> dict[str, Any] | AffineError:
    try:
        size, digest = _digest(file.path)
    except AffineError as error:
        return error
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return CheckpointFormatError(
            f"{file.path}: cannot be read ({reason}); expected a file of the checkpoint. Check that it is still there "
            "and readable.",
            file=file.path,
        )
    return {"name": file.name, "bytes": size, "digest": digest}


def _digest(path: str) -> tuple[int, str]:
    """Size and digest of one file, without reading its tensors.

    The directory of the archive holds the checksum of every record, so its digest stands for the content. Where a
    record has none (``torch.save`` can be told to skip them), the file's version (when it was last changed) is added:
    then a copy is another file.
    """
    file = open_metadata(path)
    try:
        directory = read_directory(file, path)
        # A checksum of zero is how torch leaves out one; the empty record really has it.
        unknown = any(record.size and not record.crc32 for record in directory.records.values())
        return file.size, f"{directory.digest}+{file.version}" if unknown else directory.digest
    finally:
        file.close()
