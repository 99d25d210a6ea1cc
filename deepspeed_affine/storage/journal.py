"""The journal of an unfinished output: which files are complete, so that the next run need not write them again.

A journal is a file of lines. The first names the job by its identity; every further line is one finished file, added
after the file itself was closed (and synced, where that was asked for). Each line carries its own checksum, so a line
that was torn by a crash or damaged later is known as such.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.storage.durable import write_all
from deepspeed_affine.storage.records import Fields, parse_object, path_fault, plain

__all__ = ["JOURNAL_FORMAT", "Finished", "Journal", "JournalContent", "Read", "read_journal"]

JOURNAL_FORMAT = 1
_CRC_END = 1 << 32
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_CHECK = b',"check":"%08x"}'
_CHECK_LENGTH = len(_CHECK % 0)


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes ``start`` to ``stop`` of one storage of one source file were read, and have this CRC-32."""

    file: str
    key: str
    start: int
    stop: int
    crc32: int

    def __post_init__(self) -> None:
        if not (type(self.file) is str and type(self.key) is str):
            raise ValueError("a read whose file or storage is no text")
        if not all(type(value) is int for value in (self.start, self.stop, self.crc32)):
            raise ValueError("a read whose bounds or checksum are no integers")
        if not 0 <= self.start <= self.stop or not 0 <= self.crc32 < _CRC_END:
            raise ValueError(f"a read of bytes {self.start} to {self.stop} with checksum {self.crc32:x}")


@dataclass(frozen=True, slots=True)
class Finished:
    """One complete output file, by its path inside the output, and what was read for it."""

    path: str
    nbytes: int
    crc32: int
    reads: tuple[Read, ...] = ()

    def __post_init__(self) -> None:
        fault = path_fault(self.path)
        if fault:
            raise ValueError(f"a finished file whose path {self.path!r} {fault}")
        if type(self.nbytes) is not int or self.nbytes < 0:
            raise ValueError(f"{self.path}: a size of {self.nbytes!r} bytes")
        if type(self.crc32) is not int or not 0 <= self.crc32 < _CRC_END:
            raise ValueError(f"{self.path}: a checksum {self.crc32!r}")

    def to_line(self) -> bytes:
        """The journal line, with its end; ASCII, whatever the names hold."""
        reads = [[read.file, read.key, read.start, read.stop, read.crc32] for read in self.reads]
        return _line({"path": self.path, "bytes": self.nbytes, "crc32": self.crc32, "reads": reads})

    @classmethod
    def from_line(cls, line: bytes) -> Finished:
        """The finished file a line names; ValueError for a line that is not exactly as it was written."""
        found = _parse_line(line)
        fields = Fields(found)
        fields.only(("path", "bytes", "crc32", "reads", "check"))
        reads = found.get("reads")
        if not isinstance(reads, list) or not all(isinstance(read, list) and len(read) == 5 for read in reads):
            raise ValueError("'reads' is no list of reads")
        return cls(
            fields.text("path"), fields.count("bytes"), fields.count("crc32"), tuple(Read(*read) for read in reads)
        )


@dataclass(frozen=True, slots=True)
class JournalContent:
    """What one journal vouches for. ``identity`` is None where not even its first line can be trusted.

    ``job`` is the token of the run that began the file.
    """

    identity: dict[str, Any] | None
    job: str
    finished: Mapping[str, Finished]
    damaged: bool


def _line(members: Mapping[str, Any]) -> bytes:
    body = json.dumps(members, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
    return body[:-1] + _CHECK % zlib.crc32(body) + b"\n"


def _parse_line(line: bytes) -> dict[str, Any]:
    line = line.rstrip(b"\n")
    body = line[:-_CHECK_LENGTH] + b"}"
    if line[-_CHECK_LENGTH:] != _CHECK % zlib.crc32(body):
        raise ValueError("a line that does not match its checksum")
    return parse_object(line)


def read_journal(path: str) -> JournalContent:
    """What the journal at ``path`` vouches for, up to the first line that is torn or damaged.

    A line without an end is what a crash leaves, and no damage. Raises CheckpointFormatError for a journal of a newer
    format, and OSError where it cannot be read.
    """
    finished: dict[str, Finished] = {}
    with open(path, "rb") as file:
        first = file.readline()
        if not first.endswith(b"\n"):
            return JournalContent(None, "", finished, bool(first))
        try:
            _refuse_newer(parse_object(first).get("format"), path)
            fields = Fields(_parse_line(first))
            identity, job = plain(fields.objects("identity")), fields.text("job")
            if fields.count("format") != JOURNAL_FORMAT:
                raise ValueError("no format of a journal")
        except CheckpointFormatError:
            raise
        except ValueError:
            return JournalContent(None, "", finished, True)
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                entry = Finished.from_line(line)
            except ValueError:
                return JournalContent(identity, job, finished, True)
            finished[entry.path] = entry
    return JournalContent(identity, job, finished, False)


def _refuse_newer(number: object, path: str) -> None:
    if type(number) is int and number > JOURNAL_FORMAT:
        raise CheckpointFormatError(
            f"{path}: is a journal of format {number}, this version of deepspeed_affine reads format "
            f"{JOURNAL_FORMAT}; a newer version has begun this output. Finish it with that version, or start over "
            "with --no-resume.",
            file=path,
        )


class Journal:
    """The journal of one process, open for adding. Threads may share it; no other process writes to the file."""

    def __init__(self, path: str, fd: int, end: int) -> None:
        self.path = path
        self._fd = fd
        self._end = end
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls, path: str, identity: Mapping[str, Any], finished: Iterable[Finished] = (), *, job: str = ""
    ) -> Journal:
        """A journal of this job with ``finished`` in it is at ``path``, replacing at once what was there."""
        private = f"{path}.tmp"
        fd = os.open(private, _CREATE, 0o666)
        try:
            lines = [_line({"format": JOURNAL_FORMAT, "identity": plain(identity), "job": job})]
            lines += [entry.to_line() for entry in finished]
            data = b"".join(lines)
            write_all(fd, data)
            if len(lines) > 1:
                # It replaces the journal these lines come from.
                os.fsync(fd)
            os.rename(private, path)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, len(data))

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def record(self, entry: Finished) -> None:
        """After this a later run finds ``entry``, even if this process is killed."""
        line = entry.to_line()
        with self._lock:
            if self._fd < 0:
                raise PolicyError(f"{self.path}: the journal is closed; files are recorded before.")
            try:
                write_all(self._fd, line)
            except BaseException:
                self._take_back()
                raise
            self._end += len(line)

    def close(self) -> None:
        """After this the file is closed, and what was recorded stays."""
        with self._lock:
            self._close()

    def _take_back(self) -> None:
        """Half a line in front of the next one would make that one worthless too."""
        try:
            os.ftruncate(self._fd, self._end)
        except OSError:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
