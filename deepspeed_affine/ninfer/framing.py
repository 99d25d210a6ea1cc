"""The two 32-byte headers, and where a file's payload begins."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.errors import FramingError, SchemaError
from deepspeed_affine.ninfer.integers import align_up, positive

__all__ = ["ENTRY_MAGIC", "HEADER_BYTES", "PAGE", "PART_MAGIC", "PART_START", "Header", "entry_start"]

HEADER_BYTES = 32
PAGE = 4096
"""Payloads begin at a multiple of this many bytes."""
PART_START = PAGE
ENTRY_MAGIC = b"NINFER\0\3"
PART_MAGIC = b"NINPRT\0\3"
ID_BYTES = 16
_HEADER = struct.Struct("<8sQ16s")


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header: the entry's, with ``number`` the bytes of its JSON, or a continuation's, with its index."""

    magic: bytes
    number: int
    artifact_id: bytes

    def __post_init__(self) -> None:
        if self.magic not in (ENTRY_MAGIC, PART_MAGIC):
            raise FramingError(f"A header's magic is {self.magic!r}; expected {ENTRY_MAGIC!r} or {PART_MAGIC!r}.")
        positive(self.number, "A header's number", FramingError)
        if not isinstance(self.artifact_id, bytes) or len(self.artifact_id) != ID_BYTES:
            raise SchemaError(f"An artifact id is {shown(self.artifact_id)}; expected {ID_BYTES} bytes.")

    def to_bytes(self) -> bytes:
        return _HEADER.pack(self.magic, self.number, self.artifact_id)

    @staticmethod
    def fields(data: bytes) -> tuple[bytes, int, bytes]:
        """``(magic, number, artifact id)`` of 32 bytes, whatever they are."""
        magic, number, artifact_id = _HEADER.unpack(data)
        return magic, number, artifact_id


def entry_start(json_bytes: int) -> int:
    """Where the entry's payload begins, in bytes from the start of the file."""
    return align_up(HEADER_BYTES + json_bytes, PAGE)
