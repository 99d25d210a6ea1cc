"""What an unfinished output elsewhere has written down of itself, in small objects beside it.

For ``s3://b/universal`` they are below ``s3://b/.universal.partial``: ``job.json`` says which job it is and how far it
has come, every object in ``journal/`` names files that are about to be written, or are finished. Objects are written
whole and never changed, so none can be torn; one that cannot be read vouches for nothing.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.storage.journal import Finished, Read
from deepspeed_affine.storage.records import Fields, canonical, parse_object, plain
from deepspeed_affine.storage.remote import Place
from deepspeed_affine.storage.remote_sink import Uploaded

__all__ = ["HEADER", "JOURNAL", "JOURNEYS_AT_ONCE", "Header", "Journalled", "RemoteJournal", "Vouched", "read_journals"]

JOURNAL = "journal"
HEADER = "job.json"
FORMAT = 1
JOURNEYS_AT_ONCE = 16
BATCH_FILES = 64
BATCH_BYTES = 256 << 20
BATCH_SECONDS = 5.0

Way = Literal["direct", "staged"]
Phase = Literal["writing", "publishing"]


@dataclass(frozen=True, slots=True)
class Header:
    """The job that an output is made by. ``jobs`` are the tokens of its runs, the last one's last.

    ``way`` is ``direct`` where files go to their final names, ``staged`` where they wait aside because an output is
    replaced; while that is ``publishing``, ``replaced`` are the old output's paths.
    """

    identity: Mapping[str, Any]
    jobs: tuple[str, ...]
    way: Way
    phase: Phase = "writing"
    replaced: tuple[str, ...] = ()

    def next_run(self) -> Header:
        return replace(self, jobs=(*self.jobs, secrets.token_hex(8)))

    def write(self, private: Place) -> None:
        said = {
            "format": FORMAT,
            "identity": plain(self.identity),
            "jobs": list(self.jobs),
            "way": self.way,
            "phase": self.phase,
            "replaced": list(self.replaced),
        }
        private.below(HEADER).put(canonical(said), private.below(f"{HEADER}.part"))

    @classmethod
    def read(cls, private: Place) -> Header | None:
        """The header there, None without one; CheckpointFormatError for one that cannot be understood."""
        place = private.below(HEADER)
        try:
            data = place.read_all()
        except FileNotFoundError:
            return None
        try:
            found = parse_object(data)
            fields = Fields(found)
            if fields.count("format") != FORMAT:
                raise ValueError(f"format {fields.count('format')}, expected {FORMAT}")
            way, phase = fields.text("way"), fields.text("phase")
            if way not in ("direct", "staged") or phase not in ("writing", "publishing"):
                raise ValueError(f"{way!r} and {phase!r}, which no version has written")
            identity = fields.objects("identity")
            return cls(identity, _texts(found, "jobs"), way, phase, _texts(found, "replaced"))  # type: ignore[arg-type]
        except ValueError as error:
            raise CheckpointFormatError(
                f"{place.url}: says nothing this version understands of an unfinished output ({error}). Finish it with "
                f"the version that began it, or remove everything below {private.url}.",
                file=place.url,
            ) from error


def _texts(found: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = found.get(name)
    if not isinstance(value, list) or not all(type(item) is str for item in value):
        raise ValueError(f"{name!r} is no list of texts")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class Vouched:
    """A finished file, and the tag its object had then; empty where the store gives none."""

    entry: Finished
    tag: str


@dataclass(frozen=True, slots=True)
class Journalled:
    """What journals say: the finished files, and every path that was ever to be written. ``damaged`` counts objects
    that could not be understood."""

    finished: Mapping[str, Vouched] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()
    damaged: int = 0


class RemoteJournal:
    """The journal of one process; threads may share it. ``uploaded`` tells the tags of what is recorded."""

    def __init__(self, private: Place, job: str, index: int, uploaded: Mapping[str, Uploaded]) -> None:
        self._folder = private.below(JOURNAL)
        self._name = f"{job}-{index}"
        self._job = job
        self._uploaded = uploaded
        self._pending: list[Vouched] = []
        self._nbytes = 0
        self._count = 0
        self._begun: set[str] = set()
        self._last = time.monotonic()
        self._lock = threading.Lock()
        self._closed = False

    def expect(self, paths: Iterable[str]) -> None:
        """After this a later run knows that objects of these names are ours, finished or not."""
        with self._lock:
            new = sorted(set(paths) - self._begun)
            self._begun.update(new)
        if new:
            self._put(begun=new)

    def record(self, entry: Finished) -> None:
        """After this or a few more a later run finds ``entry``: objects are written for several files at a time."""
        uploaded = self._uploaded.get(entry.path)
        if uploaded is not None and (uploaded.nbytes, uploaded.crc32) != (entry.nbytes, entry.crc32):
            raise CheckpointFormatError(
                f"{self._folder.url}: {entry.path} was uploaded with {uploaded.nbytes} bytes and checksum "
                f"{uploaded.crc32:08x}, and is recorded with {entry.nbytes} and {entry.crc32:08x}.",
                file=entry.path,
            )
        with self._lock:
            if self._closed:
                raise PolicyError(f"{self._folder.url}: the journal is closed; files are recorded before.")
            self._pending.append(Vouched(entry, uploaded.tag if uploaded is not None else ""))
            self._nbytes += entry.nbytes
            due = (
                len(self._pending) >= BATCH_FILES
                or self._nbytes >= BATCH_BYTES
                or time.monotonic() - self._last >= BATCH_SECONDS
            )
        if due:
            self.flush()

    def flush(self) -> None:
        """After this a later run finds everything that was recorded."""
        self._flush(last=False)

    def _flush(self, *, last: bool) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
            self._nbytes, self._last = 0, time.monotonic()
        if not pending and not last:
            return
        try:
            self._put(files=pending, last=last)
        except BaseException:
            with self._lock:
                self._pending = pending + self._pending
            raise

    def close(self) -> None:
        """After this everything recorded is found, and that this process has ended its share."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._flush(last=True)

    def _put(self, *, begun: Iterable[str] = (), files: Iterable[Vouched] = (), last: bool = False) -> None:
        with self._lock:
            number = self._count
            self._count += 1
        said = {
            "format": FORMAT,
            "job": self._job,
            "begun": list(begun),
            "files": [_spelled(item) for item in files],
            "last": last,
        }
        place = self._folder.below(f"{self._name}-{number}.json")
        place.put(canonical(said), self._folder.below(f"{place.name}.part"))


