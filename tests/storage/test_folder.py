"""The folder catalogue: real names, every kind of hole, and folders that are none."""

import os

import pytest
import torch

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.folder import parse_name, scan_folder


def make(folder, names, **state):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        torch.save(state, folder / name)
    return folder


def optim(dp, mp=0, prefix=""):
    return f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def zero_model(dp, mp=0, prefix=""):
    return f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"


def model(mp=0):
    return f"mp_rank_{mp:02d}_model_states.pt"


def messages(folder):
    with pytest.raises(CheckpointFormatError) as caught:
        scan_folder(folder)
    return [fault.message for fault in caught.value.faults]


@pytest.mark.parametrize("prefix", ["", "bf16_", "fp16_"])
@pytest.mark.parametrize("stage", [1, 3])
def test_every_prefix_of_both_kinds(tmp_path, prefix, stage):
    models = [model()] if stage == 1 else [zero_model(0, 0, prefix), zero_model(1, 0, prefix)]
    folder = make(tmp_path / "c", [*models, optim(0, 0, prefix), optim(1, 0, prefix)], dp_world_size=2, mp_world_size=1)
    found = scan_folder(folder)
    assert [file.name for file in found.optim_files] == [optim(0, 0, prefix), optim(1, 0, prefix)]
    assert {file.prefix for file in found.optim_files} == {prefix}
    assert len(found.zero_model_files) == (2 if stage == 3 else 0)
    assert (found.dp_degree, found.mp_degree) == (2, 1)


def test_ranks_are_in_numeric_order_beyond_ten_and_a_hundred(tmp_path):
    names = [optim(dp, mp) for dp in range(12) for mp in (0, 99, *range(1, 99), 100, 101)]
    folder = make(tmp_path / "c", [], dp=1)
    for name in [*names, *(model(mp) for mp in range(102))]:
        (folder / name).write_bytes(b"x")
    torch.save({"dp_world_size": 12, "mp_world_size": 102}, folder / model(0))
    found = scan_folder(folder)
    assert [(file.dp, file.mp) for file in found.optim_files] == [(dp, mp) for dp in range(12) for mp in range(102)]
    assert [file.mp for file in found.model_files] == list(range(102))
    assert found.find("zero_optim", dp=11, mp=100).name == "zero_pp_rank_11_mp_rank_100_optim_states.pt"
    with pytest.raises(CheckpointFormatError, match="rank 12"):
        found.find("zero_optim", dp=12, mp=0)


def test_pipeline_expert_and_old_names(tmp_path):
    names = [
        model(0),
        optim(0).replace("_optim", "optim"),
        "layer_00-model_00-model_states.pt",
        "layer_02-model_00-model_states.pt",
        "layer_10-model_00-model_states.pt",
        "layer_0_expert_0_mp_rank_00_model_states.pt",
        "layer_0_expert_1_mp_rank_01_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ]
    found = scan_folder(make(tmp_path / "c", [*names, "zero_to_fp32.py.pt"], dp_world_size=1, mp_world_size=1))
    assert [file.layer for file in found.layer_files] == [0, 2, 10]
    assert [(file.layer, file.expert, file.mp) for file in found.expert_files] == [(0, 0, 0), (0, 1, 1)]
    assert [file.dp for file in found.expert_optim_files] == [0]
    assert found.optim_files[0].name == "zero_pp_rank_0_mp_rank_00optim_states.pt"
    assert found.other_names == ("zero_to_fp32.py.pt",)
    old = parse_name("expert_3_mp_rank_00_model_states.pt")
    assert (old.kind, old.layer, old.expert, old.mp) == ("expert", None, 3, 0)
    plain = parse_name("layer_07-model_states.pt")
    assert (plain.kind, plain.layer, plain.mp) == ("layer", 7, None)


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_00_model_states.pt.bak",
        "xmp_rank_00_model_states.pt",
        "mp_rank_0x_model_states.pt",
        "mp_rank_٣_model_states.pt",
        "layer_0_expert_0_mp_rank_00_model_states.pt\n",
        "zero_pp_rank_0_optim_states.pt",
        "latest",
    ],
)
def test_other_names_are_not_checkpoint_files(name):
    assert parse_name(name) is None


def test_missing_ranks_are_named_inside_and_at_the_end(tmp_path):
    folder = make(tmp_path / "c", [model(), optim(0), optim(2)], dp_world_size=4, mp_world_size=1)
    faults = messages(folder)
    assert len(faults) == 2
    assert str(folder / optim(1)) in faults[0]
    assert str(folder / optim(3)) in faults[1]
    assert all("missing" in fault and "the checkpoint states 4 x 1" in fault for fault in faults)


def test_missing_ranks_without_metadata_come_from_the_names(tmp_path):
    faults = messages(make(tmp_path / "c", [model(0), model(1), optim(0, 0), optim(2, 1)]))
    assert len(faults) == 4
    assert "largest ranks imply 3 x 2" in faults[0]


