"""Real checkpoints: trained when a test first wants one, many cases per process start, and kept on the disk.

``DEEPSPEED_AFFINE_TEST_CACHE`` names a folder that survives the session; ``DEEPSPEED_AFFINE_TRANSFORMERS5`` one with
an importable transformers 5.10.0; ``DEEPSPEED_AFFINE_VERSIONS`` one with a folder per other DeepSpeed version.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
sys.path.insert(0, str(HERE))
from real_cases import Case, by_name  # noqa: E402 (found through the paths just set)
from starts import TRANSFORMERS5, Environment, environment_named  # noqa: E402

START_SECONDS, CASE_SECONDS = 300.0, 30.0
SOURCES = ("train.py", "real_models.py", "real_optimizers.py")


def pytest_configure(config: pytest.Config) -> None:
    marker = "cases(*names): the real checkpoints a test takes, so that one process start makes them all"
    config.addinivalue_line("markers", marker)


@dataclass(frozen=True, slots=True)
class Trained:
    """A checkpoint folder DeepSpeed saved, and what its ranks held in memory when it did."""

    case: Case
    folder: Path
    truth_folder: Path

    def truth(self) -> list[dict[str, Any]]:
        import torch

        paths = [self.truth_folder / f"rank{rank}.pt" for rank in range(self.case.world)]
        return [torch.load(path, weights_only=False) for path in paths]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case through one verb of ``train.py``: whether it worked, the first error, every rank's result."""

    ok: bool
    error: str | None
    ranks: tuple[dict[str, Any], ...]
    folder: Path


