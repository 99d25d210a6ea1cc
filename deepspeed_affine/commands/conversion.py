"""From a checkpoint's description to a conversion plan: every output file, and the stored bytes it is made of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_affine.commands.outputs import copied_files, object_files
from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, IntegrityError, UnsupportedLayoutError
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.ir import SCALE_POWER_BY_STATE, AffinePiece, ParamAffineMap, replicated_map
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.experts import expert_map
from deepspeed_affine.lowering.lowered import LoweredParam, SubParamEntry
from deepspeed_affine.lowering.merge import lower_param, unused_patterns
from deepspeed_affine.lowering.policy import OnDrift, ScaledStates
from deepspeed_affine.lowering.states import FP32, ParamStates, ShardKey, shape_numel
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.lowering.uc_info import UcInfo
from deepspeed_affine.lowering.zero import Fragment, StoredTensor, fragment_pieces, whole_pieces, zero3_interval
from deepspeed_affine.plan.conversion import (
    ConversionPlan,
    Fill,
    ObjectFile,
    ShardPieces,
    SourceStorage,
    TensorFile,
    plan_sources,
)
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.refs import Global, StandIn, StorageRef, TensorRef

__all__ = ["ConversionOptions", "Suspect", "build_plan"]

UC_VERSION = 0.4
Entries = tuple[tuple[str, Any], ...]
BARE: Entries = ((keys.PARAM, None),)
"""The entries of a file that holds a tensor and says nothing about it."""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """What the user chose where a checkpoint leaves a choice. ``replicated`` names parameters whose shards were
    found identical and are to be taken as copies of one tensor."""

    rules: StockRules
    strict: bool = True
    inject_missing_state: bool = False
    on_drift: OnDrift = OnDrift.ERROR
    scaled_states: ScaledStates = ScaledStates.REFUSE
    replicated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A parameter whose metadata says split; if the shards of every state are identical, the metadata is wrong.

    ``states`` lists, for each state, one stored shard a rank.
    """

    param: str
    states: tuple[tuple[ShardPieces, ...], ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one state of one parameter is stored: per map rank, every stored copy of its shard."""

    dtype: str
    shards: Mapping[int, tuple[ShardPieces, ...]]


@dataclass(slots=True)
class _Unsliced:
    """The module's own copies of one tensor, by tensor-parallel rank; further ones are other pipeline stages'."""

    by_rank: dict[int, list[tuple[ShardKey, TensorRef]]] = field(default_factory=dict)
    is_buffer: bool = False
    is_alias: bool = False

    def add(self, shard: ShardKey, value: TensorRef, is_buffer: bool = False, is_alias: bool = False) -> None:
        self.by_rank.setdefault(shard.tp, []).append((shard, value))
        self.is_buffer = self.is_buffer or is_buffer
        self.is_alias = self.is_alias or is_alias


def build_plan(checkpoint: Checkpoint, options: ConversionOptions) -> tuple[ConversionPlan, tuple[Suspect, ...]]:
    """The plan of converting ``checkpoint``, and the parameters whose metadata its bytes may contradict.

    P1, P5 and P6 of every map are proved here; P2 is the executor's to prove, from ``TensorFile.replicas``.
    Raises one error listing the faults of all parameters.
    """
    _refuse_without_weights(checkpoint)
    return _Builder(checkpoint, options).build()


class _Builder:
    def __init__(self, checkpoint: Checkpoint, options: ConversionOptions) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.info = UcInfo.parse(_required_info(checkpoint, options))
        self.storages: dict[StorageRef, int] = {}
        self.tensors: list[TensorFile] = []
        self.objects: list[ObjectFile] = []
        self.suspects: list[Suspect] = []
        self.lowered: list[LoweredParam] = []
        self.notes: list[str] = []

    @property
    def flat(self) -> bool:
        """Whether DeepSpeed writes bare flat tensors: ZeRO-3 without tensor parallelism."""
        return self.checkpoint.stage == 3 and self.checkpoint.tp_degree == 1

    def build(self) -> tuple[ConversionPlan, tuple[Suspect, ...]]:
        faults = Faults()
        names = dict.fromkeys([*self.checkpoint.shapes, *self.checkpoint.states])
        for name in sorted(names):
            try:
                self._optimized(name)
            except AffineError as fault:
                faults.add(fault)
        if self.checkpoint.stage < 3:
            for name, found in self._unsliced().items():
                try:
                    self._from_module(name, found)
                except AffineError as fault:
                    faults.add(fault)
        elif not self.flat:
            try:
                self._frozen_partitions()
            except AffineError as fault:
                faults.add(fault)
        faults.raise_if_any()
        self._report_unused()
        self._report_empty()
        self.objects += object_files(self.checkpoint)
        copies = copied_files(self.checkpoint)
        sources = tuple(_source_storage(ref) for ref in self.storages)
        plan = ConversionPlan(sources, tuple(self.tensors), tuple(self.objects), copies, tuple(self.notes))
        return plan, tuple(self.suspects)

    # Parameters the optimizer knows.

    def _optimized(self, name: str) -> None:
        states = self.checkpoint.states.get(name)
        layer = self.checkpoint.experts.get(name)
        if layer is not None:
            shape = next(shape for shape in self.checkpoint.shapes[name] if shape is not None)
            layout = expert_map(layer, name, shape[1:])
            expert_entries: Entries = (
                (keys.PARAM, None),
                ("cat_dim", 0),
                ("is_expert_param", True),
                ("ep_num_experts", layer.num_experts),
            )
            self._states(name, states, layout, expert_entries, None, axis="ep")
            return
        shapes = self.checkpoint.shapes.get(name)
        if shapes is None:
            raise CheckpointFormatError(
                f"parameter {name!r} has optimizer slices but no model-state file records its shape. The files come "
                "from different saves.",
                param=name,
            )
        if self.flat:
            layout = replicated_map((shape_numel(shapes[0] or ()),), 1)
            self._states(name, states, layout, None, None)
            return
        lowered = self._lower(name, shapes)
        self.lowered.append(lowered)
        if states is None:
            return
        stateless = self.checkpoint.stage < 3 and set(states.tensors) == {FP32} and not states.scalars
        if stateless and states.group in self.checkpoint.states.stateless_groups:
            # DeepSpeed takes such a parameter from the module, with nothing beside it.
            self._states(name, states, lowered.map, BARE, None, lowered=lowered)
            return
        stored = ((key, _stored(value)) for key, value in lowered.entries(self.options.rules))
        entries = (*stored, (keys.PARAM, None))
        self._states(name, states, lowered.map, entries, lowered.truncate_rows, lowered=lowered)
        self.notes += [note for note in lowered.notes if note not in self.notes]

    def _lower(self, name: str, shapes: Sequence[tuple[int, ...] | None]) -> LoweredParam:
        lowered = lower_param(self.info, name, shapes, self.checkpoint.tp_degree)
        return lowered.as_replicated() if name in self.options.replicated else lowered

    def _states(
        self,
        name: str,
        states: ParamStates | None,
        layout: ParamAffineMap,
        entries: Entries | None,
        truncate: int | None,
        *,
        lowered: LoweredParam | None = None,
        axis: str = "tp",
    ) -> None:
        if states is None:
            return
        sources: list[_Source] = []
        for state in sorted({*states.tensors, *states.whole}, key=lambda key: (key != FP32, key)):
            source = self._source(name, state, states, layout, axis)
            sources.append(source)
            self._tensor_file(name, state, source, layout, entries, truncate, lowered)
        for state, values in states.scalars.items():
            if self.checkpoint.stage < 3:
                self._scalar(name, state, values)
        if lowered is not None and lowered.says_split and lowered.rule.value != keys.AFFINE_MAP:
            ranks = [rank for rank, shape in layout.shard_shapes.items() if shape_numel(shape)]
            if len({layout.shard_shapes[rank] for rank in ranks}) == 1 and len(ranks) == self.checkpoint.tp_degree:
                self.suspects.append(
                    Suspect(name, tuple(tuple(source.shards[rank][0] for rank in ranks) for source in sources))
                )

    def _source(self, name: str, state: str, states: ParamStates, layout: ParamAffineMap, axis: str) -> _Source:
        fragments: dict[ShardKey, list[list[Fragment]]] = {}
        for shard, found in states.tensors.get(state, {}).items():
            fragments[shard] = _copies(name, state, found)
        for shard, found in states.whole.get(state, {}).items():
            fragments.setdefault(shard, []).extend([fragment] for fragment in found)
        dtypes = {_dtype(fragment.tensor) for copies in fragments.values() for copy in copies for fragment in copy}
        if len(dtypes) != 1:
            raise CheckpointFormatError(
                f"parameter {name!r}, state {state!r}: its fragments have dtypes {sorted(dtypes)}; one is expected. "
                "The files come from runs of different precision.",
                param=name,
            )
        shards: dict[int, list[ShardPieces]] = {}
        for shard in sorted(fragments):
            shape = layout.shard_shapes.get(shard.tp)
            if shape is None:
                raise CheckpointFormatError(
                    f"parameter {name!r}, state {state!r}: {shard.label(self.checkpoint.pp_degree, axis)} stores a "
                    f"shard, but its map has ranks {sorted(layout.shard_shapes)} only.",
                    param=name,
                    rank=shard.tp,
                )
            label = shard.label(self.checkpoint.pp_degree, axis)
            for copy in fragments[shard]:
                held = ((fragment, self._storage(fragment.tensor)) for fragment in copy)
                pieces = fragment_pieces(held, shape_numel(shape), param=name, rank=shard.tp)
                shards.setdefault(shard.tp, []).append(ShardPieces(pieces, label))
        return _Source(dtypes.pop(), {rank: tuple(copies) for rank, copies in shards.items()})

    def _tensor_file(
        self,
        name: str,
        state: str,
        source: _Source,
        layout: ParamAffineMap,
        entries: Entries | None,
        truncate: int | None,
        lowered: LoweredParam | None = None,
        dtype: str | None = None,
    ) -> None:
        pieces, replicas = plan_sources(layout, source.shards, param=name, state=state)
        fill: Fill = "copy"
        if any(piece.scale != 1.0 for piece in pieces):
            pieces, fill = self._scaled(name, state, pieces)
        if self.options.on_drift is OnDrift.AVERAGE and lowered is not None and lowered.average:
            fill = "average"
        shape = layout.logical_shape
        if truncate is not None:
            shape = (min(truncate, shape[0]), *shape[1:])
        self.tensors.append(
            TensorFile(
                path=f"zero/{name}/{state}.pt",
                param=name,
                state=state,
                dtype=dtype or source.dtype,
                itemsize=item_size(dtype or source.dtype),
                shape=shape,
                map_shape=layout.logical_shape,
                entries=entries,
                tensor_key=keys.PARAM,
                pieces=pieces,
                replicas=replicas,
                fill=fill,
            )
        )

    def _scaled(self, name: str, state: str, pieces: tuple[AffinePiece, ...]) -> tuple[tuple[AffinePiece, ...], Fill]:
        power = SCALE_POWER_BY_STATE.get(state)
        if power == 1:
            self.notes.append(f"{name}: held scaled by its ranks; {state} is divided by the scale")
            return pieces, "copy"
        policy = self.options.scaled_states
        if policy is ScaledStates.RESET:
            self.notes.append(f"{name}: {state} was reset to zeros because the parameter is held scaled")
            return pieces, "zero"
        if policy is ScaledStates.POWER and power is not None:
            self.notes.append(f"{name}: {state} was divided by its scale to the power {power}")
            return tuple(_rescaled(piece, piece.scale**power) for piece in pieces), "copy"
        reason = (
            f"no power of the scale is known for state {state!r}"
            if policy is ScaledStates.POWER
            else "its hyperparameters (lr, eps) would stay in the coordinate of the source"
        )
        raise UnsupportedLayoutError(
            f"parameter {name!r}, state {state!r}: the ranks hold the parameter scaled, and {reason}. Choose "
            "--scaled-states reset (zeros) or power (apply the exact power of the scale).",
            param=name,
        )

    def _scalar(self, name: str, state: str, values: Sequence[tuple[ShardKey, int, Any]]) -> None:
        first_shard, first_rank, first = values[0]
        expected = _scalar_bytes(first)
        for shard, rank, value in values[1:]:
            if _scalar_bytes(value) != expected:
                raise IntegrityError(
                    f"parameter {name!r}: state {state!r} differs between "
                    f"{first_shard.label(self.checkpoint.pp_degree)}, dp {first_rank} and "
                    f"{shard.label(self.checkpoint.pp_degree)}, dp {rank}; every rank must agree. One of the files "
                    "belongs to another step, or a rank skipped an update.",
                    param=name,
                    rank=rank,
                )
        self.objects.append(ObjectFile(f"zero/{name}/{state}.pt", first))

    # Parameters and buffers only the module knows.

    def _unsliced(self) -> dict[str, _Unsliced]:
        """Tensors DeepSpeed would write from the module because no optimizer slice exists, by name."""
        checkpoint = self.checkpoint
        everything = self.options.rules.skips_absent_states or checkpoint.stage == 0
        written = {task.param for task in self.tensors if task.state == FP32}
        found: dict[str, _Unsliced] = {}
        for file in checkpoint.model_files:
            wanted = {*checkpoint.shapes, *file.frozen_shapes}
            for name, value in (file.module or {}).items():
                if not isinstance(value, TensorRef):
                    self.notes.append(f"{name}: a {type(value).__name__} of the module, not a tensor; left out")
                elif (everything or name in wanted) and name not in written:
                    entry = found.setdefault(name, _Unsliced())
                    entry.add(file.shard, value, name in file.buffers, name in file.aliases)
        for name, by_rank in checkpoint.expert_tensors.items():
            if name not in written:
                entry = found.setdefault(name, _Unsliced())
                for rank, value in by_rank.items():
                    entry.add(ShardKey(0, rank), value)
        return found

    def _from_module(self, name: str, found: _Unsliced) -> None:
        checkpoint = self.checkpoint
        ranks = sorted(found.by_rank)
        first = found.by_rank[ranks[0]][0][1]
        if found.is_alias or checkpoint.tp_degree == 1:
            # An alias is never read back: DeepSpeed restores the parameter it stands for. It is written as
            # DeepSpeed writes it, from the first file that holds it.
            layout = replicated_map(first.shape, 1)
            ranks = ranks[:1]
        elif found.is_buffer and len({tensors[0][1].shape for tensors in found.by_rank.values()}) == 1:
            layout = replicated_map(first.shape, checkpoint.tp_degree)
        else:
            layout = self._lowered_map(name, {rank: found.by_rank[rank][0][1].shape for rank in ranks})
        shards = {
            rank: tuple(
                ShardPieces(whole_pieces(ref, self._storage(ref)), shard.label(checkpoint.pp_degree))
                for shard, ref in found.by_rank[rank][: 1 if found.is_alias else None]
            )
            for rank in ranks
        }
        self._tensor_file(name, FP32, _Source(first.dtype, shards), layout, BARE, None, dtype="float32")

    def _frozen_partitions(self) -> None:
        """Frozen parameters of a tensor-parallel ZeRO-3 checkpoint; without tensor parallelism DeepSpeed's own
        output leaves them in the model-state files."""
        checkpoint = self.checkpoint
        shapes: dict[str, dict[int, tuple[int, ...]]] = {}
        stored: dict[str, dict[int, list[tuple[Fragment, int]]]] = {}
        dtypes: dict[str, str] = {}
        for file in checkpoint.model_files:
            for name, fragment in file.frozen_fragments.items():
                shape = file.frozen_shapes[name]
                held, _ = zero3_interval(shape_numel(shape), checkpoint.dp_degree, file.rank)
                shapes.setdefault(name, {})[file.shard.tp] = shape
                part = (Fragment(fragment, 0, held, file.rank), self._storage(fragment))
                stored.setdefault(name, {}).setdefault(file.shard.tp, []).append(part)
                dtypes[name] = fragment.dtype
        for name, by_rank in stored.items():
            layout = self._lowered_map(name, shapes[name])
            shards = {
                rank: (
                    ShardPieces(
                        fragment_pieces(parts, shape_numel(shapes[name][rank]), param=name, rank=rank), f"tp {rank}"
                    ),
                )
                for rank, parts in by_rank.items()
            }
            self._tensor_file(name, FP32, _Source(dtypes[name], shards), layout, BARE, None, dtype="float32")

    def _lowered_map(self, name: str, shapes: Mapping[int, tuple[int, ...]]) -> ParamAffineMap:
        lowered = self._lower(name, [shapes.get(rank) for rank in range(self.checkpoint.tp_degree)])
        self.lowered.append(lowered)
        return lowered.map

    # What the user should hear.

    def _report_unused(self) -> None:
        if self.flat or not self.lowered:
            return
        # Experts are placed by their own records; a pattern that names one has still found its parameter.
        placed = {key for name in self.checkpoint.experts for key in self.info.category_patterns_of(name)}
        unused = tuple(key for key in unused_patterns(self.info, self.lowered) if key not in placed)
        if unused and self.options.strict:
            raise CheckpointFormatError(
                f"universal_checkpoint_info: no parameter matches {list(unused)}; every pattern must match one. "
                "Correct the pattern where the training script defines it, or convert with --no_strict."
            )
        if unused:
            self.notes.append(f"patterns that match no parameter: {list(unused)}")

    def _report_empty(self) -> None:
        if self.checkpoint.states.empty_states:
            names = ", ".join(sorted(self.checkpoint.states.empty_states))
            self.notes.append(f"optimizer states saved as None, nothing to carry: {names}")

    def _storage(self, tensor: StoredTensor) -> int:
        if not isinstance(tensor, TensorRef):
            raise CheckpointFormatError(f"a {type(tensor).__name__} was found where a stored tensor is expected")
        return self.storages.setdefault(tensor.storage, len(self.storages))


def _refuse_without_weights(checkpoint: Checkpoint) -> None:
    if checkpoint.stage == 0 and all(file.module is None for file in checkpoint.model_files):
        raise UnsupportedLayoutError(
            f"{checkpoint.folder.path}: saved by a pipeline engine without ZeRO, so its weights are in layer files "
            "under names local to each layer, and nothing records the parameters' full names. Load it in DeepSpeed "
            "with ZeRO stage 1 and save again.",
            file=checkpoint.folder.path,
        )


def _required_info(checkpoint: Checkpoint, options: ConversionOptions) -> Mapping[str, Any]:
    info = checkpoint.uc_info
    if info is not None:
        return info
    if options.inject_missing_state or (checkpoint.stage in (0, 3) and checkpoint.tp_degree == 1):
        return {keys.VERSION: UC_VERSION}
    if checkpoint.stage == 3:
        return {}
    raise CheckpointFormatError(
        f"{checkpoint.model_files[0].path}: 'universal_checkpoint_info' is missing, so nothing says how parameters are "
        "split. If the model is not tensor-parallel, convert with --inject_missing_state.",
        file=checkpoint.model_files[0].path,
    )


def _stored(value: object) -> object:
    """``value`` as it is pickled: a sub-parameter entry as an instance of DeepSpeed's own class."""
    if not isinstance(value, SubParamEntry):
        return value
    entry = StandIn(Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"), (), "newobj")
    entry.stand_in_state = {"patterns": value.patterns, "shape": value.shape, "partition_dim": value.partition_dim}
    return entry


def _copies(name: str, state: str, found: Iterable[Fragment]) -> list[list[Fragment]]:
    """Fragments of one shard in order, separated into stored copies where a partition is stored more than once."""
    by_rank: dict[int, list[Fragment]] = {}
    for fragment in found:
        by_rank.setdefault(fragment.rank, []).append(fragment)
    counts = {len(fragments) for fragments in by_rank.values()}
    if len(counts) > 1:
        raise CheckpointFormatError(
            f"parameter {name!r}, state {state!r}: its partitions are stored {sorted(counts)} times; each must be "
            "stored as often as the others. A rank's file is missing.",
            param=name,
        )
    return [[by_rank[rank][copy] for rank in sorted(by_rank)] for copy in range(counts.pop() if counts else 0)]


def _dtype(tensor: StoredTensor) -> str:
    return str(getattr(tensor, "dtype", ""))


def _scalar_bytes(value: Any) -> tuple[str, bytes]:
    if not isinstance(value, TensorRef):
        return type(value).__name__, repr(value).encode()
    with open(value.storage.path, "rb") as file:
        return value.dtype, os.pread(file.fileno(), value.nbytes, value.byte_offset)


def _rescaled(piece: AffinePiece, scale: float) -> AffinePiece:
    """``piece`` with another scale."""
    return AffinePiece(
        piece.shape,
        piece.source_offset,
        piece.source_strides,
        piece.dest_offset,
        piece.dest_strides,
        piece.locations,
        scale,
    )


def _source_storage(ref: StorageRef) -> SourceStorage:
    return SourceStorage(ref.path, ref.key, ref.dtype, ref.numel, ref.byte_offset, ref.nbytes, ref.crc32)
