"""What a resharding is to write: the target's layout, compared with the source's, and the plan of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_affine.commands.layout_of import aligned_to, zero_config
from deepspeed_affine.commands.reshard_model import model_files
from deepspeed_affine.commands.reshard_optimizer import optimizer_files
from deepspeed_affine.commands.reshard_source import ReshardSource
from deepspeed_affine.errors import Faults, PolicyError, UnsupportedLayoutError
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.execute.tensor_files import source_storage
from deepspeed_affine.ir import SCALE_POWER_BY_STATE
from deepspeed_affine.lowering.policy import ScaledStates
from deepspeed_affine.lowering.states import FP32
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout
from deepspeed_affine.plan.conversion import ConversionPlan, CopiedFile, SourceStorage
from deepspeed_affine.storage.files import file_size, name_of
from deepspeed_affine.storage.pt_reader import load_pickle

__all__ = ["TargetOptions", "is_same_cut", "require_same_model", "reshard_plan", "target_of"]

SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's own default of ``sub_group_size``, in elements of one rank."""

SIGNATURE = ("alpha", "beta1", "betas", "lr_decay", "momentum", "nesterov", "rho", "use_muon")
"""Hyperparameters by which optimizers that keep other states can be told apart before they have any."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What the user asks for: None where the source's, or the layout's, is to stay."""

    dp: int | None = None
    stage: int | None = None
    sub_group_size: int | None = None


def target_of(source: CheckpointLayout, given: CheckpointLayout | None, options: TargetOptions) -> CheckpointLayout:
    """The layout to write: ``given``, or else the source's, at the degree and stage of ``options``.

    Raises PolicyError where nothing is asked for, or the same as there is.
    """
    if given is None and options.dp is None and options.stage is None:
        raise PolicyError(
            "nothing says what to make of the checkpoint: give --dp, --zero-stage or both, or a layout with --like or "
            "--layout."
        )
    base = given or source
    stage = base.stage if options.stage is None else options.stage
    dp = base.dp if options.dp is None else options.dp
    if options.sub_group_size is not None and stage != 3:
        raise PolicyError(f"--sub-group-size: only ZeRO-3 has sub-groups, and the target is of stage {stage}.")
    reshape = given is None or (dp, stage) != (given.dp, given.stage) or options.sub_group_size is not None
    target = base
    empty = next((at for rank in base.ranks for at, group in enumerate(rank.groups) if not group), None)
    if stage < 3 and empty is not None:
        raise UnsupportedLayoutError(
            f"parameter group {empty} has no parameter that is trained, and DeepSpeed has no such group under "
            f"ZeRO-{stage}. Choose stage 3, or load it with deepspeed_affine.load_checkpoint into an engine without it."
        )
    if reshape:
        config = zero_config(base.config)
        bf16 = _takes_bf16_optimizer(base, stage)
        if config.get("round_robin_gradients") and stage < 3 and dp > 1:
            raise UnsupportedLayoutError(
                "round_robin_gradients is set, and the order of the parameters then depends on the number of ranks. "
                "Set it to false in the new run, and give a checkpoint of that run with --like."
            )
        target = base.reshaped(
            dp=dp,
            stage=stage,
            sub_group_size=options.sub_group_size or _sub_group_size(config),
            bf16_optimizer=bf16,
            param_alignment=1 if stage == 3 or bf16 else aligned_to(config, base.params),
        )
    # The files are the source's, amended, where no other run's layout is given.
    target = replace(target, config=None, info=None, version=None) if given is None else target
    if given is not None and reshape and isinstance(given.config, Mapping):
        zero = {**zero_config(given.config), "stage": stage}
        target = replace(target, config={**given.config, "zero_optimization": zero})
    return target


def _sub_group_size(config: Mapping[str, Any]) -> int:
    size = config.get("sub_group_size")
    return int(size) if isinstance(size, (int, float)) and not isinstance(size, bool) and size > 0 else SUB_GROUP_SIZE


def _takes_bf16_optimizer(layout: CheckpointLayout, stage: int) -> bool:
    """Whether DeepSpeed's choice of optimizer for that configuration and stage is its BF16_Optimizer."""
    if stage != 1:
        return False
    config = layout.config if isinstance(layout.config, Mapping) else {}
    types, bf16 = config.get("data_types"), config.get("bf16") or config.get("bfloat16")
    offload = zero_config(config).get("offload_optimizer")
    on_device = not isinstance(offload, Mapping) or offload.get("device") in (None, "none")
    chosen = (
        isinstance(types, Mapping)
        and types.get("grad_accum_dtype") in ("fp32", "float32")
        and isinstance(bf16, Mapping)
        and bf16.get("enabled") is True
        and on_device
    )
    return chosen or (layout.stage == 1 and layout.bf16_optimizer)


