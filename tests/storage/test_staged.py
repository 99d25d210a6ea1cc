"""Output without resuming appears whole or not at all."""

import os
import stat
import subprocess
import sys

import pytest

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.storage.output import StagedFolder, replace_text


def leftovers(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def test_published_whole_under_its_name(tmp_path):
    target = tmp_path / "out"
    with StagedFolder(target) as staged:
        os.makedirs(os.path.join(staged.path, "zero", "a.b"))
        with open(os.path.join(staged.path, "zero", "a.b", "fp32.pt"), "wb") as file:
            file.write(b"data")
        assert not target.exists()
        staged.publish()
    assert (target / "zero" / "a.b" / "fp32.pt").read_bytes() == b"data"
    assert leftovers(tmp_path) == []
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~umask


def test_a_failure_leaves_nothing(tmp_path):
    staged = StagedFolder(tmp_path / "out")
    open(os.path.join(staged.path, "x"), "wb").close()
    with pytest.raises(RuntimeError, match="broken"), staged:
        raise RuntimeError("broken")
    assert os.listdir(tmp_path) == []
    staged.discard()


@pytest.mark.parametrize("spelling", ["out/", "./out", "deep/er/out", "out//", "o+x(1) [é]"])
def test_spellings_of_the_target(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    with StagedFolder(spelling) as staged:
        staged.publish()
    assert os.path.isdir(tmp_path / spelling)
    assert staged.target == os.path.normpath(tmp_path / spelling)


def test_existing_output_is_refused_at_the_start_and_at_the_end(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(PolicyError, match="exists already"):
        StagedFolder(target)
    assert leftovers(tmp_path) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(PolicyError, match="exists already"):
        StagedFolder(tmp_path / "file")
    os.symlink("nowhere", tmp_path / "link")
    with pytest.raises(PolicyError, match="exists already"):
        StagedFolder(tmp_path / "link")
    with pytest.raises(PolicyError, match="cannot be an output"):
        StagedFolder("/")
    late = tmp_path / "late"
    with StagedFolder(late) as staged:
        late.mkdir()
        (late / "theirs").write_text("x")
        with pytest.raises(PolicyError, match="exists already"):
            staged.publish()
    assert os.listdir(late) == ["theirs"]
    assert leftovers(tmp_path) == []


def test_an_empty_folder_is_taken_over(tmp_path):
    (tmp_path / "out").mkdir()
    with StagedFolder(tmp_path / "out") as staged:
        open(os.path.join(staged.path, "x"), "wb").close()
        staged.publish()
        with pytest.raises(PolicyError, match="before"):
            staged.publish()
    assert os.listdir(tmp_path / "out") == ["x"]


def test_output_inside_the_input(tmp_path):
    (tmp_path / "mp_rank_00_model_states.pt").write_text("x")
    with StagedFolder(tmp_path / "universal") as staged:
        staged.publish()
    assert sorted(os.listdir(tmp_path)) == ["mp_rank_00_model_states.pt", "universal"]


def test_replace_text(tmp_path):
    path = tmp_path / "latest_universal"
    replace_text(path, "one")
    inode = path.stat().st_ino
    replace_text(path, "zwei ü")
    assert path.read_text(encoding="utf-8") == "zwei ü"
    assert path.stat().st_ino != inode
    assert os.listdir(tmp_path) == ["latest_universal"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_text(tmp_path / "folder", "x")
    assert leftovers(tmp_path) == []


def test_a_killed_process_leaves_the_target_absent(tmp_path):
    code = (
        "import os, sys; from deepspeed_affine.storage.output import StagedFolder\n"
        "staged = StagedFolder(sys.argv[1]); open(os.path.join(staged.path, 'x'), 'w').close(); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert done.returncode == 9
    assert not (tmp_path / "out").exists()
    assert len(leftovers(tmp_path)) == 1


def test_kept_folders_stay_and_quick_publication_publishes(tmp_path):
    with StagedFolder(tmp_path / "kept") as staged:
        staged.keep()
    assert os.path.isdir(staged.path)
    assert not (tmp_path / "kept").exists()
    with StagedFolder(tmp_path / "quick") as staged:
        staged.publish(durable=False)
    assert (tmp_path / "quick").is_dir()
    assert not os.path.exists(staged.path)


def test_a_path_that_cannot_be_made_leaves_nothing_behind(tmp_path):
    with pytest.raises(OSError, match="too long"):
        StagedFolder(tmp_path / "new" / ("n" * 300) / "out")
    assert os.listdir(tmp_path) == []
