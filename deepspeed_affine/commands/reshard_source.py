"""The side of a resharding that is read: where every state of every tensor lies, and what stands beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, UnsupportedLayoutError
from deepspeed_affine.execute.agreement import check_groups, partition_numbers, require_one_set_of_hyperparameters
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.execute.model_file import ModelFile
from deepspeed_affine.execute.tensor_files import ConversionOptions, TensorFiles, source_storage
from deepspeed_affine.ir import SCALE_POWER_BY_STATE, AffinePiece
from deepspeed_affine.lowering.reading import as_mapping
from deepspeed_affine.lowering.state_table import ShardKey
from deepspeed_affine.lowering.states import FP32
from deepspeed_affine.lowering.zero import Fragment, fragment_pieces, zero3_interval
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout
from deepspeed_affine.plan.conversion import ConversionPlan, ShardPieces, SourceStorage, plan_sources
from deepspeed_affine.plan.reshard import StoredShard, without_padding
from deepspeed_affine.storage.checkpoint_file import load_checkpoint_file
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["GroupStates", "ReshardSource", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One state of one parameter: pieces from F to storages, and the flags the tensors were saved with.

    ``zero`` says that zeros are to be written whatever is stored.
    """

    dtype: str
    pieces: tuple[AffinePiece, ...]
    requires_grad: bool = False
    zero: bool = False


@dataclass(frozen=True, slots=True)
class GroupStates:
    """What the optimizer keeps of the parameters of one group, in the order in which it was saved.

    ``tensors`` are names of states with a tensor for each parameter, ``values`` states that are a number or None.
    """

    order: tuple[str, ...]
    tensors: frozenset[str]
    values: Mapping[str, Any]


