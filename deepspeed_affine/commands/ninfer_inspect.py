"""An artifact as plain values: its records, and with digests what its bytes and values are."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from deepspeed_affine.commands.text import align, size
from deepspeed_affine.errors import AffineError
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.artifact import Artifact
from deepspeed_affine.ninfer.records import ObjectRecord, TensorObject

__all__ = ["describe", "lines"]

_BLOCK = 1 << 20


def describe(artifact: Artifact, *, digests: bool = False) -> dict[str, Any]:
    """Everything the directory says; with ``digests`` also SHA-256 of files, payload, encoded bytes and values.

    Values are hashed as little-endian float32, or int32, in C order. Where an object cannot be interpreted here its
    digest is null, with the reason.
    """
    directory = artifact.directory
    said = directory.to_json()
    paths = artifact.file_paths()
    found: dict[str, Any] = {
        "artifact_id": artifact.artifact_id,
        "payload_offset": artifact.payload_offset,
        "payload_bytes": artifact.payload_bytes,
        "files": [
            {
                "name": os.path.basename(paths[number]),
                "payload_bytes": record.payload_bytes,
                "file_bytes": artifact.file_set.file_bytes(number),
            }
            for number, record in enumerate(artifact.files)
        ],
        "components": said["components"],
        "objects": said["objects"],
        "bindings": {
            name: {"elements": directory.elements_of(binding), **binding.to_json()}
            for name, binding in artifact.bindings.items()
        },
        "uses": said["uses"],
        "metadata": dict(artifact.metadata),
        "provenance": dict(artifact.provenance),
    }
    if digests:
        for file, path in zip(found["files"], paths, strict=True):
            file["sha256"] = _file_digest(path)
        found["payload_sha256"] = _payload_digest(artifact, 0, artifact.payload_bytes)
        for entry, record in zip(found["objects"], artifact.objects.values(), strict=True):
            entry |= _object_digests(artifact, record)
        for name, entry in found["bindings"].items():
            entry |= _parameter_digest(artifact, name)
    return found


def _payload_digest(artifact: Artifact, offset: int, count: int) -> str:
    digest = hashlib.sha256()
    for at in range(offset, offset + count, _BLOCK):
        digest.update(artifact.read_payload(at, min(_BLOCK, offset + count - at)))
    return digest.hexdigest()


def _file_digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _object_digests(artifact: Artifact, record: ObjectRecord) -> dict[str, Any]:
    found: dict[str, Any] = {"encoded_sha256": _payload_digest(artifact, record.offset, record.nbytes)}
    if isinstance(record, TensorObject):
        digest = hashlib.sha256()
        try:
            for at in range(0, record.elements, _BLOCK):
                digest.update(_little(artifact.read_range(record.id, at, min(at + _BLOCK, record.elements))))
        except AffineError as fault:
            return found | {"values_sha256": None, "fault": f"{type(fault).__name__}: {fault.message}"}
        found["values_sha256"] = digest.hexdigest()
    return found


def _parameter_digest(artifact: Artifact, name: str) -> dict[str, Any]:
    digest = hashlib.sha256()
    try:
        for block in artifact.blocks(name, _BLOCK):
            digest.update(_little(block))
    except AffineError as fault:
        return {"values_sha256": None, "fault": f"{type(fault).__name__}: {fault.message}"}
    return {"values_sha256": digest.hexdigest()}


def _little(values: Any) -> Any:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def _plain(name: str) -> str:
    # A name may hold line ends, and codes a terminal obeys.
    return name if name.isprintable() else shown(name)


def lines(found: dict[str, Any]) -> list[str]:
    """The description for a person."""
    rows = [["artifact", found["artifact_id"]]]
    name = found["metadata"].get("name")
    if name:
        rows.append(["name", _plain(name)])
    rows += [["file", f"{_plain(file['name'])}  {size(file['file_bytes'])}"] for file in found["files"]]
    for component, record in found["components"].items():
        target = f" of {_plain(record['target'])}" if "target" in record else ""
        rows.append(["component", f"{_plain(component)}{target}, {len(record.get('resources', {}))} resources"])
    kinds: dict[str, list[int]] = {}
    for record in found["objects"]:
        kinds.setdefault(record.get("format") or "resources", []).append(record["bytes"])
    rows += [["objects", f"{len(sizes)} {_plain(kind)}, {size(sum(sizes))}"] for kind, sizes in sorted(kinds.items())]
    count = sum(entry["elements"] for entry in found["bindings"].values())
    rows.append(["parameters", f"{len(found['bindings'])}, {count:,} elements; {len(found['uses'])} uses"])
    if "payload_sha256" in found:
        rows.append(["payload", f"sha256 {found['payload_sha256']}"])
        rows += [["object", f"{_plain(r['id'])}  sha256 {r['encoded_sha256']}"] for r in found["objects"]]
    return align(rows, indent="")
