"""Uploads: whole or not there, checked before they count, and nothing left of one that was given up."""

import hashlib
import random
import zlib

import pytest
from stores import Failing, before_s3_requests

from deepspeed_affine.storage import remote_sink
from deepspeed_affine.storage.remote_sink import RemoteSink

MB = 1 << 20
PART = 5 * MB
NAMES = ("zero/a.b/fp32.pt", "zero/é [0]*?/exp avg.pt", "mp_rank_00_model_states.pt", "zero/x::y/50%+#.pt")


def sink_of(store, part_bytes=PART):
    return RemoteSink(store.place.below("out"), store.place.below(".out.partial/uploads"), part_bytes=part_bytes)


def upload(sink, path, data, step=3 * MB):
    file = sink.create(path, len(data))
    for start in range(0, len(data), step):
        # The executor's buffers are used again, so what is pending must be a copy.
        buffer = bytearray(data[start : start + step])
        file.write_at(start, memoryview(buffer))
        buffer[:] = bytes(len(buffer))
    return file


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 2 * PART + 12345])
def test_what_is_written_is_there(store, size):
    sink = sink_of(store)
    data = random.Random(size).randbytes(size)
    upload(sink, "zero/w/fp32.pt", data).finish()
    assert store.files() == {"out/zero/w/fp32.pt": data}
    done = sink.uploaded["zero/w/fp32.pt"]
    assert (done.nbytes, done.crc32) == (size, zlib.crc32(data))
    assert bool(done.tag) == (store.kind == "s3")
    assert sink.sequential


def test_names_are_names(store):
    sink = sink_of(store)
    for name in NAMES:
        upload(sink, name, name.encode()).finish()
        upload(sink, f"{name}.large", b"x" * (PART + 1)).finish()
    expected = {f"out/{name}": name.encode() for name in NAMES}
    found = store.files()
    assert {name: data for name, data in found.items() if not name.endswith(".large")} == expected
    assert all(found[f"out/{name}.large"] == b"x" * (PART + 1) for name in NAMES)


def test_nothing_is_seen_before_the_end(store):
    store.write("out/f", b"old")
    file = upload(sink_of(store), "f", b"x" * (3 * PART))
    assert store.files()["out/f"] == b"old"
    file.finish()
    assert store.files() == {"out/f": b"x" * (3 * PART)}


@pytest.mark.parametrize("written", [0, 100, PART, 2 * PART + 1])
def test_a_file_given_up_leaves_nothing(store, written):
    file = sink_of(store).create("f", 3 * PART)
    file.write_at(0, bytes(written))
    file.abandon()
    file.abandon()
    del file
    assert store.files() == {}
    if store.kind == "s3":
        assert unfinished(store) == []


def unfinished(store):
    bucket = store.place.path.split("/")[0]
    return store.system.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", [])


def test_a_finished_file_is_not_given_up(store):
    file = upload(sink_of(store), "f", b"x" * (PART + 1))
    file.finish()
    file.abandon()
    assert store.files() == {"out/f": b"x" * (PART + 1)}


@pytest.mark.parametrize(("offset", "count"), [(1, 1), (0, 11), (-1, 1)])
def test_files_are_written_front_to_back(store, offset, count):
    file = sink_of(store).create("f", 10)
    with pytest.raises(ValueError, match="front to back"):
        file.write_at(offset, bytes(count))


def test_a_short_file_is_not_finished(store):
    file = sink_of(store).create("f", 10)
    file.write_at(0, b"123")
    with pytest.raises(ValueError, match="ends at byte 3, expected 10 bytes"):
        file.finish()
    file.abandon()
    assert store.files() == {}


@pytest.mark.parametrize("step", ["create_multipart_upload", "upload_part", "complete_multipart_upload", "put_object"])
def test_a_failing_upload_is_an_error_and_leaves_nothing(s3, monkeypatch, step):
    fail_on_s3(monkeypatch, step)
    data = b"x" * (10 if step == "put_object" else 2 * PART)
    with pytest.raises(OSError, match="the store is down"):
        whole(sink_of(s3), data)
    assert s3.files() == {}
    assert unfinished(s3) == []