class ReshardSource:
    """A checkpoint, its conversion plan and its layout, asked tensor by tensor.

    ``storages`` are those that pieces name by their index: the plan's, and behind them what was asked for besides.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ConversionPlan,
        layout: CheckpointLayout,
        options: ConversionOptions,
        *,
        padded: bool,
    ) -> None:
        """``padded`` says that rows of vocabulary padding are carried over like others."""
        self.checkpoint = checkpoint
        self.layout = layout
        self._tasks = {(task.param, task.state): task for task in plan.tensors}
        self._padded = padded
        self._storages = list(plan.storages)
        self._places = {storage: at for at, storage in enumerate(self._storages)}
        self._roots: dict[str, Mapping[str, Any]] = {}
        self._shards: dict[tuple[str, str, int], StoredShard] = {}
        self._found: dict[tuple[str, str], Stored | None] = {}
        self._numbers = TensorFiles(options, checkpoint.pp_degree)
        self._leaving = partition_numbers(checkpoint, self._numbers)
        check_groups(checkpoint, self._numbers, self._leaving)
        self._orders: dict[str, Mapping[str, Any]] = {}
        for record in checkpoint.states.groups:
            for place in record.places:
                self._orders.setdefault(place.name, record.states)

    @property
    def storages(self) -> tuple[SourceStorage, ...]:
        return tuple(self._storages)

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the numbers asked for so far was not carried over as it was."""
        left = sorted({state for _, state in self._leaving})
        computed = [f"left out, a number each rank computed of its own partition: {', '.join(left)}"] if left else []
        return (*dict.fromkeys(self._numbers.notes), *computed)

    def rows(self, name: str) -> int | None:
        """How many rows of the parameter are no padding, where the plan knows."""
        task = self._tasks.get((name, FP32))
        if task is None or task.map_shape != self.layout.params[name].layout.logical_shape:
            return None
        return task.shape[0] if task.shape else None

    def stored(self, name: str, state: str = FP32) -> Stored:
        """Where the state of the parameter lies; CheckpointFormatError where no file has it."""
        key = (name, state)
        if key not in self._found:
            self._found[key] = self._find(name, state)
        found = self._found[key]
        if found is None:
            raise CheckpointFormatError(
                f"parameter {name!r}: no file of {self.checkpoint.folder.path} holds its {state}; one is expected. The "
                "files come from different saves, or one is damaged.",
                param=name,
            )
        return found

    def shard(self, target: CheckpointLayout, name: str, state: str, tp: int) -> StoredShard:
        """Where the state of that rank's shard of the target lies; ``target`` is the same every time."""
        key = (name, state, tp)
        if key not in self._shards:
            stored = self.stored(name, state)
            power = SCALE_POWER_BY_STATE.get(state, 1)
            held = target.params[name].layout.pieces_by_rank[tp]
            self._shards[key] = StoredShard(held, () if stored.zero else stored.pieces, power)
        return self._shards[key]

    def reset(self, name: str, state: str) -> None:
        """After this the state counts as zeros."""
        self._found[name, state] = replace(self.stored(name, state), zero=True)

    def model_file(self, mp: int, dp: int = 0) -> ModelFile:
        """The model-state file of that rank, or where there is none, the first of its model-parallel rank."""
        shard = ShardKey(*divmod(mp, self.layout.tp))
        files = [file for file in self.checkpoint.model_files if file.shard == shard]
        return next((file for file in files if file.rank == dp), files[0])

    def states_of(self, names: Sequence[str]) -> GroupStates:
        """The states of parameters that are to share flat tensors; refused where they differ."""
        table = self.checkpoint.states
        found: GroupStates | None = None
        for name in names:
            entry = table.get(name)
            tensors = frozenset() if entry is None else frozenset({*entry.tensors, *entry.whole} - {FP32})
            values: dict[str, Any] = {}
            for state, scalars in ({} if entry is None else entry.scalars).items():
                if entry is not None and (entry.group, state) not in self._leaving:
                    values[state] = scalars[0].value
            order = tuple(self._orders.get(name, ()))
            values.update({state: None for state in order if self._orders[name][state] is None})
            mine = GroupStates(tuple(s for s in order if s in tensors or s in values), tensors, values)
            if found is None:
                found = mine
                continue
            if mine.tensors != found.tensors or mine.values.keys() != found.values.keys():
                ours, theirs = (sorted({*each.tensors, *each.values}) for each in (found, mine))
                raise UnsupportedLayoutError(
                    f"parameters {names[0]!r} and {name!r} are to lie in one flat tensor, and the optimizer has states "
                    f"{ours} of the first and {theirs} of the second; one set is expected. Take a step that updates "
                    "both before saving.",
                    param=name,
                )
            for state, value in mine.values.items():
                subject = f"parameters {names[0]!r} and {name!r}, to lie in one flat tensor: state {state!r}"
                self._numbers.same_number(subject, found.values[state], value, param=name, file=self.optimizer_path)
        return found or GroupStates((), frozenset(), {})

    def require_one_set_of_hyperparameters(self) -> None:
        """All pipeline stages have the same; those of stages that differ belong to no other cut."""
        advice = "Keep the model cut as it is, or load it in DeepSpeed, set one value and save again."
        require_one_set_of_hyperparameters(self.checkpoint, self._numbers, advice)

    @property
    def optimizer_path(self) -> str:
        return self.checkpoint.folder.optim_files[0].path

    def _find(self, name: str, state: str) -> Stored | None:
        task = self._tasks.get((name, state))
        if task is None:
            return self._frozen(name) if state == FP32 else None
        pieces = task.pieces
        if not self._padded and task.shape != task.map_shape:
            pieces = without_padding(pieces, task.numel)
        first = next((self._storages[index] for piece in task.pieces for index in piece.locations), None)
        dtype = task.dtype if first is None else first.dtype
        return Stored(dtype, pieces, task.requires_grad, task.fill == "zero")

    def _frozen(self, name: str) -> Stored | None:
        """A frozen parameter that ZeRO-3 without tensor parallelism leaves in the model-state files, in parts."""
        checkpoint = self.checkpoint
        layout = self.layout.params[name].layout
        shards: dict[int, list[tuple[Fragment, int]]] = {}
        dtype = ""
        for file in checkpoint.model_files:
            fragment = file.frozen_fragments.get(name)
            if fragment is None:
                continue
            dtype = fragment.dtype
            numel = layout.numel if file.shard.tp not in layout.shard_shapes else layout.shard_numel(file.shard.tp)
            held, _ = zero3_interval(numel, checkpoint.dp_degree, file.rank)
            part = (Fragment(fragment, 0, held, file.rank), self.storage(fragment))
            shards.setdefault(file.shard.tp, []).append(part)
        if not shards:
            return None
        copies = {
            rank: [ShardPieces(fragment_pieces(parts, layout.shard_numel(rank), param=name, rank=rank), f"tp {rank}")]
            for rank, parts in shards.items()
        }
        pieces, _ = plan_sources(layout, copies, param=name, state=FP32)
        return Stored(dtype, pieces)

    def storage(self, tensor: TensorRef) -> int:
        """The index of the storage the tensor lies in."""
        storage = source_storage(tensor.storage)
        at = self._places.setdefault(storage, len(self._storages))
        if at == len(self._storages):
            self._storages.append(storage)
        return at

    def root(self, path: str) -> Mapping[str, Any]:
        """What the file at ``path`` holds, read once; nobody changes it."""
        if path not in self._roots:
            self._roots[path] = as_mapping(load_checkpoint_file(path).root, "what it holds", path)
        return self._roots[path]

    def extra_states(self, path: str) -> Mapping[str, Any]:
        """The module's entries that are no tensors, nor stand for one."""
        module = self.root(path).get("module") or {}
        return {
            name: value
            for name, value in module.items()
            if not isinstance(value, TensorRef) and name not in self.layout.params
        }
