"""Which checkpoint a load means, and what it offers: a universal folder, or one as an engine saves it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.hooks.client_state import ATTRIBUTE
from deepspeed_affine.hooks.offered import Offered
from deepspeed_affine.hooks.ordinary import OrdinaryOffered
from deepspeed_affine.hooks.wholeness import check_whole, identity_of
from deepspeed_affine.lowering.policy import ScaledStates
from deepspeed_affine.storage.files import absolute, is_file, is_folder, join, list_folder, read_small
from deepspeed_affine.storage.folder import parse_name
from deepspeed_affine.storage.universal import ZERO, is_universal, scan_universal

__all__ = ["LATEST", "Found", "find_checkpoint", "open_checkpoint"]

LATEST = ("latest", "latest_universal")
"""The files in which DeepSpeed's save and its converter leave the name of what they wrote last."""
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """The absolute path of a checkpoint, and of which kind it is."""

    path: str
    is_universal: bool


def find_checkpoint(load_dir: str | os.PathLike[str], tag: str | None, *, universal: bool = False) -> Found:
    """The folder ``tag`` in ``load_dir``, of either kind.

    Without a tag the one that ``latest`` names, or where there is no such file ``latest_universal``; with ``universal``
    (as in DeepSpeed, where the configuration says ``load_universal``) in the other order. Where there is neither file,
    ``load_dir`` itself.

    Raises CheckpointFormatError where there is none, or where a folder holds both kinds.
    """
    if not isinstance(load_dir, (str, os.PathLike)):
        raise PolicyError(f"load_dir is a {type(load_dir).__name__}; expected the path of a folder.")
    folder, said = absolute(load_dir), ""
    if tag is None:
        for name in reversed(LATEST) if universal else LATEST:
            if is_file(join(folder, name)):
                tag = read_small(join(folder, name), _MOST_BYTES).decode("utf-8", "surrogateescape").strip()
                said = f" and {name} names it"
                break
    path = folder if not tag else join(folder, *str(tag).split("/"))
    if not is_folder(path):
        raise CheckpointFormatError(
            f"{path}: is no folder{said}; expected a checkpoint. Pass the folder it is in and its name as tag.",
            file=path,
        )
    return Found(path, _is_universal(path))


def open_checkpoint(
    engine: Any,
    load_dir: str | os.PathLike[str],
    tag: str | None,
    policy: ScaledStates,
    info: Mapping[str, Any] | None = None,
) -> tuple[Offered, int]:
    """What the checkpoint offers, to be closed after use, and a number that copies of it share.

    ``info``, or what the engine's module says, is for an ordinary checkpoint that does not say how it is cut. Metadata
    alone is read. Raises CheckpointFormatError where there is none, or where files are missing or damaged.
    """
    configured = getattr(engine, "load_universal_checkpoint", None)
    found = find_checkpoint(load_dir, tag, universal=bool(configured is not None and configured()))
    if not found.is_universal:
        own = getattr(engine.module, ATTRIBUTE, None) if info is None else info
        ordinary = OrdinaryOffered(found.path, policy, own if isinstance(own, Mapping) else None)
        return ordinary, identity_of(ordinary, None)
    folder = scan_universal(found.path)
    manifest = check_whole(folder)
    offered = Offered(folder, policy)
    return offered, identity_of(offered, manifest)


def _is_universal(path: str) -> bool:
    entries = list_folder(path)
    kinds = {parsed.kind for entry in entries if (parsed := parse_name(entry.name)) is not None}
    if "zero_optim" in kinds and is_folder(join(path, ZERO)):
        raise CheckpointFormatError(
            f"{path}: holds a universal checkpoint and the optimizer files of one as an engine saves it; expected one "
            "of them, since they may be of different steps. Move the folder 'zero' or the *_optim_states.pt files "
            "elsewhere.",
            file=path,
        )
    # A resharded checkpoint is an ordinary one, and has a manifest as a converted one has.
    converted = "zero_optim" not in kinds and is_universal(path)
    if converted or kinds:
        return converted
    if any(entry.name in LATEST for entry in entries):
        raise CheckpointFormatError(
            f"{path}: holds checkpoints and is none itself; expected one. Pass it as load_dir, without a tag or with "
            "the name of one of them.",
            file=path,
        )
    raise CheckpointFormatError(
        f"{path}: holds no checkpoint: neither *_model_states.pt files, as an engine saves them, nor a folder 'zero', "
        f"as ds_to_universal writes it; and there is no {' and no '.join(LATEST)} that names one. Pass the folder that "
        "save_checkpoint or ds_to_universal wrote, or the one it is in with its name as tag.",
        file=path,
    )
