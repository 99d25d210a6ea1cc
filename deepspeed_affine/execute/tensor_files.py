"""Output files that hold one tensor, collected for a plan, with the source storages they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, IntegrityError, UnsupportedLayoutError
from deepspeed_affine.ir import SCALE_POWER_BY_STATE, AffinePiece, ParamAffineMap
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.policy import OnDrift, ScaledStates
from deepspeed_affine.lowering.reading import as_mapping
from deepspeed_affine.lowering.states import ParamStates, ShardKey, StoredScalar, shape_numel
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.lowering.zero import Fragment, StoredTensor, fragment_pieces
from deepspeed_affine.plan.conversion import Fill, ObjectFile, ShardPieces, SourceStorage, TensorFile, plan_sources
from deepspeed_affine.plan.paths import state_path
from deepspeed_affine.storage.checkpoint_file import load_checkpoint_file
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.refs import StorageRef, TensorRef

__all__ = ["BARE", "ConversionOptions", "Entries", "Source", "TensorFiles", "source_storage"]

Entries = tuple[tuple[str, Any], ...]
BARE: Entries = ((keys.PARAM, None),)
"""The entries of a file that holds a tensor and says nothing about it."""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """What the user chose where a checkpoint leaves a choice. ``replicated`` names parameters whose shards were
    found identical and are to be taken as copies of one tensor. ``info`` is for a checkpoint that has no
    ``universal_checkpoint_info``."""

    rules: StockRules
    strict: bool = True
    inject_missing_state: bool = False
    on_drift: OnDrift = OnDrift.ERROR
    scaled_states: ScaledStates = ScaledStates.REFUSE
    replicated: frozenset[str] = frozenset()
    info: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where one state of one parameter is stored: per map rank, every stored copy of its shard.

    ``requires_grad`` is True where any stored part was saved with that flag: DeepSpeed's merged tensor inherits it.
    """

    dtype: str
    shards: Mapping[int, tuple[ShardPieces, ...]]
    requires_grad: bool = False


