"""Proof by bytes: what a plan takes for one value must be one value in every file that holds it.

Compared are bytes, not numbers, so NaN equals NaN and 0.0 does not equal -0.0. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deepspeed_affine.execute.compare import compare_pieces, pieces_equal
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.plan.conversion import (
    ConversionPlan,
    ShardPieces,
    SourceStorage,
    TensorFile,
    overlapping_pairs,
)

__all__ = ["Drift", "drifted_storages", "find_drift", "measure_drift", "shards_identical"]


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
        found = compare_pieces(pairs, pieces, pieces)
        if found is not None:
            drifts.append(
                Drift(
                    param=task.param,
                    state=task.state,
                    labels=(replica.primary_label, replica.label),
                    first=found.coordinates(task.map_shape),
                    differing=found.differing,
                    compared=sum(left.numel for left, _ in pairs),
                    max_abs=found.max_abs,
                    max_ulp=found.max_ulp,
                )
            )
    return drifts


def shards_identical(shards: Sequence[ShardPieces], pieces: PieceReader) -> bool:
    """Whether every stored shard holds the same bytes as the first; stops at the first difference."""
    first = shards[0]
    return all(pieces_equal(overlapping_pairs(first.pieces, shard.pieces), pieces, pieces) for shard in shards[1:])
