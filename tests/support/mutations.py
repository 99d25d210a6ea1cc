"""Damage to the files of a checkpoint folder, as random as a disk, a copy or an attacker makes it, and reproducible."""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

Folder = Mapping[str, bytes]


@dataclass(frozen=True)
class Mutation:
    """``changes`` gives the new content of files, None where a file is gone.

    ``resealed`` says that checksums were computed anew, so that the file says something else and is not damaged:
    the result may then be another one. ``foreign`` says that a whole file of another checkpoint came in.
    """

    kind: str
    said: str
    changes: Mapping[str, bytes | None]
    resealed: bool = False
    foreign: bool = False


@dataclass(frozen=True)
class Field:
    """A number in the archive's own records."""

    label: str
    at: int
    size: int


_CENTRAL = (
    ("made by", 4, 2), ("needed", 6, 2), ("flags", 8, 2), ("method", 10, 2), ("time", 12, 2), ("date", 14, 2),
    ("crc", 16, 4), ("stored size", 20, 4), ("size", 24, 4), ("name length", 28, 2), ("extra length", 30, 2),
    ("comment length", 32, 2), ("disk", 34, 2), ("internal", 36, 2), ("external", 38, 4), ("header offset", 42, 4),
)  # fmt: skip
_LOCAL = (
    ("needed", 4, 2), ("flags", 6, 2), ("method", 8, 2), ("time", 10, 2), ("date", 12, 2), ("crc", 14, 4),
    ("stored size", 18, 4), ("size", 22, 4), ("name length", 26, 2), ("extra length", 28, 2),
)  # fmt: skip
_END = (
    ("disk", 4, 2), ("directory disk", 6, 2), ("entries here", 8, 2), ("entries", 10, 2), ("directory size", 12, 4),
    ("directory offset", 16, 4), ("comment length", 20, 2),
)  # fmt: skip
_END64 = (("length", 4, 8), ("entries here", 24, 8), ("entries", 32, 8), ("size", 40, 8), ("offset", 48, 8))


def zip_fields(data: bytes) -> list[Field]:
    """Every number of the zip format in ``data``: local headers, descriptors, directory, and its end."""
    found: list[Field] = []
    end = data.rfind(b"PK\x05\x06")
    found += [Field(f"end: {label}", end + at, size) for label, at, size in _END]
    end64 = data.rfind(b"PK\x06\x06")
    if end64 >= 0:
        found += [Field(f"end64: {label}", end64 + at, size) for label, at, size in _END64]
    entries, start = struct.unpack_from("<H", data, end + 10)[0], struct.unpack_from("<L", data, end + 16)[0]
    for _ in range(entries):
        found += [Field(f"directory: {label}", start + at, size) for label, at, size in _CENTRAL]
        name, extra, comment = struct.unpack_from("<3H", data, start + 28)
        found += [Field("directory: a byte of a name", start + 46 + at, 1) for at in range(name)]
        header = struct.unpack_from("<L", data, start + 42)[0]
        found += [Field(f"header: {label}", header + at, size) for label, at, size in _LOCAL]
        start += 46 + name + extra + comment
    at = data.find(b"PK\x07\x08")
    while at >= 0:
        found += [Field("descriptor: crc", at + 4, 4), Field("descriptor: size", at + 8, 4)]
        at = data.find(b"PK\x07\x08", at + 4)
    return [field for field in found if field.at + field.size <= len(data)]


def record(data: bytes, suffix: str) -> tuple[int, int]:
    """Where the record whose name ends in ``suffix`` lies: first byte and length."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = next(item for item in archive.infolist() if item.filename.endswith(suffix))
    name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
    return info.header_offset + 30 + name + extra, info.file_size


def resealed(data: bytes, suffix: str, content: bytes) -> bytes:
    """The archive ``data`` with another content of one record, all of its own records right."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as target:
        for info in archive.infolist():
            target.writestr(info.filename, content if info.filename.endswith(suffix) else archive.read(info))
    return made.getvalue()


def patched(data: bytes, at: int, new: bytes, old: int | None = None) -> bytes:
    return data[:at] + new + data[at + (len(new) if old is None else old) :]


# Damage to the bytes of one file.


def _bit(random: Random, data: bytes) -> tuple[str, bytes]:
    at, bit = random.randrange(len(data)), random.randrange(8)
    return f"bit {bit} of byte {at}", patched(data, at, bytes([data[at] ^ 1 << bit]))


