"""Ranks of a real job as forks of one process, which has imported what they need: that costs more than their work.

Ranks meet through a file, so no port is taken. Importing this module sets what torch and DeepSpeed read from the
environment when they are imported.
"""

# ruff: noqa: E402 (torch and DeepSpeed read the environment when they are imported)

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Muon compiles its update, which takes a minute here and changes no layout.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import contextlib
import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch

__all__ = ["CASE_TIMEOUT", "Work", "fork_ranks", "is_before"]

CASE_TIMEOUT = 150.0
OF_EVERY_ENGINE = ("torch._dynamo", "deepspeed.runtime.zero.muon.original_muon")
"""What building any engine imports; it takes as long as torch itself."""
Work = Callable[[], dict[str, Any]]


def is_before(*release: int) -> bool:
    return tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3]) < release


def fork_ranks(
    world: int, work: Work, folder: Path, timeout: float = CASE_TIMEOUT, *, never: tuple[str, ...] = ()
) -> dict[str, Any]:
    """How ``work`` ended in ``world`` ranks: whether well, the first error, and every rank's result.

    What a rank has imported for it the parent imports afterwards, for all that are to come, but packages in ``never``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "store"
    for stale in [store, *folder.glob("rank*")]:
        stale.unlink(missing_ok=True)
    _import_too(OF_EVERY_ENGINE)
    # Which kernels could be built does not change, and asking takes a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            log = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                _rank_main(work, rank, world, store, folder)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        children[child] = rank
    deadline = time.monotonic() + timeout
    waiting = dict(children)
    while waiting and time.monotonic() < deadline:
        for child in list(waiting):
            if os.waitpid(child, os.WNOHANG)[0]:
                written = folder / f"rank{waiting.pop(child)}.json"
                # One failed rank leaves the others in a collective they never leave: a short grace, then they end.
                if not written.exists() or not json.loads(written.read_text())["ok"]:
                    deadline = min(deadline, time.monotonic() + 3)
        time.sleep(0.02)
    for child in waiting:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    imported = folder / "rank0.imports"
    names = imported.read_text().splitlines() if imported.exists() else ()
    _import_too(name for name in names if name.partition(".")[0] not in never)
    outcomes = []
    for rank in range(world):
        written = folder / f"rank{rank}.json"
        outcomes.append(
            json.loads(written.read_text()) if written.exists() else {"ok": False, "error": "ended without a result"}
        )
    errors = [f"rank {rank}: {outcome['error']}" for rank, outcome in enumerate(outcomes) if not outcome["ok"]]
    told = [text for text in errors if "ended without" not in text] or errors
    return {"ok": not errors, "error": told[0] if told else None, "ranks": outcomes}


def _rank_main(work: Work, rank: int, world: int, store: Path, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    known = set(sys.modules)
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        deepspeed.init_distributed(dist_backend="gloo")
        result: dict[str, Any] = {"ok": True, **work()}
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
    if rank == 0:
        (folder / "rank0.imports").write_text("\n".join(name for name in sys.modules if name not in known))
    (folder / f"rank{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def _import_too(names: Iterable[str]) -> None:
    """Import here what a rank would have to, in its order; names that are no module of a file fail and are left."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
