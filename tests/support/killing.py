"""Kills a small conversion before each of its system calls in turn, and checks what is left and what the next run does.

Run as a program of its own: ``python killing.py FOLDER SCENARIO [STEP]``. It forks a child for every run (it has one
thread and no torch), so that a thousand kills take seconds. With STEP, after every STEP-th kill the next run is killed
before each of its calls too. Prints one JSON object.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.storage import rename
from deepspeed_affine.storage.journal import Finished, Read, read_journal
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, ManifestFile
from deepspeed_affine.storage.output import OutputFolder, examine, point_at, recover
from deepspeed_affine.storage.targets import ORDINARY, UNIVERSAL

REAL_WRITE = os.write
FILES = {f"zero/p{n}/fp32.pt": bytes([n]) * (1000 * n) for n in range(1, 4)} | {"mp_rank_00_model_states.pt": b"model"}
OLD = {"zero/p1/fp32.pt": b"old", "zero/gone/exp_avg.pt": b"older", "zero/optimizer_state.pt": b""}
SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
kind_of_output = UNIVERSAL


def make_ordinary() -> None:
    """From now on the outputs are resharded checkpoints, which have optimizer files and another pointer."""
    global kind_of_output
    kind_of_output = ORDINARY
    FILES[SHARD] = b"shard"
    OLD[SHARD] = b"older shard"
    OLD_OUTPUTS.update(other=published(OLD, "old"), damaged=damaged())


def identity_of(name: str) -> dict[str, Any]:
    return {"source": [{"name": "a.pt", "bytes": 1, "digest": name}], "options": {}, "software": {}}


def manifest_of(files: dict[str, bytes], name: str) -> Manifest:
    return Manifest(identity_of(name), {p: ManifestFile(len(d), zlib.crc32(d)) for p, d in files.items()}, {})


def write_file(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for start in range(0, len(data), 1000):
        os.write(fd, data[start : start + 1000])
    os.fsync(fd)
    os.close(fd)


def convert(target: str, *, overwrite: bool, name: str = "new", resume: bool = True) -> None:
    """The command around the output folder, with bytes in place of tensors."""
    recover(target)
    state = examine(target, identity_of(name))
    if state.kind == "complete" and content(target) == published(FILES, name):
        return
    if state.kind in ("complete", "foreign") and not overwrite:
        raise state.refusal(kind_of_output)
    opened = OutputFolder.open(target, identity_of(name), overwrite=overwrite, resume=resume, kind=kind_of_output)
    with opened as output:
        for path, data in FILES.items():
            known = output.finished.get(path)
            if known is not None:
                with open(output.path_of(path), "rb") as file:
                    if zlib.crc32(file.read()) == known.crc32:
                        continue
            output.forget(path)
            write_file(output.path_of(path), data)
            output.journal.record(Finished(path, len(data), zlib.crc32(data), (Read("a.pt", "0", 0, 1, 2),)))
        output.publish(manifest_of(FILES, name))


def content(folder: str | Path) -> dict[str, bytes] | None:
    if not os.path.isdir(folder):
        return None
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            found[os.path.relpath(path, folder)] = Path(path).read_bytes()
    return found


def published(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    return {**files, MANIFEST_NAME: manifest_of(files, name).to_bytes()}


def damaged() -> dict[str, bytes]:
    """The new output with one byte changed: nothing but its inode tells it from the new one."""
    files = published(FILES, "new")
    files["mp_rank_00_model_states.pt"] = b"mOdel"
    return files


OLD_OUTPUTS: dict[str, dict[str, bytes] | None] = {
    "fresh": None,
    "empty": {},
    "stock": OLD,
    "other": published(OLD, "old"),
    "damaged": damaged(),
}


def prepare(base: Path, old: dict[str, bytes] | None) -> None:
    shutil.rmtree(base, ignore_errors=True)
    os.makedirs(base)
    if old is not None:
        os.mkdir(base / "out")
        for path, data in old.items():
            write_file(str(base / "out" / path), data)
    write_file(str(base / "before" / "x"), b"x")
    point_at(str(base / "before"), kind=kind_of_output)


def killing(before: int, *, torn: bool, fallback: bool) -> None:
    """From now on the process is killed before that call; ``torn`` kills in the middle of a write."""
    left = before

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if torn and call is REAL_WRITE:
                    REAL_WRITE(args[0], args[1][: max(1, len(args[1]) // 2)])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    if fallback:
        rename.exchange = lambda first, second: False
    for name in ("open", "mkdir", "rmdir", "unlink", "rename", "replace", "fsync", "write", "ftruncate", "close"):
        setattr(os, name, counted(getattr(os, name)))
    fcntl.flock = counted(fcntl.flock)
    rename.exchange = counted(rename.exchange)


def run(action: Callable[[], None]) -> int:
    """The wait status of a child that did it: 0, 3 where it was refused by name, or -9."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        except PolicyError as error:
            print(error, file=sys.stderr)
            status = 3
        finally:
            sys.stderr.flush()
            if status == 1:
                import traceback

                traceback.print_exc()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_after_kill(base: Path, old: dict[str, bytes] | None, *, fallback: bool) -> str:
    """What is under the output's name: never a part of anything, and the old output is never lost."""
    new, found = published(FILES, "new"), content(base / "out")
    if found == new:
        return "new"
    if found == old or (not old and not found):
        return "old"
    assert found is None, f"a partial output: {sorted(found or ())}"
    assert fallback, "one exchange leaves no moment without an output"
    assert content(base / ".out.partial" / "old") == old
    return "between"


