"""Buffers: kept whole by every rank, stored whole, and never loaded by DeepSpeed from a universal checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.hooks.live_values import read_tensor
from deepspeed_affine.storage.refs import TensorRef

if TYPE_CHECKING:
    import torch

    from deepspeed_affine.hooks.partition_load import Planning

__all__ = ["BufferLoad"]


@dataclass(frozen=True, slots=True)
class BufferLoad:
    """One buffer and where its values are."""

    buffer: torch.Tensor
    stored: TensorRef
    planning: Planning

    @classmethod
    def all_of(cls, module: torch.nn.Module, planning: Planning, own: Mapping[str, Any]) -> Iterator[BufferLoad]:
        """One for every persistent buffer of the model that is stored with its shape; the others are noted. ``own`` is
        what this rank had saved of the module, if anything."""
        for prefix, part in module.named_modules():
            for local, buffer in part.named_buffers(recurse=False):
                if local in part._non_persistent_buffers_set:
                    continue
                name = f"{prefix}.{local}" if prefix else local
                stored = planning.offered.buffer(name, own)
                if stored is None:
                    why = "is in the model and not in the checkpoint"
                    planning.strictness.lacks(f"buffer {name}", why, planning.faults, planning.report)
                elif stored.shape != tuple(buffer.shape):
                    planning.faults.add(
                        CheckpointFormatError(
                            f"buffer {name}: was saved with shape {stored.shape}, the engine's has "
                            f"{tuple(buffer.shape)}; the two must agree. The checkpoint is of another model.",
                            param=name,
                        )
                    )
                else:
                    planning.report.buffers[name] = None
                    planning.report.bytes_read += stored.nbytes
                    yield cls(buffer, stored, planning)

    def write(self) -> None:
        """The buffer holds the stored values, in its own dtype."""
        self.buffer.copy_(read_tensor(self.stored, self.planning.offered.reader))
