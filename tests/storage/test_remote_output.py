"""Outputs elsewhere: complete exactly when the manifest is there, resumed, and replaced only by what was verified."""

import json
import random
import zlib
from contextlib import contextmanager

import pytest
from stores import Failing, before_s3_requests

from deepspeed_affine.errors import AffineError, CheckpointFormatError, IntegrityError, PolicyError
from deepspeed_affine.storage import remote_journal
from deepspeed_affine.storage.anywhere import (
    examine,
    is_within,
    join_output,
    memory_elsewhere,
    open_output,
    point_at,
    recover,
    require_space,
    sink_of,
    vouched,
)
from deepspeed_affine.storage.journal import Finished, Read
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, ManifestFile
from deepspeed_affine.storage.remote_output import RemoteOutput

NEW = {"source": [{"name": "a.pt", "bytes": 3, "digest": "d"}], "options": {"strict": True}, "software": {"torch": "2"}}
OTHER = {**NEW, "options": {"strict": False}}
FILES = {
    f"zero/w {index} [é]+/{state}.pt": random.Random(f"{index}{state}").randbytes(200 * index)
    for index in range(3)
    for state in ("fp32", "exp_avg")
}
FILES["mp_rank_00_model_states.pt"] = b"model"
OLD_FILES = {"zero/w 1 [é]+/fp32.pt": b"old", "zero/gone/fp32.pt": b"old too", "zero/optimizer_state.pt": b"o"}
READS = (Read("a.pt", "0", 0, 3, 5),)


class KilledError(BaseException):
    """As if the process were gone: nothing after it happens."""


class KilledRequestError(PermissionError):
    """The same inside of an event loop, which must not end."""


def entry(path, data):
    return Finished(path, len(data), zlib.crc32(data), READS)


def manifest(files, identity=NEW):
    return Manifest(identity, {path: ManifestFile(len(data), zlib.crc32(data)) for path, data in files.items()}, {})


def write(output, files, *, stop=None):
    """Those of ``files`` that are not finished; ``stop`` of them."""
    sink = sink_of(output, files, durable=False)
    for count, (path, data) in enumerate((path, data) for path, data in files.items() if path not in output.finished):
        if count == stop:
            return
        file = sink.create(path, len(data))
        file.write_at(0, data)
        file.finish()
        output.journal.record(entry(path, data))


def run(target, files=FILES, identity=NEW, **options):
    with open_output(target, identity, **options) as output:
        reused = len(output.finished)
        write(output, files)
        output.publish(manifest(files, identity))
    return reused


def complete(files, identity=NEW, name="out"):
    whole = {f"{name}/{path}": data for path, data in files.items()}
    return {**whole, f"{name}/{MANIFEST_NAME}": manifest(files, identity).to_bytes(), "latest_universal": name.encode()}


def interrupted(target, stop=3, **options):
    """A run that was interrupted after some files; returns the output."""
    output = open_output(target, NEW, **options)
    write(output, FILES, stop=stop)
    output.close(KeyboardInterrupt())
    return output


@pytest.fixture
def target(store):
    return f"{store.url}/out"


# Beginning and publishing


def test_an_output_is_its_files_its_manifest_and_the_pointer(store, target):
    assert examine(target, NEW).kind == "absent"
    assert run(target) == 0
    assert store.files() == complete(FILES)
    state = examine(target, NEW)
    assert (state.kind, state.differences) == ("complete", ())
    assert state.manifest == manifest(FILES)
    assert examine(target, OTHER).differences == ("option strict was True and is False",)
    assert recover(target) == ""


def test_no_folder_of_an_unfinished_output_is_left(tmp_path, memory):
    for url in (f"file://{tmp_path}/a/b/out", f"{memory.url}/out"):
        run(url)
        run(url, overwrite=True)
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == ["latest_universal", "out"]
    assert sorted(entry.name for entry in memory.place.entries()) == ["latest_universal", "out"]


def test_without_a_manifest_it_is_not_complete_and_can_be_gone_on_with(store, target):
    interrupted(target)
    assert MANIFEST_NAME not in store.files("out")
    assert examine(target, NEW).kind == "empty"
    assert "latest_universal" not in store.files()


def test_a_marker_of_a_folder_is_nothing(s3):
    """What a console leaves where somebody has made a folder."""
    place = s3.place.below("out")
    bucket, _, key = place.path.partition("/")
    s3.system.call_s3("put_object", Bucket=bucket, Key=f"{key}/", Body=b"")
    assert examine(place.url, NEW).kind == "absent"
    run(place.url)
    assert s3.files() == complete(FILES)


