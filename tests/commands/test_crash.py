"""Killed at any moment, a conversion leaves the old state or the new one, and the same command finishes it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from moments import Moments
from synthetic import COLUMN, Cut, Param, World, make, random_full

SUPPORT = Path(__file__).parents[1] / "support"
MOMENTS = 22

# Slower writes, so that most moments fall between the first file and the last.
SLOW = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
real = os.pwrite
def slow(fd, data, offset):
    time.sleep(0.002)
    return real(fd, data, offset)
os.pwrite = slow
from deepspeed_affine.cli import ds_to_universal
sys.exit(ds_to_universal(sys.argv[2:]))
"""


def command(source, target, *options):
    folders = ["--input_folder", str(source), "--output_folder", str(target)]
    return [sys.executable, "-c", SLOW, str(SUPPORT), "--affine", "--json", *folders, *options]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkpoint(folder, stage, seed=0):
    params = [Param(f"p{n}", random_full((24, 50), seed + n), COLUMN) for n in range(25)]
    params.append(Param("row", random_full((30, 64), seed + 98), Cut("row")))
    params.append(Param("norm", random_full((7,), seed + 99)))
    return make(World(stage=stage, tp=2, dp=2), params).save(folder)


def killed(arguments, seconds):
    """Run and kill after ``seconds``; whether it had not ended by itself."""
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
    return False


def finished(arguments):
    run = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.heavy
@pytest.mark.parametrize("replacing", [False, True], ids=["fresh", "overwrite"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_kill_at_a_random_moment_costs_nothing(tmp_path, stage, replacing):
    source = checkpoint(tmp_path / "in", stage)
    target = tmp_path / "out"
    options = ["--overwrite"] if replacing else []
    began = time.monotonic()
    finished(command(source, tmp_path / "undisturbed"))
    whole = time.monotonic() - began
    right = contents(tmp_path / "undisturbed")
    old = None
    if replacing:
        finished(command(checkpoint(tmp_path / "before", stage, seed=500), target))
        old = contents(target)
    moments = Moments(whole, f"stage {stage}")
    reused = stopped = 0
    for _ in range(MOMENTS):
        if killed(command(source, target, *options), moments.between(0.1, 1.05)):
            stopped += 1
        else:
            moments.was_late()
        if target.exists():
            assert contents(target) in ([right, old] if replacing else [right])
        elif replacing:
            pytest.fail("neither the old output nor the new one is there")
        with moments.another():
            result = finished(command(source, target, *options))
        reused += result.get("reused_files", 0)
        assert contents(target) == right
        assert (tmp_path / "latest_universal").read_text() == "out"
        assert not (tmp_path / ".out.partial").exists()
        if replacing:
            finished([*command(tmp_path / "before", target), "--overwrite"])
        else:
            target.rename(tmp_path / "gone")
            for path in sorted((tmp_path / "gone").rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            (tmp_path / "gone").rmdir()
    # The test is worth nothing where kills come too early or too late.
    assert stopped >= MOMENTS // 2
    assert reused >= MOMENTS
