"""Planning without the cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Cyclic garbage is not looked for within; afterwards the collector is as it was, also after an error.

    A plan is millions of tuples and no cycle. Without this the collector walks through all of them, and through every
    object of the libraries that are loaded, again and again: over 40 % of planning.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
