"""Pairs of runs, stage by stage in forked ranks; what several pairs begin with is done once."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forks import CASE_TIMEOUT, Work, fork_ranks
from live_pairs import LivePair

__all__ = ["Stage", "run_pairs"]

AnyPair = TypeVar("AnyPair", bound=LivePair)


@dataclass(frozen=True, slots=True)
class Stage:
    """``work`` in ``world`` ranks; ``log`` is the folder of their logs, and stages of one folder are the same."""

    name: str
    log: Path
    world: int
    work: Work


def run_pairs(
    pair_named: Callable[[str], AnyPair],
    stages_of: Callable[[AnyPair, Path], Iterable[Stage]],
    timeout: float = CASE_TIMEOUT,
) -> None:
    """``SCRIPT ROOT PAIR...``: ROOT/PAIR/done.json says how each stage of each pair ended, up to the first to fail."""
    root = Path(sys.argv[1]).absolute()
    ran: dict[Path, dict[str, Any]] = {}
    for pair in map(pair_named, sys.argv[2:]):
        began = time.monotonic()
        done: dict[str, Any] = {}
        for stage in stages_of(pair, root):
            if stage.log not in ran:
                ran[stage.log] = fork_ranks(stage.world, stage.work, stage.log, timeout)
            done[stage.name] = ran[stage.log]
            if not done[stage.name]["ok"]:
                break
        folder = root / pair.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "done.json").write_text(json.dumps(done), encoding="utf-8")
        said = ", ".join(f"{name} {'ok' if end['ok'] else end['error']}" for name, end in done.items())
        print(f"{pair.name}: {said} ({time.monotonic() - began:.1f} s)", flush=True)
