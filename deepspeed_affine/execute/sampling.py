"""A part chosen at random, and what looking at it proves: exact probabilities, not rules of thumb.

Of ``units`` equally likely ones a fixed number is chosen, each set of that size as likely as any other. So a damaged
unit is among them with probability ``chosen / units`` wherever it is and however large, and ``n`` damaged units are
all missed with the hypergeometric probability.
"""

from __future__ import annotations

import math
import random
import secrets
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["LEAST_BYTES", "Sample"]

LEAST_BYTES = 64 << 20
SHARE = Fraction(1, 100)


@dataclass(frozen=True, slots=True)
class Sample:
    """``chosen`` of ``units`` units; the same ``seed`` chooses the same ones."""

    units: int
    chosen: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.chosen <= self.units:
            raise ValueError(f"{self.chosen} of {self.units} units")

    @classmethod
    def of(cls, units: int, nbytes: int, *, seed: int | None = None, least: int | None = None) -> Sample:
        """A hundredth of ``units`` units that hold ``nbytes`` together; more where that would be less than ``least``
        bytes on average (64 MB), and all of them where there are no more."""
        wanted = Fraction(min(nbytes, LEAST_BYTES if least is None else least), nbytes) if nbytes else Fraction(1)
        return cls(units, math.ceil(units * max(SHARE, wanted)), new_seed() if seed is None else seed)

    @property
    def found(self) -> float:
        """The probability that one damaged unit, any one, is among those that are chosen."""
        return self.chosen / self.units if self.units else 1.0

    def missed(self, damaged: int) -> float:
        """The probability that none of ``damaged`` damaged units, any ones, is among those that are chosen."""
        if damaged + self.chosen > self.units:
            return 0.0
        rest = self.units - damaged
        return math.exp(_log_choose(rest, self.chosen) - _log_choose(self.units, self.chosen)) if damaged else 1.0

    def pick(self) -> frozenset[int]:
        """The numbers of the chosen units."""
        return frozenset(random.Random(self.seed).sample(range(self.units), self.chosen))


def new_seed() -> int:
    """One that nobody can foresee."""
    return secrets.randbits(32)


def _log_choose(count: int, taken: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(taken + 1) - math.lgamma(count - taken + 1)
