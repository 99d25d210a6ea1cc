"""One identity for one conversion: it follows the content and the options, and nothing else."""

import json
import os
import shutil
import zipfile

import pytest
import torch
from synthetic import Param, World, make, random_full

from deepspeed_affine._version import __version__
from deepspeed_affine.commands.identity import conversion_identity, software_versions
from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.folder import scan_folder
from deepspeed_affine.storage.manifest import identity_differences

OPTIONS = {"on_drift": "error", "strict": True, "inject_missing_state": False}


def identity(folder, **options):
    return conversion_identity(scan_folder(folder), {**OPTIONS, **options}, deepspeed="0.19.8")


@pytest.fixture
def made():
    return make(World(stage=1, dp=2, tp=2), [Param("w", random_full((4, 3), 1)), Param("v", random_full((5,), 2))])


def test_every_file_is_named_with_its_size(tmp_path, made):
    folder = made.save(tmp_path / "ckpt")
    (tmp_path / "ckpt" / "zero_to_fp32.py").write_text("no file of the checkpoint")
    found = identity(folder)
    names = [entry["name"] for entry in found["source"]]
    assert names == sorted(made.files)
    assert {entry["name"]: entry["bytes"] for entry in found["source"]} == {
        name: os.path.getsize(os.path.join(folder, name)) for name in names
    }
    assert len({entry["digest"] for entry in found["source"]}) > 1
    assert found["options"] == OPTIONS
    assert json.loads(json.dumps(found)) == found
    assert str(tmp_path) not in json.dumps(found)


def test_a_copy_elsewhere_has_the_same_identity(tmp_path, made):
    folder = made.save(tmp_path / "ckpt")
    before = identity(folder)
    shutil.copytree(folder, tmp_path / "elsewhere" / "copy", copy_function=shutil.copyfile)
    assert identity(tmp_path / "elsewhere" / "copy") == before
    for name in made.files:
        os.utime(os.path.join(folder, name), ns=(1, 1))
    assert identity(folder) == before


def test_one_changed_value_changes_it_and_is_named(tmp_path, made):
    folder = made.save(tmp_path / "ckpt")
    before = identity(folder)
    made.optim(1, 0)["single_partition_of_fp32_groups"][0][0] += 1
    folder = made.save(tmp_path / "other")
    lines = identity_differences(before, identity(folder))
    assert len(lines) == 1
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt has the same size and other content" in lines[0]


def test_a_changed_number_outside_of_tensors_changes_it(tmp_path, made):
    before = identity(made.save(tmp_path / "ckpt"))
    made.model()["global_steps"] += 1
    lines = identity_differences(before, identity(made.save(tmp_path / "other")))
    assert len(lines) == 1
    assert "mp_rank_00_model_states.pt" in lines[0]


def test_options_and_versions_count(tmp_path, made):
    folder = made.save(tmp_path / "ckpt")
    before = identity(folder)
    assert identity_differences(before, identity(folder, strict=False)) == ["option strict was True and is False"]
    older = conversion_identity(scan_folder(folder), OPTIONS, deepspeed="0.18.9")
    assert identity_differences(before, older) == ["deepspeed was '0.19.8' and is '0.18.9'"]


def test_software_is_ours_deepspeeds_and_torchs():
    found = software_versions("0.19.8")
    assert found.pop("torch").split("+")[0] == torch.__version__.split("+")[0]
    assert found == {"deepspeed_affine": __version__, "deepspeed": "0.19.8"}


def test_without_checksums_the_time_of_the_last_change_stands_for_the_content(tmp_path, made):
    torch.serialization.set_crc32_options(False)
    try:
        folder = made.save(tmp_path / "ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    before = identity(folder)
    assert all("+" in entry["digest"] for entry in before["source"])
    assert identity(folder) == before
    name = sorted(made.files)[0]
    os.utime(os.path.join(folder, name), ns=(1, 1))
    lines = identity_differences(before, identity(folder))
    assert len(lines) == 1
    assert name in lines[0]


def test_files_with_checksums_do_not_carry_a_time(tmp_path, made):
    folder = made.save(tmp_path / "ckpt")
    assert all("+" not in entry["digest"] for entry in identity(folder)["source"])
    with zipfile.ZipFile(os.path.join(folder, sorted(made.files)[0])) as archive:
        assert any(info.CRC for info in archive.infolist())


def test_every_unreadable_file_is_listed(tmp_path, made):
    folder = made.save(tmp_path / "ckpt")
    scanned = scan_folder(folder)
    names = sorted(made.files)
    with open(os.path.join(folder, names[0]), "r+b") as file:
        file.truncate(100)
    os.remove(os.path.join(folder, names[-1]))
    with pytest.raises(CheckpointFormatError) as caught:
        conversion_identity(scanned, OPTIONS, deepspeed="0.19.8")
    assert [os.path.basename(fault.file) for fault in caught.value.faults] == [names[0], names[-1]]