class TensorFiles:
    """Files planned so far. ``tensors`` and ``objects`` are complete for every ``add`` that returned."""

    def __init__(self, options: ConversionOptions, pp_degree: int) -> None:
        self.options = options
        self.pp_degree = pp_degree
        self.tensors: list[TensorFile] = []
        self.objects: list[ObjectFile] = []
        self.notes: list[str] = []
        self.layouts: dict[str, ParamAffineMap] = {}
        self._places: dict[StorageRef, int] = {}
        self._storages: list[SourceStorage] = []
        self._numbers: dict[TensorRef, tuple[str, bytes]] = {}

    @property
    def storages(self) -> tuple[SourceStorage, ...]:
        """The storages that pieces name by their index."""
        return self.storages_from(0)

    def storages_from(self, index: int) -> tuple[SourceStorage, ...]:
        """Those from that index on, at the cost of these alone."""
        return tuple(self._storages[index:])

    def storage(self, tensor: StoredTensor) -> int:
        """The index of the storage ``tensor`` lies in."""
        if not isinstance(tensor, TensorRef):
            raise CheckpointFormatError(
                f"a {type(tensor).__name__} was found where a stored tensor is expected. The file is damaged: use "
                "another checkpoint."
            )
        if tensor.is_meta:
            raise CheckpointFormatError(
                f"{tensor.storage.path}: a tensor of shape {tensor.shape} was saved from the meta device, without its "
                "values; stored values are expected. Materialise the model before saving.",
                file=tensor.storage.path,
            )
        return self._place(tensor.storage)

    def _place(self, ref: StorageRef) -> int:
        at = self._places.setdefault(ref, len(self._storages))
        if at == len(self._storages):
            self._storages.append(source_storage(ref))
        return at

    def check(self, path: str) -> None:
        """The file at ``path`` belongs to the checkpoint and nothing is taken from it: its checksums are verified."""
        loaded = load_checkpoint_file(path)
        as_mapping(loaded.root, "what it holds", path)
        for ref in loaded.archive.storages.values():
            if ref.nbytes:
                self._place(ref)

    def optimizer_source(
        self, name: str, state: str, states: ParamStates, layout: ParamAffineMap, axis: str = "tp"
    ) -> Source:
        """Where ``state`` of ``name`` lies in the optimizer files, its fragments joined to whole shards."""
        fragments: dict[ShardKey, list[list[Fragment]]] = {}
        for shard, found in states.tensors.get(state, {}).items():
            fragments[shard] = _copies(name, state, found)
        for shard, found in states.whole.get(state, {}).items():
            fragments.setdefault(shard, []).extend([fragment] for fragment in found)
        dtypes = {_dtype(fragment.tensor) for copies in fragments.values() for copy in copies for fragment in copy}
        if len(dtypes) != 1:
            raise CheckpointFormatError(
                f"parameter {name!r}, state {state!r}: its fragments have dtypes {sorted(dtypes)}; one is expected. "
                "The files come from runs of different precision: check that they are of one save.",
                param=name,
            )
        shards: dict[int, list[ShardPieces]] = {}
        for shard in sorted(fragments):
            shape = layout.shard_shapes.get(shard.tp)
            label = shard.label(self.pp_degree, axis)
            if shape is None:
                raise CheckpointFormatError(
                    f"parameter {name!r}, state {state!r}: {label} stores a shard, but its map has ranks "
                    f"{sorted(layout.shard_shapes)} only. The metadata belongs to another run.",
                    param=name,
                    rank=shard.tp,
                )
            for copy in fragments[shard]:
                held = ((fragment, self.storage(fragment.tensor)) for fragment in copy)
                pieces = fragment_pieces(held, shape_numel(shape), param=name, rank=shard.tp, state=state)
                shards.setdefault(shard.tp, []).append(ShardPieces(pieces, label))
        requires_grad = any(
            isinstance(fragment.tensor, TensorRef) and fragment.tensor.requires_grad
            for copies in fragments.values()
            for copy in copies
            for fragment in copy
        )
        return Source(dtypes.pop(), {rank: tuple(copies) for rank, copies in shards.items()}, requires_grad)

    def add(
        self,
        name: str,
        state: str,
        source: Source,
        layout: ParamAffineMap,
        entries: Entries | None,
        *,
        truncate: int | None = None,
        average: bool = False,
        dtype: str | None = None,
    ) -> None:
        """One file is planned: F of ``state``, gathered from ``source`` through ``layout``.

        ``truncate`` is the number of rows kept; ``average`` says that DeepSpeed would average the holders.
        """
        pieces, replicas = plan_sources(layout, source.shards, param=name, state=state)
        fill: Fill = "copy"
        if any(piece.scale != 1.0 for piece in pieces):
            power = self._scale_power(name, state)
            if power is None:
                # Nothing is read, so nothing need agree.
                replicas, fill = (), "zero"
            elif power != 1:
                pieces = _rescaled(pieces, power)
                replicas = tuple(
                    replace(r, primary=_rescaled(r.primary, power), pieces=_rescaled(r.pieces, power)) for r in replicas
                )
        if average and fill == "copy" and self.options.on_drift is OnDrift.AVERAGE:
            fill = "average"
        self.layouts.setdefault(name, layout)
        shape = layout.logical_shape
        if truncate is not None:
            shape = (min(truncate, shape[0]), *shape[1:])
        self.tensors.append(
            TensorFile(
                path=state_path(name, state),
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
                requires_grad=source.requires_grad,
            )
        )

    def scalar(self, name: str, state: str, values: Sequence[StoredScalar], *, write: bool) -> None:
        """The ranks' values of a state that is one number agree; with ``write``, its file is planned."""
        first = values[0]
        for other in values[1:]:
            ours, theirs = (
                f"{value.shard.label(self.pp_degree)}, dp {value.rank} ({value.file})" for value in (first, other)
            )
            subject = f"parameter {name!r}, {ours} and {theirs}: state {state!r}"
            if not self.same_number(subject, first.value, other.value, param=name, rank=other.rank, file=other.file):
                break
        if write:
            stored = (source_storage(first.value.storage),) if isinstance(first.value, TensorRef) else ()
            self.objects.append(
                ObjectFile(state_path(name, state), first.value, storages=stored, param=name, state=state)
            )

    def same_number(
        self, subject: str, ours: Any, theirs: Any, *, param: str, file: str, rank: int | None = None
    ) -> bool:
        """Whether two ranks' numbers are the same bytes; if not, that is refused or, where the user chose so, noted."""
        if self.number(ours) == self.number(theirs):
            return True
        self.differs(subject, param=param, rank=rank, file=file)
        return False

    def differs(self, subject: str, *, file: str, param: str | None = None, rank: int | None = None) -> None:
        """What every rank has to agree on is not the same: that is refused or, where the user chose so, noted."""
        fact = f"{subject} differs"
        if self.options.on_drift is OnDrift.FIRST:
            self.notes.append(f"{fact}; the first is written")
            return
        raise IntegrityError(
            f"{fact}; every rank must agree. One of the files belongs to another step, or a rank skipped an "
            "update: take all files from one save, or convert the first rank's value with --on-drift first.",
            param=param,
            rank=rank,
            file=file,
        )

    def number(self, value: Any) -> tuple[str, bytes]:
        """The bytes of a number; one stored for a whole group of parameters is read once."""
        if not isinstance(value, TensorRef):
            return type(value).__name__, repr(value).encode()
        if value not in self._numbers:
            with ByteReader() as reader:
                found = reader.read(value.storage.path, value.byte_offset, value.nbytes)
            self._numbers[value] = (value.dtype, found)
        return self._numbers[value]

    def _scale_power(self, name: str, state: str) -> int | None:
        """The power of the scale by which ``state`` is to be divided, or None where zeros are written instead."""
        power = SCALE_POWER_BY_STATE.get(state)
        if power == 1:
            self.notes.append(f"{name}: held scaled by its ranks; {state} is divided by the scale")
            return power
        policy = self.options.scaled_states
        if policy is ScaledStates.RESET:
            self.notes.append(f"{name}: {state} was reset to zeros because the parameter is held scaled")
            return None
        if policy is ScaledStates.POWER and power is not None:
            self.notes.append(f"{name}: {state} was divided by its scale to the power {power}")
            return power
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


