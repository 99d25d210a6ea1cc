"""One changed byte of a sample: refused with a class of its stage, or nothing changes but what the byte is part of."""

from __future__ import annotations

import os
import random
import shutil
import tracemalloc

import pytest
from samples import DATA, EXPECTED

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
                    assert found_directory.payload_bytes == directory.payload_bytes
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


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["basic.ninfer", "allfmt.ninfer", "allfmt_split.ninfer", "interop_single.ninfer"])
def test_changed_bytes_5000_each(name, tmp_path):
    tracemalloc.start()
    try:
        changed(name, tmp_path, 5000, seed=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Decoded values of two-bit codes take sixteen times the bytes of the codes; nothing is larger than that.
    total = sum(file["file_bytes"] for file in EXPECTED[name]["files"])
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
