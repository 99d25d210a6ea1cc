"""Reading a torch .pt file from its metadata alone: names, shapes and where every byte is. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deepspeed_affine.errors import AffineError, CheckpointFormatError
from deepspeed_affine.storage.dtypes import ITEM_SIZES, LEGACY_STORAGE_DTYPES
from deepspeed_affine.storage.files import MetadataFile, absolute, is_url, open_metadata
from deepspeed_affine.storage.refs import META_LOCATION, Global, StorageRef
from deepspeed_affine.storage.unpickle import load_inert
from deepspeed_affine.storage.zip_reader import ZipDirectory, read_directory

__all__ = ["Loaded", "PtArchive", "load_pickle", "preload"]

_ZIP_START = b"PK\x03\x04"
_MAX_SMALL_RECORD = 4096
_JOURNEYS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class PtArchive:
    """What a .pt file is apart from its object: its records and every storage its pickle names.

    ``digest`` identifies the content of every record that has a checksum: all of them where ``has_crc`` says that no
    storage lacks one. ``version`` is the file's, as ``open_metadata`` gives it.
    """

    path: str
    prefix: str
    file_size: int
    storages: Mapping[str, StorageRef]
    has_crc: bool
    digest: str
    version: str

    def __reduce__(self) -> tuple[Any, ...]:
        storages = dict(self.storages)
        return _archive, (self.path, self.prefix, self.file_size, storages, self.has_crc, self.digest, self.version)


def _archive(
    path: str, prefix: str, file_size: int, storages: dict[str, StorageRef], has_crc: bool, digest: str, version: str
) -> PtArchive:
    return PtArchive(path, prefix, file_size, MappingProxyType(storages), has_crc, digest, version)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file's object graph (tensors as TensorRef, foreign objects as StandIn) and its archive."""

    root: Any
    archive: PtArchive


def load_pickle(path: str | os.PathLike[str]) -> Loaded:
    """Return the object graph of the .pt file at ``path``; no tensor byte is read and nothing in it is executed.

    Raises CheckpointFormatError naming the file when it is missing, truncated, damaged, compressed, of the other
    byte order, or in torch's format of before 1.6.
    """
    name = absolute(path)
    try:
        file = open_metadata(name)
    except AffineError:
        raise
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise CheckpointFormatError(
            f"{name}: cannot be opened ({reason}); expected a .pt file. Check the path and its permissions.",
            file=name,
        ) from exc
    try:
        return _load(file, name)
    except OSError as exc:
        raise CheckpointFormatError(
            f"{name}: cannot be read ({exc.strerror}); expected a .pt file. Check the disk it is on.", file=name
        ) from exc
    finally:
        file.close()


def preload(paths: Iterable[str]) -> None:
    """A hint that the files will be loaded: metadata of those behind URLs is fetched now, many at once.

    Worth it while a ``files.catalogue`` of their folder lives. Whatever is wrong with a file is left to its loading.
    """
    urls = [path for path in paths if is_url(path)]
    if urls:
        with ThreadPoolExecutor(min(_JOURNEYS_AT_ONCE, len(urls))) as pool:
            list(pool.map(_preload, urls))


def _preload(url: str) -> None:
    with suppress(OSError, ValueError):
        file = open_metadata(url)
        try:
            directory = read_directory(file, url)
            directory.prefetch(file)
            pickle = directory.records[f"{_prefix(directory)}/data.pkl"]
            file.prefetch([(pickle.header_offset, pickle.header_offset + pickle.size + _MAX_SMALL_RECORD)])
        finally:
            file.close()


def _load(file: MetadataFile, path: str) -> Loaded:
    if not file.is_regular:
        raise CheckpointFormatError(f"{path}: is no regular file; expected a .pt file. Check the path.", file=path)
    start = file.pread(4, 0)
    if start != _ZIP_START:
        raise _not_a_zip(path, start, file.size)
    directory = read_directory(file, path)
    prefix = _prefix(directory)
    if f"{prefix}/constants.pkl" in directory.records:
        raise CheckpointFormatError(
            f"{path}: is a TorchScript program; expected a checkpoint written by torch.save. Pass the checkpoint.",
            file=path,
        )
    directory.require_stored()
    directory.prefetch(file)
    _check_byte_order(file, directory, prefix)
    storages = _Storages(file, directory, prefix)
    data = directory.read(file, directory.records[f"{prefix}/data.pkl"])
    root = load_inert(data, storages.persistent_load, path)
    _check_others(file, directory, prefix, storages.found)
    return Loaded(
        root,
        PtArchive(
            path,
            prefix,
            directory.file_size,
            MappingProxyType(storages.found),
            storages.has_crc,
            directory.digest,
            file.version,
        ),
    )