def test_model_files_missing(tmp_path):
    assert "no model file" in messages(make(tmp_path / "a", [optim(0)]))[0]
    faults = messages(make(tmp_path / "b", [model(0), optim(0, 0), optim(0, 1)], dp_world_size=1, mp_world_size=2))
    assert [str(tmp_path / "b" / model(1)) in fault for fault in faults] == [True]
    faults = messages(make(tmp_path / "c", [model(0), optim(0, 0), optim(0, 1)]))
    assert "expected one grid" in faults[0]


def test_extra_duplicate_mixed_empty_and_broken_files_are_all_reported_at_once(tmp_path):
    folder = make(
        tmp_path / "c",
        [model(), "mp_rank_0_model_states.pt", optim(0), optim(1), optim(2), optim(0, 0, "bf16_"), zero_model(0)],
        dp_world_size=2,
        mp_world_size=1,
    )
    (folder / optim(1)).write_bytes(b"")
    os.symlink("nowhere", folder / zero_model(1))
    (folder / "mp_rank_01_model_states.pt").mkdir()
    text = "\n".join(messages(folder))
    for expected in (
        f"{optim(2)}: is left from another save",
        "is for the same rank as",
        "mixes two checkpoints: zero_pp_rank_0_mp_rank_00_optim_states.pt and bf16_zero",
        "written by ZeRO 0 to 2",
        f"{optim(1)}: is empty",
        f"{zero_model(1)}: is a link to nothing",
        "mp_rank_01_model_states.pt: is a folder",
    ):
        assert expected in text, (expected, text)


def test_layers_and_experts_with_holes(tmp_path):
    folder = make(
        tmp_path / "c",
        [
            model(0),
            model(1),
            "layer_00-model_00-model_states.pt",
            "layer_00-model_01-model_states.pt",
            "layer_03-model_01-model_states.pt",
            "layer_0_expert_2_mp_rank_00_model_states.pt",
            "layer_0_expert_0_mp_rank_00_model_states.pt",
        ],
    )
    faults = messages(folder)
    assert len(faults) == 2
    assert "layer_03-model_00-model_states.pt" in faults[0]
    assert "layer_0_expert_1_mp_rank_00_model_states.pt" in faults[1]


def test_folders_inside_do_not_count(tmp_path):
    folder = make(tmp_path / "c", [model(), optim(0)], dp_world_size=1, mp_world_size=1)
    make(folder / "backup", [model(), optim(0), optim(1)])
    make(folder / "universal" / "zero", [])
    (folder / "offloaded_tensors" / "rank00").mkdir(parents=True)
    (folder / "offloaded_tensors" / "rank01").mkdir()
    found = scan_folder(folder)
    assert len(found.files) == 2
    assert found.offloaded == ("rank00", "rank01")
    assert set(found.other_names) == {"backup", "universal", "offloaded_tensors"}


@pytest.mark.parametrize("name", ["o+x(1)", "a [b] c", "ünï çode", "*?", "{x}", "-dash", "new\nline"])
def test_odd_paths_are_ordinary(tmp_path, monkeypatch, name):
    folder = make(tmp_path / name, [model(), optim(0)], dp_world_size=1, mp_world_size=1)
    assert len(scan_folder(f"{folder}/").files) == 2
    monkeypatch.chdir(tmp_path)
    assert scan_folder(os.path.join(".", name)).path == str(folder)


def test_folders_that_are_no_checkpoint_say_what_to_pass(tmp_path):
    step = make(tmp_path / "run" / "global_step5", [model()])
    assert f"Pass {str(step)!r}" not in messages(tmp_path)[0]
    assert f"Pass one of {str(step)!r}" in messages(tmp_path / "run")[0]
    (tmp_path / "run" / "latest").write_text("global_step5\n")
    assert f"Pass {str(step)!r}, its latest one" in messages(tmp_path / "run")[0]
    (tmp_path / "run" / "latest").write_text("gone")
    assert f"Pass one of {str(step)!r}" in messages(tmp_path / "run")[0]
    assert "is a file" in messages(step / model())[0]
    assert "cannot be listed" in messages(tmp_path / "nothing")[0]
    (tmp_path / "empty").mkdir()
    assert "no checkpoint file among 0 entries" in messages(tmp_path / "empty")[0]
    (tmp_path / "uc" / "zero").mkdir(parents=True)
    assert "universal checkpoint" in messages(tmp_path / "uc")[0]


def test_absurd_numbers_do_not_hang(tmp_path):
    names = [model(), optim(0), optim(10**15, 0), f"layer_{10**15}-model_{10**15}-model_states.pt"]
    assert len(messages(make(tmp_path / "a", names))) > 10
    stated = make(tmp_path / "b", [model(), optim(0)], dp_world_size=10**15, mp_world_size=1)
    assert len(messages(stated)) == 1000


def test_an_unreadable_model_file_is_one_of_the_faults(tmp_path):
    folder = make(tmp_path / "c", [model(), optim(1)])
    (folder / model()).write_bytes(b"PK\x03\x04 not really")
    faults = messages(folder)
    assert any("truncated or damaged" in fault for fault in faults)
    assert any(optim(0) in fault for fault in faults)
