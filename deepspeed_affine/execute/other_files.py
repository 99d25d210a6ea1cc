"""The output files that are not one tensor: the shared optimizer state, and model-state files kept or amended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.execute.model_file import AUTOEP_KEYS, UC_INFO
from deepspeed_affine.execute.tensor_files import source_storage
from deepspeed_affine.lowering.reading import refuse
from deepspeed_affine.plan.conversion import CopiedFile, ObjectFile, SourceStorage
from deepspeed_affine.storage.files import file_size, name_of
from deepspeed_affine.storage.pt_reader import Loaded, load_pickle

__all__ = ["copied_files", "object_files", "optimizer_state"]

SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")
LAYER_FIELDS = ("moe_layer_id", "module_path", "expert_key_prefix", "num_experts", "num_local_experts", "ep_size")
EXPERT_PATTERNS = "expert_parameter_patterns"


def object_files(checkpoint: Checkpoint) -> list[ObjectFile]:
    """``zero/optimizer_state.pt``, and with experts every model-state file with the layers written into it."""
    size = 0
    storages: tuple[SourceStorage, ...] = ()
    if checkpoint.stage == 3 and checkpoint.optimizer_file is not None:
        # The file is the first rank's whole optimizer state, tensors included.
        size = file_size(checkpoint.optimizer_file)
        storages = _storages(checkpoint.optimizer_file)
    files = [ObjectFile("zero/optimizer_state.pt", optimizer_state(checkpoint), size, storages)]
    if checkpoint.experts:
        files += [
            ObjectFile(name_of(path), _with_layers(checkpoint, path), file_size(path), _storages(path))
            for path in _model_paths(checkpoint)
        ]
    return files


def copied_files(checkpoint: Checkpoint) -> tuple[CopiedFile, ...]:
    """The model-state files that go into the output as they are."""
    if checkpoint.experts:
        return ()
    return tuple(CopiedFile(name_of(path), path, file_size(path), _storages(path)) for path in _model_paths(checkpoint))


def _storages(path: str) -> tuple[SourceStorage, ...]:
    return tuple(source_storage(ref) for ref in load_pickle(path).archive.storages.values() if ref.nbytes)


def _model_paths(checkpoint: Checkpoint) -> list[str]:
    return sorted(file.path for file in checkpoint.model_files)


def optimizer_state(checkpoint: Checkpoint, load: Callable[[str], Loaded] = load_pickle) -> dict[str, Any]:
    """What ``zero/optimizer_state.pt`` holds.

    ``load`` reads a file. What it returns is edited: where others hold parts of it, it must load anew, as it does.
    """
    if checkpoint.optimizer_file is None:
        return _without_zero(checkpoint, load)
    file = checkpoint.optimizer_file
    state = load(file).root["optimizer_state_dict"]
    if checkpoint.stage == 3:
        state["param_groups"] = _param_groups(state["optimizer_state_dict"], file)
        return dict(state) if type(state) is not dict else state
    for key, value in (("partition_count", checkpoint.dp_degree), ("group_paddings", 0)):
        found = state.get(key)
        if found:
            if not isinstance(found, (list, tuple)):
                raise refuse(file, f"{key!r}", found, "a list with one number a group")
            state[key] = [value] * len(found)
    kept = {key: value for key, value in state.items() if key not in SHARDED}
    kept["param_groups"] = _param_groups(state["base_optimizer_state"], file)
    return kept


def _param_groups(optimizer: Mapping[str, Any], file: str) -> Any:
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list):
        raise refuse(file, "'param_groups' of the optimizer", groups, "a list of hyperparameter dictionaries")
    return groups


def _without_zero(checkpoint: Checkpoint, load: Callable[[str], Loaded]) -> dict[str, Any]:
    """The little DeepSpeed's universal loader asks for, from a model-state file saved without ZeRO."""
    path = checkpoint.model_files[0].path
    optimizer = load(path).root.get("optimizer")
    while isinstance(optimizer, Mapping) and "param_groups" not in optimizer:
        optimizer = optimizer.get("optimizer_state_dict")
    if not isinstance(optimizer, Mapping):
        raise CheckpointFormatError(
            f"{path}: holds no optimizer parameter groups; a checkpoint saved by an engine with an optimizer is "
            "expected. To export weights only, use zero_to_fp32 or the export command.",
            file=path,
        )
    return {"param_groups": optimizer["param_groups"]}


def _with_layers(checkpoint: Checkpoint, path: str) -> Any:
    root = load_pickle(path).root
    info = root.setdefault(UC_INFO, {})
    if not isinstance(info, dict):
        raise refuse(path, f"{UC_INFO!r}", info, "a dictionary")
    if checkpoint.stage == 3:
        info[EXPERT_PATTERNS] = [r".*\.experts\.w[123]$"]
        info[AUTOEP_KEYS[0]] = next((root[key] for key in AUTOEP_KEYS if root.get(key) is not None), None)
        return root
    info[EXPERT_PATTERNS] = [r"\.experts\.w[123]$"]
    layers: dict[str, dict[str, Any]] = {}
    for file in checkpoint.model_files:
        # Read anew, so that no string of the amended graph is shared with the original one.
        for entry in file.autoep or ():
            layers.setdefault(
                entry["expert_key_prefix"], {field: entry[field] for field in LAYER_FIELDS if field in entry}
            )
    info[AUTOEP_KEYS[0]] = list(layers.values())
    return root
