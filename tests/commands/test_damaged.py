"""Hostile files, checksums, objects of any class, and writing that fails; damage by table is in test_bad_input.py."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from converting import assert_converts, assert_refuses, convert, listing, stored, wrong
from synthetic import COLUMN, Deep, Foreign, Param, World, make, random_full

from deepspeed_affine.storage import publication, sink
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.pt_reader import load_pickle


def small(stage=1, **world):
    params = [Param("w", random_full((40, 3), 1)), Param("b", random_full((7,), 2), group=1)]
    params.append(Param("frozen", random_full((5,), 3), kind="frozen"))
    return make(World(stage=stage, dp=2, **world), params)


def test_checksums_can_be_left_out(tmp_path, capsys):
    made = small()
    folder = made.save(tmp_path / "ckpt")
    path = os.path.join(folder, made.optim_name(1))
    storage = max(load_pickle(path).archive.storages.values(), key=lambda ref: ref.nbytes)
    with open(path, "r+b") as file:
        file.seek(storage.byte_offset)
        file.write(b"\xff")
    assert convert(folder, tmp_path / "out", "--no-source-crc") == 0
    assert wrong(made, tmp_path / "out") != []


def test_storages_without_a_checksum_are_counted(tmp_path, capsys):
    made = small()
    torch.serialization.set_crc32_options(False)
    try:
        folder = made.save(tmp_path / "ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert convert(folder, tmp_path / "out") == 0
    assert "carry no usable CRC" in capsys.readouterr().out
    assert wrong(made, tmp_path / "out") == []


class Hostile:
    """Unpickling this runs a command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("place", ["optim", "model", "param_groups", "module", "uc_info", "key"])
def test_a_hostile_pickle_does_nothing(tmp_path, stage, place):
    mark = tmp_path / "executed"
    made = small(stage)
    bad = Hostile(f"touch {mark}")
    if place == "optim":
        made.optim(1)["loss_scaler"] = bad
    elif place == "param_groups":
        inner = made.optim(0)["base_optimizer_state"] if stage == 1 else made.optim(0)["optimizer_state_dict"]
        inner["param_groups"][0]["lr"] = bad
    elif place == "module":
        made.model()["module"]["extra"] = bad
    elif place == "uc_info":
        made.model()["universal_checkpoint_info"]["extra"] = bad
    elif place == "key":
        made.model()["param_shapes"][0]["v"] = bad
    else:
        made.model()["lr_scheduler"] = bad
    folder = os.path.join(tmp_path, "ckpt")
    os.mkdir(folder)
    for name, root in made.files.items():
        made.files[name] = root
    made.save(folder)
    code = convert(folder, tmp_path / "out")
    assert code == (2 if place == "key" else 0)
    assert not mark.exists()


@pytest.mark.parametrize("stage", [1, 3])
def test_objects_of_classes_that_cannot_be_imported(tmp_path, stage):
    made = small(stage)
    for name, root in made.files.items():
        root["schedule"] = Foreign(values=[1, 2], inner=Foreign(tensor=torch.ones(2)))
        root.get("optimizer_state_dict", {})["scaler2"] = Foreign(a=1)
        made.files[name] = root
    target = assert_converts(made, tmp_path)
    with zipfile.ZipFile(target / "zero" / "optimizer_state.pt") as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert b"my_training.package" in data


def test_objects_that_hold_themselves(tmp_path):
    made = small()
    loop = []
    loop.append(loop)
    made.model()["loop"] = made.optim()["loop"] = loop
    assert_converts(made, tmp_path)


def test_objects_nested_deeper_than_python_can_follow(tmp_path, capsys):
    made = small()
    made.model()["deep"] = Deep(5_000)
    assert_converts(made, tmp_path / "copied")
    made.optim(1)["deep"] = Deep(5_000)
    assert_converts(made, tmp_path / "dropped")
    made.optim(0)["deep"] = Deep(5_000)
    assert "nested deeper" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_the_disk_is_full(tmp_path, capsys, monkeypatch):
    made = small()
    folder = made.save(tmp_path / "ckpt")
    real = os.pwrite
    written = []

    def full(fd, data, offset):
        written.append(len(data))
        if sum(written) > 3000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(sink.os, "pwrite", full)
    said = assert_refuses(folder, tmp_path, capsys)
    assert "No space left on device" in said
    assert ".pt" in said


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "optimizer_state.pt"])
def test_the_disk_is_full_for_files_that_are_not_tensors(tmp_path, capsys, monkeypatch, file):
    folder = small().save(tmp_path / "ckpt")
    real = sink.LocalFile.write_at

    def full(self, offset, data):
        if self.path.endswith(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, offset, data)

    monkeypatch.setattr(sink.LocalFile, "write_at", full)
    assert file in assert_refuses(folder, tmp_path, capsys)


