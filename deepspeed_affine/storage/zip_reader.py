"""The directory of a zip archive, checked against the file it describes. Reads no record's data."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.files import MetadataFile

__all__ = ["ZipDirectory", "ZipRecord", "read_directory"]

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX32 = 0xFFFFFFFF
_MAX16 = 0xFFFF
_LONGEST_COMMENT = 0xFFFF
_LONGEST_DESCRIPTOR = 24
_ENCRYPTED = 0x1 | 0x20 | 0x40 | 0x2000
"""Encrypted, a patch, strongly encrypted, its headers masked: what is stored is not what was saved."""
_DESCRIBED = 0x8
"""The record is followed by a descriptor: its writer did not know the checksum beforehand."""
_FOLDER = 0x10


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record of the archive, as its central directory lists it."""

    name: str
    raw_name: bytes
    header_offset: int
    size: int
    crc32: int
    method: int


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """All records of the archive at ``path``; each lies inside the file.

    ``digest`` is the SHA-256 of the directory, which holds the checksum of every record that has one.
    """

    path: str
    file_size: int
    directory_offset: int
    records: Mapping[str, ZipRecord]
    digest: str

    def prefetch(self, file: MetadataFile) -> None:
        """A hint to ``file`` that every record's headers will be read: those before its bytes and those after."""
        file.prefetch(
            (record.header_offset - _LONGEST_DESCRIPTOR, record.header_offset + _LOCAL.size + len(record.raw_name))
            for record in self.records.values()
        )

    def require_stored(self) -> None:
        """Raise CheckpointFormatError unless every record's bytes are in the file as they are."""
        for record in self.records.values():
            if record.method != 0:
                raise CheckpointFormatError(
                    f"{self.path}: record {record.name!r} is compressed (method {record.method}); expected stored "
                    "records as torch.save writes them. Save the file again: torch.save(torch.load(path), path).",
                    file=self.path,
                )

    def data_offset(self, file: MetadataFile, record: ZipRecord) -> int:
        """Return where the record's bytes begin, absolute in the file; its local header is checked on the way."""
        header = file.pread(_LOCAL.size + len(record.raw_name), record.header_offset)
        if len(header) < _LOCAL.size:
            raise _damaged(self.path, f"record {record.name!r} has no complete local header")
        fields = _LOCAL.unpack_from(header)
        if fields[0] != b"PK\x03\x04":
            raise _damaged(self.path, f"record {record.name!r} has no local header at byte {record.header_offset}")
        name_length, extra_length = fields[9], fields[10]
        raw_name = header[_LOCAL.size :]
        if raw_name != record.raw_name or name_length != len(raw_name):
            raise _damaged(self.path, f"record {record.name!r} is called {raw_name!r} in its local header")
        start: int = record.header_offset + _LOCAL.size + name_length + extra_length
        if start + record.size > self.directory_offset:
            raise _damaged(
                self.path,
                f"record {record.name!r} ends at byte {start + record.size}, past the archive's directory "
                f"at byte {self.directory_offset}",
            )
        self._check_end(file, record, start + record.size, described=bool(fields[2] & _DESCRIBED))
        return start

    def _check_end(self, file: MetadataFile, record: ZipRecord, end: int, *, described: bool) -> None:
        """Raise unless the record ends where something begins: a wrong length in its header would shift its bytes."""
        descriptor = b"PK\x07\x08" + struct.pack("<L", record.crc32)
        if not file.pread(8, end).startswith((descriptor,) if described else (b"PK\x03\x04", b"PK\x01\x02")):
            fact = f"record {record.name!r} does not end at byte {end}, where its headers say it does"
            raise _damaged(self.path, fact)

    def read(self, file: MetadataFile, record: ZipRecord) -> bytes:
        """Return the record's bytes, checked against their CRC where one was recorded. For small records."""
        start, parts, got = self.data_offset(file, record), [], 0
        while got < record.size:
            part = file.pread(record.size - got, start + got)
            if not part:
                raise _damaged(self.path, f"record {record.name!r} has {got} of its {record.size} bytes")
            parts.append(part)
            got += len(part)
        data = b"".join(parts)
        if record.crc32 and zlib.crc32(data) != record.crc32:
            raise _damaged(self.path, f"record {record.name!r} does not match its checksum")
        return data


def _damaged(path: str, fact: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{path}: {fact}; expected a complete file as torch.save writes it. The file is truncated or damaged: "
        "copy it again from where it was saved.",
        file=path,
    )


def read_directory(file: MetadataFile, path: str) -> ZipDirectory:
    """Return the archive's directory, every offset and size checked against the file's size.

    Raises CheckpointFormatError naming ``path`` for a truncated, damaged or encrypted archive.
    """
    file_size = file.size
    count, size, offset, end = _find_directory(file, path, file_size)
    if offset + size != end:
        raise _damaged(path, f"its directory should end at byte {end} and ends at byte {offset + size}")
    raw = file.pread(size, offset)
    if len(raw) != size:
        raise _damaged(path, f"its directory has {len(raw)} of {size} bytes")
    records: dict[str, ZipRecord] = {}
    position = 0
    for _ in range(count):
        record, position = _parse_entry(raw, position, path)
        if record.header_offset + _LOCAL.size + len(record.raw_name) + record.size > offset:
            raise _damaged(
                path,
                f"record {record.name!r} of {record.size} bytes at byte {record.header_offset} does not fit before "
                f"the directory at byte {offset}",
            )
        if record.name in records:
            raise _damaged(path, f"record {record.name!r} is listed twice")
        records[record.name] = record
    if position != size:
        raise _damaged(path, f"its directory lists {count} records in {position} of {size} bytes")
    return ZipDirectory(path, file_size, offset, MappingProxyType(records), hashlib.sha256(raw).hexdigest())


