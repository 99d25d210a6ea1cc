"""An output is made privately, resumed by the same job alone, and appears whole or not at all."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from deepspeed_affine.errors import CheckpointFormatError, IntegrityError, PolicyError
from deepspeed_affine.storage import output as output_module
from deepspeed_affine.storage.journal import Finished, read_journal
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, ManifestFile
from deepspeed_affine.storage.output import OutputFolder, examine, recover
from deepspeed_affine.storage.private import private_path

FILES = {"zero/a.b/fp32.pt": b"data" * 100, "zero/optimizer_state.pt": b"state", "mp_rank_00_model_states.pt": b""}
IDENTITY = {"source": [{"name": "a.pt", "bytes": 1, "digest": "a"}], "options": {"strict": True}, "software": {}}
OTHER = {"source": [{"name": "a.pt", "bytes": 1, "digest": "b"}], "options": {"strict": False}, "software": {}}


def leftovers(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def entry(path, data):
    return Finished(path, len(data), zlib.crc32(data))


def write(output, *paths, files=FILES):
    for path in paths or files:
        os.makedirs(os.path.dirname(output.path_of(path)), exist_ok=True)
        with open(output.path_of(path), "xb") as file:
            file.write(files[path])
        output.journal.record(entry(path, files[path]))


def manifest(files=FILES, identity=IDENTITY):
    return Manifest(identity, {path: ManifestFile(len(data), zlib.crc32(data)) for path, data in files.items()}, {})


def content(folder):
    return {
        os.path.relpath(os.path.join(root, name), folder): Path(root, name).read_bytes()
        for root, _, names in os.walk(folder)
        for name in names
    }


def ended_by(error, target, action, identity=IDENTITY, **how):
    """A run that did ``action`` and was then ended by ``error``."""
    output = OutputFolder.open(target, identity, **how)

    def run():
        with output:
            action(output)
            raise error

    with pytest.raises(type(error)) as caught:
        run()
    assert caught.value is error
    return output


def interrupted(target, *paths, identity=IDENTITY):
    """A run that was interrupted after writing ``paths``."""
    return ended_by(KeyboardInterrupt(), target, lambda output: write(output, *paths), identity)


def half(output):
    Path(output.path_of("half")).write_bytes(b"x")


def write_and_publish(output):
    write(output)
    output.publish(manifest())


def complete(target, identity=IDENTITY, **how):
    with OutputFolder.open(target, identity, **how) as output:
        write(output, *(path for path in FILES if path not in output.finished))
        output.publish(manifest(identity=identity), durable=False)


def test_published_whole_under_its_name(tmp_path):
    target = tmp_path / "out"
    with OutputFolder.open(target, IDENTITY) as output:
        assert output.target == str(target)
        write(output)
        assert not target.exists()
        assert output.publish(manifest()) == ()
        with pytest.raises(PolicyError, match="once"):
            output.publish(manifest())
    assert content(target) == {**FILES, MANIFEST_NAME: manifest().to_bytes()}
    assert (tmp_path / "latest_universal").read_text() == "out"
    assert sorted(os.listdir(tmp_path)) == ["latest_universal", "out"]
    umask = os.umask(0)
    os.umask(umask)
    for path in (target, target / "zero", target / "zero" / "a.b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~umask
    for path in (target / MANIFEST_NAME, tmp_path / "latest_universal"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert output.kept is None


def test_what_is_on_the_disk_when_it_gets_its_name(tmp_path, monkeypatch):
    """Everything inside is synced before the rename, the parent after it, and the pointer comes last."""
    events = []
    inodes = {}

    def fsync(fd):
        events.append(("sync", inodes.get(os.fstat(fd).st_ino, os.readlink(f"/proc/self/fd/{fd}"))))

    def rename(old, new, real=os.rename):
        events.append(("rename", str(new)))
        real(old, new)

    def replace(old, new, real=os.replace):
        events.append(("rename", str(new)))
        real(old, new)

    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        write(output)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(os, "replace", replace)
        output.publish(manifest())
    private = private_path(str(tmp_path / "out"))
    named = events.index(("rename", str(tmp_path / "out")))
    for folder in ("files", "files/zero", "files/zero/a.b"):
        assert ("sync", f"{private}/{folder}") in events[:named]
    manifest_at = events.index(("rename", f"{private}/files/{MANIFEST_NAME}"))
    assert events[manifest_at - 1] == ("sync", f"{private}/pointer.tmp")
    assert manifest_at < events.index(("sync", f"{private}/files")) < named
    pointer_at = events.index(("rename", str(tmp_path / "latest_universal")))
    assert ("sync", str(tmp_path)) in events[named:pointer_at]
    assert ("sync", private) in events[named:pointer_at]
    assert events[-1] == ("sync", str(tmp_path))


def test_no_waiting_for_the_disk_where_it_is_not_wanted(tmp_path, monkeypatch):
    def fsync(fd):
        raise AssertionError("synced")

    monkeypatch.setattr(os, "fsync", fsync)
    complete(tmp_path / "out")
    assert examine(str(tmp_path / "out"), IDENTITY).kind == "complete"


def test_resumed_files_are_synced_whatever_the_first_run_did(tmp_path, monkeypatch):
    interrupted(tmp_path / "out", "zero/a.b/fp32.pt")
    synced = []
    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        write(output, "zero/optimizer_state.pt", "mp_rank_00_model_states.pt")
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
        output.publish(manifest())
    assert output.path_of("zero/a.b/fp32.pt") in synced
    assert output.path_of("zero/optimizer_state.pt") not in synced


BAD = [CheckpointFormatError("bad"), IntegrityError("bad"), OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "q")]
PASSING = [
    KeyboardInterrupt(),
    SystemExit(1),
    OSError(errno.EIO, "io"),
    MemoryError(),
    PolicyError("x"),
    RuntimeError(),
]


def named(error):
    return f"{type(error).__name__}{getattr(error, 'errno', '') or ''}"


@pytest.mark.parametrize("error", BAD, ids=named)
def test_bad_input_and_a_full_disk_leave_nothing(tmp_path, error):
    output = ended_by(error, tmp_path / "new" / "deeper" / "out", write)
    assert output.kept is None
    assert os.listdir(tmp_path) == []


def test_an_output_that_nobody_published_leaves_nothing(tmp_path):
    with OutputFolder.open(tmp_path / "new" / "out", IDENTITY) as output:
        write(output)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", PASSING, ids=named)
def test_what_was_finished_is_kept_when_the_next_run_may_succeed(tmp_path, error):
    target = tmp_path / "new" / "out"
    output = ended_by(error, target, lambda output: write(output, "zero/a.b/fp32.pt"))
    assert (output.kept.files, output.kept.nbytes) == (1, 400)
    said = str(output.kept)
    assert said.startswith("1 finished file (400 bytes) is kept in ")
    assert private_path(str(target)) in said
    assert "--no-resume" in said
    assert os.listdir(tmp_path / "new") == [".out.partial"]
    with OutputFolder.open(target, IDENTITY) as output:
        assert output.finished == {"zero/a.b/fp32.pt": entry("zero/a.b/fp32.pt", FILES["zero/a.b/fp32.pt"])}
        assert Path(output.path_of("zero/a.b/fp32.pt")).read_bytes() == FILES["zero/a.b/fp32.pt"]


@pytest.mark.parametrize("error", PASSING, ids=named)
def test_nothing_is_kept_where_nothing_was_finished(tmp_path, error):
    output = ended_by(error, tmp_path / "new" / "out", half)
    assert output.kept is None
    assert os.listdir(tmp_path) == []


def test_keep_keeps_whatever_happens(tmp_path):
    output = ended_by(IntegrityError("bad"), tmp_path / "out", half, keep=True)
    assert output.kept.files == 0
    assert os.path.exists(output.path_of("half"))
    with OutputFolder.open(tmp_path / "out", IDENTITY, keep=True) as output:
        assert not os.path.exists(output.path_of("half"))
        write_and_publish(output)
    assert leftovers(tmp_path) == []


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path):
    complete(tmp_path / "whole")
    interrupted(tmp_path / "out", "zero/optimizer_state.pt")
    interrupted(tmp_path / "out", "mp_rank_00_model_states.pt")
    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        assert set(output.finished) == {"zero/optimizer_state.pt", "mp_rank_00_model_states.pt"}
        assert output.collect() == output.finished
        inode = os.stat(output.path_of("zero/optimizer_state.pt")).st_ino
        write(output, "zero/a.b/fp32.pt")
        assert set(output.collect()) == set(FILES)
        output.publish(manifest())
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert os.stat(tmp_path / "out" / "zero" / "optimizer_state.pt").st_ino == inode
    assert leftovers(tmp_path) == []


def test_files_that_no_journal_vouches_for_are_gone_when_resuming(tmp_path):
    output = interrupted(tmp_path / "out", "zero/a.b/fp32.pt", "zero/optimizer_state.pt")
    for path in ("zero/a.b/exp_avg.pt", "zero/c/fp32.pt", "top.pt"):
        os.makedirs(os.path.dirname(output.path_of(path)), exist_ok=True)
        Path(output.path_of(path)).write_bytes(b"half")
    os.symlink("/etc", output.path_of("link"))
    os.symlink("/etc/passwd", output.path_of("zero/link"))
    with open(output.path_of("zero/optimizer_state.pt"), "ab") as file:
        file.write(b"longer than it was")
    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        assert list(output.finished) == ["zero/a.b/fp32.pt"]
        assert set(content(output.files_path)) == {"zero/a.b/fp32.pt"}
        assert sorted(os.listdir(os.path.join(output.files_path, "zero"))) == ["a.b"]
    assert os.path.exists("/etc/passwd")


def test_a_finished_file_that_became_a_link_is_not_trusted(tmp_path):
    output = interrupted(tmp_path / "out", "zero/optimizer_state.pt")
    (tmp_path / "elsewhere").write_bytes(FILES["zero/optimizer_state.pt"])
    os.unlink(output.path_of("zero/optimizer_state.pt"))
    os.symlink(tmp_path / "elsewhere", output.path_of("zero/optimizer_state.pt"))
    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        assert output.finished == {}


def test_a_file_whose_bytes_are_wrong_is_forgotten_and_written_again(tmp_path):
    output = interrupted(tmp_path / "out", *FILES)
    Path(output.path_of("zero/optimizer_state.pt")).write_bytes(b"stale")
    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        assert "zero/optimizer_state.pt" in output.finished
        output.forget("zero/optimizer_state.pt")
        output.forget("zero/optimizer_state.pt")
        assert "zero/optimizer_state.pt" not in output.finished
        write(output, "zero/optimizer_state.pt")
        output.publish(manifest())
    assert examine(str(tmp_path / "out"), IDENTITY).kind == "complete"


def test_another_job_is_refused_with_what_differs(tmp_path):
    interrupted(tmp_path / "out", "zero/a.b/fp32.pt", "zero/optimizer_state.pt")
    before = content(tmp_path)
    with pytest.raises(PolicyError) as caught:
        OutputFolder.open(tmp_path / "out", OTHER)
    message = caught.value.message
    assert "holds 2 finished files of another conversion" in message
    assert "source file a.pt has the same size and other content; option strict was True and is False" in message
    assert "--no-resume" in message
    assert content(tmp_path) == before
    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        assert len(output.finished) == 2
        output.close(KeyboardInterrupt())
    with OutputFolder.open(tmp_path / "out", OTHER, resume=False) as output:
        assert output.finished == {}
        assert content(output.files_path) == {}
        write(output)
        output.publish(manifest(identity=OTHER))
    assert examine(str(tmp_path / "out"), OTHER).kind == "complete"


def test_at_most_ten_differences_are_shown(tmp_path):
    many = {"source": [], "options": {f"o{n:02}": n for n in range(25)}, "software": {}}
    interrupted(tmp_path / "out", "zero/optimizer_state.pt")
    with pytest.raises(PolicyError) as caught:
        OutputFolder.open(tmp_path / "out", many)
    assert "option o08 was not there" in caught.value.message
    assert "option o09" not in caught.value.message
    assert "and 17 more differences" in caught.value.message


def test_another_job_may_begin_where_nothing_was_finished(tmp_path):
    with OutputFolder.open(tmp_path / "out", IDENTITY, keep=True) as output:
        half(output)
    with OutputFolder.open(tmp_path / "out", OTHER) as output:
        assert not os.path.exists(output.path_of("half"))
        assert read_journal(output.journal.path).identity == OTHER


def test_starting_over_uses_nothing(tmp_path):
    interrupted(tmp_path / "out", *FILES)
    with OutputFolder.open(tmp_path / "out", IDENTITY, resume=False) as output:
        assert output.finished == {}
        assert os.listdir(output.files_path) == []


def test_a_damaged_journal_costs_what_it_named_last(tmp_path):
    output = interrupted(tmp_path / "out", *FILES)
    lines = Path(output.journal.path).read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"5", b"6")
    Path(output.journal.path).write_bytes(b"".join(lines))
    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        assert list(output.finished) == [next(iter(FILES))]
        assert "journal-0.jsonl: is damaged" in output.remarks[0]
        write(output, *list(FILES)[1:])
        output.publish(manifest())
    assert content(tmp_path / "out").keys() == {*FILES, MANIFEST_NAME}


def test_a_journal_without_a_readable_beginning_starts_over(tmp_path):
    output = interrupted(tmp_path / "out", *FILES)
    data = Path(output.journal.path).read_bytes()
    Path(output.journal.path).write_bytes(data[1:])
    complete(tmp_path / "out", OTHER)
    assert examine(str(tmp_path / "out"), OTHER).kind == "complete"


def test_a_private_folder_of_a_newer_version_is_refused_by_name(tmp_path):
    output = interrupted(tmp_path / "out", *FILES)
    Path(output.journal.path).write_bytes(b'{"format":7}\n')
    before = content(tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"format 7.*newer version.*--no-resume"):
        OutputFolder.open(tmp_path / "out", IDENTITY)
    assert content(tmp_path) == before
    with OutputFolder.open(tmp_path / "out", IDENTITY, resume=False) as output:
        assert output.finished == {}


def foreign_file(path):
    path.write_text("precious")


def foreign_folder(path):
    path.mkdir()
    (path / "precious").write_text("x")


def foreign_names(path):
    (path / "files").mkdir(parents=True)
    (path / "files" / "precious").write_text("x")


def foreign_lock(path):
    foreign_names(path)
    (path / "lock").write_text("somebody else's lock")


def foreign_beside_ours(path):
    foreign_names(path)
    (path / "lock").write_text("")
    (path / "notes.txt").write_text("x")


def foreign_kind(path):
    path.mkdir()
    (path / "lock").write_text("")
    (path / "files").write_text("x")


def foreign_link(path):
    (path.parent / "real").mkdir()
    (path.parent / "real" / "precious").write_text("x")
    path.symlink_to(path.parent / "real")


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    "make",
    [foreign_file, foreign_folder, foreign_names, foreign_lock, foreign_beside_ours, foreign_kind, foreign_link],
)
def test_what_somebody_else_made_is_never_touched(tmp_path, make, resume):
    make(tmp_path / ".out.partial")
    before = content(tmp_path)
    names = sorted(os.listdir(tmp_path))
    for action in (
        lambda: OutputFolder.open(tmp_path / "out", IDENTITY, resume=resume),
        lambda: recover(tmp_path / "out"),
    ):
        with pytest.raises(PolicyError, match="not a folder this program made"):
            action()
    assert content(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize("lock", [None, b"", b'{"deepsp'])
def test_a_run_killed_while_it_began_is_taken_over(tmp_path, lock):
    (tmp_path / ".out.partial").mkdir()
    if lock is not None:
        (tmp_path / ".out.partial" / "lock").write_bytes(lock)
    complete(tmp_path / "out")
    assert leftovers(tmp_path) == []


HOLDER = """
import sys
from deepspeed_affine.storage.output import OutputFolder
with OutputFolder.open(sys.argv[1], {}) as output:
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_of_the_first(tmp_path):
    target = tmp_path / "out"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout.readline() == "open\n"
    for action in (
        lambda: OutputFolder.open(target, IDENTITY),
        lambda: OutputFolder.open(target, IDENTITY, resume=False),
        lambda: recover(target),
    ):
        with pytest.raises(PolicyError, match="another conversion of this output is running") as caught:
            action()
        assert f"process {first.pid} on " in caught.value.message
    first.communicate()
    assert first.returncode == 0
    assert os.listdir(tmp_path) == []
    complete(target)


