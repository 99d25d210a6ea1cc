"""Checking source storages against their recorded CRC with the bytes that were read anyway.

Whoever reads a dense run of a storage notes the run and its CRC-32. What nobody read is read at the end, and the runs
are joined to the checksum of the whole storage. So a checked conversion reads every byte once.
"""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from deepspeed_affine.errors import Faults, IntegrityError
from deepspeed_affine.plan.conversion import SourceStorage
from deepspeed_affine.storage.crc import crc32_combine
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.journal import Read

__all__ = ["SourceSums", "StorageReads", "check_storages", "joined", "sum_range"]


class StorageReads:
    """The runs read for one output file, joined where they touch. Not safe to share between threads."""

    def __init__(self, storages: Sequence[SourceStorage]) -> None:
        self._storages = storages
        self._runs: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, index: int, start: int, stop: int, crc32: int) -> None:
        runs = self._runs.setdefault(index, [])
        if runs and runs[-1][1] == start:
            first, _, crc = runs[-1]
            runs[-1] = (first, stop, crc32_combine(crc, crc32, stop - start))
        else:
            runs.append((start, stop, crc32))

    def reads(self) -> Iterator[Read]:
        for index, runs in self._runs.items():
            storage = self._storages[index]
            for start, stop, crc in runs:
                yield SourceSums.read(storage, start, stop, crc)


def joined(reads: Iterable[Read]) -> tuple[Read, ...]:
    """``reads`` in order, each once, joined where one ends and the next begins; overlapping ones stay apart."""
    result: list[Read] = []
    for read in sorted(set(reads), key=lambda item: (item.file, item.key, item.start, item.stop)):
        last = result[-1] if result else None
        if last is not None and (last.file, last.key, last.stop) == (read.file, read.key, read.start):
            crc = crc32_combine(last.crc32, read.crc32, read.stop - read.start)
            result[-1] = Read(last.file, last.key, last.start, read.stop, crc)
        else:
            result.append(read)
    return tuple(result)


def sum_range(storage: SourceStorage, start: int, stop: int, reader: ByteReader, buffer: memoryview) -> int:
    """The CRC-32 of bytes ``[start, stop)`` of the storage, read through ``buffer``."""
    crc = 0
    for at in range(start, stop, len(buffer)):
        part = buffer[: min(len(buffer), stop - at)]
        reader.read_into(storage.file, storage.byte_offset + at, part)
        crc = zlib.crc32(part, crc)
    return crc


class SourceSums:
    """What has been read of every storage that carries a checksum; safe to share between threads.

    Whatever was read counts: runs that tile a storage are joined to its checksum, and every other run is compared with
    the tiles under it. So no byte that went into an output is taken on trust, however often it was read.
    """

    def __init__(self, storages: Iterable[SourceStorage]) -> None:
        self._storages = {
            (os.path.basename(storage.file), storage.key): storage
            for storage in storages
            if storage.crc32 is not None and storage.nbytes
        }
        self._reads: dict[tuple[str, str], set[Read]] = {}
        self._lock = threading.Lock()

    def add(self, reads: Iterable[Read]) -> None:
        """Runs that were read and summed; those of storages that are not checked are ignored."""
        with self._lock:
            for read in reads:
                if (read.file, read.key) in self._storages and read.stop > read.start:
                    self._reads.setdefault((read.file, read.key), set()).add(read)

    @staticmethod
    def read(storage: SourceStorage, start: int, stop: int, crc32: int) -> Read:
        """The note of a run of ``storage`` that was read."""
        return Read(os.path.basename(storage.file), storage.key, start, stop, crc32)

    def gaps(self) -> list[tuple[SourceStorage, int, int]]:
        """``(storage, start, stop)`` for every range that is still to be read, in a fixed order.

        These are the bytes nobody has read, and parts of a run that another run begins or ends in. To be asked again
        when they have been added, until there are none.
        """
        found = []
        for key in sorted(self._storages):
            storage = self._storages[key]
            tiling = _Tiling(self._reads.get(key, ()), storage.nbytes)
            found += [(storage, start, stop) for start, stop in tiling.wanted()]
        return found

    def damaged(self) -> list[tuple[SourceStorage, IntegrityError]]:
        """The storages of which something was read that they were not saved with, each with what to say of it.

        There are no ``gaps`` left.
        """
        found = []
        for key in sorted(self._storages):
            storage = self._storages[key]
            tiling = _Tiling(self._reads.get(key, ()), storage.nbytes)
            whole = tiling.crc(0, storage.nbytes)
            if whole != storage.crc32:
                found.append((storage, _damaged(storage, whole)))
                continue
            wrong = next((run for run in tiling.others if tiling.crc(run.start, run.stop) != run.crc32), None)
            if wrong is not None:
                found.append((storage, _misread(storage)))
        return found

    def check(self, reader: ByteReader) -> None:
        """All that was read is what the storages were saved with; raises IntegrityError naming each file where not.

        There are no ``gaps`` left. A storage that is as it was saved after all is not blamed.
        """
        faults = Faults()
        for storage, fault in self.damaged():
            now = sum_range(storage, 0, storage.nbytes, reader, memoryview(bytearray(1 << 20)))
            faults.add(_misread(storage) if now == storage.crc32 else fault)
        faults.raise_if_any()


