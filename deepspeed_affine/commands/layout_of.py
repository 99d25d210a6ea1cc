"""The layout of a checkpoint that exists: what its files say of topology, maps and order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, UnsupportedLayoutError
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.execute.model_file import UC_INFO, ModelFile
from deepspeed_affine.ir import ParamAffineMap, replicated_map
from deepspeed_affine.lowering.reading import as_count, as_mapping, refuse
from deepspeed_affine.lowering.state_table import ShardKey
from deepspeed_affine.lowering.states import FP32
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout, LayoutParam, LayoutRank, ParamKind
from deepspeed_affine.plan.conversion import ConversionPlan
from deepspeed_affine.plan.partition import aligned_elements
from deepspeed_affine.storage.checkpoint_file import load_checkpoint_file
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.plain_values import encode_value
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["DS_CONFIG", "aligned_to", "layout_of", "optimizer_root", "param_groups_of", "zero_config"]

DS_CONFIG = "ds_config"


def layout_of(checkpoint: Checkpoint, plan: ConversionPlan) -> CheckpointLayout:
    """The layout of ``checkpoint``; ``plan`` is its conversion plan, which has the map of every tensor.

    Raises UnsupportedLayoutError for what is not written anew: mixtures of experts, ``round_robin_gradients`` on
    several ranks, a checkpoint without ZeRO.
    """
    _refuse(checkpoint)
    first = checkpoint.model_files[0]
    params = _params(checkpoint, plan)
    ranks = tuple(_rank(checkpoint, file) for file in checkpoint.model_files if not file.rank)
    _check_ranks(checkpoint, ranks)
    optimizer = optimizer_root(checkpoint)
    config, info = first.root.get(DS_CONFIG), first.root.get(UC_INFO)
    version = first.root.get("ds_version")
    records = [record.states for record in checkpoint.states.groups]
    states = {state for record in records for state, value in record.items() if value is not None} - {FP32}
    layout = CheckpointLayout(
        tp=checkpoint.tp_degree,
        pp=checkpoint.pp_degree,
        dp=checkpoint.dp_degree,
        stage=checkpoint.stage,
        params=params,
        ranks=ranks,
        experts=dict(checkpoint.native_experts.layers),
        data_before_expert=isinstance(config, Mapping) and bool(config.get("use_data_before_expert_parallelism")),
        bf16_optimizer="zero_stage" not in optimizer,
        prefix=checkpoint.folder.optim_files[0].prefix,
        param_alignment=aligned_to(zero_config(config), params) if "zero_stage" in optimizer else 1,
        hyperparameters=tuple(
            tuple(sorted(key for key in group if key != "params")) for group in param_groups_of(checkpoint, optimizer)
        ),
        states=tuple(sorted(states)) or None,
        config=encode_value(config, f"{first.path}: {DS_CONFIG!r}"),
        info=encode_value(info, f"{first.path}: {UC_INFO!r}"),
        version=version if isinstance(version, str) else None,
    )
    _check_paddings(checkpoint, layout)
    return layout


def zero_config(config: Any) -> Mapping[str, Any]:
    """The part of a DeepSpeed configuration that is about ZeRO; empty without one."""
    found = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def aligned_to(zero: Mapping[str, Any], params: Mapping[str, LayoutParam]) -> int:
    """How many elements ZeRO-1 and ZeRO-2 round the place of a parameter in its group to; BF16_Optimizer does not."""
    optimized = next((param for param in params.values() if param.kind == "optimized"), None)
    if not zero.get("parameter_alignment") or optimized is None:
        return 1
    return aligned_elements(item_size(optimized.dtype))


def optimizer_root(checkpoint: Checkpoint, mp: int = 0) -> Mapping[str, Any]:
    """The optimizer's dictionary in the first file of model-parallel rank ``mp``."""
    path = checkpoint.folder.find("zero_optim", dp=0, mp=mp).path
    root = as_mapping(load_checkpoint_file(path).root, "the optimizer file", path)
    return as_mapping(root.get("optimizer_state_dict"), "'optimizer_state_dict'", path)


