"""Executing a conversion plan, file to file: threads gather bounded chunks and write them where they belong.

Memory is one arena a thread plus file maps; it does not depend on the size of the model or of any tensor.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import IntegrityError, UnsupportedLayoutError
from deepspeed_affine.execute.fill import IntervalFiller, chunk_bounds
from deepspeed_affine.execute.prove import Drift, measure_drift
from deepspeed_affine.execute.sources import FlatSources
from deepspeed_affine.plan.conversion import ConversionPlan, CopiedFile, ObjectFile, SourceStorage, TensorFile
from deepspeed_affine.storage.crc import crc32_combine
from deepspeed_affine.storage.output import sync_file
from deepspeed_affine.storage.pt_writer import NewTensor, PtLayout, TensorFileWriter, archive_name
from deepspeed_affine.storage.repickle import save_objects
from deepspeed_affine.storage.tensors import FileMaps

if TYPE_CHECKING:
    import torch

__all__ = ["ExecutionOptions", "check_drifted", "execute", "find_drift", "memory_bound"]

CHUNK_BYTES = 8 << 20
"""An arena's size: large enough that calls cost little, small enough to stay in a processor's cache."""

BASE_BYTES = 200 << 20
"""What the process itself needs: interpreter, torch, metadata."""


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """How a plan is executed; none of it changes what is written."""

    workers: int = 2
    source_crc: bool = True
    fsync: bool = True
    progress: bool = False
    chunk_bytes: int = CHUNK_BYTES


def memory_bound(plan: ConversionPlan, options: ExecutionOptions) -> int:
    """The most memory, in bytes, the conversion holds at once, beside pages of the files it maps."""
    largest = max((task.nbytes for task in plan.tensors), default=0)
    return BASE_BYTES + 2 * options.workers * min(options.chunk_bytes, largest)


def find_drift(plan: ConversionPlan, sources: FlatSources, options: ExecutionOptions) -> list[Drift]:
    """Every pair of holders whose bytes differ, in the order of the plan; this is the proof of P2."""
    tasks = [task for task in plan.tensors if task.replicas]
    with ThreadPoolExecutor(options.workers) as pool:
        return [drift for found in pool.map(lambda task: measure_drift(task, sources), tasks) for drift in found]


def check_drifted(plan: ConversionPlan, maps: FileMaps, drifts: Sequence[Drift], options: ExecutionOptions) -> None:
    """The storages behind ``drifts`` are as they were saved; a damaged one raises IntegrityError naming its file."""
    drifted = {(drift.param, drift.state) for drift in drifts}
    touched: set[int] = set()
    for task in plan.tensors:
        if (task.param, task.state) in drifted:
            for pieces in (task.pieces, *(replica.pieces for replica in task.replicas)):
                touched.update(index for piece in pieces for index in piece.locations)
    of_file = {(plan.storages[index].file, plan.storages[index].key) for index in touched}
    for storage in plan.checked_storages:
        if storage.crc32 is not None and (storage.file, storage.key) in of_file:
            _check_crc(storage, maps, options.chunk_bytes)


def execute(plan: ConversionPlan, maps: FileMaps, folder: str, options: ExecutionOptions) -> int:
    """Every file of the plan is complete in ``folder``; returns the bytes written.

    Source storages are checked against their recorded CRC in the same run. The first failure stops the rest.
    """
    return _Execution(plan, maps, folder, options).run()


def _check_crc(
    storage: SourceStorage, maps: FileMaps, chunk_bytes: int, proceed: Callable[[], object] = lambda: None
) -> None:
    view = memoryview(maps.region(storage.file)).cast("B")
    view = view[storage.byte_offset : storage.byte_offset + storage.nbytes]
    found = 0
    for start in range(0, storage.nbytes, chunk_bytes):
        proceed()
        found = zlib.crc32(view[start : start + chunk_bytes], found)
    if found != storage.crc32:
        raise IntegrityError(
            f"{storage.file}: storage {storage.key!r} has CRC {found:08x}, its file records {storage.crc32:08x}; "
            "the file was damaged after it was saved. Use another checkpoint, or read it all the same with "
            "--no-source-crc.",
            file=storage.file,
        )


class _StoppedError(Exception):
    """Another job has failed; this one ends without a fault of its own."""


class _Execution:
    def __init__(self, plan: ConversionPlan, maps: FileMaps, folder: str, options: ExecutionOptions) -> None:
        self.plan = plan
        self.maps = maps
        self.sources = FlatSources(plan.storages, maps)
        self.folder = folder
        self.options = options
        self.arenas = threading.local()
        self.written = 0
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.open_files: set[TensorFileWriter] = set()

    def run(self) -> int:
        for directory in sorted({os.path.dirname(self.path(path)) for path in self.plan.paths}):
            os.makedirs(directory, exist_ok=True)
        with self._progress() as self.advance:
            pool = ThreadPoolExecutor(self.options.workers)
            try:
                futures: list[Future[None]] = [pool.submit(self._guard, job) for job in self._jobs()]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                # Also on an interrupt: no thread may go on writing into a folder that is about to be removed.
                self.stopped.set()
                pool.shutdown(cancel_futures=True)
                for file in self.open_files:
                    file.close()
        return self.written

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

    def path(self, relative: str) -> str:
        return os.path.join(self.folder, *relative.split("/"))

    def _jobs(self) -> Iterator[Callable[[], None]]:
        """Large files first, so that no thread is left with one at the end."""
        for task in sorted(self.plan.tensors, key=lambda item: -item.nbytes):
            writer = _TensorWriter(task, self)
            bounds = list(chunk_bounds(task, max(1, self.options.chunk_bytes // task.itemsize)))
            share = max(1, -(-len(bounds) // (4 * self.options.workers)))
            groups = [bounds[start : start + share] for start in range(0, len(bounds), share)] or [[]]
            writer.expect(len(groups))
            for group in groups:
                yield lambda writer=writer, group=group: writer.write(group)  # type: ignore[misc]
        for file in self.plan.objects:
            yield lambda file=file: self._object(file)  # type: ignore[misc]
        for copied in self.plan.copies:
            yield lambda copied=copied: self._copy(copied)  # type: ignore[misc]
        if self.options.source_crc:
            for storage in self.plan.checked_storages:
                if storage.crc32 is not None:
                    yield lambda storage=storage: _check_crc(  # type: ignore[misc]
                        storage, self.maps, self.options.chunk_bytes, self.check_stopped
                    )

    def arena(self, task: TensorFile, numel: int) -> torch.Tensor:
        import torch

        found = getattr(self.arenas, "bytes", None)
        if found is None:
            # A single element may be larger than a chunk made small on purpose.
            found = self.arenas.bytes = torch.empty(max(self.options.chunk_bytes, 16), dtype=torch.uint8)
        found = found[: found.numel() // task.itemsize * task.itemsize]
        typed: torch.Tensor = found.view(getattr(torch, task.dtype))
        return typed[:numel]

    def _object(self, file: ObjectFile) -> None:
        self.check_stopped()
        path = self.path(file.path)
        with _naming(path):
            save_objects(path, file.root, maps=self.maps)
            self._finish(path, file.nbytes)

    def _copy(self, file: CopiedFile) -> None:
        path = self.path(file.path)
        with _naming(path), open(file.source, "rb") as source, open(path, "wb") as target:
            while block := source.read(self.options.chunk_bytes):
                self.check_stopped()
                target.write(block)
        shutil.copystat(file.source, path)
        self._finish(path, file.nbytes)

    def _finish(self, path: str, planned: int) -> None:
        if self.options.fsync:
            sync_file(path)
        self.count(os.path.getsize(path), planned)

    def count(self, nbytes: int, planned: int) -> None:
        """``nbytes`` more are written; they stand for ``planned`` bytes of the plan's ``bytes_out``."""
        with self.lock:
            self.written += nbytes
            self.advance(planned)

    @contextmanager
    def _progress(self) -> Iterator[Callable[[int], object]]:
        if not self.options.progress:
            yield lambda nbytes: None
            return
        from tqdm import tqdm

        with tqdm(total=self.plan.bytes_out, unit="B", unit_scale=True, desc="converting") as bar:
            yield bar.update


