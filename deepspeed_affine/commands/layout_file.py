"""Layout files: a checkpoint layout on the disk."""

from __future__ import annotations

import json
import os

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, PolicyError
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout
from deepspeed_affine.plan.layout_document import layout_document, read_layout_document
from deepspeed_affine.storage.dtypes import ITEM_SIZES
from deepspeed_affine.storage.durable import replace_text

__all__ = ["read_layout", "write_layout"]

MOST_COPIES = 1 << 20
"""Data-parallel copies: more are a slip of the pen, and would be counted one by one."""


def read_layout(path: str) -> CheckpointLayout:
    """The layout in the file at ``path``; raises CheckpointFormatError where that is no layout file."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except IsADirectoryError as error:
        raise CheckpointFormatError(
            f"{path}: is a folder; expected a layout that ds_affine layout has written. For a checkpoint folder use "
            "--like, or write its layout with ds_affine layout.",
            file=path,
        ) from error
    except OSError as error:
        raise CheckpointFormatError(
            f"{path}: cannot be read ({error.strerror}); expected a layout that ds_affine layout has written. Check "
            "the path.",
            file=path,
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(
            f"{path}: is no JSON ({error}); expected a layout that ds_affine layout has written.", file=path
        ) from error
    layout = read_layout_document(document, path)
    faults = Faults()
    if layout.dp > MOST_COPIES:
        faults.add(
            CheckpointFormatError(
                f"{path}: 'dp' is {shown(layout.dp)}; {MOST_COPIES:,} at the most is expected. The document was edited "
                "or is damaged.",
                file=path,
            )
        )
    for name, param in layout.params.items():
        if param.dtype not in ITEM_SIZES:
            faults.add(
                CheckpointFormatError(
                    f"{path}: 'dtype' of {name!r} is {shown(param.dtype)}; the name of a dtype of torch is expected. "
                    "The document was edited or is damaged.",
                    param=name,
                    file=path,
                )
            )
    faults.raise_if_any()
    return layout


def write_layout(layout: CheckpointLayout, path: str) -> None:
    """The layout is in the file at ``path``, whole or not at all; another layout that was there is replaced.

    Raises PolicyError where anything else is there, or the folder is not.
    """
    if os.path.isdir(path):
        raise PolicyError(f"--output {path}: is a folder; expected a file to write. Give a name in it.")
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise PolicyError(
            f"--output {path}: its folder does not exist; expected one that does. Make it, or give another path."
        )
    if os.path.lexists(path) and not _is_layout(path):
        raise PolicyError(
            f"--output {path}: exists and is no layout file, so it is not replaced. Give another name, or remove it."
        )
    text = json.dumps(layout_document(layout), separators=(",", ":")) + "\n"
    try:
        replace_text(os.path.abspath(path), text)
    except OSError as error:
        # Not the name of the private file, which nobody has given.
        raise OSError(error.errno, error.strerror, path) from error


def _is_layout(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        read_layout(path)
    except AffineError:
        return False
    return True
