"""What an ordinary checkpoint holds of a live parameter: as ``StoredParams``, with nothing having been converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed_affine.errors import CheckpointFormatError, UnsupportedLayoutError
from deepspeed_affine.execute.on_demand import OnDemand
from deepspeed_affine.execute.planned_part import PlannedPart
from deepspeed_affine.hooks.stored_params import FP32, Part, StoredParams, is_same_view, is_scaled
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.policy import ScaledStates
from deepspeed_affine.plan.conversion import TensorFile
from deepspeed_affine.storage.refs import TensorRef
from deepspeed_affine.storage.universal import read_number

if TYPE_CHECKING:
    import torch

    from deepspeed_affine.hooks.layouts import LiveParam

__all__ = ["PlannedParams"]


class PlannedParams(StoredParams):
    """The parameters of one ordinary checkpoint, as an engine's parameters see them.

    What F of a state would be made of is planned when it is first asked for, which no two threads may do at once.
    """

    def __init__(self, source: OnDemand, scaled_states: ScaledStates) -> None:
        super().__init__(source.checkpoint.folder.path, scaled_states)
        self.source = source

    def states(self, live: LiveParam) -> tuple[str, ...]:
        """As ``StoredParams.states``."""
        return self.source.states.get(live.universal, ())

    def number(self, live: LiveParam, state: str) -> torch.Tensor | int | float | None:
        """As ``StoredParams.number``."""
        import torch

        value = self.source.number(live.universal, state)
        if not isinstance(value, TensorRef):
            return value if isinstance(value, (int, float)) else None
        number = read_number(value, self._reader)
        if number is None:
            raise CheckpointFormatError(
                f"parameter {live.name!r}: its state {state!r} in {value.storage.path} is one {value.dtype}; expected "
                "a number.",
                param=live.name,
                file=value.storage.path,
            )
        return torch.tensor(number, dtype=getattr(torch, value.dtype))

    def dtype(self, live: LiveParam, state: str) -> torch.dtype:
        """As ``StoredParams.dtype``."""
        import torch

        found = getattr(torch, self._task(live, state).dtype, None)
        return found if isinstance(found, torch.dtype) else torch.float32

    def part(self, live: LiveParam, state: str, start: int, numel: int) -> Part | None:
        """As ``StoredParams.part``."""
        task = self._task(live, state)
        where = self.file_of(task)
        entries = dict(task.entries or ())
        self._check_shape(live, where, task.shape, is_vocabulary=bool(entries.get(keys.VOCAB_TENSOR)))
        if state != FP32 and task.fill == "zero":
            if self.scaled_states is ScaledStates.REFUSE:
                raise UnsupportedLayoutError(
                    f"parameter {live.name!r}: the ranks that saved {where} held it scaled, and its optimizer state "
                    f"{state!r} would not follow: lr and eps stay in the coordinate it was trained in. Say "
                    "scaled_states='reset' for zeros, or 'power' to apply the state's power of the scale.",
                    param=live.name,
                    file=where,
                )
            return None
        if state != FP32 and is_scaled(live) and not self._scales(live, state, where):
            return None
        return PlannedPart(task, self.source.storages, live.layout, live.rank, start, numel)

    def file_of(self, task: TensorFile) -> str:
        """The first file that F would be gathered from, for a message."""
        for piece in task.pieces:
            (index,) = piece.locations
            return self.source.storages[index].file
        return self.source.checkpoint.folder.path

    def _task(self, live: LiveParam, state: str) -> TensorFile:
        name, expected = live.universal, live.layout.logical_shape
        task = self.source.tensors(name).get(state)
        if task is not None and not is_same_view(task.shape, expected) and self.source.take_as_copies(name, expected):
            task = self.source.tensors(name).get(state)
        if task is None:
            raise CheckpointFormatError(
                f"parameter {live.name!r}: its state {state!r} in {self.zero} is a number; expected a tensor of shape "
                f"{expected}.",
                param=live.name,
                file=self.zero,
            )
        return task
