"""The same operations on local files and on objects elsewhere, and sinks for local ones."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import KINDS, ODD, make_store

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage import remote_read
from deepspeed_affine.storage.files import (
    ByteReader,
    FolderEntry,
    catalogue,
    file_size,
    is_file,
    is_folder,
    join,
    list_folder,
    open_metadata,
    read_small,
)
from deepspeed_affine.storage.sink import LocalSink

NAMES = ("plain.pt", "a b+c", "[1]*?", "é %41", "#&;=", "z.pt")


@pytest.fixture(params=["local", *KINDS])
def folder(request, tmp_path, monkeypatch):
    """Its path, and a function that writes a file into it."""
    if request.param == "local":
        base = tmp_path / ODD

        def write(path, data):
            target = base / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

        return str(base), write
    store = make_store(request.param, request, tmp_path, monkeypatch)
    return store.url, store.write


def test_a_folder_lists_its_own_entries_in_order(folder):
    path, write = folder
    for index, name in enumerate(NAMES):
        write(name, b"x" * index)
    write("inner/deeper/file", b"1")
    expected = [FolderEntry(name, index) for index, name in enumerate(NAMES)] + [FolderEntry("inner", None, True)]
    assert list_folder(path) == sorted(expected, key=lambda entry: entry.name)
    assert catalogue(path)[0] == list_folder(path)
    assert list_folder(join(path, "inner")) == [FolderEntry("deeper", None, True)]


def test_what_is_where(folder):
    path, write = folder
    write("inner/f", b"12345")
    inside, absent = join(path, "inner", "f"), join(path, "inner", "g")
    assert [is_file(inside), is_folder(inside)] == [True, False]
    assert [is_file(join(path, "inner")), is_folder(join(path, "inner"))] == [False, True]
    assert [is_file(absent), is_folder(absent)] == [False, False]
    assert file_size(inside) == 5
    assert read_small(inside, 3) == b"123"
    assert read_small(inside, 10) == b"12345"
    with pytest.raises(FileNotFoundError):
        file_size(absent)
    with pytest.raises(FileNotFoundError):
        list_folder(join(path, "nothing"))
    with pytest.raises(NotADirectoryError):
        list_folder(inside)
    with pytest.raises(FileNotFoundError):
        open_metadata(absent)


def test_small_reads_of_an_open_file(folder, monkeypatch):
    monkeypatch.setattr(remote_read, "HEAD_BYTES", 100)
    monkeypatch.setattr(remote_read, "TAIL_BYTES", 150)
    monkeypatch.setattr(remote_read, "NEAR_BYTES", 50)
    path, write = folder
    data = random.Random(1).randbytes(2000)
    write("f", data)
    write("empty", b"")
    with_empty = open_metadata(join(path, "empty"))
    assert (with_empty.size, with_empty.pread(10, 0)) == (0, b"")
    with_empty.close()
    file = open_metadata(join(path, "f"))
    assert file.size == 2000
    assert file.is_regular
    file.prefetch([(-5, 10), (700, 720), (760, 800), (1990, 3000), (2000, 2001), (1500, 1400)])
    rng = random.Random(2)
    spans = [(0, 2000), (1999, 1), (2000, 5), (2500, 5), (90, 20), (705, 90), (1840, 30), (0, 0)]
    for offset, count in spans + [(rng.randrange(2100), rng.randrange(300)) for _ in range(200)]:
        assert file.pread(count, offset) == data[offset : offset + count]
    file.close()


def test_a_version_changes_with_the_file(folder):
    path, write = folder
    write("f", b"one")
    before = open_metadata(join(path, "f")).version
    assert open_metadata(join(path, "f")).version == before
    # File systems tell times apart in steps of some milliseconds.
    time.sleep(0.05)
    write("f", b"two")
    assert open_metadata(join(path, "f")).version != before


def test_ranges_of_any_size_by_many_threads(folder, monkeypatch):
    monkeypatch.setattr(remote_read, "CHUNK_BYTES", 700)
    monkeypatch.setattr(remote_read, "BLOCK_BYTES", 256)
    monkeypatch.setattr(remote_read, "BLOCKS_KEPT", 3)
    path, write = folder
    contents = {name: random.Random(name).randbytes(5000 + 13 * index) for index, name in enumerate(NAMES)}
    for name, data in contents.items():
        write(name, data)
    start = threading.Barrier(4)

    def work(seed):
        rng = random.Random(seed)
        start.wait()
        for _ in range(60):
            name = rng.choice(NAMES)
            offset = rng.randrange(len(contents[name]))
            count = min(rng.choice([0, 1, 30, 255, 256, 257, 3000]), len(contents[name]) - offset)
            assert reader.read(join(path, name), offset, count) == contents[name][offset : offset + count]

    with ByteReader() as reader, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result()
        assert reader.size(join(path, NAMES[1])) == 5013


@pytest.mark.parametrize(("offset", "count"), [(900, 200), (1000, 1), (5000, 10), (0, 1001), (999, 2)])
def test_a_file_that_ends_too_early_is_named(folder, monkeypatch, offset, count):
    path, write = folder
    monkeypatch.setattr(remote_read, "BLOCK_BYTES", 128)
    write("f", b"x" * 1000)
    with ByteReader() as reader:
        assert reader.read(join(path, "f"), 0, 1000) == b"x" * 1000
        with pytest.raises(CheckpointFormatError) as caught:
            reader.read(join(path, "f"), offset, count)
    assert caught.value.file == join(path, "f")
    assert join(path, "f") in str(caught.value)


def test_a_file_that_is_gone_is_named(folder):
    path, write = folder
    write("there", b"1")
    with ByteReader() as reader:
        for action in (lambda: reader.size(join(path, "f")), lambda: reader.read(join(path, "f"), 0, 1)):
            with pytest.raises(CheckpointFormatError, match=r"No such file or directory") as caught:
                action()
            assert caught.value.file == join(path, "f")


def test_the_buffer_may_have_any_format(folder):
    path, write = folder
    write("f", bytes(range(64)))
    buffer = memoryview(bytearray(64)).cast("I", [4, 4])
    with ByteReader() as reader:
        reader.read_into(join(path, "f"), 0, buffer)
    assert buffer.tobytes() == bytes(range(64))


# Local sinks


def test_local_files_are_written_in_any_order_and_have_their_size_at_once(tmp_path):
    sink = LocalSink(str(tmp_path), durable=True)
    file = sink.create("a/b c/f", 10)
    assert (tmp_path / "a/b c/f").stat().st_size == 10
    file.write_at(6, memoryview(b"6789"))
    file.write_at(0, b"012345")
    file.finish()
    assert (tmp_path / "a/b c/f").read_bytes() == b"0123456789"
    file.abandon()
    assert (tmp_path / "a/b c/f").exists()
    assert sink.create("a/b c/g", 0).finish() is None
    assert not sink.sequential


def test_a_local_file_is_never_written_over(tmp_path):
    sink = LocalSink(str(tmp_path), durable=False)
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        sink.create("f", 3)
    assert (tmp_path / "f").read_bytes() == b"old"


@pytest.mark.parametrize(("offset", "data"), [(-1, b"a"), (5, b"abcdef"), (11, b"")])
def test_bytes_outside_a_local_file_are_refused(tmp_path, offset, data):
    file = LocalSink(str(tmp_path), durable=False).create("f", 10)
    with pytest.raises(ValueError, match="do not fit"):
        file.write_at(offset, data)
    file.abandon()
    assert os.listdir(tmp_path) == []
    file.abandon()


def test_nothing_stays_of_a_local_file_there_was_no_room_for(tmp_path, monkeypatch):
    def full(fd, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(OSError, match="No space"):
        LocalSink(str(tmp_path)).create("f", 10)
    assert os.listdir(tmp_path) == []
