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
    """Inside, SIGTERM (a scheduler's preemption, or a launcher whose other process failed) and SIGHUP (a terminal that
    is gone, unless it is ignored as under ``nohup``) end like Ctrl-C.

    Only the main thread of a program can say what signals do; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second one must not break up the tidying that the first one began.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)
