"""Weights streamed into sharded safetensors files with an index, in a new folder that appears when it is complete.

The format is a JSON header and the tensors' bytes. The library writes it from whole tensors in memory only.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepspeed_affine.commands.export_weights import FLOATS, Weight, Weights
from deepspeed_affine.commands.new_folder import new_folder
from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.execute.gather import word_of
from deepspeed_affine.execute.typed import convert_dtype
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.durable import replace_file

__all__ = ["INDEX", "export_safetensors"]

INDEX = "model.safetensors.index.json"
_BLOCK_ELEMENTS = 1 << 20
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def export_safetensors(
    weights: Weights,
    folder: str,
    *,
    dtype: str = "float32",
    max_file_bytes: int | None = None,
    durable: bool = True,
    progress: Callable[[int], None] = lambda elements: None,
) -> list[str]:
    """The folder holds all weights, floats as ``dtype``; returns the names of its files.

    Files are filled in order up to ``max_file_bytes`` of tensors, as huggingface_hub fills them; a tensor that is
    larger has a file of its own. Tied names are written once, and the header says which they are. Raises PolicyError
    where something is at ``folder`` already.
    """
    files = _split(weights, dtype, max_file_bytes)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    with new_folder(folder, durable=durable) as private:
        for name, held in zip(names, files, strict=True):
            _write_file(os.path.join(private, name), held, weights, dtype, durable, progress)
        if len(files) > 1:
            place = {weight.name: name for name, held in zip(names, files, strict=True) for weight in held}
            total = sum(_bytes(weight, dtype) for weight in weights.weights.values())
            index = {"metadata": {"total_size": total}, "weight_map": place}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            replace_file(
                os.path.join(private, INDEX), text.encode("ascii"), os.path.join(private, ".index"), durable=durable
            )
            names.append(INDEX)
    return names


def _split(weights: Weights, dtype: str, limit: int | None) -> list[list[Weight]]:
    files: list[list[Weight]] = []
    current: list[Weight] = []
    held = 0
    for weight in weights.weights.values():
        if _written(weight, dtype) not in _CODES:
            raise UnsupportedLayoutError(
                f"{weight.name}: is {weight.dtype}, which safetensors has no name for; expected a common dtype.",
                param=weight.name,
            )
        size = _bytes(weight, dtype)
        if limit is not None and size > limit:
            # Alone in its file; what comes after it goes on where it was.
            files.append([weight])
            continue
        if limit is not None and current and held + size > limit:
            files.append(current)
            current, held = [], 0
        current.append(weight)
        held += size
    return [*files, current] if current or not files else files


def _written(weight: Weight, dtype: str) -> str:
    """The dtype it is written as: integers and flags stay what they are."""
    return dtype if weight.dtype in FLOATS else weight.dtype


def _bytes(weight: Weight, dtype: str) -> int:
    return weight.numel * item_size(_written(weight, dtype))


def _write_file(
    path: str,
    held: Sequence[Weight],
    weights: Weights,
    dtype: str,
    durable: bool,
    progress: Callable[[int], None],
) -> None:
    inside = {weight.name for weight in held}
    tied = {alias: name for alias, name in weights.aliases.items() if name in inside}
    header: dict[str, Any] = {"__metadata__": {**tied, "format": "pt"}}
    # As the library orders them: wide elements first, so that every tensor is aligned to its own.
    ordered = sorted(held, key=lambda weight: (-item_size(_written(weight, dtype)), weight.name))
    at = 0
    for weight in ordered:
        size = _bytes(weight, dtype)
        kind = _CODES[_written(weight, dtype)]
        header[weight.name] = {"dtype": kind, "shape": list(weight.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight in ordered:
            kind = _written(weight, dtype)
            for _, words in weight.blocks(_BLOCK_ELEMENTS):
                if kind != weight.dtype:
                    word, _ = word_of(item_size(kind))
                    converted = np.empty(len(words), word)
                    convert_dtype(words, weight.dtype, kind, converted)
                    words = converted
                file.write(words.data)
                progress(len(words))
        file.flush()
        if durable:
            os.fsync(file.fileno())
