"""Proof by bytes: what a plan takes for one value must be one value in every file that holds it.

Compared are bytes, not numbers, so NaN equals NaN and 0.0 does not equal -0.0. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deepspeed_affine.execute.gather import PieceReader, Words
from deepspeed_affine.execute.typed import as_tensor
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.ir.ints import coordinates
from deepspeed_affine.plan.conversion import (
    ConversionPlan,
    Replica,
    ShardPieces,
    SourceStorage,
    TensorFile,
    overlapping_pairs,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Drift", "drifted_storages", "find_drift", "measure_drift", "shards_identical"]

BLOCK_ELEMENTS = 1 << 20
"""How many differing candidates are examined at a time while measuring, so that memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Two holders of the same elements whose bytes differ, measured.

    ``first`` is the first differing element in F's coordinates. ``max_ulp`` counts representable values between
    the two most distant ones; it is None where a dtype has no such order.
    """

    param: str
    state: str
    labels: tuple[str, str]
    first: tuple[int, ...]
    differing: int
    compared: int
    max_abs: float
    max_ulp: int | None

    def describe(self) -> str:
        ulp = "" if self.max_ulp is None else f", {self.max_ulp} ulp"
        return (
            f"parameter {self.param!r}, state {self.state!r}: {self.labels[0]} and {self.labels[1]} hold different "
            f"bytes, first at element {self.first}; {self.differing} of {self.compared} elements differ, by at most "
            f"{self.max_abs:g}{ulp}"
        )


def find_drift(plan: ConversionPlan, pieces: PieceReader, workers: int) -> list[Drift]:
    """Every pair of holders whose bytes differ, in the order of the plan; this is the proof of P2."""
    tasks = [task for task in plan.tensors if task.replicas]
    with ThreadPoolExecutor(workers) as pool:
        return [drift for found in pool.map(lambda task: measure_drift(task, pieces), tasks) for drift in found]


def drifted_storages(plan: ConversionPlan, drifts: Sequence[Drift]) -> list[SourceStorage]:
    """The storages that ``drifts`` were found in, each as a whole: they are to be checked before drift is believed."""
    drifted = {(drift.param, drift.state) for drift in drifts}
    touched: set[int] = set()
    for task in plan.tensors:
        if (task.param, task.state) in drifted:
            for pieces in (task.pieces, *(replica.pieces for replica in task.replicas)):
                touched.update(index for piece in pieces for index in piece.locations)
    keys = {(plan.storages[index].file, plan.storages[index].key) for index in touched}
    return [storage for storage in plan.checked_storages if (storage.file, storage.key) in keys]


def measure_drift(task: TensorFile, pieces: PieceReader) -> list[Drift]:
    """Every replica of ``task`` whose bytes differ from the copy that is read, measured; empty when all agree."""
    drifts: list[Drift] = []
    for replica in task.replicas:
        pairs = list(overlapping_pairs(replica.primary, replica.pieces))
        if all(_equal(left, right, pieces) for left, right in pairs):
            continue
        drifts.append(_measure(task, replica, pairs, pieces))
    return drifts


def shards_identical(shards: Sequence[ShardPieces], pieces: PieceReader) -> bool:
    """Whether every stored shard holds the same bytes as the first; stops at the first difference."""
    first = shards[0]
    return all(
        _equal(left, right, pieces)
        for shard in shards[1:]
        for left, right in overlapping_pairs(first.pieces, shard.pieces)
    )


def _equal(left: AffinePiece, right: AffinePiece, pieces: PieceReader) -> bool:
    return all(np.array_equal(pieces.take(block), pieces.take(other)) for block, other in _blocks(left, right))


def _measure(
    task: TensorFile, replica: Replica, pairs: Iterable[tuple[AffinePiece, AffinePiece]], pieces: PieceReader
) -> Drift:
    differing = compared = 0
    first_address: int | None = None
    max_abs = 0.0
    max_ulp: int | None = 0
    for left, right in pairs:
        compared += left.numel
        for block, other in _blocks(left, right):
            ours, theirs = pieces.take(block), pieces.take(other)
            unequal = ours != theirs
            if unequal.ndim > len(block.shape):
                # An element wider than a word differs where any of its words does.
                unequal = unequal.any(axis=-1)
            count = int(unequal.sum())
            if not count:
                continue
            differing += count
            address = _first_address(unequal, block)
            first_address = address if first_address is None else min(first_address, address)
            a, b = (_typed(words[unequal], block, pieces) for words in (ours, theirs))
            max_abs = max(max_abs, _max_abs(a, b))
            ulp = _max_ulp(a, b)
            max_ulp = None if ulp is None or max_ulp is None else max(max_ulp, ulp)
    return Drift(
        param=task.param,
        state=task.state,
        labels=(replica.primary_label, replica.label),
        first=coordinates(first_address or 0, task.map_shape),
        differing=differing,
        compared=compared,
        max_abs=max_abs,
        max_ulp=max_ulp,
    )


def _blocks(left: AffinePiece, right: AffinePiece) -> Iterable[tuple[AffinePiece, AffinePiece]]:
    """The pair cut along its first axes into blocks of bounded size, in order."""
    if left.numel <= BLOCK_ELEMENTS:
        yield left, right
        return
    rows = max(1, BLOCK_ELEMENTS * left.shape[0] // left.numel)
    for start in range(0, left.shape[0], rows):
        count = min(rows, left.shape[0] - start)
        block, other = _rows(left, start, count), _rows(right, start, count)
        yield from _blocks(block, other) if count == 1 else ((block, other),)


def _rows(piece: AffinePiece, start: int, rows: int) -> AffinePiece:
    """``rows`` of the first axis from ``start`` on; a single one loses the axis."""
    kept = 0 if rows > 1 else 1
    return AffinePiece(
        shape=(rows, *piece.shape[1:])[kept:],
        source_offset=piece.source_offset + start * piece.source_strides[0],
        source_strides=piece.source_strides[kept:],
        dest_offset=piece.dest_offset + start * piece.dest_strides[0],
        dest_strides=piece.dest_strides[kept:],
        locations=piece.locations,
        scale=piece.scale,
    )


def _typed(words: Words, piece: AffinePiece, pieces: PieceReader) -> torch.Tensor:
    (index,) = piece.locations
    return as_tensor(words, pieces.storage(index).dtype)


def _first_address(unequal: npt.NDArray[np.bool_], piece: AffinePiece) -> int:
    places = np.argwhere(unequal.reshape(piece.shape))
    if not piece.shape:
        return piece.source_offset
    return piece.source_offset + int((places @ np.array(piece.source_strides, dtype=np.int64)).min())


def _max_abs(left: torch.Tensor, right: torch.Tensor) -> float:
    import torch

    if left.dtype.is_complex or left.dtype == torch.bool:
        return float("nan")
    return float((left.double() - right.double()).abs().nan_to_num(float("inf"), float("inf")).max())


def _max_ulp(left: torch.Tensor, right: torch.Tensor) -> int | None:
    import torch

    if not left.dtype.is_floating_point or left.element_size() not in (2, 4):
        return None
    signed = {2: torch.int16, 4: torch.int32}[left.element_size()]

    def ordered(values: torch.Tensor) -> torch.Tensor:
        bits = values.contiguous().view(signed).to(torch.int64)
        low = -(1 << (8 * values.element_size() - 1))
        return torch.where(bits < 0, low - bits, bits)

    return int((ordered(left) - ordered(right)).abs().max())
