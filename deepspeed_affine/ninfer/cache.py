"""Decoded parents, each made once whichever threads ask for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

__all__ = ["DecodedCache"]

Values = npt.NDArray[Any]


class DecodedCache:
    """The decoded parents used last, within a number of bytes; each is made once, whichever threads ask for it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}
        self._kept: OrderedDict[str, Values] = OrderedDict()

    def takes(self, nbytes: int) -> bool:
        return nbytes <= self._limit

    def get(self, key: str, make: Callable[[], Values]) -> Values:
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
            values = make()
            with self._lock:
                self._kept[key] = values
                while sum(kept.nbytes for kept in self._kept.values()) > self._limit:
                    self._kept.popitem(last=False)
            return values

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
