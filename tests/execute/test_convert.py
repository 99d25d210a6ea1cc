"""Executing a plan: how often each byte, file and checksum is touched, and what is left open."""

import json
import os
import subprocess
import sys
import threading
import zlib
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from converting import execute_plan, is_flat, wrong
from synthetic import COLUMN, Cut, Param, World, make, random_full

from deepspeed_affine.execute import bounds
from deepspeed_affine.execute.bounds import memory_bound
from deepspeed_affine.execute.checkpoint import read_checkpoint
from deepspeed_affine.execute.claims import SourceSums
from deepspeed_affine.execute.conversion import ConversionOptions, build_plan
from deepspeed_affine.execute.convert import ExecutionOptions, close_gaps, reusable, write_files
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.storage import sink
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.sink import LocalSink

SUPPORT = Path(__file__).parents[1] / "support"


def several(count=6, rows=8, tp=2):
    params = [Param(f"p{n}", random_full((rows * tp, 5), n), COLUMN) for n in range(count)]
    return [*params, Param("norm", random_full((7,), 99))]


def plan_of(folder):
    return build_plan(read_checkpoint(str(folder)), ConversionOptions(StockRules.for_version("0.19.8")))[0]


class Counted(ByteReader):
    """Notes every range that is read of every file."""

    def __init__(self):
        super().__init__()
        self.ranges = []

    def read_into(self, path, offset, out):
        super().read_into(path, offset, out)
        self.ranges.append((path, offset, offset + out.nbytes))


def execute(plan, target, options, reader=None):
    target.mkdir(exist_ok=True)
    with reader or ByteReader() as reader:
        written = write_files(plan, reader, LocalSink(str(target), durable=options.fsync), options)
        if options.source_crc:
            sums = SourceSums(plan.checked_storages)
            for entry in written.files.values():
                sums.add(entry.reads)
            while gaps := sums.gaps():
                sums.add(close_gaps(gaps, reader, options))
            sums.check(reader)
    return written


@pytest.mark.parametrize("chunk_bytes", [64, 4 << 20])
@pytest.mark.parametrize("stage", [1, 3])
def test_each_source_byte_is_read_once_and_checked(tmp_path, stage, chunk_bytes):
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
    scalars = {
        entry for entry in expected - set(checked) if load_pickle(entry[0]).archive.storages[entry[1]].numel == 1
    }
    # Of the ranks' step counters, which were compared, one is written.
    assert expected - set(checked) - scalars == set()
    assert set(checked) <= expected

    reader = Counted()
    execute(plan, tmp_path / "out", ExecutionOptions(workers=2, fsync=False, chunk_bytes=chunk_bytes), reader)
    twice = 0
    for path, ranges in groupby(sorted(reader.ranges), key=lambda item: item[0]):
        covered = 0
        for _, start, stop in ranges:
            twice += max(0, min(covered, stop) - start)
            covered = max(covered, stop)
        assert path.startswith(folder)
    # A group shares one step, which every parameter gets; ZeRO-3's optimizer_state.pt is a rank's whole shard.
    carried = sum(storage.nbytes for file in plan.objects for storage in file.storages)
    assert twice <= carried
    read = sum(stop - start for _, start, stop in reader.ranges)
    stored = sum(storage.nbytes for storage in plan.checked_storages)
    assert stored <= read <= stored + sum(file.nbytes for file in plan.copies) + carried


def test_without_source_checksums_only_what_is_written_is_read(tmp_path):
    plan = plan_of(make(World(tp=2, dp=2), several()).save(tmp_path / "in"))
    reader = Counted()
    written = execute(plan, tmp_path / "out", ExecutionOptions(fsync=False, source_crc=False), reader)
    once = sum(task.nbytes for task in plan.tensors) + sum(file.nbytes for file in plan.copies)
    scalars = sum(storage.nbytes for file in plan.objects for storage in file.storages)
    assert sum(stop - start for _, start, stop in reader.ranges) == once + scalars
    assert not any(entry.reads for entry in written.files.values())


@pytest.mark.parametrize("chunk_bytes", [16, 1 << 20])
def test_each_byte_is_written_once(tmp_path, monkeypatch, chunk_bytes):
    written = []
    real = os.pwrite
    monkeypatch.setattr(sink.os, "pwrite", lambda fd, data, at: written.append(len(data)) or real(fd, data, at))
    made = make(World(tp=2, dp=2), several())
    execute_plan(made.save(tmp_path / "in"), tmp_path / "out", chunk_bytes=chunk_bytes)
    sizes = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert sum(written) == sizes
    assert wrong(made, tmp_path / "out") == []


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [16, 100, 4 << 20])
def test_recorded_sums_are_those_of_the_files(tmp_path, chunk_bytes, workers):
    plan = plan_of(make(World(stage=3, tp=2, dp=2), several()).save(tmp_path / "in"))
    options = ExecutionOptions(workers=workers, fsync=False, chunk_bytes=chunk_bytes)
    written = execute(plan, tmp_path / "out", options)
    assert set(written.files) == set(plan.paths)
    for path, entry in written.files.items():
        data = (tmp_path / "out" / path).read_bytes()
        assert (entry.path, entry.nbytes, entry.crc32) == (path, len(data), zlib.crc32(data))
    assert written.bytes_written == sum(entry.nbytes for entry in written.files.values())


