"""Storages in memory, read through the real piece reader; every read is counted."""

from __future__ import annotations

import torch

from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.plan.conversion import SourceStorage


class Held(PieceReader):
    def __init__(self, *flats: torch.Tensor) -> None:
        storages = [
            SourceStorage("memory", str(n), str(flat.dtype).removeprefix("torch."), flat.numel(), 0, flat.nbytes, None)
            for n, flat in enumerate(flats)
        ]
        super().__init__(storages, None)
        self.flats = flats
        self.reads: list[tuple[int, int, int]] = []

    @property
    def bytes_read(self) -> int:
        return sum(stop - start for _, start, stop in self.reads)

    def read(self, index, start, out):
        data = self.flats[index].view(torch.uint8).numpy()
        assert 0 <= start <= start + len(out) <= data.nbytes
        self.reads.append((index, start, start + len(out)))
        out[:] = data.data[start : start + len(out)]


class Runs:
    """Notes the dense runs that were read, as a converter's log does."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, int, int]] = []

    def add(self, index, start, stop, crc32):
        self.runs.append((index, start, stop, crc32))
