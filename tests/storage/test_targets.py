"""What may be where an output is to go, and what is said of it."""

import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, ManifestFile
from deepspeed_affine.storage.output import OutputFolder
from deepspeed_affine.storage.targets import (
    examine,
    is_taken,
    refuse_existing,
    require_replaceable,
    require_space,
    require_target,
)

IDENTITY = {"source": [], "options": {"strict": True}, "software": {"deepspeed": "1"}}


def universal(folder, identity=IDENTITY):
    os.makedirs(folder / "zero")
    (folder / "zero" / "a.pt").write_bytes(b"12345")
    (folder / MANIFEST_NAME).write_bytes(Manifest(identity, {"zero/a.pt": ManifestFile(5, 1)}, {}).to_bytes())


def test_nothing_and_an_empty_folder(tmp_path):
    assert examine(str(tmp_path / "out"), IDENTITY).kind == "absent"
    (tmp_path / "out").mkdir()
    assert examine(str(tmp_path / "out"), IDENTITY).kind == "empty"
    refuse_existing(str(tmp_path / "out"))
    refuse_existing(str(tmp_path / "absent"))


def test_the_output_of_this_very_job(tmp_path):
    universal(tmp_path / "out")
    state = examine(str(tmp_path / "out"), IDENTITY)
    assert (state.kind, state.differences) == ("complete", ())
    assert state.manifest.files == {"zero/a.pt": ManifestFile(5, 1)}


def shortened(folder):
    universal(folder)
    (folder / "zero" / "a.pt").write_bytes(b"123")


def emptied(folder):
    universal(folder)
    os.remove(folder / "zero" / "a.pt")


def scribbled(folder):
    universal(folder)
    (folder / MANIFEST_NAME).write_text("{")


def stock(folder):
    os.makedirs(folder / "zero")
    (folder / "zero" / "optimizer_state.pt").write_bytes(b"")


def linked(folder):
    universal(folder.parent / "real")
    folder.symlink_to(folder.parent / "real")