def test_two_threads_of_one_process_do_not_share_an_output(tmp_path):
    with (
        OutputFolder.open(tmp_path / "out", IDENTITY),
        pytest.raises(PolicyError, match=f"process {os.getpid()} on "),
    ):
        OutputFolder.open(tmp_path / "out", IDENTITY)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_file_systems_without_locks_are_used_with_a_remark(tmp_path, monkeypatch, number):
    def flock(fd, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        assert "has no locks" in output.remarks[0]
        write_and_publish(output)
    assert leftovers(tmp_path) == []


def test_a_lock_that_fails_is_an_error(tmp_path, monkeypatch):
    def flock(fd, operation):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="broken"):
        OutputFolder.open(tmp_path / "out", IDENTITY)


@pytest.mark.parametrize(
    "name", ["o" * 255, "ü" * 127, "日" * 85, "o+x(1) [é]", "-dash", ".hidden", "a" * 246, "a" * 247, "b\udce9"]
)
def test_names_of_any_length_and_kind(tmp_path, name):
    target = tmp_path / name
    interrupted(target, "zero/optimizer_state.pt")
    assert len(os.fsencode(os.listdir(tmp_path)[0])) <= 255
    with OutputFolder.open(target, IDENTITY) as output:
        assert list(output.finished) == ["zero/optimizer_state.pt"]
        output.close(KeyboardInterrupt())
    complete(target)
    assert sorted(os.listdir(tmp_path)) == sorted(["latest_universal", name])
    assert os.fsdecode((tmp_path / "latest_universal").read_bytes()) == name


