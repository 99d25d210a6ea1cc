"""Running a partition function on markers: where each shard element comes from, and by which factor.

A marker encodes one digit of one coordinate of F, so it is a few values spread out with stride 0, and every
number it holds is exact in the dtype under test with room for a division. A function that needs dense
memory gets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.lowering.compress import HOLE, Ints

__all__ = ["SPREADS", "Floats", "PartitionFn", "PartitionRun", "RankTable", "same_bytes"]

PartitionFn = Callable[[torch.Tensor, int], Any]
Floats = npt.NDArray[np.float64]

SPREADS = (1.0, 1000.0)
"""The magnitudes of random data: two, so that a threshold inside the function shows."""

_PROBED = frozenset(
    found
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
        *("float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
    if (found := getattr(torch, name, None)) is not None
)
"""The dtypes that hold a zero, a one and a few more numbers exactly."""

VIEWS_ONLY = "An affine map describes views of F, each times a constant at most."


@dataclass(frozen=True, slots=True)
class RankTable:
    """What one rank holds: ``addresses[i]`` is the element of F at shard index i, held times ``scales[i]``.

    Entries whose address is ``HOLE`` depend on no element of F: the function filled them with zeros.
    """

    shape: tuple[int, ...]
    addresses: Ints
    scales: Floats


class PartitionRun:
    """A partition function under examination, with the shape and dtype it is examined at."""

    def __init__(self, fn: PartitionFn, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if dtype not in _PROBED:
            raise UnsupportedLayoutError(
                f"Probing with dtype {dtype!r}: markers are real numbers; expected a real torch dtype of eight bits or "
                "more. The layout does not depend on it, so pass another one."
            )
        self.fn = fn
        self.shape = shape
        self.dtype = dtype
        self.numel = math.prod(shape)
        self._dense = False
        self._shapes: dict[int, tuple[int, ...]] = {}

    def __call__(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of ``rank``, detached; the function may keep, change or split up what it was given."""
        with torch.no_grad():
            found = self.fn(full, rank)
        if isinstance(found, list | tuple):
            found = found[0] if found else None
        if found is None:
            found = torch.empty(0, dtype=self.dtype)
        if not isinstance(found, torch.Tensor):
            self.refuse(rank, f"it returned a {type(found).__name__}; expected a tensor, None or a tuple led by one")
        if found.layout != torch.strided or found.is_nested or found.is_meta:
            self.refuse(rank, f"it returned a tensor of layout {found.layout} on {found.device}; expected a dense one")
        shard = found.detach()
        shape = self._shapes.setdefault(rank, tuple(shard.shape))
        if shape != tuple(shard.shape):
            self.refuse(
                rank, f"it is data-dependent: the shard's shape was {shape} and, for other data, {tuple(shard.shape)}"
            )
        if shard.dtype != self.dtype:
            self.refuse(rank, f"it turns {self.dtype} into {shard.dtype}; probe it with the dtype it keeps")
        return shard

    def table(self, rank: int) -> RankTable:
        """The addresses and factors of ``rank``'s shard, read off markers; they are not proved yet."""
        zeros = self._marked(rank, torch.zeros((), dtype=self.dtype))
        if not bool(np.isfinite(zeros).all()) or bool(zeros.any()):
            self.refuse_by_kind(rank)
        scales = self._marked(rank, torch.ones((), dtype=self.dtype))
        if not bool(np.isfinite(scales).all()):
            self.refuse_by_kind(rank)
        if not self.dtype.is_floating_point and bool(((scales > 1) | (scales < 0)).any()):
            self.refuse(
                rank, f"it multiplies {self.dtype} numbers, which a map cannot undo; probe it with a float dtype"
            )
        held = scales != 0
        addresses = np.zeros(scales.shape, dtype=np.int64)
        stride = self.numel
        for axis, extent in enumerate(self.shape):
            stride //= max(extent, 1)
            for weight, digits in self._digits(axis, extent):
                raw = self._marked(rank, digits)
                value = np.divide(raw, scales, out=np.zeros_like(raw), where=held)
                whole = np.rint(value)
                exact = np.abs(raw - whole * scales) <= 4 * self._epsilon() * np.abs(raw)
                if not bool((exact & (whole >= 0) & (whole * weight < extent) | ~held).all()):
                    self.refuse_by_kind(rank)
                addresses += whole.astype(np.int64) * (weight * stride)
        if self.numel and bool((addresses >= self.numel).any()):
            self.refuse_by_kind(rank)
        addresses[~held] = HOLE
        return RankTable(self._shapes[rank], addresses, scales)

    def _digits(self, axis: int, extent: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The digits of axis ``axis``'s coordinates, as markers of few values, each with its weight."""
        base = self._base()
        weight = 1
        while weight < extent:
            coordinates = torch.arange(extent) // weight % base
            view = [extent if other == axis else 1 for other in range(len(self.shape))]
            yield weight, coordinates.to(self.dtype).reshape(view)
            weight *= base

    def _base(self) -> int:
        """How many marker values the dtype keeps apart even after a division has rounded them."""
        if self.dtype == torch.bool:
            return 2
        if self.dtype.is_floating_point:
            return max(2, 1 << max(1, int(-math.log2(torch.finfo(self.dtype).eps)) - 3))
        return min(torch.iinfo(self.dtype).max, 1 << 40)

    def _epsilon(self) -> float:
        return float(torch.finfo(self.dtype).eps) if self.dtype.is_floating_point else 0.0

    def _marked(self, rank: int, values: torch.Tensor) -> Floats:
        """The shard of ``rank`` when F is ``values`` spread over its shape."""
        marker = values.expand(self.shape)
        if not self._dense:
            try:
                return self._array(self(marker, rank))
            except UnsupportedLayoutError:
                raise
            except Exception:
                # Functions that write into their input, or view it in another shape, need real memory. If that is
                # not what went wrong, the second call says so to the caller.
                self._dense = True
        return self._array(self(marker.clone(memory_format=torch.contiguous_format), rank))

    @staticmethod
    def _array(shard: torch.Tensor) -> Floats:
        array: Floats = shard.cpu().to(torch.float64).numpy()
        return array

    def random(self, generator: torch.Generator, spread: float) -> torch.Tensor:
        """A parameter of independent random values, negative ones included where the dtype has them."""
        if self.dtype.is_floating_point:
            return (torch.randn(self.shape, generator=generator) * spread).to(self.dtype)
        if self.dtype == torch.bool:
            return torch.randint(0, 2, self.shape, generator=generator).bool()
        limits = torch.iinfo(self.dtype)
        low, high = max(limits.min, -(1 << 30)), min(limits.max, 1 << 30)
        return torch.randint(low, high, self.shape, generator=generator).to(self.dtype)

    def refuse_by_kind(self, rank: int) -> NoReturn:
        """Say in which way the function is not a view: random, adding, mixing several elements, or data-dependent."""
        generator = torch.Generator().manual_seed(7)
        first, second = self.random(generator, SPREADS[0]), self.random(generator, SPREADS[1])
        one = self(first.clone(), rank)
        if not same_bytes(one, self(first.clone(), rank)):
            self.refuse(rank, "it is not deterministic: the same parameter gave two different shards")
        # Eight-bit floats cannot be added, so for them the kinds are not told apart further.
        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            offset = self(torch.zeros(self.shape, dtype=self.dtype), rank).double()
            total = self(first + second, rank).double() + offset
            parts = one.double() + self(second.clone(), rank).double()
            slack = 64 * self._epsilon() * (1 + max(1, self.numel) ** 0.5)
            if torch.allclose(total, parts, rtol=slack, atol=slack * SPREADS[1]):
                if bool(offset.any()):
                    self.refuse(rank, "it is adding something: a parameter of zeros gives a shard that is not zero")
                self.refuse(rank, "it is mixing: a shard element combines several elements of F (a sum or a mean)")
        self.refuse(rank, "it is data-dependent: which element of F a shard element is changes with the data")

    @staticmethod
    def refuse(rank: int, fact: str) -> NoReturn:
        raise UnsupportedLayoutError(f"The partition function, rank {rank}: {fact}. {VIEWS_ONLY}", rank=rank)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same order; NaN equals itself, -0.0 differs from 0.0."""
    return bool(torch.equal(_bytes(left), _bytes(right)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