def finished_files(base: Path) -> dict[str, int]:
    """The inodes of the files that the journal vouches for."""
    private = base / ".out.partial"
    if not (private / "journal-0.jsonl").exists() or not (private / "files").exists():
        return {}
    paths = read_journal(str(private / "journal-0.jsonl")).finished
    return {path: os.stat(private / "files" / path).st_ino for path in paths if (private / "files" / path).exists()}


def check_reused(base: Path, files: dict[str, int]) -> int:
    assert {path: os.stat(base / "out" / path).st_ino for path in files} == files
    return len(files)


def check_finished(base: Path, name: str = "new") -> None:
    assert content(base / "out") == published(FILES, name)
    assert (base / kind_of_output.latest).read_text() == "out"
    assert sorted(os.listdir(base)) == ["before", kind_of_output.latest, "out"]


def moments(action: Callable[[], None], **how: Any) -> Iterator[int]:
    """Runs ``action`` again and again, killed a call later each time, until it ends by itself."""
    for before in range(1, 2000):

        def killed(before: int = before) -> None:
            killing(before, **how)
            action()

        yield before
        status = run(killed)
        if status == 0:
            return
        assert status == -signal.SIGKILL, f"ended with {status} when killed before call {before}"
        yield -before
    raise AssertionError("it never ends")


def main(base: Path, scenario: str, step: int) -> dict[str, Any]:
    # What the disk would forget, a kill does not.
    os.fsync = lambda fd: None
    kind, fallback, torn = scenario.split("-")[0], "fallback" in scenario, "torn" in scenario
    if "ordinary" in scenario:
        make_ordinary()
    old = OLD_OUTPUTS[kind]
    how = {"torn": torn, "fallback": fallback}
    target = str(base / "out")

    def again() -> None:
        convert(target, overwrite=bool(old))

    seen: dict[str, int] = {}
    kills = reused = 0
    for moment in moments(again, **how):
        if moment > 0:
            prepare(base, old)
            continue
        kills += 1
        what = check_after_kill(base, old, fallback=fallback)
        seen[what] = seen.get(what, 0) + 1
        if "refused" in scenario:
            # Another command comes next. It destroys nothing, and the interrupted one can still be finished.
            status = run(lambda: convert(target, overwrite=False, name="another"))
            if status == 0:
                assert content(base / "out") == published(FILES, "another")
                continue
            assert status == 3
            assert check_after_kill(base, old, fallback=False) == ("new" if what == "new" else "old")
        if "over" in scenario:
            assert run(lambda: convert(target, overwrite=True, name="another", resume=False)) == 0
            check_finished(base, "another")
            continue
        if not step:
            files = finished_files(base) if what != "new" else {}
            assert run(again) == 0
            check_finished(base)
            reused = max(reused, check_reused(base, files))
            continue
        if moment % step:
            continue
        for second in moments(again, **how):
            if second > 0:
                prepare(base, old)
                assert run(lambda moment=moment: (killing(-moment, **how), again())) == -signal.SIGKILL
                continue
            kills += 1
            check_after_kill(base, old, fallback=fallback)
            assert run(again) == 0
            check_finished(base)
    check_finished(base)
    return {"kills": kills, "seen": seen, "reused": reused}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]) / "here", sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else 0)))
