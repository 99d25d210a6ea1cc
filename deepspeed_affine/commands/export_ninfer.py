"""Weights streamed into an artifact: read, encoded and written a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine._version import __version__
from deepspeed_affine.commands.export_recipe import ExportPlan, ObjectPlan
from deepspeed_affine.commands.export_weights import Weight, Weights
from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.ninfer.directory import Directory
from deepspeed_affine.ninfer.encode import ENCODERS, divisor_of
from deepspeed_affine.ninfer.errors import ValueDomainError
from deepspeed_affine.ninfer.floats import bf16_to_float32, round_to_bf16
from deepspeed_affine.ninfer.formats import DIRECT, NVFP4
from deepspeed_affine.ninfer.layouts import plan_geometry
from deepspeed_affine.ninfer.writer import Writer

__all__ = ["export_ninfer"]

_BLOCK_ELEMENTS = 1 << 20


def export_ninfer(
    weights: Weights,
    plan: ExportPlan,
    path: str,
    *,
    max_file_bytes: int | None = None,
    durable: bool = True,
    progress: Callable[[int], None] = lambda elements: None,
) -> Directory:
    """The artifact is at ``path``; returns its directory. ``progress`` is told of elements that are written.

    Memory is a few blocks of a million elements, or of 128 rows where those are longer, whatever the weights' size.
    """
    recipe = plan.recipe
    used = sorted({entry.spec.format for entry in plan.objects})
    provenance = {
        "source": dict(weights.source),
        "tool": f"deepspeed_affine {__version__}",
        "encoders": {name: ENCODERS[name] for name in used if name in ENCODERS},
        **recipe.provenance,
    }
    with Writer(
        path,
        plan.specs,
        recipe.components,
        plan.bindings,
        recipe.uses,
        metadata=recipe.metadata,
        provenance=provenance,
        max_file_bytes=max_file_bytes,
        durable=durable,
    ) as writer:
        for object_id, file in plan.resources.items():
            _write_resource(writer, object_id, file)
        for entry in plan.objects:
            _write_object(writer, entry, progress)
        return writer.directory


def _write_resource(writer: Writer, object_id: str, path: str) -> None:
    offset = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_ELEMENTS):
            writer.write(object_id, block, offset)
            offset += len(block)
    expected = writer.directory.objects[object_id].nbytes
    if offset != expected:
        raise CheckpointFormatError(f"{path}: has {offset} bytes and had {expected}; it is being changed.", file=path)


def _write_object(writer: Writer, entry: ObjectPlan, progress: Callable[[int], None]) -> None:
    spec = entry.spec
    if spec.format in DIRECT:
        at = 0
        for weight in entry.weights:
            for start, words in weight.blocks(_BLOCK_ELEMENTS):
                writer.write_elements(spec.id, at + start, _direct(weight, words, spec.format))
                progress(len(words))
            at += weight.numel
        return
    geometry = plan_geometry(spec.format, None, spec.shape, spec.divisors)
    step = max(1, _BLOCK_ELEMENTS // geometry.columns // geometry.row_unit) * geometry.row_unit
    matrix = geometry.rows // geometry.divisors
    for first in range(0, geometry.rows, matrix):
        divisor = _divisor(entry, first, matrix, step) if spec.format == NVFP4 else None
        for row, rows in _rows(entry, first, first + matrix, step):
            writer.write_rows(spec.id, row, rows, divisor)
            progress(rows.size)


def _rows(entry: ObjectPlan, first: int, stop: int, step: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Rows of the stacked weights, at most ``step`` at a time and all of one block where they lie in several."""
    columns = entry.spec.shape[1]
    for row in range(first, stop, step):
        end, parts, at = min(row + step, stop), [], 0
        for weight in entry.weights:
            low, high = max(row, at), min(end, at + weight.shape[0])
            if low < high:
                words = weight.words((low - at) * columns, (high - at) * columns)
                parts.append(_floats(weight, words).reshape(high - low, columns))
            at += weight.shape[0]
        yield row, parts[0] if len(parts) == 1 else np.concatenate(parts)


def _divisor(entry: ObjectPlan, first: int, matrix: int, step: int) -> Any:
    largest = 0.0
    for row, rows in _rows(entry, first, first + matrix, step):
        if not np.isfinite(rows).all():
            raise ValueDomainError(
                f"{entry.spec.id}: near row {row}, a value is not finite; expected finite ones only."
            )
        largest = max(largest, float(np.abs(rows).max()))
    return divisor_of(largest, entry.spec.id)


def _floats(weight: Weight, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values as float32; float64 is rounded to nearest."""
    if weight.dtype == "bfloat16":
        return bf16_to_float32(words)
    kind = {"float32": "<f4", "float16": "<f2", "float64": "<f8"}[weight.dtype]
    return words.view(kind).astype(np.float32, copy=False)


def _direct(weight: Weight, words: npt.NDArray[Any], format_name: str) -> npt.NDArray[Any]:
    """The values as ``write_elements`` takes them in that format; floats are rounded where it is narrower."""
    if format_name == "int32":
        return words.view("<i4")
    if format_name == "bf16":
        if weight.dtype == "bfloat16":
            return words
        values = _floats(weight, words)
        rounded = round_to_bf16(values)
        if (np.isfinite(values) & ((rounded & 0x7FFF) == 0x7F80)).any():
            raise ValueDomainError(
                f"{weight.name}: has a value that bf16 can hold as infinity only; expected smaller ones. Export it as "
                "fp32.",
                param=weight.name,
            )
        return rounded
    # float32 moves as the words it is, so that no NaN is touched.
    return words.view("<f4") if weight.dtype == "float32" else _floats(weight, words)
