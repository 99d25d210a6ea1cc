"""A checkpoint folder in plain values: everything its metadata tells, whatever is missing or damaged.

The result is the JSON document of ``ds_affine inspect``; its keys are described in docs/commands.md. No tensor is
read, only numbers that optimizers keep as tensors of one element, such as ``step``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from deepspeed_affine.commands.layouts import Layouts, ParamLayout, describe_layouts
from deepspeed_affine.errors import AffineError
from deepspeed_affine.execute.checkpoint import DIMENSIONS, Checkpoint, Survey, survey_checkpoint
from deepspeed_affine.execute.conversion import ConversionOptions, build_plan, patterns_without_parameter
from deepspeed_affine.lowering.states import FP32, ParamStates
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.files import ByteReader, is_folder, join, name_of
from deepspeed_affine.storage.pt_reader import Loaded, load_pickle
from deepspeed_affine.storage.refs import TensorRef
from deepspeed_affine.storage.universal import read_number

__all__ = ["FORMAT", "Facts", "describe_checkpoint", "distinct", "fault_entries", "leftovers"]

FORMAT = 1
"""Version of the document; a key never changes its meaning without a new one."""

KINDS = {
    "model": "model",
    "zero_model": "model",
    "zero_optim": "optimizer",
    "layer": "layer",
    "expert": "expert",
    "expert_optim": "expert_optimizer",
}
TEMPORARY = (".tmp", ".temp", ".part", ".partial", ".swp", "~", ".bak", ".lock")
INJECT, NO_STRICT = "--inject_missing_state", "--no_strict"
RELAXED = ((), (INJECT,), (NO_STRICT,), (INJECT, NO_STRICT))


class Facts:
    """What the files say of themselves, noted while they are read."""

    def __init__(self) -> None:
        self.versions: Counter[str] = Counter()
        self.storages = 0
        self.without_crc = 0
        self._asked: set[str] = set()

    def load(self, path: str) -> Loaded:
        """The file at ``path``, as ``load_pickle`` reads it."""
        known = path in self._asked
        self._asked.add(path)
        loaded = load_pickle(path)
        if not known:
            found = loaded.root.get("ds_version") if isinstance(loaded.root, Mapping) else None
            self.versions.update([found] if isinstance(found, str) else [])
            stored = [storage for storage in loaded.archive.storages.values() if storage.nbytes]
            self.storages += len(stored)
            self.without_crc += sum(storage.crc32 is None for storage in stored)
        return loaded

    def faults_of_others(self, paths: Iterable[str]) -> list[AffineError]:
        """The faults of those of ``paths`` that nobody has read yet."""
        faults = []
        for path in paths:
            if path not in self._asked:
                try:
                    self.load(path)
                except AffineError as fault:
                    faults.append(fault)
        return faults


def describe_checkpoint(path: str, *, with_params: bool = False) -> dict[str, Any]:
    """The description of the DeepSpeed checkpoint in ``path``; raises CheckpointFormatError where there is none."""
    facts = Facts()
    survey = survey_checkpoint(path, facts.load)
    checkpoint = survey.checkpoint
    layouts = describe_layouts(checkpoint)
    files = [file.path for file in checkpoint.folder.files]
    faults = [*survey.faults, *facts.faults_of_others(files)]
    faults += [layouts.fault] if layouts.fault else []
    faults = distinct(faults, {file.path for file in checkpoint.folder.files if not file.size})
    names = {file: name_of(file) for file in files}
    damaged: dict[str, str] = {}
    for fault in faults:
        if fault.file in names:
            damaged.setdefault(names[fault.file], fault.message.removeprefix(f"{fault.file}: "))
    description: dict[str, Any] = {
        "format": FORMAT,
        "folder": checkpoint.folder.path,
        "kind": "deepspeed",
        "complete": not faults,
        "conversion": _conversion(survey, faults),
        "missing": sorted(name_of(file) for file in survey.missing),
        "damaged": [{"file": name, "reason": reason} for name, reason in sorted(damaged.items())],
        "versions": _versions(facts, layouts),
        "topology": _topology(checkpoint),
        "steps": _steps(checkpoint),
        "files": _files(checkpoint),
        "checksums": {"storages": facts.storages, "without": facts.without_crc},
        **_parameters(checkpoint, layouts),
        "experts": _experts(checkpoint),
        "leftovers": leftovers(checkpoint.folder.path, checkpoint.folder.other_names, ("offloaded_tensors",)),
        "offloaded": list(checkpoint.folder.offloaded),
    }
    if with_params:
        description["params"] = [_param(checkpoint, param) for param in layouts.params.values()]
    description["faults"] = fault_entries(faults)
    return description


def distinct(faults: Iterable[AffineError], empty: Collection[str]) -> list[AffineError]:
    """The faults, each once; of an empty file only the first, since every reader says it in its own words."""
    kept: dict[str, AffineError] = {}
    said: set[str] = set()
    for fault in faults:
        if fault.file is None or fault.file not in said or fault.file not in empty:
            kept.setdefault(fault.message, fault)
        said.add(fault.file or "")
    return list(kept.values())


def fault_entries(faults: Iterable[AffineError]) -> list[dict[str, Any]]:
    """Each fault as plain values."""
    return [fault.to_dict() for fault in faults]


def leftovers(folder: str, names: Iterable[str], expected: Sequence[str] = ()) -> dict[str, list[str]]:
    """What belongs to no checkpoint: folders, files some program was writing, and other files."""
    found: dict[str, list[str]] = {"folders": [], "temporary": [], "files": []}
    for name in names:
        plain = name.rstrip("/")
        if plain in expected:
            continue
        temporary = plain.endswith(TEMPORARY) or ".tmp" in plain or plain == "tmp"
        inside = name.endswith("/") or is_folder(join(folder, *plain.split("/")))
        found["temporary" if temporary else "folders" if inside else "files"].append(plain)
    return found


def _conversion(survey: Survey, faults: Sequence[AffineError]) -> dict[str, Any]:
    """What the converter would do, from metadata alone: whether copies agree is found out when they are read."""
    reasons = [fault.message for fault in faults]
    rules = StockRules.installed()
    for relaxed in RELAXED if not faults else ():
        if INJECT in relaxed and survey.checkpoint.tp_degree > 1:
            # It would convert, by guessing that every parameter is cut along its rows.
            continue
        options = ConversionOptions(rules, strict=NO_STRICT not in relaxed, inject_missing_state=INJECT in relaxed)
        try:
            plan, _ = build_plan(survey.checkpoint, options)
        except AffineError as fault:
            reasons += [] if relaxed else [each.message for each in fault.faults]
            continue
        return {
            "would": "convert",
            "options": list(relaxed),
            "reasons": reasons,
            "files": len(plan.paths),
            "bytes_out": plan.bytes_out,
            "notes": list(plan.notes),
        }
    return {"would": "refuse", "options": [], "reasons": reasons, "files": None, "bytes_out": None, "notes": []}


def _versions(facts: Facts, layouts: Layouts) -> dict[str, Any]:
    info = layouts.info
    return {
        "deepspeed": sorted(facts.versions),
        "universal_checkpoint": None if info is None else info.version,
        "affine_map": info is not None and bool(info.maps),
    }


def _topology(checkpoint: Checkpoint) -> dict[str, Any]:
    folder = checkpoint.folder
    recorded = any(DIMENSIONS in file.root for file in checkpoint.model_files)
    if checkpoint.stage == 3:
        parallel = "the names of the ZeRO files, which have no pipeline under ZeRO-3"
    elif recorded:
        parallel = f"{DIMENSIONS} in the model-state files"
    elif folder.layer_files:
        parallel = "the names of the layer files"
    else:
        parallel = "the number of model-state files, taken for tensor-parallel ranks"
    layers = {layer.ep_size for layer in checkpoint.experts.values()}
    native = {count // local for count, local in checkpoint.native_experts.layers.values()}
    return {
        "zero_stage": checkpoint.stage,
        "tp": checkpoint.tp_degree,
        "pp": checkpoint.pp_degree,
        "dp": checkpoint.dp_degree,
        "ep": max(layers | native, default=1),
        "from": {
            "zero_stage": "zero_stage in the optimizer files" if folder.optim_files else "no optimizer file of ZeRO",
            "tp": parallel,
            "pp": parallel,
            "dp": "dp_world_size in the model-state files and the names of the ZeRO files"
            if folder.dp_degree
            else "no file of a data-parallel rank",
            "ep": "ds_autoep_layers in the model-state files"
            if layers
            else "the numbers of the experts in files and optimizers"
            if native
            else "no expert record",
        },
    }


def _steps(checkpoint: Checkpoint) -> dict[str, Any]:
    root = checkpoint.model_files[0].root if checkpoint.model_files else {}
    return {key: value for key in ("global_steps", "global_samples") if type(value := root.get(key)) is int}


def _files(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    counted: dict[str, dict[str, int]] = {}
    for file in checkpoint.folder.files:
        entry = counted.setdefault(KINDS[file.kind], {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += file.size
    return counted


def _parameters(checkpoint: Checkpoint, layouts: Layouts) -> dict[str, Any]:
    params = layouts.params
    kinds: dict[str, list[str]] = defaultdict(list)
    for param in params.values():
        kinds[param.kind].append(param.name)
    counted = [param for param in params.values() if param.kind in ("optimized", "expert", "frozen")]
    rules = Counter(param.rule for param in counted if param.rule is not None)
    optimized = [param for param in counted if param.kind != "frozen" and (param.numel or param.layout is None)]
    return {
        "parameters": {
            "count": len(counted),
            "elements": sum(param.numel for param in counted),
            "bytes": sum(param.numel * item_size(_dtype(checkpoint, param.name) or "float32") for param in counted),
            "optimized": len(kinds["optimized"]) + len(kinds["expert"]),
            "rules": dict(rules.most_common()),
            "undescribed": [param.name for param in counted if param.layout is None],
        },
        "layout_faults": fault_entries(param.fault for param in params.values() if param.fault is not None),
        "states": _states(checkpoint),
        "without_fragments": [param.name for param in optimized if param.name not in checkpoint.states],
        "incomplete": [param.name for param in optimized if _is_incomplete(checkpoint, param)],
        "frozen": kinds["frozen"],
        "buffers": kinds["buffer"],
        "tied": {name: params[name].tied_to for name in kinds["tied"]},
        "unused_patterns": _unused(checkpoint, layouts),
        "ambiguous_patterns": [
            {"param": one.param, "entry": one.entry, "patterns": list(one.patterns), "decided": one.decided}
            for one in layouts.ambiguities()
        ],
    }


def _unused(checkpoint: Checkpoint, layouts: Layouts) -> list[str]:
    return [] if layouts.info is None else list(patterns_without_parameter(checkpoint, layouts.info, layouts.lowered))


def _states(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Every state by name: how many parameters have it, and what it is."""
    found: dict[str, dict[str, Any]] = {}
    values: dict[str, set[int | float]] = defaultdict(set)
    with ByteReader() as reader:
        read: dict[tuple[str, int], int | float | None] = {}
        for name in checkpoint.states:
            states = checkpoint.states[name]
            for state in (*states.tensors, *states.whole, *states.scalars):
                entry = found.setdefault(state, {"parameters": 0, "dtypes": [], "values": None})
                entry["parameters"] += 1
                entry["dtypes"] = sorted({*entry["dtypes"], *_dtypes(states, state)})
            for state, scalars in states.scalars.items():
                for scalar in scalars:
                    value = scalar.value
                    if isinstance(value, TensorRef):
                        place = (value.storage.path, value.byte_offset)
                        if place not in read:
                            read[place] = read_number(value, reader)
                        value = read[place]
                    values[state].update([value] if value is not None else [])
    for state, numbers in values.items():
        found[state]["values"] = sorted(numbers)
    return {state: found[state] for state in sorted(found, key=lambda key: (key != FP32, key))}


