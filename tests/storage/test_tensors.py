"""Maps of files: views that outlive their maps, no descriptors, no copies."""

import gc
import os
import threading

import pytest
import torch

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.tensors import FileMaps, open_storage, open_tensor, read_into

MEBIBYTE = 1 << 20


def rss_anon():
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file.readlines()[1:])
    return int(fields["Anonymous"].split()[0]) * 1024


def mapped(path):
    with open("/proc/self/maps", encoding="utf-8") as file:
        return any(str(path) in line for line in file)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(1000.0), "empty": torch.empty(0, 4)}, path)
    return path


def test_views_stay_valid_after_close_and_then_free_the_map(saved):
    ref = load_pickle(saved).root["a"]
    with FileMaps() as maps:
        tensor = open_tensor(ref, maps)
        assert len(maps) == 1
    gc.collect()
    part = tensor[500:]
    del tensor, maps
    gc.collect()
    assert mapped(saved)
    assert part[0] == 500
    del part
    gc.collect()
    assert not mapped(saved)


def test_release_and_close(saved):
    ref = load_pickle(saved).root["a"]
    maps = FileMaps()
    first = open_tensor(ref, maps)
    maps.release(ref.storage.path)
    assert len(maps) == 0
    assert torch.equal(open_tensor(ref, maps), first)
    maps.close()
    with pytest.raises(ValueError, match="closed"):
        open_tensor(ref, maps)


def test_a_stray_write_reaches_no_file(saved):
    before = saved.read_bytes()
    ref = load_pickle(saved).root["a"]
    with FileMaps() as maps:
        open_tensor(ref, maps).zero_()
    assert saved.read_bytes() == before


def test_a_storage_has_exactly_its_bytes(saved):
    root = load_pickle(saved).root
    with FileMaps() as maps:
        assert open_storage(root["a"].storage, maps).nbytes() == 4000
        assert open_storage(root["empty"].storage, maps).nbytes() == 0
        assert open_tensor(root["empty"], maps).shape == (0, 4)


def test_many_files_hold_no_descriptors(tmp_path):
    with FileMaps() as maps:
        before = len(os.listdir("/proc/self/fd"))
        tensors = []
        for number in range(50):
            path = tmp_path / f"{number}.pt"
            torch.save(torch.full((3,), float(number)), path)
            tensors.append(open_tensor(load_pickle(path).root, maps))
        assert len(os.listdir("/proc/self/fd")) == before
        assert [tensor[0].item() for tensor in tensors] == list(range(50))


def test_threads_share_one_map(saved):
    ref = load_pickle(saved).root["a"]
    sums = []
    with FileMaps() as maps:
        threads = [threading.Thread(target=lambda: sums.append(open_tensor(ref, maps).sum().item())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(maps) == 1
    assert sums == [499500.0] * 8


def test_a_file_that_shrank_or_vanished_is_refused_by_name(saved):
    ref = load_pickle(saved).root["a"]
    os.truncate(saved, ref.byte_offset + 10)
    with FileMaps() as maps, pytest.raises(CheckpointFormatError, match="became shorter") as caught:
        open_tensor(ref, maps)
    assert caught.value.file == str(saved)
    saved.unlink()
    with FileMaps() as maps, pytest.raises(CheckpointFormatError, match="cannot be mapped"):
        open_tensor(ref, maps)


def test_read_into_fills_a_buffer_and_notices_the_end(saved):
    ref = load_pickle(saved).root["a"]
    target = torch.empty(10)
    read_into(ref.storage.path, ref.byte_offset + 40, target.view(torch.uint8).numpy())
    assert torch.equal(target, torch.arange(10.0, 20.0))
    with pytest.raises(CheckpointFormatError, match="truncated"):
        read_into(ref.storage.path, saved.stat().st_size - 8, bytearray(20))


@pytest.mark.heavy
def test_reading_a_large_file_takes_no_memory_of_its_own(tmp_path):
    path = tmp_path / "large.pt"
    torch.save({"a": torch.ones(64 * MEBIBYTE), "b": torch.ones(32 * MEBIBYTE)}, path)
    gc.collect()
    before = rss_anon()
    with FileMaps() as maps:
        root = load_pickle(path).root
        total = sum(open_tensor(ref, maps).view(-1, 1024).amax(dim=1).sum().item() for ref in root.values())
        grown = rss_anon() - before
    assert total == 96 * 1024
    assert grown < 16 * MEBIBYTE, grown


def test_a_file_cut_off_under_its_map_is_refused_and_not_read(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.arange(MEBIBYTE), path)
    ref = load_pickle(path).root
    with FileMaps() as maps:
        assert open_tensor(ref, maps)[5] == 5
        os.truncate(path, 4096)
        with pytest.raises(CheckpointFormatError, match=r"has 4096 bytes.*became shorter"):
            open_tensor(ref, maps)


def test_a_file_removed_under_its_map_is_still_read(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.arange(10), path)
    ref = load_pickle(path).root
    with FileMaps() as maps:
        open_tensor(ref, maps)
        os.unlink(path)
        assert torch.equal(open_tensor(ref, maps), torch.arange(10))


def test_bytes_of_a_file_that_is_gone_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointFormatError, match="cannot be opened") as caught:
        read_into(str(tmp_path / "x.pt"), 0, bytearray(4))
    assert caught.value.file == str(tmp_path / "x.pt")
