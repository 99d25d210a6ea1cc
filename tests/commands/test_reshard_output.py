"""The folder ``ds_affine reshard`` makes: whole or not there, checked, resumed, and never in place of a run's own."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from converting import leftovers
from moments import Moments
from ranks import alone, by_hand
from resharding import reshard, wrong_files
from synthetic import COLUMN, Param, World, make, random_full

from deepspeed_affine.cli import ds_affine, ds_to_universal
from deepspeed_affine.storage.pt_reader import load_pickle

PARAMS = [Param(f"p{n}", random_full((12, 50), n), COLUMN, group=n % 2) for n in range(6)]
WANTED = World(stage=3, tp=2, dp=3)


@pytest.fixture
def source(tmp_path):
    return make(World(tp=2, dp=2), PARAMS).save(tmp_path / "in")


def wrong(folder):
    return list(wrong_files(folder, WANTED, PARAMS, make(WANTED, PARAMS).shards, 7))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(source, target, *options):
    folders = ["--input_folder", str(source), "--output_folder", str(target)]
    return ["reshard", "--no-fsync", *folders, "--zero-stage", "3", "--dp", "3", *options]


def reshard_to_wanted(source, target, *options):
    return reshard(source, target, "--zero-stage", 3, "--dp", 3, *options)


def test_killed_after_any_file_the_same_command_goes_on(tmp_path, source):
    assert reshard_to_wanted(source, tmp_path / "right") == 0
    right = contents(tmp_path / "right")
    for moment in range(1, 13):
        ended = alone(command(source, tmp_path / "out"), RANK_DOES=f"all:SIGKILL:{moment}", RANK_SLOW="0.01")
        assert ended.code == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
        assert (tmp_path / "latest").read_text() == "right"
        ended = alone(command(source, tmp_path / "out", "--json"))
        assert ended.code == 0, ended.err
        assert ended.result["reused_files"] >= moment
        assert contents(tmp_path / "out") == right
        assert (tmp_path / "latest").read_text() == "out"
        assert leftovers(tmp_path / "out") == ["out"]
        (tmp_path / "out").rename(tmp_path / f"gone{moment}")
        (tmp_path / "latest").write_text("right")


@pytest.mark.heavy
@pytest.mark.parametrize("replacing", [False, True], ids=["fresh", "overwrite"])
def test_killed_at_a_random_moment(tmp_path, source, replacing):
    """The moments fall before the first file, among the files, and into the publication."""
    target, options = tmp_path / "out", ["--overwrite"] if replacing else []
    assert reshard_to_wanted(source, tmp_path / "right") == 0
    right, old = contents(tmp_path / "right"), None
    for _ in range(2):
        # The second of the two, since what starts processes starts with the first.
        shutil.rmtree(target, ignore_errors=True)
        began = time.monotonic()
        assert alone(command(source, target, *options), RANK_SLOW="0.06").code == 0
        whole = time.monotonic() - began
    moments = Moments(whole)
    stopped = reused = 0
    for _ in range(20):
        shutil.rmtree(target, ignore_errors=True)
        if replacing:
            assert reshard(source, target, "--dp", 5) == 0
            old = contents(target)
        # Starting and ending a process are a part of the whole.
        seconds = moments.between(0.01, 0.75)
        ended = alone(command(source, target, *options), RANK_DOES=f"all:SIGKILL:{seconds:.3f}s", RANK_SLOW="0.06")
        assert ended.code in (0, -signal.SIGKILL)
        if ended.code:
            stopped += 1
        else:
            moments.was_late()
        if target.exists() or replacing:
            assert contents(target) in ([right, old] if replacing else [right])
        ended = alone(command(source, target, "--json", *options))
        assert ended.code == 0, ended.err
        reused += ended.result["reused_files"]
        assert contents(target) == right
        assert (tmp_path / "latest").read_text() == "out"
        assert leftovers(target) == ["out"]
    # The test is worth nothing where kills come too early or too late.
    assert stopped >= 8
    assert reused >= 8


@pytest.mark.real
@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_write_what_one_writes(tmp_path, source, size):
    assert reshard_to_wanted(source, tmp_path / "right") == 0
    ended = by_hand(size, command(source, tmp_path / "out", "--json"))
    assert [ended[rank].code for rank in range(size)] == [0] * size, ended
    assert contents(tmp_path / "out") == contents(tmp_path / "right")
    assert ended[0].result["processes"] == size


def test_a_rerun_finds_its_output_complete_and_another_is_refused(tmp_path, source, capsys):
    assert reshard_to_wanted(source, tmp_path / "out") == 0
    before = contents(tmp_path / "out")
    os.unlink(tmp_path / "latest")
    assert reshard_to_wanted(source, tmp_path / "out") == 0
    assert "is complete already" in capsys.readouterr().out
    assert (tmp_path / "latest").read_text() == "out"
    assert reshard(source, tmp_path / "out", "--dp", 4) == 2
    assert "replace it with --overwrite" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before
    assert reshard(source, tmp_path / "out", "--dp", 4, "--overwrite") == 0
    assert reshard_to_wanted(source, tmp_path / "out", "--overwrite") == 0
    assert contents(tmp_path / "out") == before


def test_what_latest_named_before_is_said(tmp_path, source, capsys):
    (tmp_path / "latest").write_text("in")
    assert reshard_to_wanted(source, tmp_path / "out") == 0
    assert f"{tmp_path / 'latest'} named in and names out now" in capsys.readouterr().out
    assert (tmp_path / "latest").read_text() == "out"


def test_damage_of_the_output_is_found(tmp_path, source, capsys):
    assert reshard_to_wanted(source, tmp_path / "out") == 0
    assert ds_affine(["verify", str(tmp_path / "out")]) == 0
    assert ds_affine(["verify", str(tmp_path / "out"), "--against", source]) == 2
    assert "ds_affine diff --contents" in capsys.readouterr().err
    assert ds_affine(["diff", "--contents", source, str(tmp_path / "out")]) == 0
    victim = tmp_path / "out" / "zero_pp_rank_1_mp_rank_01_optim_states.pt"
    data = bytearray(victim.read_bytes())
    storage = max(load_pickle(str(victim)).archive.storages.values(), key=lambda ref: ref.nbytes)
    data[storage.byte_offset + 9] ^= 1
    victim.write_bytes(data)
    assert ds_affine(["verify", str(tmp_path / "out")]) == 1
    assert victim.name in capsys.readouterr().out
    assert reshard_to_wanted(source, tmp_path / "out") == 2
    assert victim.name in capsys.readouterr().err
    assert reshard_to_wanted(source, tmp_path / "out", "--overwrite") == 0
    assert wrong(tmp_path / "out") == []


def test_a_runs_own_checkpoint_and_a_universal_one_are_never_overwritten(tmp_path, source, capsys):
    other = make(World(tp=2, dp=1), PARAMS).save(tmp_path / "own")
    before = contents(tmp_path / "own")
    assert reshard_to_wanted(source, other, "--overwrite") == 2
    assert "no checkpoint that ds_affine reshard made" in capsys.readouterr().err
    assert contents(tmp_path / "own") == before
    convert = ["--affine", "--no-fsync", "--input_folder", source, "--output_folder", str(tmp_path / "universal")]
    assert ds_to_universal(convert) == 0
    before = contents(tmp_path / "universal")
    assert reshard_to_wanted(source, tmp_path / "universal", "--overwrite") == 2
    assert contents(tmp_path / "universal") == before
    # Nor does the converter replace what this command made: swapped folders cost nobody a checkpoint.
    assert reshard_to_wanted(source, tmp_path / "out") == 0
    assert ds_to_universal([*convert[:-1], str(tmp_path / "out"), "--overwrite"]) == 2
    assert wrong(tmp_path / "out") == []
    assert "--overwrite would remove it" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["optim", "model"])
def test_a_flipped_byte_of_the_source_publishes_nothing(tmp_path, capsys, where):
    made = make(World(tp=2, dp=2), PARAMS)
    source = made.save(tmp_path / "in")
    name = made.optim_name(1, 1) if where == "optim" else made.model_name(1)
    path = tmp_path / "in" / name
    storage = max(load_pickle(str(path)).archive.storages.values(), key=lambda ref: ref.nbytes)
    data = bytearray(path.read_bytes())
    data[storage.byte_offset + 3] ^= 4
    path.write_bytes(data)
    assert reshard(source, tmp_path / "out", "--dp", 3) == 2
    assert name in capsys.readouterr().err
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize("how", ["truncated", "empty", "missing", "text", "another rank's"])
def test_a_damaged_source_is_refused_by_name(tmp_path, capsys, how):
    made = make(World(tp=2, dp=2), PARAMS)
    source = made.save(tmp_path / "in")
    path = tmp_path / "in" / made.optim_name(1, 1)
    if how == "missing":
        path.unlink()
    elif how == "another rank's":
        path.write_bytes((tmp_path / "in" / made.optim_name(0, 1)).read_bytes())
    else:
        whole = path.read_bytes()
        path.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"no checkpoint"}[how])
    assert reshard(source, tmp_path / "out", "--dp", 3) == 2
    said = capsys.readouterr().err
    assert path.name in said
    assert "internal error" not in said
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("param_slice_mappings", None),
        ("single_partition_of_fp32_groups", []),
        ("base_optimizer_state", {"state": {}, "param_groups": None}),
        ("group_paddings", "many"),
    ],
)
def test_contradictions_of_the_source_are_refused(tmp_path, capsys, key, value):
    made = make(World(tp=2, dp=2), PARAMS)
    for dp in range(2):
        for mp in range(2):
            made.optim(dp, mp)[key] = value
    assert reshard(made.save(tmp_path / "in"), tmp_path / "out", "--dp", 3) == 2
    said = capsys.readouterr().err
    assert "internal error" not in said
    assert "optim_states.pt" in said
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_say_different_things_of_one_run_are_refused(tmp_path, capsys, stage):
    """An optimizer that counts no steps leaves little else to tell the files of two saves apart."""
    made = make(World(stage=stage, tp=2, dp=2, step=None), PARAMS)
    groups = made.optim(1, 1)["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["param_groups"]
    groups[1]["betas"] = (0.9, 0.95)
    source = made.save(tmp_path / "in")
    assert reshard(source, tmp_path / "out", "--dp", 3) == 2
    said = capsys.readouterr().err
    assert "hyperparameter 'betas' differs" in said
    assert made.optim_name(1, 1) in said
    assert leftovers(tmp_path / "out") == []
    assert reshard(source, tmp_path / "out", "--dp", 3, "--on-drift", "first") == 0
    assert "hyperparameter 'betas' differs; the first is written" in capsys.readouterr().out
    found = load_pickle(tmp_path / "out" / made.optim_name(0, 1)).root["optimizer_state_dict"]
    inner = found["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    assert inner["param_groups"][1]["betas"] == (0.9, 0.999)


def test_model_state_files_of_two_steps_are_refused(tmp_path, capsys):
    made = make(World(stage=3, dp=2, step=None), PARAMS)
    made.model(0, 0)["global_steps"], made.model(0, 1)["global_steps"] = 10, 20
    assert reshard(made.save(tmp_path / "in"), tmp_path / "out", "--dp", 3) == 2
    assert "was saved at step 20" in capsys.readouterr().err


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from deepspeed_affine.cli import ds_affine
sys.exit(ds_affine(sys.argv[2:]))
"""


