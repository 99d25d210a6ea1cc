"""Damaged folders through the converter: an error that names its subject, or the truth. Nothing else, and in time."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from converting import convert, leftovers
from mutations import Mutation, mutate

SECONDS = 20
"""A conversion of such a folder takes a twentieth of a second."""
MEMORY = 1 << 30
"""Address space a conversion may take beyond what the process had; stacks and arenas of its threads are most of it."""
MANIFEST = "affine_manifest.json"


class FuzzError(AssertionError):
    """What must not happen, with all that is needed to see it again."""


class Hang(BaseException):
    """Not an Exception, so that nothing under test catches it."""


@dataclass(frozen=True)
class Base:
    """An intact checkpoint and what converting it gives, found right by other means.

    Files of a checkpoint of another ``family`` cannot be taken for this one's: shapes, names or degrees differ.
    """

    name: str
    family: str
    files: Mapping[str, bytes]
    truth: Mapping[str, bytes]
    params: frozenset[str]


@dataclass
class Report:
    """What a campaign saw: outcomes by kind, the slowest case, and failures as text."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def failed(self) -> str:
        return "\n".join([*self.failures, str(self)])

    def __str__(self) -> str:
        kinds = sorted({kind for kind, _ in self.outcomes})
        lines = [f"{sum(self.outcomes.values())} mutations, slowest {self.slowest:.2f} s"]
        for kind in kinds:
            refused, converted = self.outcomes[kind, "refused"], self.outcomes[kind, "converted"]
            lines.append(f"  {kind}: {refused} refused, {converted} converted")
        return "\n".join(lines)


def read_folder(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """The files below ``folder`` by relative path."""
    base = Path(folder)
    return {str(path.relative_to(base)): path.read_bytes() for path in sorted(base.rglob("*")) if path.is_file()}


def base_of(name: str, family: str, folder: str | os.PathLike[str], universal: str | os.PathLike[str]) -> Base:
    """The checkpoint in ``folder``, whose conversion ``universal`` is known to be right."""
    files = {path: data for path, data in read_folder(folder).items() if path.endswith(".pt") and "/" not in path}
    truth = {path: data for path, data in read_folder(universal).items() if path != MANIFEST}
    params = frozenset(path.split("/", 1)[1].rpartition("/")[0] for path in truth if path.startswith("zero/"))
    return Base(name, family, files, truth, params - {""})


# While a conversion runs, nothing a pickle names may be looked up, imported or run.

_FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "import")
_events: list[str] = []
_watching = False
_installed = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or event not in _FORBIDDEN:
        return
    if event == "import":
        top = str(args[0]).partition(".")[0]
        if top in sys.stdlib_module_names or top in ("deepspeed_affine", "numpy", "torch"):
            return
    _events.append(f"{event} {args!r}"[:200])


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Collects what was looked up, imported or run meanwhile."""
    global _watching, _installed
    if not _installed:
        # A hook cannot be taken out again; it looks at nothing until asked.
        sys.addaudithook(_audit)
        _installed = True
    _events.clear()
    _watching = True
    try:
        yield _events
    finally:
        _watching = False


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """A hang ends in ``Hang``, and an allocation out of proportion in a MemoryError."""

    def hang(*args: Any) -> None:
        raise Hang

    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def quietly(run: Callable[[], int]) -> tuple[int, str]:
    """The exit code of ``run`` and what it said on stderr; a hang, a lookup or an allocation is a failure."""
    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said), limited(), watched() as events:
        try:
            code = run()
        except Hang:
            raise FuzzError(f"still running after {SECONDS} s") from None
    if events:
        raise FuzzError(f"executed: {events}")
    return code, said.getvalue()


def check_error(said: str, subjects: Sequence[str]) -> None:
    """Lines of one error each, and each names a file, the folder or a parameter."""
    lines = said.strip().splitlines()
    if not lines:
        raise FuzzError("exit code 2 and nothing said")
    for line in lines:
        if not line.startswith("ds_to_universal: error: ") or "internal error" in line:
            raise FuzzError(f"said: {line}")
    # A parameter may have got a new name by the mutation.
    if "arameter" not in said and "expert layer" not in said and not any(subject in said for subject in subjects):
        raise FuzzError(f"names no file and no parameter: {said}")


def _plain(value: Any) -> Any:
    """``value`` as something that compares by bytes and needs no class."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return type(value).__name__, _plain(vars(value))
    return repr(value)