class Real:
    """The session's real checkpoints in one environment; everything is made on first use and then reused."""

    def __init__(
        self, name: str, deepspeed: str, environment: Environment, cache: Path, outputs: Path, wanted: Iterable[str]
    ) -> None:
        self.deepspeed = deepspeed
        self.environment = environment
        digest = hashlib.sha256()
        for source in SOURCES:
            digest.update((HERE / source).read_bytes())
        self.key = f"{name}-torch{version('torch')}-{digest.hexdigest()[:12]}".replace("+", "-")
        self.cache = cache / self.key
        self.outputs = outputs / self.key
        self.wanted = tuple(dict.fromkeys(wanted))
        self._loaded: dict[str, Outcome] = {}
        self._ours: dict[str, Path] = {}

    def trained(self, name: str) -> Trained:
        """The checkpoint of case ``name``; the test fails when DeepSpeed cannot make it."""
        outcome = self.training(name)
        assert outcome.ok, f"training {name} failed: {outcome.error}"
        case = by_name(name)
        return Trained(case, outcome.folder / f"global_step{case.steps}", outcome.folder / "truth")

    def training(self, name: str) -> Outcome:
        """How training ``name`` ended, whether well or not."""
        return self._made("train", name, self.cache, ["--root", str(self.cache)])

    def stock(self, name: str) -> Outcome:
        """What DeepSpeed's own converter made of case ``name``."""
        self.trained(name)
        target = self.cache / "stock"
        made = self._made("stock", name, target, ["--root", str(self.cache), "--universal", str(target)])
        return Outcome(made.ok, made.error, made.ranks, made.folder / "universal")

    def ours(self, name: str, *options: str) -> Path:
        """The universal folder our command made of case ``name``, run in this process."""
        if name not in self._ours:
            from deepspeed_affine.cli import ds_to_universal

            trained = self.trained(name)
            target = self.outputs / name / "universal"
            target.parent.mkdir(parents=True, exist_ok=True)
            folders = ["--input_folder", str(trained.folder), "--output_folder", str(target)]
            code = ds_to_universal(["--affine", *folders, "--inject_missing_state", "--no-fsync", *options])
            assert code == 0, f"converting {name} ended with exit code {code}"
            self._ours[name] = target
        return self._ours[name]

    def ours_elsewhere(self, name: str) -> Outcome:
        """As ``ours``, but in a process of this environment, so that its DeepSpeed decides what is written."""
        self.trained(name)
        made = self._made("affine", name, self.outputs, ["--root", str(self.cache), "--universal", str(self.outputs)])
        return Outcome(made.ok, made.error, made.ranks, made.folder / "universal")

    def loaded(self, name: str, *, together: Iterable[str] = ()) -> Outcome:
        """How a fresh engine of stock DeepSpeed took our universal folder of ``name``.

        ``together`` names cases to load in the same process start, since somebody will ask for them next.
        """
        if name not in self._loaded:
            names = [
                other for other in dict.fromkeys([name, *together]) if (self.outputs / other / "universal").is_dir()
            ]
            names = [other for other in names if other not in self._loaded]
            self._launch("load", names, ["--root", str(self.cache), "--universal", str(self.outputs)])
            for other in names:
                self._loaded[other] = self._outcome("load", self.outputs / other)
        return self._loaded[name]

    def _made(self, verb: str, name: str, root: Path, options: list[str]) -> Outcome:
        with self._alone():
            if not self._fresh(verb, root / name, repr(by_name(name))):
                self._make(verb, name, root, options)
        return self._outcome(verb, root / name)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process of the test run makes anything in the cache meanwhile."""
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make(self, verb: str, name: str, root: Path, options: list[str]) -> None:
        """``name`` is made, and in the same process start whatever else will be wanted."""
        batch = [name]
        for other in self.wanted:
            runnable = other != name
            trained = verb == "train" or (self.cache / other / "train.json").exists()
            if runnable and trained and not self._fresh(verb, root / other, repr(by_name(other))):
                batch.append(other)
        for other in batch:
            _remove(root / other)
        self._launch(verb, batch, options)
        for other in batch:
            (root / other / f"{verb}.case").write_text(repr(by_name(other)), encoding="utf-8")

    def _fresh(self, verb: str, folder: Path, identity: str) -> bool:
        stamp = folder / f"{verb}.case"
        return stamp.exists() and stamp.read_text(encoding="utf-8") == identity

    def _outcome(self, verb: str, folder: Path) -> Outcome:
        result = json.loads((folder / f"{verb}.json").read_text(encoding="utf-8"))
        return Outcome(result["ok"], result["error"], tuple(result["ranks"]), folder)

    def _launch(self, verb: str, names: list[str], options: list[str]) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(HERE / "train.py"), verb, *options, *names]
        timeout = START_SECONDS + CASE_SECONDS * len(names)
        environment = self.environment.variables()
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _wanted(session: pytest.Session) -> list[str]:
    names = []
    for item in session.items:
        if not item.path.is_relative_to(HERE):
            continue
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "case" in callspec.params:
            names.append(callspec.params["case"])
        for marker in item.iter_markers("cases"):
            names += marker.args
    return names


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("DEEPSPEED_AFFINE_TEST_CACHE")
    if named:
        return Path(named).absolute()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        # One for all processes of the run.
        return tmp_path_factory.getbasetemp().parent / "real_cache"
    return tmp_path_factory.mktemp("real_cache")


@pytest.fixture(scope="session")
def outputs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real_outputs")


@pytest.fixture(scope="session")
def _installed(request: pytest.FixtureRequest, cache_folder: Path, outputs_folder: Path) -> Real:
    pytest.importorskip("transformers", reason="transformers 4.57.6 is needed: pip install -e .[test]")
    installed = version("deepspeed")
    wanted = [name for name in _wanted(request.session) if by_name(name).transformers != 5]
    return Real(
        f"ds{installed}-hf{version('transformers')}", installed, Environment(), cache_folder, outputs_folder, wanted
    )


@pytest.fixture(scope="session")
def _experts(request: pytest.FixtureRequest, cache_folder: Path, outputs_folder: Path) -> Real | None:
    if not os.environ.get("DEEPSPEED_AFFINE_TRANSFORMERS5"):
        return None
    installed = version("deepspeed")
    wanted = [name for name in _wanted(request.session) if by_name(name).transformers == 5]
    environment = environment_named(TRANSFORMERS5)
    return Real(f"ds{installed}-hf5", installed, environment, cache_folder, outputs_folder, wanted)


@pytest.fixture
def real(request: pytest.FixtureRequest, _installed: Real, _experts: Real | None) -> Real:
    """The checkpoints of the installed DeepSpeed, with the transformers the test's case wants."""
    case = request.getfixturevalue("case") if "case" in request.fixturenames else None
    if case is None or by_name(case).transformers != 5:
        return _installed
    if _experts is None:
        pytest.skip("DEEPSPEED_AFFINE_TRANSFORMERS5 names no folder with transformers 5.10.0; AutoEP needs it")
    return _experts


@pytest.fixture(scope="session")
def other_versions(request: pytest.FixtureRequest, cache_folder: Path, outputs_folder: Path) -> Any:
    """A function from a DeepSpeed version to its checkpoints; skips when the version is not at hand."""
    made: dict[str, Real] = {}

    def find(wanted_version: str, names: Iterable[str] = ()) -> Real:
        if wanted_version not in made:
            environment = environment_named(wanted_version)
            made[wanted_version] = Real(
                f"ds{wanted_version}", wanted_version, environment, cache_folder, outputs_folder, names
            )
        return made[wanted_version]

    return find
