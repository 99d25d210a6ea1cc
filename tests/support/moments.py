"""Random moments of a run that is to be killed, as long as the run takes on this machine at the time."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

SEED = "DEEPSPEED_AFFINE_SEED"


class Moments:
    """``whole`` is how many seconds a run takes that nobody kills; it follows what is seen of later ones.

    Without that, a machine that becomes less busy, or busier, has every kill come too late, or too early.
    """

    def __init__(self, whole: float, of: str = "") -> None:
        seed = os.environ.get(SEED, "20261130")
        print("seed", seed)
        self.whole = whole
        self.random = random.Random(f"{seed} {of}")
        self._latest = self._share = 0.0

    def between(self, low: float, high: float) -> float:
        """After how many seconds the run that starts now is killed: between these shares of the whole."""
        self._latest, self._share = self.random.uniform(low, high) * self.whole, high
        return self._latest

    def was_late(self) -> None:
        """The run had ended by itself before: none of the next moments is later."""
        self.whole = self._latest / self._share

    @contextmanager
    def another(self) -> Iterator[None]:
        """A run in the block is not killed; it may have had less to do."""
        began = time.monotonic()
        yield
        self.whole = max(self.whole, time.monotonic() - began)
