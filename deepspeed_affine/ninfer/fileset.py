"""The files of one artifact as one logical payload: the entry is open, continuations open when a read touches them."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from deepspeed_affine.errors import AffineError, PolicyError
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.descriptors import Descriptors
from deepspeed_affine.ninfer.directory import Directory
from deepspeed_affine.ninfer.errors import FileSetError, FramingError, RangeError
from deepspeed_affine.ninfer.floats import U8
from deepspeed_affine.ninfer.framing import ENTRY_MAGIC, HEADER_BYTES, PART_MAGIC, PART_START, Header, entry_start
from deepspeed_affine.ninfer.json_text import parse_json
from deepspeed_affine.ninfer.parse import directory_of
from deepspeed_affine.ninfer.records import FileRecord

__all__ = ["FileSet", "Segment", "open_file_set", "payload_segments"]

_LARGEST_READ = 1 << 30


Segment = tuple[int, int, int, int]
"""``(file, offset in the file, place in the range, bytes)``"""


def payload_segments(
    files: Sequence[FileRecord], entry_offset: int, offset: int, count: int, starts: Sequence[int] | None = None
) -> Iterator[Segment]:
    """Every file that holds some of ``count`` bytes of payload from ``offset`` on, in order.

    ``entry_offset`` is where the entry's payload begins; ``starts`` what lies before each file, if that is known.
    """
    starts = [0, *accumulate(record.payload_bytes for record in files)] if starts is None else starts
    number = bisect_right(starts, offset) - 1
    done = 0
    while done < count:
        low = offset + done
        size = min(count - done, starts[number + 1] - low)
        yield number, (PART_START if number else entry_offset) + low - starts[number], done, size
        done += size
        number += 1


class FileSet:
    """An opened artifact's directory and bytes; safe to share between threads.

    Files are read at offsets and not mapped, so that one cut short is an error and not the end of the process.
    """

    def __init__(self, path: str, fd: int, header: Header, directory: Directory) -> None:
        self.path = path
        self.artifact_id = header.artifact_id
        self.directory = directory
        self.payload_offset = entry_start(header.number)
        # The process may change its folder before a continuation is opened. A link's continuations are beside the link.
        self._entry = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
        sizes = [record.payload_bytes for record in directory.files]
        self._starts = [0, *accumulate(sizes)]
        self._descriptors = Descriptors(self._open_file, self._closed)
        self._descriptors.put(0, fd)
        self._checked = {0}

    def close(self) -> None:
        """After this nothing is read any more; does nothing the second time."""
        self._descriptors.close()

    def file_path(self, number: int) -> str:
        """Where file ``number`` of the set is, as the entry's path was given."""
        return _beside(self.path, self.directory.files[number].path)

    def file_bytes(self, number: int) -> int:
        """The exact size that file has."""
        start = self.payload_offset if number == 0 else PART_START
        return start + self.directory.files[number].payload_bytes

    def check_range(self, offset: int, count: int) -> None:
        """Return if the payload has those bytes; an empty range may be at its end."""
        end = self.directory.payload_bytes
        if type(offset) is not int or type(count) is not int or offset < 0 or count < 0 or offset + count > end:
            raise RangeError(
                f"{self.path}: bytes [{shown(offset)}, +{shown(count)}) of the payload were asked for; it has {end}. "
                "Expected a range inside it.",
                file=self.path,
            )

    def segments(self, offset: int, count: int) -> Iterator[Segment]:
        """What of the range lies in which file."""
        return payload_segments(self.directory.files, self.payload_offset, offset, count, self._starts)

    def require(self, offset: int, count: int) -> None:
        """Return if the payload has those bytes and every file that holds some of them is there."""
        self.check_range(offset, count)
        for number, _, _, _ in self.segments(offset, count):
            self.touch(number)

    def read(self, offset: int, count: int) -> U8:
        """Those bytes of the payload, in memory of their own."""
        self.require(offset, count)
        found = np.empty(count, np.uint8)
        self.read_into(offset, found)
        return found

    def read_into(self, offset: int, out: U8) -> None:
        """``out`` holds the bytes of the payload from ``offset`` on."""
        self.check_range(offset, out.nbytes)
        if not out.flags.c_contiguous:
            raise RangeError(f"{self.path}: bytes are to be read into an array with gaps; expected a contiguous one.")
        view = out.reshape(-1).view(np.uint8).data
        for number, at, place, size in self.segments(offset, out.nbytes):
            self._read(number, at, view[place : place + size])

    def touch(self, number: int) -> None:
        """After this file ``number`` is known to be there and to be what the directory says."""
        if number not in self._checked:
            with self._descriptors.borrow(number):
                self._checked.add(number)

    def _read(self, number: int, at: int, view: memoryview) -> None:
        with self._descriptors.borrow(number) as fd:
            while view:
                try:
                    count = os.preadv(fd, [view[:_LARGEST_READ]], at)
                except OSError as error:
                    raise self._fault(number, f"could not be read ({error.strerror})") from error
                if not count:
                    raise self._fault(number, f"ends at byte {at} of {self.file_bytes(number)}")
                view, at = view[count:], at + count

    def _closed(self) -> PolicyError:
        return PolicyError(f"{self.path}: was closed; expected an open artifact. Read before closing it.")

    def _open_file(self, number: int) -> int:
        if number:
            return self._open_part(number)
        # Only once more continuations are open than are kept. A file put in its place is not this artifact's.
        try:
            fd = os.open(self._entry, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._fault(0, f"could not be opened again ({error.strerror})") from error
        try:
            header, size = _read_header(self.path, fd)
            if header.artifact_id != self.artifact_id or size != self.file_bytes(0):
                raise self._fault(0, "was replaced while it was read")
        except FramingError as fault:
            os.close(fd)
            raise self._fault(0, "was replaced while it was read") from fault
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open_part(self, number: int) -> int:
        try:
            path = _beside(self._entry, self.directory.files[number].path)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise self._fault(number, f"could not be opened ({getattr(error, 'strerror', error)})") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._fault(number, "is no regular file")
            data = os.pread(fd, HEADER_BYTES, 0)
            if len(data) < HEADER_BYTES:
                raise self._fault(number, f"has {len(data)} bytes and no whole header")
            magic, index, artifact_id = Header.fields(data)
            if magic != PART_MAGIC:
                raise self._fault(number, f"begins with {magic!r} instead of {PART_MAGIC!r}")
            if index != number:
                raise self._fault(number, f"says that it is part {index}")
            if artifact_id != self.artifact_id:
                raise self._fault(number, f"belongs to artifact {artifact_id.hex()}, not {self.artifact_id.hex()}")
            if status.st_size != self.file_bytes(number):
                raise self._fault(number, f"has {status.st_size} bytes instead of {self.file_bytes(number)}")
        except OSError as error:
            os.close(fd)
            raise self._fault(number, f"could not be read ({error.strerror})") from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _fault(self, number: int, fact: str) -> FileSetError:
        path = self.file_path(number)
        what = "the entry" if number == 0 else f"part {number} of {self.path}"
        return FileSetError(
            f"{path}: {fact}; expected {what}. Copy all files of the artifact again, from one place.", file=path
        )


def _beside(entry: str, name: str | None) -> str:
    return entry if name is None else os.path.join(os.path.dirname(entry), name)


def open_file_set(path: str) -> FileSet:
    """The artifact whose entry is at ``path``; its header, directory and length were checked, nothing else was read.

    Raises FramingError, JsonError, SchemaError, DirectoryError, RangeError or ReferenceError_, whichever is met first,
    and OSError where there is no such file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        header, size = _read_header(path, fd)
        text = _read_exactly(path, fd, HEADER_BYTES, header.number)
        try:
            directory = directory_of(parse_json(text, path), os.path.basename(path))
        except AffineError as fault:
            if fault.file is not None:
                raise
            raise type(fault)(f"{path}: {fault.message}", file=path) from None
        expected = entry_start(header.number) + directory.files[0].payload_bytes
        if size != expected:
            raise FramingError(
                f"{path}: has {size} bytes; expected {expected}, by its header and files table. Copy it again.",
                file=path,
            )
    except BaseException:
        os.close(fd)
        raise
    return FileSet(path, fd, header, directory)


def _read_header(path: str, fd: int) -> tuple[Header, int]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise FramingError(f"{path}: is no regular file; expected the entry of an artifact.", file=path)
    if status.st_size < HEADER_BYTES:
        raise FramingError(
            f"{path}: has {status.st_size} bytes; a header alone takes {HEADER_BYTES}. Copy it again.", file=path
        )
    magic, number, artifact_id = Header.fields(_read_exactly(path, fd, 0, HEADER_BYTES))
    if magic != ENTRY_MAGIC:
        hint = "It is a continuation: open the entry." if magic == PART_MAGIC else "It is no v3 container."
        raise FramingError(f"{path}: begins with {magic!r}; expected {ENTRY_MAGIC!r}. {hint}", file=path)
    if not number:
        raise FramingError(f"{path}: says that its directory has no bytes; expected one or more.", file=path)
    if number > status.st_size - HEADER_BYTES:
        raise FramingError(
            f"{path}: says that its directory has {number} bytes; the file has {status.st_size}. Copy it again.",
            file=path,
        )
    return Header(magic, number, artifact_id), status.st_size


def _read_exactly(path: str, fd: int, offset: int, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        read = os.preadv(fd, [view[:_LARGEST_READ]], offset)
        if not read:
            raise FramingError(
                f"{path}: ended while it was read; expected {count} bytes more. Copy it again.", file=path
            )
        view, offset = view[read:], offset + read
    return bytes(data)
