"""Kills the writing of an artifact before each of its calls to the system, and checks what is left and the next run.

A program of its own: ``python killed_writer.py FOLDER``. It forks a child for every run (it has one thread, no torch).
Prints how many kills there were, and what each left: nothing, continuations only, or a complete artifact.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from deepspeed_affine import ninfer

CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "unlink", "rmdir", "mkdir", "replace", "write")
VALUES = np.arange(7000, dtype=np.float32).reshape(7, 1000)
FOREIGN = {"m.part-0009": b"a person's file", "m.part": b"", ".m.partial.txt": b"notes"}


def write(folder: Path) -> None:
    objects = [ninfer.TensorSpec("w", VALUES.shape, "fp32"), ninfer.ResourceSpec("r", 5)]
    components = {"text": ninfer.Component({}, None, {"r": "r"})}
    with ninfer.Writer(folder / "m", objects, components, {"p": ninfer.Binding("w")}, max_file_bytes=12_288) as writer:
        writer.write("r", b"hello")
        for row in (3, 0, 6, 1, 5, 2, 4):
            writer.write_elements("w", row * 1000, VALUES[row])


def whole(folder: Path) -> bool:
    """Whether there is an entry; if there is, the artifact must be complete."""
    if not (folder / "m").exists():
        return False
    with ninfer.open(folder / "m") as made:
        made.validate()
        if not np.array_equal(made.read_parameter("p"), VALUES) or made.read_resource("text", "r") != b"hello":
            raise SystemExit("an entry appeared whose artifact is not what was written")
    return True


def run(folder: Path, kill_at: int) -> int:
    """Write in a child that is killed before its ``kill_at``-th call, if any; returns its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left = kill_at

    def counted(real):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    try:
        write(folder)
    except ninfer.OutputExistsError:
        os._exit(3)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(4)
    os._exit(0)


def main(base: Path) -> None:
    seen: Counter[str] = Counter()
    for kill_at in range(1, 10_000):
        folder = base / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in FOREIGN.items():
            (folder / name).write_bytes(data)
        status = run(folder, kill_at)
        if status == 0:
            break
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"kill {kill_at}: the writer ended with {status} instead of being killed")
        complete = whole(folder)
        parts = [name for name in os.listdir(folder) if name.startswith("m.part-") and name not in FOREIGN]
        seen["complete" if complete else "continuations" if parts else "nothing"] += 1
        status = run(folder, 0)
        if os.waitstatus_to_exitcode(status) != (3 if complete else 0):
            raise SystemExit(f"after kill {kill_at} the next run ended with {status}")
        if not whole(folder):
            raise SystemExit(f"after kill {kill_at} the next run left no artifact")
        expected = {"m", "m.part-0001", "m.part-0002", "m.part-0003", *FOREIGN}
        if set(os.listdir(folder)) != expected:
            raise SystemExit(f"after kill {kill_at} the folder holds {sorted(os.listdir(folder))}")
        if any((folder / name).read_bytes() != data for name, data in FOREIGN.items()):
            raise SystemExit(f"after kill {kill_at} a foreign file has changed")
    print(json.dumps({"kills": kill_at - 1, **seen}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
