"""Publication is all or nothing: at every kill, on every file system, whatever somebody else does in between."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.storage import publication, rename
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, ManifestFile
from deepspeed_affine.storage.output import OutputFolder, examine, recover

IDENTITY = {"source": [], "options": {}, "software": {"deepspeed": "2"}}
BEFORE = {"source": [], "options": {}, "software": {"deepspeed": "1"}}
KILLING = Path(__file__).parents[1] / "support" / "killing.py"


def kill(folder, scenario, step=0):
    command = [sys.executable, str(KILLING), str(folder), scenario, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "scenario", ["fresh", "stock", "stock-fallback", "stock-fallback-refused", "fresh-ordinary", "other-ordinary"]
)
def test_killed_before_any_call(tmp_path, scenario):
    said = kill(tmp_path, scenario)
    assert said["kills"] > 80
    assert said["seen"]["old"] > 50
    assert said["seen"]["new"] > 10
    # Without an exchange there is one moment between the two renames.
    assert said["seen"].get("between", 0) == ("fallback" in scenario)
    assert said["reused"] == 4 + ("ordinary" in scenario)


@pytest.mark.heavy
@pytest.mark.parametrize("after", ["", "-torn", "-refused", "-over"])
@pytest.mark.parametrize(
    "scenario",
    ["fresh", "empty", "stock", "other", "damaged", "stock-fallback", "other-fallback", "damaged-fallback"],
)
def test_killed_before_or_inside_any_call_whatever_comes_next(tmp_path, scenario, after):
    assert kill(tmp_path, scenario + after)["kills"] > 80


@pytest.mark.heavy
@pytest.mark.parametrize("scenario", ["fresh", "stock", "stock-fallback", "damaged-fallback-torn"])
def test_killed_and_killed_again_while_recovering(tmp_path, scenario):
    assert kill(tmp_path, scenario, step=8)["kills"] > 500


def made(target, data=b"new", identity=IDENTITY, **how):
    output = OutputFolder.open(target, identity, **how)
    Path(output.path_of("a.pt")).write_bytes(data)
    return output, Manifest(identity, {"a.pt": ManifestFile(len(data), 1)}, {})


def publish(target, data=b"new", identity=IDENTITY, **how):
    output, manifest = made(target, data, identity, **how)
    with output:
        return output.publish(manifest, durable=False)


def leftovers(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


@pytest.fixture(params=["exchange", "two steps"])
def way(request, monkeypatch):
    if request.param == "two steps":
        monkeypatch.setattr(rename, "exchange", lambda first, second: False)
    return request.param


def test_exchanging_two_folders(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert rename.exchange(str(tmp_path / "one"), str(tmp_path / "two"))
    assert os.listdir(tmp_path / "one") == ["two"]
    assert os.listdir(tmp_path / "two") == ["one"]
    with pytest.raises(FileNotFoundError) as caught:
        rename.exchange(str(tmp_path / "one"), str(tmp_path / "three"))
    assert caught.value.filename2 == str(tmp_path / "three")


class OldLibrary:
    def __init__(self, *args, **kwargs):
        pass


def test_a_library_without_the_call(tmp_path, monkeypatch):
    monkeypatch.setattr(rename.ctypes, "CDLL", OldLibrary)
    assert not rename.exchange(str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EACCES])
def test_a_file_system_without_the_call(tmp_path, monkeypatch, number):
    class Library(OldLibrary):
        class renameat2:  # noqa: N801
            def __new__(cls, *args):
                rename.ctypes.set_errno(number)
                return -1

    monkeypatch.setattr(rename.ctypes, "CDLL", Library)
    if number == errno.EACCES:
        with pytest.raises(PermissionError):
            rename.exchange(str(tmp_path), str(tmp_path))
    else:
        assert not rename.exchange(str(tmp_path), str(tmp_path))


def test_replacing_an_output(tmp_path, way):
    target = tmp_path / "out"
    publish(target, b"before", BEFORE)
    with pytest.raises(PolicyError, match="exists already"):
        OutputFolder.open(target, IDENTITY)
    assert publish(target, overwrite=True) == ()
    assert (target / "a.pt").read_bytes() == b"new"
    assert sorted(os.listdir(target)) == ["a.pt", MANIFEST_NAME]
    assert sorted(os.listdir(tmp_path)) == ["latest_universal", "out"]


def test_overwriting_nothing_is_publishing(tmp_path):
    publish(tmp_path / "out", overwrite=True)
    (tmp_path / "empty").mkdir()
    publish(tmp_path / "empty", overwrite=True)
    assert (tmp_path / "latest_universal").read_text() == "empty"
    assert leftovers(tmp_path) == []


def test_an_output_that_goes_away_meanwhile_is_no_obstacle(tmp_path, way):
    publish(tmp_path / "out", b"before", BEFORE)
    output, manifest = made(tmp_path / "out", overwrite=True)
    os.rename(tmp_path / "out", tmp_path / "moved")
    output.publish(manifest)
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"new"
    assert (tmp_path / "moved" / "a.pt").read_bytes() == b"before"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_comes_to_the_target_meanwhile_is_kept(tmp_path, overwrite):
    """The name is taken by somebody while the conversion runs: nothing of theirs is touched, nothing of ours lost."""
    output, manifest = made(tmp_path / "out", overwrite=overwrite)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_text("x")
    with pytest.raises(PolicyError, match="exists already") as caught:
        output.publish(manifest)
    output.close(caught.value)
    assert os.listdir(tmp_path / "out") == ["theirs"]
    assert not (tmp_path / "latest_universal").exists()


def test_taken_between_the_look_and_the_rename(tmp_path, monkeypatch):
    output, manifest = made(tmp_path / "out")
    real = publication.is_taken

    def looked(target):
        taken = real(target)
        if not taken:
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").write_text("x")
        return taken

    monkeypatch.setattr(publication, "is_taken", looked)
    with pytest.raises(PolicyError, match="exists already"):
        output.publish(manifest)
    assert os.listdir(tmp_path / "out") == ["theirs"]
    assert not (tmp_path / ".out.partial" / "publication.json").exists()
    output.close()
    assert leftovers(tmp_path) == []


def test_a_second_step_that_fails_gives_the_old_output_back(tmp_path, monkeypatch):
    publish(tmp_path / "out", b"before", BEFORE)
    monkeypatch.setattr(rename, "exchange", lambda first, second: False)
    output, manifest = made(tmp_path / "out", overwrite=True)
    real = os.rename

    def refuse(old, new):
        if new == str(tmp_path / "out") and old.endswith("files"):
            raise OSError(errno.EIO, "broken", old)
        real(old, new)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="broken"):
        output.publish(manifest)
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"before"
    assert sorted(os.listdir(tmp_path / ".out.partial")) == ["files", "journal-0.jsonl", "lock"]
    output.close()
    assert leftovers(tmp_path) == []


def stop_at(monkeypatch, path):
    """The process ends, as a kill would end it, when it is about to give something that name."""
    real_rename, real_replace = os.rename, os.replace

    def guard(real):
        def wrapped(old, new, **how):
            if str(new) == str(path):
                raise Stopped
            real(old, new, **how)

        return wrapped

    monkeypatch.setattr(os, "rename", guard(real_rename))
    monkeypatch.setattr(os, "replace", guard(real_replace))


class Stopped(BaseException):
    pass


def stopped_publishing(tmp_path, monkeypatch, path, **how):
    """A publication that ended before something was named ``path``, and took nothing back; its lock is free."""
    output, manifest = made(tmp_path / "out", overwrite=True, **how)
    with monkeypatch.context() as patched:
        stop_at(patched, path)
        patched.setattr(publication, "_take_back", lambda *args: None)
        with pytest.raises(Stopped):
            output.publish(manifest, durable=False)
    output.journal.close()
    output._private.release()
    return tmp_path / ".out.partial"


def test_recovering_finishes_without_the_source_or_the_command(tmp_path, monkeypatch, way):
    publish(tmp_path / "out", b"before", BEFORE)
    private = stopped_publishing(tmp_path, monkeypatch, tmp_path / "latest_universal")
    assert (private / "old" / "a.pt").read_bytes() == b"before"
    assert "finished now" in recover(tmp_path / "out")
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["latest_universal", "out"]
    assert recover(tmp_path / "out") == ""


def test_recovering_between_the_two_steps_gives_the_old_output_back(tmp_path, monkeypatch):
    publish(tmp_path / "out", b"before", BEFORE)
    monkeypatch.setattr(rename, "exchange", lambda first, second: False)
    stopped_publishing(tmp_path, monkeypatch, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "what was there before is there" in recover(tmp_path / "out")
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"before"
    publish(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"new"
    assert leftovers(tmp_path) == []


def test_opening_recovers_too_and_says_so(tmp_path, monkeypatch, way):
    publish(tmp_path / "out", b"before", BEFORE)
    stopped_publishing(tmp_path, monkeypatch, tmp_path / "latest_universal")
    (tmp_path / "latest_universal").write_text("something older")
    with OutputFolder.open(tmp_path / "out", BEFORE, overwrite=True) as output:
        assert "finished now" in output.remarks[0]
        assert output.finished == {}
    assert (tmp_path / "latest_universal").read_text() == "out"
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"new"
    assert leftovers(tmp_path) == []


def test_opening_finishes_what_was_published_before_it_refuses(tmp_path, monkeypatch):
    stopped_publishing(tmp_path, monkeypatch, tmp_path / "latest_universal")
    with pytest.raises(PolicyError, match="exists already"):
        OutputFolder.open(tmp_path / "out", IDENTITY)
    assert (tmp_path / "latest_universal").read_text() == "out"
    assert leftovers(tmp_path) == []


def test_an_output_made_by_somebody_between_the_two_steps(tmp_path, monkeypatch):
    publish(tmp_path / "out", b"before", BEFORE)
    monkeypatch.setattr(rename, "exchange", lambda first, second: False)
    private = stopped_publishing(tmp_path, monkeypatch, tmp_path / "out")
    os.makedirs(tmp_path / "out" / "zero" / "theirs")
    for action in (
        lambda: recover(tmp_path / "out"),
        lambda: OutputFolder.open(tmp_path / "out", IDENTITY, overwrite=True, resume=False),
    ):
        with pytest.raises(PolicyError, match=r"was made by something else .*\.partial/old"):
            action()
    assert (private / "old" / "a.pt").read_bytes() == b"before"
    assert (private / "files" / "a.pt").read_bytes() == b"new"
    os.rename(tmp_path / "out", tmp_path / "theirs")
    assert "what was there before" in recover(tmp_path / "out")
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"before"


def test_a_new_output_taken_away_before_its_predecessor_was_removed(tmp_path, monkeypatch, way):
    publish(tmp_path / "out", b"before", BEFORE)
    stopped_publishing(tmp_path, monkeypatch, tmp_path / "latest_universal")
    os.rename(tmp_path / "out", tmp_path / "elsewhere")
    assert "is back" in recover(tmp_path / "out")
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"before"
    assert (tmp_path / "elsewhere" / "a.pt").read_bytes() == b"new"
    assert leftovers(tmp_path) == []


def test_a_new_output_taken_away_that_had_no_predecessor(tmp_path, monkeypatch):
    stopped_publishing(tmp_path, monkeypatch, tmp_path / "latest_universal")
    os.rename(tmp_path / "out", tmp_path / "elsewhere")
    assert recover(tmp_path / "out") == ""
    assert sorted(os.listdir(tmp_path)) == ["elsewhere"]


def test_a_new_output_changed_before_its_predecessor_was_removed(tmp_path, monkeypatch, way):
    publish(tmp_path / "out", b"before", BEFORE)
    private = stopped_publishing(tmp_path, monkeypatch, tmp_path / "latest_universal")
    (tmp_path / "out" / MANIFEST_NAME).write_text("changed")
    with pytest.raises(PolicyError, match="was made by something else"):
        recover(tmp_path / "out")
    assert (private / "old" / "a.pt").read_bytes() == b"before"


@pytest.mark.parametrize("data", [b"", b"{", b'{"format":2}', b'{"format":1,"new":{"inode":1},"old":null}', b"[]"])
def test_a_marker_that_cannot_be_understood_stops_everything(tmp_path, monkeypatch, way, data):
    publish(tmp_path / "out", b"before", BEFORE)
    private = stopped_publishing(tmp_path, monkeypatch, tmp_path / "latest_universal")
    (private / "publication.json").write_bytes(data)
    for action in (
        lambda: recover(tmp_path / "out"),
        lambda: OutputFolder.open(tmp_path / "out", IDENTITY, overwrite=True, resume=False),
    ):
        with pytest.raises(CheckpointFormatError, match="says nothing this version understands"):
            action()
    assert (private / "old" / "a.pt").read_bytes() == b"before"


def test_an_old_output_that_nothing_tells_of_is_kept(tmp_path, monkeypatch, way):
    publish(tmp_path / "out", b"before", BEFORE)
    private = stopped_publishing(tmp_path, monkeypatch, tmp_path / "latest_universal")
    os.remove(private / "publication.json")
    with pytest.raises(PolicyError, match="nothing says which"):
        recover(tmp_path / "out")
    with pytest.raises(PolicyError, match="nothing says which"):
        OutputFolder.open(tmp_path / "out", IDENTITY, overwrite=True, resume=False)
    assert (private / "old" / "a.pt").read_bytes() == b"before"


def test_two_outputs_that_nothing_distinguishes_are_kept_both(tmp_path, monkeypatch):
    publish(tmp_path / "out", b"old", IDENTITY)
    private = stopped_publishing(tmp_path, monkeypatch, tmp_path / ".out.partial" / "old")
    marker = json.loads((private / "publication.json").read_text())
    assert marker["new"]["manifest"] == marker["old"]["manifest"]
    # As after a restore from a backup, every folder has another inode.
    marker["new"]["inode"], marker["old"]["inode"] = 1, 2
    (private / "publication.json").write_text(json.dumps(marker))
    with pytest.raises(PolicyError, match="may be the new output or the one it was to replace"):
        recover(tmp_path / "out")
    assert {(tmp_path / "out" / "a.pt").read_bytes(), (private / "files" / "a.pt").read_bytes()} == {b"old", b"new"}


def test_manifests_tell_outputs_apart_where_inodes_do_not(tmp_path, monkeypatch):
    publish(tmp_path / "out", b"before", BEFORE)
    private = stopped_publishing(tmp_path, monkeypatch, tmp_path / ".out.partial" / "old")
    marker = json.loads((private / "publication.json").read_text())
    marker["new"]["inode"], marker["old"]["inode"] = marker["old"]["inode"], marker["new"]["inode"]
    (private / "publication.json").write_text(json.dumps(marker))
    assert "finished now" in recover(tmp_path / "out")
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"new"
    assert leftovers(tmp_path) == []


def test_a_pointer_that_cannot_be_written_is_made_up_for(tmp_path):
    (tmp_path / "latest_universal").mkdir()
    output, manifest = made(tmp_path / "out")
    with pytest.raises(
        PolicyError, match=r"latest_universal: could not be written .* is complete\. Write 'out'"
    ) as caught:
        output.publish(manifest)
    output.close(caught.value)
    assert examine(str(tmp_path / "out"), IDENTITY).kind == "complete"
    assert output.kept is None
    with pytest.raises(PolicyError, match="could not be written"):
        recover(tmp_path / "out")
    (tmp_path / "latest_universal").rmdir()
    assert "finished now" in recover(tmp_path / "out")
    assert (tmp_path / "latest_universal").read_text() == "out"
    assert leftovers(tmp_path) == []


def test_a_folder_that_cannot_be_synced_after_the_rename(tmp_path, monkeypatch):
    output, manifest = made(tmp_path / "out")
    real = os.fsync

    def fsync(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(PolicyError, match=r"is complete, but the system does not confirm") as caught:
            output.publish(manifest)
    output.close(caught.value)
    assert examine(str(tmp_path / "out"), IDENTITY).kind == "complete"
    assert "finished now" in recover(tmp_path / "out")
    assert (tmp_path / "latest_universal").read_text() == "out"
    assert leftovers(tmp_path) == []


def test_an_old_output_that_cannot_be_removed_is_a_remark(tmp_path, monkeypatch, way):
    publish(tmp_path / "out", b"before", BEFORE)
    real = os.unlink

    def unlink(path, *args, **kwargs):
        if os.path.basename(path) == "a.pt":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        real(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink)
        (remark,) = publish(tmp_path / "out", overwrite=True)
        assert remark.startswith(f"{tmp_path}/.out.partial could not be removed")
        with pytest.raises(PolicyError, match="could not be removed"):
            OutputFolder.open(tmp_path / "out", BEFORE, overwrite=True)
    assert (tmp_path / "out" / "a.pt").read_bytes() == b"new"
    assert (tmp_path / "latest_universal").read_text() == "out"
    assert recover(tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_recovering_takes_away_what_a_killed_run_left_of_nothing(tmp_path):
    assert recover(tmp_path / "out") == ""
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "lock").touch()
    assert recover(tmp_path / "out") == ""
    assert os.listdir(tmp_path) == []


def test_recovering_leaves_an_unfinished_run_alone(tmp_path):
    output, _ = made(tmp_path / "out")
    output._keep = True
    output.close(KeyboardInterrupt())
    before = sorted(os.listdir(tmp_path / ".out.partial"))
    assert recover(tmp_path / "out") == ""
    assert sorted(os.listdir(tmp_path / ".out.partial")) == before
