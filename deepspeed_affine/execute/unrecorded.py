"""Shapes that a model-state file does not record, taken from the tensors beside it.

DeepSpeed's save of a model with MoE layers left out ``param_shapes`` for years. What it holds determines them: the
optimizer's slice tables name the parameters, and their weights are in the module or in the expert files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspeed_affine.execute.model_file import ModelFile
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["sliced_names", "with_shapes"]


def sliced_names(root: Any) -> frozenset[str]:
    """The parameters that the slice tables of a ZeRO-1 or ZeRO-2 file name; what is malformed is said elsewhere."""
    optimizer = root.get("optimizer_state_dict") if isinstance(root, Mapping) else None
    tables = optimizer.get("param_slice_mappings") if isinstance(optimizer, Mapping) else None
    tables = tables if isinstance(tables, (list, tuple)) else ()
    return frozenset(name for table in tables if isinstance(table, Mapping) for name in table if isinstance(name, str))


def with_shapes(
    files: Sequence[ModelFile], experts: Mapping[str, Mapping[int, TensorRef]], names: Iterable[str]
) -> tuple[ModelFile, ...]:
    """``files`` with the shape of every parameter of ``names``, where a file records none at all.

    ``experts[name][mp]`` are the weights of the expert files. Their names number a layer's experts, those of a slice
    table the experts of one rank, from 0 too; the experts of one layer have one shape.
    """
    wanted = sorted(names)
    filled = []
    for file in files:
        held = {name: experts[name].get(file.shard.tp) for name in wanted if name in experts}
        shapes = {
            name: found.shape
            for name in wanted
            if isinstance(found := (file.module or {}).get(name, held.get(name)), TensorRef)
        }
        filled.append(file if file.groups else replace(file, groups=(shapes,), shapes=shapes))
    return tuple(filled)
