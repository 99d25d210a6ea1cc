"""Checkpoints of kinds that ``synthetic.make`` does not make in one go, and edits of what it made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from synthetic import COLUMN, FP32, Cut, Made, Param, World, exact, flat_partition, make, random_full

STEM = "moe.deepspeed_moe.experts.deepspeed_experts."


def optimizer_state(made: Made, dp: int = 0, mp: int = 0) -> dict[str, Any]:
    """The optimizer's own state dictionary in one file."""
    optimizer = made.optim(dp, mp)
    return optimizer["optimizer_state_dict"] if made.world.stage == 3 else optimizer["base_optimizer_state"]


def flip(
    made: Made, tp: int, *, dp: int = 0, state: str = FP32, element: int = 4, bit: int = 1, group: int = 0
) -> None:
    """One bit of one stored element differs."""
    masters = made.optim(dp, tp)["fp32_flat_groups" if made.world.stage == 3 else "single_partition_of_fp32_groups"]
    tensor = masters[group] if state == FP32 else optimizer_state(made, dp, tp)["state"][group][state]
    tensor.view(torch.int32)[element] ^= bit


def document(
    shards_of: Callable[[torch.Tensor, int], list[torch.Tensor]], full_shape: tuple[int, ...], tp: int
) -> dict[str, Any]:
    """An affine_map entry from a function that cuts a tensor of addresses; one piece a run of addresses."""
    addresses = torch.arange(int(torch.tensor(full_shape).prod())).reshape(full_shape)
    shards = shards_of(addresses, tp)
    holders: dict[int, list[int]] = {}
    for rank, shard in enumerate(shards):
        for address in shard.reshape(-1).tolist():
            holders.setdefault(address, []).append(rank)
    ranks = {}
    for rank, shard in enumerate(shards):
        flat = shard.reshape(-1).tolist()
        pieces = []
        start = 0
        for stop in range(1, len(flat) + 1):
            runs_on = stop < len(flat) and flat[stop] == flat[stop - 1] + 1
            if runs_on and holders[flat[stop]] == holders[flat[start]]:
                continue
            pieces.append(
                {
                    "shape": [stop - start],
                    "source": [flat[start], [1]],
                    "dest": [start, [1]],
                    "locations": holders[flat[start]],
                }
            )
            start = stop
        ranks[rank] = {"shard_shape": list(shard.shape), "pieces": pieces}
    return {"logical_shape": list(full_shape), "ranks": ranks}


def mapped(
    name: str,
    full: torch.Tensor,
    shards_of: Callable[[torch.Tensor, int], list[torch.Tensor]],
    tp: int,
    scale: float | None = None,
    spelling: str = "params",
    **world: Any,
) -> Made:
    """One parameter that an affine map alone describes."""
    entry = document(shards_of, tuple(full.shape), tp)
    if scale is not None:
        for rank in entry["ranks"].values():
            for piece in rank["pieces"]:
                piece["scale"] = scale
    maps = {exact(name): entry}
    info = {"affine_map": {"version": 1, "params": maps} if spelling == "params" else {"version": 1, **maps}}
    return make(World(tp=tp, version=0.5, info=info, **world), [Param(name, full, Cut("mapped", pieces=shards_of))])


def native_moe(
    *,
    ep: int = 2,
    edp: int = 1,
    tp: int = 1,
    experts: tuple[int, ...] = (4,),
    file_prefix: str = "layer_{layer}_",
    shapes: bool = True,
    **world: Any,
) -> tuple[Made, dict[tuple[str, str], torch.Tensor]]:
    """DeepSpeed's own MoE: every rank numbers its experts from 0, the expert files number them all.

    ``experts`` gives every layer's experts. Returns the files, and F of every state of every expert by its global
    name. ``shapes`` False leaves ``param_shapes`` out, as DeepSpeed did up to 0.19.4.
    """
    made = make(World(tp=tp, dp=ep * edp, **world), [Param("gate", random_full((4 * tp, 3), 1), COLUMN)])
    full: dict[tuple[str, str], torch.Tensor] = {}
    for layer, count in enumerate(experts):
        for number in range(count):
            for index, state in enumerate((FP32, *made.world.states)):
                seed = 1000 * layer + 10 * number + index
                full[f"{layer}.{STEM}{number}.w", state] = random_full((3 * tp, 2 + layer), 77 + seed)
                full[f"{layer}.{STEM}{number}.b", state] = random_full((5 * tp,), 7777 + seed)

    def shard(name: str, state: str, rank: int) -> torch.Tensor:
        return torch.chunk(full[name, state], tp)[rank].contiguous()

    locals_ = [
        f"{layer}.{STEM}{n}.{p}" for layer, count in enumerate(experts) for n in range(count // ep) for p in "wb"
    ]
    for rank in range(tp):
        for dp in range(made.world.dp):
            ep_rank, part = made.world.expert_place(dp, ep)
            source: dict[str, dict[str, torch.Tensor]] = {}
            for name in locals_:
                layer, number = int(name.partition(".")[0]), int(name.split(".")[-2])
                known = f"{layer}.{STEM}{ep_rank * (experts[layer] // ep) + number}.{name[-1]}"
                for state in (FP32, *made.world.states):
                    source.setdefault(state, {})[name] = shard(known, state, rank)
            flat, mapping, padding = flat_partition(made.world, locals_, source, edp, part)
            optimizer = made.optim(dp, rank)
            optimizer["single_partition_of_fp32_groups"].append(flat.pop(FP32))
            optimizer_state(made, dp, rank)["state"][1] = {"step": made.world.step, **flat}
            optimizer_state(made, dp, rank)["param_groups"].append({"lr": 0.01, "moe": True, "params": [1]})
            optimizer["param_slice_mappings"].append(mapping)
            optimizer["group_paddings"].append(padding)
            optimizer["partition_count"].append(edp)
        state = made.model(rank)
        state["param_shapes"].append({name: shard(name, FP32, rank).shape for name in locals_})
        if not shapes:
            del state["param_shapes"]
        for layer, count in enumerate(experts):
            for number in range(count):
                stem = file_prefix.format(layer=layer)
                names = [f"{layer}.{STEM}{number}.{part}" for part in "wb"]
                file = f"{stem}expert_{number}_mp_rank_{rank:02d}_model_states.pt"
                made.files[file] = {name: shard(name, FP32, rank) for name in names}
    return made, full
