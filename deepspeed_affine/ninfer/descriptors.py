"""Open files by number, a bounded few at a time: a set may have more files than a process may open."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["MOST_OPEN", "Descriptors"]

# Two sets at work together (one read, one written) take less than a hundred descriptors.
MOST_OPEN = 32


class Descriptors:
    """A pool of descriptors, each opened by ``open_one(number)`` when it is wanted; safe to share between threads.

    Idle ones beyond ``most`` are closed, the longest unused first, and opened again when they are wanted.
    """

    def __init__(self, open_one: Callable[[int], int], closed: Callable[[], Exception], most: int = MOST_OPEN) -> None:
        self._open_one = open_one
        self._closed_error = closed
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._users: dict[int, int] = {}
        self._closed = False

    @contextmanager
    def borrow(self, number: int) -> Iterator[int]:
        """The descriptor of file ``number``, which stays open within the ``with`` block.

        Raises what opening it raises, and ``closed()`` after ``close``.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if number not in self._kept:
                self._kept[number] = self._open_one(number)
            self._kept.move_to_end(number)
            self._users[number] = self._users.get(number, 0) + 1
            fd = self._kept[number]
            self._close_idle(self._most)
        try:
            yield fd
        finally:
            with self._lock:
                self._users[number] -= 1
                if not self._users[number]:
                    del self._users[number]
                self._close_idle(0 if self._closed else self._most)

    def put(self, number: int, fd: int) -> None:
        """``fd``, already open, is the descriptor of file ``number`` from now on."""
        with self._lock:
            self._kept[number] = fd
            self._close_idle(self._most)

    def close(self) -> None:
        """After this nothing is borrowed any more; what is in use is closed when it is given back."""
        with self._lock:
            self._closed = True
            self._close_idle(0)

    def _close_idle(self, most: int) -> None:
        if len(self._kept) <= most:
            return
        for number in [number for number in self._kept if number not in self._users][: len(self._kept) - most]:
            os.close(self._kept.pop(number))
