"""A DeepSpeed checkpoint folder as one description: degrees, shapes, and where every state's fragments are stored.

Only metadata is read. Interpretation of the optimizer files is ``lowering``'s; this module opens the right files
and brings together what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults
from deepspeed_affine.lowering.experts import ExpertLayer, NativeExperts, expert_layers, zero12_expert_rank
from deepspeed_affine.lowering.states import Place, ShardKey, StateTable, read_zero3, read_zero12
from deepspeed_affine.storage.folder import CheckpointFolder, scan_folder
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.refs import StandIn, TensorRef

__all__ = ["Checkpoint", "ModelFile", "read_checkpoint"]

UC_INFO = "universal_checkpoint_info"
AUTOEP_KEYS = ("ds_autoep_layers", "autoep_layers")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What one model-state file says, tensors as references. ``rank`` is its data-parallel rank under ZeRO-3."""

    path: str
    shard: ShardKey
    rank: int
    root: Mapping[str, Any]

    @property
    def module(self) -> Mapping[str, Any] | None:
        """The module's state dictionary; None where pipeline layer files hold it."""
        module = self.root.get("module")
        return module if isinstance(module, Mapping) else None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the optimized parameters' shards, over all groups."""
        return {name: tuple(shape) for group in _shape_groups(self) for name, shape in group.items()}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names that stand for another parameter (tied weights), with the name of that parameter."""
        shared = self.root.get("shared_params")
        return dict(shared) if isinstance(shared, Mapping) else {}

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset(self.root.get("buffer_names") or ())

    @property
    def frozen_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the shards of parameters the optimizer does not own."""
        shapes = self.root.get("frozen_param_shapes")
        return {name: tuple(shape) for name, shape in shapes.items()} if isinstance(shapes, Mapping) else {}

    @property
    def frozen_fragments(self) -> Mapping[str, Any]:
        """Their stored values; under ZeRO-3 one partition a data-parallel rank."""
        fragments = self.root.get("frozen_param_fragments")
        return fragments if isinstance(fragments, Mapping) else {}

    @property
    def autoep(self) -> Any:
        for key in AUTOEP_KEYS:
            if self.root.get(key) is not None:
                return self.root[key]
        return None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One folder, understood. ``stage`` is the ZeRO stage; ``model_files`` are in (stage, tp, dp) order.

    ``shapes[name][tp]`` is the recorded shard shape, None where that rank records none. ``optimizer_file`` is the
    file whose global state DeepSpeed's converter keeps, None without ZeRO. For expert parameters, ``experts`` gives
    the layer and the shard keys of their states carry the expert-parallel rank in place of the TP rank. Experts of
    DeepSpeed's own MoE layers are separate parameters, here under their global numbers; ``expert_tensors[name][tp]``
    is the weight in their expert file.
    """

    folder: CheckpointFolder
    stage: int
    tp_degree: int
    pp_degree: int
    dp_degree: int
    model_files: tuple[ModelFile, ...]
    shapes: Mapping[str, tuple[tuple[int, ...] | None, ...]]
    states: StateTable
    optimizer_file: str | None
    experts: Mapping[str, ExpertLayer]
    native_experts: NativeExperts
    expert_tensors: Mapping[str, Mapping[int, Any]]

    @property
    def uc_info(self) -> Mapping[str, Any] | None:
        """The first model-state file's ``universal_checkpoint_info``; every file holds the same."""
        info = self.model_files[0].root.get(UC_INFO)
        return info if isinstance(info, Mapping) else None


def read_checkpoint(path: str) -> Checkpoint:
    """The checkpoint in ``path``, described from metadata alone: no tensor byte is read, nothing is executed.

    Raises CheckpointFormatError listing every missing rank and every file that contradicts the others.
    """
    folder = scan_folder(path)
    stage = _zero_stage(folder)
    tp_degree, pp_degree, dp_degree = _degrees(folder, stage)
    model_files = _read_model_files(folder, stage, tp_degree)
    experts = _experts(model_files)
    expert_tensors = {} if experts else _expert_tensors(folder)
    recorded = _shapes(model_files, tp_degree)
    native = NativeExperts.from_names(expert_tensors, recorded or expert_tensors)
    shapes = native.globalised(recorded)
    checkpoint = Checkpoint(
        folder=folder,
        stage=stage,
        tp_degree=tp_degree,
        pp_degree=pp_degree,
        dp_degree=dp_degree,
        model_files=model_files,
        shapes=shapes,
        states=StateTable(),
        optimizer_file=folder.optim_files[0].path if folder.optim_files else None,
        experts=experts,
        native_experts=native,
        expert_tensors=expert_tensors,
    )
    _read_states(checkpoint)
    return checkpoint