def _run(random: Random, data: bytes) -> tuple[str, bytes]:
    length = min(random.choice([1, 2, 4, 8, 64, 512]), len(data))
    at = random.randrange(len(data) - length + 1)
    new = random.choice([b"\0" * length, b"\xff" * length, random.randbytes(length), b"PK\x03\x04" * length])[:length]
    return f"{length} bytes from {at}", patched(data, at, new)


def _blocks(random: Random, data: bytes) -> tuple[str, bytes]:
    length = min(random.choice([4, 16, 64, 256, 512]), len(data) // 2)
    first, second = sorted(random.randrange(len(data) - length + 1) for _ in range(2))
    if second - first < length:
        second = min(first + length, len(data) - length)
    a, b = data[first : first + length], data[second : second + length]
    return f"blocks of {length} at {first} and {second}", patched(patched(data, first, b), second, a)


def _truncate(random: Random, data: bytes) -> tuple[str, bytes]:
    keep = random.choice([0, 1, 3, 4, 30, len(data) - 1, len(data) - 22, *[random.randrange(len(data))] * 5])
    return f"cut at {keep}", data[: max(0, keep)]


def _insert(random: Random, data: bytes) -> tuple[str, bytes]:
    at = random.choice([0, len(data), random.randrange(len(data))])
    new = random.choice([random.randbytes(random.choice([1, 2, 4, 64])), b"\0" * 64, data[:64], data[-64:]])
    return f"{len(new)} bytes inserted at {at}", patched(data, at, new, 0)


def _remove(random: Random, data: bytes) -> tuple[str, bytes]:
    length = random.choice([1, 2, 4, 64])
    at = random.randrange(len(data))
    return f"{length} bytes left out at {at}", patched(data, at, b"", length)


def _zip_field(random: Random, data: bytes) -> tuple[str, bytes]:
    fields = zip_fields(data)
    field = random.choice(fields)
    top = 1 << 8 * field.size
    old = int.from_bytes(data[field.at : field.at + field.size], "little")
    alike = random.choice([other for other in fields if other.size == field.size])
    other = int.from_bytes(data[alike.at : alike.at + alike.size], "little")
    new = random.choice([0, 1, 8, top - 1, top // 2, old + 1, old - 1, old ^ 1 << random.randrange(8), other]) % top
    return f"{field.label} at {field.at} was {old}, is {new}", patched(
        data, field.at, new.to_bytes(field.size, "little")
    )


def _pickle_bytes(random: Random, data: bytes) -> tuple[str, bytes]:
    start, length = record(data, "/data.pkl")
    at = start + random.randrange(length)
    new = random.randbytes(random.choice([1, 1, 2, 4]))[: start + length - at]
    return f"pickle bytes at {at}", patched(data, at, new)


def _storage_bytes(random: Random, data: bytes) -> tuple[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [info.filename for info in archive.infolist() if "/data/" in info.filename and info.file_size]
    if not names:
        return _bit(random, data)
    start, length = record(data, random.choice(names))
    at = start + random.randrange(length)
    return f"stored byte {at}", patched(data, at, bytes([data[at] ^ random.randrange(1, 256)]))


_BYTES: dict[str, Callable[[Random, bytes], tuple[str, bytes]]] = {
    "bit": _bit,
    "byte run": _run,
    "swapped blocks": _blocks,
    "truncation": _truncate,
    "insertion": _insert,
    "removal": _remove,
    "zip field": _zip_field,
    "pickle bytes": _pickle_bytes,
    "storage bytes": _storage_bytes,
}


# A pickle that says something else, in an archive that is whole.

_INTEGERS = {"BININT1": ("K", 1), "BININT2": ("M", 2), "BININT": ("J", 4)}
_TEXTS = ("", "../evil", "/etc/evil", "fp32", "a/b", "x" * 300, "step", "\0", "exp_avg")


def _operations(content: bytes) -> list[tuple[str, object, bytes]]:
    """(opcode's name, argument, bytes) of every opcode."""
    found = list(pickletools.genops(content))
    ends = [at for _, _, at in found[1:]] + [len(content)]
    return [(op.name, arg, content[at:end]) for (op, arg, at), end in zip(found, ends, strict=True)]


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<L", len(raw)) + raw


def _integer(random: Random, value: int) -> bytes:
    new = random.choice([0, 1, -1, value + 1, value - 1, value * 2, 255, 1 << 31, (1 << 63) - 1, 1 << 70, -(1 << 40)])
    if -(1 << 31) <= new < 1 << 31:
        return b"J" + struct.pack("<i", new)
    raw = new.to_bytes(new.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _opcodes(random: Random, content: bytes, trap: str) -> tuple[str, bytes]:
    operations = _operations(content)
    pieces = [raw for _, _, raw in operations]
    # PROTO stays first and STOP last, or there is no pickle to speak of.
    at = random.randrange(1, len(pieces) - 1)
    name, arg, _ = operations[at]
    change = random.choice(["drop", "double", "swap", "opcode", "argument", "argument", "argument", "insert", "trap"])
    if change == "argument":
        choices = [n for n, (op, _, _) in enumerate(operations) if op in _INTEGERS or op in ("BINUNICODE", "BINGET")]
        at = random.choice(choices)
        name, arg, _ = operations[at]
        if name == "BINUNICODE":
            others = [value for op, value, _ in operations if op == "BINUNICODE"]
            pieces[at] = _text(random.choice([*_TEXTS, *map(str, random.sample(others, min(9, len(others))))]))
        elif name == "BINGET":
            pieces[at] = b"h" + bytes([random.randrange(256)])
        else:
            pieces[at] = _integer(random, int(str(arg)))
    elif change == "drop":
        pieces[at] = b""
    elif change == "double":
        pieces[at] *= 2
    elif change == "swap":
        other = random.randrange(1, len(pieces) - 1)
        pieces[at], pieces[other] = pieces[other], pieces[at]
    elif change == "opcode":
        pieces[at] = bytes([random.randrange(256)]) + pieces[at][1:]
    elif change == "insert":
        pieces.insert(at, random.choice([b"N", b"]", b"}", b"(", b"0", b"t", b"R", b"b", b"\x85", b"Q", b"e", b"u"]))
    else:
        # os.system(trap), left on the stack and thrown away: a hostile pickle that otherwise says the same.
        pieces.insert(at, b"cposix\nsystem\n" + _text(trap) + b"\x85R0")
    return f"{change} at opcode {at}, {name} {arg!r}"[:200], b"".join(pieces)


# Whole files in other places.


def _across(random: Random, folder: Folder, others: Sequence[Folder]) -> Mutation:
    names = sorted(folder)
    name = random.choice(names)
    change = random.choice(["swap", "copy", "copy", "gone", "foreign", "foreign", "storage"])
    if change in ("swap", "copy") and len(names) > 1:
        other = random.choice([other for other in names if other != name])
        changes: dict[str, bytes | None] = {name: folder[other]}
        if change == "swap":
            changes[other] = folder[name]
        return Mutation("across files", f"{change} of {other} and {name}", changes)
    if change == "foreign" and others:
        alien = random.choice(others)
        taken = name if name in alien and random.random() < 0.7 else random.choice(sorted(alien))
        return Mutation("across files", f"{name} is another's {taken}", {name: alien[taken]}, foreign=True)
    if change == "storage":
        with zipfile.ZipFile(io.BytesIO(folder[name])) as archive:
            suffixes = [i.filename.partition("/")[2] for i in archive.infolist() if "/data/" in i.filename]
        if len(suffixes) > 1:
            one, two = random.sample(suffixes, 2)
            (at, size), (start, length) = record(folder[name], "/" + one), record(folder[name], "/" + two)
            content = folder[name][start : start + length]
            said = f"{name}: {one} ({size} bytes) holds what {two} does"
            changes = {name: resealed(folder[name], "/" + one, content)}
            return Mutation("across files", said, changes, resealed=content != folder[name][at : at + size])
    return Mutation("across files", f"{name} is gone", {name: None})


def mutate(random: Random, folder: Folder, others: Sequence[Folder], trap: str) -> Mutation:
    """One random mutation of ``folder``; ``others`` are checkpoints whose files cannot belong to it.

    ``trap`` is a shell command that hostile pickles would run.
    """
    kind = random.choice([*_BYTES, *_BYTES, "pickle opcodes", "pickle opcodes", "across files", "across files"])
    if kind == "across files":
        return _across(random, folder, others)
    name = random.choice(sorted(folder))
    data = folder[name]
    if kind == "pickle opcodes":
        at, length = record(data, "/data.pkl")
        said, content = _opcodes(random, data[at : at + length], trap)
        return Mutation(kind, f"{name}: {said}", {name: resealed(data, "/data.pkl", content)}, resealed=True)
    said, changed = _BYTES[kind](random, data)
    if random.random() < 0.1 and changed:
        more, changed = _BYTES[random.choice(["bit", "byte run", "removal"])](random, changed)
        said = f"{said}; then {more}"
    return Mutation(kind, f"{name}: {said}", {name: changed})
