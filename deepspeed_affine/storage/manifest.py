"""``affine_manifest.json``: what an output was made of and by, and a checksum of each of its files.

Plain JSON, the same bytes for the same content wherever and whenever it is written. It names no path outside the
output, no time and no machine.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.files import join, open_metadata
from deepspeed_affine.storage.records import Fields, canonical, parse_object, path_fault, plain

__all__ = ["MANIFEST_FORMAT", "MANIFEST_NAME", "Manifest", "ManifestFile", "ManifestParameter", "identity_differences"]

MANIFEST_NAME = "affine_manifest.json"
MANIFEST_FORMAT = 1
_CRC_END = 1 << 32
_UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file of the output: its size, the CRC-32 of all its bytes and the parameter and state it holds, if any."""

    nbytes: int
    crc32: int
    param: str | None = None
    state: str | None = None

    def __post_init__(self) -> None:
        if type(self.nbytes) is not int or self.nbytes < 0:
            raise ValueError(f"a size of {self.nbytes!r} bytes")
        if type(self.crc32) is not int or not 0 <= self.crc32 < _CRC_END:
            raise ValueError(f"a checksum of {self.crc32!r}")
        if (self.param is None) != (self.state is None):
            raise ValueError("a parameter without a state, or a state without a parameter")

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"bytes": self.nbytes, "crc32": f"{self.crc32:08x}"}
        if self.param is not None:
            said.update(param=self.param, state=self.state)
        return said


@dataclass(frozen=True, slots=True)
class ManifestParameter:
    """One parameter: the layout id of the map its shards were put together by, and its full shape."""

    layout: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.layout) is not str or not self.layout:
            raise ValueError(f"a layout id of {self.layout!r}")
        if not all(type(extent) is int and extent >= 0 for extent in self.shape):
            raise ValueError(f"a shape of {self.shape!r}")

    def to_json(self) -> dict[str, Any]:
        return {"layout": self.layout, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class Manifest:
    """An output, described. Raises CheckpointFormatError where the description contradicts itself.

    ``files`` has every file but the manifest, by its path with "/" between folders. ``parameters`` has every
    parameter that ``files`` names. ``source_checked`` says that what was read was compared with the checksums the
    source's files record.
    """

    identity: Mapping[str, Any]
    files: Mapping[str, ManifestFile]
    parameters: Mapping[str, ManifestParameter]
    source_checked: bool = True

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "identity", MappingProxyType(plain(self.identity)))
            _check_paths(self.files)
            for path, file in self.files.items():
                if file.param is not None and file.param not in self.parameters:
                    raise ValueError(f"{path}: holds parameter {file.param!r}, which is not among the parameters")
        except ValueError as error:
            raise CheckpointFormatError(f"{MANIFEST_NAME}: contradicts itself: {error}.", file=MANIFEST_NAME) from error
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))
        object.__setattr__(self, "parameters", MappingProxyType(dict(self.parameters)))

    @property
    def nbytes(self) -> int:
        """Bytes of all files together, without the manifest."""
        return sum(file.nbytes for file in self.files.values())

    def to_bytes(self) -> bytes:
        """The file; a function of the content alone. It carries the checksum of what it says."""
        said = {
            "format_version": MANIFEST_FORMAT,
            "identity": plain(self.identity),
            "files": {path: file.to_json() for path, file in self.files.items()},
            "parameters": {name: param.to_json() for name, param in self.parameters.items()},
            "source_checked": self.source_checked,
        }
        said["crc32"] = f"{_sum(said):08x}"
        return (json.dumps(said, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes, path: str = MANIFEST_NAME) -> Manifest:
        """The manifest that ``data`` spells; CheckpointFormatError names ``path`` and what is wrong in it."""
        try:
            found = parse_object(data)
            fields = Fields(found)
            version = fields.count("format_version")
            if version > MANIFEST_FORMAT:
                raise _newer(version, path)
            if version != MANIFEST_FORMAT:
                raise ValueError(f"'format_version' is {version}, expected {MANIFEST_FORMAT}")
            fields.only(("format_version", "identity", "files", "parameters", "source_checked", "crc32"))
            files = {name: _file(value, name) for name, value in fields.objects("files").items()}
            parameters = {name: _parameter(value, name) for name, value in fields.objects("parameters").items()}
            made = cls(fields.objects("identity"), files, parameters, fields.flag("source_checked"))
            recorded, actual = fields.crc("crc32"), _sum({k: v for k, v in found.items() if k != "crc32"})
            if recorded != actual:
                raise ValueError(f"content whose checksum is {actual:08x}, and records {recorded:08x}")
            return made
        except CheckpointFormatError as error:
            if error.file == path:
                raise
            raise CheckpointFormatError(f"{path}: {error.message.partition(': ')[2]} {_REMEDY}", file=path) from error
        except ValueError as error:
            raise CheckpointFormatError(f"{path}: has {error}. {_REMEDY}", file=path) from error

    @classmethod
    def read(cls, folder: str) -> Manifest:
        """The manifest of the output at ``folder``; CheckpointFormatError where there is none that can be read."""
        path = join(folder, MANIFEST_NAME)
        try:
            data = _read_all(path)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise CheckpointFormatError(
                f"{path}: cannot be read ({reason}); expected the manifest of an output of ds_to_universal --affine. "
                "Pass such a folder; those of other converters have none.",
                file=path,
            ) from error
        return cls.from_bytes(data, path)

    def missing(self, folder: str) -> Iterator[str]:
        """What a look at names and sizes shows: a line for each file that is not there or has another size."""
        for path, file in self.files.items():
            try:
                found = os.stat(os.path.join(folder, *path.split("/"))).st_size
            except OSError as error:
                yield f"file {path} cannot be found ({error.strerror})"
                continue
            if found != file.nbytes:
                yield f"file {path} has {found} bytes and had {file.nbytes} when it was written"


_REMEDY = "The file is damaged, or something else wrote it: convert again."


def _sum(said: Mapping[str, Any]) -> int:
    """The checksum of a manifest, without which a changed digit in it would be another manifest."""
    return zlib.crc32(canonical(said))


def _newer(version: int, path: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{path}: is a manifest of format {version}, this version of deepspeed_affine reads format {MANIFEST_FORMAT}; "
        "a newer version wrote it. Install that version to read it.",
        file=path,
    )


def _read_all(path: str) -> bytes:
    file = open_metadata(path)
    try:
        parts, at = [], 0
        while part := file.pread(file.size - at, at) if at < file.size else b"":
            parts.append(part)
            at += len(part)
        return b"".join(parts)
    finally:
        file.close()


def _file(value: object, path: str) -> ManifestFile:
    fields = Fields(value, f"'files', {path!r}")
    fields.only(("bytes", "crc32", "param", "state"))
    try:
        return ManifestFile(
            fields.count("bytes"), fields.crc("crc32"), fields.optional_text("param"), fields.optional_text("state")
        )
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("'files'") else f"'files', {path!r}: {error}") from None