def test_a_complete_output_is_refused_without_overwrite(store, target):
    run(target)
    before = store.files()
    with pytest.raises(PolicyError, match="exists already"):
        open_output(target, NEW)
    assert store.files() == before


def test_a_foreign_folder_is_refused_even_with_overwrite(store, target):
    store.write("out/my thesis.txt", b"years of work")
    for overwrite in (False, True):
        with pytest.raises(PolicyError, match="exists already"):
            open_output(target, NEW, overwrite=overwrite)
    assert store.files() == {"out/my thesis.txt": b"years of work"}
    assert examine(target, NEW).kind == "foreign"


def test_a_checkpoint_to_convert_from_is_not_replaced(store, target):
    store.write("out/zero/x/fp32.pt", b"x")
    store.write("out/zero_pp_rank_0_mp_rank_00_optim_states.pt", b"x")
    with pytest.raises(PolicyError, match="part of a checkpoint to convert from"):
        open_output(target, NEW, overwrite=True)


def test_the_source_is_not_replaced(store, target):
    run(target)
    for source in (target, f"{target}/", f"{target}/global_step1"):
        assert is_within(source, target)
        with pytest.raises(PolicyError, match="which is read"):
            open_output(target, NEW, overwrite=True, protect=(source,))
    assert not is_within(f"{target}2", target)
    assert not is_within("/somewhere/out", target)


def test_one_folder_spelled_in_two_ways(tmp_path):
    assert is_within(f"file://{tmp_path}/a/b", f"{tmp_path}/a")
    assert is_within(f"{tmp_path}/a/b", f"local://{tmp_path}/a")
    assert not is_within("memory://a", "/a")
    assert not is_within("memory://a", "file:///a")


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "memory://", "file:///"])
def test_a_place_without_a_name_is_refused(s3_server, url):
    with pytest.raises(PolicyError, match="cannot be an output folder"):
        open_output(url, NEW)


def test_space_is_not_asked_for_elsewhere(target):
    require_space(target, 1 << 60, files=1 << 40)


def test_memory_is_counted_for_what_is_elsewhere():
    assert memory_elsewhere("/a", "/b", 8, 1 << 40) == 0
    reading, writing = memory_elsewhere("s3://b/a", "/b", 4, 1 << 30), memory_elsewhere("/a", "s3://b/b", 4, 1 << 30)
    assert memory_elsewhere("s3://b/a", "s3://b/b", 4, 1 << 30) == reading + writing <= 256 << 20
    assert memory_elsewhere("/a", "s3://b/b", 4, 1000) == 4 * 4 * 1000
    assert memory_elsewhere("/a", "s3://b/b", 1, 9000 * (20 << 20)) == 4 * (20 << 20)


# Resuming


def test_a_later_run_goes_on(store, target):
    output = interrupted(target)
    assert str(output.kept).startswith("3 finished files")
    assert run(target) == 3
    assert store.files() == complete(FILES)


def test_reads_and_checksums_come_back(target):
    interrupted(target)
    output = open_output(target, NEW)
    assert output.finished == {path: entry(path, FILES[path]) for path in list(FILES)[:3]}
    assert output.collect() == output.finished
    output.close(KeyboardInterrupt())
    assert run(target) == 3


def test_only_a_tag_vouches_without_reading(store, target):
    interrupted(target)
    output = open_output(target, NEW)
    assert set(vouched(output)) == (set(output.finished) if store.kind == "s3" else set())
    output.forget(next(iter(FILES)))
    assert next(iter(FILES)) not in {*output.finished, *vouched(output), *store.files("out")}
    output.close(KeyboardInterrupt())
    assert run(target) == 2


def test_an_object_that_was_changed_since_is_written_again(store, target):
    interrupted(target)
    path = "zero/w 1 [é]+/fp32.pt"
    store.write(f"out/{path}", b"?" * (len(FILES[path]) if store.kind == "s3" else 1))
    assert run(target) == 2
    assert store.files() == complete(FILES)


def test_another_job_is_refused_with_what_differs_unless_it_starts_over(store, target):
    interrupted(target)
    with pytest.raises(PolicyError, match=r"3 finished files .* option strict was True and is False"):
        open_output(target, OTHER)
    assert run(target, OLD_FILES, OTHER, resume=False) == 0
    assert store.files() == complete(OLD_FILES, OTHER)


def test_starting_over_reuses_nothing(store, target):
    interrupted(target)
    assert run(target, resume=False) == 0
    assert store.files() == complete(FILES)