def _dtypes(states: ParamStates, state: str) -> set[str]:
    placed = (states.tensors.get(state, {}), states.whole.get(state, {}))
    fragments = [fragment for shards in placed for found in shards.values() for fragment in found]
    return {str(getattr(fragment.tensor, "dtype", "unknown")) for fragment in fragments}


def _dtype(checkpoint: Checkpoint, name: str) -> str | None:
    states = checkpoint.states.get(name)
    if states is not None:
        return next(iter(_dtypes(states, FP32)), None)
    for file in checkpoint.model_files:
        stored = (file.module or {}).get(name, file.frozen_fragments.get(name))
        if isinstance(stored, TensorRef):
            return stored.dtype
    return None


def _is_incomplete(checkpoint: Checkpoint, param: ParamLayout) -> bool:
    """Whether a rank's fragments of the weights do not add up to its shard: a file of optimizer states is not there."""
    states = checkpoint.states.get(param.name)
    if states is None or param.layout is None:
        return False
    held: dict[int, int] = defaultdict(int)
    for shard, fragments in states.tensors.get(FP32, {}).items():
        held[shard.tp] += sum(fragment.numel for fragment in fragments)
    for rank in param.layout.ranks:
        expected = param.layout.shard_numel(rank)
        # A partition may be stored more than once, on pipeline stages that share the parameter.
        if expected and (not held[rank] or held[rank] % expected):
            return True
    return False