class _Tiling:
    """Runs that cover a storage end to end without overlap, the shortest first, and the ``others``."""

    def __init__(self, reads: Iterable[Read], nbytes: int) -> None:
        runs = sorted(reads, key=lambda run: (run.start, run.stop, run.crc32))
        by_start: dict[int, Read] = {}
        for run in runs:
            by_start.setdefault(run.start, run)
        starts = sorted(by_start)
        self.tiles: list[Read] = []
        self._gaps: list[tuple[int, int]] = []
        at = 0
        while at < nbytes:
            tile = by_start.get(at)
            if tile is None:
                later = bisect_right(starts, at)
                stop = min(starts[later], nbytes) if later < len(starts) else nbytes
                self._gaps.append((at, stop))
                at = stop
            else:
                self.tiles.append(tile)
                at = tile.stop
        chosen = set(self.tiles)
        self.others = [run for run in runs if run not in chosen]

    def wanted(self) -> list[tuple[int, int]]:
        """The ranges to read so that every run begins and ends where a tile does."""
        ends = sorted({end for run in self.others for end in (run.start, run.stop)})
        found = [part for gap in self._gaps for part in _cut(*gap, ends)]
        for tile in self.tiles:
            parts = _cut(tile.start, tile.stop, ends)
            found += parts if len(parts) > 1 else []
        return sorted(found)

    def crc(self, start: int, stop: int) -> int:
        """The CRC-32 of the tiles from ``start`` to ``stop``, where tiles begin and end."""
        crc = 0
        first = bisect_left(self.tiles, start, key=lambda tile: tile.start)
        for tile in self.tiles[first:]:
            if tile.start >= stop:
                break
            crc = crc32_combine(crc, tile.crc32, tile.stop - tile.start)
        return crc


def _cut(start: int, stop: int, ends: Sequence[int]) -> list[tuple[int, int]]:
    inside = ends[bisect_right(ends, start) : bisect_left(ends, stop)]
    return list(pairwise((start, *inside, stop)))


def check_storages(storages: Iterable[SourceStorage], reader: ByteReader) -> None:
    """Each storage's bytes are those it was saved with; raises IntegrityError naming each file that is damaged."""
    buffer = memoryview(bytearray(1 << 20))
    faults = Faults()
    for storage in storages:
        if storage.crc32 is not None:
            found = sum_range(storage, 0, storage.nbytes, reader, buffer)
            if found != storage.crc32:
                faults.add(_damaged(storage, found))
    faults.raise_if_any()


def _damaged(storage: SourceStorage, found: int) -> IntegrityError:
    return IntegrityError(
        f"{storage.file}: storage {storage.key!r} has CRC {found:08x}, its file records {storage.crc32:08x}; the file "
        "was damaged after it was saved. Use another checkpoint, or read it all the same with --no-source-crc.",
        file=storage.file,
    )


def _misread(storage: SourceStorage) -> IntegrityError:
    return IntegrityError(
        f"{storage.file}: storage {storage.key!r} is as it was saved, but other bytes were read for the output: the "
        "file was changed while, or before, an interrupted run went on, or a read went wrong. Run the same command "
        "again; it starts over.",
        file=storage.file,
    )