def whole(sink, data):
    """As the executor does it."""
    file = sink.create("f", len(data))
    try:
        for start in range(0, len(data), 3 * MB):
            file.write_at(start, data[start : start + 3 * MB])
        file.finish()
    except BaseException:
        file.abandon()
        raise


def fail_on_s3(monkeypatch, step):
    def fail(method, options):
        if method == step:
            raise OSError(5, "the store is down")

    before_s3_requests(monkeypatch, fail)


@pytest.mark.parametrize("size", [10, 2 * PART])
def test_a_failing_write_elsewhere_leaves_nothing(memory, monkeypatch, size):
    monkeypatch.setattr(memory.system, "cp_file", Failing(memory.system.cp_file, lambda call, args: True))
    monkeypatch.setattr(memory.system, "pipe_file", Failing(memory.system.pipe_file, lambda call, args: True))
    sink = sink_of(memory)
    with pytest.raises(OSError, match="the line went dead"):
        whole(sink, bytes(size))
    assert memory.files() == {}
    assert sink.uploaded == {}


def test_small_uploads_are_tried_again(store, monkeypatch):
    failing = Failing(store.system.pipe_file, lambda call, args: call <= 2)
    monkeypatch.setattr(store.system, "pipe_file", failing)
    upload(sink_of(store), "f", b"abc").finish()
    assert failing.calls == 3
    assert store.files() == {"out/f": b"abc"}


@pytest.mark.parametrize("size", [1000, 2 * PART + 7])
def test_a_store_that_keeps_other_bytes_is_caught(store, monkeypatch, size):
    """As if they had changed on the way: what comes back is not what was sent, and S3's digest says so."""
    data = random.Random(0).randbytes(size)
    change_on_the_way(store, monkeypatch)
    sink = sink_of(store)
    with pytest.raises(OSError, match="reads back otherwise than it was sent") as caught:
        whole(sink, data)
    assert caught.value.filename == f"{store.url}/out/f"
    assert store.files() == {}
    assert sink.uploaded == {}


def change_on_the_way(store, monkeypatch):
    if store.kind == "s3":

        def change(method, options):
            if method in ("put_object", "upload_part"):
                options["Body"] = b"?" + bytes(options["Body"])[1:]

        before_s3_requests(monkeypatch, change)
        return
    system = store.system
    pipe_file, open_ = system.pipe_file, system.open
    monkeypatch.setattr(system, "pipe_file", lambda path, data: pipe_file(path, b"?" + data[1:]))

    def opened(path, mode, **options):
        file = open_(path, mode, **options)
        if "w" in mode:
            write = file.write
            file.write = lambda data: write(b"?" + data[1:])
        return file

    monkeypatch.setattr(system, "open", opened)


@pytest.mark.parametrize("size", [1000, 2 * PART + 7])
def test_a_digest_that_is_none_of_md5_is_made_up_for_by_reading(s3, monkeypatch, size):
    """Encrypted objects have such tags."""
    monkeypatch.setattr(remote_sink._PartDigest, "text", lambda self: hashlib.md5(b"other").hexdigest())
    data = random.Random(0).randbytes(size)
    s3.requests.clear()
    upload(sink_of(s3), "f", data).finish()
    assert [method for method, _ in s3.requests].count("get_object") == -(-size // remote_sink.CHUNK_BYTES)
    assert s3.files() == {"out/f": data}


@pytest.mark.parametrize("size", [0, 1000, PART + 1, 3 * PART])
def test_the_digest_saves_reading(s3, size):
    s3.requests.clear()
    upload(sink_of(s3), "f", bytes(size)).finish()
    assert "get_object" not in [method for method, _ in s3.requests]


def test_large_files_have_larger_parts(store, monkeypatch):
    monkeypatch.setattr(remote_sink, "_MOST_PARTS", 2)
    data = random.Random(0).randbytes(4 * PART)
    upload(sink_of(store), "f", data).finish()
    assert store.files() == {"out/f": data}
    if store.kind == "s3":
        assert [method for method, _ in store.requests].count("upload_part") == 2
