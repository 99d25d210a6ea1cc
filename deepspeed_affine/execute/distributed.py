"""A conversion shared by several processes, and the same flow in a single one.

The processes meet at a store, and exchange a few small values there; tensors go through the shared file system only.
A failure of one ends all: whoever waits for the others, or reads the next few megabytes, gets to know it.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, TypeVar

from deepspeed_affine.errors import AffineError, Faults
from deepspeed_affine.execute.link import BEAT_SECONDS, LAST_SECONDS, Failure, JobError, Link, Store

__all__ = ["START_SECONDS", "Group", "JobGroup", "SingleGroup"]

PART_BYTES = 4 << 20
"""The store takes values of up to 8 MB."""

SHORTEST_WAIT, LONGEST_WAIT = 0.002, 0.1
START_SECONDS = 60.0
"""How long the processes of a job wait for each other at the start, or longer where the timeout is."""

STOP_SECONDS = 10.0
"""How long a failed job waits for its processes to stop; they look every fraction of a second."""

QUIET_BEATS = 3
"""Whoever has been silent for so long in a job that has failed is the reason for it, and is not waited for."""

AFTERMATH_SECONDS = 0.5
"""By how much the process that failed ends before the others: launchers report the first that ends as the cause."""

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What launchers send to the processes of a job that is over."""

T = TypeVar("T")


class Group(Protocol):
    """The processes that share a conversion. All of them call the same methods in the same order.

    What is exchanged is plain data, as JSON has it. Every method that waits raises the failure of another process.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def names(self) -> Sequence[str]:
        """How the processes are called towards a person."""

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of the ranks, to everybody."""

    def first(self, work: Callable[[], T]) -> T:
        """What ``work`` returns in the first process, which alone calls it; plain data, to everybody."""

    def raise_together(self, faults: Faults) -> None:
        """Faults that every process has found alike are raised by the first, and by the others as its failure."""

    def check(self) -> None:
        """Raises where another process has failed."""

    def failing(self) -> AbstractContextManager[None]:
        """A context that tells the others what is raised in it; the first process leaves it after they have stopped."""

    def last(self, work: Callable[[], T]) -> T:
        """As ``first``, and the last that is done together: the first process heeds no failure of others any more."""


class SingleGroup:
    """The only process of its job."""

    rank = 0
    size = 1
    names = ("this process",)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def first(self, work: Callable[[], T]) -> T:
        return work()

    def raise_together(self, faults: Faults) -> None:
        faults.raise_if_any()

    def check(self) -> None:
        pass

    @contextmanager
    def failing(self) -> Iterator[None]:
        yield

    def last(self, work: Callable[[], T]) -> T:
        return work()