def test_long_names_that_begin_alike_have_private_folders_of_their_own(tmp_path):
    one, other = private_path(str(tmp_path / ("a" * 250 + "1"))), private_path(str(tmp_path / ("a" * 250 + "2")))
    assert one != other
    assert private_path("/p/universal") == "/p/.universal.partial"


@pytest.mark.parametrize("spelling", ["out/", "./out", "deep/er/out", "out//"])
def test_spellings_of_the_target(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    complete(spelling)
    assert os.path.isdir(tmp_path / spelling)
    assert examine(os.path.normpath(tmp_path / spelling), IDENTITY).kind == "complete"


def test_a_path_that_cannot_be_made_leaves_nothing_behind(tmp_path):
    with pytest.raises(OSError, match="too long"):
        OutputFolder.open(tmp_path / "new" / ("n" * 300) / "out", IDENTITY)
    with pytest.raises(OSError, match="too long"):
        OutputFolder.open(tmp_path / ("n" * 300), IDENTITY)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        OutputFolder.open(tmp_path / "file" / "out", IDENTITY)
    assert os.listdir(tmp_path) == ["file"]


def test_a_parent_that_may_not_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    real = os.mkdir

    def mkdir(path, *args, **kwargs):
        if str(path).endswith(".partial"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        real(path, *args, **kwargs)

    # Simulated, because root may write anywhere.
    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(PermissionError):
        OutputFolder.open(tmp_path / "new" / "out", IDENTITY)
    assert os.listdir(tmp_path) == []


def test_files_and_manifest_must_agree(tmp_path):
    for path, spoil, kept, said in (
        ("zero/optimizer_state.pt", os.unlink, 2, "cannot be found there"),
        ("zero/optimizer_state.pt", lambda path: os.truncate(path, 6), 2, "has 6 bytes .* expected 5"),
        ("zero/more.pt", lambda path: Path(path).touch(), 3, "zero/more.pt: is in .* not of this conversion"),
    ):
        with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
            write(output)
            spoil(output.path_of(path))
            with pytest.raises(IntegrityError, match=said) as caught:
                output.publish(manifest())
            output.close(caught.value)
        # The work of hours is not thrown away for it.
        assert output.kept.files == kept
        assert not (tmp_path / "out").exists()
        complete_again = OutputFolder.open(tmp_path / "out", IDENTITY)
        assert not os.path.exists(complete_again.path_of("zero/more.pt"))
        complete_again.close()
    assert os.listdir(tmp_path) == []


def test_no_room_to_publish_leaves_nothing(tmp_path, monkeypatch):
    real = output_module.replace_file

    def replace_file(path, *args, **kwargs):
        if path.endswith(MANIFEST_NAME):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        real(path, *args, **kwargs)

    monkeypatch.setattr(output_module, "replace_file", replace_file)
    output = OutputFolder.open(tmp_path / "out", IDENTITY)
    with pytest.raises(OSError, match="No space"), output:
        write_and_publish(output)
    assert os.listdir(tmp_path) == []


# Several processes.


def test_writers_share_an_output_and_the_first_publishes(tmp_path):
    target = tmp_path / "out"
    with OutputFolder.open(target, IDENTITY) as first:
        with OutputFolder.join(target, 1, IDENTITY, job=first.job) as second:
            assert second.files_path == first.files_path
            write(first, "zero/a.b/fp32.pt")
            write(second, "zero/optimizer_state.pt", "mp_rank_00_model_states.pt")
            with pytest.raises(PolicyError, match="by the first process"):
                second.publish(manifest())
        assert set(first.collect()) == set(FILES)
        assert set(first.collect(2)) == set(FILES)
        with pytest.raises(CheckpointFormatError, match=r"journal-2.jsonl: cannot be read"):
            first.collect(3)
        first.publish(manifest())
    assert set(content(target)) == {*FILES, MANIFEST_NAME}
    assert leftovers(tmp_path) == []


def test_what_other_writers_finished_is_resumed_by_any_number_of_them(tmp_path):
    target = tmp_path / "out"

    def by_others(first):
        for index in (1, 2):
            with OutputFolder.join(target, index, IDENTITY, job=first.job) as other:
                write(other, list(FILES)[index])

    first = ended_by(KeyboardInterrupt(), target, by_others)
    assert first.kept.files == 2
    with OutputFolder.open(target, IDENTITY) as first:
        assert set(first.finished) == set(list(FILES)[1:])
        with OutputFolder.join(target, 1, IDENTITY, job=first.job) as other:
            assert other.finished == first.finished
        assert sorted(name for name in os.listdir(private_path(str(target))) if name.startswith("journal")) == [
            "journal-0.jsonl",
            "journal-1.jsonl",
        ]


def test_a_writer_of_another_job_is_refused(tmp_path):
    target = tmp_path / "out"
    with OutputFolder.open(target, IDENTITY) as first:
        with pytest.raises(PolicyError, match="option strict was True and is False"):
            OutputFolder.join(target, 1, OTHER, job=first.job)
        with pytest.raises(PolicyError, match="is not seen from here"):
            OutputFolder.join(target, 1, IDENTITY, job="of before", patience=0.05)
        with pytest.raises(PolicyError, match="is not seen from here"):
            OutputFolder.join(tmp_path / "elsewhere", 1, IDENTITY, job=first.job, patience=0.05)
        with OutputFolder.join(target, 1, IDENTITY, job=first.job), pytest.raises(PolicyError, match="is writer 1"):
            OutputFolder.join(target, 1, IDENTITY, job=first.job)
        with pytest.raises(ValueError, match="writer 0"):
            OutputFolder.join(target, 0, IDENTITY, job=first.job)


WRITER = """
import sys
from deepspeed_affine.storage.output import OutputFolder
OutputFolder.join(sys.argv[1], 1, {}, job=sys.argv[2])
print("joined", flush=True)
sys.stdin.read()
"""


def test_a_writer_left_over_from_an_earlier_run_keeps_the_next_one_out(tmp_path):
    target = str(tmp_path / "out")
    first = OutputFolder.open(target, {})
    write(first)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, target, first.job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "joined\n"
    first.close(KeyboardInterrupt())
    for resume in (True, False):
        with pytest.raises(PolicyError, match=rf"still writes into it \(process {writer.pid} on "):
            OutputFolder.open(target, {}, resume=resume)
    writer.communicate()
    with OutputFolder.open(target, {}) as output:
        assert len(output.finished) == 3


def test_the_journal_is_where_and_what_it_says(tmp_path):
    with OutputFolder.open(tmp_path / "out", IDENTITY) as output:
        write(output, "zero/optimizer_state.pt")
        lines = Path(tmp_path, ".out.partial", "journal-0.jsonl").read_bytes().splitlines()
        assert json.loads(lines[0])["identity"] == IDENTITY
        assert json.loads(lines[1])["path"] == "zero/optimizer_state.pt"
        assert os.listdir(output.files_path) == ["zero"]
