"""Checking source storages against their recorded CRC with the bytes that were read anyway.

Whoever reads a dense run of a storage notes the run and its CRC-32. What nobody read is read at the end, and the runs
are joined to the checksum of the whole storage. So a checked conversion reads every byte once.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence

from deepspeed_affine.errors import Faults, IntegrityError
from deepspeed_affine.plan.conversion import SourceStorage
from deepspeed_affine.storage.crc import crc32_combine
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.journal import Read

__all__ = ["SourceSums", "StorageReads", "check_storages", "joined", "sum_range"]

SHORTEST_NOTED = 4096
"""Shorter runs are not worth a note: they are read again, many at a time, with what nobody read."""


class StorageReads:
    """The runs read for one output file, joined where they touch. Not safe to share between threads."""

    def __init__(self, storages: Sequence[SourceStorage]) -> None:
        self._storages = storages
        self._runs: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, index: int, start: int, stop: int, crc32: int) -> None:
        if stop - start < SHORTEST_NOTED:
            return
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
    """``reads`` in order, joined where they touch; of runs that overlap only the first is kept."""
    result: list[Read] = []
    for read in sorted(reads, key=lambda item: (item.file, item.key, item.start, -item.stop)):
        last = result[-1] if result else None
        if last is None or (last.file, last.key) != (read.file, read.key) or last.stop < read.start:
            result.append(read)
        elif last.stop == read.start:
            crc = crc32_combine(last.crc32, read.crc32, read.stop - read.start)
            result[-1] = Read(last.file, last.key, last.start, read.stop, crc)
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
    """What has been read of every storage that carries a checksum; safe to share between threads."""

    def __init__(self, storages: Iterable[SourceStorage]) -> None:
        self._storages = {
            (os.path.basename(storage.file), storage.key): storage
            for storage in storages
            if storage.crc32 is not None and storage.nbytes
        }
        self._reads: list[Read] = []
        self._lock = threading.Lock()

    def add(self, reads: Iterable[Read]) -> None:
        """Runs that were read and summed; those of storages that are not checked are ignored."""
        known = [read for read in reads if (read.file, read.key) in self._storages]
        with self._lock:
            self._reads += known

    @staticmethod
    def read(storage: SourceStorage, start: int, stop: int, crc32: int) -> Read:
        """The note of a run of ``storage`` that was read."""
        return Read(os.path.basename(storage.file), storage.key, start, stop, crc32)

    def gaps(self) -> list[tuple[SourceStorage, int, int]]:
        """``(storage, start, stop)`` for every run of bytes that nobody has read, in a fixed order."""
        covered: dict[tuple[str, str], list[Read]] = {}
        for read in joined(self._reads):
            covered.setdefault((read.file, read.key), []).append(read)
        found = []
        for key in sorted(self._storages):
            storage, at = self._storages[key], 0
            for read in covered.get(key, ()):
                if read.start > at:
                    found.append((storage, at, read.start))
                at = read.stop
            if at < storage.nbytes:
                found.append((storage, at, storage.nbytes))
        return found

    def damaged(self) -> list[tuple[SourceStorage, IntegrityError]]:
        """The storages whose bytes are not those they were saved with, each with what to say of it.

        Everything must have been read: there are no ``gaps`` left.
        """
        whole: dict[tuple[str, str], Read] = {}
        for read in joined(self._reads):
            whole.setdefault((read.file, read.key), read)
        found = ((self._storages[key], whole[key].crc32) for key in sorted(self._storages))
        return [(storage, _damaged(storage, crc)) for storage, crc in found if crc != storage.crc32]

    def check(self) -> None:
        """Every storage's bytes are those it was saved with; raises IntegrityError naming each file that is damaged.

        Everything must have been read: there are no ``gaps`` left.
        """
        faults = Faults()
        faults.extend(fault for _, fault in self.damaged())
        faults.raise_if_any()


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
