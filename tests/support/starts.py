"""Scripts that fork the ranks of real jobs, started once an environment for everything a session asks of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
INSTALLED, TRANSFORMERS5 = "installed", "hf5"
START_SECONDS, NAME_SECONDS = 300.0, 60.0


@dataclass(frozen=True, slots=True)
class Environment:
    """One set of importable libraries: the installed ones, with others in front."""

    front: tuple[Path, ...] = ()

    def variables(self) -> dict[str, str]:
        front = [str(folder) for folder in (*self.front, REPOSITORY)]
        inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
        return {**os.environ, "PYTHONPATH": os.pathsep.join([*front, *inherited]), "DS_ACCELERATOR": "cpu"}


def environment_named(name: str) -> Environment:
    """The installed libraries, those with the second transformers, or those with another version of DeepSpeed; the
    test is skipped where they are not at hand."""
    if name == INSTALLED:
        return Environment()
    variable = "DEEPSPEED_AFFINE_TRANSFORMERS5" if name == TRANSFORMERS5 else "DEEPSPEED_AFFINE_VERSIONS"
    root = os.environ.get(variable)
    if not root:
        pytest.skip(f"{variable} is not set; it names where {name} is")
    folder = Path(root).absolute()
    if name != TRANSFORMERS5:
        folder /= name
        if not (folder / "deepspeed").is_dir():
            pytest.skip(f"{variable} names no folder with DeepSpeed {name}")
    return Environment((folder,))


class Starts:
    """What a script leaves of the names it is given: ``SCRIPT ROOT NAME...`` writes ROOT/NAME/done.json for each.

    ``wanted`` has the names of every environment. The first that is asked for starts all of its environment.
    """

    def __init__(self, script: Path, root: Path, wanted: Mapping[str, Iterable[str]]) -> None:
        self.script = script
        self._root = root
        self._wanted = {environment: list(dict.fromkeys(names)) for environment, names in wanted.items()}
        self._started: dict[str, Path] = {}

    def root(self, environment: str) -> Path:
        """The folder in which the script has run there."""
        if environment not in self._started:
            variables = environment_named(environment).variables()
            folder = self._started[environment] = self._root / environment
            names = self._wanted[environment]
            command = [sys.executable, str(self.script), str(folder), *names]
            timeout = START_SECONDS + NAME_SECONDS * len(names)
            ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout)
            assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        return self._started[environment]

    def done(self, environment: str, name: str) -> Any:
        """How ``name`` ended there."""
        return json.loads((self.root(environment) / name / "done.json").read_text(encoding="utf-8"))


def asked(
    request: pytest.FixtureRequest, parameter: str, environment_of: Callable[[Any], tuple[str, str]]
) -> dict[str, list[str]]:
    """By environment the names that tests of the requesting module have as their ``parameter`` in this session."""
    wanted: dict[str, list[str]] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and item.path == request.path and parameter in callspec.params:
            environment, name = environment_of(callspec.params[parameter])
            wanted.setdefault(environment, []).append(name)
    return wanted
