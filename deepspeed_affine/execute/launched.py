"""How this process was started: alone, or as one of an ordinary torch.distributed job, by ``torchrun`` or alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.execute.distributed import START_SECONDS, Group, JobGroup, SingleGroup
from deepspeed_affine.execute.link import Store

__all__ = ["open_group", "place_in_job"]


def place_in_job(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and size of the torch.distributed job this process was started in; None for a process on its own.

    A launcher sets four variables. Where one is missing (an allocation that only knows the number of its tasks, say)
    this is an ordinary process.
    """
    found = [environment.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")]
    if not all(found):
        return None
    try:
        size, rank = int(found[0]), int(found[1])
        if size <= 1:
            return None
        if not 0 <= rank < size:
            raise ValueError
    except ValueError as error:
        raise PolicyError(
            f"WORLD_SIZE={found[0]!r} and RANK={found[1]!r} in the environment: are not a number of processes and one "
            "of them. Start with torchrun, or unset WORLD_SIZE to convert in this process alone."
        ) from error
    return rank, size


@contextmanager
def open_group(timeout: float, environment: Mapping[str, str] = os.environ) -> Iterator[Group]:
    """The group of the job this process belongs to; without a job, the group of this process alone."""
    place = place_in_job(environment)
    if place is None:
        yield SingleGroup()
        return
    rank, size = place
    start = max(timeout, START_SECONDS)
    with JobGroup(lambda: _job_store(start, environment), rank, size, timeout, start=start) as group:
        yield group


def _job_store(timeout: float, environment: Mapping[str, str]) -> Store:
    if "torch" not in sys.modules:
        # What it would print when the store goes, with addresses of its own functions, is said here in a line.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch.distributed as dist

    store = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))[0]  # type: ignore[attr-defined]
    # Several conversions may follow each other in one job, and one job may start its processes again.
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"deepspeed_affine/{restarts}"
    run = store.add(f"{job}/runs/{environment['RANK']}", 1)
    found: Store = dist.PrefixStore(f"{job}/{run}", store)  # type: ignore[attr-defined]
    return found
