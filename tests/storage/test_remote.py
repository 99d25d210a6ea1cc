"""Checkpoints behind URLs: read like local ones, in few journeys, through failures that pass and not through others."""

import gc
import re
import subprocess
import sys
import threading

import pytest
import torch
from stores import Failing
from synthetic import COLUMN, ROW, Param, World, make, random_full

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.execute.checkpoint import read_checkpoint
from deepspeed_affine.storage import remote, remote_read
from deepspeed_affine.storage.files import ByteReader, list_folder, open_metadata
from deepspeed_affine.storage.folder import scan_folder
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.remote import place_of

ATTEMPTS = len(remote.DELAYS) + 1


def checkpoint(folder, stage=1, tp=2, dp=2):
    params = [
        Param("layer.w", random_full((8, 6), 1), COLUMN),
        Param("layer.é [0]", random_full((6, 4), 2), ROW),
        Param("norm", random_full((6,), 3)),
    ]
    return make(World(stage=stage, tp=tp, dp=dp), params).save(folder)


def described(found, path):
    """Everything that was read, with the folder's own name taken out."""
    return re.sub(r"0x[0-9a-f]+", "", repr(found).replace(path, "FOLDER"))


# The same metadata


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_elsewhere_is_described_as_the_local_one(store, tmp_path, stage):
    local = checkpoint(tmp_path / "local", stage)
    url = store.copy_in(local)
    store.write("ckpt/inner folder/zero_pp_rank_9_mp_rank_00_model_states.pt", b"of another checkpoint")
    found = read_checkpoint(url)
    expected = read_checkpoint(local)
    assert found.folder.other_names == ("inner folder",)
    assert described(found, url).replace("'inner folder',", "") == described(expected, local)


def test_a_trailing_slash_and_a_chain_name_the_same_folder(memory, tmp_path):
    local = checkpoint(tmp_path / "local")
    url = memory.copy_in(local)
    expected = described(read_checkpoint(local), local)
    assert described(read_checkpoint(f"{url}/"), url) == expected
    chained = f"simplecache::{url}"
    assert described(read_checkpoint(chained), chained) == expected


