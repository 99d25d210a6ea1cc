"""One changed byte of a sample: refused with a class of its stage, or nothing changes but what the byte is part of."""

from __future__ import annotations

import copy
import mmap
import os
import random
import resource
import shutil
import tracemalloc
from contextlib import contextmanager

import pytest
from samples import DATA, EXPECTED, entry, small, small_payload

from deepspeed_affine import ninfer

OPENING = (
    ninfer.FramingError,
    ninfer.JsonError,
    ninfer.SchemaError,
    ninfer.DirectoryError,
    ninfer.RangeError,
    ninfer.ReferenceError_,
)
READING = (ninfer.EncodingError, ninfer.FileSetError, ninfer.ValueDomainError, ninfer.BindingError)


def everything(path):
    """What can be read: bytes or the fault of every object and parameter."""
    found = {}
    with ninfer.open(path) as artifact:
        for object_id in artifact.objects:
            found["object", object_id] = attempt(artifact.read, object_id)
            found["encoded", object_id] = attempt(artifact.read_encoded, object_id)
        for name in artifact.bindings:
            found["parameter", name] = attempt(artifact.read_parameter, name)
        found["valid"] = attempt(artifact.validate)
        return artifact.directory, found


def attempt(call, *args):
    try:
        value = call(*args)
    except READING as fault:
        return type(fault)
    return value.tobytes() if hasattr(value, "tobytes") else value


def copied(name, folder):
    names = [file["name"] for file in EXPECTED[name]["files"]]
    for each in names:
        shutil.copy(DATA / each, folder / each)
    return [folder / each for each in names]


def changed(name, folder, rounds, seed):
    """Counts of what became of ``rounds`` one-byte changes spread over header, directory, and payload."""
    paths = copied(name, folder)
    directory, good = everything(paths[0])
    start = EXPECTED[name]["payload_offset"]
    rng = random.Random(seed)
    outcomes = {"refused": 0, "read": 0}
    text_end = 32 + int.from_bytes(paths[0].read_bytes()[8:16], "little")
    for _ in range(rounds):
        number = rng.randrange(len(paths))
        size = paths[number].stat().st_size
        at = rng.choice([rng.randrange(40), rng.randrange(min(text_end, size)), rng.randrange(size)])
        with open(paths[number], "r+b") as file:
            old = os.pread(file.fileno(), 1, at)
            new = bytes([rng.choice([rng.randrange(256), old[0] ^ 1 << rng.randrange(8)])])
            os.pwrite(file.fileno(), new, at)
            try:
                found_directory, found = everything(paths[0])
            except OPENING:
                outcomes["refused"] += number == 0 and at < text_end
            else:
                outcomes["read"] += 1
                payload = start if number == 0 else 4096
                if at >= payload:
                    before = sum(file["payload_bytes"] for file in EXPECTED[name]["files"][:number])
                    unchanged_elsewhere(directory, good, found, before + at - payload)
                elif at >= (text_end if number == 0 else 32):
                    assert found == good
                elif number == 0:
                    # An entry's length is looked at when it is opened, a continuation's when it is read.
                    assert found_directory.files[0].payload_bytes == directory.files[0].payload_bytes
                    if found_directory.payload_bytes != directory.payload_bytes:
                        assert found["valid"] is ninfer.FileSetError
            finally:
                os.pwrite(file.fileno(), old, at)
    assert everything(paths[0])[1] == good
    # Only the header and the directory can keep an artifact from opening.
    assert sum(outcomes.values()) == rounds
    return outcomes


def unchanged_elsewhere(directory, good, found, place):
    hit = {r.id for r in directory.objects.values() if r.offset <= place < r.offset + r.nbytes}
    for (kind, name), value in ((key, value) for key, value in good.items() if key != "valid"):
        owners = {name} if kind != "parameter" else set(directory.bindings[name].objects)
        if not owners & hit:
            assert found[kind, name] == value, (kind, name)


@pytest.mark.parametrize("name", ["basic.ninfer", "allfmt.ninfer", "allfmt_split.ninfer"])
def test_changed_bytes(name, tmp_path):
    outcomes = changed(name, tmp_path, 400, seed=1)
    assert min(outcomes.values()) > 20


