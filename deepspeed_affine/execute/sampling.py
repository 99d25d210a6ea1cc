"""A part chosen at random, and what looking at it proves: exact probabilities, not rules of thumb.

Of ``units`` equally likely ones a fixed number is chosen, each set of that size as likely as any other. So a damaged
unit is among them with probability ``chosen / units`` wherever it is and however large, and ``n`` damaged units are
all missed with the hypergeometric probability.

Where units are of any size, as files are, a few of them may hold next to nothing. Then they are put into groups of
about the same size first, and groups are chosen: each byte is in one group, so all are as likely, and what is read is
never less than was asked for.
"""

from __future__ import annotations

import heapq
import math
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["LEAST_BYTES", "Sample", "group_evenly"]

LEAST_BYTES = 64 << 20
SHARE = Fraction(1, 100)
MOST_GROUPS = 1000
COARSER = 0.9
SLACK = Fraction(11, 10)


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


def group_evenly(
    sizes: Sequence[int], *, seed: int | None = None, least: int | None = None
) -> tuple[list[list[int]], Sample]:
    """Units of these sizes, by number, in groups, and a sample of the groups: whichever are chosen, they hold at least
    a hundredth of all bytes and at least ``least`` (64 MB), or there is no more.

    The same sizes are always grouped in the same way: by the first grouping, from the finest on, that has hardly more
    read on average than is asked for; else by the finest of those that have the least read, or hardly more.
    """
    total, seed = sum(sizes), new_seed() if seed is None else seed
    wanted = max(math.ceil(total * SHARE), min(total, LEAST_BYTES if least is None else least))
    if wanted >= total:
        return [[unit] for unit in range(len(sizes))], Sample(len(sizes), len(sizes), seed)
    order = sorted(range(len(sizes)), key=lambda unit: (-sizes[unit], unit))
    tried: list[tuple[Fraction, int, int]] = []
    count = min(len(sizes), MOST_GROUPS)
    while count:
        loads = sorted(sum(sizes[unit] for unit in group) for group in _groups(order, sizes, count))
        chosen = held = 0
        while held < wanted:
            held, chosen = held + loads[chosen], chosen + 1
        tried.append((Fraction(chosen, count), count, chosen))
        if tried[-1][0] <= SLACK * Fraction(wanted, total):
            break
        count = min(count - 1, int(count * COARSER))
    best = min(share for share, _, _ in tried)
    count, chosen = max((count, chosen) for share, count, chosen in tried if share <= best * SLACK)
    return _groups(order, sizes, count), Sample(count, chosen, seed)


def _groups(order: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """The units, from the largest on, each put into the group that is smallest by then."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, 0, at) for at in range(count)]
    for unit in order:
        load, units, at = loads[0]
        groups[at].append(unit)
        # Of equally small groups the one with fewest units comes first, so that empty files are spread too.
        heapq.heapreplace(loads, (load + sizes[unit], units + 1, at))
    return groups


def new_seed() -> int:
    """One that nobody can foresee."""
    return secrets.randbits(32)


def _log_choose(count: int, taken: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(taken + 1) - math.lgamma(count - taken + 1)
