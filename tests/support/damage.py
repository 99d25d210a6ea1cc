"""What can become of one file: cut, emptied, replaced, or with bytes flipped where they matter. By name, for tables."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

Damage = Callable[[Path], None]


def _rewritten(change: Callable[[bytes], bytes]) -> Damage:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def _instead(make: Callable[[Path], object]) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _content(content: bytes) -> Damage:
    return _rewritten(lambda data: content)


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]


def _record(data: bytes, suffix: str) -> tuple[int, int, int]:
    """Where the record is: its local header, its first byte, and one past its last."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(suffix))
    name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
    start = info.header_offset + 30 + name + extra
    return info.header_offset, start, start + info.file_size


def _in_record(suffix: str, where: float) -> Damage:
    def change(data: bytes) -> bytes:
        _, start, stop = _record(data, suffix)
        return _flip(data, min(stop - 1, start + int((stop - start) * where)))

    return _rewritten(change)


def _in_header(suffix: str, at: int) -> Damage:
    return _rewritten(lambda data: _flip(data, _record(data, suffix)[0] + at))


def _after(signature: bytes, at: int, last: bool = True) -> Damage:
    def change(data: bytes) -> bytes:
        found = data.rindex(signature) if last else data.index(signature)
        return _flip(data, found + at)

    return _rewritten(change)


def _socket(path: Path) -> None:
    # The address of a socket may have about a hundred characters only, whatever its folder.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("s")
        os.rename("s", path.name)
    finally:
        os.chdir(here)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "data.pkl").write_bytes(b"x")


def _gzipped(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def _legacy(path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)


def _zip_of_something_else(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "nothing")


def _compressed(path: Path) -> None:
    with (
        zipfile.ZipFile(io.BytesIO(path.read_bytes())) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for info in source.infolist():
            made.writestr(info.filename, source.read(info))


CUT: dict[str, Damage] = {
    "emptied": _content(b""),
    "one byte left": _rewritten(lambda data: data[:1]),
    "four bytes left": _rewritten(lambda data: data[:4]),
    "one header left": _rewritten(lambda data: data[:30]),
    "cut in the pickle": _rewritten(lambda data: data[: _record(data, "/data.pkl")[1] + 10]),
    "cut in the middle": _rewritten(lambda data: data[: len(data) // 2]),
    "cut in the directory": _rewritten(lambda data: data[: data.index(b"PK\x01\x02") + 20]),
    "cut before its end": _rewritten(lambda data: data[: data.rindex(b"PK\x05\x06")]),
    "last byte lost": _rewritten(lambda data: data[:-1]),
    "first byte lost": _rewritten(lambda data: data[1:]),
    "a block lost": _rewritten(lambda data: data[:200] + data[264:]),
    "a block twice": _rewritten(lambda data: data[:264] + data[200:]),
    "end doubled": _rewritten(lambda data: data + data[-100:]),
}
REPLACED: dict[str, Damage] = {
    "text": _content(b"this is not a checkpoint\n" * 40),
    "zeros": _rewritten(lambda data: bytes(len(data))),
    "an error page": _content(b"<!DOCTYPE html><html><title>404</title></html>"),
    "a pointer of git-lfs": _content(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"),
    "json": _content(b'{"a": 1}'),
    "a bare pickle": _content(pickle.dumps({"a": 1}, protocol=2)),
    "a file of torch before 1.6": _instead(_legacy),
    "itself gzipped": _gzipped,
    "itself compressed": _compressed,
    "an archive of something else": _instead(_zip_of_something_else),
    "the head of an archive": _content(b"PK\x03\x04" + bytes(200)),
    "an empty archive": _content(b"PK\x05\x06" + bytes(18)),
    "a folder": _instead(_folder),
    "a link to nothing": _instead(lambda path: path.symlink_to("nowhere.pt")),
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a link to a folder": _instead(lambda path: path.symlink_to(".")),
    "a named pipe": _instead(lambda path: os.mkfifo(path)),
    "a socket": _instead(_socket),
    "a file of None": _instead(lambda path: torch.save(None, path)),
    "a file of a list": _instead(lambda path: torch.save([1, 2], path)),
    "a file of a tensor": _instead(lambda path: torch.save(torch.zeros(3), path)),
    "a file of text": _instead(lambda path: torch.save("text", path)),
    "a file of a number": _instead(lambda path: torch.save(7, path)),
    "a file of an empty list": _instead(lambda path: torch.save([], path)),
}
FLIPPED: dict[str, Damage] = {
    "first byte": _rewritten(lambda data: _flip(data, 0)),
    "first byte of the pickle": _in_record("/data.pkl", 0),
    "middle of the pickle": _in_record("/data.pkl", 0.5),
    "last byte of the pickle": _in_record("/data.pkl", 1),
    "byte order": _in_record("/byteorder", 0),
    "version": _in_record("/version", 0),
    "signature of the pickle's header": _in_header("/data.pkl", 2),
    "name in the pickle's header": _in_header("/data.pkl", 33),
    "name length in the pickle's header": _in_header("/data.pkl", 26),
    "first signature of the directory": _after(b"PK\x01\x02", 0, last=False),
    "last signature of the directory": _after(b"PK\x01\x02", 0),
    "method in the directory": _after(b"PK\x01\x02", 10, last=False),
    "checksum in the directory": _after(b"PK\x01\x02", 16, last=False),
    "size in the directory": _after(b"PK\x01\x02", 24, last=False),
    "offset in the directory": _after(b"PK\x01\x02", 42),
    "name in the directory": _after(b"PK\x01\x02", 50, last=False),
    "record count at the end": _after(b"PK\x05\x06", 10),
    "directory size at the end": _after(b"PK\x05\x06", 12),
    "directory offset at the end": _after(b"PK\x05\x06", 16),
    "signature of the end": _after(b"PK\x05\x06", 0),
    "64-bit end": _after(b"PK\x06\x06", 40),
}


def storages(path: Path) -> list[str]:
    """The names of the records of ``path`` that hold tensor bytes, without the archive's own folder."""
    with zipfile.ZipFile(path) as archive:
        names = [info.filename for info in archive.infolist() if info.file_size]
    return [name[name.index("/data/") :] for name in names if "/data/" in name]


STORED: dict[str, Callable[[str], Damage]] = {
    "first byte": lambda name: _in_record(name, 0),
    "middle": lambda name: _in_record(name, 0.5),
    "last byte": lambda name: _in_record(name, 1),
}
