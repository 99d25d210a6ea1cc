"""Everything below a folder is listed, whatever it is and wherever it leads."""

import os

import pytest

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.listing import list_files

ODD = "a b+[1] é*"


def test_files_at_every_depth_with_sizes(tmp_path):
    contents = {"top": 3, f"{ODD}/x.pt": 0, f"{ODD}/{ODD}/y.pt": 17, "deep/er/than/that": 1}
    for name, size in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (tmp_path / "empty").mkdir()
    (tmp_path / ".nfs0001").write_bytes(b"removed, and open somewhere")
    assert list_files(str(tmp_path)) == dict(sorted(contents.items()))
    assert list(list_files(f"{tmp_path}/")) == sorted(contents)


def test_links_are_followed_and_those_that_lead_back_or_nowhere_are_no_files(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_bytes(b"12")
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", folder / "there")
    os.symlink(tmp_path / "elsewhere", folder / "again")
    os.symlink(tmp_path / "elsewhere" / "x", folder / "y")
    os.symlink(folder, folder / "inner" / "loop")
    os.symlink("nowhere", folder / "gone")
    os.mkfifo(folder / "pipe")
    assert list_files(str(folder)) == {
        "again/x": 2,
        "gone": None,
        "inner/loop": None,
        "pipe": None,
        "there/x": 2,
        "y": 2,
    }


def test_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    for name in ("file", "nothing"):
        with pytest.raises(CheckpointFormatError, match=f"{name}: cannot be listed"):
            list_files(str(tmp_path / name))


def test_behind_urls(store, tmp_path):
    (tmp_path / "zero" / ODD).mkdir(parents=True)
    (tmp_path / "zero" / ODD / "x.pt").write_bytes(b"123")
    (tmp_path / "top").write_bytes(b"1")
    url = store.copy_in(tmp_path, "listed")
    assert list_files(url) == {"top": 1, f"zero/{ODD}/x.pt": 3}
    with pytest.raises(CheckpointFormatError, match="cannot be listed"):
        list_files(f"{store.url}/nothing")


def test_links_that_lead_back_over_another_folder_end(tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    other.mkdir()
    (other / "f.pt").write_bytes(b"1")
    (out / "x").symlink_to(other)
    for name in "abcdefgh":
        (other / name).symlink_to(out)
    assert list_files(str(out)) == {**{f"x/{name}": None for name in "abcdefgh"}, "x/f.pt": 1}
