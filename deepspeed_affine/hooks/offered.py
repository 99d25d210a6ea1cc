"""A universal folder as a load sees it: every weight, state and number it offers, whichever file holds it.

Most lie below ``zero``. ZeRO-3 keeps frozen parameters in the model-state files, one partition a rank; DeepSpeed before
0.19.8 leaves frozen parameters and buffers there too; and steps may be kept for a whole group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import CheckpointFormatError, Faults
from deepspeed_affine.execute.checkpoint import DIMENSIONS
from deepspeed_affine.execute.model_file import UC_INFO, ModelFile, read_model_file
from deepspeed_affine.execute.shards import ShardPart
from deepspeed_affine.hooks.positional import positional_states
from deepspeed_affine.hooks.stored_params import FP32, STEP, Part, StoredParams, is_same_view
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.lowering.experts import NATIVE_EXPERT
from deepspeed_affine.lowering.policy import ScaledStates
from deepspeed_affine.lowering.states import ShardKey
from deepspeed_affine.lowering.zero import whole_pieces, zero3_interval
from deepspeed_affine.storage.files import ByteReader, join
from deepspeed_affine.storage.pt_reader import Loaded, load_pickle
from deepspeed_affine.storage.refs import TensorRef
from deepspeed_affine.storage.universal import ZERO, UniversalFolder, read_number

if TYPE_CHECKING:
    import torch

    from deepspeed_affine.hooks.layouts import LiveParam

__all__ = ["LOST", "Offered", "Shape"]

LOST = "optimizer states"
"""What ``Offered.place`` calls all of them together."""
Shape = tuple[int, ...]
Number = Any


class Offered:
    """What one universal folder has for parameters that are asked for by their universal names.

    Files are read when something of them is asked for, and their tensors only by ``fill``. Threads may share it.
    """

    def __init__(self, folder: UniversalFolder, scaled_states: ScaledStates) -> None:
        self.folder = folder
        self.reader = ByteReader()
        self.stored = self._params(scaled_states)
        self._numbers: dict[str, dict[str, Number]] = {}
        self._by_position: dict[str, dict[str, Any]] = {}
        self._model_file = cache(self._parse)

    def _params(self, scaled_states: ScaledStates) -> StoredParams:
        """What is stored parameter by parameter."""
        return StoredParams(join(self.folder.path, ZERO), scaled_states)

    def load(self, path: str) -> Loaded:
        """The object graph of one file."""
        return load_pickle(path)

    def close(self) -> None:
        """After this no file is open."""
        self.reader.close()
        self.stored.close()

    # ---------------------------------------------------------------- names

    @property
    def names(self) -> set[str]:
        """Every name with a folder below ``zero``, and every frozen parameter the model-state files hold."""
        return set(self.folder.states) | set(self.model.frozen_fragments)

    def has_weights(self, name: str) -> bool:
        return FP32 in self.folder.states.get(name, ()) or self._elsewhere(name) is not None

    def state_names(self, name: str) -> tuple[str, ...]:
        """The optimizer states of a parameter that are stored, numbers among them."""
        found = {**self.folder.states.get(name, {}), **self._by_position.get(name, {})}
        return tuple(state for state in found if state != FP32)

    def place(self, groups: Sequence[Sequence[LiveParam]]) -> dict[str, str]:
        """Take states that are stored by position to be of the parameters of ``groups``; what is left out, and why."""
        if self._is_zero3 or len(self.folder.model_files) > 1:
            return {}
        # The file is one rank's, and that holds all experts or only its own, which have the same places as others'.
        experts = {name for name in self.folder.states if NATIVE_EXPERT.fullmatch(name)}
        here = {live.universal for group in groups for live in group}
        apart = experts if experts - here else set()
        found = positional_states(self.model.root, groups, apart)
        self._by_position = found or {}
        if found is None:
            return {
                LOST: "the checkpoint was saved without ZeRO, which stores them by position, and the engine's "
                "parameter groups have other numbers or shapes, or the optimizer keeps states of other shapes"
            }
        if apart and found:
            return {
                "optimizer states of experts": "the checkpoint was saved without ZeRO and with experts over several "
                "ranks, and its model-state file has those of one rank. Save with ZeRO stage 1 to keep them"
            }
        return {}

    @property
    def by_position(self) -> bool:
        """Whether states were taken by ``place``."""
        return bool(self._by_position)

    def check_copies(self, names: Collection[str], faults: Faults) -> None:
        """Note every parameter of ``names`` of which the files hold copies that differ: here there is one of each."""

    def check_hyperparameters(self) -> None:
        """The saved parameter groups have one value of each hyperparameter: here there is one of each."""

    # ---------------------------------------------------------------- model-state files

    @property
    def layers(self) -> Mapping[str, Any]:
        """What the files of a pipeline's layers hold, by the names that the model has for it: here there are none."""
        return {}

    @cached_property
    def model(self) -> ModelFile:
        """The first model-state file."""
        return self.models[0]

    @cached_property
    def models(self) -> tuple[ModelFile, ...]:
        """The model-state files of tensor-parallel and data-parallel rank 0, one a pipeline stage."""
        files = self.folder.model_files
        if not files:
            raise CheckpointFormatError(
                f"{self.folder.path}: holds no *_model_states.pt file, which has the counters, the scheduler and the "
                "client state; expected one. Convert again, or copy the whole folder.",
                file=self.folder.path,
            )
        first = self._model_file(files[0].path)
        dims = first.root.get(DIMENSIONS)
        degree = dims.get("tp_degree") if isinstance(dims, Mapping) else None
        step = degree if type(degree) is int and degree > 0 else 1
        rest = [file.path for file in files[1:] if not file.dp and (file.mp or 0) % step == 0]
        return (first, *(self._model_file(path) for path in rest))

    def _parse(self, path: str) -> ModelFile:
        return read_model_file(path, ShardKey(0, 0), 0, self.load(path).root)

    def model_root(self, mp: int, mp_degree: int, dp: int, dp_degree: int) -> Mapping[str, Any]:
        """The root of the file that stands for that rank of a job of those degrees, as DeepSpeed would choose it."""
        files = self.folder.model_files
        mps, dps = sorted({file.mp or 0 for file in files}), sorted({file.dp or 0 for file in files})
        wanted = (mps[mp * len(mps) // mp_degree], dps[dp * len(dps) // dp_degree])
        path = next((file.path for file in files if (file.mp or 0, file.dp or 0) == wanted), self.model.path)
        return self.model.root if path == self.model.path else self._model_file(path).root

    def own_module(self, mp: int, mp_degree: int, dp: int, dp_degree: int) -> Mapping[str, Any]:
        """The module that this very rank saved, empty where the job had other ranks. ZeRO-3 saves one of every rank,
        and what is not averaged (BatchNorm's statistics) differs; other stages save that of data-parallel rank 0."""
        files = self.folder.model_files
        mps, dps = {file.mp or 0 for file in files}, {file.dp or 0 for file in files}
        if len(mps) != mp_degree or len(dps) not in (1, dp_degree):
            return {}
        found = self.model_root(mp, mp_degree, dp, dp_degree).get("module")
        return found if isinstance(found, Mapping) else {}

    @cached_property
    def optimizer(self) -> Mapping[str, Any]:
        """The root of ``optimizer_state.pt``, empty where there is none."""
        if self.folder.optimizer_state is None:
            return {}
        root = self.load(self.folder.optimizer_state).root
        return root if isinstance(root, Mapping) else {}

    @property
    def info(self) -> Mapping[str, Any] | None:
        """The ``universal_checkpoint_info`` the checkpoint was saved with."""
        found = self.model.root.get(UC_INFO)
        return found if isinstance(found, Mapping) else None

    @cached_property
    def recorded_shapes(self) -> Mapping[str, Shape]:
        """Whole shapes, where the files record them: those of a checkpoint without tensor parallelism."""
        if len({file.mp for file in self.folder.model_files}) > 1:
            return {}
        return {**self.model.shapes, **self.model.frozen_shapes}

    # ---------------------------------------------------------------- parameter groups

    @cached_property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The saved hyperparameters of every parameter group; those stored as a tensor of one number are numbers."""
        inner = self.optimizer.get("optimizer_state_dict")
        for found in (self.optimizer.get("param_groups"), inner and inner.get("param_groups")):
            if isinstance(found, (list, tuple)) and all(isinstance(group, Mapping) for group in found):
                return [{key: self._plain(value) for key, value in group.items()} for group in found]
        return ()

    def _plain(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self._plain(item) for item in value)
        number = read_number(value, self.reader) if isinstance(value, TensorRef) and not value.shape else None
        return value if number is None else number

    @cached_property
    def group_names(self) -> Sequence[set[str]] | None:
        """The parameters of every saved group, as their rank called them; None where the files do not say."""
        found: list[set[str]] = [set() for _ in self.param_groups]
        for model in self.models:
            if self._is_zero3:
                cut = [group.get("params") for group in self.param_groups]
                if any(not isinstance(row, (list, tuple)) for row in cut):
                    return None
                if any(type(at) is not int or at >= len(model.groups) for row in cut for at in row or ()):
                    return None
                for names, row in zip(found, cut, strict=True):
                    names.update(name for at in row or () for name in model.groups[at])
            elif len(model.groups) == len(found):
                for names, shapes in zip(found, model.groups, strict=True):
                    names.update(shapes)
            else:
                return None
        return found if any(found) else None

    @cached_property
    def _is_zero3(self) -> bool:
        return any(file.kind == "zero_model" for file in self.folder.model_files)

    # ---------------------------------------------------------------- numbers

    def numbers(self, live: LiveParam) -> dict[str, Number]:
        """The states of a parameter that are one number: its own, or those of the sub-group it was saved in."""
        known = self._numbers.get(live.universal)
        if known is not None:
            return known
        found: dict[str, Number] = {}
        for state in self.folder.states.get(live.universal, ()):
            value = self.stored.number(live, state) if state != FP32 else None
            if value is not None:
                found[state] = value
        for state, value in self._by_position.get(live.universal, {}).items():
            number = self._number(value)
            if number is not None:
                found[state] = number
        if STEP not in found:
            found = {**dict(self._numbers_of_sub_group(live)), **found}
        self._numbers[live.universal] = found
        return found

    def _numbers_of_sub_group(self, live: LiveParam) -> Iterator[tuple[str, Number]]:
        inner = self.optimizer.get("optimizer_state_dict")
        states = inner.get("state") if isinstance(inner, Mapping) else None
        if not isinstance(states, Mapping) or not states:
            return
        held = (at for at, group in enumerate(self.model.groups) if {live.name, live.universal} & set(group))
        entry = states.get(next(held, None))
        # A checkpoint saved by a rank without the parameter says nothing of it; no other sub-group's number is its.
        for state, value in (entry or {}).items():
            number = self._number(value)
            if number is not None:
                yield state, number

    def _number(self, value: Any) -> Number:
        """``value`` where it is one number, a tensor where it was stored as one."""
        number = read_number(value, self.reader) if isinstance(value, TensorRef) and not value.shape else value
        if not isinstance(number, (bool, int, float)):
            return None
        return _as_tensor(number, value) if isinstance(value, TensorRef) else number

    def group_step(self, live: LiveParam) -> Number:
        """The step that the parameter's saved group counts for all of its parameters, None where it does not."""
        for names, group in zip(self.group_names or (), self.param_groups, strict=False):
            if {live.name, live.universal} & names and type(group.get(STEP)) is int:
                return group[STEP]
        return None

    # ---------------------------------------------------------------- elements

    def part(self, live: LiveParam, state: str, start: int, numel: int) -> Part | None:
        """As ``StoredParams.part``, also for what only the model-state files have."""
        placed = self._by_position.get(live.universal, {}).get(state)
        if placed is not None:
            return ShardPart(placed, live.layout, live.rank, start, numel)
        if state == FP32 and FP32 not in self.folder.states.get(live.universal, ()):
            return self._part_elsewhere(live, start, numel)
        part = self.stored.part(live, state, start, numel)
        if part is not None:
            self._check_recorded(live, part.shape, part.path)
        return part

    def fill(self, live: LiveParam, state: str, start: int, out: torch.Tensor) -> None:
        """``out`` (flat) holds the elements of this rank's flattened shard from ``start`` on."""
        if self._is_below_zero(live, state):
            self.stored.fill(live, state, start, out)
            return
        part = self.part(live, state, start, out.numel())
        if part is not None:
            part.fill(out, self.reader)

    def dtype(self, live: LiveParam, state: str) -> torch.dtype:
        """The dtype in which the state is stored."""
        import torch

        placed = self._by_position.get(live.universal, {}).get(state)
        found: torch.dtype = self.stored.dtype(live, state) if placed is None else getattr(torch, placed.dtype)
        return found

    def _is_below_zero(self, live: LiveParam, state: str) -> bool:
        return state in self.folder.states.get(live.universal, ()) and state not in self._by_position.get(
            live.universal, ()
        )

    def buffer(self, name: str, own: Mapping[str, Any]) -> TensorRef | None:
        """A buffer as the module had it: in ``own``, this rank's, else in the first. Below ``zero`` it is in float32,
        which not every number is."""
        found = own.get(name) if isinstance(own.get(name), TensorRef) else (self.model.module or {}).get(name)
        return found if isinstance(found, TensorRef) and found.numel else self.whole(name)

    def whole(self, name: str) -> TensorRef | None:
        """A tensor kept whole under that name, in whichever file."""
        if FP32 in self.folder.states.get(name, ()):
            path = self.folder.states[name][FP32].path
            root = self.load(path).root
            found = root.get("param") if isinstance(root, Mapping) else root
        else:
            found = (self.model.module or {}).get(name)
        return found if isinstance(found, TensorRef) else None

    def _check_recorded(self, live: LiveParam, shape: Shape, path: str) -> None:
        """A flat file says nothing of its shape; what the checkpoint recorded beside it does."""
        recorded = self.recorded_shapes.get(live.universal)
        expected = live.layout.logical_shape
        if recorded is None or shape == expected or is_same_view(recorded, expected):
            return
        if len(shape) == 1:
            raise CheckpointFormatError(
                f"parameter {live.name!r}: was saved with shape {recorded}, the engine's parameter has {expected} as a "
                "whole; the two must agree. The checkpoint is of another model: build the engine's as the one that was "
                "saved.",
                param=live.name,
                file=path,
            )

    def _elsewhere(self, name: str) -> tuple[tuple[TensorRef, ...], Shape] | None:
        """A weight in the model-state files, with its shape: one partition a data-parallel rank, or whole."""
        if name in self.model.frozen_fragments and len({file.mp for file in self.folder.model_files}) == 1:
            fragments = [model.frozen_fragments.get(name) for model in self._every_rank]
            held = tuple(fragment for fragment in fragments if fragment is not None)
            shape = self.model.frozen_shapes.get(name)
            return (held, shape) if len(held) == len(fragments) and shape is not None else None
        found = (self.model.module or self.layers).get(name)
        return ((found,), found.shape) if isinstance(found, TensorRef) and found.numel else None

    @cached_property
    def _every_rank(self) -> tuple[ModelFile, ...]:
        return tuple(self._model_file(file.path) for file in self.folder.model_files)

    def _part_elsewhere(self, live: LiveParam, start: int, numel: int) -> ShardPart:
        if self.folder.states.get(live.universal):
            # The weights of what was stepped are not those the module had, which may be of low precision.
            folder = join(self.stored.zero, *live.universal.split("/"))
            raise CheckpointFormatError(
                f"parameter {live.name!r}: {folder} holds optimizer states and no {FP32}.pt; expected the weights "
                "beside them. Copy the folder again, whole, or convert again.",
                param=live.name,
                file=folder,
            )
        tensors, shape = self._elsewhere(live.universal) or ((), ())
        if not is_same_view(shape, live.layout.logical_shape):
            raise CheckpointFormatError(
                f"parameter {live.name!r}: {self.model.path} holds it with shape {shape}, the engine's parameter has "
                f"{live.layout.logical_shape} as a whole; the two must agree. The checkpoint is of another model, or "
                "the parameter is cut over tensor-parallel ranks there: convert with DeepSpeed 0.19.8 or later, which "
                "puts it below zero.",
                param=live.name,
                file=self.model.path,
            )
        if len(tensors) == 1:
            return ShardPart(tensors[0], live.layout, live.rank, start, numel)
        return ShardPart(tensors, live.layout, live.rank, start, numel, _partitions(tensors, shape))


def _partitions(tensors: Sequence[TensorRef], shape: Shape) -> tuple[AffinePiece, ...]:
    """Where in its ranks' partitions a frozen ZeRO-3 parameter lies; each is padded to one length."""
    numel = 1
    for extent in shape:
        numel *= extent
    pieces: list[AffinePiece] = []
    for rank, tensor in enumerate(tensors):
        held, reserved = zero3_interval(numel, len(tensors), rank)
        (piece,) = whole_pieces(replace(tensor, shape=(held,)), rank)
        pieces.append(replace(piece, source_offset=rank * reserved))
    return tuple(pieces)


def _as_tensor(number: float, ref: TensorRef) -> torch.Tensor:
    import torch

    return torch.tensor(number, dtype=getattr(torch, ref.dtype))
