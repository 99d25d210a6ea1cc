"""What every rank's files say of the whole, compared: they are of one save, or one of them is refused by name.

Where ranks hold the same elements the bytes are compared later. Here it is what a rank says without holding the
others' elements: the layout, the order of parameters, which states there are, their precision, and the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat, zip_longest
from typing import Any

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, UnsupportedLayoutError
from deepspeed_affine.execute.checkpoint import Checkpoint, ModelFile
from deepspeed_affine.execute.model_file import UC_INFO
from deepspeed_affine.execute.tensor_files import TensorFiles
from deepspeed_affine.lowering.reading import as_mapping
from deepspeed_affine.lowering.state_table import STEP, GroupRecord, Hyperparameters
from deepspeed_affine.lowering.uc_info import UcInfo
from deepspeed_affine.storage.files import name_of

__all__ = ["check_groups", "check_model_files", "partition_numbers", "require_one_set_of_hyperparameters"]

STEPS = "global_steps"


def check_model_files(checkpoint: Checkpoint, info: UcInfo) -> None:
    """Every model-state file records the layout ``info`` and the step of the first one, and its data-parallel ranks one
    order.

    Raises CheckpointFormatError listing every file that does not.
    """
    faults = Faults()
    first = checkpoint.model_files[0]
    by_shard: dict[object, ModelFile] = {}
    for file in checkpoint.model_files:
        stage = _configured_stage(file.root)
        if stage not in (None, *_stages(checkpoint)):
            faults.add(
                CheckpointFormatError(
                    f"{file.path}: was saved under ZeRO stage {stage}, by the configuration it records; the optimizer "
                    f"files beside it are of stage {checkpoint.stage}{'' if checkpoint.stage else ': there are none'}. "
                    "Copy the whole folder of one save.",
                    file=file.path,
                )
            )
        if not _same_info(file, first, info):
            faults.add(
                CheckpointFormatError(
                    f"{file.path}: its {UC_INFO!r} describes other layouts than that of {first.path}; every rank must "
                    "record the same. The files come from different saves: take all of them from one.",
                    file=file.path,
                )
            )
        steps, expected = (each.root.get(STEPS) for each in (file, first))
        if type(steps) is int and type(expected) is int and steps != expected:
            faults.add(
                CheckpointFormatError(
                    f"{file.path}: was saved at step {steps}, {first.path} at {expected}; one step is expected. The "
                    "files come from different saves: take all of them from one.",
                    file=file.path,
                )
            )
        known = by_shard.setdefault(file.shard, file)
        if _order(file, checkpoint) != _order(known, checkpoint):
            faults.add(
                CheckpointFormatError(
                    f"{file.path}: its 'param_shapes' list other parameters, shapes or groups than those of "
                    f"{known.path}, another data-parallel rank's; every rank must record the same. The files come from "
                    "different saves: take all of them from one.",
                    file=file.path,
                )
            )
    faults.raise_if_any()


def partition_numbers(checkpoint: Checkpoint, files: TensorFiles) -> frozenset[tuple[int, str]]:
    """``(group, state)`` of every number that the ranks computed each of its own partition, such as Adafactor's RMS.

    It is no number of a parameter. It is told by its values, which differ, while the group keeps a step; whether the
    ranks took the same steps is asked of the step.
    """
    found: dict[tuple[int, str], set[tuple[str, bytes]]] = {}
    for record in checkpoint.states.groups:
        for state, value in record.states.items() if STEP in record.states else ():
            if state != STEP and _is_number(value) and _is_fractional(value):
                found.setdefault((record.group, state), set()).add(files.number(value))
    return frozenset(key for key, values in found.items() if len(values) > 1)


def check_groups(checkpoint: Checkpoint, files: TensorFiles, leaving: frozenset[tuple[int, str]]) -> None:
    """Of every parameter group each optimizer file has the same states, in one precision, and the same numbers, and
    each of a pipeline stage the same hyperparameters.

    ``leaving`` are numbers of single partitions, as ``partition_numbers`` gives them. Raises one error listing every
    file that differs from the first of its group.
    """
    faults = Faults()
    first: dict[tuple[int, int], GroupRecord] = {}
    for record in checkpoint.states.groups:
        known = first.setdefault((record.places[0].shard.pp, record.group), record)
        for state in sorted({*known.states, *record.states}):
            if (record.group, state) in leaving:
                continue
            try:
                _check_state(record, known, state, files)
            except AffineError as fault:
                faults.add(fault)
    by_stage: dict[int, Hyperparameters] = {}
    for options in checkpoint.states.hyperparameters:
        of_stage = by_stage.setdefault(options.shard.pp, options)
        for group, name in _differing_options(of_stage, options, files):
            where = f"parameter group {group}, {options.file} and {of_stage.file}"
            try:
                files.differs(f"{where}: hyperparameter {name!r}", file=options.file)
            except AffineError as fault:
                faults.add(fault)
    faults.raise_if_any()


def require_one_set_of_hyperparameters(checkpoint: Checkpoint, files: TensorFiles, advice: str) -> None:
    """Every pipeline stage has the same; UnsupportedLayoutError with ``advice`` where one was given others."""
    records = checkpoint.states.hyperparameters
    for record in records:
        for group, name in _differing_options(records[0], record, files):
            raise UnsupportedLayoutError(
                f"{record.file}: parameter group {group} has another {name!r} than in {records[0].file}, of another "
                f"pipeline stage; one value is expected. {advice}",
                file=record.file,
            )


def _differing_options(one: Hyperparameters, other: Hyperparameters, files: TensorFiles) -> Iterator[tuple[int, str]]:
    """``(group, hyperparameter)`` of everything that two files have with different values; objects are not compared."""
    if one is other:
        return
    nothing: Mapping[str, Any] = {}
    for at, (mine, theirs) in enumerate(zip_longest(one.groups, other.groups, fillvalue=nothing)):
        for name in sorted({*mine, *theirs} - {"params"}, key=str):
            if _differs(mine.get(name), theirs.get(name), files):
                yield at, name


def _differs(ours: Any, theirs: Any, files: TensorFiles) -> bool:
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) != len(theirs) or any(map(_differs, ours, theirs, repeat(files)))
    are_plain = all(value is None or isinstance(value, str) or _is_number(value) for value in (ours, theirs))
    return are_plain and files.number(ours) != files.number(theirs)


def _check_state(record: GroupRecord, known: GroupRecord, state: str, files: TensorFiles) -> None:
    ours, theirs = known.states.get(state), record.states.get(state)
    if (ours is None) != (theirs is None):
        lacking, having = (known, record) if ours is None else (record, known)
        raise _fault(lacking, state, "is missing", f"{having.file} has it; every file must")
    if _dtype(ours) != _dtype(theirs):
        raise _fault(
            record, state, f"has dtype {_dtype(theirs)}", f"in {known.file} it has {_dtype(ours)}; one is right"
        )
    if _is_number(ours) and _is_number(theirs):
        where = f"parameter group {record.group}, {record.file} and {known.file}"
        files.same_number(f"{where}: state {state!r}", ours, theirs, param=record.places[0].name, file=record.file)


def _configured_stage(root: Mapping[str, Any]) -> int | None:
    """The stage in the configuration that DeepSpeed stores with a model, or None where it says none in plain words."""
    config = root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return stage if type(stage) is int else None


def _stages(checkpoint: Checkpoint) -> set[int]:
    """The configured stages under which files such as the optimizer files are written."""
    if checkpoint.optimizer_file is not None and checkpoint.stage == 1:
        # BF16_Optimizer records no stage, and serves stages 0 and 1.
        return {1, 0} if name_of(checkpoint.optimizer_file).startswith("bf16_") else {1}
    return {checkpoint.stage}


def _same_info(file: ModelFile, first: ModelFile, info: UcInfo) -> bool:
    found, expected = file.root.get(UC_INFO), first.root.get(UC_INFO)
    try:
        if found == expected:
            return True
    except RecursionError:
        pass
    if found is None or expected is None:
        return False
    # What differs may say nothing of a layout, or be an object that equals only itself.
    return UcInfo.parse(as_mapping(found, f"{UC_INFO!r}", file.path)) == info


def _order(file: ModelFile, checkpoint: Checkpoint) -> list[list[tuple[str, tuple[int, ...] | None]]]:
    experts = checkpoint.experts
    return [[(name, None if name in experts else shape) for name, shape in group.items()] for group in file.groups]


def _fault(record: GroupRecord, state: str, fact: str, other: str) -> CheckpointFormatError:
    name = record.places[0].name
    return CheckpointFormatError(
        f"{record.file}: optimizer state {state!r} of parameter group {record.group} ({name!r} and others) {fact}, and "
        f"{other}. The files come from different saves: take all of them from one.",
        param=name,
        file=record.file,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or getattr(value, "shape", None) == ()


def _is_fractional(value: Any) -> bool:
    return isinstance(value, float) or str(getattr(value, "dtype", "")).startswith(("float", "bfloat"))


def _dtype(value: Any) -> str | None:
    """The precision of a tensor with elements to gather; a number may be stored in any way."""
    shape = getattr(value, "shape", None)
    return str(getattr(value, "dtype", None)) if isinstance(shape, tuple) and shape else None
