"""Kills the writing of an artifact, checks what is left, and has the next run tidy up and complete.

A program of its own: ``killed_writer.py FOLDER`` kills before each of a small write's calls to the system, and
``killed_writer.py FOLDER COUNT SEED`` that many times at random moments of a larger one, and as often between its last
object and its end. It forks a child for every run (it has one thread, no torch). Prints how many kills there were, and
how many left what: nothing beside the private folder, continuations without an entry, or a complete artifact.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepspeed_affine import ninfer

CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "unlink", "rmdir", "mkdir", "replace", "write")
FOREIGN = {"m.part-0099": b"a person's file", "m.part": b"", ".m.partial.txt": b"notes", "m.part-0001.bak": b"old"}


@dataclass(frozen=True)
class Model:
    """What is written: a matrix by rows in some order, and a resource.

    ``waits`` is whether for the disk; a process that is killed takes nothing with it that was written, only power does.
    """

    values: np.ndarray
    format: str
    resource: bytes
    most: int
    parts: int
    step: int
    waits: bool

    def write(self, folder: Path, order: random.Random, last: Callable[[], object] = int) -> None:
        """``last`` is called when every object is written and the files are still to be published."""
        objects = [ninfer.TensorSpec("w", self.values.shape, self.format), ninfer.ResourceSpec("r", len(self.resource))]
        components = {"text": ninfer.Component({}, None, {"r": "r"})}
        bindings = {"p": ninfer.Binding("w")}
        rows = list(range(0, len(self.values), self.step))
        order.shuffle(rows)
        with ninfer.Writer(folder / "m", objects, components, bindings, max_file_bytes=self.most) as writer:
            writer.write("r", self.resource)
            for row in rows:
                part = self.values[row : row + self.step]
                if self.format == "fp32":
                    writer.write_elements("w", row * part.shape[1], part)
                else:
                    writer.write_rows("w", row, part)
            last()

    def names(self) -> set[str]:
        return {"m", *(f"m.part-{number:04d}" for number in range(1, self.parts + 1))}

    def remove(self, folder: Path) -> None:
        for name in self.names():
            (folder / name).unlink()

    def whole(self, folder: Path) -> bool:
        """Whether there is an entry; if there is, the artifact must be complete."""
        if not (folder / "m").exists():
            return False
        with ninfer.open(folder / "m") as made:
            made.validate()
            stored = ninfer.encode(self.format, self.values).tobytes()
            if made.read_encoded("w") != stored or made.read_resource("text", "r") != self.resource:
                raise SystemExit("an entry appeared whose artifact is not what was written")
        return True


SMALL = Model(np.arange(7000, dtype=np.float32).reshape(7, 1000), "fp32", b"hello", 12_288, 3, 1, waits=False)
LARGE = Model(
    np.random.default_rng(1).normal(size=(3000, 2048)).astype(np.float32),
    "q8_g32_fp16",
    b"hello" * 99_999,
    1 << 20,
    6,
    8,
    waits=True,
)


def with_foreign(base: Path) -> tuple[Path, dict[str, tuple[int, int, bytes]]]:
    """A folder with foreign files alone, and how they are."""
    folder = base / "run"
    folder.mkdir()
    for name, data in FOREIGN.items():
        (folder / name).write_bytes(data)
    return folder, foreign(folder)


def foreign(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    found = {}
    for name in FOREIGN:
        state = (folder / name).stat()
        found[name] = (state.st_ino, state.st_mtime_ns, (folder / name).read_bytes())
    return found


def child(
    model: Model,
    folder: Path,
    order: random.Random,
    before: Callable[[], None] | None = None,
    last: Callable[[], object] = int,
) -> int:
    """The process id of a run that ends with 0, with 3 where a file is there already, and with 4 on any other fault.

    ``before`` is called before each of its calls to the system, ``last`` before it publishes.
    """
    process = os.fork()
    if process:
        return process

    def counted(real):
        def call(*args, **kwargs):
            before()
            return real(*args, **kwargs)

        return call

    if not model.waits:
        os.fsync = lambda fd: None
    if before:
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
    try:
        model.write(folder, order, last)
    except ninfer.OutputExistsError:
        os._exit(3)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(4)
    os._exit(0)


def ended(process: int) -> int:
    """How the run ended; minus nine if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def left(model: Model, folder: Path, were: dict, when: str, order: random.Random) -> str:
    """What a killed run left, after the next one was seen to remove or complete it and to touch nothing else.

    Then the artifact is removed, and foreign files are all there is.
    """
    complete = model.whole(folder)
    names = set(os.listdir(folder)) - set(FOREIGN)
    if not complete and names - model.names() - {".m.partial"}:
        raise SystemExit(f"{when}: there are {sorted(names)}")
    status = ended(child(model, folder, order))
    if status != (3 if complete else 0):
        raise SystemExit(f"{when}: the next run ended with {status}")
    if not model.whole(folder):
        raise SystemExit(f"{when}: the next run left no artifact")
    if set(os.listdir(folder)) != model.names() | set(FOREIGN):
        raise SystemExit(f"{when}: after the next run there are {sorted(os.listdir(folder))}")
    if foreign(folder) != were:
        raise SystemExit(f"{when}: a foreign file has changed")
    model.remove(folder)
    return "complete" if complete else "continuations" if names - {".m.partial"} else "nothing"


