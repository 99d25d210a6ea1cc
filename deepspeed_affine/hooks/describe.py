"""The layout of a live engine, or of a model that no engine has yet: what ``ds_affine reshard --layout`` takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from deepspeed_affine.errors import PolicyError, UnsupportedLayoutError
from deepspeed_affine.execute.model_file import UC_INFO
from deepspeed_affine.hooks.given import ENGINE, require_info
from deepspeed_affine.hooks.layouts import live_params
from deepspeed_affine.hooks.topology import gather_shapes, over_stages, tensor_parallel_of
from deepspeed_affine.ir import replicated_map
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout, LayoutParam, LayoutRank
from deepspeed_affine.plan.layout_document import layout_document
from deepspeed_affine.plan.partition import aligned_elements, sub_group_counts
from deepspeed_affine.storage.plain_values import encode_value
from deepspeed_affine.storage.refs import new_instance

__all__ = ["describe"]

SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's own default of ``sub_group_size``, in elements of one rank."""

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """What the optimizer decides: the stage, and which parameters lie where, in order."""

    dp: int
    stage: int
    groups: Groups
    sub_group_size: int
    bf16: bool
    alignment: int
    hyperparameters: tuple[tuple[str, ...], ...] | None
    states: tuple[str, ...] | None


def describe(
    engine: Any,
    *,
    info: Mapping[str, Any] | None = None,
    mpu: Any = None,
    dp: int | None = None,
    zero_stage: int | None = None,
    groups: Sequence[Any] | None = None,
    sub_group_size: int = SUB_GROUP_SIZE,
    bf16_optimizer: bool = False,
) -> dict[str, Any]:
    """The layout of the ordinary checkpoint that ``engine`` would save and load, as a plain JSON document.

    Of an engine everything is asked; call it on all ranks, each gets the whole. ``info`` is the
    ``universal_checkpoint_info`` of a model whose layers were cut by hand, ``mpu`` its unit.

    Instead of an engine a model will do, on any device, ``meta`` included, with the degree ``dp`` and ``zero_stage`` of
    the run to come. ``groups`` are then its parameter groups in order (lists of parameters or names, or dictionaries
    with ``params``; by default one of all parameters with a gradient), ``sub_group_size`` that of ZeRO-3, and
    ``bf16_optimizer`` says whether DeepSpeed will take its BF16_Optimizer. No value of a parameter is looked at.

    Raises UnsupportedLayoutError for models with experts, and one error listing the parameters that it cannot describe.
    """
    require_info(info, "describe")
    if all(hasattr(engine, name) for name in ENGINE):
        if dp is not None or zero_stage is not None or groups is not None:
            raise PolicyError("describe: dp, zero_stage and groups are asked of the engine; give them with a model.")
        names = {id(param): name for name, param in engine.module.named_parameters()}
        return _described(engine.module, _of_engine(engine, names), info, mpu, engine)
    if not isinstance(engine, torch.nn.Module):
        raise PolicyError(
            f"describe was given a {type(engine).__name__}; expected the engine that deepspeed.initialize returns, or "
            "a model."
        )
    if dp is None or zero_stage is None:
        raise PolicyError("describe was given a model: say dp and zero_stage of the run that is to load it.")
    optimizer = _of_model(engine, dp, zero_stage, groups, sub_group_size, bf16_optimizer)
    return _described(engine, optimizer, info, mpu, None)


