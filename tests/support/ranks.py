"""Starts the processes of a job, by torchrun or one by one as other launchers do, and says how each ended."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

HERE = Path(__file__).parent
RANK = HERE / "rank.py"
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How one process ended, and how many seconds after the start of the job."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("ds_to_universal: error: ")]

    @property
    def result(self) -> dict:
        return json.loads(self.out)


def environment(**more: str) -> dict[str, str]:
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    clean = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *inherited]), **more}


def arguments(source, target, *options: str) -> list[str]:
    return ["--affine", "--input_folder", str(source), "--output_folder", str(target), "--no-fsync", *options]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Nursery:
    """The one process of a test run that the ranks are forked from; see ``nursery.py``."""

    _shared: ClassVar[Nursery | None] = None

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
            bufsize=1,
        )
        self._answers: dict[int, dict[str, tuple[int, float]]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._process.kill)

    @classmethod
    def shared(cls) -> Nursery:
        if cls._shared is None or cls._shared._process.poll() is not None:
            cls._shared = cls()
        return cls._shared

    def start(self, name: int, command: Sequence[str], variables: Mapping[str, str], out: Path, err: Path) -> int:
        """The process id of a rank that runs now."""
        wanted = {"id": name, "env": dict(variables), "argv": list(command), "out": str(out), "err": str(err)}
        self._process.stdin.write(json.dumps(wanted) + "\n")
        return self._await(name, "pid", 60.0)[0]

    def code(self, name: int, seconds: float) -> tuple[int, float]:
        """The exit code, and when it was; TimeoutError where the process has not ended after ``seconds``."""
        return self._await(name, "code", seconds)

    def _await(self, name: int, what: str, seconds: float) -> tuple[int, float]:
        with self._changed:
            if not self._changed.wait_for(lambda: what in self._answers.get(name, {}), seconds):
                raise TimeoutError
            return self._answers[name][what]

    def _listen(self) -> None:
        for line in self._process.stdout:
            said = json.loads(line)
            name = said.pop("id")
            with self._changed:
                for what, value in said.items():
                    self._answers.setdefault(name, {})[what] = value, time.monotonic()
                self._changed.notify_all()


class Job:
    """``size`` processes without a launcher: nobody ends the others when one does, and rank 0 has the store.

    With ``size`` 0 one process that is told nothing of a job.
    """

    _names = itertools.count()

    def __init__(self, size: int, command: Sequence[str], **variables: str) -> None:
        self._nursery = Nursery.shared()
        self._said = tempfile.TemporaryDirectory()
        port = str(free_port())
        self.began = time.monotonic()
        self._ranks: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        for rank in range(max(size, 1)):
            place = {"WORLD_SIZE": str(size), "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            known = environment(**{**(place if size else {}), **variables})
            name = self._ranks[rank] = next(self._names)
            self.pids[rank] = self._nursery.start(
                name, command, known, self._file(rank, "out"), self._file(rank, "err")
            )

    def send(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def wait(self, seconds: float = 120.0, *, without: Sequence[int] = ()) -> dict[int, Ended]:
        """How each has ended, but those ``without``, which are killed afterwards."""
        end = time.monotonic() + seconds
        late = []
        for rank, name in self._ranks.items():
            try:
                if rank not in without:
                    self._nursery.code(name, max(0.0, end - time.monotonic()))
            except TimeoutError:
                late.append(rank)
        for rank in [*late, *without]:
            self.send(rank, signal.SIGKILL)
        ended = {}
        for rank, name in self._ranks.items():
            code, moment = self._nursery.code(name, 30.0)
            out, err = (self._file(rank, stream).read_text(encoding="utf-8") for stream in ("out", "err"))
            ended[rank] = Ended(code, out, err, moment - self.began)
        self._said.cleanup()
        assert not late, f"ranks {late} did not end in {seconds} s\n{ended}"
        return ended

    def _file(self, rank: int, stream: str) -> Path:
        return Path(self._said.name, f"{rank}.{stream}")


def by_hand(
    size: int, command: Sequence[str], *, seconds: float = 120.0, without: Sequence[int] = (), **variables: str
) -> dict[int, Ended]:
    """A job without a launcher, from start to end."""
    return Job(size, command, **variables).wait(seconds, without=without)


def torchrun(size: int, command: Sequence[str], *, seconds: float = 180.0, **variables: str) -> Ended:
    """A job that torchrun starts and watches."""
    with Launchers(["--standalone", "--nproc_per_node", str(size)], command, **variables) as launcher:
        return launcher.wait(seconds)[0]


def nodes(count: int, command: Sequence[str], **variables: str) -> Launchers:
    """A job over machines: a torchrun on each, all of them here, with one process each."""
    port = str(free_port())
    options = ["--nnodes", str(count), "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", port]
    return Launchers([*options, "--node_rank"], command, count, **variables)


class Launchers:
    """One torchrun, or several with the number of each after the ``options``; nothing of them is left afterwards."""

    def __init__(self, options: Sequence[str], command: Sequence[str], count: int = 0, **variables: str) -> None:
        start = [sys.executable, "-m", "torch.distributed.run", *options]
        self.began = time.monotonic()
        # Sessions of their own, so that the end of one is that of everything on its machine.
        self.processes = [
            subprocess.Popen(
                [*start, *number, str(RANK), *command],
                env=environment(**variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for number in ([[str(node)] for node in range(count)] or [[]])
        ]

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            self._end(process)
            process.wait()
            for stream in (process.stdout, process.stderr):
                stream.close()

    def kill_machine(self, node: int) -> None:
        """The launcher there and all it has started are gone at once."""
        self._end(self.processes[node])

    def wait(self, seconds: float = 180.0) -> list[Ended]:
        """How each launcher has ended, with what its processes have said."""
        ended: dict[int, Ended] = {}

        def one(node: int) -> None:
            process = self.processes[node]
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=seconds)
                ended[node] = Ended(process.returncode, out, err, time.monotonic() - self.began)

        threads = [threading.Thread(target=one, args=(node,)) for node in range(len(self.processes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        late = [node for node in range(len(self.processes)) if node not in ended]
        assert not late, f"launchers {late} did not end in {seconds} s: {ended}"
        return [ended[node] for node in range(len(self.processes))]

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        # torchrun gives its workers sessions of their own in newer versions.
        members = [process.pid, *_below(process.pid)]
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    """The processes that this one has started, and those that they have."""
    found = []
    for task in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text(encoding="ascii").split()):
                found += [child, *_below(child)]
    return found


def alone(command: Sequence[str], **variables: str) -> Ended:
    """The same command in a process of its own, without a job."""
    return Job(0, command, **variables).wait()[0]
