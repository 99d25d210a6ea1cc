"""A DeepSpeed checkpoint folder as one description: degrees, shapes, and where every state's fragments are stored.

Only metadata is read. Interpretation of the optimizer files is ``lowering``'s; this module opens the right files
and brings together what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults
from deepspeed_affine.execute.attempts import Reading
from deepspeed_affine.execute.model_file import UC_INFO, ModelFile, read_model_file
from deepspeed_affine.execute.unrecorded import sliced_names, with_shapes
from deepspeed_affine.execute.zero_stage import as_stage
from deepspeed_affine.lowering.experts import (
    ExpertLayer,
    NativeExperts,
    as_expert,
    expert_layers,
    folded_expert_rank,
    recorded_expert_rank,
    zero12_expert_rank,
)
from deepspeed_affine.lowering.reading import as_count, as_mapping
from deepspeed_affine.lowering.states import Place, ShardKey, StateTable, read_zero3, read_zero12
from deepspeed_affine.storage.checkpoint_file import load_checkpoint_file
from deepspeed_affine.storage.files import is_file, join
from deepspeed_affine.storage.folder import CheckpointFile, CheckpointFolder, scan_folder, survey_folder
from deepspeed_affine.storage.pt_reader import Loaded
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["DIMENSIONS", "Checkpoint", "ModelFile", "Survey", "read_checkpoint", "survey_checkpoint"]

DIMENSIONS = "checkpoint_parallel_dimensions"
"""Where a model-state file records the degrees of pipeline and tensor parallelism."""

MOST_RANKS = 1 << 16
"""More tensor-parallel ranks than that are a damaged number; files would be missing for nearly all of them."""


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
        first = self.model_files[0]
        info = first.root.get(UC_INFO)
        return None if info is None else as_mapping(info, f"{UC_INFO!r}", first.path)


@dataclass(frozen=True, slots=True)
class Survey:
    """A folder described as far as it can be. ``checkpoint`` holds what its readable files say, ``missing`` the paths
    of files that should be there, and ``faults`` everything for which ``read_checkpoint`` would refuse the folder."""

    checkpoint: Checkpoint
    missing: tuple[str, ...]
    faults: tuple[AffineError, ...]


def read_checkpoint(path: str, load: Callable[[str], Loaded] | None = None) -> Checkpoint:
    """The checkpoint in ``path``, described from metadata alone: no tensor byte is read, nothing is executed.

    ``load`` reads one file.
    Raises CheckpointFormatError listing every missing rank and every file that contradicts the others.
    """
    return _read(scan_folder(path), Reading(load or load_checkpoint_file))


def survey_checkpoint(path: str, load: Callable[[str], Loaded] | None = None) -> Survey:
    """The checkpoint in ``path`` as far as its readable files tell, with every fault; metadata alone is read.

    ``load`` reads one file. Raises CheckpointFormatError only where there is no checkpoint file at all.
    """
    folder, faults = survey_folder(path)
    reading = Reading(load or load_checkpoint_file, faults)
    checkpoint = _read(folder, reading)
    return Survey(checkpoint, tuple(faults.missing), reading.said)


def _read(folder: CheckpointFolder, reading: Reading) -> Checkpoint:
    stage = reading.attempt(3 if folder.zero_model_files else 1, _zero_stage, folder, reading)
    roots = _load_model_files(folder, stage, reading)
    tp_degree, pp_degree, dp_degree = reading.attempt(_degrees_by_name(folder), _degrees, folder, stage, roots)
    if reading.is_survey and tp_degree > MOST_RANKS:
        tp_degree, pp_degree, dp_degree = _degrees_by_name(folder)
    model_files = _model_files(roots, tp_degree, reading)
    experts: dict[str, ExpertLayer] = reading.attempt({}, _experts, model_files)
    expert_tensors = {} if experts else _expert_tensors(folder, reading)
    if 0 < stage < 3 and not all(file.groups for file in model_files):
        model_files = with_shapes(model_files, expert_tensors, _sliced_names(folder, reading))
    recorded = _shapes(model_files, tp_degree, reading)
    native = reading.attempt(NativeExperts({}), NativeExperts.from_names, expert_tensors, recorded or expert_tensors)
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
    _read_states(checkpoint, reading)
    return checkpoint


def _zero_stage(folder: CheckpointFolder, reading: Reading) -> int:
    if not folder.optim_files:
        if is_file(join(folder.path, "zero", "optimizer_state.pt")):
            raise CheckpointFormatError(
                f"{folder.path}: is a universal checkpoint already; a folder saved by a DeepSpeed engine is expected. "
                "Pass the folder it was converted from.",
                file=folder.path,
            )
        return 0
    files = [file.path for file in folder.optim_files]
    for file in files[:-1] if reading.is_survey else ():
        # A survey asks the next file where this one is damaged, which is said when its states are read.
        with suppress(AffineError):
            return _stage_in(file, reading)
    return _stage_in(files[-1] if reading.is_survey else files[0], reading)


def _stage_in(file: str, reading: Reading) -> int:
    optimizer = _optimizer(reading.load(file).root, file)
    stage = optimizer.get("zero_stage", 1)
    number = as_stage(stage)
    # Without ZeRO there are no ZeRO files, except those of the bf16 optimizer, which records no stage.
    if number is None or not 1 <= number <= 3:
        raise CheckpointFormatError(
            f"{file}: 'zero_stage' is {stage!r}; a number from 1 to 3 is expected. The file is damaged: use another "
            "checkpoint.",
            file=file,
        )
    return number


def _load_model_files(
    folder: CheckpointFolder, stage: int, reading: Reading
) -> list[tuple[CheckpointFile, Mapping[str, Any]]]:
    def root(file: CheckpointFile) -> Mapping[str, Any] | None:
        return as_mapping(reading.load(file.path).root, "the model state", file.path)

    files = folder.zero_model_files if stage == 3 else folder.model_files
    read = ((file, reading.attempt(None, root, file)) for file in files)
    return [(file, state) for file, state in read if state is not None]


def _degrees(
    folder: CheckpointFolder, stage: int, roots: Sequence[tuple[CheckpointFile, Mapping[str, Any]]]
) -> tuple[int, int, int]:
    if not roots:
        raise CheckpointFormatError(
            f"{folder.path}: has no model-state file for ZeRO stage {stage}; files of another stage are present. Copy "
            "the whole folder of one save.",
            file=folder.path,
        )
    if stage == 3:
        return folder.mp_degree, 1, folder.dp_degree
    stages = folder.mp_degree
    recorded: dict[tuple[int, int], str] = {}
    for file, root in roots:
        dims = root.get(DIMENSIONS)
        if dims is not None:
            dims = as_mapping(dims, f"{DIMENSIONS!r}", file.path)
            pp, tp = (
                as_count(dims.get(key), f"{key!r} of {DIMENSIONS!r}", file.path, least=1)
                for key in ("pp_degree", "tp_degree")
            )
            recorded.setdefault((pp, tp), file.path)
    if len(recorded) > 1:
        raise CheckpointFormatError(
            f"{folder.path}: the model-state files record different degrees (pipeline, tensor): {sorted(recorded)}; "
            "one is expected. The folder mixes files of several runs."
        )
    if recorded:
        ((pp, tp),) = recorded
        if stages == 1 and all(root.get("mp_world_size") == 1 for _, root in roots):
            # DeepSpeed 0.19.8 records the sequence-parallel degree here, which cuts no weight.
            pp = tp = 1
    else:
        tp = len({file.mp for file in folder.layer_files}) or stages
        pp = stages // tp
    if pp * tp != stages:
        raise CheckpointFormatError(
            f"{folder.path}: {stages} model-parallel ranks are present, but {pp} pipeline stages of {tp} "
            f"tensor-parallel ranks need {pp * tp}. Files are missing: copy the whole folder."
        )
    return tp, pp, max(folder.dp_degree, 1)


def _degrees_by_name(folder: CheckpointFolder) -> tuple[int, int, int]:
    """What a survey assumes where the files do not agree on the degrees, or state absurd ones."""
    present = len({file.mp for file in folder.files})
    tp = len({file.mp for file in folder.layer_files}) or min(folder.mp_degree, max(present, MOST_RANKS))
    return tp, max(1, folder.mp_degree // tp), max(folder.dp_degree, 1)


def _model_files(
    roots: Sequence[tuple[CheckpointFile, Mapping[str, Any]]], tp_degree: int, reading: Reading
) -> tuple[ModelFile, ...]:
    files: list[ModelFile] = []
    for file, root in roots:
        shard = ShardKey(*divmod(file.mp or 0, tp_degree))
        read = reading.attempt(None, read_model_file, file.path, shard, file.dp or 0, root)
        files += [read] if read is not None else []
    return tuple(sorted(files, key=lambda item: (item.shard, item.rank)))


def _shapes(
    model_files: Sequence[ModelFile], tp_degree: int, reading: Reading
) -> dict[str, tuple[tuple[int, ...] | None, ...]]:
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
    reading.settle(faults)
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


def _expert_tensors(folder: CheckpointFolder, reading: Reading) -> dict[str, dict[int, Any]]:
    def root(file: CheckpointFile) -> Mapping[str, Any]:
        return as_expert(reading.load(file.path).root, file.expert, file=file.path)

    found: dict[str, dict[int, Any]] = {}
    nothing: Mapping[str, Any] = {}
    for file in folder.expert_files:
        for name, value in reading.attempt(nothing, root, file).items():
            if isinstance(value, TensorRef):
                found.setdefault(name, {})[file.mp or 0] = value
    return found


def _sliced_names(folder: CheckpointFolder, reading: Reading) -> frozenset[str]:
    nothing: frozenset[str] = frozenset()
    found = (
        reading.attempt(nothing, lambda path: sliced_names(reading.load(path).root), f.path) for f in folder.optim_files
    )
    return nothing.union(*found)


def _read_states(checkpoint: Checkpoint, reading: Reading) -> None:
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
        if model_file is None and reading.is_survey:
            # That file is missing or damaged, which is said already. Another data-parallel rank's says the same, and
            # slices of ZeRO 1 and 2 are named without any.
            model_file = next(iter(models.values()), None) or read_model_file(file.path, shard, 0, {})
            if checkpoint.stage == 3 and not models:
                continue
        elif model_file is None:
            faults.add(
                CheckpointFormatError(
                    f"{file.path}: no model-state file belongs to it (model-parallel rank {file.mp}); copy the "
                    "whole folder.",
                    file=file.path,
                )
            )
            continue
        try:
            root = reading.load(file.path).root
            optimizer = _optimizer(root, file.path)
            place = _placement(checkpoint, root, model_file, shard, dp_rank, file.path)
            if checkpoint.stage == 3:
                read_zero3(
                    checkpoint.states,
                    optimizer,
                    model_file.groups,
                    place,
                    checkpoint.dp_degree,
                    file=file.path,
                    model_file=model_file.path,
                )
            else:
                turns = model_file.turns() if checkpoint.dp_degree > 1 else None
                read_zero12(checkpoint.states, optimizer, place, model_file.shapes, file=file.path, turns=turns)
            inner = optimizer["optimizer_state_dict" if checkpoint.stage == 3 else "base_optimizer_state"]
            checkpoint.states.add_hyperparameters(shard, inner.get("param_groups"), file.path)
        except AffineError as fault:
            faults.add(fault)
    reading.settle(faults)


def _placement(
    checkpoint: Checkpoint, root: Mapping[str, Any], model: ModelFile, shard: ShardKey, dp_rank: int, file: str
) -> Callable[[str], Place]:
    """Which shard a file's fragments belong to: its TP rank's, or for experts its expert-parallel rank's."""
    experts = checkpoint.experts
    folding = root.get("folding")
    records = {entry["expert_key_prefix"]: entry for entry in model.autoep or ()} if experts else {}
    config = model.root.get("ds_config")
    data_first = bool(config.get("use_data_before_expert_parallelism")) if isinstance(config, Mapping) else False

    def place(name: str) -> Place:
        layer = experts.get(name)
        if layer is None:
            native = checkpoint.native_experts.place(name, dp_rank, checkpoint.dp_degree, data_first)
            return Place(native[0], shard, native[1]) if native else Place(name, shard, dp_rank)
        if folding is not None:
            ep_rank, rank = folded_expert_rank(folding, name, layer, file=file)
            return Place(name, ShardKey(shard.pp, ep_rank), rank)
        if checkpoint.stage == 3:
            ep_rank, rank = recorded_expert_rank(records[layer.prefix], layer, file=model.path)
            return Place(name, ShardKey(shard.pp, ep_rank), rank)
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


def _optimizer(root: Any, file: str) -> Mapping[str, Any]:
    optimizer = root.get("optimizer_state_dict") if isinstance(root, Mapping) else None
    if not isinstance(optimizer, Mapping):
        raise CheckpointFormatError(
            f"{file}: holds no 'optimizer_state_dict'; a ZeRO optimizer file is expected. Another program wrote it, "
            "or it is damaged.",
            file=file,
        )
    return optimizer