def at_every_call(base: Path) -> Counter[str]:
    seen: Counter[str] = Counter()
    folder, were = with_foreign(base)
    for kill_at in range(1, 10_000):
        calls = iter(range(kill_at - 1))

        def before(calls=calls) -> None:
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        status = ended(child(SMALL, folder, random.Random(1), before))
        if status == 0:
            break
        if status != -signal.SIGKILL:
            raise SystemExit(f"kill {kill_at}: the writer ended with {status} instead of being killed")
        seen[left(SMALL, folder, were, f"kill {kill_at}", random.Random(1))] += 1
    return seen


class Timed:
    """A run of the larger write, and a pipe that says when all but its publication is done."""

    def __init__(self, folder: Path, order: random.Random) -> None:
        self.start = time.monotonic()
        self._said, say = os.pipe()
        self.process = child(LARGE, folder, order, last=lambda: os.write(say, b"x"))
        os.close(say)

    def written(self) -> float:
        """When its last object was written."""
        os.read(self._said, 1)
        return time.monotonic()

    def end(self) -> int:
        os.close(self._said)
        return ended(self.process)


def at_random_moments(base: Path, count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    folder, were = with_foreign(base)
    run = Timed(folder, rng)
    written = run.written()
    if run.end() != 0 or not LARGE.whole(folder):
        raise SystemExit("a run that nobody killed made no artifact")
    takes = [time.monotonic() - run.start, time.monotonic() - written]
    LARGE.remove(folder)
    seen: Counter[str] = Counter()
    for late in (False, True):
        done = 0
        while done < count:
            run = Timed(folder, rng)
            start = run.written() if late else run.start
            moment = rng.uniform(0, takes[late])
            time.sleep(moment)
            os.kill(run.process, signal.SIGKILL)
            status = run.end()
            if status == 0:
                # It was faster this time; the moment has to be drawn again.
                takes[late] = min(takes[late], time.monotonic() - start)
                LARGE.remove(folder)
                continue
            if status != -signal.SIGKILL:
                raise SystemExit(f"a writer ended with {status} instead of being killed")
            when = f"killed {moment:.4f} of {takes[late]:.4f} seconds after its {'last object' if late else 'start'}"
            seen[left(LARGE, folder, were, when, rng)] += 1
            done += 1
    return seen


def main(folder: str, count: str = "", seed: str = "") -> None:
    seen = at_random_moments(Path(folder), int(count), int(seed)) if count else at_every_call(Path(folder))
    print(json.dumps({"kills": sum(seen.values()), **seen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