def _described(
    model: torch.nn.Module, optimizer: _Optimizer, info: Mapping[str, Any] | None, mpu: Any, engine: Any
) -> dict[str, Any]:
    info = info if info is not None else getattr(model, UC_INFO, None)
    group = tensor_parallel_of(model, mpu)
    aliases = _aliases(model)
    optimized = {name for names in optimizer.groups for name in names}
    params: dict[str, LayoutParam] = {}
    owned = dict(model.named_parameters())
    for name, live in live_params(model, info=info, mpu=mpu).items():
        if live.source == "experts":
            raise UnsupportedLayoutError(
                f"describe: {name!r} belongs to a mixture of experts, whose checkpoints reshard does not write. "
                "Convert with ds_to_universal --affine, or load with deepspeed_affine.load_checkpoint.",
                param=name,
            )
        params[name] = LayoutParam(live.layout, _dtype(owned[name]), "optimized" if name in optimized else "frozen")
    buffers = dict(_buffers(model))
    held = gather_shapes({name: tuple(buffer.shape) for name, buffer in buffers.items()}, group)
    for name, shapes in held.items():
        if len(set(shapes)) > 1:
            raise UnsupportedLayoutError(
                f"buffer {name!r}: the tensor-parallel ranks hold shapes {sorted(set(shapes))}, and nothing says how "
                "they belong together. Register it with persistent=False, or give it one shape.",
                param=name,
            )
        params[name] = LayoutParam(replicated_map(shapes[0], group.degree), _dtype(buffers[name]), "buffer")
    # Pipeline layer files hold the module then, under names of their own.
    names = None if hasattr(model, "forward_funcs") else tuple(_entries(model, {*params, *aliases}))
    mine = LayoutRank(names, optimizer.groups, aliases)
    stages = over_stages((params, mine), model, mpu)
    layout = CheckpointLayout(
        tp=group.degree,
        pp=len(stages),
        dp=optimizer.dp,
        stage=optimizer.stage,
        params={name: param for known, _ in stages for name, param in known.items()},
        ranks=tuple(
            replace(rank, sub_groups=_sub_groups(optimizer, known, tp))
            for known, rank in stages
            for tp in range(group.degree)
        ),
        bf16_optimizer=optimizer.bf16,
        prefix="bf16_" if _trains_in_bf16(model, engine) else "",
        param_alignment=optimizer.alignment,
        hyperparameters=optimizer.hyperparameters,
        states=optimizer.states,
        config=None if engine is None else encode_value(_plain(getattr(engine, "config", None)), "the configuration"),
        info=encode_value(_plain(info), UC_INFO),
        version=_deepspeed_version(),
    )
    return layout_document(layout)


def _sub_groups(optimizer: _Optimizer, params: Mapping[str, LayoutParam], tp: int) -> tuple[tuple[int, int], ...]:
    """Those of one tensor-parallel rank: ranks that hold parts of other sizes close theirs elsewhere."""
    if optimizer.stage != 3:
        return ()
    numels = [[params[name].shard_numel(tp) for name in names] for names in optimizer.groups]
    counts = [sub_group_counts(group, optimizer.dp, optimizer.sub_group_size) for group in numels]
    return tuple((at, count) for at, found in enumerate(counts) for count in found)


# ---------------------------------------------------------------- the optimizer


def _of_engine(engine: Any, names: Mapping[int, str]) -> _Optimizer:
    optimizer = engine.optimizer
    stage = int(engine.zero_optimization_stage())
    if stage == 0 or optimizer is None:
        raise UnsupportedLayoutError("describe: the engine runs without ZeRO; ZeRO stage 1, 2 or 3 is expected.")
    bf16 = any(kind.__name__ == "BF16_Optimizer" for kind in type(optimizer).__mro__)
    if stage == 3:
        owners = optimizer.sub_group_to_group_id
        listed = [(int(owners[at]), _names(group, names)) for at, group in enumerate(optimizer.fp16_groups)]
        groups = [
            tuple(name for owner, members in listed if owner == number for name in members)
            for number in range(len(optimizer.optimizer.param_groups))
        ]
    else:
        low = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
        groups = [_names(group, names) for group in low]
    inner = optimizer.optimizer
    states = {name for state in inner.state.values() for name in state}
    zero = engine.config.get("zero_optimization", {}) if isinstance(getattr(engine, "config", None), Mapping) else {}
    if zero.get("round_robin_gradients") and stage < 3 and int(engine.seq_dp_world_size) > 1:
        raise UnsupportedLayoutError(
            "describe: the engine runs with round_robin_gradients, and the order of the parameters then depends on the "
            "number of ranks. Set it to false."
        )
    first = next((param for group in inner.param_groups for param in group["params"]), None)
    itemsize = optimizer.bit16_groups[0][0].element_size() if stage < 3 and not bf16 and first is not None else 1
    aligned = bool(getattr(optimizer, "parameter_alignment", False)) and stage < 3 and not bf16
    return _Optimizer(
        dp=int(engine.seq_dp_world_size),
        stage=stage,
        groups=tuple(groups),
        sub_group_size=int(getattr(optimizer, "sub_group_size", SUB_GROUP_SIZE)),
        bf16=bf16,
        alignment=aligned_elements(itemsize) if aligned else 1,
        hyperparameters=tuple(tuple(sorted(set(group) - {"params"})) for group in inner.param_groups),
        states=tuple(sorted(states)) or None,
    )