def test_what_was_begun_and_not_finished_is_ours(store, target):
    interrupted(target)
    # As if the process had died after the upload and before the journal.
    store.write("out/mp_rank_00_model_states.pt", b"half of a mo")
    assert run(target, OLD_FILES, OTHER, resume=False) == 0
    assert store.files() == complete(OLD_FILES, OTHER)


@pytest.mark.parametrize("resume", [True, False])
def test_what_is_not_ours_stops_the_next_run(store, target, resume):
    interrupted(target)
    store.write("out/notes.txt", b"mine")
    before = store.files()
    with pytest.raises(PolicyError, match=r"notes\.txt: is in an unfinished output"):
        open_output(target, NEW, resume=resume)
    assert store.files() == before


def test_what_is_not_ours_in_the_private_folder_stops_too(store, target):
    store.write(".out.partial/notes.txt", b"mine")
    with pytest.raises(PolicyError, match=r"notes\.txt: is in a folder for an unfinished output"):
        open_output(target, NEW)
    assert store.files() == {".out.partial/notes.txt": b"mine"}


def test_a_damaged_journal_costs_its_files_and_is_said(store, target):
    interrupted(target)
    names = [name for name in store.files(".out.partial/journal") if name.endswith("-1.json")]
    store.write(f".out.partial/journal/{names[0]}", b'{"format": 1, "jo')
    with open_output(target, NEW) as output:
        assert output.finished == {}
        assert "objects of its journal are damaged" in output.remarks[0]
        write(output, FILES)
        output.publish(manifest(FILES))
    assert store.files() == complete(FILES)


@pytest.mark.parametrize("data", [b"", b"{", b'{"format": 2}', b'{"format": 1, "identity": {}, "jobs": [1]}', b"[]"])
def test_a_header_nobody_understands_is_named(store, target, data):
    interrupted(target)
    store.write(".out.partial/job.json", data)
    with pytest.raises(CheckpointFormatError, match=r"job\.json: says nothing this version understands"):
        open_output(target, NEW)


def test_journals_are_written_for_several_files_at_a_time(store, target, monkeypatch):
    files = {f"zero/{index}/fp32.pt": b"x" for index in range(10)}
    monkeypatch.setattr(remote_journal, "BATCH_FILES", 4)
    with open_output(target, NEW) as output:
        write(output, files)
        written = list(store.files(".out.partial/journal"))
        assert len(written) == 3, "what is to be written, and two batches"
        output.journal.flush()
        assert len(output.collect()) == 10
        output.publish(manifest(files))


def test_a_journal_does_not_take_what_was_not_uploaded_so(target):
    with open_output(target, NEW) as output:
        path = next(iter(FILES))
        write(output, FILES, stop=1)
        with pytest.raises(CheckpointFormatError, match="was uploaded with"):
            output.journal.record(Finished(path, 1, 2))


# Ending without publishing


@pytest.mark.parametrize(
    "error", [CheckpointFormatError("bad source"), OSError(28, "No space left on device"), None], ids=str
)
def test_what_cannot_succeed_leaves_nothing(store, target, error):
    store.write("neighbour", b"1")
    output = open_output(target, NEW)
    write(output, FILES, stop=4)
    output.close(error)
    assert output.kept is None
    assert store.files() == {"neighbour": b"1"}


def test_it_is_kept_where_that_was_asked_for(store, target):
    output = open_output(target, NEW, keep=True)
    write(output, FILES, stop=4)
    output.close(CheckpointFormatError("bad source"))
    assert output.kept is not None
    assert run(target) == 4


def test_a_source_that_could_not_be_reached_is_no_bad_source(store, target):
    output = open_output(target, NEW)
    write(output, FILES, stop=4)
    output.close(OSError(5, "cannot be read (the line went dead)", "s3://x"))
    assert output.kept is not None
    assert run(target) == 4


def test_an_interrupted_run_without_files_leaves_nothing(store, target):
    interrupted(target, stop=0)
    assert store.files() == {}


def test_bad_input_while_replacing_leaves_the_old_output(store, target):
    run(target, OLD_FILES, OTHER)
    output = open_output(target, NEW, overwrite=True)
    write(output, FILES)
    output.close(CheckpointFormatError("bad source"))
    assert store.files() == complete(OLD_FILES, OTHER)


# What does not agree is not published


def test_a_file_that_is_gone_stops_the_publication(store, target):
    with open_output(target, NEW) as output:
        write(output, FILES)
        store.place.below("out/mp_rank_00_model_states.pt").delete()
        with pytest.raises(IntegrityError, match="cannot be found"):
            output.publish(manifest(FILES))
    assert MANIFEST_NAME not in store.files("out")


