"""Bytes between the processes of a torch.distributed group, with an end to all waiting.

Nothing here knows a backend but by where its small exchanges live: gloo's in memory, the others' on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.execute.link import JobError
from deepspeed_affine.ir.ints import shown

__all__ = ["Pending", "Wire"]

IN_MEMORY = ("gloo", "mpi")
"""Backends whose collectives take tensors in memory."""

OTHERS = "the other processes"


@dataclass(frozen=True, slots=True)
class Pending:
    """What has been started together, whom each of it is waited for, and when."""

    works: list[Any]
    whom: list[str]
    began: float


class Wire:
    """This process's place in ``group`` (None is the world). Where no torch.distributed runs it is the only process.

    ``timeout`` is how many seconds any one exchange may take. When one has failed the group is of no more use, as
    torch.distributed has it. ``during`` says where the transfer is, for messages.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self.timeout = timeout
        self.during = "before anything was written"
        self._group = group
        self.rank, self.size = 0, 1
        if not dist.is_available() or not dist.is_initialized():
            if group is not None:
                raise PolicyError("transfer: a group is given, but torch.distributed is not initialized.")
            return
        if group is None:
            self._group = dist.group.WORLD
        try:
            self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        except (AttributeError, TypeError, ValueError) as error:
            raise PolicyError(
                f"transfer: the group is {shown(group)}; expected what torch.distributed.new_group returned."
            ) from error
        if self.rank < 0:
            raise PolicyError("transfer: this process is not in the group; expected to be called by its members only.")

    @property
    def backend(self) -> str:
        return "" if self.size == 1 else str(dist.get_backend(self._group))

    @property
    def device(self) -> torch.device:
        """Where what all exchange lies."""
        if self.size == 1 or any(name in self.backend for name in IN_MEMORY):
            return torch.device("cpu")
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        # Older versions of torch know no other.
        found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
        if found is None:
            return torch.device("cpu")
        return torch.device(found.type, torch.accelerator.current_device_index())

    def gather(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, in order of ranks. Who comes late is waited for as the group's own timeout says."""
        if self.size == 1:
            return [data]
        lengths = self._gathered(torch.tensor([len(data)], dtype=torch.int64), None)
        sizes = [int(length.item()) for length in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        # By now all are there.
        rows = self._gathered(padded, self.timeout)
        return [bytes(row.cpu().numpy())[:size] for row, size in zip(rows, sizes, strict=True)]

    def _gathered(self, own: torch.Tensor, seconds: float | None) -> list[torch.Tensor]:
        ours = own.to(self.device)
        rows = [torch.empty_like(ours) for _ in range(self.size)]
        started = self._started(lambda: [dist.all_gather(rows, ours, group=self._group, async_op=True)], [OTHERS])
        self._wait(started, seconds)
        return rows

    def confirm(self) -> None:
        """All processes have come here. Raises JobError where one has not in time."""
        if self.size > 1:
            flag = torch.ones(1, dtype=torch.int64, device=self.device)
            self.end(self._started(lambda: [dist.all_reduce(flag, group=self._group, async_op=True)], [OTHERS]))

    def begin(self, sent: torch.Tensor | None, target: int, received: torch.Tensor | None, source: int) -> Pending:
        """``sent`` is on its way to ``target`` and ``received`` about to be filled by ``source``.

        Flat tensors of bytes on the device that the group moves, not to be touched before ``end``.
        """
        operations, peers = [], []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent, self._global(target), self._group))
            peers.append(f"rank {target}, which it sends to")
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, self._global(source), self._group))
            peers.append(f"rank {source}, which it receives from")
        return self._started(lambda: dist.batch_isend_irecv(operations), peers)

    def end(self, pending: Pending) -> None:
        """What has begun is done. Raises JobError where it is not within the timeout, counted from its beginning."""
        self._wait(pending, self.timeout)

    def _global(self, rank: int) -> int:
        return rank if self._group is dist.group.WORLD else dist.get_global_rank(self._group, rank)

    def _started(self, start: Callable[[], list[Any]], whom: list[str]) -> Pending:
        began = time.monotonic()
        try:
            return Pending(start(), whom, began)
        except RuntimeError as error:
            raise self._lost(" or ".join(whom), began, error) from error

    def _wait(self, pending: Pending, seconds: float | None) -> None:
        waits = whom = " or ".join(pending.whom)
        try:
            for number, work in enumerate(pending.works):
                # Some backends make one work of all that is started together.
                waits = pending.whom[number] if len(pending.works) == len(pending.whom) else whom
                if seconds is None:
                    finished = work.wait()
                else:
                    left = max(0.001, seconds - (time.monotonic() - pending.began))
                    finished = work.wait(timedelta(seconds=left))
                if finished is False:
                    raise RuntimeError("timed out")
        except RuntimeError as error:
            raise self._lost(waits, pending.began, error) from error

    def _lost(self, whom: str, began: float, error: RuntimeError) -> JobError:
        lines = str(error).splitlines() or [type(error).__name__]
        return JobError(
            f"transfer: rank {self.rank} lost {whom}, after {time.monotonic() - began:.1f} s, {self.during} "
            f"({lines[0][:200]}). A process of the group ended, hangs, or raised an error of its own: see what each "
            "says. The group cannot be used any more; start the job anew.",
            rank=self.rank,
        )