def _parameter(value: object, name: str) -> ManifestParameter:
    fields = Fields(value, f"'parameters', {name!r}")
    fields.only(("layout", "shape"))
    layout = fields.text("layout")
    if not layout:
        raise ValueError(f"'parameters', {name!r}: 'layout' is empty, expected a layout id")
    return ManifestParameter(layout, fields.counts("shape"))


def _check_paths(files: Mapping[str, ManifestFile]) -> None:
    folders: dict[str, str] = {}
    for path in files:
        fault = path_fault(path)
        if fault:
            raise ValueError(f"the path {path!r} {fault}")
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders[folder] = path
            folder = folder.rpartition("/")[0]
    if MANIFEST_NAME in files:
        raise ValueError(f"it lists {MANIFEST_NAME}, which is itself")
    for path in files:
        if path in folders:
            raise ValueError(f"{path} is a file and the folder of {folders[path]}")


def identity_differences(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """What distinguishes two identities, a line each: the source's files, the options, the versions.

    Empty exactly for equal identities.
    """
    lines = _source_differences(recorded.get("source", _UNKNOWN), asked.get("source", _UNKNOWN))
    for part, word in (("options", "option "), ("software", "")):
        old, new = recorded.get(part, _UNKNOWN), asked.get(part, _UNKNOWN)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += _member_differences(old, new, word)
        elif not _same(old, new):
            lines.append(f"{part} was {_short(old)} and is {_short(new)}")
    rest = sorted({*recorded, *asked} - {"source", "options", "software"})
    lines += _member_differences(
        {k: v for k, v in recorded.items() if k in rest}, {k: asked[k] for k in rest if k in asked}, ""
    )
    return lines


def _member_differences(old: Mapping[str, Any], new: Mapping[str, Any], word: str) -> list[str]:
    return [
        f"{word}{key} was {_short(old.get(key, _UNKNOWN))} and is {_short(new.get(key, _UNKNOWN))}"
        for key in sorted({*old, *new})
        if not _same(old.get(key, _UNKNOWN), new.get(key, _UNKNOWN))
    ]


def _source_differences(old: object, new: object) -> list[str]:
    if _same(old, new):
        return []
    before, after = _by_name(old), _by_name(new)
    if before is None or after is None:
        return [f"source was {_short(old)} and is {_short(new)}"]
    lines = []
    for name in sorted({*before, *after}):
        was, now = before.get(name), after.get(name)
        if _same(was, now):
            continue
        if was is None:
            lines.append(f"source file {name} is new")
        elif now is None:
            lines.append(f"source file {name} is gone")
        elif not _same(was.get("bytes"), now.get("bytes")):
            lines.append(f"source file {name} had {_short(was.get('bytes'))} bytes and has {_short(now.get('bytes'))}")
        else:
            lines.append(f"source file {name} has the same size and other content")
    return lines or ["source lists the same files in another order"]


def _by_name(source: object) -> dict[str, Mapping[str, Any]] | None:
    if not isinstance(source, (list, tuple)):
        return None
    if not all(isinstance(entry, Mapping) and type(entry.get("name")) is str for entry in source):
        return None
    return {entry["name"]: entry for entry in source}


def _same(old: object, new: object) -> bool:
    if old is _UNKNOWN or new is _UNKNOWN:
        return old is new
    return canonical(old) == canonical(new)


def _short(value: object) -> str:
    if value is _UNKNOWN:
        return "not there"
    text = repr(plain(value))
    return text if len(text) <= 60 else f"{text[:60]}..."
