"""Layout files: a checkpoint layout on the disk."""

from __future__ import annotations

import json
import os

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout
from deepspeed_affine.plan.layout_document import layout_document, read_layout_document
from deepspeed_affine.storage.durable import replace_text

__all__ = ["read_layout", "write_layout"]


def read_layout(path: str) -> CheckpointLayout:
    """The layout in the file at ``path``; raises CheckpointFormatError where that is no layout file."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
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
    return read_layout_document(document, path)


def write_layout(layout: CheckpointLayout, path: str) -> None:
    """The layout is in the file at ``path``, whole or not at all; what was there is replaced."""
    text = json.dumps(layout_document(layout), separators=(",", ":")) + "\n"
    replace_text(os.path.abspath(path), text)
