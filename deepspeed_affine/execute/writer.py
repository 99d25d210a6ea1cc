"""Writing one output file, from one thread or several, with its checksum and those of what is read for it."""

from __future__ import annotations

import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deepspeed_affine.execute.claims import StorageReads, joined
from deepspeed_affine.execute.outputs import Extent, OutputFile, Segment
from deepspeed_affine.plan.conversion import SourceStorage
from deepspeed_affine.storage.crc import crc32_combine
from deepspeed_affine.storage.files import is_url, join
from deepspeed_affine.storage.journal import Finished, Read
from deepspeed_affine.storage.pt_writer import PlacedStorage
from deepspeed_affine.storage.sink import LocalSink, Sink, SinkFile

__all__ = ["GROUP_BYTES", "Execution", "FileWriter"]

GROUP_BYTES = 16 << 20
"""Files up to this size are written by one thread from end to end."""


class Execution(Protocol):
    """What a writer needs of the run it belongs to; every method is called from many threads."""

    @property
    def sink(self) -> Sink: ...

    @property
    def storages(self) -> Sequence[SourceStorage]:
        """Those that extents name by their index."""

    @property
    def source_crc(self) -> bool: ...

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def workers(self) -> int: ...

    def check_stopped(self) -> None:
        """Raises where another job has failed."""

    def buffer(self) -> npt.NDArray[np.uint8]:
        """The calling thread's own, of ``chunk_bytes``."""

    def count(self, nbytes: int, planned: int) -> None:
        """``nbytes`` more are written; they stand for ``planned`` bytes of the plan's ``bytes_out``."""

    def opened(self, writer: FileWriter) -> None: ...

    def closed(self, writer: FileWriter) -> None: ...

    def complete(self, finish: Callable[[], None]) -> None:
        """``finish`` is called, now or soon, by this thread or another: a disk is not waited for where that can be."""

    def finished(self, entry: Finished) -> None: ...