def test_a_disk_that_takes_no_more_leaves_the_old_output(tmp_path, source):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    assert reshard(source, tmp_path / "out", "--dp", 5) == 0
    before = contents(tmp_path / "out")
    run = [sys.executable, "-c", LIMITED, "6000", *command(source, tmp_path / "out", "--overwrite")]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "nothing was published" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2, ended.stderr
    assert contents(tmp_path / "out") == before
    assert (tmp_path / "latest").read_text() == "out"


def test_a_hostile_pickle_does_nothing(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    made = make(World(dp=2), PARAMS)
    made.model()["client"] = Hostile()
    made.optim(0)["loss_scaler"] = Hostile()
    assert reshard(made.save(tmp_path / "in"), tmp_path / "out", "--dp", 3) in (0, 2)
    assert not (tmp_path / "executed").exists()


def test_a_state_of_more_elements_than_its_partition_is_not_cut_short(tmp_path, capsys):
    made = make(World(stage=3, dp=2), PARAMS)
    for dp in range(2):
        state = made.optim(dp)["optimizer_state_dict"]["state"][1]
        state["exp_avg"] = torch.cat([state["exp_avg"], torch.ones(5)])
    assert reshard(made.save(tmp_path / "in"), tmp_path / "out", "--dp", 3) == 2
    assert "its partition has" in capsys.readouterr().err
