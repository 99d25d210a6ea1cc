"""Which tensor-parallel group a live model is cut over, and the shapes its ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from deepspeed_affine.errors import PolicyError

__all__ = [
    "TensorParallel",
    "gather_shapes",
    "held_shape",
    "is_partitioned_conv",
    "is_partitioned_layer",
    "over_stages",
    "tensor_parallel_of",
]

CONV_CLASS = "TensorParallelConv2d"

Shape = tuple[int, ...]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The group's size, this process's rank in it, and the group itself where one exists."""

    degree: int
    rank: int
    group: Any = None


def held_shape(param: torch.Tensor) -> Shape:
    """The shape this rank holds of a parameter, also where ZeRO-3 has taken its data away."""
    return tuple(int(extent) for extent in getattr(param, "ds_shape", param.shape))


def is_partitioned_layer(module: Any) -> bool:
    """Whether ``module`` is a tensor-parallel layer that cut its parameters over a group.

    Without a group it was built for its description only, and its parameters are whole.
    """
    if not hasattr(module, "_tp_partition") or not hasattr(module, "tp_world_size"):
        return False
    return getattr(module, "mp_group", None) is not None or int(module.tp_world_size) > 1


def is_partitioned_conv(module: Any) -> bool:
    """Whether ``module`` is a two-dimensional convolution that cut its channels over the ranks."""
    return any(kind.__name__ == CONV_CLASS for kind in type(module).__mro__) and hasattr(module, "conv")


def tensor_parallel_of(model: torch.nn.Module, mpu: Any = None) -> TensorParallel:
    """The group known from ``mpu``, else from the model's own layers, else from its pipeline grid, else one rank."""
    layers = [found for module in model.modules() if (found := _of_layer(module)) is not None]
    widest = max(layers, key=lambda found: found.degree, default=None)
    if mpu is None and widest is None:
        grid = getattr(model, "mpu", None)
        mpu = grid() if callable(grid) else grid
    stated = _of_mpu(mpu)
    if stated is not None and (widest is None or stated.degree >= widest.degree):
        return stated
    return widest or TensorParallel(1, 0)


def gather_shapes(held: Mapping[str, Shape], group: TensorParallel) -> dict[str, tuple[Shape, ...]]:
    """For every name the shapes all ranks of ``group`` hold; a collective where torch.distributed runs.

    Without torch.distributed nothing can be asked, and the ranks are taken to hold equal shapes.
    """
    asked = group.degree > 1 and torch.distributed.is_available() and torch.distributed.is_initialized()
    # A convolution knows the number of ranks and not their group.
    if not asked or (group.group is None and torch.distributed.get_world_size() != group.degree):
        return {name: (shape,) * group.degree for name, shape in held.items()}
    rows: list[Mapping[str, Shape] | None] = [None] * group.degree
    torch.distributed.all_gather_object(rows, dict(held), group=group.group)
    # A parameter another rank does not have is its own rank's fault to name; here it counts as having no elements.
    return {name: tuple((row or {}).get(name, (0,)) for row in rows) for name in held}


def over_stages(value: Value, model: torch.nn.Module, mpu: Any = None) -> list[Value]:
    """``value`` of every pipeline stage, the first stage's first; of a model without stages its own alone.

    A collective over the pipeline group where there are several stages.
    """
    grid = getattr(model, "mpu", None)
    if not hasattr(model, "forward_funcs") or not callable(grid):
        return [value]
    group = (mpu if hasattr(mpu, "get_pipe_parallel_group") else grid()).get_pipe_parallel_group()
    if group is None or torch.distributed.get_world_size(group) == 1:
        return [value]
    rows: list[Value | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(rows, value, group=group)
    return [row for row in rows if row is not None]


def _of_layer(layer: Any) -> TensorParallel | None:
    if is_partitioned_layer(layer):
        return TensorParallel(int(layer.tp_world_size), int(layer.tp_index), getattr(layer, "mp_group", None))
    if is_partitioned_conv(layer):
        return TensorParallel(int(layer.world_size), int(layer.rank))
    return None


def _of_mpu(mpu: Any) -> TensorParallel | None:
    """The three names under which Megatron, DeepSpeed's grid and older units keep the tensor-parallel group."""
    for kind in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        size = getattr(mpu, f"get_{kind}_world_size", None)
        if size is not None:
            degree = int(size())
            if degree == 1:
                return TensorParallel(1, 0)
            return TensorParallel(degree, int(_ask(mpu, kind, "rank")), _ask(mpu, kind, "group"))
    return None


def _ask(mpu: Any, kind: str, what: str) -> Any:
    for each in (kind, "tensor_model_parallel", "slice_parallel", "model_parallel"):
        found = getattr(mpu, f"get_{each}_{what}", None)
        if found is not None:
            return found()
    raise PolicyError(
        f"mpu, a {type(mpu).__name__}: states a tensor-parallel group of several ranks and has no get_{kind}_{what}(); "
        "expected the methods Megatron's mpu has."
    )