def test_a_file_that_was_written_since_stops_the_publication(store, target):
    path = "zero/w 1 [é]+/fp32.pt"
    changed = b"?" * (len(FILES[path]) if store.kind == "s3" else 3)
    with open_output(target, NEW) as output:
        write(output, FILES)
        store.write(f"out/{path}", changed)
        with pytest.raises(IntegrityError, match=r"its tag was|has 3 bytes"):
            output.publish(manifest(FILES))
    assert MANIFEST_NAME not in store.files("out")
    assert "latest_universal" not in store.files()


def test_a_file_that_is_too_much_stops_the_publication(store, target):
    with open_output(target, NEW) as output:
        write(output, FILES)
        store.write("out/zero/other/fp32.pt", b"x")
        with pytest.raises(IntegrityError, match="not of this conversion"):
            output.publish(manifest(FILES))
    assert MANIFEST_NAME not in store.files("out")


def test_of_two_runs_the_last_that_began_publishes(store, target):
    first = open_output(target, NEW)
    write(first, FILES)
    first.journal.flush()
    with open_output(target, NEW) as second:
        with pytest.raises(PolicyError, match="another conversion to it has begun"):
            first.publish(manifest(FILES))
        first.close(KeyboardInterrupt())
        write(second, FILES)
        second.publish(manifest(FILES))
    assert store.files() == complete(FILES)


def test_a_pointer_that_cannot_be_written_leaves_a_complete_output(store, target, monkeypatch):
    original = store.system.pipe_file
    moved = store.system.mv if store.kind == "file" else None
    refused = PermissionError("Access Denied")

    def is_pointer(_, args):
        return args[-1 if store.kind == "file" else 0].endswith("latest_universal")

    name = "mv" if store.kind == "file" else "pipe_file"
    with monkeypatch.context() as patch:
        patch.setattr(store.system, name, Failing(moved or original, is_pointer, lambda: refused))
        with pytest.raises(PolicyError, match="is complete"):
            run(target)
    assert examine(target, NEW).kind == "complete"
    assert "is finished" in recover(target)
    assert store.files() == complete(FILES)


# Replacing


def test_an_output_is_replaced_whole(store, target):
    run(target, OLD_FILES, OTHER)
    store.write("out/notes.txt", b"mine")
    assert run(target, overwrite=True) == 0
    assert store.files() == {**complete(FILES), "out/notes.txt": b"mine"}


def test_an_output_of_deepspeeds_converter_is_replaced(store, target):
    for path, data in OLD_FILES.items():
        store.write(f"out/{path}", data)
    with pytest.raises(PolicyError, match="exists already"):
        open_output(target, NEW)
    run(target, overwrite=True)
    assert store.files() == complete(FILES)


def test_nothing_old_is_touched_before_every_new_file_is_verified(store, target):
    run(target, OLD_FILES, OTHER)
    before = complete(OLD_FILES, OTHER)

    def old_is_there():
        found = store.files()
        return {name: data for name, data in found.items() if not name.startswith(".out.partial/")} == before

    with open_output(target, NEW, overwrite=True) as output:
        assert old_is_there()
        write(output, FILES)
        assert old_is_there()
        # The last is damaged on the way: nothing of the old output may go.
        store.place.below(".out.partial/files/mp_rank_00_model_states.pt").put(b"mo")
        with pytest.raises(IntegrityError, match="has 2 bytes"):
            output.publish(manifest(FILES))
        assert old_is_there()
        output.close(KeyboardInterrupt())
    assert old_is_there()
    assert run(target, overwrite=True) == len(FILES) - 1
    assert store.files() == complete(FILES)


def test_replacing_goes_on_after_an_interrupt_and_needs_overwrite_again(store, target):
    run(target, OLD_FILES, OTHER)
    interrupted(target, overwrite=True)
    with pytest.raises(PolicyError, match="exists already"):
        open_output(target, NEW)
    assert run(target, overwrite=True) == 3
    assert store.files() == complete(FILES)


# Several processes


def test_writers_share_an_output(store, target):
    paths = list(FILES)
    with open_output(target, NEW) as first:
        others = [join_output(target, index, NEW, job=first.job, patience=5) for index in (1, 2)]
        for index, output in enumerate([first, *others]):
            write(output, {path: FILES[path] for path in paths[index::3]})
        others[0].close()
        with pytest.raises(CheckpointFormatError, match="writer 2 has ended"):
            first.collect(3)
        others[1].close()
        assert first.collect(3) == {path: entry(path, data) for path, data in FILES.items()}
        with pytest.raises(PolicyError, match="published once, by the first process"):
            others[1].publish(manifest(FILES))
        first.publish(manifest(FILES))
    assert store.files() == complete(FILES)


