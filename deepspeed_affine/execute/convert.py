"""Executing a conversion plan, file to file: threads gather bounded chunks and write them where they belong.

Memory is two buffers a thread; it does not depend on the size of the model or of any tensor. Every source byte is read
once, every output byte written once, and the checksums of both are made of the bytes as they pass.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepspeed_affine.execute.claims import SourceSums, sum_range
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.outputs import (
    OutputFile,
    copied_output,
    object_output,
    tensor_output,
)
from deepspeed_affine.execute.progress import Progress
from deepspeed_affine.execute.writer import GROUP_BYTES, FileWriter
from deepspeed_affine.plan.conversion import ConversionPlan, SourceStorage, TensorFile
from deepspeed_affine.storage.files import ByteReader, join
from deepspeed_affine.storage.journal import Finished, Read
from deepspeed_affine.storage.sink import Sink

__all__ = ["ExecutionOptions", "Written", "close_gaps", "reusable", "write_files"]

CHUNK_BYTES = 4 << 20
"""How much is read, summed and written at a time: calls cost little, and it stays in a processor's cache."""

FINISHERS = 4
"""Threads that wait for a disk; they compute nothing."""

UNFINISHED = 16
"""Files that are written and not yet known to be on the disk, at most: each is an open descriptor."""


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """How a plan is executed; none of it changes what is written."""

    workers: int = 4
    source_crc: bool = True
    fsync: bool = True
    progress: bool = False
    chunk_bytes: int = CHUNK_BYTES
    what: str = "converting"


@dataclass(slots=True)
class Written:
    """What an execution has done: every file of its share, and how many bytes of them it wrote itself."""

    files: dict[str, Finished] = field(default_factory=dict)
    bytes_written: int = 0


def reusable(
    finished: Mapping[str, Finished], root: str, reader: ByteReader, options: ExecutionOptions
) -> dict[str, Finished]:
    """Those of the ``finished`` files under ``root`` whose size and checksum are what their journal says."""

    def check(entry: Finished) -> bool:
        path = join(root, entry.path)
        try:
            if reader.size(path) != entry.nbytes:
                return False
            crc = 0
            buffer = memoryview(bytearray(min(options.chunk_bytes, entry.nbytes)))
            for start in range(0, entry.nbytes, options.chunk_bytes):
                part = buffer[: min(options.chunk_bytes, entry.nbytes - start)]
                reader.read_into(path, start, part)
                crc = zlib.crc32(part, crc)
        except ValueError:
            return False
        return crc == entry.crc32

    with ThreadPoolExecutor(options.workers) as pool:
        good = pool.map(check, finished.values())
        return {path: entry for (path, entry), holds in zip(finished.items(), good, strict=True) if holds}


def write_files(
    plan: ConversionPlan,
    reader: ByteReader,
    sink: Sink,
    options: ExecutionOptions,
    *,
    reused: Mapping[str, Finished] | None = None,
    record: Callable[[Finished], None] = lambda entry: None,
    wanted: Collection[str] | None = None,
) -> Written:
    """Every file of the plan (or every ``wanted`` one) that is not ``reused`` is complete in ``sink``.

    ``record`` is called once for every file, from any thread, when it is complete and durable. The first failure stops
    the rest and is raised.
    """
    return _Execution(plan, reader, sink, options, record).run(reused or {}, wanted)


def close_gaps(
    gaps: Sequence[tuple[SourceStorage, int, int]], reader: ByteReader, options: ExecutionOptions
) -> list[Read]:
    """The ranges of storages, read and summed: what no output file needed, of storages that are checked."""

    def close(gap: tuple[SourceStorage, int, int]) -> Read:
        storage, start, stop = gap
        buffer = memoryview(bytearray(min(options.chunk_bytes, stop - start)))
        crc = sum_range(storage, start, stop, reader, buffer)
        return SourceSums.read(storage, start, stop, crc)

    with ThreadPoolExecutor(options.workers) as pool:
        return list(pool.map(close, gaps))


class _StoppedError(Exception):
    """Another job has failed; this one ends without a fault of its own."""