def is_same_cut(source: CheckpointLayout, target: CheckpointLayout) -> bool:
    """Whether every model-parallel rank holds the same elements in the same places, in the same order."""
    return (
        (source.tp, source.pp) == (target.tp, target.pp)
        and source.params.keys() == target.params.keys()
        and all(
            param.kind == target.params[name].kind
            and param.dtype == target.params[name].dtype
            and (
                param.layout == target.params[name].layout
                or param.layout.canonical() == target.params[name].layout.canonical()
            )
            for name, param in source.params.items()
        )
        and all(
            (ours.names, ours.groups, dict(ours.aliases)) == (theirs.names, theirs.groups, dict(theirs.aliases))
            for ours, theirs in zip(source.ranks, target.ranks, strict=True)
        )
    )


def require_same_model(source: ReshardSource, target: CheckpointLayout, subject: str) -> None:
    """``target`` is a layout of the model and optimizer of ``source``; one PolicyError lists every difference."""
    faults = Faults()
    for param, line in _differences(source, target):
        faults.add(PolicyError(f"{subject}: {line}", param=param))
    faults.raise_if_any()


def _differences(source: ReshardSource, target: CheckpointLayout) -> Iterator[tuple[str | None, str]]:
    layout = source.layout
    for name in sorted({*layout.params, *target.params}):
        ours, theirs = layout.params.get(name), target.params.get(name)
        if ours is None or theirs is None:
            having, lacking = ("it", "the checkpoint") if ours is None else ("the checkpoint", "it")
            yield name, f"parameter {name!r} is in {having} and not in {lacking}; expected a layout of the same model."
        elif ours.kind != theirs.kind:
            yield name, f"{name!r} is {theirs.kind} in it and {ours.kind} in the checkpoint; one is expected."
        elif not _same_shape(source, name, ours.layout.logical_shape, theirs.layout.logical_shape):
            yield (
                name,
                f"parameter {name!r} has shape {theirs.layout.logical_shape} in it and {ours.layout.logical_shape} in "
                "the checkpoint; expected a layout of the same model.",
            )
    yield from _group_differences(layout, target)
    if target.scales_loss and not layout.scales_loss:
        yield (
            None,
            "its run trains in float16 and that of the checkpoint does not, so that no loss scale is stored to go on "
            "from; expected one precision. Load it with deepspeed_affine.load_checkpoint, which keeps the engine's.",
        )
    if layout.states is not None and target.states is not None and layout.states != target.states:
        yield (
            None,
            f"its optimizer keeps states {list(target.states)}, that of the checkpoint {list(layout.states)}; expected "
            "the same optimizer.",
        )


