"""The sample artifacts and the damaged ones, and small artifacts built by hand."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

DATA = Path(__file__).parent / "data"
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
NEGATIVE = json.loads((DATA / "negative.json").read_text(encoding="utf-8"))["cases"]
ID = bytes(range(16))


def unpacked(case: dict, folder: Path) -> Path:
    """The entry of a damaged case, with its files in ``folder``."""
    for name, text in case["files"].items():
        (folder / name).write_bytes(zlib.decompress(base64.b64decode(text)))
    return folder / "e.ninfer"


def entry(directory: object, payload: bytes, artifact_id: bytes = ID, *, text: bytes | None = None) -> bytes:
    """An entry's bytes, put together without the package."""
    text = json.dumps(directory).encode() if text is None else text
    start = -(-(32 + len(text)) // 4096) * 4096
    return (
        struct.pack("<8sQ16s", b"NINFER\0\3", len(text), artifact_id) + text + bytes(start - 32 - len(text)) + payload
    )


def part(index: int, payload: bytes, artifact_id: bytes = ID) -> bytes:
    return struct.pack("<8sQ16s", b"NINPRT\0\3", index, artifact_id) + bytes(4064) + payload


def small(**changes: object) -> dict:
    """A valid directory: a matrix, a scalar and a resource in one payload of 265 bytes."""
    return {
        "components": {"text": {"config": {}, "resources": {"t": "r"}}, "mtp": {"config": {}, "target": "text"}},
        "objects": [
            {"id": "w", "kind": "tensor", "shape": [2, 4], "format": "bf16", "layout": "contiguous_le_v1",
             "offset": 0, "bytes": 16},
            {"id": "s", "kind": "tensor", "shape": [], "format": "fp32", "layout": "contiguous_le_v1",
             "offset": 256, "bytes": 4},
            {"id": "r", "kind": "resource", "encoding": "raw_bytes_v1", "offset": 260, "bytes": 5},
        ],
        "bindings": {"p": {"object": "w"}, "q": {"parts": [{"object": "w", "range": [4, 8]}]}},
        "uses": [{"parameter": "p", "input": "i", "auxiliaries": {"d": {"object": "s"}}}],
        "files": [{"path": None, "payload_bytes": 265}],
        **changes,
    }  # fmt: skip


def small_payload() -> bytes:
    words = struct.pack("<8H", *(0x3F80 + n for n in range(8)))
    return words + bytes(240) + struct.pack("<f", 2.5) + b"hello"