class _Execution:
    def __init__(
        self,
        plan: ConversionPlan,
        reader: ByteReader,
        sink: Sink,
        options: ExecutionOptions,
        record: Callable[[Finished], None],
    ) -> None:
        self.plan = plan
        self.reader = reader
        self.sink = sink
        self.workers = options.workers
        self.source_crc = options.source_crc
        self.chunk_bytes = options.chunk_bytes
        self.shown, self.what = options.progress, options.what
        self.record = record
        # Pieces name the first ones by their index; the others are carried over in their files.
        self.storages = (*plan.storages, *plan.carried_storages)
        self.pieces = PieceReader(self.storages, reader)
        self.local = threading.local()
        self.written = Written()
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.finishers = ThreadPoolExecutor(FINISHERS)
        self.finishing: list[Future[None]] = []
        self.unfinished = threading.BoundedSemaphore(UNFINISHED)
        self.open_files: set[FileWriter] = set()

    def run(self, reused: Mapping[str, Finished], wanted: Collection[str] | None) -> Written:
        self.written.files.update(reused)
        builders = [
            (path, planned, build)
            for path, planned, build in self._files()
            if path not in reused and (wanted is None or path in wanted)
        ]
        total = sum(planned for _, planned, _ in builders)
        with Progress(total, len(builders), shown=self.shown, what=self.what) as self.progress:
            pool = ThreadPoolExecutor(self.workers)
            try:
                futures: list[Future[None]] = [pool.submit(self._guard, job) for job in self._jobs(builders)]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                for finishing in self.finishing:
                    finishing.result()
            finally:
                # Also on an interrupt: no thread may go on writing into a folder that is about to be removed.
                self.stopped.set()
                pool.shutdown(cancel_futures=True)
                self.finishers.shutdown(cancel_futures=True)
                for writer in self.open_files:
                    writer.abandon()
        return self.written

    def _files(self) -> Iterator[tuple[str, int, Callable[[], OutputFile]]]:
        """Path, planned bytes and recipe of every file, in the order of the bytes they are read from."""
        for task in sorted(self.plan.tensors, key=self._place):
            yield task.path, task.nbytes, lambda task=task: tensor_output(task, self.pieces)  # type: ignore[misc]
        for file in self.plan.objects:
            yield (
                file.path,
                file.nbytes,
                lambda file=file: object_output(file, self.storages, self.reader, self.pieces),  # type: ignore[misc]
            )
        for copied in self.plan.copies:
            yield (
                copied.path,
                copied.nbytes,
                lambda copied=copied: copied_output(copied, self.storages, self.reader),  # type: ignore[misc]
            )

    def _place(self, task: TensorFile) -> tuple[int, int]:
        if not task.pieces:
            return (-1, 0)
        (index,) = task.pieces[0].locations
        return (index, task.pieces[0].dest_offset)

    def _jobs(self, files: Iterable[tuple[str, int, Callable[[], OutputFile]]]) -> Iterator[Callable[[], None]]:
        for _, planned, build in files:
            if planned <= GROUP_BYTES or self.sink.sequential:
                yield lambda build=build: FileWriter(build(), self).write_all()  # type: ignore[misc]
                continue
            writer = FileWriter(build(), self)
            groups = list(writer.groups())
            writer.waiting = len(groups)
            for group in groups:
                yield lambda writer=writer, group=group: writer.write(group)  # type: ignore[misc]

    def _guard(self, job: Callable[[], None]) -> None:
        try:
            job()
        except _StoppedError:
            pass
        except BaseException:
            self.stopped.set()
            raise

    def check_stopped(self) -> None:
        """Ends the calling job where another has failed."""
        if self.stopped.is_set():
            raise _StoppedError

    def buffer(self) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] | None = getattr(self.local, "buffer", None)
        if found is None:
            # A single element may be larger than a chunk made small on purpose.
            found = self.local.buffer = np.empty(max(self.chunk_bytes, 16), np.uint8)
        return found

    def opened(self, writer: FileWriter) -> None:
        with self.lock:
            self.open_files.add(writer)

    def closed(self, writer: FileWriter) -> None:
        with self.lock:
            self.open_files.discard(writer)

    def complete(self, finish: Callable[[], None]) -> None:
        """``finish`` is called: at once where files are written in order, else by a thread that waits for the disk
        while this one goes on copying. The first failure stops the run and is raised at its end."""
        if self.sink.sequential:
            finish()
            return

        def end() -> None:
            try:
                self._guard(finish)
            finally:
                self.unfinished.release()

        self.unfinished.acquire()
        with self.lock:
            self.finishing.append(self.finishers.submit(end))

    def finished(self, entry: Finished) -> None:
        self.record(entry)
        with self.lock:
            self.written.files[entry.path] = entry
        self.progress.file()

    def count(self, nbytes: int, planned: int) -> None:
        """``nbytes`` more are written; they stand for ``planned`` bytes of the plan's ``bytes_out``."""
        with self.lock:
            self.written.bytes_written += nbytes
        self.progress.advance(planned)