def _spelled(item: Vouched) -> dict[str, Any]:
    entry = item.entry
    reads = [[read.file, read.key, read.start, read.stop, read.crc32] for read in entry.reads]
    return {"path": entry.path, "bytes": entry.nbytes, "crc32": entry.crc32, "reads": reads, "tag": item.tag}


def read_journals(private: Place, jobs: Iterable[str], writers: int | None = None) -> Journalled:
    """What the journals of these runs say.

    With ``writers`` each of that many writers of the last run, but for the first, has to have closed its journal;
    CheckpointFormatError names one that has not.
    """
    known = tuple(jobs)
    folder = private.below(JOURNAL)
    try:
        names = [entry.name for entry in folder.entries() if entry.name.endswith(".json")]
    except FileNotFoundError:
        names = []
    # In the order they were written in, run by run: of a file that was written twice the last counts.
    ours = sorted(
        (name for name in names if name.partition("-")[0] in known),
        key=lambda name: (known.index(name.partition("-")[0]), _number(name)),
    )
    with ThreadPoolExecutor(JOURNEYS_AT_ONCE) as pool:
        contents = list(pool.map(lambda name: _read(folder.below(name)), ours))
    finished: dict[str, Vouched] = {}
    begun: set[str] = set()
    ended: set[str] = set()
    for name, content in zip(ours, contents, strict=True):
        if content is not None:
            begun.update(content.begun)
            finished.update(content.finished)
            if content.last:
                ended.add(name.rpartition("-")[0])
    for index in range(1, writers or 0):
        if f"{known[-1]}-{index}" not in ended:
            raise CheckpointFormatError(
                f"{folder.url}: does not say that writer {index} has ended; expected the whole journal of each of this "
                f"job's {writers} processes. It has failed, or writes elsewhere: start all with the same "
                "--output_folder.",
                file=folder.url,
            )
    return Journalled(finished, frozenset(begun | set(finished)), sum(content is None for content in contents))


def _number(name: str) -> int:
    digits = name.removesuffix(".json").rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


@dataclass(frozen=True, slots=True)
class _Content:
    begun: tuple[str, ...]
    finished: Mapping[str, Vouched]
    last: bool


def _read(place: Place) -> _Content | None:
    data = place.read_all()
    try:
        found = parse_object(data)
        Fields(found).only(("format", "job", "begun", "files", "last"))
        if Fields(found).count("format") != FORMAT or not isinstance(found["files"], list):
            return None
        entries = [_vouched(value) for value in found["files"]]
        return _Content(_texts(found, "begun"), {item.entry.path: item for item in entries}, found["last"] is True)
    except (ValueError, KeyError):
        return None


def _vouched(value: Any) -> Vouched:
    fields = Fields(value)
    fields.only(("path", "bytes", "crc32", "reads", "tag"))
    reads = value.get("reads")
    if not isinstance(reads, list) or not all(isinstance(read, list) and len(read) == 5 for read in reads):
        raise ValueError("'reads' is no list of reads")
    entry = Finished(
        fields.text("path"), fields.count("bytes"), fields.count("crc32"), tuple(Read(*read) for read in reads)
    )
    return Vouched(entry, fields.text("tag"))