def _zero_stage(folder: CheckpointFolder) -> int:
    if not folder.optim_files:
        return 0
    file = folder.optim_files[0].path
    optimizer = _optimizer(load_pickle(file).root, file)
    stage = optimizer.get("zero_stage", 1)
    number = _enum_value(stage)
    if number is None or not 0 <= number <= 3:
        raise CheckpointFormatError(f"{file}: 'zero_stage' is {stage!r}; a number from 0 to 3 is expected.", file=file)
    return number


def _enum_value(value: Any) -> int | None:
    if isinstance(value, StandIn):
        value = value.stand_in_args[0] if value.stand_in_args else None
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _degrees(folder: CheckpointFolder, stage: int) -> tuple[int, int, int]:
    if stage == 3:
        return folder.mp_degree, 1, folder.dp_degree
    stages = folder.mp_degree
    recorded: set[tuple[int, int]] = set()
    for file in folder.model_files:
        dims = load_pickle(file.path).root.get("checkpoint_parallel_dimensions")
        if isinstance(dims, Mapping):
            recorded.add((dims.get("pp_degree", 0), dims.get("tp_degree", 0)))
    if len(recorded) > 1:
        raise CheckpointFormatError(
            f"{folder.path}: the model-state files record different degrees (pipeline, tensor): {sorted(recorded)}; "
            "one is expected. The folder mixes files of several runs."
        )
    if recorded:
        ((pp, tp),) = recorded
    else:
        tp = len({file.mp for file in folder.layer_files}) or stages
        pp = stages // tp if tp else 1
    if pp * tp != stages:
        raise CheckpointFormatError(
            f"{folder.path}: {stages} model-parallel ranks are present, but {pp} pipeline stages of {tp} "
            f"tensor-parallel ranks need {pp * tp}. Files are missing: copy the whole folder."
        )
    return tp, pp, max(folder.dp_degree, 1)


def _read_model_files(folder: CheckpointFolder, stage: int, tp_degree: int) -> tuple[ModelFile, ...]:
    files = []
    for file in folder.zero_model_files if stage == 3 else folder.model_files:
        pp, tp = divmod(file.mp or 0, tp_degree)
        root = load_pickle(file.path).root
        if not isinstance(root, Mapping):
            raise CheckpointFormatError(
                f"{file.path}: holds a {type(root).__name__}; a dictionary of model state is expected.", file=file.path
            )
        files.append(ModelFile(file.path, ShardKey(pp, tp), file.dp or 0, root))
    return tuple(sorted(files, key=lambda item: (item.shard, item.rank)))


def _shapes(model_files: Sequence[ModelFile], tp_degree: int) -> dict[str, tuple[tuple[int, ...] | None, ...]]:
    by_name: dict[str, list[tuple[int, ...] | None]] = {}
    faults = Faults()
    for file in model_files:
        if file.rank:
            continue
        for name, shape in file.shapes.items():
            known = by_name.setdefault(name, [None] * tp_degree)
            before = known[file.shard.tp]
            if before is not None and before != shape:
                faults.add(
                    CheckpointFormatError(
                        f"parameter {name!r}: pipeline stages record shapes {before} and {shape} for tensor-parallel "
                        f"rank {file.shard.tp}; a tied parameter must have one. The stages were cut differently.",
                        param=name,
                        rank=file.shard.tp,
                        file=file.path,
                    )
                )
            known[file.shard.tp] = shape
    faults.raise_if_any()
    return {name: tuple(shapes) for name, shapes in by_name.items()}


def _experts(model_files: Sequence[ModelFile]) -> dict[str, ExpertLayer]:
    found: dict[str, ExpertLayer] = {}
    for file in model_files:
        for name, layer in expert_layers(file.autoep, file=file.path).items():
            if found.setdefault(name, layer) != layer:
                raise CheckpointFormatError(
                    f"parameter {name!r}: {file.path} records another expert placement than the files before it; "
                    "every rank must record the same. The folder mixes files of several runs.",
                    param=name,
                    file=file.path,
                )
    return found


