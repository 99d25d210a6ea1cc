"""Names and paths are data: whatever they hold, they are ordinary, or refused before anything is written."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from converting import assert_converts, assert_refuses, convert, listing, same, stored, wrong
from synthetic import COLUMN, Param, World, make, random_full, save


def made_of(*names, stage=1, dp=2, **world):
    params = [Param(name, random_full((4, 3), index)) for index, name in enumerate(names)]
    return make(World(stage=stage, dp=dp, **world), params)


ODD_PARAMS = [
    "a+b",
    "a(b)c",
    "a[0]",
    "^start$",
    "a|b",
    "a.*b",
    "a\\d",
    "a{2}",
    "dir/inner",
    "with space",
    " lead",
    "ünï.β.weight",
    "日本語",
    "emoji🙂",
    "-dash",
    "a" * 200,
    "line\nbreak",
    "tab\tin",
    "con.pt",
    "fp32.pt",
    ".hidden",
    "...",
    "~home",
    "%s%d",
    "quote'\"",
    "back\\slash",
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ODD_PARAMS)
def test_odd_parameter_names_are_kept(tmp_path, name, stage):
    made = made_of(name, "plain", stage=stage)
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_all_odd_names_at_once_under_tensor_parallelism(tmp_path, stage):
    params = [Param(name, random_full((4, 3), index), COLUMN) for index, name in enumerate(ODD_PARAMS)]
    assert_converts(make(World(stage=stage, tp=2, dp=2), params), tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../evil", "../../evil", "a/../../evil", "/etc/evil", "a//b", "", ".", "..", "a/.", "a/", "nul\0", "\ud800"],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_names_that_would_leave_the_output_are_refused(tmp_path, capsys, name, stage):
    folder = made_of(name, stage=stage).save(tmp_path / "ckpt")
    assert "its name" in assert_refuses(folder, tmp_path, capsys)


@pytest.mark.parametrize("state", ["../evil", "/evil", "", "a/../b", "fp32"])
@pytest.mark.parametrize("stage", [1, 3])
def test_state_names_that_cannot_be_files_are_refused(tmp_path, capsys, state, stage):
    made = made_of("w", stage=stage)
    for rank in range(2):
        optimizer = made.optim(rank)
        inner = optimizer["base_optimizer_state"] if stage == 1 else optimizer["optimizer_state_dict"]
        group = inner["state"][0]
        group[state] = group["exp_avg"]
    assert "name" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


@pytest.mark.parametrize("state", ["with space", "exp+avg", "moment/um", "ß", "step.pt"])
def test_odd_state_names_are_kept(tmp_path, state):
    assert_converts(made_of("w", states=("exp_avg", state)), tmp_path)


@pytest.mark.parametrize("names", [("a", "a/exp_avg.pt"), ("optimizer_state.pt",), ("a", "a/step.pt/x")])
def test_names_that_claim_one_file_twice_are_refused(tmp_path, capsys, names):
    folder = made_of(*names).save(tmp_path / "ckpt")
    assert "output file zero/" in assert_refuses(folder, tmp_path, capsys)


def test_a_name_longer_than_a_file_name_may_be_is_refused(tmp_path, capsys):
    folder = made_of("x" * 300).save(tmp_path / "ckpt")
    assert "too long" in assert_refuses(folder, tmp_path, capsys)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link", "link to folder", "universal"])
def test_an_existing_output_is_refused_and_kept(tmp_path, capsys, kind):
    made = made_of("w")
    folder = made.save(tmp_path / "ckpt")
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("precious")
    elif kind == "universal":
        assert convert(made_of("another").save(tmp_path / "other"), target) == 0
    elif kind == "dangling link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "precious").write_text("x")
        if kind == "folder":
            (tmp_path / "real").rename(target)
        else:
            target.symlink_to(tmp_path / "real")
    assert "exists already" in assert_refuses(folder, tmp_path, capsys)


def test_an_empty_output_folder_is_taken_over(tmp_path):
    (tmp_path / "out").mkdir()
    assert_converts(made_of("w"), tmp_path)


def test_input_by_a_link_and_files_that_are_links(tmp_path):
    made = made_of("w")
    made.save(tmp_path / "store")
    os.mkdir(tmp_path / "linked")
    for name in made.files:
        os.symlink(tmp_path / "store" / name, tmp_path / "linked" / name)
    os.symlink(tmp_path / "store", tmp_path / "folder")
    for source in ("linked", "folder"):
        assert convert(tmp_path / source, tmp_path / f"out-{source}") == 0
        assert wrong(made, tmp_path / f"out-{source}") == []
        assert not os.path.islink(tmp_path / f"out-{source}" / made.model_name())
    assert convert(tmp_path / "folder", tmp_path / "store") == 2


def test_a_parent_that_may_not_be_written(tmp_path, capsys, monkeypatch):
    folder = made_of("w").save(tmp_path / "ckpt")

    real = os.mkdir

    def refuse(path, *args, **kwargs):
        if os.fspath(path).endswith(".partial"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        real(path, *args, **kwargs)

    # Simulated, because root may write anywhere.
    monkeypatch.setattr(os, "mkdir", refuse)
    assert "Permission denied" in assert_refuses(folder, tmp_path, capsys)
    assert convert(folder, tmp_path / "new" / "out") == 2
    assert not (tmp_path / "new").exists()


def test_a_parent_that_is_a_file(tmp_path, capsys):
    folder = made_of("w").save(tmp_path / "ckpt")
    (tmp_path / "file").write_text("x")
    assert convert(folder, tmp_path / "file" / "out") == 2
    assert "Not a directory" in capsys.readouterr().err


def test_folders_made_for_the_output_go_with_a_failure(tmp_path, capsys):
    made = made_of("w", tp=2)
    made.optim(0, 1)["single_partition_of_fp32_groups"][0][0] += 1
    folder = made.save(tmp_path / "ckpt")
    assert convert(folder, tmp_path / "new" / "deeper" / "out") == 2
    assert not (tmp_path / "new").exists()


def test_a_pointer_that_cannot_be_written_says_that_the_output_is_complete(tmp_path, capsys):
    made = made_of("w")
    folder = made.save(tmp_path / "ckpt")
    (tmp_path / "latest_universal").mkdir()
    assert convert(folder, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "latest_universal" in said
    assert "is complete" in said
    assert wrong(made, tmp_path / "out") == []


def test_the_pointer_follows_the_newest_conversion(tmp_path):
    folder = made_of("w").save(tmp_path / "ckpt")
    for name in ("one", "two"):
        assert convert(folder, tmp_path / name) == 0
        assert (tmp_path / "latest_universal").read_text() == name


def test_printing_survives_any_encoding(tmp_path):
    made = make(World(tp=2), [Param("日本", random_full((4, 2), 1), COLUMN)])
    made.model()["module"]["β-extra"] = "no tensor"
    folder = made.save(tmp_path / "ckpt")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for option, target in (("--json", "json"), ("--debug", "text")):
        command = [
            sys.executable,
            "-c",
            "import sys; from deepspeed_affine.cli import ds_to_universal as m; sys.exit(m())",
        ]
        command += ["--affine", option, "--input_folder", folder, "--output_folder", str(tmp_path / target)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert run.returncode == 0, run.stderr
        if option == "--json":
            assert json.loads(run.stdout)["output_folder"].endswith("json")
    assert same(stored(tmp_path / "text", "日本", "fp32"), made.truth["日本", "fp32"])
    assert torch.is_tensor(stored(tmp_path / "json", "日本", "exp_avg"))


def test_a_folder_of_another_kind_says_which_was_meant(tmp_path, capsys):
    made = make(World(dp=2), [Param("w", random_full((4, 3), 1)), Param("b", random_full((3,), 2))])
    made.save(tmp_path / "run" / "global_step7")
    (tmp_path / "run" / "latest").write_text("global_step7")
    assert "global_step7" in assert_refuses(tmp_path / "run", tmp_path, capsys)
    (tmp_path / "run" / "latest").unlink()
    assert "global_step7" in assert_refuses(tmp_path / "run", tmp_path, capsys)
    (tmp_path / "empty").mkdir()
    assert "no checkpoint file" in assert_refuses(tmp_path / "empty", tmp_path, capsys)
    assert "cannot be listed" in assert_refuses(tmp_path / "absent", tmp_path, capsys)
    file = tmp_path / "run" / "global_step7" / made.model_name()
    assert "is a file" in assert_refuses(file, tmp_path, capsys)
    assert convert(tmp_path / "run" / "global_step7", tmp_path / "uni") == 0
    assert "universal checkpoint already" in assert_refuses(tmp_path / "uni", tmp_path, capsys)
    assert "no checkpoint file" in assert_refuses(tmp_path / "uni" / "zero", tmp_path, capsys)


def test_other_files_of_the_folder_are_left_alone(tmp_path):
    made = make(World(dp=2), [Param("w", random_full((4, 3), 1)), Param("b", random_full((3,), 2))])
    folder = tmp_path / "ckpt"
    made.save(folder)
    save({"x": 1}, folder / "scheduler.pt")
    (folder / "zero_to_fp32.py").write_text("raise SystemExit('never run')")
    (folder / "model.safetensors").write_bytes(b"\0" * 10)
    target = assert_converts(made, tmp_path)
    assert {"scheduler.pt", "zero_to_fp32.py", "model.safetensors"}.isdisjoint(listing(target))


def test_a_nul_in_the_output_is_refused(tmp_path, capsys):
    folder = made_of("w").save(tmp_path / "ckpt")
    assert convert(folder, f"{tmp_path}/o\0ut") == 2
    assert "NUL" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["ckpt"]
