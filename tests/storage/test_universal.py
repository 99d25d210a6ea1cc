"""The catalogue of a universal folder, and what its files may hold."""

from __future__ import annotations

import os

import pytest
import torch

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.universal import is_universal, read_number, read_state, scan_universal


def write(folder, name, value):
    path = folder.joinpath(*name.split("/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def test_parameters_states_and_what_belongs_to_nothing(tmp_path):
    folder = tmp_path / "u"
    for name in ("zero/b/fp32.pt", "zero/b/exp_avg.pt", "zero/a/c d/fp32.pt", "zero/a/fp32.pt"):
        write(folder, name, {"param": torch.ones(2)})
    write(folder, "zero/optimizer_state.pt", {})
    write(folder, "mp_rank_10_model_states.pt", {})
    write(folder, "mp_rank_02_model_states.pt", {})
    write(folder, "zero_pp_rank_0_mp_rank_00_optim_states.pt", {})
    write(folder, "zero/stray.pt", {})
    (folder / "zero" / "b" / "notes.txt").write_text("x")
    (folder / "tmp").mkdir()
    (folder / "affine_manifest.json").write_text("{}")
    found = scan_universal(f"{folder}/")
    assert list(found.states) == ["a", "a/c d", "b"]
    assert list(found.states["b"]) == ["exp_avg", "fp32"]
    file = found.states["a/c d"]["fp32"]
    assert (file.param, file.state, file.name) == ("a/c d", "fp32", "zero/a/c d/fp32.pt")
    assert file.size == os.path.getsize(file.path)
    assert [model.mp for model in found.model_files] == [2, 10]
    assert found.optimizer_state == str(folder / "zero" / "optimizer_state.pt")
    assert found.manifest == str(folder / "affine_manifest.json")
    assert set(found.others) == {
        "tmp/",
        "zero/b/notes.txt",
        "zero/stray.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    }
    assert set(found.sizes) == {
        "affine_manifest.json",
        "mp_rank_02_model_states.pt",
        "mp_rank_10_model_states.pt",
        "zero/a/c d/fp32.pt",
        "zero/a/fp32.pt",
        "zero/b/exp_avg.pt",
        "zero/b/fp32.pt",
        "zero/optimizer_state.pt",
    }


def test_which_folders_are_universal(tmp_path):
    assert not is_universal(tmp_path)
    with pytest.raises(CheckpointFormatError, match="no file of a universal checkpoint"):
        scan_universal(tmp_path)
    with pytest.raises(CheckpointFormatError, match="cannot be listed"):
        scan_universal(tmp_path / "gone")
    (tmp_path / "zero").mkdir()
    assert is_universal(tmp_path)
    assert scan_universal(tmp_path).states == {}


@pytest.mark.parametrize(
    ("value", "shape", "number", "entries"),
    [
        ({"cat_dim": 0, "param": torch.ones(2, 3)}, (2, 3), None, {"cat_dim": 0}),
        (torch.ones(4), (4,), None, None),
        (torch.tensor(7.0), (), None, None),
        (7, None, 7, None),
        (0.5, None, 0.5, None),
    ],
)
def test_what_a_file_holds(tmp_path, value, shape, number, entries):
    found = read_state(str(write(tmp_path, "x.pt", value)))
    assert (None if found.tensor is None else found.tensor.shape) == shape
    assert (found.number, found.entries) == (number, entries)


@pytest.mark.parametrize("value", [{"params": torch.ones(2)}, {"param": 3}, "text", None, [torch.ones(2)], {}])
def test_files_that_hold_nothing_of_a_parameter(tmp_path, value):
    path = write(tmp_path, "x.pt", value)
    with pytest.raises(CheckpointFormatError, match=r"x\.pt: holds a"):
        read_state(str(path))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float64", 0.1),
        ("float32", 7.0),
        ("float16", 1.5),
        ("int64", -(2**40)),
        ("int32", -5),
        ("uint8", 200),
        ("bool", True),
    ],
)
def test_numbers_kept_as_tensors(tmp_path, dtype, value):
    ref = read_state(str(write(tmp_path, "x.pt", torch.tensor(value, dtype=getattr(torch, dtype))))).tensor
    with ByteReader() as reader:
        assert read_number(ref, reader) == value
        other = read_state(str(write(tmp_path, "y.pt", torch.tensor(1.0, dtype=torch.complex64)))).tensor
        assert read_number(other, reader) is None
        many = read_state(str(write(tmp_path, "z.pt", torch.ones(3)))).tensor
        assert read_number(many, reader) is None
