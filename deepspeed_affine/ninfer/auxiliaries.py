"""The helper inputs the format names, read and checked as their consumers need them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.artifact import Artifact
from deepspeed_affine.ninfer.errors import BindingError
from deepspeed_affine.ninfer.formats import CONTIGUOUS
from deepspeed_affine.ninfer.records import TensorObject, Use

__all__ = ["activation_input_divisor", "hadamard_signs", "hadamard_transform", "input_columns"]

HADAMARD_BLOCK = 1024


def activation_input_divisor(artifact: Artifact, use: Use) -> float:
    """The divisor of this use's activations: one finite float32 above zero, a scalar or one element of a vector."""
    role = "activation_input_divisor"
    records = _records(artifact, use, role)
    binding = use.auxiliaries[role]
    scalar = records[0].shape == () if binding.object is not None else artifact.directory.elements_of(binding) == 1
    if any(record.format != "fp32" or record.layout != CONTIGUOUS for record in records) or not scalar:
        raise _fault(use, role, "is no fp32 scalar, whole or one element")
    value = float(artifact.read_auxiliary(use, role).reshape(-1)[0])
    if not math.isfinite(value) or value <= 0:
        raise _fault(use, role, f"is {value}, which is not finite and above zero")
    return value


def hadamard_signs(artifact: Artifact, use: Use, width: int | None = None) -> npt.NDArray[np.float32]:
    """The signs of this use's rotation: +1 or -1 for each input column, in multiples of 1024 columns.

    ``width`` is the number of columns the parameter has, where the caller knows it.
    """
    values = _vector(artifact, use, "hadamard_signs", "bf16", width)
    if values.size % HADAMARD_BLOCK:
        raise _fault(use, "hadamard_signs", f"has {values.size} elements, no multiple of {HADAMARD_BLOCK}")
    if (np.abs(values) != 1).any():
        raise _fault(use, "hadamard_signs", "has an element other than +1 and -1")
    return values


def input_columns(artifact: Artifact, use: Use, width: int | None = None) -> npt.NDArray[np.int32]:
    """The permutation of this use's input: stored column c multiplies input element ``p[c]``."""
    values = _vector(artifact, use, "input_columns", "int32", width)
    if not np.array_equal(np.sort(values), np.arange(values.size)):
        raise _fault(use, "input_columns", f"is no permutation of 0 to {values.size - 1}")
    return values


def hadamard_transform(values: npt.NDArray[Any], signs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The input a rotated matrix multiplies: signs first, then an orthonormal Walsh-Hadamard transform of every 1024
    elements of the last axis. ``signs`` has one for each of that axis."""
    given, flips = np.asarray(values, np.float32), np.asarray(signs, np.float32)
    width = given.shape[-1] if given.ndim else 0
    if not width or width % HADAMARD_BLOCK or flips.shape != (width,):
        raise BindingError(
            f"Inputs of shape {given.shape} and signs of shape {flips.shape} were given; expected one sign for each "
            f"element of the inputs' last axis, in multiples of {HADAMARD_BLOCK}."
        )
    found = given * flips
    shape = found.shape
    found = found.reshape(-1, HADAMARD_BLOCK)
    half = 1
    while half < HADAMARD_BLOCK:
        pairs = found.reshape(len(found), -1, 2, half)
        found = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(
            found.shape
        )
        half *= 2
    result: npt.NDArray[np.float32] = (found * np.float32(1 / 32)).reshape(shape)
    return result


def _vector(artifact: Artifact, use: Use, role: str, format_name: str, width: int | None) -> npt.NDArray[Any]:
    records = _records(artifact, use, role)
    if any(record.format != format_name or record.layout != CONTIGUOUS for record in records):
        raise _fault(use, role, f"is not stored as {format_name} in {CONTIGUOUS}")
    if use.auxiliaries[role].object is not None and len(records[0].shape) != 1:
        raise _fault(use, role, f"has shape {records[0].shape} and not one axis")
    values = artifact.read_auxiliary(use, role).reshape(-1)
    if width is not None and values.size != width:
        raise _fault(use, role, f"has {values.size} elements for an input of {width}")
    return values


def _records(artifact: Artifact, use: Use, role: str) -> list[TensorObject]:
    binding = use.auxiliaries.get(role)
    if binding is None:
        raise _fault(use, role, "is missing")
    return [artifact.directory.tensor(object_id) for object_id in binding.objects]


def _fault(use: Use, role: str, fact: str) -> BindingError:
    return BindingError(
        f"The use of {shown(use.parameter)} with {shown(use.input)}: auxiliary {role} {fact}. Expected what the format "
        "says of this role; write the artifact again.",
        param=use.parameter,
    )