def test_a_file_elsewhere_loads_as_the_local_one(store, tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": [torch.ones(3, dtype=torch.int8)] * 2}
    torch.save(tensors, tmp_path / "x.pt")
    local = load_pickle(tmp_path / "x.pt")
    url = store.write("x.pt", (tmp_path / "x.pt").read_bytes())
    found = load_pickle(url)
    assert described(found.root, url) == described(local.root, str(tmp_path / "x.pt"))
    assert found.archive.digest == local.archive.digest
    with ByteReader() as reader:
        for key, ref in found.archive.storages.items():
            theirs = local.archive.storages[key]
            assert reader.read(ref.path, ref.byte_offset, ref.nbytes) == reader.read(
                theirs.path, theirs.byte_offset, theirs.nbytes
            )


def test_a_file_written_anew_is_read_anew(store, tmp_path):
    torch.save({"v": 1}, tmp_path / "x.pt")
    url = store.write("mp_rank_00_model_states.pt", (tmp_path / "x.pt").read_bytes())
    folder = scan_folder(store.url)
    assert load_pickle(url).root == {"v": 1}
    torch.save({"v": 2}, tmp_path / "x.pt")
    store.write("mp_rank_00_model_states.pt", (tmp_path / "x.pt").read_bytes())
    del folder
    gc.collect()
    assert load_pickle(url).root == {"v": 2}
    kept = scan_folder(store.url)
    torch.save({"v": 3}, tmp_path / "x.pt")
    store.write("mp_rank_00_model_states.pt", (tmp_path / "x.pt").read_bytes())
    assert load_pickle(url).root == {"v": 2}, "as it was when the catalogue was made"
    assert kept == scan_folder(store.url)
    assert load_pickle(url).root == {"v": 3}


@pytest.mark.parametrize("length", ["empty", "half", "all but one byte", "text"])
def test_a_damaged_file_elsewhere_is_named(store, tmp_path, length):
    local = checkpoint(tmp_path / "local")
    url = store.copy_in(local)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = store.files("ckpt")[name]
    changed = {"empty": b"", "half": data[: len(data) // 2], "all but one byte": data[:-1], "text": b"hello"}[length]
    store.write(f"ckpt/{name}", changed)
    with pytest.raises(CheckpointFormatError) as caught:
        read_checkpoint(url)
    assert caught.value.file == f"{url}/{name}"
    assert f"{url}/{name}" in str(caught.value)


def test_a_folder_that_is_none(store, tmp_path):
    store.copy_in(checkpoint(tmp_path / "local"), "all/step 1")
    store.write("all/latest", b"step 1\n")
    with pytest.raises(CheckpointFormatError, match="cannot be listed"):
        scan_folder(f"{store.url}/nothing")
    with pytest.raises(CheckpointFormatError, match="is a file; expected a checkpoint folder"):
        scan_folder(f"{store.url}/all/latest")
    with pytest.raises(CheckpointFormatError) as caught:
        scan_folder(f"{store.url}/all")
    assert f"{store.url}/all/step 1" in str(caught.value)
    store.write("all/latest", b"other")
    with pytest.raises(CheckpointFormatError) as caught:
        scan_folder(f"{store.url}/all")
    assert f"Pass one of {f'{store.url}/all/step 1'!r}" in str(caught.value)


def test_markers_of_folders_are_no_files(s3, tmp_path):
    local = checkpoint(tmp_path / "local")
    url = s3.copy_in(local)
    place = place_of(url)
    for marker in (place.path, f"{place.path}/offloaded_tensors/rank_0", f"{place.path}/inner"):
        s3.system.call_s3("put_object", Bucket=marker.split("/")[0], Key=marker.partition("/")[2] + "/", Body=b"")
    found = scan_folder(url)
    assert len(found.files) == len(list(tmp_path.glob("local/*")))
    assert found.offloaded == ("rank_0",)
    assert found.other_names == ("inner", "offloaded_tensors")


# Few journeys


def test_small_files_cost_one_journey_each_however_often_they_are_opened(s3, tmp_path):
    local = checkpoint(tmp_path / "local", stage=3, tp=2, dp=4)
    url = s3.copy_in(local)
    s3.requests.clear()
    found = read_checkpoint(url)
    methods = [method for method, _ in s3.requests]
    assert methods.count("list_objects_v2") == 1
    assert methods.count("get_object") == len(found.folder.files) == 16
    assert len(methods) == 17
    for file in found.folder.files:
        load_pickle(file.path)
    assert len(s3.requests) == 17


def test_files_are_fetched_at_the_same_time(memory, tmp_path, monkeypatch):
    """Every file's first journey ends when the eighth has begun: one after the other they would never end."""
    url = memory.copy_in(checkpoint(tmp_path / "local", stage=3, tp=1, dp=4))
    together = threading.Barrier(8, timeout=30)
    original = memory.system.cat_file
    waited = set()

    def cat_file(path, **span):
        if path not in waited:
            waited.add(path)
            together.wait()
        return original(path, **span)

    monkeypatch.setattr(memory.system, "cat_file", cat_file)
    assert len(read_checkpoint(url).folder.files) == len(waited) == 8


def test_headers_far_apart_are_fetched_together(s3, tmp_path, monkeypatch):
    torch.save({str(index): torch.full((25_000,), float(index)) for index in range(40)}, tmp_path / "x.pt")
    url = s3.write("x.pt", (tmp_path / "x.pt").read_bytes())
    s3.requests.clear()
    found = load_pickle(url)
    assert len(found.archive.storages) == 40
    # Its size, its two ends, and one range a header that is in neither.
    assert 38 <= len(s3.requests) <= 43
    together = Failing(s3.system.cat_ranges, lambda call, args: False)
    alone = Failing(s3.system.cat_file, lambda call, args: False)
    monkeypatch.setattr(s3.system, "cat_ranges", together)
    monkeypatch.setattr(s3.system, "cat_file", alone)
    load_pickle(url)
    assert (together.calls, alone.calls) == (2, 0), "the ends, then all headers"


def test_short_ranges_near_each_other_are_read_once(s3):
    url = s3.write("f", bytes(range(256)) * 4096)
    s3.requests.clear()
    with ByteReader() as reader:
        for start in range(0, 1 << 20, 1 << 12):
            assert reader.read(url, start, 256) == bytes(range(256))
    assert [method for method, _ in s3.requests] == ["head_object", "get_object"]


def test_metadata_kept_is_bounded(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_read, "MOST_KEPT", 4000)
    url = memory.copy_in(checkpoint(tmp_path / "local", stage=3, tp=1, dp=4))
    found = scan_folder(url)
    for _ in range(2):
        for file in found.files:
            assert isinstance(load_pickle(file.path).root, dict)
    kept = found.keeper._segments
    assert sum(part.nbytes for part in kept.values()) <= 4000 + max(part.nbytes for part in kept.values())


# Failures


@pytest.mark.parametrize("failures", [1, ATTEMPTS - 1])
def test_a_failure_that_passes_is_not_seen(store, tmp_path, monkeypatch, failures):
    local = checkpoint(tmp_path / "local")
    url = store.copy_in(local)
    for method in ("cat_file", "ls"):
        seen: dict[object, int] = {}

        def fails(_, args, seen=seen):
            seen[str(args[0])] = seen.get(str(args[0]), 0) + 1
            return seen[str(args[0])] <= failures

        monkeypatch.setattr(store.system, method, Failing(getattr(store.system, method), fails))
    expected = read_checkpoint(local)
    assert described(read_checkpoint(url), url) == described(expected, local)


def test_a_failure_that_stays_is_told_with_its_reason(store, tmp_path, monkeypatch):
    url = store.copy_in(checkpoint(tmp_path / "local"))
    failing = Failing(store.system.cat_file, lambda call, args: True)
    monkeypatch.setattr(store.system, "cat_file", failing)
    name = "mp_rank_00_model_states.pt"
    with pytest.raises(CheckpointFormatError, match="the line went dead") as caught:
        load_pickle(f"{url}/{name}")
    assert caught.value.file == f"{url}/{name}"
    assert failing.calls == ATTEMPTS
    # Of bytes that are needed later it is said by another error: the file need not be bad, and what is finished counts.
    with ByteReader() as reader, pytest.raises(OSError, match="the line went dead") as caught:
        reader.read(f"{url}/{name}", 0, 10)
    assert caught.value.filename == f"{url}/{name}"
    assert failing.calls == 2 * ATTEMPTS


def test_expired_credentials_are_no_bad_file(store, monkeypatch):
    url = store.write("f", b"x" * 10)
    failing = Failing(store.system.cat_file, lambda call, args: True, lambda: PermissionError("ExpiredToken"))
    monkeypatch.setattr(store.system, "cat_file", failing)
    with ByteReader() as reader, pytest.raises(PermissionError, match="ExpiredToken"):
        reader.read(url, 0, 10)
    assert failing.calls == 1


@pytest.mark.parametrize("error", [PermissionError("Access Denied"), FileNotFoundError("bucket/x"), ValueError("no")])
def test_what_cannot_pass_is_tried_once(store, tmp_path, monkeypatch, error):
    url = store.copy_in(checkpoint(tmp_path / "local"))
    failing = Failing(store.system.ls, lambda call, args: True, lambda: error)
    monkeypatch.setattr(store.system, "ls", failing)
    with pytest.raises(CheckpointFormatError, match="cannot be listed"):
        scan_folder(url)
    assert failing.calls == 1
    with pytest.raises(OSError, match=r"Access Denied|No such file|no"):
        list_folder(url)


def test_a_store_that_gives_too_little_is_caught(store, monkeypatch):
    url = store.write("f", b"x" * 1000)
    original = store.system.cat_file
    monkeypatch.setattr(store.system, "cat_file", lambda *args, **kwargs: original(*args, **kwargs)[:-1])
    file = open_metadata(url)
    with pytest.raises(CheckpointFormatError, match="ends at byte 999, expected to reach byte 1000") as caught:
        file.pread(10, 0)
    assert caught.value.file == url
    with ByteReader() as reader, pytest.raises(CheckpointFormatError, match=re.escape(url)):
        reader.read(url, 0, 10)


def test_a_failed_read_leaves_later_ones_as_they_are(store, monkeypatch):
    url = store.write("f", b"x" * 1000)
    original = store.system.cat_file
    monkeypatch.setattr(store.system, "cat_file", Failing(original, lambda call, args: call <= ATTEMPTS))
    with ByteReader() as reader:
        with pytest.raises(OSError, match="the line went dead"):
            reader.read(url, 0, 10)
        assert reader.read(url, 0, 10) == b"x" * 10


# What has to be installed


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(PolicyError, match=re.escape("pip install 'deepspeed-affine[remote]'")):
        read_checkpoint("memory://nowhere/at/all")
    with pytest.raises(PolicyError, match=re.escape("pip install 'deepspeed-affine[remote]'")):
        load_pickle("s3://nowhere/at/all.pt")


@pytest.mark.parametrize(
    ("scheme", "package"), [("gs", "gcsfs"), ("gcs", "gcsfs"), ("az", "adlfs"), ("abfs", "adlfs"), ("s3", "s3fs")]
)
def test_without_a_protocols_package_it_is_named(monkeypatch, scheme, package):
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, scheme, raising=False)
    url = f"{scheme}://a-bucket-nobody-asked-for/x"
    with pytest.raises(PolicyError, match=f"pip install {package}$") as caught:
        scan_folder(url)
    assert caught.value.file == url
    with pytest.raises(PolicyError, match=f"pip install {package}$"):
        scan_folder(f"simplecache::{url}")


@pytest.mark.parametrize("url", ["unheard-of://x/y", "S3://bucket/x"])
def test_a_protocol_nobody_knows_is_named(url):
    with pytest.raises(PolicyError, match="is no URL fsspec can open") as caught:
        scan_folder(url)
    assert caught.value.file == url


def test_local_paths_need_nothing_of_this(tmp_path):
    checkpoint(tmp_path / "local")
    code = (
        "import sys; from deepspeed_affine.execute.checkpoint import read_checkpoint; "
        f"read_checkpoint({str(tmp_path / 'local')!r}); "
        "sys.exit('deepspeed_affine.storage.remote' in sys.modules or 'fsspec' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
