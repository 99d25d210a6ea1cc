"""A process's line to the others of its job: one thread that alone talks to the job's store, and one that watches it.

The store is a few keys on one machine (torch.distributed's TCPStore). The thread says every second that this process
lives, looks whether the others still do and whether one has reported a failure, and carries out requests in between.
No call of the store is ever made elsewhere, because it may never return when that machine is gone. Nothing depends on
clocks that agree: a process is silent when the number it counts up has not changed, for a time measured here.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from deepspeed_affine import errors
from deepspeed_affine.errors import AffineError, PolicyError
from deepspeed_affine.storage.durable import is_no_space

__all__ = ["BEAT_SECONDS", "LAST_SECONDS", "Failure", "JobError", "Link", "Store"]

BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.2
"""How often a failure that another process reports is looked for."""

LAST_SECONDS = 2.0
"""How long the store may take for what a process says last."""

FAILED, LEFT = "failed", b"left"

Answer = TypeVar("Answer")


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, value: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...

    def delete_key(self, key: str) -> bool: ...


class JobError(PolicyError):
    """Another process of the job has failed or is lost; what is finished is kept."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What ends a job, as all its processes come to know it: the first failure that was reported.

    ``rank`` is the process that failed and ``by`` the one that says so. ``kind`` names the class of the error that the
    others end with.
    """

    rank: int
    by: int
    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int, where: str) -> Failure:
        """``error``, as the others are to see it: in one line, and of a class that treats finished files alike."""
        if isinstance(error, AffineError):
            lines = error.message.splitlines()
        elif isinstance(error, OSError) and error.strerror:
            lines = [f"{error.filename}: {error.strerror}" if error.filename else error.strerror]
        else:
            lines = [": ".join([type(error).__name__, *str(error).splitlines()[:1]])]
        more = f" (and {len(lines) - 1} more lines there)" if len(lines) > 1 else ""
        if is_no_space(error):
            kind = "AffineError"
        elif isinstance(error, AffineError) and not isinstance(error, PolicyError):
            kind = type(error).__name__
        else:
            kind = "JobError"
        names_it = lines[0].startswith(where)
        return cls(rank, rank, kind, f"{lines[0]}{more}" if names_it else f"{where} failed: {lines[0]}{more}")

    @classmethod
    def parse(cls, data: bytes) -> Failure:
        return cls(**json.loads(data))

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    def error(self) -> AffineError:
        found = getattr(errors, self.kind, None)
        kind = found if isinstance(found, type) and issubclass(found, AffineError) else JobError
        return kind(self.text, rank=self.rank)


class Link:
    """The line of process ``rank`` of ``size``. ``connect`` is called in the thread and returns the store.

    ``failure`` is set as soon as this process knows that the job has failed, and stays. ``names`` are how the
    processes are called towards a person, once they are known; ``reached`` is set when the store has answered. Whoever
    starts a link closes it.
    """

    def __init__(
        self, connect: Callable[[], Store], rank: int, size: int, timeout: float, *, beat: float = BEAT_SECONDS
    ) -> None:
        self.rank = rank
        self.size = size
        self.names = [f"rank {other}" for other in range(size)]
        self.failure: Failure | None = None
        self._connect = connect
        self._timeout = timeout
        self._beat = beat
        self._requests: queue.SimpleQueue[Callable[[Store], None]] = queue.SimpleQueue()
        self._watched: dict[int, _Pulse] = {}
        self._count = 0
        self._rounds = 0
        self._left = False
        self._ended = threading.Event()
        self.reached = threading.Event()
        # Daemons, because a call of the store may never return.
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._run, self._watch)]

    def start(self) -> None:
        """The thread runs; requests made from now on are answered when the store is reached."""
        for thread in self._threads:
            thread.start()

    def ask(self, request: Callable[[Store], Answer], *, anyway: float = 0.0) -> Answer:
        """What ``request`` returns, called in the thread that talks to the store.

        Raises the job's failure as soon as there is one. With ``anyway`` that many seconds are waited in any case.
        """
        future: Future[Answer] = Future()

        def answer(store: Store) -> None:
            try:
                future.set_result(request(store))
            except BaseException as error:
                future.set_exception(error)
                raise

        self._requests.put(answer)
        end = time.monotonic() + anyway
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except NotYet:
                pass
            except RuntimeError:
                # The store is lost. The thread that found out says so to everybody, in a moment.
                self._ended.wait(self._timeout)
            if self._ended.is_set() or time.monotonic() >= end:
                self.check()
            if self._ended.is_set():
                raise JobError(f"{self.names[self.rank]}: has left its job, and cannot ask anything of it any more.")

    def check(self) -> None:
        """Raises the job's failure if there is one. Costs nothing: it is asked before every read."""
        if self.failure is not None:
            raise self.failure.error()

    def watch(self) -> None:
        """From now on the others are watched: by the first process each, by each other the first.

        All must have been heard of before.
        """
        self._watched = {other: _Pulse() for other in (range(1, self.size) if self.rank == 0 else (0,))}

    def report(self, failure: Failure) -> Failure:
        """The job has failed; returns the failure that was reported first, which may be another's."""
        self.failure = self.failure or failure
        self.failure = self._anyway(lambda store: _first_failure(store, failure)) or self.failure
        return self.failure

    def leave(self) -> None:
        """The others no longer expect a sign of life."""

        def say(store: Store) -> None:
            self._left = True
            store.set(_pulse(self.rank), LEFT.decode())

        self._anyway(say)

    @property
    def is_down(self) -> bool:
        """Whether nothing can be heard of the others any more."""
        return self._ended.is_set()

    def staying(self, quiet: float) -> list[int]:
        """Who of those that are watched has neither left nor been silent for more than ``quiet`` seconds.

        Nobody where that cannot be known any more.
        """
        others = list(self._watched)
        values = self._anyway(lambda store: store.multi_get([*map(_pulse, others)])) if others else None
        if values is None:
            return []
        gone = {other for other in others if self._watched[other].silent > quiet}
        if self.failure is not None and self.failure.by != self.failure.rank:
            gone.add(self.failure.rank)
        found = zip(others, values, strict=True)
        return [other for other, value in found if bytes(value) != LEFT and other not in gone]

    def close(self) -> None:
        """After this the store is not used any more."""
        self._ended.set()
        self._requests.put(lambda store: None)
        # An interpreter that ends while a thread returns from torch's code takes the process down with it.
        for thread in self._threads:
            thread.join(LAST_SECONDS)

    def _anyway(self, request: Callable[[Store], Answer]) -> Answer | None:
        try:
            return self.ask(request, anyway=LAST_SECONDS)
        except AffineError:
            return None

    def _run(self) -> None:
        try:
            store = self._connect()
            self._say(store)
            self.reached.set()
            looked = spoken = time.monotonic()
            while not self._ended.is_set():
                now = time.monotonic()
                if now - looked >= LOOK_SECONDS and self.failure is None:
                    looked = now
                    self._look(store)
                if now - spoken >= self._beat:
                    self._say(store)
                    self._listen(store, now - spoken)
                    spoken = now
                self._rounds += 1
                try:
                    self._requests.get(timeout=LOOK_SECONDS / 2)(store)
                except queue.Empty:
                    continue
        except Exception as error:
            reached = "the line to the store of the job broke" if self.reached.is_set() else "its store is not reached"
            self._lose(f"{reached} ({_first_line(error)})")
        finally:
            self._ended.set()

    def _say(self, store: Store) -> None:
        if not self._left:
            self._count += 1
            store.set(_pulse(self.rank), str(self._count))

    def _look(self, store: Store) -> None:
        if store.check([FAILED]):
            self.failure = Failure.parse(store.get(FAILED))

    def _listen(self, store: Store, elapsed: float) -> None:
        watched = self._watched
        if not watched:
            return
        for (other, pulse), value in zip(watched.items(), store.multi_get([*map(_pulse, watched)]), strict=True):
            # Time in which this process itself did not run, or its machine slept, is no silence of the other.
            pulse.hear(bytes(value), min(elapsed, 2 * self._beat))
            if pulse.silent > self._timeout and self.failure is None:
                failure = Failure(
                    other,
                    self.rank,
                    "JobError",
                    f"{self.names[other]} is lost: {self.names[self.rank]} has not heard of it for {self._timeout:g} "
                    "s, expected a sign of life every second. It was killed or hangs, or its machine or the network "
                    "has failed; look there, then run the same command again, which resumes.",
                )
                self.failure = _first_failure(store, failure)

    def _watch(self) -> None:
        """The store itself may fall silent, and then the other thread waits for it for ever."""
        rounds, silent, last = self._rounds, 0.0, time.monotonic()
        while not self._ended.wait(self._beat):
            now = time.monotonic()
            same = self._rounds == rounds
            silent = silent + min(now - last, 2 * self._beat) if same and self._rounds else 0.0
            rounds, last = self._rounds, now
            if silent > self._timeout:
                self._lose(f"the store of the job has not answered for {self._timeout:g} s")
                self._ended.set()

    def _lose(self, fact: str) -> None:
        if self.failure is None and not self._ended.is_set():
            self.failure = Failure(
                0,
                self.rank,
                "JobError",
                f"{self.names[0]} is lost: {fact}. Its process or the launcher on its machine was stopped, or its "
                "machine or the network has failed; look there, then run the same command again, which resumes.",
            )


class _Pulse:
    """What was last heard of a process, and for how long it has been that."""

    __slots__ = ("silent", "value")

    def __init__(self) -> None:
        self.value = b""
        self.silent = 0.0

    def hear(self, value: bytes, elapsed: float) -> None:
        self.silent = self.silent + elapsed if value == self.value and value != LEFT else 0.0
        self.value = value


def _pulse(rank: int) -> str:
    return f"pulse/{rank}"


def _first_failure(store: Store, failure: Failure) -> Failure:
    return Failure.parse(store.compare_set(FAILED, "", failure.to_text()))


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