def test_a_failing_thread_stops_the_others_and_leaves_no_descriptor_open(tmp_path, capsys, monkeypatch):
    params = [Param(f"p{n}", random_full((64, 64), n)) for n in range(60)]
    folder = make(World(dp=2), params).save(tmp_path / "ckpt")
    real, calls = os.pwrite, []

    def failing(fd, data, offset):
        calls.append(1)
        if len(calls) == 30:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        time.sleep(0.001)
        return real(fd, data, offset)

    convert(make(World(dp=2), params[:2]).save(tmp_path / "warm"), tmp_path / "warm_out")
    before = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    monkeypatch.setattr(sink.os, "pwrite", failing)
    assert "Disk quota exceeded" in assert_refuses(folder, tmp_path, capsys, "--workers", "4")
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
    # 180 files would need far more writes; the others stopped at their next one.
    assert len(calls) < 60


INTERRUPTED = """
import os, signal, sys, threading, time
# Whatever runs the tests in the background may have had it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from deepspeed_affine.storage import sink
real = os.pwrite
calls = []
def slow(fd, data, offset):
    calls.append(fd)
    if not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
    time.sleep(0.05)
    # However late the interrupt comes, it finds files that are still to be written.
    while len(calls) > 100 and not os.path.exists(sys.argv[1] + ".interrupted"):
        time.sleep(0.05)
    return real(fd, data, offset)
sink.os = type("Slow", (), dict(vars(os), pwrite=staticmethod(slow)))
from deepspeed_affine.cli import ds_to_universal
sys.exit(ds_to_universal(sys.argv[2:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", ["1", "4"])
def test_an_interrupted_conversion_is_resumed(tmp_path, capsys, workers, number):
    params = [Param(f"p{n}", random_full((16, 16), n)) for n in range(60)]
    made = make(World(dp=2), params)
    folder = made.save(tmp_path / "ckpt")
    started = tmp_path / "started"
    arguments = ["--affine", "--workers", workers, "--input_folder", folder]
    command = [sys.executable, "-c", INTERRUPTED, str(started), *arguments]
    command += ["--output_folder", str(tmp_path / "made" / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        private = tmp_path / "made" / ".out.partial" / "files" / "zero"
        while not (started.exists() and private.is_dir() and len(os.listdir(private)) > 8):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        started.with_name("started.interrupted").touch()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "interrupted" in said
    assert "the same command resumes" in said
    assert "Traceback" not in said
    assert os.listdir(tmp_path / "made") == [".out.partial"]

    assert convert(folder, tmp_path / "made" / "out", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 < result["reused_files"] < len(params) * 3
    assert wrong(made, tmp_path / "made" / "out") == []
    assert sorted(os.listdir(tmp_path / "made")) == ["latest_universal", "out"]
    assert convert(folder, tmp_path / "undisturbed") == 0
    assert contents(tmp_path / "made" / "out") == contents(tmp_path / "undisturbed")


def test_an_interrupt_before_the_first_file_leaves_nothing(tmp_path, monkeypatch):
    folder = small().save(tmp_path / "ckpt")

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(sink.LocalSink, "create", interrupted)
    assert convert(folder, tmp_path / "made" / "out") == 2
    assert listing(tmp_path) == {"ckpt", *(f"ckpt/{name}" for name in os.listdir(folder))}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_keep_temp_folder_keeps_what_a_failure_left(tmp_path):
    made = make(World(tp=2), [Param("w", random_full((4,), 1)), Param("u", random_full((4, 2), 2), COLUMN)])
    made.optim(0, 1)["single_partition_of_fp32_groups"][0][0] += 1
    folder = made.save(tmp_path / "ckpt")
    assert convert(folder, tmp_path / "out", "--keep_temp_folder") == 2
    assert [name for name in os.listdir(tmp_path) if name.endswith(".partial")] != []
    assert not (tmp_path / "out").exists()


def test_pickles_of_every_protocol(tmp_path):
    made = small()
    folder = tmp_path / "ckpt"
    made.save(folder)
    for protocol in (2, 3, 4, 5):
        state = make(World(), [Param("w", random_full((4,), 1))])
        root = state.model()
        del root["universal_checkpoint_info"]
        torch.save(
            root,
            folder / "other.pt",
            pickle_protocol=protocol,
            pickle_module=SimpleNamespace(__name__="p", Pickler=pickle.Pickler),
        )
        assert load_pickle(folder / "other.pt").root["param_shapes"][0]["w"] == (4,)
    assert convert(folder, tmp_path / "out") == 0
    assert stored(tmp_path / "out", "w", "fp32").shape == (40, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_read_that_goes_wrong_never_reaches_an_output(tmp_path, capsys, monkeypatch, stage):
    """Whichever read it is, of whatever length: bytes that are written are bytes that were checked."""
    params = [Param("w", random_full((40, 30), 1), COLUMN), Param("b", random_full((5,), 2))]
    made = make(World(stage=stage, dp=2), params)
    folder = made.save(tmp_path / "ckpt")
    real, seen = ByteReader.read_into, {"reads": 0, "flipped": -1}

    def reads(self, path, offset, out):
        real(self, path, offset, out)
        if path.endswith("optim_states.pt"):
            seen["reads"] += 1
            if seen["reads"] == seen["flipped"]:
                out[len(out) // 2] ^= 64

    monkeypatch.setattr(ByteReader, "read_into", reads)
    assert convert(folder, tmp_path / "right", "--workers", "1") == 0
    total, right = seen["reads"], contents(tmp_path / "right")
    assert total > 6
    for number in range(1, total + 1):
        seen.update(reads=0, flipped=number)
        assert convert(folder, tmp_path / "out", "--workers", "1") == 2
        said = capsys.readouterr().err
        # The ranks' steps are compared before anything is written.
        assert "other bytes were read" in said or "state 'step' differs" in said
        assert not (tmp_path / "out").exists()
    seen.update(reads=0, flipped=-1)
    assert convert(folder, tmp_path / "out") == 0
    assert contents(tmp_path / "out") == right


def test_a_source_repaired_between_two_runs_is_not_blamed_and_nothing_wrong_is_written(tmp_path, capsys, monkeypatch):
    params = [Param(f"p{n}", random_full((16, 16), n)) for n in range(12)]
    folder = make(World(dp=2), params).save(tmp_path / "ckpt")
    path = os.path.join(folder, "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    good = Path(path).read_bytes()
    storage = max(load_pickle(path).archive.storages.values(), key=lambda item: item.nbytes)
    bad = bytearray(good)
    bad[storage.byte_offset + 8] ^= 1
    Path(path).write_bytes(bad)
    real, written = sink.LocalFile.finish, []

    def interrupted(self):
        real(self)
        written.append(self.path)
        if len(written) == 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sink.LocalFile, "finish", interrupted)
        assert convert(folder, tmp_path / "out", "--workers", "1") == 2
    assert "the same command resumes" in capsys.readouterr().err
    Path(path).write_bytes(good)
    assert convert(folder, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "is as it was saved, but other bytes were read" in said
    assert "damaged after it was saved" not in said
    assert convert(folder, tmp_path / "out") == 0
    assert convert(folder, tmp_path / "right") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "right")


def test_a_disk_that_fails_while_reading_keeps_what_is_finished(tmp_path, capsys, monkeypatch):
    params = [Param(f"p{n}", random_full((16, 16), n)) for n in range(30)]
    folder = make(World(dp=2), params).save(tmp_path / "ckpt")
    real, calls = os.preadv, []

    def failing(fd, buffers, offset):
        calls.append(offset)
        if len(calls) > 60:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        assert convert(folder, tmp_path / "out", "--workers", "1") == 2
    said = capsys.readouterr().err
    assert "Input/output error" in said
    assert "the same command resumes" in said
    assert convert(folder, tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["reused_files"] > 0


def test_an_unchecked_output_is_not_taken_for_a_checked_one(tmp_path, capsys):
    folder = small().save(tmp_path / "ckpt")
    assert convert(folder, tmp_path / "out", "--no-source-crc") == 0
    assert "NOT compared" in capsys.readouterr().out
    assert convert(folder, tmp_path / "out", "--no-source-crc") == 0
    assert convert(folder, tmp_path / "out") == 2
    assert "--no-source-crc" in capsys.readouterr().err
    assert convert(folder, tmp_path / "out", "--overwrite") == 0
    assert convert(folder, tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert found["complete"] is True
    assert found["source_checked"] is True


def test_an_interrupt_after_the_output_has_its_name_says_so(tmp_path, capsys, monkeypatch):
    folder = small().save(tmp_path / "ckpt")

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publication, "point_at", interrupted)
        assert convert(folder, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "the new output is complete and has its name" in said
    assert "nothing was published" not in said
    assert convert(folder, tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "latest_universal", "out"]


FULL = """
import sys
from deepspeed_affine.cli import ds_affine, ds_to_universal
command = ds_to_universal if sys.argv[1] == "convert" else ds_affine
sys.exit(command(sys.argv[2:]))
"""


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_result_that_cannot_be_printed_is_no_other_result(tmp_path, as_json):
    folder = small().save(tmp_path / "ckpt")
    out = str(tmp_path / "out")
    run = [sys.executable, "-c", FULL]
    with open("/dev/full", "w") as full:
        arguments = ["convert", "--affine", "--input_folder", folder, "--output_folder", out, *as_json]
        if as_json:
            done = subprocess.run([*run, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
            assert (done.returncode, "is complete" in done.stderr) == (0, True)
        else:
            assert convert(folder, out) == 0
        for verb in (["verify", out], ["inspect", folder], ["diff", out, out]):
            done = subprocess.run(
                [*run, "verb", *verb, *as_json], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
            assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
            assert "standard output" in done.stderr
