"""Experts of a live model: which of them this process holds, and under which global name they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_affine.hooks.topology import held_shape
from deepspeed_affine.hooks.versions import AUTOEP_META
from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.lowering.experts import EXPERT_WEIGHTS, NATIVE_EXPERT, ExpertLayer, expert_layers, expert_map

__all__ = ["PlacedExpert", "native_expert_families", "native_expert_names", "placed_experts"]

WHERE = "The live model"


@dataclass(frozen=True, slots=True)
class PlacedExpert:
    """One stacked expert parameter: its map over the expert-parallel group and this process's rank there."""

    layout: ParamAffineMap
    rank: int


def placed_experts(model: torch.nn.Module) -> dict[str, PlacedExpert]:
    """Every AutoEP expert parameter by name, from the placement its layer records (uniform where it records none)."""
    found: dict[str, PlacedExpert] = {}
    for name, module in model.named_modules():
        if not getattr(module, "_is_autoep_layer", False) or not hasattr(module, "experts"):
            continue
        prefix = f"{name}.experts" if name else "experts"
        layer = _layer(module, prefix)
        for weight in EXPERT_WEIGHTS:
            param = getattr(module.experts, weight, None)
            if isinstance(param, torch.Tensor):
                full_name = f"{prefix}.{weight}"
                layout = expert_map(layer, full_name, held_shape(param)[1:])
                found[full_name] = PlacedExpert(layout, _ep_rank(module, param))
    return found


def native_expert_names(model: torch.nn.Module) -> dict[str, str]:
    """By local name, the global name of every parameter of DeepSpeed's own experts, counted over all ranks."""
    return {local: names[_group_rank(moe)] for local, names, moe in _native(model)}


def native_expert_families(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """By local name, the global names it has on the ranks of the expert-parallel group, in their order."""
    return {local: names for local, names, _ in _native(model)}


def _native(model: torch.nn.Module) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for prefix, module in _native_layers(model):
        count, ranks = int(module.num_local_experts), int(module.ep_size)
        for local, _ in module.named_parameters(prefix=prefix):
            match = NATIVE_EXPERT.fullmatch(local)
            if match is not None:
                first = int(match["id"])
                names = (f"{match['prefix']}{rank * count + first}{match['rest']}" for rank in range(ranks))
                yield local, tuple(names), module.deepspeed_moe


def _native_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "deepspeed_moe") and hasattr(module, "num_local_experts"):
            yield name, module


def _group_rank(moe: Any) -> int:
    group = getattr(moe, "ep_group", None)
    if group is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    return torch.distributed.get_rank(group)


def _layer(module: Any, prefix: str) -> ExpertLayer:
    entry = {
        "expert_key_prefix": prefix,
        "num_experts": int(module.num_experts),
        "num_local_experts": int(module.num_local_experts),
        "ep_size": int(module.ep_size),
        "expert_placement": getattr(module, "expert_placement_descriptor", None),
    }
    return expert_layers([entry], file=WHERE)[f"{prefix}.{EXPERT_WEIGHTS[0]}"]


def _ep_rank(module: Any, param: torch.Tensor) -> int:
    recorded = getattr(param, AUTOEP_META, None) or {}
    return int(recorded.get("ep_rank", module.ep_rank))
