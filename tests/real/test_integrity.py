"""Ranks that must agree and do not are refused by name; a checkpoint's pickles are never executed."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import real_shards
import torch

from deepspeed_affine.cli import ds_to_universal
from deepspeed_affine.hooks import stock
from deepspeed_affine.parity import compare_universal

pytestmark = pytest.mark.real

REPLICATED = "model.norm.weight"
QUIET_NAN = 0x7FC00001


@pytest.fixture(autouse=True)
def _deepspeed_classes(monkeypatch):
    """Files hold DeepSpeed's own classes, which this module rewrites with torch as a user's script would."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    importlib.import_module("deepspeed")


def convert(folder: Path, target: Path, *options: str) -> int:
    arguments = ["--affine", "--input_folder", str(folder), "--output_folder", str(target), "--inject_missing_state"]
    return ds_to_universal([*arguments, "--no-fsync", *options])


def copy_of(trained, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(trained.folder, folder)
    return folder


def optimizer_file(folder: Path, tp: int, dp: int = 0) -> Path:
    return folder / f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"


def edit_word(path: Path, state: str, name: str, element: int, change) -> None:
    """``change`` one 32-bit word, the ``element``-th, of the fragment of ``name`` that ``path`` holds."""
    saved = torch.load(path, weights_only=False)
    optimizer = saved["optimizer_state_dict"]
    for group, mapping in enumerate(optimizer["param_slice_mappings"]):
        if name in mapping:
            flat = optimizer["single_partition_of_fp32_groups"][group]
            if state != "fp32":
                flat = optimizer["base_optimizer_state"]["state"][group][state]
            words = flat.view(torch.int32)
            position = mapping[name].start + element
            words[position] = change(int(words[position]))
            torch.save(saved, path)
            return
    raise KeyError(f"{path} holds no fragment of {name}")


@pytest.mark.quick
@pytest.mark.cases("tp2_zero1_uneven")
@pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq"])
def test_one_bit_between_two_ranks_is_refused_by_name(real, tmp_path, capsys, state):
    folder = copy_of(real.trained("tp2_zero1_uneven"), tmp_path)
    edit_word(optimizer_file(folder, tp=1), state, REPLICATED, 5, lambda word: word ^ 1)
    assert convert(folder, tmp_path / "universal") == 2
    said = capsys.readouterr().err
    assert REPLICATED in said
    assert state in said
    assert "tp 0 and tp 1 hold different bytes" in said
    assert re.search(r"first at element \(?5\b.*1 of \d+ elements differ", said), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


@pytest.mark.cases("tp2_zero1_uneven")
def test_nan_replicas_are_compared_as_bytes(real, tmp_path, capsys):
    folder = copy_of(real.trained("tp2_zero1_uneven"), tmp_path)
    for tp in (0, 1):
        edit_word(optimizer_file(folder, tp), "fp32", REPLICATED, 5, lambda word: QUIET_NAN)
    assert convert(folder, tmp_path / "same") == 0
    value = real_shards.read_state(tmp_path / "same", REPLICATED, "fp32")
    assert value.view(torch.int32)[5] == QUIET_NAN
    edit_word(optimizer_file(folder, 1), "fp32", REPLICATED, 5, lambda word: QUIET_NAN + 1)
    capsys.readouterr()
    assert convert(folder, tmp_path / "other") == 2
    assert REPLICATED in capsys.readouterr().err


def fragments(path: Path) -> dict[str, tuple[int, int]]:
    optimizer = torch.load(path, weights_only=False)["optimizer_state_dict"]
    return {name: (at.start, at.numel) for mapping in optimizer["param_slice_mappings"] for name, at in mapping.items()}


@pytest.mark.cases("tp2dp2_mix")
def test_replicas_cut_at_different_places_are_compared(real, tmp_path, capsys):
    trained = real.trained("tp2dp2_mix")
    truth = trained.truth()
    first = {tp: fragments(optimizer_file(trained.folder, tp, dp=0)) for tp in (0, 1)}
    second = {tp: fragments(optimizer_file(trained.folder, tp, dp=1)) for tp in (0, 1)}
    whole = {name: states["fp32"].numel() for name, states in truth[0]["params"].items()}
    replicated = {
        name
        for name in whole
        if real_shards.same_bytes(truth[0]["params"][name]["fp32"], truth[1]["params"][name]["fp32"])
    }
    held = {name: [first[tp].get(name, (0, 0))[1] for tp in (0, 1)] for name in replicated}
    cut_differently = sorted(name for name, counts in held.items() if counts[0] != counts[1])
    assert cut_differently, f"no replicated parameter is cut differently: {held}"
    name = cut_differently[0]
    # An element that TP rank 0 keeps in its first partition and TP rank 1 in its second, or the other way round.
    tp = 0 if held[name][0] > held[name][1] else 1
    element = held[name][1 - tp]
    assert second[1 - tp][name][1] == whole[name] - element
    folder = copy_of(trained, tmp_path)
    assert convert(folder, tmp_path / "before") == 0
    edit_word(optimizer_file(folder, 1 - tp, dp=1), "exp_avg", name, 0, lambda word: word ^ 1)
    capsys.readouterr()
    assert convert(folder, tmp_path / "after") == 2
    said = capsys.readouterr().err
    assert f"parameter {name!r}, state 'exp_avg': tp 0 and tp 1 hold different bytes" in said
    shape = tuple(truth[0]["params"][name]["fp32"].shape)
    where = tuple(int(index) for index in np.unravel_index(element, shape))
    assert re.search(rf"first at element ({re.escape(str(where))}|{element});", said), said


class Hostile:
    """Unpickling this runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.quick
@pytest.mark.cases("zero1_fp32")
@pytest.mark.parametrize("kind", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_pickle_that_runs_a_command_runs_nothing(real, tmp_path, kind):
    folder = copy_of(real.trained("zero1_fp32"), tmp_path)
    marker = tmp_path / "marker"
    saved = torch.load(folder / kind, weights_only=False)
    saved["hostile"] = Hostile(marker)
    if "optimizer_state_dict" in saved and isinstance(saved["optimizer_state_dict"], dict):
        saved["optimizer_state_dict"]["hostile"] = Hostile(marker)
    torch.save(saved, folder / kind)
    assert not marker.exists()
    assert convert(folder, tmp_path / "universal") in (0, 2)
    assert not marker.exists()
    torch.load(folder / kind, weights_only=False)
    assert marker.exists(), "the trap itself does not work"


VANISHING = """
class Schedule:
    def __init__(self, warmup):
        self.warmup = warmup
        self.history = {"lr": [0.1, 0.2]}

class Pair(tuple):
    pass
"""


@pytest.mark.cases("zero1_fp32")
def test_objects_of_classes_that_are_gone_come_out_as_deepspeed_writes_them(real, tmp_path, monkeypatch):
    code = tmp_path / "code"
    code.mkdir()
    (code / "vanishing_training_code.py").write_text(VANISHING)
    folder = copy_of(real.trained("zero1_fp32"), tmp_path)
    monkeypatch.syspath_prepend(str(code))
    module = importlib.import_module("vanishing_training_code")
    for path in [folder / "mp_rank_00_model_states.pt", *folder.glob("*_optim_states.pt")]:
        saved = torch.load(path, weights_only=False)
        extra = {"schedule": module.Schedule(3), "pair": module.Pair((1, 2))}
        saved["extra"] = extra
        if path.name.endswith("optim_states.pt"):
            saved["optimizer_state_dict"]["extra"] = extra
        torch.save(saved, path)
    sys.modules.pop("vanishing_training_code")
    monkeypatch.undo()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vanishing_training_code")
    ours = tmp_path / "ours" / "universal"
    ours.parent.mkdir()
    assert convert(folder, ours) == 0
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(part for part in (str(code), inherited) if part))
    theirs = Path(stock.plain_workdir()) / "universal"
    try:
        ran = stock.convert(folder, theirs, inject_missing_state=True)
        assert ran.ok, ran.log
        report = compare_universal(ours, theirs)
    finally:
        shutil.rmtree(theirs.parent)
    assert report.different == ()
    assert b"vanishing_training_code" in (ours / "zero" / "optimizer_state.pt").read_bytes()