class FileWriter:
    """One output file, written by one thread, or by several and completed by the last of them."""

    def __init__(self, file: OutputFile, execution: Execution) -> None:
        self.file = file
        self.execution = execution
        self.lock = threading.Lock()
        self.sink_file: SinkFile | None = None
        self.waiting = 1
        self.sums: dict[int, tuple[int, int]] = {}
        self.reads: list[Read] = []
        self.unplanned = file.planned

    def groups(self) -> Iterator[list[tuple[Extent, int, int]]]:
        """Intervals of all extents, in runs that are worth a job of their own."""
        chunk_bytes = self.execution.chunk_bytes
        least = max(GROUP_BYTES, self.file.size // (4 * self.execution.workers))
        group: list[tuple[Extent, int, int]] = []
        held = 0
        for extent in self.file.extents:
            for start, stop in extent.intervals(chunk_bytes):
                group.append((extent, start, stop))
                held += stop - start
                if held >= least:
                    yield group
                    group, held = [], 0
        if group or not self.file.extents:
            yield group

    def write_all(self) -> None:
        """The whole file is written and finished."""
        self.execution.check_stopped()
        if self.execution.sink.sequential and self.file.layout is not None:
            self._write_in_order(self.file.layout.sequence)
            return
        chunk = self.execution.chunk_bytes
        self.write([(e, start, stop) for e in self.file.extents for start, stop in e.intervals(chunk)])

    def write(self, group: list[tuple[Extent, int, int]]) -> None:
        """The intervals are in the file; whoever writes the last group finishes it."""
        self.execution.check_stopped()
        with self.lock:
            if self.sink_file is None:
                self.sink_file = self._create()
                self._write_segments(self.sink_file, self.file.head)
        self._write_intervals(self.sink_file, group)
        with self.lock:
            self.waiting -= 1
            if self.waiting:
                return
        self._complete(self.sink_file)

    def abandon(self) -> None:
        if self.sink_file is not None:
            self.sink_file.abandon()

    def _create(self) -> SinkFile:
        made = self.execution.sink.create(self.file.path, self.file.size)
        self.execution.opened(self)
        return made

    def _write_intervals(self, sink_file: SinkFile, group: Iterable[tuple[Extent, int, int]]) -> None:
        execution = self.execution
        log = StorageReads(execution.storages) if execution.source_crc else None
        buffer = execution.buffer()
        for extent, start, stop in group:
            execution.check_stopped()
            data, crc = extent.read(start, stop, buffer, log)
            with _naming(self.file.path):
                sink_file.write_at(extent.offset + start, data)
            with self.lock:
                self.sums[extent.offset + start] = (crc, stop - start)
            execution.count(stop - start, self._planned(stop - start))
        if log is not None:
            with self.lock:
                self.reads.extend(log.reads())

    def _write_segments(self, sink_file: SinkFile, segments: Iterable[Segment]) -> None:
        for offset, data in _adjoined(segments):
            with _naming(self.file.path):
                sink_file.write_at(offset, data)
            self.sums[offset] = (zlib.crc32(data), len(data))
            self.execution.count(len(data), 0)

    def _write_in_order(self, sequence: Callable[[Mapping[str, int]], Iterator[bytes | PlacedStorage]]) -> None:
        by_key = {extent.key: extent for extent in self.file.extents}
        crcs: dict[str, int] = {}
        self.sink_file = self._create()
        at = 0
        for item in sequence(crcs):
            if isinstance(item, PlacedStorage):
                extent = by_key[item.key]
                self._write_intervals(
                    self.sink_file,
                    ((extent, start, stop) for start, stop in extent.intervals(self.execution.chunk_bytes)),
                )
                crcs[item.key] = self._sum(extent.offset, extent.offset + extent.nbytes)
                at += item.nbytes
            else:
                self._write_segments(self.sink_file, [(at, item)])
                at += len(item)
        self.execution.complete(partial(self._finish, self.sink_file))

    def _complete(self, sink_file: SinkFile) -> None:
        crcs = {extent.key: self._sum(extent.offset, extent.offset + extent.nbytes) for extent in self.file.extents}
        self._write_segments(sink_file, self.file.tail(crcs))
        self.execution.complete(partial(self._finish, sink_file))

    def _finish(self, sink_file: SinkFile) -> None:
        with _naming(self.file.path):
            sink_file.finish()
        self.execution.closed(self)
        source, sink = self.file.copied_from, self.execution.sink
        if source is not None and isinstance(sink, LocalSink) and not is_url(source):
            shutil.copystat(source, join(sink.folder, self.file.path))
        self.execution.count(0, self._planned(self.file.planned))
        self.execution.finished(
            Finished(self.file.path, self.file.size, self._sum(0, self.file.size), joined(self.reads))
        )

    def _planned(self, nbytes: int) -> int:
        """How much of what the plan expects ``nbytes`` more stand for: a rewritten file may be longer or shorter."""
        with self.lock:
            part = min(nbytes, self.unplanned)
            self.unplanned -= part
        return part

    def _sum(self, start: int, stop: int) -> int:
        """The CRC-32 of bytes ``[start, stop)`` of the file, made of the parts that were written."""
        crc, at = 0, start
        while at < stop:
            part, nbytes = self.sums[at]
            crc = crc32_combine(crc, part, nbytes)
            at += nbytes
        return crc


def _adjoined(segments: Iterable[Segment]) -> list[Segment]:
    """``segments`` with those that touch made one: a call costs more than joining them."""
    result: list[tuple[int, bytearray]] = []
    for offset, data in segments:
        if result and result[-1][0] + len(result[-1][1]) == offset:
            result[-1][1].extend(data)
        else:
            result.append((offset, bytearray(data)))
    return [(offset, bytes(data)) for offset, data in result if data]


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Gives an error of the operating system the name of the file it happened to, where it has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), path) from error
