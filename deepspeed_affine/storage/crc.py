"""CRC-32 of bytes that were summed in parts: zlib has the combination in C and Python does not expose it."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["crc32_combine", "crc32_of_zeros"]

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2) modulo the CRC's, bits reflected as zlib keeps them."""
    product, bit = 0, _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _shift(byte_count: int) -> int:
    """Return x to the power of 8 * byte_count: what appending that many bytes multiplies a CRC by."""
    result, power, exponent = _ONE, _ONE >> 1, 8 * byte_count
    while exponent:
        if exponent & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        exponent >>= 1
    return result


def crc32_combine(first: int, second: int, second_length: int) -> int:
    """Return the CRC-32 of A + B, given those of A and of B and the length of B in bytes."""
    if second_length < 0:
        raise ValueError(f"a length of {second_length} bytes")
    return _multiply(_shift(second_length), first) ^ second


def crc32_of_zeros(length: int) -> int:
    """Return the CRC-32 of ``length`` zero bytes without touching any."""
    # The CRC's inner register starts and ends inverted; zeros only shift it.
    return _multiply(_shift(length), 0xFFFFFFFF) ^ 0xFFFFFFFF
