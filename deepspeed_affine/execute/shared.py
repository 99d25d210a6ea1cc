"""The parts of a conversion that read much, each done once: every process does its share, and all know the result.

In the only process of its job the share is everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from deepspeed_affine.execute.claims import SourceSums, check_storages
from deepspeed_affine.execute.convert import ExecutionOptions, close_gaps, reusable
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.prove import Drift, find_drift
from deepspeed_affine.plan.conversion import ConversionPlan, SourceStorage
from deepspeed_affine.plan.sharing import shares
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.journal import Finished

__all__ = ["CheckedReader", "all_drift", "all_reusable", "check_all_sources", "check_all_storages", "share"]

GAP_BYTES = 64 << 20
"""Longer runs that nobody has read are cut, so that several processes and threads can share them."""


class CheckedReader(ByteReader):
    """A reader that ends the reading as soon as the job has failed elsewhere.

    Whatever a conversion does in its threads, it reads before it goes on.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        self._check()
        super().read_into(path, offset, out)


def share(items: Mapping[str, int], group: Group) -> tuple[str, ...]:
    """This process's share of the items, whose sizes in bytes are given."""
    return shares(items, group.size)[group.rank]


def all_drift(plan: ConversionPlan, reader: ByteReader, workers: int, group: Group) -> list[Drift]:
    """Every pair of holders whose bytes differ, in the order of the plan; this is the proof of P2."""
    tasks = {task.path: task for task in plan.tensors if task.replicas}
    mine = share({path: task.nbytes * (1 + len(task.replicas)) for path, task in tasks.items()}, group)
    part = replace(plan, tensors=tuple(tasks[path] for path in sorted(mine)))
    found = find_drift(part, PieceReader(plan.storages, reader), workers)
    everyone = group.gather([asdict(drift) for drift in found])
    place = {(task.param, task.state): index for index, task in enumerate(plan.tensors)}
    drifts = [_drift(fields) for fields in (fields for part in everyone for fields in part)]
    return sorted(drifts, key=lambda drift: place[drift.param, drift.state])


def _drift(fields: Mapping[str, Any]) -> Drift:
    first, second = fields["labels"]
    return Drift(**{**fields, "labels": (first, second), "first": tuple(fields["first"])})


def all_reusable(
    finished: Mapping[str, Finished], root: str, reader: ByteReader, execution: ExecutionOptions, group: Group
) -> dict[str, Finished]:
    """Those of the ``finished`` files under ``root`` whose size and checksum are what their journal says.

    ``finished`` is the same in every process, and so is the result.
    """
    mine = share({path: entry.nbytes for path, entry in finished.items()}, group)
    good = reusable({path: finished[path] for path in mine}, root, reader, execution)
    found = {path for part in group.gather(list(good)) for path in part}
    return {path: entry for path, entry in finished.items() if path in found}


def check_all_storages(storages: Sequence[SourceStorage], reader: ByteReader, group: Group) -> None:
    """Each storage's bytes are those it was saved with; whoever finds one that is not raises IntegrityError."""
    by_name = {f"{os.path.basename(storage.file)}/{storage.key}": storage for storage in storages}
    mine = share({name: storage.nbytes for name, storage in by_name.items()}, group)
    check_storages([by_name[name] for name in mine], reader)
    group.gather(None)


def check_all_sources(
    plan: ConversionPlan, written: Mapping[str, Finished], reader: ByteReader, execution: ExecutionOptions, group: Group
) -> None:
    """Every source storage is as it was saved, by what was read for the ``written`` files and by what nobody read.

    ``written`` is asked of the first process alone, which at the end raises IntegrityError naming each file that is
    damaged; the others may have gone on by then.
    """
    storages = plan.checked_storages
    index = {(storage.file, storage.key): at for at, storage in enumerate(storages)}
    sums = SourceSums(storages)

    def unread() -> list[list[tuple[int, int, int]]]:
        runs = [
            (index[storage.file, storage.key], at, min(at + GAP_BYTES, stop))
            for storage, start, stop in sums.gaps()
            for at in range(start, stop, GAP_BYTES)
        ]
        dealt = shares({f"{at:012d}": stop - start for at, (_, start, stop) in enumerate(runs)}, group.size)
        return [[runs[int(name)] for name in sorted(names)] for names in dealt]

    for entry in written.values():
        sums.add(entry.reads)
    while any(dealt := group.first(unread)):
        mine = [(storages[at], start, stop) for at, start, stop in dealt[group.rank]]
        crcs = group.gather([read.crc32 for read in close_gaps(mine, reader, execution)])
        for runs, found in zip(dealt, crcs, strict=True):
            sums.add(
                SourceSums.read(storages[at], start, stop, crc)
                for (at, start, stop), crc in zip(runs, found, strict=True)
            )
    if group.rank == 0:
        sums.check(reader)