def test_a_writer_that_wrote_nothing_is_known_to_have_ended(target):
    with open_output(target, NEW) as first:
        join_output(target, 1, NEW, job=first.job).close()
        assert first.collect(2) == {}


def test_a_writer_of_another_job_is_refused(target):
    with open_output(target, NEW) as first:
        with pytest.raises(PolicyError, match="would do another job"):
            join_output(target, 1, OTHER, job=first.job)
        with pytest.raises(PolicyError, match="is not seen from here"):
            join_output(target, 1, NEW, job="unheard of", patience=0)
        with pytest.raises(ValueError, match="writer 0"):
            RemoteOutput.join(target, 0, NEW, job=first.job)


def test_files_of_all_writers_are_reused(store, target):
    first = open_output(target, NEW)
    other = join_output(target, 1, NEW, job=first.job)
    write(first, dict(list(FILES.items())[:2]))
    write(other, dict(list(FILES.items())[2:5]))
    other.close(KeyboardInterrupt())
    first.close(KeyboardInterrupt())
    assert run(target) == 5
    assert store.files() == complete(FILES)


# Killed at every single step


class Lifeline:
    """Counts what a run asks of its store, and kills it, and everything it still tries, at one of them."""

    METHODS = ("pipe_file", "cp_file", "rm_file", "open", "find", "ls", "info", "cat_file", "makedirs", "rmdir", "mv")

    def __init__(self, store, monkeypatch):
        self.left = None
        self.died = False
        if store.kind == "s3":
            before_s3_requests(monkeypatch, lambda method, options: self.step(KilledRequestError))
            return
        for name in self.METHODS:
            original = getattr(store.system, name)

            def stepping(*args, original=original, **kwargs):
                self.step()
                return original(*args, **kwargs)

            monkeypatch.setattr(store.system, name, stepping)

    def step(self, error=KilledError):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise error

    @contextmanager
    def killed_after(self, steps):
        """What is inside dies after so many steps, if it lasts that long; ``died`` says whether it has."""
        self.left, self.died = steps, False
        try:
            yield
        except (KilledError, OSError, AffineError):
            if self.left >= 0:
                raise
            self.died = True
        finally:
            self.left = None


def run_killed(target, **options):
    """As a process would that is gone at once: nothing is closed."""
    output = open_output(target, NEW, **options)
    write(output, FILES)
    output.publish(manifest(FILES))


def state_of(store):
    """Which complete output is under the name: "new", "old" or none; anything else fails the test."""
    found = {name: data for name, data in store.files().items() if name.startswith("out/")}
    if f"out/{MANIFEST_NAME}" not in found:
        return "none"
    said = json.loads(found[f"out/{MANIFEST_NAME}"])["identity"]
    files, identity = (FILES, NEW) if said == NEW else (OLD_FILES, OTHER)
    expected = {name: data for name, data in complete(files, identity).items() if name.startswith("out/")}
    assert {name: found.get(name) for name in expected} == expected
    return "new" if said == NEW else "old"


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replacing"])
def test_killed_at_any_step_the_next_run_finishes(memory, monkeypatch, replaces):
    kill_at_steps(memory, monkeypatch, replaces, range(10_000))


@pytest.mark.heavy
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replacing"])
def test_killed_at_many_steps_the_next_run_finishes(store, monkeypatch, replaces):
    kill_at_steps(store, monkeypatch, replaces, range(0, 10_000, {"memory": 1, "file": 3, "s3": 4}[store.kind]))


def kill_at_steps(store, monkeypatch, replaces, moments):
    target = f"{store.url}/out"
    monkeypatch.setattr(remote_journal, "BATCH_FILES", 2)
    lifeline = Lifeline(store, monkeypatch)
    seen = set()
    for steps in moments:
        for path in store.place.walk():
            store.place.below(path).delete()
        if replaces:
            run(target, OLD_FILES, OTHER)
        with lifeline.killed_after(steps):
            run_killed(target, overwrite=replaces)
        if not lifeline.died:
            break
        state = state_of(store)
        seen.add(state)
        recover(target)
        assert state_of(store) in (("new",) if state == "new" else ("old", "none", "new"))
        if examine(target, NEW).kind != "complete":
            run(target, overwrite=replaces)
        else:
            point_at(target)
        assert store.files() == complete(FILES), f"after {steps} steps"
    assert steps > 30
    assert seen == ({"old", "none", "new"} if replaces else {"none", "new"})
