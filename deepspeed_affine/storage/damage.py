"""Where a .pt file is damaged, as far as its own records tell: which tensor, the pickle, or the zip around them.

Every record of the archive carries its checksum twice, after its bytes and in the directory. Of the three (bytes and
two checksums) the one that contradicts the others is the damaged one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from deepspeed_affine.errors import AffineError
from deepspeed_affine.storage.files import MetadataFile, open_metadata
from deepspeed_affine.storage.places import place_names
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.zip_reader import ZipDirectory, ZipRecord, read_directory
from deepspeed_affine.storage.zip_writer import Record, directory

__all__ = ["Damage", "find_damage"]

_LOCAL_BYTES = 30
_CHUNK = 1 << 20
_MOST_PLACES = 3
"""An archive that differs at more places from what torch writes was written by something else."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged part of a file, bytes ``[start, stop)``. ``part`` is ``storage``, ``pickle``, ``record`` (a small one
    of torch's), ``header``, ``directory``, ``outside`` (somewhere outside of all records), ``replaced`` (nowhere: it is
    another file), or ``unreadable``.

    ``key`` is the storage's, ``place`` where the file's object holds a tensor of it.
    """

    part: str
    text: str
    start: int
    stop: int
    key: str | None = None
    place: str | None = None

    def describe(self) -> str:
        where = f" (bytes {self.start} to {self.stop} of the file)" if self.stop > self.start else ""
        holds = f", which holds {self.place}" if self.place else ""
        return f"{self.text}{where}{holds}"


def find_damage(path: str) -> list[Damage]:
    """What is damaged in the file at ``path``, which is known to have changed since it was written; never empty."""
    try:
        file = open_metadata(path)
    except (OSError, ValueError) as error:
        return [_unreadable(path, error)]
    try:
        records = read_directory(file, path)
        found = [damage for record in _in_order(records) if (damage := _record_damage(file, records, record))]
        if not found:
            found = list(_around(file, records))
    except (OSError, AffineError) as error:
        return [_unreadable(path, error)]
    finally:
        file.close()
    return [_placed(path, damage) for damage in found]


def _unreadable(path: str, error: Exception) -> Damage:
    said = error.message.removeprefix(f"{path}: ") if isinstance(error, AffineError) else str(error)
    # What the reader of a checkpoint should do about it is not what is asked here.
    return Damage("unreadable", said.partition("; expected")[0], 0, 0)


def _in_order(records: ZipDirectory) -> list[ZipRecord]:
    return sorted(records.records.values(), key=lambda record: record.header_offset)


def _record_damage(file: MetadataFile, records: ZipDirectory, record: ZipRecord) -> Damage | None:
    part, key, text = _named(record)
    at, name = record.header_offset, record.raw_name
    header = file.pread(_LOCAL_BYTES + len(name), at)
    lengths = struct.unpack_from("<2H", header, 26) if len(header) >= _LOCAL_BYTES else (0, 0)
    start = at + _LOCAL_BYTES + sum(lengths)
    stop = start + record.size
    fits = stop <= records.directory_offset
    if header[:4] != b"PK\x03\x04" or header[_LOCAL_BYTES:] != name or lengths[0] != len(name) or not fits:
        said = f"the zip header of {text}, or the directory's entry for it"
        return Damage("header", said, at, at + _LOCAL_BYTES + len(name))
    found = _sum(file, start, stop)
    after = file.pread(8, stop)
    stated = struct.unpack("<L", after[4:])[0] if len(after) == 8 and after[:4] == b"PK\x07\x08" else None
    ends = stated == found or (stated is None and after[:4] in (b"PK\x03\x04", b"PK\x01\x02"))
    if found == record.crc32 and ends:
        return None
    usual = Record(name, at, record.size).data_offset
    if start != usual and _sum(file, usual, usual + record.size) == record.crc32:
        return Damage("header", f"the zip header of {text}", at, usual)
    if found == record.crc32:
        return Damage("header", f"the checksum after {text}", stop, stop + 8)
    if stated == found:
        return Damage("directory", f"the zip directory, in its entry of {text}", *_directory_bytes(records))
    if record.crc32 == 0 and not stated:
        # With checksums switched off there is nothing that could tell.
        return None
    return Damage(part, text, start, stop, key)


def _named(record: ZipRecord) -> tuple[str, str | None, str]:
    _, _, inside = record.name.partition("/")
    if inside.startswith("data/"):
        key = inside.removeprefix("data/")
        return "storage", key, f"storage {key!r}"
    if inside == "data.pkl":
        return "pickle", None, "the pickle (names, shapes and plain values)"
    return "record", None, f"the record {inside or record.name!r}"


def _sum(file: MetadataFile, start: int, stop: int) -> int:
    crc = 0
    while start < stop:
        data = file.pread(min(_CHUNK, stop - start), start)
        if not data:
            break
        crc = zlib.crc32(data, crc)
        start += len(data)
    return crc


def _directory_bytes(records: ZipDirectory) -> tuple[int, int]:
    return records.directory_offset, records.file_size


def _around(file: MetadataFile, records: ZipDirectory) -> Iterator[Damage]:
    """Damage outside of what is summed, found by laying the archive out anew as torch does."""
    ordered = _in_order(records)
    made = [Record(record.raw_name, record.header_offset, record.size) for record in ordered]
    unlike = []
    for record, again in zip(ordered, made, strict=True):
        header, descriptor = again.header(), again.descriptor(record.crc32)
        stop = again.data_offset + record.size
        for at, expected in ((record.header_offset, header), (stop, descriptor)):
            if file.pread(len(expected), at) != expected:
                _, _, text = _named(record)
                unlike.append(Damage("header", f"the zip header or padding of {text}", at, at + len(expected)))
    start, end = _directory_bytes(records)
    closing = directory(made, [record.crc32 for record in ordered], start)
    if file.pread(len(closing), start) != closing or start + len(closing) != end:
        unlike.append(Damage("directory", "the zip directory", start, end))
    if 0 < len(unlike) <= _MOST_PLACES:
        yield from unlike
        return
    unsure = [_named(record)[2] for record in ordered if record.size and not record.crc32]
    if unsure:
        more = f" and {len(unsure) - 1} more" if len(unsure) > 1 else ""
        yield Damage("outside", f"a record without a checksum ({unsure[0]}{more}), or the zip around them", 0, 0)
    elif unlike:
        yield Damage("outside", "the zip around the records, which are whole, or it is another file", 0, 0)
    else:
        yield Damage("replaced", "is another file: whole in itself, and not the one that was written", 0, 0)


def _placed(path: str, damage: Damage) -> Damage:
    if damage.key is None:
        return damage
    names: list[str] = []
    with suppress(AffineError):
        names = place_names(load_pickle(path).root, damage.key)
    if not names:
        return damage
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Damage(damage.part, damage.text, damage.start, damage.stop, damage.key, names[0] + more)
