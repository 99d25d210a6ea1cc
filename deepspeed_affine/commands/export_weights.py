"""The weights of a checkpoint, proved and readable by ranges: F of every parameter, never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.commands.identity import conversion_identity
from deepspeed_affine.commands.layouts import describe_layouts
from deepspeed_affine.commands.policies import settle_drift, settle_identical
from deepspeed_affine.commands.sides import CheckpointSide, UniversalSide, open_side
from deepspeed_affine.commands.text import counted
from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.execute.compare import stored_storage, stored_tensor
from deepspeed_affine.execute.conversion import ConversionOptions, build_plan
from deepspeed_affine.execute.distributed import SingleGroup
from deepspeed_affine.execute.fill import IntervalFiller
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.model_file import ModelFile
from deepspeed_affine.execute.shared import all_drift, check_all_storages
from deepspeed_affine.ir import ParamAffineMap, compose, inverse
from deepspeed_affine.ir.ints import product
from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift, ScaledStates
from deepspeed_affine.lowering.states import FP32
from deepspeed_affine.lowering.stock_rules import NEWEST_KNOWN, StockRules
from deepspeed_affine.plan.conversion import ConversionPlan, SourceStorage, TensorFile
from deepspeed_affine.storage.files import ByteReader, name_of
from deepspeed_affine.storage.manifest import Manifest
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["Weight", "Weights", "open_weights"]

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter or buffer: F's shape and dtype (torch's name for it), and what reads it.

    ``layout`` leads from F to the tensor-parallel shards where the source has them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    filler: IntervalFiller
    task: TensorFile
    pieces: PieceReader
    layout: ParamAffineMap | None = None

    @property
    def numel(self) -> int:
        return product(self.shape)

    def words(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements ``[start, stop)`` of F in C order, as unsigned words of the dtype's size."""
        buffer = np.empty((stop - start) * self.task.itemsize, np.uint8)
        found = self.filler.words(buffer, stop - start)
        self.filler.fill(start, stop, found)
        return found

    def blocks(self, size: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """``(start, words)`` in order, at most ``size`` elements at a time."""
        for start in range(0, self.numel, size):
            yield start, self.words(start, min(start + size, self.numel))

    def shard(self, rank: int) -> Weight:
        """One rank's shard of it, as a weight of its own: composed from the shard straight to where F is stored."""
        if self.layout is None:
            raise UnsupportedLayoutError(
                f"{self.name}: the source has no shards of it; export it whole.", param=self.name
            )
        outer = [inverse(piece, (0,)) for piece in self.layout.pieces_by_rank[rank]]
        shape = self.layout.shard_shapes[rank]
        task = replace(
            self.task, shape=shape, map_shape=shape, pieces=tuple(compose(outer, self.task.pieces)), replicas=()
        )
        return Weight(self.name, shape, self.dtype, IntervalFiller(task, self.pieces), task, self.pieces)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one source by name, tied names with the parameter they stand for, and what the source is."""

    weights: Mapping[str, Weight]
    aliases: Mapping[str, str]
    source: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())


def open_weights(
    path: str,
    reader: ByteReader,
    *,
    on_drift: OnDrift = OnDrift.ERROR,
    identical: IdenticalShards = IdenticalShards.REFUSE,
    source_crc: bool = True,
    workers: int = 2,
) -> Weights:
    """The weights of the DeepSpeed checkpoint or universal folder at ``path``.

    Of a checkpoint every map is proved and every replica compared before this returns; with ``source_crc`` the bytes
    the weights are read from are those that were saved. ``reader`` stays open as long as weights are read.
    """
    side = open_side(path)
    if isinstance(side, UniversalSide):
        return _universal(side, reader, source_crc)
    return _checkpoint(side, reader, on_drift, identical, source_crc, workers)


def _checkpoint(
    side: CheckpointSide,
    reader: ByteReader,
    on_drift: OnDrift,
    identical: IdenticalShards,
    source_crc: bool,
    workers: int,
) -> Weights:
    checkpoint, group = side.checkpoint, SingleGroup()
    options = ConversionOptions(
        StockRules.for_version(NEWEST_KNOWN),
        strict=False,
        inject_missing_state=checkpoint.tp_degree == 1,
        on_drift=on_drift,
        # Only weights are read, and their scale is undone exactly.
        scaled_states=ScaledStates.POWER,
    )
    plan, suspects = build_plan(checkpoint, options)
    plan = settle_identical(checkpoint, options, plan, suspects, identical, reader, group)
    plan = _weights_only(plan)
    drifts = all_drift(plan, reader, workers, group)
    plan = settle_drift(plan, drifts, on_drift, reader, group, check=source_crc)
    found: dict[str, Weight] = {}
    shapes = describe_layouts(checkpoint).params if checkpoint.stage >= 3 else {}
    for tasks, storages in ((plan.tensors, plan.storages), (side.extras.files.values(), side.extras.storages)):
        if source_crc:
            check_all_storages(_touched(tuple(tasks), storages), reader, group)
        pieces = PieceReader(storages, reader)
        for task in tasks:
            if task.param in found:
                continue
            param = shapes.get(task.param)
            if param is not None and param.shape is not None and task.shape == (product(param.shape),):
                # As ZeRO-3 without tensor parallelism keeps every parameter: flat.
                task = replace(task, shape=param.shape, map_shape=param.shape)
            layout = plan.layouts.get(task.param)
            if layout is not None and (len(layout.ranks) < 2 or layout.logical_shape != task.shape):
                layout = None
            found[task.param] = _weight(task, storages, pieces, layout)
    source = {"kind": "deepspeed", "folder": name_of(side.path), **_identity(side)}
    found = _in_order(found, checkpoint.model_files)
    return Weights(found, _tied(side.aliases, found), source, plan.notes)


def _universal(side: UniversalSide, reader: ByteReader, source_crc: bool) -> Weights:
    tasks = [task for (_, state), task in side.tensors.files.items() if state == FP32]
    storages = list(side.tensors.storages)
    known = {task.param for task in tasks}
    shapes = {name: shape for file in side.models for name, shape in file.shapes.items()}
    for file in side.models[:1]:
        for name in sorted(file.buffers - known):
            value = (file.module or {}).get(name)
            if isinstance(value, TensorRef):
                tasks.append(stored_tensor(value, len(storages), param=name, state=FP32))
                storages.append(stored_storage(value.storage))
    frozen = sorted({name for file in side.models for name in file.frozen_fragments} - known)
    if frozen:
        raise UnsupportedLayoutError(
            f"{side.path}: keeps {counted(len(frozen), 'frozen parameter')}, {frozen[0]!r} the first, in its "
            "model-state files only, in partitions; expected a file for each. Export from the "
            "checkpoint it was converted from.",
            file=side.path,
        )
    if source_crc:
        check_all_storages(_touched(tuple(tasks), storages), reader, SingleGroup())
    pieces = PieceReader(storages, reader)
    found: dict[str, Weight] = {}
    for task in tasks:
        shape = shapes.get(task.param)
        if shape is not None and task.shape == (product(shape),):
            task = replace(task, shape=shape, map_shape=shape)
        found[task.param] = _weight(task, storages, pieces, None)
    source: dict[str, Any] = {"kind": "universal", "folder": name_of(side.path)}
    if side.folder.manifest is not None:
        source["manifest"] = dict(Manifest.read(side.path).identity)
    found = _in_order(found, side.models)
    return Weights(found, _tied(side.aliases, found), source)


def _weight(task: TensorFile, storages: Any, pieces: PieceReader, layout: ParamAffineMap | None) -> Weight:
    stored = {storages[index].dtype for piece in task.pieces for index in piece.locations}
    if task.fill == "copy" and len(stored) == 1 and not stored <= FLOATS:
        # A conversion writes every module entry as float32; here integers and flags stay what they are.
        kind = stored.pop()
        size = next(storages[index].itemsize for piece in task.pieces for index in piece.locations)
        task = replace(task, dtype=kind, itemsize=size)
    return Weight(task.param, task.shape, task.dtype, IntervalFiller(task, pieces), task, pieces, layout)


def _in_order(found: dict[str, Weight], models: Sequence[ModelFile]) -> dict[str, Weight]:
    """The weights as ``zero_to_fp32.py`` orders them: buffers, frozen ones, the others by group; then the rest."""
    names: dict[str, None] = {}
    for file in models:
        names |= dict.fromkeys(name for name in file.module or () if name in file.buffers)
        names |= dict.fromkeys(file.frozen_shapes)
        names |= dict.fromkeys(file.shapes)
    return {name: found[name] for name in (*(name for name in names if name in found), *found)}


def _weights_only(plan: ConversionPlan) -> ConversionPlan:
    return replace(plan, tensors=tuple(task for task in plan.tensors if task.state == FP32), objects=(), copies=())


def _touched(tasks: tuple[TensorFile, ...], storages: Any) -> list[SourceStorage]:
    indices = sorted({index for task in tasks for piece in task.pieces for index in piece.locations})
    once = {(storages[index].file, storages[index].key): storages[index] for index in indices}
    return list(once.values())


def _tied(aliases: Mapping[str, str], found: dict[str, Weight]) -> dict[str, str]:
    """The tied names, which are no weights of their own; where one stands for nothing that is there it stays one."""
    tied = {alias: name for alias, name in aliases.items() if alias != name and name in found}
    for alias in tied:
        found.pop(alias, None)
    return tied


def _identity(side: CheckpointSide) -> dict[str, Any]:
    identity = conversion_identity(side.checkpoint.folder, {}, deepspeed=NEWEST_KNOWN)
    return {"files": identity["source"]}
