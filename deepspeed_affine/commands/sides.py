"""One folder of a comparison, as what can be compared with any other: tensors of F by parameter and state.

An ordinary checkpoint's tensors are described by the pieces of its conversion plan, a universal folder's lie in its
files as they are. Nothing is read here but metadata, numbers kept as tensors of one element, and what no pattern names
and only the modules hold: whether its shards are one tensor's copies, only their bytes say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from deepspeed_affine.commands.folders import require_folder
from deepspeed_affine.commands.inspect import folder_kind
from deepspeed_affine.commands.layouts import Layouts, describe_layouts
from deepspeed_affine.commands.policies import identical_params
from deepspeed_affine.errors import CheckpointFormatError, Faults
from deepspeed_affine.execute.checkpoint import Checkpoint, read_checkpoint
from deepspeed_affine.execute.compare import stored_storage, stored_tensor
from deepspeed_affine.execute.conversion import ConversionOptions, build_plan
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.model_file import ModelFile, read_model_file
from deepspeed_affine.execute.module_tensors import ModuleTensors
from deepspeed_affine.execute.tensor_files import BARE, Source, TensorFiles
from deepspeed_affine.ir import replicated_map
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.merge import lower_param
from deepspeed_affine.lowering.policy import OnDrift, ScaledStates
from deepspeed_affine.lowering.states import FP32, ShardKey, shape_numel
from deepspeed_affine.lowering.stock_rules import NEWEST_KNOWN, StockRules
from deepspeed_affine.lowering.zero import whole_pieces
from deepspeed_affine.plan.conversion import ConversionPlan, ShardPieces, SourceStorage, TensorFile
from deepspeed_affine.storage.files import ByteReader, absolute, is_file, join
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.refs import TensorRef
from deepspeed_affine.storage.universal import StoredState, UniversalFolder, read_state, scan_universal

__all__ = ["CheckpointSide", "Side", "Tensors", "UniversalSide", "open_side", "readers"]

Name = tuple[str, str]
Number = tuple[str, bytes]

RANK_KEYS = frozenset(
    {
        "module",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "buffer_names",
        "shared_params",
        "sparse_tensor_module_names",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
        "ds_config",
        "ds_version",
        "ds_autoep_layers",
        "autoep_layers",
        "num_experts",
    }
)
"""Entries of a model-state file that say how the run was laid out, or hold one rank's part of it."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors of F by parameter and state, and the storages their pieces name.

    ``flat`` has those that are saved flat as they are saved, with a vocabulary's padding.
    """

    files: Mapping[Name, TensorFile] = field(default_factory=dict)
    storages: tuple[SourceStorage, ...] = ()
    flat: Mapping[Name, TensorFile] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSide:
    """A checkpoint as DeepSpeed saved it."""

    path: str
    checkpoint: Checkpoint
    kind: str = "deepspeed"

    @cached_property
    def layouts(self) -> Layouts:
        return describe_layouts(self.checkpoint)

    @cached_property
    def plan(self) -> ConversionPlan:
        """The plan of converting it, with every choice made so that as much as possible can be compared."""
        options = ConversionOptions(
            StockRules.for_version(NEWEST_KNOWN),
            strict=False,
            # Without tensor parallelism nothing is cut, whether or not anything says so.
            inject_missing_state=self.checkpoint.tp_degree == 1,
            on_drift=OnDrift.FIRST,
            scaled_states=ScaledStates.POWER,
        )
        plan, suspects = build_plan(self.checkpoint, options)
        unnamed = [suspect for suspect in suspects if suspect.unnamed]
        if not unnamed:
            return plan
        with ByteReader() as reader:
            replicated = frozenset(identical_params(plan, unnamed, reader))
        return build_plan(self.checkpoint, replace(options, replicated=replicated))[0]

    @cached_property
    def tensors(self) -> Tensors:
        """Every tensor of the plan, in the shape the model has it."""
        params = self.layouts.params

        def shaped(task: TensorFile) -> TensorFile:
            # As ZeRO-3 without tensor parallelism keeps every parameter.
            param = params.get(task.param)
            if param is None or param.shape is None or param.padded_shape is None or self.checkpoint.stage < 3:
                return task
            if task.shape != (shape_numel(param.padded_shape),):
                return task
            return replace(task, shape=param.shape, map_shape=param.padded_shape)

        files = {(task.param, task.state): shaped(task) for task in self.plan.tensors}
        saved = {(task.param, task.state): task for task in self.plan.tensors}
        flat = {name: task for name, task in saved.items() if task is not files[name]}
        return Tensors(files, self.plan.storages, flat)

    @cached_property
    def extras(self) -> Tensors:
        """What DeepSpeed's own conversion leaves in the model-state files: buffers and frozen parameters of ZeRO-3."""
        checkpoint = self.checkpoint
        if checkpoint.stage < 3:
            return Tensors()
        files = TensorFiles(ConversionOptions(StockRules.for_version(NEWEST_KNOWN)), checkpoint.pp_degree)
        unsplit = ModuleTensors(checkpoint, files, lambda name, shapes: lower_param({keys.VERSION: 0.4}, name, shapes))
        if checkpoint.tp_degree == 1:
            unsplit.add_frozen_partitions()
        first = checkpoint.model_files[0]
        for name in sorted(first.buffers):
            value = (first.module or {}).get(name)
            if isinstance(value, TensorRef) and (name, FP32) not in self.tensors.files:
                shard = ShardPieces(whole_pieces(value, files.storage(value)), "dp 0")
                layout = replicated_map(value.shape, 1)
                files.add(name, FP32, Source(value.dtype, {0: (shard,)}), layout, BARE, dtype="float32")
        return Tensors({(task.param, task.state): task for task in files.tensors}, files.storages)

    @cached_property
    def numbers(self) -> dict[Name, frozenset[Number]] | None:
        """The values of states that are one number; several where ranks disagree."""
        found: dict[Name, frozenset[Number]] = {}
        with ByteReader() as reader:
            for name in self.checkpoint.states:
                for state, scalars in self.checkpoint.states[name].scalars.items():
                    found[name, state] = frozenset(_number(scalar.value, reader) for scalar in scalars)
        return found

    @property
    def aliases(self) -> Mapping[str, str]:
        return _aliases(self.checkpoint.model_files)

    @property
    def model_roots(self) -> Mapping[str, Any]:
        """The files a conversion carries along, by name, as it would write them."""
        found = {file.path: file.root for file in self.plan.objects if "/" not in file.path}
        found |= {file.path: load_pickle(file.source).root for file in self.plan.copies}
        return found

    @property
    def optimizer_state(self) -> Any:
        return next(file.root for file in self.plan.objects if file.path == "zero/optimizer_state.pt")

    @property
    def shared(self) -> dict[str, Any]:
        return _shared(self.checkpoint.model_files[0].root, self.optimizer_state)