class _TensorWriter:
    """One output file of one tensor, written by several threads and completed by the last of them."""

    def __init__(self, task: TensorFile, execution: _Execution) -> None:
        self.task = task
        self.execution = execution
        self.filler = IntervalFiller(task, execution.sources)
        self.lock = threading.Lock()
        self.file: TensorFileWriter | None = None
        self.waiting = 0
        self.sums: dict[int, tuple[int, int]] = {}

    def expect(self, groups: int) -> None:
        self.waiting = groups

    def write(self, bounds: list[tuple[int, int]]) -> None:
        """The intervals are in the file; whoever finishes the last group closes it."""
        self.execution.check_stopped()
        with self.lock:
            if self.file is None:
                self.file = self._create()
        file = self.file
        self._write_intervals(file, bounds)
        with self.lock:
            self.waiting -= 1
            if self.waiting:
                return
        self._complete(file)

    def _write_intervals(self, file: TensorFileWriter, bounds: list[tuple[int, int]]) -> None:
        import torch

        itemsize = self.task.itemsize
        for start, stop in bounds:
            self.execution.check_stopped()
            data = self.filler.contiguous(start, stop)
            if data is None:
                data = self.execution.arena(self.task, stop - start)
                self.filler.fill(start, stop, data)
            view = memoryview(data.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
            crc = zlib.crc32(view)
            file.write("0", start * itemsize, view)
            with self.lock:
                self.sums[start] = (crc, len(view))
            self.execution.count(len(view), len(view))

    def _create(self) -> TensorFileWriter:
        tensor = NewTensor(self.task.dtype, self.task.shape)
        root: Any = tensor
        if self.task.entries is not None:
            root = {key: tensor if key == self.task.tensor_key else value for key, value in self.task.entries}
        path = self.execution.path(self.task.path)
        layout = PtLayout(root, archive_name(self.task.path))
        self.execution.count(layout.file_size - tensor.nbytes, 0)
        made = TensorFileWriter(path, layout)
        with self.execution.lock:
            self.execution.open_files.add(made)
        return made

    def _complete(self, file: TensorFileWriter) -> None:
        crc = 0
        for start in sorted(self.sums):
            crc = crc32_combine(crc, *self.sums[start])
        file.finish({"0": crc} if self.sums else {})
        if self.execution.options.fsync:
            file.sync()
        file.close()
        with self.execution.lock:
            self.execution.open_files.discard(file)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Gives an error of the operating system the name of the file it happened to, where it has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), path) from error
    except RecursionError as error:
        raise UnsupportedLayoutError(
            f"{path}: the objects it is written from are nested deeper than Python can write. Save without them.",
            file=path,
        ) from error
    except RuntimeError as error:
        # torch.save reports a failed write this way, and leaves the reason to be guessed.
        raise OSError(errno.EIO, f"could not be written ({str(error).splitlines()[0]})", path) from error
