"""One file of a checkpoint folder, read, and known to be the file its name says."""

from __future__ import annotations

import os

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.folder import parse_name
from deepspeed_affine.storage.pt_reader import Loaded, load_pickle

__all__ = ["load_checkpoint_file"]


def load_checkpoint_file(path: str) -> Loaded:
    """As ``load_pickle``, for a file whose name says which rank it is of: it was saved under that name.

    torch.save writes the name it was given into the file. A file of another rank under this name (exchanged, or
    doubled in place of a lost one) is as well-formed as the right one, and under ZeRO 3 nothing else tells them apart.
    Raises CheckpointFormatError as ``load_pickle`` does, and for a file that was saved under another rank's name.
    """
    loaded = load_pickle(path)
    named, saved = parse_name(os.path.basename(path)), parse_name(f"{loaded.archive.prefix}.pt")
    if named is not None and saved is not None and named.place != saved.place:
        raise CheckpointFormatError(
            f"{path}: was saved as {saved.name}, which is another rank's or another kind of file; expected the file "
            "that was saved under this name. Copy it from where it was saved, and give the other one its own name.",
            file=path,
        )
    return loaded
