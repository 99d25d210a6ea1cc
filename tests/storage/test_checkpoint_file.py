"""A file under another rank's name is refused; files that do not say their name are taken at their word."""

import os
import shutil

import pytest
import torch

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.checkpoint_file import load_checkpoint_file

NAMES = [
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_model_states.pt",
    "layer_03-model_01-model_states.pt",
    "layer_0_expert_2_mp_rank_00_model_states.pt",
    "expp_rank_1_mp_rank_00_optim_states.pt",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("other", [*NAMES, "zero_pp_rank_10_mp_rank_00_optim_states.pt", "notes.pt", "archive.pt"])
def test_another_ranks_file_is_refused_by_both_names(tmp_path, name, other):
    torch.save({"a": 1}, tmp_path / other)
    os.rename(tmp_path / other, tmp_path / "moving")
    os.rename(tmp_path / "moving", tmp_path / name)
    same_place = name == other or {name, other} == set(NAMES[1:3]) or other in ("notes.pt", "archive.pt")
    if same_place:
        assert load_checkpoint_file(str(tmp_path / name)).root == {"a": 1}
        return
    with pytest.raises(CheckpointFormatError) as caught:
        load_checkpoint_file(str(tmp_path / name))
    assert caught.value.file == str(tmp_path / name)
    assert f"was saved as {other}" in caught.value.message


def test_a_file_written_through_an_open_file_does_not_say_its_name(tmp_path):
    for name in NAMES:
        with open(tmp_path / name, "wb") as file:
            torch.save({"a": 1}, file)
        assert load_checkpoint_file(str(tmp_path / name)).archive.prefix == "archive"


def test_a_file_of_any_other_name_may_hold_any(tmp_path):
    torch.save({"a": 1}, tmp_path / NAMES[0])
    shutil.copy(tmp_path / NAMES[0], tmp_path / "copy.pt")
    assert load_checkpoint_file(str(tmp_path / "copy.pt")).root == {"a": 1}