FOREIGN = {
    "another job": (
        lambda folder: universal(folder, {**IDENTITY, "options": {}}),
        "option strict was not there and is True",
    ),
    "a file missing": (emptied, "file zero/a.pt cannot be found (No such file or directory)"),
    "a file cut short": (shortened, "file zero/a.pt has 3 bytes and had 5 when it was written"),
    "a damaged manifest": (scribbled, "affine_manifest.json: has Expecting property name"),
    "another converter": (stock, "it has no affine_manifest.json"),
    "a file": (lambda folder: folder.write_text("x"), "is no folder"),
    "a link": (linked, "is a link"),
    "a dangling link": (lambda folder: folder.symlink_to("nowhere"), "is a link"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_everything_else_is_foreign_and_refused_with_the_reason(tmp_path, kind):
    make, said = FOREIGN[kind]
    target = tmp_path / "out"
    make(target)
    state = examine(str(target), IDENTITY)
    assert state.kind == "foreign"
    assert said in state.differences[0]
    assert said in state.refusal().message
    assert "exists already" in state.refusal().message
    assert "\n" not in state.refusal().message
    assert is_taken(str(target))
    # What may not be replaced is not offered to be.
    offered = kind not in ("a file", "a link", "a dangling link")
    with pytest.raises(PolicyError, match="exists already") as caught:
        refuse_existing(str(target))
    assert ("--overwrite" in caught.value.message) == offered
    with pytest.raises(PolicyError, match="exists already"):
        OutputFolder.open(target, IDENTITY)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


def home(folder):
    os.makedirs(folder / "Documents")


def sharded(folder):
    stock(folder)
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x")


def holding_the_source(folder):
    stock(folder)
    os.makedirs(folder / "global_step5")


REFUSED = {
    "a home": (home, "is no universal checkpoint"),
    "a file": (lambda folder: folder.write_text("x"), "is no folder"),
    "a link": (linked, "is a link"),
    "a checkpoint to convert from": (sharded, "optim_states.pt, part of a checkpoint to convert from"),
    "the source inside": (holding_the_source, "global_step5, which is read"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_overwriting_replaces_universal_checkpoints_and_nothing_else(tmp_path, kind):
    make, said = REFUSED[kind]
    target = tmp_path / "out"
    make(target)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(PolicyError, match=said):
        OutputFolder.open(target, IDENTITY, overwrite=True, protect=[target / "global_step5"])
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("make", [universal, stock, scribbled])
def test_universal_checkpoints_may_be_replaced(tmp_path, make):
    make(tmp_path / "out")
    require_replaceable(str(tmp_path / "out"), [str(tmp_path / "outside"), str(tmp_path)])


def test_the_source_is_protected_behind_a_link(tmp_path):
    stock(tmp_path / "out")
    (tmp_path / "out" / "step").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "out" / "step")
    with pytest.raises(PolicyError, match="alias, which is read"):
        require_replaceable(str(tmp_path / "out"), [str(tmp_path / "alias")])


def test_places_no_folder_can_be_renamed_to():
    with pytest.raises(PolicyError, match="cannot be an output"):
        require_target("/")
    with pytest.raises(PolicyError, match=r"/proc: is a mount point.*/proc/universal"):
        require_target("/proc/")
    with pytest.raises(PolicyError, match="is a mount point"):
        OutputFolder.open("/proc", IDENTITY)


def space(**changed):
    return SimpleNamespace(**{"f_bavail": 10, "f_frsize": 100, "f_blocks": 50, "f_files": 9, "f_favail": 5, **changed})


def test_room_is_required_in_bytes_and_in_files(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or space())
    target = str(tmp_path / "not" / "there" / "yet")
    require_space(target, 1000, files=5)
    assert asked == [str(tmp_path)]
    with pytest.raises(PolicyError, match=r"needs 1001 bytes and 1000 are free.*at least 1 bytes"):
        require_space(target, 1001)
    with pytest.raises(PolicyError, match="has 6 files and its file system takes 5 more"):
        require_space(target, 1, files=6)


def test_file_systems_that_do_not_tell_are_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: space(f_bavail=0, f_blocks=0, f_files=0, f_favail=0))
    require_space(str(tmp_path), 1 << 60, files=1 << 40)

    def fails(path):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "statvfs", fails)
    require_space(str(tmp_path), 1 << 60)


def test_the_real_file_system_has_room_for_a_byte_and_not_for_everything(tmp_path):
    require_space(str(tmp_path), 1, files=1)
    with pytest.raises(PolicyError, match="needs"):
        require_space(str(tmp_path), 1 << 62)


def test_looking_changes_nothing(tmp_path):
    universal(tmp_path / "out")
    times = {path: os.stat(path).st_mtime_ns for path in Path(tmp_path).rglob("*")}
    examine(str(tmp_path / "out"), IDENTITY)
    assert {path: os.stat(path).st_mtime_ns for path in Path(tmp_path).rglob("*")} == times
    assert stat.S_ISDIR(os.stat(tmp_path / "out").st_mode)


@pytest.mark.parametrize("stray", ["thesis.tex", "zero/notes.txt", "ckpts/global_step1/a_optim_states.pt", "model.pt"])
@pytest.mark.parametrize("ours", [True, False])
def test_what_is_no_part_of_a_universal_checkpoint_is_never_replaced(tmp_path, stray, ours):
    folder = tmp_path / "home"
    (folder / "zero" / "w").mkdir(parents=True)
    files = {"zero/w/fp32.pt": b"12345", "mp_rank_00_model_states.pt": b"1"}
    for path, data in files.items():
        (folder / path).write_bytes(data)
    if ours:
        listed = {path: ManifestFile(len(data), 1) for path, data in files.items()}
        (folder / MANIFEST_NAME).write_bytes(Manifest(IDENTITY, listed, {}).to_bytes())
    require_replaceable(str(folder))
    (folder / stray).parent.mkdir(parents=True, exist_ok=True)
    (folder / stray).write_bytes(b"mine")
    with pytest.raises(PolicyError, match=re.escape(stray)):
        require_replaceable(str(folder))
    if ours:
        assert examine(str(folder), IDENTITY).kind == "foreign"


def test_an_output_inside_an_output_and_one_called_as_the_pointer_are_refused(tmp_path):
    inside = tmp_path / "out" / "sub" / "other"
    (tmp_path / "out").mkdir()
    require_target(str(inside))
    (tmp_path / "out" / MANIFEST_NAME).write_bytes(b"{}")
    with pytest.raises(PolicyError, match="which is an output itself"):
        require_target(str(inside))
    with pytest.raises(PolicyError, match="needs another name"):
        require_target(str(tmp_path / "latest_universal"))
