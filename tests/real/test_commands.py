"""The commands as a user starts them: conversion, hand-over, parity and the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.hooks import stock
from deepspeed_affine.parity import compare_universal

pytestmark = pytest.mark.real

REPOSITORY = Path(__file__).parent.parent.parent


def start(command: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a console command as its script would, from ``cwd``."""
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *inherited]),
    }
    script = f"import sys; from deepspeed_affine.cli import {command}; sys.exit({command}())"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def workdir():
    """A folder whose path DeepSpeed's converter can take as an output path, which pytest's own is not always."""
    made = Path(stock.plain_workdir())
    yield made
    shutil.rmtree(made)


@pytest.mark.quick
@pytest.mark.cases("tp2_zero1_uneven")
def test_the_command_and_deepspeeds_own_write_the_same(real, workdir):
    folder = str(real.trained("tp2_zero1_uneven").folder)
    options = ["--input_folder", folder, "--num_extract_workers", "1", "--num_merge_workers", "1", "--output_folder"]
    ours, theirs = workdir / "ours" / "universal", workdir / "theirs" / "universal"
    for target in (ours, theirs):
        target.parent.mkdir()
    done = start("ds_to_universal", "--affine", *options, str(ours), cwd=workdir)
    assert done.returncode == 0, done.stderr
    handed_over = start("ds_to_universal", *options, str(theirs), cwd=workdir)
    assert handed_over.returncode == 0, handed_over.stderr
    assert "*** Done!" in handed_over.stdout
    assert "*** Done!" not in done.stdout
    assert compare_universal(ours, theirs).different == ()
    for target in (ours, theirs):
        assert (target.parent / "latest_universal").read_text() == "universal"


@pytest.mark.cases("zero1_fp32")
def test_hand_over_uses_several_processes_as_deepspeed_does(real, workdir):
    folder = str(real.trained("zero1_fp32").folder)
    options = ["--input_folder", folder, "--inject_missing_state", "--output_folder", str(workdir / "universal")]
    handed_over = start("ds_to_universal", *options, "--num_extract_workers", "2", cwd=workdir)
    assert handed_over.returncode == 0, handed_over.stderr
    assert compare_universal(workdir / "universal", real.stock("zero1_fp32").folder).different == ()


@pytest.mark.cases("zero1_fp32")
def test_hand_over_passes_deepspeeds_refusals_through(real, workdir):
    folder = str(real.trained("zero1_fp32").folder)
    missing = start("ds_to_universal", "--input_folder", folder, cwd=workdir)
    assert missing.returncode == 2
    assert "--output_folder" in missing.stderr
    refused = start("ds_to_universal", "--input_folder", folder, "--output_folder", str(workdir / "x"), cwd=workdir)
    assert refused.returncode == 1
    assert "universal_checkpoint_info" in refused.stderr


@pytest.mark.cases("tp2_zero1_uneven", "zero1_amsgrad", "zero1_momentum", "tp2_zero1_frozen")
def test_parity_exit_codes(real, capsys, workdir):
    def parity(case: str, *options: str) -> tuple[int, str]:
        folder = str(real.trained(case).folder)
        code = ds_affine(["parity", "--input_folder", folder, "--inject_missing_state", *options])
        return code, capsys.readouterr().out

    code, said = parity("tp2_zero1_uneven", "--json", "--workdir", str(workdir / "kept"))
    document = json.loads(said)
    assert (code, document["exit_code"], document["report"]["equal"]) == (0, 0, True)
    assert document["deepspeed"] == stock.installed_version()
    assert document["report"]["files"]["equal"] > 30
    assert compare_universal(workdir / "kept/affine/universal", workdir / "kept/deepspeed/universal").equal

    code, said = parity("zero1_amsgrad")
    assert code == 1
    assert "DIFFERENT: zero/up.weight/max_exp_avg_sq.pt: only we wrote it" in said

    code, said = parity("zero1_momentum")
    assert code == 2
    assert "DeepSpeed's converter failed: KeyError: 'exp_avg'" in said
    assert "our converter done" in said

    code, said = parity("tp2_zero1_frozen")
    assert code == 0
    assert said.count("[frozen_under_autotp]") == 3
    assert "DeepSpeed stops unless --no_strict: AssertionError: Unused patterns=" in said


@pytest.mark.cases("zero1_fp32")
def test_an_older_copy_inside_the_folder_is_left_out_and_said(real, capsys, workdir):
    """P23: DeepSpeed itself, given the folder as it is, mixes the copy's files in and does not notice."""
    folder = workdir / "checkpoint"
    shutil.copytree(real.trained("zero1_fp32").folder, folder)
    older = folder / "backup"
    shutil.copytree(real.trained("zero1_fp32").folder, older)
    for path in older.glob("*_optim_states.pt"):
        saved = torch.load(path, weights_only=False)
        for flat in saved["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
            flat.detach().zero_()
        torch.save(saved, path)
    code = ds_affine(["parity", "--input_folder", str(folder), "--inject_missing_state"])
    said = capsys.readouterr().out
    assert code == 0
    assert "expected difference [nested_files]: backup/" in said
    mixed = stock.convert(folder, workdir / "mixed" / "universal", inject_missing_state=True)
    clean = real.stock("zero1_fp32").folder
    assert not mixed.ok or compare_universal(workdir / "mixed" / "universal", clean).different != ()


@pytest.mark.quick
def test_the_demo_trains_converts_and_agrees(workdir):
    done = start("ds_affine", "demo", "--output", "shown", cwd=workdir)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "equal" in lines
    assert not any("DIFFERENT" in line for line in lines)
    shown = workdir / "shown"
    for said, place in (("checkpoint:", "checkpoint/global_step5"), ("universal, by us:", "affine/universal")):
        assert any(line.startswith(said) and line.endswith(str(shown / place)) for line in lines)
        assert (shown / place).is_dir()
    widths = {
        tuple(torch.load(path, weights_only=False)["module"]["blocks.0.attention.k_proj.weight"].shape)
        for path in (shown / "checkpoint/global_step5").glob("mp_rank_*_model_states.pt")
    }
    assert widths == {(16, 48), (8, 48)}, "three key/value heads do not divide over two ranks"
    again = start("ds_affine", "demo", "--output", "shown", cwd=workdir)
    assert again.returncode == 2
    assert "exists and is not empty" in again.stderr