def _experts(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    layers = {layer.prefix: layer for layer in checkpoint.experts.values()}
    found: list[dict[str, Any]] = [
        {
            "layer": prefix,
            "experts": layer.num_experts,
            "ep": layer.ep_size,
            "placement": [list(experts) for experts in layer.placement],
        }
        for prefix, layer in layers.items()
    ]
    for prefix, (count, local) in checkpoint.native_experts.layers.items():
        ranks = [list(range(start, start + local)) for start in range(0, count, local)]
        found.append({"layer": prefix.rstrip("."), "experts": count, "ep": count // local, "placement": ranks})
    return found


def _param(checkpoint: Checkpoint, param: ParamLayout) -> dict[str, Any]:
    states = checkpoint.states.get(param.name) or ParamStates()
    return {
        "name": param.name,
        "kind": param.kind,
        "shape": None if param.shape is None else list(param.shape),
        "padded_shape": None if param.padded_shape is None else list(param.padded_shape),
        "shards": {str(rank): list(shape) for rank, shape in param.shards.items()},
        "rule": param.rule,
        "pattern": param.pattern,
        "layout_id": param.layout_id,
        "tied_to": param.tied_to,
        "dtype": _dtype(checkpoint, param.name),
        "states": {
            state: {
                "dtypes": sorted(_dtypes(states, state)),
                "fragments": sum(
                    len(found) for placed in (states.tensors, states.whole) for found in placed.get(state, {}).values()
                ),
            }
            for state in (*states.tensors, *states.whole, *states.scalars)
        },
        "fault": None if param.fault is None else param.fault.message,
    }
