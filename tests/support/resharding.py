"""Resharding in a test, and what the flat tensors of the result must hold, element by element."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from stored import load_tensor
from synthetic import FP32, Param, World

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.refs import TensorRef

Shards = Mapping[tuple[str, str, int], torch.Tensor]


def reshard(source: str | os.PathLike[str], target: str | os.PathLike[str], *options: object) -> int:
    folders = ["--input_folder", os.fspath(source), "--output_folder", os.fspath(target)]
    return ds_affine(["reshard", "--no-fsync", *folders, *map(str, options)])


def optimizer_of(folder: str | os.PathLike[str], dp: int, mp: int, prefix: str = "") -> Any:
    name = f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
    return load_pickle(os.path.join(folder, name)).root["optimizer_state_dict"]


def model_of(folder: str | os.PathLike[str], mp: int, dp: int | None = None) -> Any:
    name = f"mp_rank_{mp:02d}_model_states.pt"
    return load_pickle(os.path.join(folder, name if dp is None else f"zero_pp_rank_{dp}_{name}")).root


def value(found: Any) -> Any:
    return load_tensor(found) if isinstance(found, TensorRef) else found


def members(params: Sequence[Param], group: int, pp: int) -> list[Param]:
    return [p for p in params if p.group == group and p.kind == "optimized" and pp in p.stages]


def flat_parts(
    world: World, params: Sequence[Param], shards: Shards, group: int, mp: int, state: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every data-parallel rank's part of a group, and beside it which parameter each element is of, -1 for padding."""
    pp, tp = divmod(mp, world.tp)
    held = [shards[p.name, state, tp].reshape(-1) for p in members(params, group, pp)]
    owners = [torch.full(shard.shape, index) for index, shard in enumerate(held)]

    def padded(flat: torch.Tensor, length: int, fill: int) -> torch.Tensor:
        return torch.cat([flat, torch.full((length - flat.numel(),), fill, dtype=flat.dtype)])

    if world.stage == 3:
        cut = [-(-shard.numel() // world.dp) * world.dp for shard in held]
        pairs = [
            (padded(s, n, 0).chunk(world.dp), padded(o, n, -1).chunk(world.dp))
            for s, o, n in zip(held, owners, cut, strict=True)
        ]
        return (
            [torch.cat([values[dp] for values, _ in pairs]) for dp in range(world.dp)],
            [torch.cat([whose[dp] for _, whose in pairs]) for dp in range(world.dp)],
        )
    flat, whose = torch.cat(held), torch.cat(owners)
    length = -(-flat.numel() // (2 * world.dp)) * 2 * world.dp
    return list(padded(flat, length, 0).chunk(world.dp)), list(padded(whose, length, -1).chunk(world.dp))


def wrong_files(
    folder: str | os.PathLike[str], world: World, params: Sequence[Param], shards: Shards, step: Any
) -> Iterator[str]:
    """What the optimizer and model-state files have otherwise than explicit concatenation, padding and cutting give.

    ``world`` is the target's, and ``shards`` are cut from the full tensors as it cuts them.
    """
    groups = sorted({p.group for p in params if p.kind == "optimized"})
    states = sorted({state for _, state, _ in shards} - {FP32})
    names = sorted(os.listdir(folder))
    expected = {"affine_manifest.json"}
    for mp in range(world.tp * world.pp):
        pp, tp = divmod(mp, world.tp)
        for dp in range(world.dp):
            optimizer = optimizer_of(folder, dp, mp)
            expected.add(f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
            inner = optimizer["optimizer_state_dict" if world.stage == 3 else "base_optimizer_state"]
            masters = optimizer["fp32_flat_groups" if world.stage == 3 else "single_partition_of_fp32_groups"]
            for group in groups:
                at = f"mp {mp}, dp {dp}, group {group}"
                parts, owners = flat_parts(world, params, shards, group, mp, FP32)
                own = owners[dp]
                held = parts[dp]
                if world.stage < 3:
                    inside = [p.name for p in members(params, group, pp)]
                    padding = int((own[own.numel() - 1 :] == -1).any()) and int((own == -1).sum())
                    held = held[: held.numel() - padding]
                    if optimizer["group_paddings"][group] != padding:
                        yield f"{at}: padding {optimizer['group_paddings'][group]}, not {padding}"
                    slices = {n: (a.start, a.numel) for n, a in optimizer["param_slice_mappings"][group].items()}
                    right = {
                        name: (int((own == index).nonzero()[0]), int((own == index).sum()))
                        for index, name in enumerate(inside)
                        if (own == index).any()
                    }
                    if slices != right or list(slices) != list(right):
                        yield f"{at}: slices {slices}, not {right}"
                if not torch.equal(value(masters[group]), held):
                    yield f"{at}: fp32 differs"
                for state in states:
                    found = value(inner["state"][group][state])
                    if not torch.equal(found, flat_parts(world, params, shards, group, mp, state)[0][dp]):
                        yield f"{at}: {state} differs"
                if step is not None and value(inner["state"][group]["step"]) != step:
                    yield f"{at}: step differs"
            if world.stage == 3:
                expected.add(f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt")
                yield from _wrong_model(model_of(folder, mp, dp), world, params, shards, pp, tp, dp)
        if world.stage < 3:
            expected.add(f"mp_rank_{mp:02d}_model_states.pt")
            yield from _wrong_model(model_of(folder, mp), world, params, shards, pp, tp, None)
    if names != sorted(expected):
        yield f"files {names}, not {sorted(expected)}"


def _wrong_model(
    root: Any, world: World, params: Sequence[Param], shards: Shards, pp: int, tp: int, dp: int | None
) -> Iterator[str]:
    at = f"model of pp {pp}, tp {tp}, dp {dp}"
    if (root["dp_world_size"], root["mp_world_size"]) != (world.dp, world.tp * world.pp):
        yield f"{at}: degrees {root['dp_world_size']}, {root['mp_world_size']}"
    if root["ds_config"]["zero_optimization"]["stage"] != world.stage:
        yield f"{at}: configured for stage {root['ds_config']['zero_optimization']['stage']}"
    here = [p for p in params if pp in p.stages]
    if list(root["module"]) != [p.name for p in here]:
        yield f"{at}: module has {list(root['module'])}"
        return
    for p in here:
        shard = shards[p.name, FP32, tp]
        found = value(root["module"][p.name])
        if world.stage == 3 and p.kind != "buffer":
            shard = torch.empty(0)
        if not torch.equal(found, shard.to(p.full.dtype if p.kind == "buffer" else world.module_dtype)):
            yield f"{at}: {p.name} differs"
    shapes = [
        {p.name: tuple(shards[p.name, FP32, tp].shape) for p in members(params, group, pp)}
        for group in sorted({p.group for p in params if p.kind == "optimized"})
    ]
    if [dict(group) for group in root["param_shapes"]] != shapes:
        yield f"{at}: param_shapes {root['param_shapes']}"
    frozen = [p for p in here if p.kind == "frozen"]
    if world.stage > 1:
        if dict(root["frozen_param_shapes"] or {}) != {p.name: tuple(shards[p.name, FP32, tp].shape) for p in frozen}:
            yield f"{at}: frozen_param_shapes {root['frozen_param_shapes']}"
        for p in frozen:
            whole = shards[p.name, FP32, tp]
            found = value(root["frozen_param_fragments"][p.name])
            if dp is not None:
                size = -(-whole.numel() // world.dp)
                flat = torch.cat([whole.reshape(-1), torch.zeros(size * world.dp - whole.numel())])
                whole = flat[dp * size : (dp + 1) * size]
            if not torch.equal(found, whole.to(world.module_dtype)):
                yield f"{at}: fragment of {p.name} differs"
