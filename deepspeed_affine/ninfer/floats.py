"""The small floating-point formats as tables and roundings: bfloat16, E4M3FN and E2M1, exact in binary32."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.ninfer.errors import ValueDomainError

__all__ = [
    "CACHED",
    "E2M1",
    "E4M3FN",
    "E4M3FN_MAX",
    "as_array",
    "as_float32",
    "bf16_to_float32",
    "e2m1_words",
    "e4m3fn_words",
    "round_to_bf16",
    "widen_bf16",
]

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

CACHED = 1 << 16
"""Elements worked on at once where a pass follows a pass: what is between them stays in a processor's cache."""

E4M3FN_MAX = 448.0
_SIGN = np.uint32(0x80000000)
_TOP = np.uint32(0x7F800000)
_OTHER_ORDER_16 = np.dtype(np.uint16).newbyteorder()
_OTHER_ORDER_32 = np.dtype(np.uint32).newbyteorder()


def _e4m3fn_table() -> F32:
    exponent, mantissa = np.divmod(np.arange(128), 8)
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3FN: F32 = _e4m3fn_table()
"""The value of each of the 256 codes; 0x7F and 0xFF are NaN, and there are no infinities."""

E2M1: F32 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
"""The value of each of the 16 codes; 8 is minus zero."""


def bf16_to_float32(words: U16) -> F32:
    """The same numbers, every bit kept: a bfloat16 is the upper half of a float32."""
    given = np.asarray(words).astype(np.uint16, copy=False)
    found = np.empty(given.shape, np.uint32)
    widen_bf16(given, found)
    return found.view(np.float32)


def widen_bf16(words: U16, out: npt.NDArray[np.uint32]) -> None:
    """``out`` holds the float32 words of the bfloat16 ones."""
    # With the bytes of both in the other order an upper half is a lower one, and widening is all there is to do: one
    # pass, where widening and shifting are two.
    np.copyto(out.view(_OTHER_ORDER_32), words.view(_OTHER_ORDER_16))


def round_to_bf16(values: F32) -> U16:
    """The nearest bfloat16 words, ties to even; infinities stay, and a NaN stays a NaN of its sign."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(-1)
    found = np.empty(len(bits), np.uint16)
    scratch = np.empty(min(len(bits), CACHED), np.uint32)
    for low in range(0, len(bits), CACHED):
        piece, target = bits[low : low + CACHED], found[low : low + CACHED]
        part = scratch[: len(piece)]
        np.right_shift(piece, np.uint32(16), out=part)
        np.bitwise_and(part, np.uint32(1), out=part)
        np.add(part, np.uint32(0x7FFF), out=part)
        np.add(part, piece, out=part)
        np.right_shift(part, np.uint32(16), out=target, casting="unsafe")
        with np.errstate(invalid="ignore"):
            odd = np.isnan(piece.view(np.float32))
        if odd.any():
            # Rounding up could carry a NaN's payload into infinity, or round it away.
            target[odd] = (piece[odd] >> np.uint32(16)) | np.uint32(0x40)
    return found.reshape(np.shape(values))


def e4m3fn_words(values: F32) -> U8:
    """The nearest E4M3FN codes, ties to even, of numbers within +-448; the sign of zero is kept."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    size = bits & ~_SIGN
    normal = ((size + np.uint32(0x7FFFF) + ((size >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(960)
    # Below 2**-6 codes are multiples of 2**-9, and the product is exact.
    small = np.rint(size.view(np.float32) * np.float32(512)).astype(np.uint32)
    words = np.where(size >= np.uint32(0x3C800000), normal, small)
    found: U8 = (words | ((bits & _SIGN) >> np.uint32(24))).astype(np.uint8)
    return found


def e2m1_words(values: F32) -> U8:
    """The nearest E2M1 codes, ties to the even code; what is beyond 6 becomes 6, and the sign of zero is kept."""
    size = np.abs(values)
    words = np.zeros(size.shape, dtype=np.uint8)
    for bound, inclusive in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        words += (size >= np.float32(bound)) if inclusive else (size > np.float32(bound))
    words |= np.signbit(values).astype(np.uint8) << np.uint8(3)
    return words


def as_array(values: Any, format_name: str) -> npt.NDArray[Any]:
    """The values, also a torch tensor's, as a numpy array.

    bfloat16, which numpy has not, becomes words for ``bf16`` and float32 for every other format.
    """
    torch = sys.modules.get("torch")
    try:
        if torch is None or not isinstance(values, torch.Tensor):
            return np.asarray(values)
        values = values.detach().cpu()
        if values.dtype is not torch.bfloat16:
            found: npt.NDArray[Any] = values.numpy()
            return found
    except (TypeError, ValueError, RuntimeError) as error:
        # Rows of several lengths, types numpy has not, tensors without data.
        raise ValueDomainError(f"{format_name}: values cannot be taken ({error}); expected an array.") from error
    words: npt.NDArray[Any] = values.contiguous().view(torch.int16).numpy().view(np.uint16)
    return words if format_name == "bf16" else bf16_to_float32(words)


def as_float32(values: Any, what: str) -> F32:
    """Finite source values as float32, rounded to nearest where they are wider; others are a ``ValueDomainError``."""
    found = np.asarray(values)
    if found.dtype.kind != "f":
        raise ValueDomainError(f"{what}: has values of type {found.dtype}; expected floating-point numbers.")
    with np.errstate(over="ignore"):
        result: F32 = found.astype(np.float32, copy=False)
    if not np.isfinite(result).all():
        raise ValueDomainError(f"{what}: has a value that is no finite float32; expected finite ones only.")
    return result