@contextmanager
def room_for(nbytes):
    """The process may grow by no more than that; an allocation for which it would have to is a MemoryError."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["basic.ninfer", "allfmt.ninfer", "allfmt_split.ninfer", "interop_single.ninfer"])
def test_changed_bytes_5000_each(name, tmp_path):
    with room_for(64 << 20):
        # Mapped and not allocated: what earlier tests have freed is the allocator's to give out again.
        with pytest.raises(OSError, match="Cannot allocate memory"):
            mmap.mmap(-1, 80 << 20)
        changed(name, tmp_path, 4000, seed=2)
    # Tracing every allocation takes four times as long.
    tracemalloc.start()
    try:
        outcomes = changed(name, tmp_path, 1000, seed=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Decoded values of two-bit codes take sixteen times the bytes of the codes; nothing is larger than that.
    total = sum(file["file_bytes"] for file in EXPECTED[name]["files"])
    print(f"{name}: {outcomes}, at most {peak} bytes allocated for files of {total}")
    assert peak < 32 * total + (4 << 20)


def test_cut_files(tmp_path):
    for name in ("basic.ninfer", "allfmt_split.ninfer"):
        paths = copied(name, tmp_path)
        for path in paths:
            data = path.read_bytes()
            for size in sorted({0, 1, 31, 32, 100, 4095, 4096, 4097, len(data) - 1}):
                path.write_bytes(data[:size])
                if path == paths[0]:
                    with pytest.raises((ninfer.FramingError, ninfer.JsonError)):
                        ninfer.open(path)
                else:
                    _, found = everything(paths[0])
                    assert found["valid"] is ninfer.FileSetError
            path.write_bytes(data)


VALUES = [
    None, True, False, 0, 1, -1, 2**63, 2**64, 1.5, "", "x", "text", "w", "\0", "\ud800", "a/b", [], {}, [0, 1], ["w"],
    {"object": "w"}, [[]], {"config": {}}, "raw_bytes_v1", "nvfp4", "row_scale_v1",
]  # fmt: skip


def places(value, path=()):
    """Every place of a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def changed_at(root, path, rng):
    """A copy with the place removed, replaced, doubled or renamed."""
    root = copy.deepcopy(root)
    owner = root
    for key in path[:-1]:
        owner = owner[key]
    key, kind = path[-1], rng.randrange(5)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, list):
        owner.insert(key, copy.deepcopy(owner[key]))
    elif kind == 1:
        owner[rng.choice(["extra", "range", "object", "parts", "config", "\ud800", ""])] = owner.pop(key)
    elif kind == 2 and type(owner[key]) is int:
        owner[key] += rng.choice([-1, 1, 256, -256, 2**62])
    else:
        owner[key] = copy.deepcopy(rng.choice(VALUES))
    return root


def replaced(path, data):
    """The file has this content; written over what it had, which a disk does sooner than making it anew."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, os.pwrite(fd, data, 0))
    finally:
        os.close(fd)


def structures(tmp_path, rounds, seed):
    rng = random.Random(seed)
    outcomes = {"refused": 0, "read": 0}
    path = tmp_path / "a.ninfer"
    for root, payload in ((small(), small_payload()), allfmt()):
        where = [path for path in places(root) if path]
        for _ in range(rounds // 2):
            made = changed_at(root, rng.choice(where), rng)
            if rng.random() < 0.3:
                left = [each for each in places(made) if each]
                made = changed_at(made, rng.choice(left), rng)
            replaced(path, entry(made, payload))
            try:
                everything(path)
            except OPENING:
                outcomes["refused"] += 1
            else:
                outcomes["read"] += 1
    return outcomes


def allfmt():
    with ninfer.open(DATA / "allfmt.ninfer") as artifact:
        return artifact.directory.to_json(), artifact.read_payload(0, artifact.payload_bytes)


def test_changed_records(tmp_path):
    outcomes = structures(tmp_path, 2000, seed=3)
    assert min(outcomes.values()) > 100


@pytest.mark.heavy
def test_changed_records_20000(tmp_path):
    structures(tmp_path, 20_000, seed=4)
