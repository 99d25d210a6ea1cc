"""What a universal folder holds of a live parameter: found by name, checked against the parameter's map, read in parts.

Nothing is read before it has been found to fit, and then only the bytes a part needs.
"""

from __future__ import annotations

import os
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Protocol

from deepspeed_affine.errors import CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.execute.shards import ShardPart
from deepspeed_affine.ir import SCALE_POWER_BY_STATE
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.policy import ScaledStates
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.universal import StoredState, read_number, read_state

if TYPE_CHECKING:
    import torch

    from deepspeed_affine.hooks.layouts import LiveParam

__all__ = ["FP32", "STEP", "Part", "StoredParams", "is_same_view", "is_scaled"]

FP32, STEP = "fp32", "step"
_SUFFIX = ".pt"
Shape = tuple[int, ...]


class Part(Protocol):
    """Elements of this rank's shard, ready to be read: ``covered`` of them have a source, and take ``nbytes`` there.

    ``shape`` is the whole parameter's as it is stored, ``path`` names the file, or the first of several.
    """

    @property
    def covered(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def path(self) -> str: ...

    def fill(self, out: torch.Tensor, reader: ByteReader, *, power: int = 1) -> None:
        """``out`` holds the elements, times the ``power``-th power of this rank's scale; zero without a source."""


class StoredParams:
    """The parameters below ``zero`` of one universal folder, as an engine's parameters see them.

    A file is parsed once however often it is asked for, until ``close``.
    """

    def __init__(self, zero: str, scaled_states: ScaledStates) -> None:
        self.zero = zero
        self.scaled_states = scaled_states
        self._reader = ByteReader()
        self._read: dict[str, StoredState] = {}

    def close(self) -> None:
        """After this no file is open and nothing is remembered; the object may still be used."""
        self._reader.close()
        self._read.clear()

    def states(self, live: LiveParam) -> tuple[str, ...]:
        """The names of the states stored for ``live``, ``fp32`` among them, sorted."""
        folder = os.path.join(self.zero, live.universal)
        try:
            names = os.listdir(folder)
        except OSError as error:
            raise CheckpointFormatError(
                f"parameter {live.name!r}: {folder} cannot be listed ({error.strerror or error}); expected the folder "
                f"of {live.universal!r} in the universal checkpoint. The checkpoint is of another model, or "
                "incomplete: check the folder, or convert again.",
                param=live.name,
                file=folder,
            ) from error
        found = sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        if FP32 not in found:
            raise CheckpointFormatError(
                f"parameter {live.name!r}: {folder} holds no {FP32}{_SUFFIX}; expected the weights beside the "
                "optimizer states. Convert again.",
                param=live.name,
                file=folder,
            )
        return tuple(found)

    def number(self, live: LiveParam, state: str) -> torch.Tensor | int | float | None:
        """The value of a state that is one number, as DeepSpeed's loader would give it; None for any other state."""
        import torch

        path = self._path(live, state)
        stored = self._stored(path)
        if stored.tensor is None:
            return stored.number
        if stored.tensor.shape or stored.entries is not None:
            return None
        value = read_number(stored.tensor, self._reader)
        if value is None:
            raise CheckpointFormatError(
                f"parameter {live.name!r}: {path} holds one {stored.tensor.dtype}; expected a number.",
                param=live.name,
                file=path,
            )
        return torch.tensor(value, dtype=getattr(torch, stored.tensor.dtype))

    def dtype(self, live: LiveParam, state: str) -> torch.dtype:
        """The dtype in which the state is stored."""
        import torch

        stored = self._stored(self._path(live, state)).tensor
        found = None if stored is None else getattr(torch, stored.dtype, None)
        return found if isinstance(found, torch.dtype) else torch.float32

    def part(self, live: LiveParam, state: str, start: int, numel: int) -> Part | None:
        """Elements ``[start, start + numel)`` of this rank's flattened shard, ready to be filled; None where the
        policy for scaled states says that they are zero.

        Raises CheckpointFormatError where the file is missing, unreadable, or of another shape than the parameter.
        """
        path = self._path(live, state)
        stored = self._stored(path)
        if stored.tensor is None:
            raise CheckpointFormatError(
                f"parameter {live.name!r}: {path} holds a number; expected a tensor of shape "
                f"{live.layout.logical_shape}.",
                param=live.name,
                file=path,
            )
        entries = stored.entries or {}
        self._check_shape(live, path, stored.tensor.shape, is_vocabulary=bool(entries.get(keys.VOCAB_TENSOR)))
        if state != FP32 and is_scaled(live) and not self._scales(live, state, path):
            return None
        return ShardPart(stored.tensor, live.layout, live.rank, start, numel)

    def fill(self, live: LiveParam, state: str, start: int, out: torch.Tensor) -> None:
        """``out`` (flat, any device and dtype) holds the elements of this rank's flattened shard from ``start`` on."""
        part = self.part(live, state, start, out.numel())
        if part is None:
            out.zero_()
            return
        power = SCALE_POWER_BY_STATE.get(state, 0) if is_scaled(live) else 0
        part.fill(out, self._reader, power=power)

    def _path(self, live: LiveParam, state: str) -> str:
        return os.path.join(self.zero, live.universal, state + _SUFFIX)

    def _stored(self, path: str) -> StoredState:
        found = self._read.get(path)
        if found is None:
            found = self._read[path] = read_state(path)
        return found

    def _check_shape(self, live: LiveParam, path: str, shape: Shape, *, is_vocabulary: bool) -> None:
        expected = live.layout.logical_shape
        if is_same_view(shape, expected):
            return
        fact = f"parameter {live.name!r}: {path} holds shape {shape}, the engine's parameter has {expected} as a whole"
        if shape and expected and shape[1:] == expected[1:] and shape[0] < expected[0]:
            # The rows F lacks are the target's vocabulary padding, and only of a vocabulary is that known.
            if is_vocabulary:
                return
            raise CheckpointFormatError(
                f"{fact}. Only a tensor marked {keys.VOCAB_TENSOR!r} may have fewer rows, the others being padding. "
                "The checkpoint is of another model; or list the parameter under vocabulary_parameter_patterns when "
                "saving.",
                param=live.name,
                file=path,
            )
        raise CheckpointFormatError(
            f"{fact}; the two must agree. The checkpoint is of another model: build the engine's as the one that was "
            "saved.",
            param=live.name,
            file=path,
        )

    def _scales(self, live: LiveParam, state: str, path: str) -> bool:
        """Whether a state of a scaled parameter is scaled too (else it is zero), or a refusal."""
        if self.scaled_states is ScaledStates.RESET:
            return False
        if self.scaled_states is ScaledStates.POWER:
            if state not in SCALE_POWER_BY_STATE:
                raise UnsupportedLayoutError(
                    f"parameter {live.name!r}: {path} is a state of a parameter held scaled, and which power of the "
                    f"scale applies is known for {sorted(SCALE_POWER_BY_STATE)} only. Use scaled_states='reset'.",
                    param=live.name,
                    file=path,
                )
            return True
        raise UnsupportedLayoutError(
            f"parameter {live.name!r}: this rank holds it scaled, and its optimizer state {state!r} would not follow: "
            "lr and eps stay in the coordinate it was trained in. Say scaled_states='reset' for zeros, or 'power' to "
            "apply the state's power of the scale.",
            param=live.name,
            file=path,
        )


def is_same_view(shape: Shape, other: Shape) -> bool:
    """Whether two shapes address the same elements in the same order, one splitting axes that the other keeps whole.

    ``(3, 4, 5)``, ``(12, 5)`` and ``(60,)`` do; ``(5, 12)`` does not, although it has as many elements as ``(12, 5)``.
    """
    if 0 in shape or 0 in other:
        return shape == other or (len(shape) == 1 and 0 in other)
    ours, theirs = set(accumulate(shape, mul)) - {1}, set(accumulate(other, mul)) - {1}
    return max(ours, default=1) == max(theirs, default=1) and (ours <= theirs or theirs <= ours)


def is_scaled(live: LiveParam) -> bool:
    """Whether this rank holds the parameter, or a part of it, scaled; InvalidMapError where its map lacks the rank."""
    if live.rank not in live.layout.shard_shapes:
        raise InvalidMapError(
            f"parameter {live.name!r}: its map describes ranks {list(live.layout.ranks)}, this process is rank "
            f"{live.rank}; expected one of them.",
            param=live.name,
            rank=live.rank,
        )
    return any(piece.scale != 1.0 for piece in live.layout.pieces_by_rank[live.rank])