def _same_shape(source: ReshardSource, name: str, ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether the shapes are one, rows of vocabulary padding aside."""
    if tuple(ours) == tuple(theirs):
        return True
    rows = source.rows(name)
    known = rows is not None and rows < ours[0]
    if not ours or len(ours) != len(theirs) or tuple(ours[1:]) != tuple(theirs[1:]):
        return False
    return theirs[0] >= (rows or ours[0]) if known else False


def _group_differences(layout: CheckpointLayout, target: CheckpointLayout) -> Iterator[tuple[str | None, str]]:
    ours_of, theirs_of = ({prefix: count for prefix, (count, _) in each.experts.items()} for each in (layout, target))
    if ours_of != theirs_of:
        yield (
            None,
            f"its layers of experts are {theirs_of}, those of the checkpoint {ours_of} (prefix and number of experts); "
            "expected the same.",
        )
    ours, theirs = _group_of(layout), _group_of(target)
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            yield (
                name,
                f"parameter {name!r} is in parameter group {theirs[name]} in it and in {ours[name]} in the checkpoint; "
                "expected the same groups.",
            )
    counts = [len(each.hyperparameters or each.ranks[0].groups) for each in (layout, target)]
    if counts[0] != counts[1]:
        yield (
            None,
            f"its optimizer has {counts[1]} parameter groups, that of the checkpoint {counts[0]}; expected the same.",
        )
        return
    if layout.hyperparameters is None or target.hyperparameters is None:
        return
    for group, (mine, yours) in enumerate(zip(layout.hyperparameters, target.hyperparameters, strict=True)):
        kinds = [sorted(set(SIGNATURE) & set(names)) for names in (mine, yours)]
        if kinds[0] != kinds[1]:
            yield (
                None,
                f"parameter group {group} has hyperparameters {kinds[1]} in it and {kinds[0]} in the checkpoint, so "
                "that the optimizers keep other states; expected the same optimizer.",
            )


def _group_of(layout: CheckpointLayout) -> dict[str, int]:
    return {name: at for rank in layout.ranks for at, group in enumerate(rank.groups) for name in group}


def reshard_plan(
    source: ReshardSource, target: CheckpointLayout, scaled: ScaledStates, *, same_cut: bool
) -> ConversionPlan:
    """Every file of the new checkpoint, and the stored bytes it is made of.

    Raises UnsupportedLayoutError for what cannot be cut anew: pipeline layer files at another tensor-parallel degree,
    and states of parameters that the target holds scaled, unless ``scaled`` says what becomes of them.
    """
    _require_layer_files(source, target, same_cut=same_cut)
    if not same_cut:
        source.require_one_set_of_hyperparameters()
    notes = _scaled(source, target, scaled) if not same_cut else []
    if source.layout.scales_loss and not target.scales_loss:
        notes.append("the loss scaler of float16 is left out: the target's run scales no loss")
    objects = (
        *model_files(source, target, same_cut=same_cut),
        *optimizer_files(source, target, same_cut=same_cut),
    )
    return ConversionPlan(source.storages, (), objects, _kept_files(source.checkpoint), tuple(notes))


def _require_layer_files(source: ReshardSource, target: CheckpointLayout, *, same_cut: bool) -> None:
    layers = bool(source.checkpoint.folder.layer_files)
    wanted = any(rank.names is None for rank in target.ranks)
    folder = source.checkpoint.folder.path
    if layers != wanted:
        raise UnsupportedLayoutError(
            f"{folder}: keeps the module's weights in {'pipeline layer files' if layers else 'its model-state files'}, "
            f"the target in {'pipeline layer files' if wanted else 'model-state files'}; names differ between the two. "
            "Convert it with ds_to_universal --affine.",
            file=folder,
        )
    if source.layout.experts and source.layout.tp != target.tp:
        raise UnsupportedLayoutError(
            f"{folder}: keeps its experts in files of {source.layout.tp} tensor-parallel ranks; the target has "
            f"{target.tp}. Convert it with ds_to_universal --affine, or load it with deepspeed_affine.load_checkpoint.",
            file=folder,
        )
    if layers and source.layout.tp != target.tp:
        raise UnsupportedLayoutError(
            f"{folder}: keeps its weights in pipeline layer files, under names local to a layer, of "
            f"{source.layout.tp} tensor-parallel ranks; the target has {target.tp}. Convert it with ds_to_universal "
            "--affine, or load it with deepspeed_affine.load_checkpoint.",
            file=folder,
        )


def _kept_files(checkpoint: Checkpoint) -> tuple[CopiedFile, ...]:
    """Layers are numbered over all stages and experts over all ranks, so that their files are the same whatever the
    number of these."""
    folder = checkpoint.folder
    return tuple(
        CopiedFile(name_of(file.path), file.path, file_size(file.path), _storages(file.path))
        for file in (*folder.layer_files, *folder.expert_files)
    )


def _storages(path: str) -> tuple[SourceStorage, ...]:
    return tuple(source_storage(ref) for ref in load_pickle(path).archive.storages.values() if ref.nbytes)


def _scaled(source: ReshardSource, target: CheckpointLayout, policy: ScaledStates) -> list[str]:
    """What becomes of the states of parameters that the target's ranks hold scaled."""
    faults = Faults()
    notes: list[str] = []
    for name, param in target.params.items():
        pieces = (piece for held in param.layout.pieces_by_rank.values() for piece in held)
        if param.kind != "optimized" or all(piece.scale == 1.0 for piece in pieces):
            continue
        for state in sorted(source.states_of([name]).tensors):
            if policy is ScaledStates.RESET:
                source.reset(name, state)
                notes.append(f"{name}: {state} was reset to zeros because the parameter is held scaled")
            elif policy is ScaledStates.REFUSE or state not in SCALE_POWER_BY_STATE or state == FP32:
                faults.add(
                    UnsupportedLayoutError(
                        f"parameter {name!r}, state {state!r}: the target's ranks hold the parameter scaled, and its "
                        "hyperparameters (lr, eps) would stay in the coordinate of the source. Choose --scaled-states "
                        "reset (zeros), or power where the state is Adam's.",
                        param=name,
                    )
                )
    faults.raise_if_any()
    return notes
