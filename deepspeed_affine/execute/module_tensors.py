"""Parameters and buffers only the module knows: frozen ones, those without a gradient, aliases of tied weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.execute.tensor_files import BARE, Source, TensorFiles
from deepspeed_affine.ir import ParamAffineMap, replicated_map
from deepspeed_affine.lowering.lowered import LoweredParam
from deepspeed_affine.lowering.states import FP32, ShardKey, shape_numel
from deepspeed_affine.lowering.zero import Fragment, fragment_pieces, whole_pieces, zero3_interval
from deepspeed_affine.plan.conversion import ShardPieces
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["ModuleTensors"]

Lower = Callable[[str, Sequence[tuple[int, ...] | None]], LoweredParam]


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


class ModuleTensors:
    """Plans an ``fp32.pt`` for every tensor of the module that DeepSpeed's converter takes from there.

    ``lower`` turns a name and its shard shapes into a layout; it is asked only where the module's ranks hold parts.
    ``split`` has the stored shards of the tensors it was asked for, by name and rank.
    """

    def __init__(self, checkpoint: Checkpoint, files: TensorFiles, lower: Lower) -> None:
        self.checkpoint = checkpoint
        self.files = files
        self.lower = lower
        self.split: dict[str, Mapping[int, tuple[ShardPieces, ...]]] = {}

    def add_unsliced(self) -> None:
        """Every module tensor without optimizer slices is planned (ZeRO 0 to 2)."""
        faults = Faults()
        for name, found in self._unsliced().items():
            try:
                self._refuse_owned(name)
                self._add(name, found)
            except AffineError as fault:
                faults.add(fault)
        faults.raise_if_any()

    def _refuse_owned(self, name: str) -> None:
        """DeepSpeed's optimizer has a slice of every parameter it owns, whether or not it ever had a gradient."""
        shapes = self.checkpoint.shapes.get(name, ()) if self.checkpoint.stage else ()
        if any(shape_numel(shape) for shape in shapes if shape is not None):
            raise CheckpointFormatError(
                f"parameter {name!r}: a model-state file lists it among the optimizer's, and no optimizer file has a "
                "slice of it; its states would be lost. The files are of different saves: take all of them from one.",
                param=name,
            )

    def add_frozen_partitions(self) -> None:
        """The frozen parameters of a tensor-parallel ZeRO-3 checkpoint are planned; without tensor parallelism
        DeepSpeed's own output leaves them in the model-state files."""
        checkpoint = self.checkpoint
        shapes: dict[str, dict[int, tuple[int, ...]]] = {}
        stored: dict[str, dict[int, list[tuple[Fragment, int]]]] = {}
        dtypes: dict[str, str] = {}
        for file in checkpoint.model_files:
            for name, fragment in file.frozen_fragments.items():
                shape = file.frozen_shapes.get(name)
                if shape is None:
                    raise CheckpointFormatError(
                        f"{file.path}: frozen parameter {name!r} is stored, but its shape is not recorded; both are "
                        "expected. The file is damaged: use another checkpoint.",
                        param=name,
                        file=file.path,
                    )
                held, _ = zero3_interval(shape_numel(shape), checkpoint.dp_degree, file.rank)
                shapes.setdefault(name, {})[file.shard.tp] = shape
                part = (Fragment(fragment, 0, held, file.rank), self.files.storage(fragment))
                stored.setdefault(name, {}).setdefault(file.shard.tp, []).append(part)
                if dtypes.setdefault(name, fragment.dtype) != fragment.dtype:
                    raise _mixed(name, dtypes[name], fragment.dtype)
        for name, by_rank in stored.items():
            layout = self._layout(name, shapes[name])
            shards = {
                rank: (
                    ShardPieces(
                        fragment_pieces(parts, shape_numel(shapes[name][rank]), param=name, rank=rank), f"tp {rank}"
                    ),
                )
                for rank, parts in by_rank.items()
            }
            self.split[name] = shards
            self.files.add(name, FP32, Source(dtypes[name], shards), layout, BARE, dtype="float32")

    def _unsliced(self) -> dict[str, _Unsliced]:
        checkpoint = self.checkpoint
        everything = self.files.options.rules.skips_absent_states or checkpoint.stage == 0
        # A parameter with slices that is not planned was refused.
        written = {task.param for task in self.files.tensors if task.state == FP32}.union(checkpoint.states)
        found: dict[str, _Unsliced] = {}
        for file in checkpoint.model_files:
            wanted = {*checkpoint.shapes, *file.frozen_shapes}
            for name, value in (file.module or {}).items():
                if not isinstance(value, TensorRef):
                    note = f"{name}: a {type(value).__name__} of the module, not a tensor; left out"
                    self.files.notes += [note] if note not in self.files.notes else []
                elif (everything or name in wanted) and name not in written:
                    entry = found.setdefault(name, _Unsliced())
                    entry.add(file.shard, value, name in file.buffers, name in file.aliases)
        for name, by_rank in checkpoint.expert_tensors.items():
            if name not in written:
                entry = found.setdefault(name, _Unsliced())
                for rank, value in by_rank.items():
                    entry.add(ShardKey(0, rank), value)
        return found

    def _add(self, name: str, found: _Unsliced) -> None:
        degree, split = self.checkpoint.tp_degree, False
        ranks = sorted(found.by_rank)
        first = found.by_rank[ranks[0]][0][1]
        shapes = {rank: found.by_rank[rank][0][1].shape for rank in ranks}
        if found.is_alias or degree == 1:
            # An alias is never read back: DeepSpeed restores the parameter it stands for. It is written as
            # DeepSpeed writes it, from the first file that holds it.
            layout = replicated_map(first.shape, 1)
            ranks = ranks[:1]
        elif found.is_buffer and len(ranks) == degree and len(set(shapes.values())) == 1:
            layout = replicated_map(first.shape, degree)
        else:
            layout = self._layout(name, shapes)
            split = True
        shards: dict[int, tuple[ShardPieces, ...]] = {}
        for rank in ranks:
            copies = found.by_rank[rank][: 1 if found.is_alias else None]
            for shard, ref in copies:
                if ref.shape != shapes[rank]:
                    raise CheckpointFormatError(
                        f"parameter {name!r}: {shard.label(self.checkpoint.pp_degree)} holds shape {ref.shape}, "
                        f"another pipeline stage {shapes[rank]}; one is expected. The files come from different runs.",
                        param=name,
                        rank=rank,
                    )
                if ref.dtype != first.dtype:
                    raise _mixed(name, first.dtype, ref.dtype)
            shards[rank] = tuple(
                ShardPieces(
                    whole_pieces(ref, self.files.storage(ref), param=name), shard.label(self.checkpoint.pp_degree)
                )
                for shard, ref in copies
            )
        if split:
            self.split[name] = shards
        self.files.add(name, FP32, Source(first.dtype, shards), layout, BARE, dtype="float32")

    def _layout(self, name: str, shapes: Mapping[int, tuple[int, ...]]) -> ParamAffineMap:
        return self.lower(name, [shapes.get(rank) for rank in range(self.checkpoint.tp_degree)]).map


def _mixed(name: str, one: str, other: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"parameter {name!r}: its parts have dtypes {one} and {other}; one is expected. The files come from runs of "
        "different precision: check that they are of one save.",
        param=name,
    )
