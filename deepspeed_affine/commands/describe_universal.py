"""A universal folder in plain values: its parameters, their states, and what is missing or damaged.

The same document as for an ordinary checkpoint, as far as the keys apply. No tensor is read, only numbers kept as
tensors of one element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.commands.describe import FORMAT, Facts, distinct, fault_entries, leftovers
from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults
from deepspeed_affine.execute.model_file import UC_INFO, ModelFile, read_model_file
from deepspeed_affine.lowering.experts import NATIVE_EXPERT
from deepspeed_affine.lowering.states import FP32, ShardKey, shape_numel
from deepspeed_affine.lowering.uc_info import metadata_version
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.files import ByteReader, join, name_of
from deepspeed_affine.storage.folder import CheckpointFile, survey_folder
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest
from deepspeed_affine.storage.refs import TensorRef
from deepspeed_affine.storage.universal import (
    OPTIMIZER_STATE,
    StoredState,
    UniversalFolder,
    read_number,
    read_state,
    scan_universal,
)

__all__ = ["describe_universal"]


@dataclass(frozen=True, slots=True)
class _Params:
    """What the files of parameters hold, by parameter and state; a damaged file is in neither."""

    tensors: Mapping[str, Mapping[str, StoredState]]
    values: Mapping[str, frozenset[int | float]]


def describe_universal(path: str, *, with_params: bool = False) -> dict[str, Any]:
    """The description of the universal folder at ``path``; raises CheckpointFormatError where it is none."""
    folder = scan_universal(path)
    facts, faults = Facts(), Faults()
    params = _read_params(folder, faults)
    missing: list[str] = []
    models = _read_models(folder, facts, missing, faults)
    _read_optimizer_state(folder, facts, faults)
    expected = _expected(models)
    manifest = _manifest(folder, missing, faults)
    if manifest is None or not manifest["readable"]:
        missing += _missing(folder, expected, faults)
    said = distinct(faults, {join(folder.path, *name.split("/")) for name, size in folder.sizes.items() if not size})
    info = models[0].root.get(UC_INFO) if models else None
    description: dict[str, Any] = {
        "format": FORMAT,
        "folder": folder.path,
        "kind": "universal",
        "complete": not said,
        "missing": sorted(set(missing)),
        "damaged": _damaged(folder, said),
        "versions": {
            "deepspeed": sorted(facts.versions),
            "universal_checkpoint": _version(info, faults),
            "affine_map": isinstance(info, Mapping) and bool(info.get("affine_map")),
        },
        "manifest": manifest,
        "steps": {
            key: value
            for key in ("global_steps", "global_samples")
            if models and type(value := models[0].root.get(key)) is int
        },
        "files": _files(folder),
        "parameters": _counted(folder, params),
        "states": _states(params),
        "weights_only": sorted(name for name, states in folder.states.items() if set(states) == {FP32}),
        "uneven_states": _uneven(folder),
        "leftovers": leftovers(folder.path, folder.others),
    }
    if with_params:
        description["params"] = [_param(folder, params, name) for name in folder.states]
    description["faults"] = fault_entries(said)
    return description


def _read_params(folder: UniversalFolder, faults: Faults) -> _Params:
    tensors: dict[str, dict[str, StoredState]] = {}
    values: dict[str, set[int | float]] = defaultdict(set)
    with ByteReader() as reader:
        for file in folder.files:
            try:
                found = read_state(file.path)
                tensors.setdefault(file.param, {})[file.state] = found
                number = found.number
                if found.tensor is not None and not found.tensor.shape and file.state != FP32:
                    number = read_number(found.tensor, reader)
                if number is not None:
                    values[file.state].add(number)
            except AffineError as fault:
                faults.add(fault)
    return _Params(tensors, {state: frozenset(found) for state, found in values.items()})


def _read_models(folder: UniversalFolder, facts: Facts, missing: list[str], faults: Faults) -> list[ModelFile]:
    if folder.model_files:
        try:
            _, found = survey_folder(folder.path)
            faults.extend(found)
            missing += [name_of(path) for path in found.missing]
        except AffineError as fault:
            faults.add(fault)
    else:
        faults.add(
            CheckpointFormatError(
                f"{folder.path}: holds no model-state file such as mp_rank_00_model_states.pt; DeepSpeed loads a "
                "universal checkpoint from one. Copy it from the checkpoint that was converted, or convert again.",
                file=folder.path,
            )
        )
    models = []
    for file in folder.model_files:
        try:
            models.append(_model(file, facts))
        except AffineError as fault:
            faults.add(fault)
    return models


def _model(file: CheckpointFile, facts: Facts) -> ModelFile:
    return read_model_file(file.path, ShardKey(0, file.mp or 0), file.dp or 0, facts.load(file.path).root)


def _read_optimizer_state(folder: UniversalFolder, facts: Facts, faults: Faults) -> None:
    if folder.optimizer_state is None:
        path = join(folder.path, *OPTIMIZER_STATE.split("/"))
        faults.add(
            CheckpointFormatError(
                f"{path}: is missing; expected, because it holds what all parameters share. The conversion did not "
                "finish, or the copy: convert or copy again.",
                file=path,
            )
        )
        return
    try:
        facts.load(folder.optimizer_state)
    except AffineError as fault:
        faults.add(fault)


def _expected(models: Sequence[ModelFile]) -> list[str]:
    """The parameters with elements that the model-state files name, but for experts, which are renumbered."""
    names: dict[str, None] = {}
    for file in models:
        for name, shape in file.shapes.items():
            if shape_numel(shape) and not NATIVE_EXPERT.fullmatch(name):
                names[name] = None
    return list(names)


def _missing(folder: UniversalFolder, expected: Sequence[str], faults: Faults) -> list[str]:
    """Files that should be there, where no manifest lists them: weights of every parameter the model-state files name,
    and states that parameters with the same ones have."""
    missing = [OPTIMIZER_STATE] if folder.optimizer_state is None else []
    for name in sorted({*expected, *folder.states}):
        if FP32 not in folder.states.get(name, {}):
            missing.append(f"zero/{name}/{FP32}.pt")
    missing += [f"zero/{name}/{state}.pt" for name, states in _uneven(folder).items() for state in states]
    for relative in missing:
        if relative == OPTIMIZER_STATE:
            continue
        name = relative.removeprefix("zero/").rpartition("/")[0]
        reason = (
            f"the model-state files name parameter {name!r}"
            if name not in folder.states
            else f"parameter {name!r} has other states, and parameters like it have this one too"
        )
        path = join(folder.path, *relative.split("/"))
        faults.add(
            CheckpointFormatError(
                f"{path}: is missing; expected, because {reason}. The conversion did not finish, or the copy: convert "
                "or copy again.",
                param=name,
                file=path,
            )
        )
    return missing


def _uneven(folder: UniversalFolder) -> dict[str, list[str]]:
    """States a parameter lacks while another has those it has and more. Weights alone are no such case: frozen
    parameters, buffers and plain SGD keep nothing else. Optimizers of different kinds keep different states."""
    kept = {name: frozenset(states) - {FP32} for name, states in folder.states.items()}
    sets = {states for states in kept.values() if states}
    found = {}
    for name, states in kept.items():
        larger = [other for other in sets if states < other]
        if states and larger:
            found[name] = sorted(max(larger, key=len) - states)
    return found


def _manifest(folder: UniversalFolder, missing: list[str], faults: Faults) -> dict[str, Any] | None:
    """What the manifest says, as far as names and sizes can contradict it."""
    if folder.manifest is None:
        return None
    try:
        manifest = Manifest.read(folder.path)
    except AffineError as fault:
        faults.add(fault)
        return {"readable": False, "files": None, "parameters": None, "software": {}}
    for name, listed in manifest.files.items():
        found = folder.sizes.get(name)
        if found == listed.nbytes:
            continue
        path = join(folder.path, *name.split("/"))
        if found is None and name not in missing:
            missing.append(name)
        fact = "is missing" if found is None else f"has {found} bytes"
        faults.add(
            CheckpointFormatError(
                f"{path}: {fact}; {MANIFEST_NAME} lists it with {listed.nbytes} bytes. The folder was changed after it "
                "was written: convert again.",
                param=listed.param,
                file=path,
            )
        )
    software = manifest.identity.get("software")
    return {
        "readable": True,
        "files": len(manifest.files),
        "parameters": len(manifest.parameters),
        "software": dict(software) if isinstance(software, Mapping) else {},
    }


def _damaged(folder: UniversalFolder, faults: Sequence[AffineError]) -> list[dict[str, str]]:
    start = f"{folder.path}/"
    found: dict[str, str] = {}
    for fault in faults:
        name = (fault.file or "").removeprefix(start)
        if name in folder.sizes:
            found.setdefault(name, fault.message.removeprefix(f"{fault.file}: "))
    return [{"file": name, "reason": found[name]} for name in sorted(found)]


def _version(info: Any, faults: Faults) -> float | None:
    if not isinstance(info, Mapping):
        return None
    try:
        return metadata_version(info.get("universal_checkpoint_version"))
    except AffineError as fault:
        faults.add(fault)
        return None


def _files(folder: UniversalFolder) -> dict[str, dict[str, int]]:
    groups = {
        "model": [file.name for file in folder.model_files],
        "parameter": [file.name for file in folder.files],
        "optimizer": [OPTIMIZER_STATE] if folder.optimizer_state else [],
        "manifest": [MANIFEST_NAME] if folder.manifest else [],
    }
    return {
        kind: {"count": len(names), "bytes": sum(folder.sizes[name] for name in names)}
        for kind, names in groups.items()
        if names
    }


def _counted(folder: UniversalFolder, params: _Params) -> dict[str, int]:
    weights = [states[FP32].tensor for states in params.tensors.values() if FP32 in states]
    found = [tensor for tensor in weights if tensor is not None]
    return {
        "count": len(folder.states),
        "elements": sum(tensor.numel for tensor in found),
        "bytes": sum(tensor.numel * item_size(tensor.dtype) for tensor in found),
    }


def _states(params: _Params) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for states in params.tensors.values():
        for state, stored in states.items():
            entry = found.setdefault(state, {"parameters": 0, "dtypes": [], "values": None})
            entry["parameters"] += 1
            if isinstance(stored.tensor, TensorRef):
                entry["dtypes"] = sorted({*entry["dtypes"], stored.tensor.dtype})
    for state, values in params.values.items():
        found[state]["values"] = sorted(values)
    return {state: found[state] for state in sorted(found, key=lambda key: (key != FP32, key))}


def _param(folder: UniversalFolder, params: _Params, name: str) -> dict[str, Any]:
    stored = params.tensors.get(name, {})
    weights = stored.get(FP32)
    tensor = None if weights is None else weights.tensor
    return {
        "name": name,
        "shape": None if tensor is None else list(tensor.shape),
        "dtype": None if tensor is None else tensor.dtype,
        "entries": sorted(weights.entries) if weights is not None and weights.entries is not None else None,
        "states": {
            state: {
                "bytes": file.size,
                "dtype": one.tensor.dtype
                if (one := stored.get(state)) is not None and one.tensor is not None
                else None,
            }
            for state, file in folder.states[name].items()
        },
    }
