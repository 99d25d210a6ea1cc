"""Executing a plan: how often each byte, file and checksum is touched, and what is left open."""

import os
import subprocess
import sys
import threading
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from converting import convert, execute_plan, is_flat, wrong
from synthetic import COLUMN, Cut, Param, World, make, random_full

from deepspeed_affine.commands.conversion import ConversionOptions, build_plan
from deepspeed_affine.execute import convert as module
from deepspeed_affine.execute.checkpoint import read_checkpoint
from deepspeed_affine.execute.convert import ExecutionOptions, execute, memory_bound
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.storage import output, pt_writer
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.tensors import FileMaps

SUPPORT = Path(__file__).parents[1] / "support"


def several(count=6, rows=8, tp=2):
    params = [Param(f"p{n}", random_full((rows * tp, 5), n), COLUMN) for n in range(count)]
    return [*params, Param("norm", random_full((7,), 99))]


def plan_of(folder):
    return build_plan(read_checkpoint(str(folder)), ConversionOptions(StockRules.for_version("0.19.8")))[0]


def summed(monkeypatch):
    """The lengths of what the executor computes checksums of, filled as it runs."""
    seen = []

    def crc32(data, value=0):
        seen.append(len(data))
        return zlib.crc32(data, value)

    monkeypatch.setattr(module, "zlib", SimpleNamespace(crc32=crc32))
    return seen


@pytest.mark.parametrize("stage", [1, 3])
def test_each_storage_is_checked_once(tmp_path, monkeypatch, stage):
    made = make(World(stage=stage, tp=2, dp=3), several())
    folder = made.save(tmp_path / "in")
    plan = plan_of(folder)
    checked = Counter((storage.file, storage.key) for storage in plan.checked_storages)
    assert set(checked.values()) == {1}
    expected = {
        (os.path.join(folder, name), key)
        for name in made.files
        for key, ref in load_pickle(os.path.join(folder, name)).archive.storages.items()
        # What ZeRO-3 keeps in its model-state files reaches no output.
        if ref.nbytes and not (stage == 3 and "model_states" in name)
    }
    found = {entry for entry in checked if os.path.basename(entry[0])}
    scalars = {entry for entry in expected - found if load_pickle(entry[0]).archive.storages[entry[1]].numel == 1}
    # Of the ranks' step counters, which were compared, one is written.
    assert expected - found - scalars == set()
    assert found <= expected

    seen = summed(monkeypatch)
    (tmp_path / "out").mkdir()
    with FileMaps() as maps:
        execute(plan, maps, str(tmp_path / "out"), ExecutionOptions(workers=1, fsync=False))
    written = sum(task.nbytes for task in plan.tensors)
    read = sum(storage.nbytes for storage in plan.checked_storages)
    assert sum(seen) == written + read


def test_without_source_checksums_only_the_output_is_summed(tmp_path, monkeypatch):
    plan = plan_of(make(World(tp=2, dp=2), several()).save(tmp_path / "in"))
    seen = summed(monkeypatch)
    (tmp_path / "out").mkdir()
    with FileMaps() as maps:
        execute(plan, maps, str(tmp_path / "out"), ExecutionOptions(workers=1, fsync=False, source_crc=False))
    assert sum(seen) == sum(task.nbytes for task in plan.tensors)


@pytest.mark.parametrize("chunk_bytes", [16, 1 << 20])
def test_each_byte_is_written_once(tmp_path, monkeypatch, chunk_bytes):
    written = []
    real = os.pwrite
    monkeypatch.setattr(pt_writer.os, "pwrite", lambda fd, data, at: written.append(len(data)) or real(fd, data, at))
    made = make(World(tp=2, dp=2), several())
    plan = execute_plan(made.save(tmp_path / "in"), tmp_path / "out", chunk_bytes=chunk_bytes)
    sizes = sum(os.path.getsize(tmp_path / "out" / task.path) for task in plan.tensors)
    # The rest of a file is the alignment torch, too, leaves as holes or fills.
    assert sum(written) <= sizes
    assert sum(written) >= sum(task.nbytes for task in plan.tensors)
    assert wrong(made, tmp_path / "out") == []