def _not_a_zip(path: str, start: bytes, size: int) -> CheckpointFormatError:
    if size == 0:
        return CheckpointFormatError(
            f"{path}: is empty; expected a file written by torch.save. Copy it again from where it was saved.",
            file=path,
        )
    if start[:1] == b"\x80" or start[:2] in (b"\x1f\x8b", b"./"):
        return CheckpointFormatError(
            f"{path}: is in the format torch.save wrote before torch 1.6 (or with "
            "_use_new_zipfile_serialization=False); expected the zip format. Where you trust the file, save it again: "
            "torch.save(torch.load(path, weights_only=False), path).",
            file=path,
        )
    return CheckpointFormatError(
        f"{path}: starts with {start!r}; expected a zip file written by torch.save. The file is damaged, or it is "
        "not a checkpoint file.",
        file=path,
    )


def _prefix(directory: ZipDirectory) -> str:
    """Return the folder inside the archive that holds ``data.pkl``: torch names it after the file."""
    found = [name[: -len("/data.pkl")] for name in directory.records if name.endswith("/data.pkl")]
    top = [prefix for prefix in found if prefix and "/" not in prefix]
    if len(top) != 1:
        raise CheckpointFormatError(
            f"{directory.path}: has {len(top)} records named data.pkl; expected exactly one, as torch.save writes. "
            "This zip file is not a checkpoint file.",
            file=directory.path,
        )
    return top[0]


def _check_byte_order(file: MetadataFile, directory: ZipDirectory, prefix: str) -> None:
    record = directory.records.get(f"{prefix}/byteorder")
    if record is None:
        return
    order = directory.read(file, record) if record.size <= _MAX_SMALL_RECORD else b"?"
    if order != b"little":
        raise CheckpointFormatError(
            f"{directory.path}: its byte order is {order.decode('ascii', 'backslashreplace')!r}; expected 'little'. "
            "Load and save it again on a little-endian machine: torch.save(torch.load(path), path).",
            file=directory.path,
        )


def _check_others(file: MetadataFile, directory: ZipDirectory, prefix: str, storages: Mapping[str, StorageRef]) -> None:
    """Raise where a record that the pickle does not name is damaged: the file may be copied as it is, and loaded."""
    for name, record in directory.records.items():
        key = name.removeprefix(f"{prefix}/data/")
        if key == name and record.size <= _MAX_SMALL_RECORD:
            directory.read(file, record)
        elif key not in storages:
            directory.data_offset(file, record)


class _Storages:
    """Turns the persistent ids of one file into storage references, each checked against its record."""

    def __init__(self, file: MetadataFile, directory: ZipDirectory, prefix: str) -> None:
        self.file = file
        self.directory = directory
        self.prefix = prefix
        self.found: dict[str, StorageRef] = {}
        self.has_crc = True

    def persistent_load(self, pid: Any) -> StorageRef:
        path = self.directory.path
        if (
            type(pid) is not tuple
            or len(pid) < 5
            or pid[0] != "storage"
            or not isinstance(pid[1], Global)
            or type(pid[2]) is not str
            or type(pid[3]) is not str
            or type(pid[4]) is not int
        ):
            raise ValueError("a persistent id that is not torch's ('storage', class, key, location, count)")
        _, cls, key, location, numel = pid[:5]
        dtype = LEGACY_STORAGE_DTYPES.get(cls.qualname)
        if dtype is None:
            raise CheckpointFormatError(
                f"{path}: storage {key!r} is a {cls}; expected one of torch's storage classes. This version of "
                "torch is newer than this package: save with an older torch.",
                file=path,
            )
        known = self.found.get(key)
        if known is not None:
            if (known.dtype, known.numel, known.location) == (dtype, numel, location):
                return known
            if numel * ITEM_SIZES[dtype] > known.nbytes:
                raise self._wrong_size(key, dtype, numel, known.nbytes)
            # The checksum is of the whole record, so it can vouch for a reference to all of it only.
            crc = known.crc32 if numel * ITEM_SIZES[dtype] == known.nbytes else None
            return StorageRef(path, key, dtype, numel, known.byte_offset, crc, location)
        made = self._open(key, dtype, numel, location)
        self.found[key] = made
        return made

    def _open(self, key: str, dtype: str, numel: int, location: str) -> StorageRef:
        path, name = self.directory.path, f"{self.prefix}/data/{key}"
        record = self.directory.records.get(name)
        if record is None:
            if location == META_LOCATION:
                return StorageRef(path, key, dtype, 0, 0, None, location)
            raise CheckpointFormatError(
                f"{path}: storage {key!r} is named by the pickle and has no record {name!r}; expected one. The file "
                "is damaged: copy it again from where it was saved.",
                file=path,
            )
        if numel < 0 or numel * ITEM_SIZES[dtype] != record.size:
            raise self._wrong_size(key, dtype, numel, record.size)
        # With crc32 switched off torch leaves the field zero; a true checksum of zero is lost with it, harmlessly.
        crc = record.crc32 if record.crc32 or not record.size else None
        if crc is None:
            self.has_crc = False
        return StorageRef(path, key, dtype, numel, self.directory.data_offset(self.file, record), crc, location)

    def _wrong_size(self, key: str, dtype: str, numel: int, size: int) -> CheckpointFormatError:
        path = self.directory.path
        return CheckpointFormatError(
            f"{path}: storage {key!r} should hold {numel} elements of {dtype} and its record has {size} bytes; "
            "expected both to agree. The file is damaged: copy it again from where it was saved.",
            file=path,
        )
