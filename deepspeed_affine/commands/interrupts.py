"""Signals that end a command: what was finished is kept, and what is half-written goes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interruptible"]


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGTERM (a scheduler's preemption, or a launcher whose other process failed) ends like Ctrl-C.

    Only the main thread of a program can say what signals do; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second one must not break up the tidying that the first one began.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)
