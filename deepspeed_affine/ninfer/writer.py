"""Writing an artifact: objects in any order and in any pieces, straight to their place in the files."""

from __future__ import annotations

import os
import threading
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from types import TracebackType
from typing import Any

import numpy as np

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.artifact import Artifact
from deepspeed_affine.ninfer.descriptors import Descriptors
from deepspeed_affine.ninfer.directory import Directory
from deepspeed_affine.ninfer.encode import encode_rows, nvfp4_divisor, words_of
from deepspeed_affine.ninfer.errors import EncodingError, ValueDomainError, WriterError
from deepspeed_affine.ninfer.fileplan import FilePlan, ResourceSpec, TensorSpec, plan_files, plan_objects
from deepspeed_affine.ninfer.fileset import open_file_set, payload_segments
from deepspeed_affine.ninfer.floats import as_array
from deepspeed_affine.ninfer.formats import CONTIGUOUS, DIRECT, NVFP4
from deepspeed_affine.ninfer.framing import ENTRY_MAGIC, PART_MAGIC, Header
from deepspeed_affine.ninfer.integers import whole
from deepspeed_affine.ninfer.json_text import parse_json
from deepspeed_affine.ninfer.layouts import geometry_of
from deepspeed_affine.ninfer.parse import binding_of, component_of, directory_of, use_of
from deepspeed_affine.ninfer.publication import PrivateFiles
from deepspeed_affine.ninfer.records import Binding, Component, FileRecord, ObjectRecord, TensorObject, Use

__all__ = ["Writer", "reshard_files"]

_BLOCK_ELEMENTS = 1 << 18
_COPY_BYTES = 8 << 20