def param_groups_of(checkpoint: Checkpoint, optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The optimizer's parameter groups: hyperparameters, and under ``params`` the numbers of their flat tensors."""
    file = checkpoint.folder.optim_files[0].path
    key = "optimizer_state_dict" if checkpoint.stage == 3 else "base_optimizer_state"
    groups = as_mapping(optimizer.get(key), f"{key!r}", file).get("param_groups")
    if not isinstance(groups, list):
        raise refuse(file, "'param_groups' of the optimizer", groups, "a list of hyperparameter dictionaries")
    return [as_mapping(group, "a parameter group", file) for group in groups]


def _refuse(checkpoint: Checkpoint) -> None:
    folder, first = checkpoint.folder, checkpoint.model_files[0]
    if not checkpoint.stage:
        raise UnsupportedLayoutError(
            f"{folder.path}: was saved without ZeRO, so that there are no partitions to cut anew. Load it as it is, or "
            "convert it with ds_to_universal --affine.",
            file=folder.path,
        )
    if checkpoint.experts or folder.expert_optim_files:
        raise UnsupportedLayoutError(
            f"{folder.path}: is of a mixture of experts that lie stacked in one parameter (AutoEP), or whose states "
            "are in files of their own; these are not written anew. Convert it with ds_to_universal --affine, or load "
            "it with deepspeed_affine.load_checkpoint.",
            file=folder.path,
        )
    if folder.offloaded:
        raise UnsupportedLayoutError(
            f"{folder.path}: has optimizer states offloaded to NVMe in {folder.offloaded[0]}, which no file of the "
            "checkpoint describes. Load it in DeepSpeed, switch the offloading off and save again.",
            file=folder.path,
        )
    turns = zero_config(first.root.get(DS_CONFIG)).get("round_robin_gradients")
    if turns and checkpoint.stage < 3 and checkpoint.dp_degree > 1:
        raise UnsupportedLayoutError(
            f"{folder.path}: was saved with round_robin_gradients on {checkpoint.dp_degree} data-parallel ranks, whose "
            "number decides the order of the parameters. Convert it with ds_to_universal --affine, or set "
            "round_robin_gradients to false and save again.",
            file=folder.path,
        )


def _params(checkpoint: Checkpoint, plan: ConversionPlan) -> dict[str, LayoutParam]:
    dtypes: dict[str, str] = {}
    frozen: dict[str, tuple[int, ...]] = {}
    buffers: dict[str, list[tuple[int, ...]]] = {}
    for file in checkpoint.model_files:
        aliases = dict(_aliases(checkpoint, file))
        for name, value in (file.module or {}).items():
            if isinstance(value, TensorRef) and name not in aliases:
                dtypes.setdefault(name, value.dtype)
                if name in file.buffers and not file.rank:
                    buffers.setdefault(name, []).append(value.shape)
                elif name not in checkpoint.shapes and checkpoint.stage < 3:
                    frozen.setdefault(name, value.shape)
        frozen.update(file.frozen_shapes)
    for name, by_rank in checkpoint.expert_tensors.items():
        dtypes.setdefault(name, next(iter(by_rank.values())).dtype)
    layer_dtype = _layer_dtype(checkpoint)
    found: dict[str, LayoutParam] = {}
    for name, shapes in checkpoint.shapes.items():
        layout = plan.layouts.get(name)
        shape = next((shape for shape in shapes if shape is not None), ())
        if layout is None or (checkpoint.stage == 3 and checkpoint.tp_degree == 1):
            # Without tensor parallelism ZeRO-3 is converted flat, and a parameter without elements not at all.
            layout = replicated_map(shape, checkpoint.tp_degree)
        found[name] = LayoutParam(layout, dtypes.get(name, layer_dtype))
    for name, shape in frozen.items():
        if name not in found and name not in buffers:
            found[name] = _unowned(checkpoint, plan, name, shape, dtypes.get(name, layer_dtype), "frozen")
    for name, every in buffers.items():
        if len(set(every)) > 1 and name not in plan.layouts:
            raise UnsupportedLayoutError(
                f"buffer {name!r}: the tensor-parallel ranks hold shapes {sorted(set(every))}, and nothing says how "
                "they belong together. Register it with persistent=False, or give it one shape.",
                param=name,
            )
        found[name] = _unowned(checkpoint, plan, name, every[0], dtypes[name], "buffer")
    return found


def _unowned(
    checkpoint: Checkpoint, plan: ConversionPlan, name: str, shape: tuple[int, ...], dtype: str, kind: ParamKind
) -> LayoutParam:
    layout: ParamAffineMap | None = plan.layouts.get(name)
    if layout is None or len(layout.shard_shapes) != checkpoint.tp_degree:
        layout = replicated_map(shape, checkpoint.tp_degree)
    return LayoutParam(layout, dtype, kind)


def _layer_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the weights in pipeline layer files, which stands for those of their parameters."""
    for file in checkpoint.folder.layer_files:
        for value in as_mapping(load_checkpoint_file(file.path).root, "a layer", file.path).values():
            if isinstance(value, TensorRef) and value.dtype in ("float16", "bfloat16", "float32"):
                return value.dtype
    return "float32"


def _rank(checkpoint: Checkpoint, file: ModelFile) -> LayoutRank:
    names = None
    if file.module is not None:
        # Experts are in files of their own.
        layers = tuple(checkpoint.native_experts.layers)
        known = {name for name in (*file.shapes, *file.frozen_shapes) if not layers or not name.startswith(layers)}
        lacking = sorted(known - file.module.keys())
        if lacking:
            raise CheckpointFormatError(
                f"{file.path}: records the shape of parameter {lacking[0]!r}, and its module does not list it; both "
                "are expected. The file is damaged: use another checkpoint.",
                param=lacking[0],
                file=file.path,
            )
        names = tuple(name for name, value in file.module.items() if name in known or isinstance(value, TensorRef))
    groups = tuple(tuple(group) for group in file.groups)
    aliases = dict(_aliases(checkpoint, file))
    if checkpoint.stage < 3:
        return LayoutRank(names, groups, aliases)
    owners, count = _owners(checkpoint, file.shard, len(groups))
    # A group of frozen parameters has no sub-group.
    merged: list[tuple[str, ...]] = [() for _ in range(count)]
    for owner, group in zip(owners, groups, strict=True):
        merged[owner] += group
    return LayoutRank(
        names, tuple(merged), aliases, tuple((o, len(group)) for o, group in zip(owners, groups, strict=True))
    )


def _check_ranks(checkpoint: Checkpoint, ranks: Sequence[LayoutRank]) -> None:
    """The tensor-parallel ranks of a pipeline stage hold parts of the same tensors, in one order, and the data-parallel
    ranks of ZeRO-3 say the same of what is frozen."""
    frozen: dict[ShardKey, Mapping[str, tuple[int, ...]]] = {}
    for file in checkpoint.model_files:
        if frozen.setdefault(file.shard, file.frozen_shapes) != file.frozen_shapes:
            raise CheckpointFormatError(
                f"{file.path}: its 'frozen_param_shapes' are others than those of another data-parallel rank; every "
                "rank must record the same. The files are of different saves: take all of them from one.",
                file=file.path,
            )
    for mp, rank in enumerate(ranks):
        first = mp - mp % checkpoint.tp_degree
        if (rank.names, rank.groups) != (ranks[first].names, ranks[first].groups):
            shard = ShardKey(*divmod(mp, checkpoint.tp_degree))
            path = next(file.path for file in checkpoint.model_files if file.shard == shard)
            ours, theirs = ({*(each.names or ()), *each.optimized} for each in (rank, ranks[first]))
            differ = sorted(ours ^ theirs)[:5]
            raise CheckpointFormatError(
                f"{path}: lists other tensors than the file of tensor-parallel rank 0, or in another order"
                f"{f' ({differ})' if differ else ''}; every rank must list the same. The files are of different saves, "
                "or one is damaged: take all of them from one.",
                file=path,
            )


def _aliases(checkpoint: Checkpoint, file: ModelFile) -> Iterator[tuple[str, str]]:
    """Names of tied weights; only the first rank of all records them, in the names of the whole model."""
    module = file.module or {}
    for source in (file, checkpoint.model_files[0]):
        for alias, name in source.aliases.items():
            if alias in module and name in module:
                yield alias, name


def _owners(checkpoint: Checkpoint, shard: ShardKey, count: int) -> tuple[list[int], int]:
    """For each ZeRO-3 sub-group the parameter group it belongs to, and how many groups there are."""
    mp = shard.pp * checkpoint.tp_degree + shard.tp
    path = checkpoint.folder.find("zero_optim", dp=0, mp=mp).path
    found: dict[int, int] = {}
    param_groups = param_groups_of(checkpoint, optimizer_root(checkpoint, mp))
    for number, group in enumerate(param_groups):
        params = group.get("params")
        if not isinstance(params, list):
            raise refuse(path, "'params' of a parameter group", params, "a list of the numbers of its sub-groups")
        found.update((as_count(index, "an entry of 'params'", path), number) for index in params)
    if sorted(found) != list(range(count)):
        raise CheckpointFormatError(
            f"{path}: its parameter groups list sub-groups {sorted(found)}, the model-state file has {count}; each is "
            "expected once. The files come from different saves: take all of them from one.",
            file=path,
        )
    return [found[index] for index in range(count)], len(param_groups)


def _check_paddings(checkpoint: Checkpoint, layout: CheckpointLayout) -> None:
    """What is recorded of the room between parameters is what their layout gives."""
    if checkpoint.stage == 3:
        return
    for mp, rank in enumerate(layout.ranks):
        recorded = optimizer_root(checkpoint, mp).get("param_alignment_paddings")
        expected = [list(layout.flat_group(mp, group).paddings) for group in range(len(rank.groups))]
        if recorded is not None and recorded != expected:
            path = checkpoint.folder.find("zero_optim", dp=0, mp=mp).path
            raise UnsupportedLayoutError(
                f"{path}: records other paddings between its parameters than 'parameter_alignment' of its "
                "configuration gives. Load it in DeepSpeed and save again.",
                file=path,
            )