def _find_directory(file: MetadataFile, path: str, file_size: int) -> tuple[int, int, int, int]:
    """Return (records, directory bytes, directory offset, where the directory ends)."""
    tail_start = max(0, file_size - _END.size - _LONGEST_COMMENT)
    tail = file.pread(file_size - tail_start, tail_start)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if at + _END.size <= len(tail):
            fields = _END.unpack_from(tail, at)
            if at + _END.size + fields[7] == len(tail):
                break
        at = tail.rfind(b"PK\x05\x06", 0, at)
    if at < 0:
        raise _damaged(path, f"the end of its zip directory is missing (file size {file_size} bytes)")
    end = tail_start + at
    count, size, offset = fields[4], fields[5], fields[6]
    _check_one_volume(path, fields[1:3], fields[3:5])
    locator_at = end - _END64_LOCATOR.size
    locator = file.pread(_END64_LOCATOR.size, locator_at) if locator_at >= 0 else b""
    if locator[:4] == b"PK\x06\x07":
        _, volume, end64_at, volumes = _END64_LOCATOR.unpack(locator)
        _check_one_volume(path, (volume,), (volumes, 1))
        raw = file.pread(_END64.size, end64_at) if end64_at + _END64.size <= locator_at else b""
        if len(raw) != _END64.size or raw[:4] != b"PK\x06\x06":
            raise _damaged(path, f"its 64-bit directory end is not at byte {end64_at}")
        fields64 = _END64.unpack(raw)
        if 12 + fields64[1] != locator_at - end64_at:
            raise _damaged(path, "its 64-bit directory end states a wrong length")
        _check_one_volume(path, fields64[4:6], fields64[6:8])
        for name, short, long_ in (
            ("record count", count, fields64[7]),
            ("size", size, fields64[8]),
            ("offset", offset, fields64[9]),
        ):
            if short not in (long_, _MAX16 if name == "record count" else _MAX32):
                raise _damaged(path, f"its directory states two values for its {name}: {short} and {long_}")
        return fields64[7], fields64[8], fields64[9], end64_at
    if _MAX32 in (size, offset) or count == _MAX16:
        raise _damaged(path, "its 64-bit directory end is missing")
    return count, size, offset, end


def _check_one_volume(path: str, volumes: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """Raise unless the archive is whole in this file; torch, which reads a copied file, insists on it too."""
    if set(volumes) - {0, _MAX16} or counts[0] != counts[1]:
        raise _damaged(path, f"its directory states volumes {volumes} and counts {counts}")


def _parse_entry(raw: bytes, position: int, path: str) -> tuple[ZipRecord, int]:
    if position + _CENTRAL.size > len(raw):
        raise _damaged(path, "its directory ends inside an entry")
    fields = _CENTRAL.unpack_from(raw, position)
    if fields[0] != b"PK\x01\x02":
        raise _damaged(path, f"its directory has no entry at byte {position}")
    flags, method, crc = fields[5], fields[6], fields[9]
    compressed, size, name_length, extra_length, comment_length = fields[10:15]
    volume, attributes, header_offset = fields[15], fields[17], fields[18]
    start = position + _CENTRAL.size
    stop = start + name_length + extra_length + comment_length
    if stop > len(raw):
        raise _damaged(path, "its directory ends inside an entry")
    raw_name = raw[start : start + name_length]
    name = raw_name.decode("utf-8", errors="backslashreplace")
    extra = raw[start + name_length : start + name_length + extra_length]
    if _MAX32 in (size, compressed, header_offset):
        size, compressed, header_offset = _apply_zip64(extra, size, compressed, header_offset, name, path)
    if flags & _ENCRYPTED:
        raise CheckpointFormatError(
            f"{path}: record {name!r} is encrypted; expected plain records as torch.save writes them. Decrypt it.",
            file=path,
        )
    if volume or attributes & _FOLDER:
        # torch would not find such a record in a copied file.
        raise _damaged(path, f"record {name!r} is said to be of volume {volume}, with attributes {attributes:#x}")
    if method == 0 and compressed != size:
        raise _damaged(path, f"record {name!r} has {compressed} bytes and should have {size}")
    return ZipRecord(name, raw_name, header_offset, compressed, crc, method), stop


def _apply_zip64(
    extra: bytes, size: int, compressed: int, header_offset: int, name: str, path: str
) -> tuple[int, int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1 and at + 4 + length <= len(extra):
            values = [value for (value,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
            result = []
            for short in (size, compressed, header_offset):
                if short == _MAX32:
                    if not values:
                        raise _damaged(path, f"record {name!r} states its size in a 64-bit field it does not have")
                    result.append(values.pop(0))
                else:
                    result.append(short)
            return result[0], result[1], result[2]
        at += 4 + length
    raise _damaged(path, f"record {name!r} states its size in a 64-bit field it does not have")