class Writer:
    """An artifact being written; leaving the ``with`` block publishes it, and an exception leaves nothing behind.

    The directory is planned, checked and its files made before the first object is written, so what cannot be written
    is refused at once. Components, bindings and uses are records, or as a directory spells them. Objects are written in
    any order and pieces, by any threads: ``write`` takes encoded bytes, ``write_values``, ``write_rows`` and
    ``write_elements`` encode. No file is larger than ``max_file_bytes``; without it there is one. ``durable`` waits
    until everything is on the disk. Nothing that exists is ever overwritten.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        objects: Iterable[TensorSpec | ResourceSpec],
        components: Mapping[str, Component | Mapping[str, Any]],
        bindings: Mapping[str, Binding | Mapping[str, Any]] | None = None,
        uses: Sequence[Use | Mapping[str, Any]] = (),
        *,
        metadata: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        max_file_bytes: int | None = None,
        json_bytes: int = 0,
        durable: bool = True,
    ) -> None:
        records = plan_objects(objects)
        if not records:
            raise WriterError("No objects were given; expected one or more.")

        parts = {
            name: value if isinstance(value, Component) else component_of(value, f"components {shown(name)}")
            for name, value in components.items()
        }
        bound = {
            name: value if isinstance(value, Binding) else binding_of(value, f"bindings {shown(name)}")
            for name, value in (bindings or {}).items()
        }
        used = [value if isinstance(value, Use) else use_of(value, f"uses {n}") for n, value in enumerate(uses)]

        def make(files: Sequence[FileRecord]) -> Directory:
            return Directory(parts, records, bound, used, files, metadata, provenance)

        payload_bytes = records[-1].offset + records[-1].nbytes
        self._start(path, make, payload_bytes, max_file_bytes, json_bytes, durable)

    def _start(
        self,
        path: str | os.PathLike[str],
        make: Any,
        payload_bytes: int,
        limit: int | None,
        reserve: int,
        durable: bool,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        name = os.path.basename(self.path)
        self._plan = plan_files(make, payload_bytes, name, limit, reserve)
        # As a reader will see it, escapes and all.
        directory_of(parse_json(self._plan.text, self.path), name)
        self._durable = durable
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._writing = 0
        self._covered: dict[str, _Coverage] = {r.id: _Coverage(r.nbytes) for r in self.directory.objects.values()}
        self._state = "open"
        self.artifact_id = uuid.uuid4().bytes
        self._starts = [0, *accumulate(record.payload_bytes for record in self.directory.files)]
        names = [record.path or name for record in self.directory.files]
        self._private = PrivateFiles.take(self.path, names, self.artifact_id)
        self._files = Descriptors(
            lambda number: os.open(self._private.path(number), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), self._refusal
        )
        try:
            for number in range(len(names)):
                self._files.put(number, _new_file(self._private.path(number), self._plan, number, self.artifact_id))
        except BaseException:
            self.abort()
            raise

    @property
    def directory(self) -> Directory:
        """The directory as it will be read, files table included."""
        return self._plan.directory

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abort()

    def write(self, object_id: str, data: Any, offset: int = 0) -> None:
        """The object's encoded bytes from ``offset`` on are written; each byte of an object is written exactly once."""
        array = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        record = self._record(object_id)
        offset = whole(offset, f"Object {shown(object_id)}: an offset", WriterError)
        with self._lock:
            self._require_open()
            self._covered[object_id].add(object_id, offset, flat.nbytes)
            self._writing += 1
        try:
            self._put(record.offset + offset, flat)
        except BaseException:
            with self._lock:
                if self._state in ("open", "finishing"):
                    self._state = "failed"
            raise
        finally:
            with self._lock:
                self._writing -= 1
                self._idle.notify_all()

    def write_values(self, object_id: str, values: Any) -> None:
        """The whole tensor is encoded and written, a block of rows at a time; see ``encode`` for what is taken."""
        record = self._tensor(object_id)
        array = as_array(values, record.format)
        if array.shape != record.shape:
            raise WriterError(f"Object {shown(object_id)}: values of shape {array.shape}; expected {record.shape}.")
        geometry = geometry_of(record)
        if geometry.layout == CONTIGUOUS:
            self.write_elements(object_id, 0, array.reshape(-1))
            return
        matrix = geometry.rows // geometry.divisors
        step = max(1, _BLOCK_ELEMENTS // geometry.columns // geometry.row_unit) * geometry.row_unit
        for start in range(0, geometry.rows, matrix):
            divisor = nvfp4_divisor(array[start : start + matrix]) if record.format == NVFP4 else None
            for row in range(start, start + matrix, step):
                self.write_rows(object_id, row, array[row : min(row + step, start + matrix)], divisor)

    def write_rows(self, object_id: str, row: int, values: Any, divisor: Any = None) -> None:
        """Rows from ``row`` on are encoded and written; ``nvfp4`` needs the ``divisor`` of their whole matrix."""
        geometry = geometry_of(self._tensor(object_id))
        row = whole(row, f"Object {shown(object_id)}: a row", WriterError)
        try:
            regions = encode_rows(geometry, row, values, divisor)
        except (EncodingError, ValueDomainError) as fault:
            raise type(fault)(f"Object {shown(object_id)}: {fault.message}", param=fault.param) from fault
        for offset, data in regions:
            self.write(object_id, data, offset)

    def write_elements(self, object_id: str, begin: int, values: Any) -> None:
        """Elements from ``begin`` on, in C order, of a tensor whose elements are words of their own."""
        record = self._tensor(object_id)
        if record.layout != CONTIGUOUS:
            raise WriterError(f"Object {shown(object_id)}: is {record.format}; expected rows of it, by write_rows.")
        self.write(object_id, words_of(record.format, as_array(values, record.format)), begin * DIRECT[record.format])

    def finish(self) -> None:
        """The artifact is complete under its names; an object that is not fully written is a ``WriterError``.

        Writes that other threads have begun are waited for. Nothing is left of an artifact that cannot be finished.
        """
        with self._lock:
            before = self._state
            if before == "open":
                self._state = "finishing"
        if before != "open":
            refusal = self._refusal()
            if before == "failed":
                self.abort()
            raise refusal
        try:
            with self._idle:
                self._idle.wait_for(lambda: not self._writing)
                if self._state != "finishing":
                    raise self._refusal()
            for object_id, covered in self._covered.items():
                covered.require_whole(object_id)
            for number in range(len(self.directory.files)):
                with self._files.borrow(number) as fd:
                    if os.fstat(fd).st_size != self._plan.file_bytes(number):
                        path = self._private.path(number)
                        raise WriterError(f"{path}: was changed while it was written; write again.")
                    if self._durable:
                        os.fsync(fd)
            self._files.close()
            self._private.publish(durable=self._durable)
        except BaseException:
            self.abort()
            raise
        self._state = "finished"

    def abort(self) -> None:
        """Nothing of this artifact is left; does nothing once it is finished."""
        if self._state in ("finished", "aborted"):
            return
        self._state = "aborted"
        self._files.close()
        self._private.discard()

    def _put(self, offset: int, data: Any) -> None:
        view = data.data
        segments = payload_segments(self.directory.files, self._plan.start, offset, data.nbytes, self._starts)
        for number, at, place, size in segments:
            piece = view[place : place + size]
            with self._files.borrow(number) as fd:
                while piece:
                    count = os.pwrite(fd, piece[: 1 << 30], at)
                    piece, at = piece[count:], at + count

    def _require_open(self) -> None:
        if self._state != "open":
            raise self._refusal()

    def _refusal(self) -> WriterError:
        return WriterError(f"{self.path}: is {self._state}; expected an open writer. Write before it is finished.")

    def _record(self, object_id: str) -> ObjectRecord:
        found = self.directory.objects.get(object_id)
        if found is None:
            raise WriterError(f"Object {shown(object_id)} is not among the planned ones; expected one of them.")
        return found

    def _tensor(self, object_id: str) -> TensorObject:
        found = self._record(object_id)
        if not isinstance(found, TensorObject):
            raise WriterError(f"Object {shown(object_id)} is a resource; expected a tensor.")
        return found


class _Coverage:
    """Which bytes of one object were written, as disjoint ranges that do not touch."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges: list[tuple[int, int]] = []

    def add(self, object_id: str, offset: int, count: int) -> None:
        end = offset + count
        if type(offset) is not int or offset < 0 or end > self._nbytes:
            raise WriterError(
                f"Object {shown(object_id)}: bytes [{shown(offset)}, {shown(end)}) were written; it has {self._nbytes}."
                " Expected a range inside it."
            )
        if not count:
            return
        at = bisect_left(self._ranges, (offset, end))
        for other in self._ranges[max(0, at - 1) : at + 1]:
            if other[0] < end and offset < other[1]:
                raise WriterError(
                    f"Object {shown(object_id)}: bytes [{max(offset, other[0])}, {min(end, other[1])}) were written "
                    "twice; expected every byte once."
                )
        if at and self._ranges[at - 1][1] == offset:
            at -= 1
            offset = self._ranges.pop(at)[0]
        if at < len(self._ranges) and self._ranges[at][0] == end:
            end = self._ranges.pop(at)[1]
        self._ranges.insert(at, (offset, end))

    def require_whole(self, object_id: str) -> None:
        if self._ranges != [(0, self._nbytes)]:
            first = self._ranges[0][1] if self._ranges and self._ranges[0][0] == 0 else 0
            raise WriterError(
                f"Object {shown(object_id)}: byte {first} and perhaps others of its {self._nbytes} were not written; "
                "expected all of them."
            )


def _new_file(path: str, plan: FilePlan, number: int, artifact_id: bytes) -> int:
    """A file of its exact size with its header; what is not written later is zero."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        os.ftruncate(fd, plan.file_bytes(number))
        if number:
            head = Header(PART_MAGIC, number, artifact_id).to_bytes()
        else:
            head = Header(ENTRY_MAGIC, len(plan.text), artifact_id).to_bytes() + plan.text
        view, at = memoryview(head), 0
        while view:
            count = os.pwrite(fd, view, at)
            view, at = view[count:], at + count
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise
    return fd


class _Copier(Writer):
    """A writer of a payload that is taken as it is, gaps and unknown encodings included."""

    def __init__(self, path: str | os.PathLike[str], source: Directory, limit: int | None, durable: bool) -> None:
        def make(files: Sequence[FileRecord]) -> Directory:
            return Directory(
                source.components,
                source.objects.values(),
                source.bindings,
                source.uses,
                files,
                source.metadata,
                source.provenance,
            )

        self._start(path, make, source.payload_bytes, limit, 0, durable)
        self._covered = {"": _Coverage(source.payload_bytes)}

    def __enter__(self) -> _Copier:
        return self

    def put(self, offset: int, data: Any) -> None:
        """Bytes of the payload from ``offset`` on are written."""
        self._covered[""].add("the payload", offset, data.nbytes)
        self._put(offset, data)


def reshard_files(
    source: str | os.PathLike[str] | Artifact,
    path: str | os.PathLike[str],
    max_file_bytes: int | None = None,
    *,
    durable: bool = True,
) -> Directory:
    """The artifact is also at ``path``, in files of at most ``max_file_bytes``; without a limit, in one.

    The payload is copied byte for byte and nothing is decoded, so that encodings of tomorrow are carried too; the new
    files have an identity of their own. Returns the new directory.
    """
    files = source.file_set if isinstance(source, Artifact) else open_file_set(os.fspath(source))
    try:
        with _Copier(path, files.directory, max_file_bytes, durable) as writer:
            end = files.directory.payload_bytes
            for offset in range(0, end, _COPY_BYTES):
                writer.put(offset, files.read(offset, min(_COPY_BYTES, end - offset)))
            return writer.directory
    finally:
        if not isinstance(source, Artifact):
            files.close()