def _of_model(
    model: torch.nn.Module, dp: int, stage: int, groups: Sequence[Any] | None, sub_group_size: int, bf16: bool
) -> _Optimizer:
    names = {id(param): name for name, param in model.named_parameters()}
    params = dict(model.named_parameters())
    if groups is None:
        groups = [[param for param in params.values() if param.requires_grad]]
    listed: list[tuple[str, ...]] = []
    for group in [groups] if isinstance(groups, str) else groups:
        members = group["params"] if isinstance(group, Mapping) else group
        if isinstance(members, str):
            raise PolicyError(
                f"describe: a parameter group is {members!r}; expected a list of parameters or names, or a dictionary "
                "with them under 'params'."
            )
        found = tuple(member if isinstance(member, str) else names.get(id(member), "") for member in members)
        unknown = [name or "a tensor" for name in found if name not in params]
        if unknown:
            raise PolicyError(
                f"describe: a parameter group lists {unknown[0]}, which is no parameter of the model; expected its own "
                "parameters, or their names."
            )
        # DeepSpeed's optimizers own nothing that takes no gradient or has no elements.
        listed.append(tuple(name for name in found if params[name].requires_grad and _numel(params[name])))
    return _Optimizer(dp, stage, tuple(listed), sub_group_size, bf16 and stage == 1, 1, None, None)


def _names(params: Sequence[torch.Tensor], names: Mapping[int, str]) -> tuple[str, ...]:
    found = tuple(names.get(id(param), "") for param in params)
    if "" in found:
        raise UnsupportedLayoutError(
            "describe: the optimizer owns a tensor that is no parameter of the engine's module; expected its own "
            "parameters only."
        )
    return found


# ---------------------------------------------------------------- the module


def _numel(param: torch.Tensor) -> int:
    return int(getattr(param, "ds_numel", param.numel()))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _trains_in_bf16(model: torch.nn.Module, engine: Any) -> bool:
    if engine is not None:
        return bool(engine.bfloat16_enabled())
    return any(param.dtype is torch.bfloat16 for param in model.parameters())


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """Names of tied weights beside the one that counts, by which DeepSpeed knows the parameter."""
    names = {id(param): name for name, param in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[id(param)] for name, param in every if names[id(param)] != name}


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dictionary has."""
    for prefix, module in model.named_modules():
        for local, buffer in module.named_buffers(recurse=False):
            if local not in module._non_persistent_buffers_set:
                yield f"{prefix}.{local}" if prefix else local, buffer


def _entries(model: torch.nn.Module, known: set[str]) -> Iterator[str]:
    """The names of the module's state dictionary, in its order."""
    for name in model.state_dict(keep_vars=True):
        if name in known:
            yield name


def _plain(value: Any) -> Any:
    """``value`` with DeepSpeed's own little objects as they are pickled."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        attributes = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return new_instance(kind.__module__, kind.__qualname__, attributes)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(inner) for inner in value) if type(value) in (list, tuple) else tuple(value)
    return value


def _deepspeed_version() -> str | None:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return None