def test_each_file_is_synced_once_and_before_it_is_published(tmp_path, monkeypatch):
    made = make(World(tp=2, dp=2), several(3))
    folder = made.save(tmp_path / "in")
    synced, real, rename = [], os.fsync, os.rename

    def note(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(output.os, "rename", lambda a, b: synced.append("published") or rename(a, b))
    from deepspeed_affine.cli import ds_to_universal

    arguments = ["--affine", "--input_folder", folder, "--output_folder", str(tmp_path / "out")]
    assert ds_to_universal(arguments) == 0
    counts = Counter(path for path in synced if path.endswith(".pt"))
    files = [name for _, _, names in os.walk(tmp_path / "out") for name in names]
    assert set(counts.values()) == {1}
    assert len(counts) == len(files)
    published = synced.index("published")
    assert all(synced.index(path) < published for path in counts)
    folders = [path for path in synced if ".partial" in path and not path.endswith(".pt")]
    assert (
        len([path for path in set(folders) if "latest_universal" not in path])
        == 2 + len(os.listdir(tmp_path / "out/zero")) - 1
    )
    assert not [path for path in synced[published:] if path.endswith(".pt")]
    synced.clear()
    assert ds_to_universal([*arguments[:-1], str(tmp_path / "quick"), "--no-fsync"]) == 0
    assert [path for path in synced if path.endswith(".pt")] == []


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from deepspeed_affine.cli import ds_to_universal
sys.exit(ds_to_universal(sys.argv[2:]))
"""


@pytest.mark.parametrize(("count", "dp"), [(400, 2), pytest.param(10_000, 4, marks=pytest.mark.heavy)])
def test_few_files_are_open_however_many_there_are(tmp_path, count, dp):
    params = [Param(f"p{n}", torch.full((3,), float(n))) for n in range(count)]
    folder = make(World(dp=dp, states=("exp_avg",)), params).save(tmp_path / "in")
    command = [sys.executable, "-c", LIMITED, str(SUPPORT), "--affine", "--no-fsync", "--workers", "4"]
    command += ["--input_folder", folder, "--output_folder", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert len(os.listdir(tmp_path / "out" / "zero")) == count + 1


def test_more_ranks_than_files_may_be_open(tmp_path):
    made = make(World(stage=3, dp=150), [Param("w", random_full((301,), 1))])
    command = [sys.executable, "-c", LIMITED, str(SUPPORT), "--affine", "--no-fsync"]
    command += ["--input_folder", made.save(tmp_path / "in"), "--output_folder", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert wrong(made, tmp_path / "out", flat=True) == []


def test_nothing_stays_open_or_running(tmp_path):
    made = make(World(tp=2, dp=2), several())
    folder = made.save(tmp_path / "in")
    execute_plan(folder, tmp_path / "warm", chunk_bytes=64)
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    execute_plan(folder, tmp_path / "out", chunk_bytes=64, workers=4)
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


def test_reading_is_one_pass_over_what_is_written(tmp_path):
    """Replicas are read to be compared; everything else once, and nothing of the padding."""
    made = make(World(tp=2, dp=3, align=16), several())
    plan = plan_of(made.save(tmp_path / "in"))
    copied = sum(file.nbytes for file in plan.copies)
    once = sum(full.numel() * 4 for full in made.truth.values())
    replicas = sum(made.truth["norm", state].numel() * 4 for state in ("fp32", "exp_avg", "exp_avg_sq"))
    assert plan.bytes_in == once + replicas + copied
    assert plan.bytes_out == once + copied


MEASURED = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
peak = 0
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
from deepspeed_affine.cli import ds_to_universal
code = ds_to_universal(sys.argv[2:])
print("peak", peak)
sys.exit(code)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("stage", [1, 3])
def test_memory_stays_within_what_was_stated(tmp_path, stage):
    world = World(stage=stage, tp=2, dp=2, module_dtype=torch.bfloat16)
    params = [Param(f"p{n}", torch.randn(2048, 4096), COLUMN) for n in range(8)]
    params.append(Param("row", torch.randn(2048, 8192), Cut("row")))
    made = make(world, params)
    folder = made.save(tmp_path / "in")
    assert sum(os.path.getsize(os.path.join(folder, name)) for name in made.files) > 900 << 20
    stated = memory_bound(plan_of(folder), ExecutionOptions(workers=2))
    command = [sys.executable, "-c", MEASURED, str(SUPPORT), "--affine", "--no-fsync", "--workers", "2"]
    command += ["--input_folder", folder, "--output_folder", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    peak = int(run.stdout.split()[-1])
    assert peak < stated
    assert stated < 300 << 20
    assert wrong(made, tmp_path / "out", flat=is_flat(made)) == []


def test_the_bound_does_not_grow_with_the_model(tmp_path):
    small = plan_of(make(World(dp=2), [Param("w", torch.zeros(10, 10))]).save(tmp_path / "small"))
    options = ExecutionOptions(workers=4)
    assert memory_bound(small, options) <= module.BASE_BYTES + 2 * 4 * module.CHUNK_BYTES
    assert convert(tmp_path / "small", tmp_path / "out") == 0
