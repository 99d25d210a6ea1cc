"""What converting a checkpoint would make of each parameter, planned when it is asked for; nothing is converted.

A load takes from here how F of a state would be gathered from the files an engine saved, and reads its own part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from deepspeed_affine.errors import Faults, IntegrityError
from deepspeed_affine.execute.agreement import check_groups, require_one_set_of_hyperparameters
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.execute.conversion import ConversionOptions, PlanBuilder
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.prove import Drift, measure_drift
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.lowering.lowered import Rule
from deepspeed_affine.plan.conversion import Replica, SourceStorage, TensorFile
from deepspeed_affine.storage.files import ByteReader

__all__ = ["OnDemand", "raise_drift"]

Shape = tuple[int, ...]


class OnDemand:
    """The tensors a conversion of ``checkpoint`` would write, by parameter and state.

    Making it compares what the files say of the whole (layouts, order, stages), and raises as a conversion would. Not
    to be asked from several threads; what it returned may be shared. ``storages`` are those that pieces name by index,
    and grow as more is planned.
    """

    def __init__(self, checkpoint: Checkpoint, options: ConversionOptions, reader: ByteReader) -> None:
        self.checkpoint = checkpoint
        self.storages: list[SourceStorage] = []
        self.pieces = PieceReader(self.storages, reader)
        self._builder = PlanBuilder(checkpoint, options)
        self._builder.prepare()
        check_groups(checkpoint, self._builder.files, self._builder.leaving)
        self._planned: dict[str, dict[str, TensorFile]] = {}
        self._plan(None)
        for tasks in self._planned.values():
            for task in tasks.values():
                _refuse_other_copies(task, self.storages)

    @cached_property
    def states(self) -> Mapping[str, tuple[str, ...]]:
        """The states of every parameter and buffer, numbers and ``fp32`` among them, sorted."""
        found: dict[str, tuple[str, ...]] = {name: tuple(tasks) for name, tasks in self._planned.items()}
        for name in self.checkpoint.states:
            states = self.checkpoint.states[name]
            numbers = {state for state in states.scalars if (states.group, state) not in self._builder.leaving}
            found[name] = tuple(sorted({*states.tensors, *states.whole, *numbers}))
        return found

    def tensors(self, name: str) -> Mapping[str, TensorFile]:
        """How F of every state of ``name`` would be made; raises what a conversion would say of it."""
        if name not in self._planned:
            self._plan(name)
        return self._planned.get(name, {})

    def take_as_copies(self, name: str, shape: Shape) -> bool:
        """Whether ``name``, which no pattern describes, is whole on every rank, in this shape; it is planned so then.

        The ranks' copies are read and compared: IntegrityError where they differ. An AutoTP checkpoint of DeepSpeed
        0.18.9 lists no norms and biases.
        """
        builder = self._builder
        lowered = next((param for param in reversed(builder.lowered) if param.name == name), None)
        if lowered is None or lowered.rule is not Rule.COLUMN_PARALLEL:
            return False
        if lowered.pattern is not None or lowered.category.vocabulary is not None or len(lowered.map.ranks) == 1:
            return False
        if set(lowered.map.shard_shapes.values()) != {shape}:
            return False
        builder.options = replace(builder.options, replicated=builder.options.replicated | {name})
        builder.files.tensors = [task for task in builder.files.tensors if task.param != name]
        self._plan(name if name in self.checkpoint.states else None)
        raise_drift(self.drift(name))
        return True

    def number(self, name: str, state: str) -> Any:
        """The value of a state that is one number, as it is stored; None where it is no number."""
        states = self.checkpoint.states.get(name)
        values = states.scalars.get(state) if states is not None else None
        if not values or states is None or (states.group, state) in self._builder.leaving:
            return None
        return values[0].value

    def drift(self, name: str) -> list[Drift]:
        """Every two holders of the same elements of ``name`` whose bytes differ; all copies are read."""
        return [drift for task in self.tensors(name).values() for drift in measure_drift(task, self.pieces)]

    def require_one_set_of_hyperparameters(self) -> None:
        """The parameter groups of all pipeline stages have the same; UnsupportedLayoutError where they differ."""
        advice = "Say load_optimizer_states=False, or load it in DeepSpeed with the same pipeline stages."
        require_one_set_of_hyperparameters(self.checkpoint, self._builder.files, advice)

    def _plan(self, name: str | None) -> None:
        """``name`` is planned; without one, everything that only the module holds and is not planned."""
        files = self._builder.files
        before = len(files.tensors)
        if name is None:
            self._builder.module_tensors()
        else:
            self._builder.param(name)
        for task in files.tensors[before:]:
            self._planned.setdefault(task.param, {})[task.state] = task
        self.storages.extend(files.storages_from(len(self.storages)))


def _refuse_other_copies(task: TensorFile, storages: list[SourceStorage]) -> None:
    """Copies that are whole storages have recorded checksums, which say without any reading whether they are equal."""
    for replica in task.replicas:
        mine, theirs = (_recorded(pieces, storages) for pieces in (replica.primary, replica.pieces))
        if mine is not None and theirs is not None and mine != theirs:
            raise _other_copy(task, replica)


def _recorded(pieces: tuple[AffinePiece, ...], storages: list[SourceStorage]) -> tuple[int, Shape] | None:
    """The checksum of the storage that a copy fills and the order of its elements in it, None where it is a part."""
    if len(pieces) != 1:
        return None
    (index,) = pieces[0].locations
    storage = storages[index]
    if storage.crc32 is None or pieces[0].numel != storage.numel:
        return None
    return storage.crc32, pieces[0].dest_strides


def _other_copy(task: TensorFile, replica: Replica) -> IntegrityError:
    return IntegrityError(
        f"{task.param!r}, state {task.state!r}: {replica.primary_label} and {replica.label} saved different values, by "
        "the checksums of their files; copies of one tensor must agree. Convert with ds_to_universal --affine "
        "--on-drift first or average, and load that.",
        param=task.param,
    )


def raise_drift(drifts: list[Drift]) -> None:
    faults = Faults()
    for drift in drifts:
        faults.add(
            IntegrityError(
                f"{drift.describe()}. Copies of one value must agree; convert with ds_to_universal --affine --on-drift "
                "first or average, and load that.",
                param=drift.param,
            )
        )
    faults.raise_if_any()
