"""A checkpoint as an engine saves it, seen as what its conversion would offer. Nothing is converted or written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from deepspeed_affine.errors import AffineError, Faults
from deepspeed_affine.execute.checkpoint import read_checkpoint
from deepspeed_affine.execute.on_demand import OnDemand, raise_drift
from deepspeed_affine.execute.other_files import optimizer_state
from deepspeed_affine.execute.tensor_files import ConversionOptions
from deepspeed_affine.hooks.offered import Offered
from deepspeed_affine.hooks.planned_params import PlannedParams
from deepspeed_affine.lowering.policy import ScaledStates
from deepspeed_affine.lowering.states import FP32
from deepspeed_affine.lowering.stock_rules import NEWEST_KNOWN, StockRules
from deepspeed_affine.storage.checkpoint_file import load_checkpoint_file
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.pt_reader import Loaded
from deepspeed_affine.storage.refs import TensorRef
from deepspeed_affine.storage.universal import StateFile, UniversalFolder

__all__ = ["OrdinaryOffered"]


class OrdinaryOffered(Offered):
    """What one ordinary checkpoint has for parameters that are asked for by their universal names.

    The metadata of all of its files is read once. ``info`` says how a checkpoint is cut that does not say so itself.
    Raises CheckpointFormatError naming every file that is missing or contradicts the others.
    """

    def __init__(self, path: str, scaled_states: ScaledStates, info: Mapping[str, Any] | None = None) -> None:
        self._loaded: dict[str, Loaded] = {}
        checkpoint = read_checkpoint(path, self.load)
        # The words of the files beside F are of no use here; the newest rules offer all that the module holds.
        options = ConversionOptions(
            rules=StockRules.for_version(NEWEST_KNOWN),
            strict=False,
            inject_missing_state=True,
            # A refusal is only for an engine that wants these states, and says so in other words.
            scaled_states=ScaledStates.RESET if scaled_states is ScaledStates.REFUSE else scaled_states,
            info=info,
        )
        self._planning = ByteReader()
        self.source = OnDemand(checkpoint, options, self._planning)
        states = {
            name: {state: StateFile(name, state, state, checkpoint.folder.path, 0) for state in found}
            for name, found in self.source.states.items()
        }
        files = checkpoint.folder.zero_model_files if checkpoint.stage == 3 else checkpoint.folder.model_files
        sizes = {file.name: file.size for file in checkpoint.folder.files}
        folder = UniversalFolder(checkpoint.folder.path, states, None, files, None, (), sizes)
        super().__init__(folder, scaled_states)

    def _params(self, scaled_states: ScaledStates) -> PlannedParams:
        return PlannedParams(self.source, scaled_states)

    def load(self, path: str) -> Loaded:
        """As ``Offered.load``; a file is parsed once."""
        found = self._loaded.get(path)
        if found is None:
            found = self._loaded[path] = load_checkpoint_file(path)
        return found

    def close(self) -> None:
        """As ``Offered.close``."""
        super().close()
        self._planning.close()
        self._loaded.clear()

    @cached_property
    def optimizer(self) -> Mapping[str, Any]:
        """What a conversion would put into ``optimizer_state.pt``."""
        return optimizer_state(self.source.checkpoint, self.load)

    def whole(self, name: str) -> TensorRef | None:
        """A tensor the module keeps whole under that name, as its first file has it; None for what is cut."""
        if FP32 in self.folder.states.get(name, ()) and name in self.source.checkpoint.states:
            return None
        found = (self.model.module or self.layers).get(name)
        return found if isinstance(found, TensorRef) else None

    @cached_property
    def layers(self) -> Mapping[str, Any]:
        """As ``Offered.layers``. A pipeline saves its module there, of which frozen parameters and buffers are nowhere
        else. It calls a layer by its number, and tied ones by a name that their file does not have; of layers cut over
        tensor-parallel ranks a file holds a part."""
        files = self.source.checkpoint.folder.layer_files
        if len({file.mp for file in files}) > 1:
            return {}
        found: dict[str, Any] = {}
        for file in files:
            root = self.load(file.path).root
            if isinstance(root, Mapping):
                found.update((f"{file.layer}.{name}", value) for name, value in root.items())
        return found

    def check_hyperparameters(self) -> None:
        """As ``Offered.check_hyperparameters``; UnsupportedLayoutError where pipeline stages were given others."""
        self.source.require_one_set_of_hyperparameters()

    def check_copies(self, names: Collection[str], faults: Faults) -> None:
        """As ``Offered.check_copies``; the ranks of the job share the names, and read all copies of their share."""
        rank, count = _place()
        for name in sorted(self.names.intersection(names))[rank::count]:
            try:
                raise_drift(self.source.drift(name))
            except AffineError as fault:
                faults.add(fault)


def _place() -> tuple[int, int]:
    """This process's rank in its job, and how many there are."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
