"""Reading files elsewhere: metadata in few journeys, and byte ranges through a small cache."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future

from deepspeed_affine.storage.remote import Entry, Place, place_of
from deepspeed_affine.storage.urls import name_of, parent_of

__all__ = ["BLOCKS_KEPT", "BLOCK_BYTES", "CHUNK_BYTES", "Catalogue", "RemoteFile", "RemoteReader", "catalogue"]

HEAD_BYTES = 64 << 10
TAIL_BYTES = 128 << 10
"""Read at once when a file is opened: torch puts the pickle at its front and the directory at its end."""
NEAR_BYTES = 64 << 10
"""Ranges no further apart are read as one: a journey takes as long as this much data."""
MOST_FETCHED = 64 << 20
MOST_KEPT = 128 << 20
"""Bytes of metadata a catalogue keeps; the files opened longest ago are read again."""

CHUNK_BYTES = 8 << 20
BLOCK_BYTES = 4 << 20
BLOCKS_KEPT = 8

_catalogues: weakref.WeakValueDictionary[str, Catalogue] = weakref.WeakValueDictionary()


class _Segments:
    """Parts of one file that have been read."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: list[bytes] = []
        self._lock = threading.Lock()
        self.nbytes = 0
        self.complete_ends = False

    def add(self, start: int, data: bytes) -> None:
        with self._lock:
            at = bisect.bisect_left(self._starts, start)
            self._starts.insert(at, start)
            self._parts.insert(at, data)
            self.nbytes += len(data)

    def find(self, start: int, stop: int) -> bytes | None:
        """Bytes [start, stop), where one part has them all."""
        with self._lock:
            at = bisect.bisect_right(self._starts, start)
            while at:
                at -= 1
                first, data = self._starts[at], self._parts[at]
                if first + len(data) >= stop:
                    return data[start - first : stop - first]
                if first + len(data) > start:
                    return None
            return None


class Catalogue:
    """A folder's objects as they were listed, and what has been read of their metadata.

    As long as it is referred to, files of the folder are opened without asking for their sizes again, and what was
    read once of one is not read again.
    """

    def __init__(self, url: str, entries: Iterable[Entry]) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._segments: OrderedDict[str, _Segments] = OrderedDict()
        self._lock = threading.Lock()
        _catalogues[url] = self

    def __reduce__(self) -> tuple[object, ...]:
        # Another process reads for itself.
        return Catalogue, ("", ())

    def entry(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def segments(self, name: str) -> _Segments:
        with self._lock:
            found = self._segments.setdefault(name, _Segments())
            self._segments.move_to_end(name)
            kept = sum(part.nbytes for part in self._segments.values())
            while kept > MOST_KEPT and len(self._segments) > 1:
                kept -= self._segments.popitem(last=False)[1].nbytes
            return found


def _known(url: str) -> tuple[Entry, _Segments] | None:
    catalogue = _catalogues.get(parent_of(url))
    entry = catalogue.entry(name_of(url)) if catalogue is not None else None
    if catalogue is None or entry is None:
        return None
    return entry, catalogue.segments(entry.name)


class RemoteFile:
    """An object open for small reads (see ``files.MetadataFile``): its ends are fetched at once, and ranges that are
    announced together."""

    def __init__(self, url: str) -> None:
        self._place = place_of(url)
        entry, self._segments = _known(url) or (self._place.info(), _Segments())
        self.is_regular = entry.size is not None
        self.size = entry.size or 0
        self.version = entry.weak_tag

    def pread(self, count: int, offset: int) -> bytes:
        start, stop = max(offset, 0), min(offset + count, self.size)
        if start >= stop:
            return b""
        self._fetch_ends()
        found = self._segments.find(start, stop)
        if found is None:
            reach = min(self.size, max(stop, start + NEAR_BYTES))
            data = self._place.read(start, reach)
            self._segments.add(start, data)
            found = data[: stop - start]
        return found

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._fetch_ends()
        wanted = []
        for start, stop in sorted((max(start, 0), min(stop, self.size)) for start, stop in ranges):
            if start < stop and self._segments.find(start, stop) is None:
                wanted.append((start, stop))
        self._fetch(_joined(wanted))

    def _fetch_ends(self) -> None:
        if self._segments.complete_ends or not self.size:
            return
        if self.size <= HEAD_BYTES + TAIL_BYTES:
            self._fetch([(0, self.size)])
        else:
            self._fetch([(0, HEAD_BYTES), (self.size - TAIL_BYTES, self.size)])
        self._segments.complete_ends = True

    def _fetch(self, ranges: list[tuple[int, int]]) -> None:
        room, few = MOST_FETCHED, []
        for start, stop in ranges:
            room -= stop - start
            if room < 0:
                break
            few.append((start, stop))
        for (start, _), data in zip(few, self._place.read_ranges(few), strict=True):
            self._segments.add(start, data)

    def close(self) -> None:
        """Nothing is held open; what was read goes with the last that refers to it."""


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges, those near each other made one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and start <= found[-1][1] + NEAR_BYTES:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


class RemoteReader:
    """Byte ranges of objects for any number of threads.

    Long ranges go straight into the caller's buffer, ``CHUNK_BYTES`` a journey; short ones through blocks of
    ``BLOCK_BYTES``, of which ``BLOCKS_KEPT`` are kept: a parameter's bytes are often beside those read before.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """After this nothing is kept; the object may still be used."""
        with self._lock:
            self._blocks.clear()
            self._sizes.clear()

    def read_into(self, url: str, offset: int, out: memoryview) -> None:
        """``out`` (of bytes) is filled from ``offset`` on; CheckpointFormatError where the object ends before."""
        place = place_of(url)
        done = 0
        while done < len(out):
            start = offset + done
            left = len(out) - done
            if left >= BLOCK_BYTES // 2:
                part = place.read(start, start + min(left, CHUNK_BYTES))
            else:
                inside = start % BLOCK_BYTES
                part = self._block(place, start - inside)[inside : inside + left]
                if not part:
                    # Past the end: let the same words be said as for every other range.
                    part = place.read(start, start + left)
            out[done : done + len(part)] = part
            done += len(part)

    def _block(self, place: Place, start: int) -> bytes:
        key = (place.url, start)
        with self._lock:
            found = self._blocks.get(key)
            mine = found is None
            if found is None:
                found = self._blocks[key] = Future()
            self._blocks.move_to_end(key)
            while len(self._blocks) > BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        if mine:
            try:
                found.set_result(place.read(start, max(start, min(start + BLOCK_BYTES, self._size(place)))))
            except BaseException as error:
                with self._lock:
                    self._blocks.pop(key, None)
                found.set_exception(error)
        return found.result()

    def _size(self, place: Place) -> int:
        with self._lock:
            size = self._sizes.get(place.url)
        if size is None:
            known = _known(place.url)
            size = (known[0] if known is not None else place.info()).size or 0
            with self._lock:
                self._sizes[place.url] = size
        return size


def catalogue(url: str) -> tuple[Catalogue, list[Entry]]:
    """The folder at ``url``, listed anew."""
    entries = place_of(url).entries()
    return Catalogue(url, entries), entries