def source_storage(ref: StorageRef) -> SourceStorage:
    """``ref`` as a plan lists it."""
    return SourceStorage(ref.path, ref.key, ref.dtype, ref.numel, ref.byte_offset, ref.nbytes, ref.crc32)


def _copies(name: str, state: str, found: Iterable[Fragment]) -> list[list[Fragment]]:
    """Fragments of one shard in order, separated into stored copies where a partition is stored more than once."""
    by_rank: dict[int, list[Fragment]] = {}
    for fragment in found:
        by_rank.setdefault(fragment.rank, []).append(fragment)
    counts = {len(fragments) for fragments in by_rank.values()}
    if len(counts) > 1:
        raise CheckpointFormatError(
            f"parameter {name!r}, state {state!r}: its partitions are stored {sorted(counts)} times; each must be "
            "stored as often as the others. A rank's file is missing, or the parameter is in two groups.",
            param=name,
        )
    return [[by_rank[rank][copy] for rank in sorted(by_rank)] for copy in range(counts.pop() if counts else 0)]


def _dtype(tensor: StoredTensor) -> str:
    return str(getattr(tensor, "dtype", ""))


def _rescaled(pieces: tuple[AffinePiece, ...], power: int) -> tuple[AffinePiece, ...]:
    """``pieces`` with every scale raised to ``power``."""
    return tuple(
        AffinePiece(
            piece.shape,
            piece.source_offset,
            piece.source_strides,
            piece.dest_offset,
            piece.dest_strides,
            piece.locations,
            piece.scale**power,
        )
        for piece in pieces
    )