def _expert_tensors(folder: CheckpointFolder) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {}
    for file in folder.expert_files:
        root = load_pickle(file.path).root
        if not isinstance(root, Mapping):
            raise CheckpointFormatError(
                f"{file.path}: holds a {type(root).__name__}; a dictionary of one expert's weights is expected.",
                file=file.path,
            )
        for name, value in root.items():
            if isinstance(value, TensorRef):
                found.setdefault(name, {})[file.mp or 0] = value
    return found


def _read_states(checkpoint: Checkpoint) -> None:
    by_shard: dict[ShardKey, dict[int, ModelFile]] = {}
    for model in checkpoint.model_files:
        by_shard.setdefault(model.shard, {})[model.rank] = model
    faults = Faults()
    for file in checkpoint.folder.optim_files:
        pp, tp = divmod(file.mp or 0, checkpoint.tp_degree)
        dp_rank = file.dp or 0
        shard = ShardKey(pp, tp)
        models = by_shard.get(shard, {})
        model_file = models.get(dp_rank if checkpoint.stage == 3 else 0)
        if model_file is None:
            faults.add(
                CheckpointFormatError(
                    f"{file.path}: no model-state file belongs to it (model-parallel rank {file.mp}); copy the "
                    "whole folder.",
                    file=file.path,
                )
            )
            continue
        try:
            root = load_pickle(file.path).root
            optimizer = _optimizer(root, file.path)
            place = _placement(checkpoint, root, model_file, shard, dp_rank, file.path)
            if checkpoint.stage == 3:
                groups = _shape_groups(model_file)
                read_zero3(checkpoint.states, optimizer, groups, place, checkpoint.dp_degree, file=file.path)
            else:
                read_zero12(checkpoint.states, optimizer, place, model_file.shapes, file=file.path)
        except AffineError as fault:
            faults.add(fault)
    faults.raise_if_any()


def _placement(
    checkpoint: Checkpoint, root: Mapping[str, Any], model: ModelFile, shard: ShardKey, dp_rank: int, file: str
) -> Callable[[str], Place]:
    """Which shard a file's fragments belong to: its TP rank's, or for experts its expert-parallel rank's."""
    experts = checkpoint.experts
    folding = root.get("folding")
    families = folding.get("param_families") or {} if isinstance(folding, Mapping) else {}
    records = {entry["expert_key_prefix"]: entry for entry in model.autoep or ()}
    config = model.root.get("ds_config")
    data_first = bool(config.get("use_data_before_expert_parallelism")) if isinstance(config, Mapping) else False

    def place(name: str) -> Place:
        layer = experts.get(name)
        if layer is None:
            native = checkpoint.native_experts.place(name, dp_rank, checkpoint.dp_degree, data_first)
            return Place(native[0], shard, native[1]) if native else Place(name, shard, dp_rank)
        if isinstance(folding, Mapping):
            return Place(name, ShardKey(shard.pp, folding["ep_rank"]), families[name]["zero_partition_rank"])
        if checkpoint.stage == 3:
            record = records[layer.prefix]
            return Place(name, ShardKey(shard.pp, record["ep_rank"]), record["expert_data_parallel_rank"])
        if checkpoint.tp_degree > 1:
            raise CheckpointFormatError(
                f"{file}: expert parameter {name!r} is stored under {checkpoint.tp_degree} tensor-parallel ranks, but "
                "the file holds no 'folding' record that says which expert rank it belongs to. Save with DeepSpeed "
                "0.19.6 or later.",
                param=name,
                file=file,
            )
        ep_rank, rank = zero12_expert_rank(dp_rank, checkpoint.dp_degree, layer.ep_size, data_first)
        return Place(name, ShardKey(shard.pp, ep_rank), rank)

    return place


def _shape_groups(file: ModelFile) -> list[Mapping[str, Any]]:
    groups = file.root.get("param_shapes")
    if groups is None:
        return []
    if isinstance(groups, Mapping):
        return [groups]
    if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups):
        return groups
    raise CheckpointFormatError(
        f"{file.path}: 'param_shapes' is a {type(groups).__name__}; a list of dictionaries is expected. The file is "
        "damaged, or was not written by DeepSpeed with ZeRO.",
        file=file.path,
    )


def _optimizer(root: Any, file: str) -> Mapping[str, Any]:
    optimizer = root.get("optimizer_state_dict") if isinstance(root, Mapping) else None
    if not isinstance(optimizer, Mapping):
        raise CheckpointFormatError(
            f"{file}: holds no 'optimizer_state_dict'; a ZeRO optimizer file is expected. Another program wrote it, "
            "or it is damaged.",
            file=file,
        )
    return optimizer
