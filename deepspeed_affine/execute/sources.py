"""Stored storages as flat tensors over memory maps: what a plan's pieces are applied to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.plan.conversion import SourceStorage
from deepspeed_affine.storage.refs import StorageRef, TensorRef
from deepspeed_affine.storage.tensors import FileMaps, open_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["FlatSources"]


class FlatSources:
    """Read-only flat tensors of a plan's storages, opened on first use; safe to share between threads."""

    def __init__(self, storages: Sequence[SourceStorage], maps: FileMaps) -> None:
        self._storages = storages
        self._maps = maps
        self._flat: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def storage(self, index: int) -> SourceStorage:
        return self._storages[index]

    def flat(self, index: int) -> torch.Tensor:
        """The whole storage as a one-dimensional tensor of its dtype, without copying."""
        found = self._flat.get(index)
        if found is not None:
            return found
        with self._lock:
            found = self._flat.get(index)
            if found is None:
                found = self._open(index)
                self._flat[index] = found
            return found

    def view(self, piece: AffinePiece) -> torch.Tensor:
        """The stored elements of ``piece``, whose dest side addresses a storage."""
        return _strided(self.flat(_location(piece)), piece.shape, piece.dest_strides, piece.dest_offset)

    def bits(self, piece: AffinePiece) -> torch.Tensor:
        """The stored elements of ``piece`` as integers of the same width, for comparing bytes."""
        import torch

        flat = self.flat(_location(piece))
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
        if width is None:
            words = flat.view(torch.int64)
            per_element = flat.element_size() // 8
            return _strided(
                words,
                (*piece.shape, per_element),
                (*(stride * per_element for stride in piece.dest_strides), 1),
                piece.dest_offset * per_element,
            )
        return _strided(flat.view(width), piece.shape, piece.dest_strides, piece.dest_offset)

    def _open(self, index: int) -> torch.Tensor:
        source = self._storages[index]
        storage = StorageRef(
            path=source.file,
            key=source.key,
            dtype=source.dtype,
            numel=source.numel,
            byte_offset=source.byte_offset,
            crc32=source.crc32,
            location="cpu",
        )
        return open_tensor(TensorRef(storage=storage, offset=0, shape=(source.numel,), strides=(1,)), self._maps)


def _strided(flat: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    # as_strided counts from the start of the torch storage, of which ``flat`` may be a part.
    return flat.as_strided(shape, strides, flat.storage_offset() + offset)


def _location(piece: AffinePiece) -> int:
    (index,) = piece.locations
    return index
