"""The zip records of a .pt file, byte for byte as torch's writer lays them out."""

from __future__ import annotations

import struct

__all__ = ["Record", "directory", "directory_size"]

_ALIGNMENT = 64
_MAX32 = 0xFFFFFFFF
_UTF8_NAME = 0x800
_SIZES_FOLLOW = 0x8
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_DESCRIPTOR = struct.Struct("<4s3L")
_DESCRIPTOR64 = struct.Struct("<4sL2Q")
_CLOSING_SIZE = 56 + 20 + 22


class Record:
    """One uncompressed record whose header is at ``header_offset``; its data is 64-byte aligned."""

    __slots__ = ("_extra", "data_offset", "end", "header_offset", "name", "size")

    def __init__(self, name: bytes, header_offset: int, size: int) -> None:
        self.name = name
        self.header_offset = header_offset
        self.size = size
        self._extra = b"" if size < _MAX32 and header_offset < _MAX32 else _zip64_extra(size, header_offset)
        start = header_offset + _LOCAL.size + len(name) + len(self._extra) + 4
        self.data_offset = -(-start // _ALIGNMENT) * _ALIGNMENT
        self.end = self.data_offset + size + (self._descriptor_layout.size if size else 0)

    @property
    def _descriptor_layout(self) -> struct.Struct:
        return _DESCRIPTOR64 if self._extra else _DESCRIPTOR

    def header(self) -> bytes:
        """What precedes the data."""
        name, extra = self.name, self._extra
        padding = self.data_offset - self.header_offset - _LOCAL.size - len(name) - len(extra) - 4
        flags = _UTF8_NAME | _SIZES_FOLLOW if self.size else _UTF8_NAME
        extra_size = len(extra) + 4 + padding
        head = _LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), extra_size)
        return b"".join((head, name, extra, b"FB", padding.to_bytes(2, "little"), b"Z" * padding))

    def descriptor(self, crc: int) -> bytes:
        """What follows the data."""
        if not self.size:
            return b""
        return self._descriptor_layout.pack(b"PK\x07\x08", crc, self.size, self.size)

    def whole(self, data: bytes, crc: int) -> bytes:
        """Header, data and what follows it, of a record small enough to be in memory."""
        return self.header() + data + self.descriptor(crc)

    def entry(self, crc: int) -> bytes:
        """The record's line in the directory."""
        name, extra = self.name, self._extra
        size, offset = min(self.size, _MAX32), min(self.header_offset, _MAX32)
        flags = _UTF8_NAME | _SIZES_FOLLOW if size else _UTF8_NAME
        fixed = (0, 0, 0, 0, flags, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, offset)
        return _CENTRAL.pack(b"PK\x01\x02", *fixed) + name + extra

    @property
    def entry_size(self) -> int:
        return _CENTRAL.size + len(self.name) + len(self._extra)


def _zip64_extra(size: int, header_offset: int) -> bytes:
    extra = b"" if size < _MAX32 else struct.pack("<2Q", size, size)
    extra += b"" if header_offset < _MAX32 else struct.pack("<Q", header_offset)
    return struct.pack("<2H", 1, len(extra)) + extra


def directory(records: list[Record], crcs: list[int], offset: int) -> bytes:
    """Return the directory that ends the file; it starts at ``offset``."""
    entries = b"".join([record.entry(crc) for record, crc in zip(records, crcs, strict=True)])
    count, size = len(records), len(entries)
    return b"".join(
        (
            entries,
            struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0x31E, 45, 0, 0, count, count, size, offset),
            struct.pack("<4sLQL", b"PK\x06\x07", 0, offset + size, 1),
            struct.pack(
                "<4s4H2LH",
                b"PK\x05\x06",
                0,
                0,
                min(count, 0xFFFF),
                min(count, 0xFFFF),
                min(size, _MAX32),
                min(offset, _MAX32),
                0,
            ),
        )
    )


def directory_size(records: list[Record]) -> int:
    """Return the bytes ``directory`` will take."""
    return _CLOSING_SIZE + sum([record.entry_size for record in records])
