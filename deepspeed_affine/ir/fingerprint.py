"""Polynomial fingerprints: equality of sets of offsets without listing one of them.

The set with offsets x is the polynomial sum of z**x. A strided block is z**offset times one geometric sum per axis, so
its value at a point costs a few powers whatever its size, its strides, or whether they interleave. Blocks tile
``[0, n)`` exactly when their sum is the geometric sum of n terms; at a secret random point of the field of 2**127 - 1
elements two different multisets of offsets below n agree with probability below n / 2**127.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from deepspeed_affine.ir.lattice import Lattice

__all__ = ["PRIME", "Fingerprint"]

PRIME = 2**127 - 1

_WINDOW = 8
_WINDOWS = 8


class Fingerprint:
    """Evaluates blocks at one secret point; powers come from tables, geometric sums are kept."""

    __slots__ = ("_sums", "_tables", "point")

    def __init__(self, point: int | None = None) -> None:
        self.point = point if point is not None else 2 + secrets.randbelow(PRIME - 3)
        self._tables: list[list[int]] = []
        self._sums: dict[tuple[int, int], int] = {}
        base = self.point
        for _ in range(_WINDOWS):
            row = [1]
            for _ in range(2**_WINDOW - 1):
                row.append(row[-1] * base % PRIME)
            self._tables.append(row)
            base = row[-1] * base % PRIME

    def power(self, exponent: int) -> int:
        """``point ** exponent`` for an exponent below 2**64."""
        value = 1
        for row in self._tables:
            if not exponent:
                break
            low = exponent & 255
            if low:
                value = value * row[low] % PRIME
            exponent >>= _WINDOW
        return value

    def progression(self, extent: int, stride: int) -> int:
        """The sum of ``point ** (i * stride)`` for ``0 <= i < extent``."""
        if extent == 1:
            return 1
        known = self._sums.get((extent, stride))
        if known is None:
            step = self.power(stride) - 1
            if step:
                known = (pow(step + 1, extent, PRIME) - 1) * pow(step, -1, PRIME) % PRIME
            else:
                known = extent
            self._sums[(extent, stride)] = known
        return known

    def block(self, offset: int, shape: Sequence[int], strides: Sequence[int]) -> int:
        """The value of a strided block; zero when it is empty."""
        value = self.power(offset)
        for extent, stride in zip(shape, strides, strict=True):
            if extent != 1:
                value = value * self.progression(extent, stride) % PRIME if extent else 0
        return value

    def prefix(self, lattice: Lattice, end: int) -> int:
        """The value of the lattice's keys below ``end``."""
        value, key, digits = 0, lattice.key, lattice.digits
        for position, (extent, stride, _) in enumerate(digits):
            inner = digits[position + 1 :]
            reach = sum((n - 1) * s for n, s, _ in inner)
            whole = min(extent, max(0, (end - 1 - reach - key) // stride + 1)) if end > key else 0
            if whole:
                block = self.power(key) * self.progression(whole, stride) % PRIME
                for n, s, _ in inner:
                    block = block * self.progression(n, s) % PRIME
                value += block
            if whole == extent:
                return value % PRIME
            key += whole * stride
        if key < end:
            value += self.power(key)
        return value % PRIME

    def total(self, blocks: Iterable[int]) -> int:
        return sum(blocks) % PRIME