@dataclass(frozen=True)
class UniversalSide:
    """A universal folder."""

    path: str
    folder: UniversalFolder
    states: Mapping[Name, StoredState]
    models: tuple[ModelFile, ...]
    kind: str = "universal"

    @cached_property
    def tensors(self) -> Tensors:
        files: dict[Name, TensorFile] = {}
        storages: list[SourceStorage] = []
        for (param, state), stored in self.states.items():
            if stored.tensor is not None and not _is_number(state, stored):
                files[param, state] = stored_tensor(stored.tensor, len(storages), param=param, state=state)
                storages.append(stored_storage(stored.tensor.storage))
        return Tensors(files, tuple(storages))

    @property
    def extras(self) -> Tensors:
        return Tensors()

    @cached_property
    def numbers(self) -> dict[Name, frozenset[Number]] | None:
        """As for a checkpoint; None where the folder keeps them in the optimizer state they share, as from ZeRO-3."""
        with ByteReader() as reader:
            found = {
                name: frozenset({_number(stored.number if stored.tensor is None else stored.tensor, reader)})
                for name, stored in self.states.items()
                if _is_number(name[1], stored)
            }
        return found or None

    @property
    def aliases(self) -> Mapping[str, str]:
        return _aliases(self.models)

    @property
    def model_roots(self) -> Mapping[str, Any]:
        return {file.name: load_pickle(file.path).root for file in self.folder.model_files}

    @property
    def optimizer_state(self) -> Any:
        return None if self.folder.optimizer_state is None else load_pickle(self.folder.optimizer_state).root

    @property
    def shared(self) -> dict[str, Any]:
        return _shared(self.models[0].root if self.models else {}, self.optimizer_state)


Side = CheckpointSide | UniversalSide


def open_side(path: str) -> Side:
    """The folder at ``path``, whole: raises the errors of reading it where files are missing or damaged."""
    require_folder(absolute(path))
    if folder_kind(path) == "deepspeed":
        return CheckpointSide(absolute(path), read_checkpoint(path))
    folder = scan_universal(path)
    _require_listed(folder)
    states = {(file.param, file.state): read_state(file.path) for file in folder.files}
    models = tuple(
        read_model_file(file.path, ShardKey(0, file.mp or 0), file.dp or 0, load_pickle(file.path).root)
        for file in folder.model_files
    )
    return UniversalSide(absolute(path), folder, states, models)


def _require_listed(folder: UniversalFolder) -> None:
    """Raises a fault for each file that the folder's manifest lists and that is not there. A manifest that cannot be
    read is no content, and says nothing."""
    try:
        listed = Manifest.read(folder.path).files if folder.manifest is not None else {}
    except CheckpointFormatError:
        return
    faults = Faults()
    for name in sorted(listed.keys() - folder.sizes.keys()):
        path = join(folder.path, *name.split("/"))
        if not is_file(path):
            faults.add(
                CheckpointFormatError(
                    f"{path}: is missing; {MANIFEST_NAME} lists it. The folder was changed after it was written: "
                    "convert again, or copy again.",
                    param=listed[name].param,
                    file=path,
                )
            )
    faults.raise_if_any()


def readers(side: Side, reader: ByteReader) -> Iterator[tuple[Tensors, PieceReader]]:
    """The side's sets of tensors, each with what reads them."""
    for tensors in (side.tensors, side.extras):
        yield tensors, PieceReader(tensors.storages, reader)


def _is_number(state: str, stored: StoredState) -> bool:
    return stored.tensor is None or (not stored.tensor.shape and state != FP32 and stored.entries is None)


def _number(value: Any, reader: ByteReader) -> Number:
    if isinstance(value, TensorRef):
        return value.dtype, reader.read(value.storage.path, value.byte_offset, value.nbytes)
    return type(value).__name__, repr(value).encode()


def _aliases(models: tuple[ModelFile, ...]) -> dict[str, str]:
    return {alias: name for file in models for alias, name in file.aliases.items()}


def _shared(root: Mapping[str, Any], optimizer_state: Any) -> dict[str, Any]:
    found = {key: value for key, value in root.items() if key not in RANK_KEYS}
    if isinstance(optimizer_state, Mapping):
        found["param_groups"] = _hyperparameters(optimizer_state.get("param_groups"))
    return found


def _hyperparameters(groups: Any) -> Any:
    """Parameter groups without the numbers of their flat tensors, of which another layout has others."""
    if not isinstance(groups, list):
        return groups
    return [
        {key: value for key, value in group.items() if key != "params"} if isinstance(group, Mapping) else group
        for group in groups
    ]