class JobGroup:
    """One of several processes. Leaving the ``with`` block tells the others that no more is to be heard of it.

    ``connect`` gives the store all of them share, where they must arrive within ``start`` seconds; whoever is silent
    for ``timeout`` seconds later is lost.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        size: int,
        timeout: float,
        *,
        start: float = START_SECONDS,
        beat: float = BEAT_SECONDS,
        host: str | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._host = socket.gethostname() if host is None else host
        self._start = start
        self._quiet = min(timeout, QUIET_BEATS * beat)
        self._link = Link(connect, rank, size, timeout, beat=beat)
        self._round = 0
        self._spent: list[str] = []
        self._alone = False
        self._failing = False
        self._stop_by: float | None = None

    def __enter__(self) -> JobGroup:
        self._link.start()
        try:
            self._meet()
        except BaseException:
            self._link.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        link = self._link
        link.leave()
        failure = link.failure
        if failure is not None and not self._alone:
            self._await_others(self._quiet)
            if failure.rank != self.rank:
                time.sleep(AFTERMATH_SECONDS)
        elif self.rank == 0:
            # The store may be in this process, and the others have yet to read there that all went well.
            self._await_others(self._quiet)
        link.close()

    @property
    def names(self) -> Sequence[str]:
        return self._link.names

    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        self._put(f"{self._round}/{self.rank}", value)
        if self.rank == 0:
            found = [self._take(f"{self._round}/{other}") for other in range(self.size)]
            # Whoever has come this far has read everything of the rounds before.
            self._remove_spent()
            self._spent += [f"{self._round}/{other}" for other in range(self.size)]
            self._put(f"{self._round}/all", found)
            self._spent.append(f"{self._round}/all")
        everyone: list[Any] = self._take(f"{self._round}/all")
        return everyone

    def first(self, work: Callable[[], T]) -> T:
        self._round += 1
        key = f"{self._round}/all"
        if self.rank == 0:
            self._put(key, work())
            self._spent.append(key)
        answer: T = self._take(key)
        return answer

    def last(self, work: Callable[[], T]) -> T:
        if self.rank:
            return self.first(work)
        self._alone = True
        answer = work()
        with suppress(AffineError):
            self.first(lambda: answer)
        return answer

    def raise_together(self, faults: Faults) -> None:
        if faults and self.rank:
            self.gather(None)
        faults.raise_if_any()

    def check(self) -> None:
        if not self._alone:
            self._link.check()

    @contextmanager
    def failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._failing:
                raise
            self._failing = True
            _ignore_terminations()
            told = self._explained(error)
            if self._link.failure is None:
                self._link.report(Failure.of(told, self.rank, self.names[self.rank]))
            if self.rank == 0:
                self._await_writers(told)
            if told is not error:
                raise told from error
            raise

    def _meet(self) -> None:
        link, rank = self._link, self.rank
        end = time.monotonic() + self._start
        keys = [f"host/{other}" for other in range(self.size)]
        while not link.reached.wait(LONGEST_WAIT):
            link.check()
            if time.monotonic() >= end:
                raise self._missing("the store of the job is not reached")
        link.ask(lambda store: store.set(keys[rank], self._host))
        while not link.ask(lambda store: store.check(keys)):
            if time.monotonic() >= end:
                absent = link.ask(lambda store: [other for other in range(self.size) if not store.check([keys[other]])])
                raise self._missing(f"rank {', '.join(map(str, absent))} of {self.size} is not there")
            time.sleep(LONGEST_WAIT)
        hosts = link.ask(lambda store: store.multi_get(keys))
        link.names = [f"rank {other} on {bytes(host).decode()}" for other, host in enumerate(hosts)]
        link.watch()

    def _missing(self, fact: str) -> JobError:
        return JobError(
            f"rank {self.rank} on {self._host}: {fact} after {self._start:g} s; expected {self.size} processes "
            "started together, as torchrun does. Is this meant to be the only one, unset WORLD_SIZE; else see why the "
            "others do not start, or wait longer with --rank-timeout."
        )

    def _explained(self, error: BaseException) -> BaseException:
        """A launcher ends all processes of a job when one has failed; then that is what happened."""
        number = error.args[0] if isinstance(error, KeyboardInterrupt) and error.args else None
        if number not in [ending.name for ending in ENDING]:
            return error
        end = time.monotonic() + 2 * LONGEST_WAIT + BEAT_SECONDS / 2
        while self._link.failure is None and time.monotonic() < end:
            time.sleep(LONGEST_WAIT)
        if self._link.failure is not None:
            return self._link.failure.error()
        return JobError(
            f"{self.names[self.rank]}: was told to end ({number}). Another process of the job may have failed or been "
            "killed, or the job was cancelled; see what the others and the launcher say. The same command resumes."
        )

    def _await_writers(self, told: BaseException) -> None:
        """Nobody writes any more into what this process is about to remove; JobError where that cannot be had."""
        failure = self._link.failure
        if failure is None or failure.kind == JobError.__name__:
            # Nothing is removed after those.
            self._await_others(self._quiet)
            return
        # Whoever is silent may go on later; only a process that has said so has stopped.
        staying = self._await_others(math.inf)
        if staying or self._link.is_down:
            who = ", ".join(self.names[other] for other in staying or range(1, self.size))
            raise JobError(
                f"{told}\n{who}: has not stopped after {STOP_SECONDS:g} s, so nothing is removed. Stop it, then run "
                "the same command again."
            ) from told

    def _await_others(self, quiet: float) -> list[int]:
        """Who has not stopped a while after the first call, nor has been silent for longer than ``quiet`` seconds."""
        self._stop_by = self._stop_by or time.monotonic() + STOP_SECONDS
        wait = SHORTEST_WAIT
        while True:
            staying = self._link.staying(quiet)
            if not staying or time.monotonic() >= self._stop_by:
                return staying
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _put(self, key: str, value: Any) -> None:
        data = json.dumps(value, separators=(",", ":"))
        parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]

        def put(store: Store) -> None:
            for number, part in enumerate(parts):
                store.set(f"{key}/{number}", part)
            store.set(key, str(len(parts)))

        self._ask(put)

    def _take(self, key: str) -> Any:
        wait = SHORTEST_WAIT
        while not self._ask(lambda store: store.check([key])):
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

        def take(store: Store) -> bytes:
            count = int(store.get(key))
            return b"".join(bytes(store.get(f"{key}/{number}")) for number in range(count))

        return json.loads(self._ask(take))

    def _remove_spent(self) -> None:
        spent, self._spent = self._spent, []

        def remove(store: Store) -> None:
            for key in spent:
                for number in range(int(store.get(key))):
                    store.delete_key(f"{key}/{number}")
                store.delete_key(key)

        if spent:
            self._ask(remove)

    def _ask(self, request: Callable[[Store], T]) -> T:
        self.check()
        return self._link.ask(request, anyway=LAST_SECONDS if self._alone else 0.0)


def _ignore_terminations() -> None:
    """What has failed ends by itself, and has still to say why and to tidy up."""
    if threading.current_thread() is threading.main_thread():
        for ending in ENDING:
            signal.signal(ending, signal.SIG_IGN)
