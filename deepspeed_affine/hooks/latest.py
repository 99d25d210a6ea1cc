"""Which universal folder a load means."""

from __future__ import annotations

import os

from deepspeed_affine.errors import CheckpointFormatError, PolicyError, UnsupportedLayoutError
from deepspeed_affine.storage.files import absolute, is_file, is_folder, join, list_folder, read_small
from deepspeed_affine.storage.folder import parse_name
from deepspeed_affine.storage.universal import is_universal

__all__ = ["LATEST", "find_universal"]

LATEST = "latest_universal"
_MOST_BYTES = 4096


def find_universal(load_dir: str | os.PathLike[str], tag: str | None) -> str:
    """The absolute path of the universal folder ``tag`` in ``load_dir``; without a tag the one ``latest_universal``
    names, or ``load_dir`` itself.

    Raises UnsupportedLayoutError for a checkpoint as an engine saves it, and CheckpointFormatError where there is none.
    """
    if not isinstance(load_dir, (str, os.PathLike)):
        raise PolicyError(f"load_dir is a {type(load_dir).__name__}; expected the path of a folder.")
    folder = absolute(load_dir)
    said = ""
    if tag is None:
        latest = join(folder, LATEST)
        if is_file(latest):
            tag = read_small(latest, _MOST_BYTES).decode("utf-8", "surrogateescape").strip()
            said = f" and {LATEST} names it"
    path = folder if not tag else join(folder, *str(tag).split("/"))
    if is_universal(path):
        return path
    if not is_folder(path):
        raise CheckpointFormatError(
            f"{path}: is no folder{said}; expected a universal checkpoint. Pass the folder it is in and its name, or "
            f"convert with ds_to_universal --affine, which writes {LATEST}.",
            file=path,
        )
    names = [entry.name for entry in list_folder(path)]
    saved = any(parse_name(name, name, 0) is not None for name in names)
    if saved or "latest" in names:
        what = "is a checkpoint as an engine saves it" if saved else "holds checkpoints as an engine saves them"
        raise UnsupportedLayoutError(
            f"{path}: {what}; expected a universal checkpoint. Convert it: ds_to_universal --affine --input_folder "
            f"{path if saved else path + '/<tag>'} --output_folder <folder>.",
            file=path,
        )
    raise CheckpointFormatError(
        f"{path}: holds no universal checkpoint (no folder 'zero'), and no {LATEST} names one; expected either. Pass "
        "the folder that ds_to_universal wrote, or the one it is in with its name as tag.",
        file=path,
    )
