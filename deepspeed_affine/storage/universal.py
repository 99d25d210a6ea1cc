"""A universal checkpoint folder as a catalogue, and what one of its files holds. Needs no torch.

``zero/<parameter>/<state>.pt`` holds one state of one parameter, ``zero/optimizer_state.pt`` what they share, and the
model-state files of the checkpoint it was converted from lie beside ``zero``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.files import (
    ByteReader,
    FolderEntry,
    absolute,
    is_file,
    is_folder,
    join,
    list_folder,
    name_of,
)
from deepspeed_affine.storage.folder import CheckpointFile, parse_name
from deepspeed_affine.storage.manifest import MANIFEST_NAME
from deepspeed_affine.storage.pt_reader import Loaded, load_pickle
from deepspeed_affine.storage.refs import TensorRef

__all__ = [
    "OPTIMIZER_STATE",
    "ZERO",
    "StateFile",
    "StoredState",
    "UniversalFolder",
    "is_universal",
    "read_number",
    "read_state",
    "scan_universal",
]

ZERO = "zero"
"""The folder in which a universal checkpoint has its parameters."""
OPTIMIZER_STATE = "zero/optimizer_state.pt"
PARAM = "param"
_FORMATS = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "bool": "<?",
}


@dataclass(frozen=True, slots=True)
class StateFile:
    """One file below ``zero``; ``name`` is relative to the universal folder, with "/" between folders."""

    param: str
    state: str
    name: str
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class UniversalFolder:
    """The files of a universal folder. ``states[param][state]`` are sorted by name; ``others`` are names, relative,
    of what belongs to no universal checkpoint, folders with a "/" at the end."""

    path: str
    states: Mapping[str, Mapping[str, StateFile]]
    optimizer_state: str | None
    model_files: tuple[CheckpointFile, ...]
    manifest: str | None
    others: tuple[str, ...]
    sizes: Mapping[str, int] = field(repr=False)

    @property
    def files(self) -> tuple[StateFile, ...]:
        return tuple(file for states in self.states.values() for file in states.values())


@dataclass(frozen=True, slots=True)
class StoredState:
    """What one file of a parameter holds: a tensor, or a plain number. ``entries`` are the others of its dictionary,
    in order, None where the file holds the bare value."""

    tensor: TensorRef | None
    number: int | float | None
    entries: Mapping[str, Any] | None
    loaded: Loaded


def is_universal(path: str | os.PathLike[str]) -> bool:
    """True for a folder that a converter wrote, whole or in part."""
    folder = absolute(path)
    return is_folder(join(folder, ZERO)) or is_file(join(folder, MANIFEST_NAME))


def scan_universal(path: str | os.PathLike[str]) -> UniversalFolder:
    """Return the catalogue of the universal folder at ``path``, from names alone.

    Raises CheckpointFormatError when the folder cannot be listed, or is none.
    """
    folder = absolute(path)
    states: dict[str, dict[str, StateFile]] = {}
    models: list[CheckpointFile] = []
    others: list[str] = []
    sizes: dict[str, int] = {}
    for entry in _entries(folder):
        parsed = parse_name(entry.name, join(folder, entry.name), entry.size or 0)
        if entry.is_folder and entry.name == ZERO:
            continue
        if entry.size is not None and parsed is not None and parsed.kind in ("model", "zero_model"):
            models.append(parsed)
        elif entry.name != MANIFEST_NAME or entry.size is None:
            others.append(entry.name + ("/" if entry.is_folder else ""))
            continue
        sizes[entry.name] = entry.size
    waiting = [ZERO] if is_folder(join(folder, ZERO)) else []
    while waiting:
        inside = waiting.pop()
        for entry in _entries(join(folder, *inside.split("/"))):
            name = f"{inside}/{entry.name}"
            if entry.is_folder:
                waiting.append(name)
            elif entry.size is None or not entry.name.endswith(".pt") or (inside == ZERO and name != OPTIMIZER_STATE):
                others.append(name)
            else:
                sizes[name] = entry.size
                if name != OPTIMIZER_STATE:
                    param, state = inside.removeprefix(f"{ZERO}/"), entry.name.removesuffix(".pt")
                    file = StateFile(param, state, name, join(folder, *name.split("/")), entry.size)
                    states.setdefault(param, {})[state] = file
    if not sizes and not states and not is_folder(join(folder, ZERO)):
        raise CheckpointFormatError(
            f"{folder}: holds no file of a universal checkpoint; zero/optimizer_state.pt and zero/<parameter>/fp32.pt "
            "are expected. Pass the folder a converter wrote.",
            file=folder,
        )
    return UniversalFolder(
        folder,
        {param: dict(sorted(states[param].items())) for param in sorted(states)},
        join(folder, *OPTIMIZER_STATE.split("/")) if OPTIMIZER_STATE in sizes else None,
        tuple(sorted(models, key=lambda file: file.place)),
        join(folder, MANIFEST_NAME) if MANIFEST_NAME in sizes else None,
        tuple(sorted(others)),
        sizes,
    )


def read_state(path: str) -> StoredState:
    """What the file at ``path`` holds of its parameter; raises CheckpointFormatError where that is nothing known."""
    loaded = load_pickle(path)
    root = loaded.root
    entries: dict[str, Any] | None = None
    value = root
    if isinstance(root, Mapping):
        entries = {key: item for key, item in root.items() if key != PARAM}
        value = root.get(PARAM)
    if isinstance(value, TensorRef):
        return StoredState(value, None, entries, loaded)
    if isinstance(value, (int, float)) and entries is None:
        return StoredState(None, value, None, loaded)
    raise CheckpointFormatError(
        f"{path}: holds a {type(value).__name__}; a tensor, a number, or a dictionary with a tensor under {PARAM!r} is "
        f"expected. {name_of(path)} is damaged, or no converter wrote it: convert again.",
        file=path,
    )


def read_number(ref: TensorRef, reader: ByteReader) -> int | float | None:
    """The value of a stored zero-dimensional tensor, None where its dtype is no common number's."""
    form = _FORMATS.get(ref.dtype)
    if form is None or ref.numel != 1 or ref.is_meta:
        return None
    number: int | float = struct.unpack(form, reader.read(ref.storage.path, ref.byte_offset, ref.nbytes))[0]
    return number


def _entries(folder: str) -> list[FolderEntry]:
    try:
        return list_folder(folder)
    except OSError as error:
        raise CheckpointFormatError(
            f"{folder}: cannot be listed ({error.strerror or error}); expected a universal checkpoint folder. Check "
            "the path.",
            file=folder,
        ) from error
