"""Parameters and resources of an artifact as ordinary files in a new folder, which appears when all are written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from deepspeed_affine.commands.new_folder import new_folder
from deepspeed_affine.errors import PolicyError
from deepspeed_affine.ninfer.artifact import Artifact
from deepspeed_affine.ninfer.decode import value_dtype
from deepspeed_affine.ninfer.records import TensorObject

__all__ = ["extract", "file_name"]

_BLOCK = 1 << 20
_LONGEST = 240
"""Characters of a file's name without its ending; file systems take 255."""


def file_name(name: str) -> str:
    """A file name of its own for any name: what is neither letter, digit nor one of ``_.-~`` is percent-encoded.

    A name too long for a file is cut and ends in ``~`` and 16 digits of its SHA-256.
    """
    found = quote(name, safe="")
    if found.startswith("."):
        found = f"%2E{found[1:]}"
    if len(found) <= _LONGEST:
        return found
    digest = hashlib.sha256(name.encode("utf-8")).hexdigest()[:16]
    return f"{found[: _LONGEST - 17]}~{digest}"


def extract(
    artifact: Artifact,
    folder: str,
    parameters: Sequence[str] | None = None,
    objects: Sequence[str] | None = None,
    *,
    encoded: bool = False,
) -> list[str]:
    """The folder is there with one file for each; returns their names.

    Parameters and tensors are ``.npy`` files (float32 or int32), resources files under their role; ``encoded`` writes
    objects as ``.bin``, as they are stored. Without names it is all parameters and all resources. Raises PolicyError
    where something is at ``folder`` already.
    """
    made: list[str] = []
    with new_folder(folder) as private:
        for name, blocks in _files(artifact, parameters, objects, encoded):
            if name in made:
                raise PolicyError(f"{folder}: two things are to be written as {name!r}; name them one at a time.")
            with open(os.path.join(private, name), "xb") as file:
                for block in blocks:
                    file.write(block)
            made.append(name)
    return made


def _files(
    artifact: Artifact, parameters: Sequence[str] | None, objects: Sequence[str] | None, encoded: bool
) -> Iterator[tuple[str, Iterator[Any]]]:
    everything = not parameters and not objects
    for name in list(artifact.bindings) if everything else parameters or ():
        yield f"{file_name(name)}.npy", _parameter(artifact, name)
    for object_id in objects or ():
        record = artifact.directory.object(object_id)
        if encoded or not isinstance(record, TensorObject):
            yield f"{file_name(object_id)}.bin", _stored(artifact, object_id)
        else:
            yield f"{file_name(object_id)}.npy", _tensor(artifact, record)
    if everything:
        for component in artifact.components:
            for role in artifact.components[component].resources:
                yield file_name(f"{component}/{role}"), iter([artifact.read_resource(component, role)])


def _parameter(artifact: Artifact, name: str) -> Iterator[Any]:
    first = artifact.read_parameter_range(name, 0, 0)
    binding = artifact.bindings[name]
    shape: tuple[int, ...] = (artifact.directory.elements_of(binding),)
    if binding.object is not None:
        shape = artifact.directory.tensor(binding.object).shape
    yield _header(first.dtype, shape)
    yield from artifact.blocks(name, _BLOCK)


def _tensor(artifact: Artifact, record: TensorObject) -> Iterator[Any]:
    yield _header(value_dtype(record.format), record.shape)
    for at in range(0, record.elements, _BLOCK):
        yield artifact.read_range(record.id, at, min(at + _BLOCK, record.elements))


def _stored(artifact: Artifact, object_id: str) -> Iterator[Any]:
    record = artifact.directory.object(object_id)
    for at in range(0, record.nbytes, _BLOCK):
        yield artifact.read_payload(record.offset + at, min(_BLOCK, record.nbytes - at))


def _header(dtype: np.dtype[Any], shape: Iterable[int]) -> bytes:
    """The head of a ``.npy`` file."""
    from io import BytesIO

    head = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(head, described)
    return head.getvalue()