def same_content(left: bytes, right: bytes) -> bool:
    """Whether torch makes the same of two files."""
    if left == right:
        return True
    try:
        found = [torch.load(io.BytesIO(data), weights_only=False) for data in (left, right)]
    except Exception:
        return False
    return _plain(found[0]) == _plain(found[1])


def check_output(base: Base, mutation: Mutation, target: Path) -> None:
    """What was published is the truth, as far as the mutation leaves one."""
    written = {path: data for path, data in read_folder(target).items() if path != MANIFEST}
    if mutation.resealed:
        return
    for path, expected in base.truth.items():
        found = written.pop(path, None)
        if found == expected:
            continue
        if found is None:
            raise FuzzError(f"{path} is missing from the published folder")
        if path.startswith("zero/"):
            raise FuzzError(f"{path} differs from the truth")
        # Copied as it is: bytes that mean nothing, between records, may differ.
        if not mutation.foreign and not same_content(found, expected):
            raise FuzzError(f"{path} was copied damaged")
    if written:
        raise FuzzError(f"published besides the truth: {sorted(written)}")


class Fuzzer:
    """One base in a folder of its own, damaged, converted and mended again and again."""

    def __init__(self, base: Base, workdir: Path) -> None:
        self.base = base
        self.workdir = workdir
        self.folder = workdir / "in"
        self.folder.mkdir(parents=True)
        for name, data in base.files.items():
            (self.folder / name).write_bytes(data)

    def run(self, mutation: Mutation, trap: Path) -> str:
        """ "refused" or "converted"; raises FuzzError for anything else."""
        target = self.workdir / "out"
        changed = dict(self.base.files)
        try:
            for name, data in mutation.changes.items():
                if data is None:
                    (self.folder / name).unlink()
                    del changed[name]
                else:
                    (self.folder / name).write_bytes(data)
                    changed[name] = data
            code, said = quietly(lambda: convert(self.folder, target, "--inject_missing_state", "--workers", "2"))
            if trap.exists():
                raise FuzzError("a hostile pickle was executed")
            if code == 0:
                check_output(self.base, mutation, target)
            elif code == 2:
                check_error(said, [*self.base.files, str(self.folder), *self.base.params])
            else:
                raise FuzzError(f"exit code {code}")
            left = leftovers(target) if code else []
            if left:
                raise FuzzError(f"left behind: {left}")
            if any((self.folder / name).read_bytes() != data for name, data in changed.items()):
                raise FuzzError("the input was changed")
            if sorted(os.listdir(self.folder)) != sorted(changed):
                raise FuzzError("files appeared in the input folder")
            return "refused" if code else "converted"
        finally:
            shutil.rmtree(target, ignore_errors=True)
            for name in leftovers(target):
                shutil.rmtree(self.workdir / name, ignore_errors=True)
            for name in mutation.changes:
                (self.folder / name).write_bytes(self.base.files[name])


def campaign(bases: Sequence[Base], count: int, seed: int, *, first: int = 0, most_failures: int = 20) -> Report:
    """``count`` mutations, number ``first`` and on of ``seed``; the same numbers are always the same mutations."""
    report = Report()
    with tempfile.TemporaryDirectory() as workdir:
        trap = Path(workdir) / "executed"
        fuzzers = [Fuzzer(base, Path(workdir) / f"{number}") for number, base in enumerate(bases)]
        for fuzzer in fuzzers:
            # The intact folder first: it converts, and whatever is imported lazily is imported.
            fuzzer.run(Mutation("none", "intact", {}), trap)
        for number in range(first, first + count):
            fuzzer = fuzzers[number % len(fuzzers)]
            others = [base.files for base in bases if base.family != fuzzer.base.family]
            mutation = mutate(Random(f"{seed}/{number}"), fuzzer.base.files, others, f"touch '{trap}'")
            began = time.monotonic()
            try:
                outcome = fuzzer.run(mutation, trap)
            except FuzzError as failure:
                outcome = "failed"
                report.failures.append(
                    f"seed {seed}, number {number}: {fuzzer.base.name}, {mutation.kind}, {mutation.said}: {failure}"
                )
                trap.unlink(missing_ok=True)
            report.outcomes[mutation.kind, outcome] += 1
            report.slowest = max(report.slowest, time.monotonic() - began)
            if len(report.failures) >= most_failures:
                break
    return report