def test_a_sequential_sink_gets_every_file_front_to_back(tmp_path):
    plan = plan_of(make(World(stage=3, tp=2, dp=2), several()).save(tmp_path / "in"))
    options = ExecutionOptions(workers=3, fsync=False, chunk_bytes=64)
    execute(plan, tmp_path / "out", options)
    made = {}

    class File:
        def __init__(self, path, size):
            self.path, self.size, self.data = path, size, bytearray()

        def write_at(self, offset, data):
            assert offset == len(self.data)
            self.data += data

        def finish(self):
            assert len(self.data) == self.size
            made[self.path] = bytes(self.data)

        def abandon(self):
            pass

    class Sequential:
        sequential = True

        def create(self, path, size):
            return File(path, size)

    with ByteReader() as reader:
        write_files(plan, reader, Sequential(), options)
    assert set(made) == set(plan.paths)
    for path, data in made.items():
        assert data == (tmp_path / "out" / path).read_bytes()


@pytest.mark.parametrize("share", [0, 1])
def test_only_wanted_files_are_written_and_reused_ones_are_not(tmp_path, share):
    plan = plan_of(make(World(tp=2, dp=2), several()).save(tmp_path / "in"))
    options = ExecutionOptions(fsync=False, source_crc=False)
    whole = execute(plan, tmp_path / "whole", options)
    wanted = sorted(plan.paths)[share::2]
    recorded = []
    with ByteReader() as reader:
        sink = LocalSink(str(tmp_path / "part"), durable=False)
        written = write_files(
            plan,
            reader,
            sink,
            options,
            reused={wanted[0]: whole.files[wanted[0]]},
            wanted=wanted,
            record=recorded.append,
        )
    assert sorted(entry.path for entry in recorded) == wanted[1:]
    assert written.files == {path: whole.files[path] for path in wanted}
    there = {str(path.relative_to(tmp_path / "part")) for path in (tmp_path / "part").rglob("*.pt")}
    assert there == set(wanted[1:])


def test_only_files_that_are_as_recorded_are_reused(tmp_path):
    plan = plan_of(make(World(tp=2, dp=2), several()).save(tmp_path / "in"))
    options = ExecutionOptions(fsync=False, source_crc=False, chunk_bytes=64)
    written = execute(plan, tmp_path / "out", options)
    names = sorted(written.files)
    (tmp_path / "out" / names[0]).unlink()
    with open(tmp_path / "out" / names[1], "r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    with open(tmp_path / "out" / names[2], "ab") as file:
        file.write(b"x")
    with open(tmp_path / "out" / names[3], "r+b") as file:
        file.seek(-40, 2)
        byte = file.read(1)
        file.seek(-41 + 1, 2)
        file.write(bytes([byte[0] ^ 1]))
    with ByteReader() as reader:
        assert sorted(reusable(written.files, str(tmp_path / "out"), reader, options)) == names[4:]


def test_each_file_is_synced_once_and_before_it_is_published(tmp_path, monkeypatch):
    made = make(World(tp=2, dp=2), several(3))
    folder = made.save(tmp_path / "in")
    synced, real, rename = [], os.fsync, os.rename

    def note(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", note)
    target = str(tmp_path / "out")
    monkeypatch.setattr(os, "rename", lambda a, b: (synced.append("published") if b == target else 0, rename(a, b)))
    from deepspeed_affine.cli import ds_to_universal

    arguments = ["--affine", "--input_folder", folder, "--output_folder", target]
    assert ds_to_universal(arguments) == 0
    private = str(tmp_path / ".out.partial" / "files")
    counts = Counter(path for path in synced if path.endswith(".pt"))
    files = {os.path.join(at, name) for at, _, names in os.walk(target) for name in names if name.endswith(".pt")}
    assert counts == {path.replace(target, private): 1 for path in files}
    published = synced.index("published")
    folders = {at.replace(target, private) for at, _, _ in os.walk(target)}
    assert folders <= set(synced[:published])
    assert all(synced.index(path) < published for path in counts)
    assert any("affine_manifest" in path or "pointer" in path for path in synced[:published])
    assert not [path for path in synced[published:] if path.endswith(".pt")]
    assert str(tmp_path) in synced[published:]
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
    command = [sys.executable, "-c", MEASURED, str(SUPPORT), "--affine", "--no-fsync", "--json"]
    command += ["--input_folder", folder, "--output_folder", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    printed, _, peak = run.stdout.rpartition("peak ")
    stated = json.loads(printed)["memory_bound_bytes"]
    assert int(peak) < stated
    assert stated < 300 << 20
    assert wrong(made, tmp_path / "out", flat=is_flat(made)) == []


def test_the_bound_does_not_grow_with_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "_resident_bytes", lambda: 0)
    options = ExecutionOptions(workers=4)
    small = plan_of(make(World(dp=2), [Param("w", torch.zeros(10, 10))]).save(tmp_path / "small"))
    large = plan_of(make(World(dp=2), [Param("w", torch.zeros(4000, 1000))]).save(tmp_path / "large"))
    assert memory_bound(small, options) == memory_bound(large, options)
    assert memory_bound(large, replace(options, workers=8)) > memory_bound(large, options)
