"""The formats bit by bit, in plain Python and exact fractions: slow, and written apart from the package."""

from __future__ import annotations

import struct
from fractions import Fraction
from functools import lru_cache
from math import inf, isinf, isnan, nan

GROUPED = {
    "q2_g64_fp16": (2, 64, 16, 0, -1, 2),
    "q4_g64_fp16": (4, 64, 32, 0, -8, 7),
    "q5_g64_fp16": (5, 64, 32, 8, -16, 15),
    "q6_g64_fp16": (6, 64, 32, 16, -32, 31),
    "q8_g32_fp16": (8, 32, 32, 0, -127, 127),
    "t2_g128_fp16": (2, 128, 32, 0, -1, 1),
}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def f32(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def f32_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def f16(word: int) -> float:
    return struct.unpack("<e", struct.pack("<H", word))[0]


def bits(data: bytes, start: int, count: int) -> int:
    """``count`` bits from bit ``start`` on, the lowest bit of a byte first."""
    return sum((data[(start + k) // 8] >> ((start + k) % 8) & 1) << k for k in range(count))


@lru_cache(maxsize=1 << 16)
def nearest_f32(value: Fraction) -> float:
    """The float32 nearest to an exact number, ties to even, by trying neighbours of a double."""
    if value == 0:
        return 0.0
    word = 0
    low, high = 0, 0x7F800000
    size = abs(value)
    while high - low > 1:
        word = (low + high) // 2
        if Fraction(f32(word)) <= size:
            low = word
        else:
            high = word
    below = Fraction(f32(low))
    above = Fraction(2) ** 128 if low + 1 == 0x7F800000 else Fraction(f32(low + 1))
    pick = low if size - below < above - size or (size - below == above - size and low % 2 == 0) else low + 1
    return f32(pick) if value > 0 else -f32(pick)


def e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    e, m = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return nan
    return sign * (m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))


def times(scale: float, code: int) -> float:
    """One binary32 multiply, with its signs of zero."""
    if isnan(scale) or (isinf(scale) and code == 0):
        return nan
    if isinf(scale):
        return inf if (scale > 0) == (code > 0) else -inf
    if code == 0 or scale == 0:
        return -0.0 if (str(scale)[0] == "-") != (code < 0) else 0.0
    return nearest_f32(Fraction(scale) * code)


def sizes(name: str, rows: int, columns: int) -> tuple[int, int, int, int]:
    """``(groups a row, high offset, scale offset, total)``"""
    _, group, base, high, _, _ = GROUPED[name]
    groups = up(columns, 128) // group
    high_off = up(rows * groups * base, 256)
    scale_off = high_off + up(rows * groups * high, 256)
    return groups, high_off, scale_off, scale_off + 2 * rows * groups


def code_at(name: str, data: bytes, rows: int, columns: int, r: int, k: int) -> int:
    width, group, base, high, _, _ = GROUPED[name]
    groups, high_off, _, _ = sizes(name, rows, columns)
    x, i = r * groups + k // group, k % group
    if width in (2, 4, 8):
        u = bits(data[x * base : (x + 1) * base], i * width, width)
    else:
        u = bits(data[x * base : (x + 1) * base], i * 4, 4)
        u |= bits(data[high_off + x * high : high_off + (x + 1) * high], i * (width - 4), width - 4) << 4
    if name.startswith("q2"):
        return u - 1
    return u - 2**width if u >= 2 ** (width - 1) else u


def decode_grouped(name: str, data: bytes, rows: int, columns: int) -> list[float]:
    group = GROUPED[name][1]
    groups, _, scale_off, total = sizes(name, rows, columns)
    assert len(data) == total
    found = []
    for r in range(rows):
        for k in range(columns):
            at = scale_off + 2 * (r * groups + k // group)
            scale = f16(int.from_bytes(data[at : at + 2], "little"))
            found.append(times(scale, code_at(name, data, rows, columns, r, k)))
    return found


def decode_fp8(data: bytes, rows: int, columns: int) -> list[float]:
    scale_off = up(rows * columns, 256)
    found = []
    for r in range(rows):
        scale = f32(int.from_bytes(data[scale_off + 2 * r : scale_off + 2 * r + 2], "little") << 16)
        for k in range(columns):
            code = e4m3(data[r * columns + k])
            if isnan(code) or isnan(scale) or isinf(scale):
                found.append(
                    nan if code == 0 or isnan(code) or isnan(scale) else (inf if (code > 0) == (scale > 0) else -inf)
                )
            elif code == 0 or scale == 0:
                negative = (str(code)[0] == "-") != (str(scale)[0] == "-")
                found.append(-0.0 if negative else 0.0)
            else:
                value = nearest_f32(Fraction(code) * Fraction(scale))
                found.append(value if value else (-0.0 if (code < 0) != (scale < 0) else 0.0))
    return found


@lru_cache(maxsize=1 << 16)
def nvfp4_value(word: int, scale_word: int, divisor: float) -> float:
    code = -E2M1[word - 8] if word & 8 else E2M1[word]
    scale = e4m3(scale_word)
    if code == 0 or scale == 0:
        return -0.0 if (word & 8 != 0) != (str(scale)[0] == "-") else 0.0
    value = nearest_f32(Fraction(code) * Fraction(scale) / Fraction(divisor))
    return value if value else (-0.0 if (code < 0) != (scale < 0) else 0.0)


def decode_nvfp4(data: bytes, rows: int, columns: int, stack: int = 1) -> list[float]:
    scale_off = up(rows * columns // 2, 256)
    div_off = scale_off + rows * columns // 16
    found = []
    for n in range(rows):
        at = div_off + 4 * (n * stack // rows)
        divisor = f32(int.from_bytes(data[at : at + 4], "little"))
        for k in range(columns):
            word = bits(data, 4 * (n * columns + k), 4)
            j = k // 16
            tile = (n // 128) * (columns // 64) + j // 4
            scale = data[scale_off + tile * 512 + (n % 32) * 16 + (n % 128) // 32 * 4 + j % 4]
            found.append(nvfp4_value(word, scale, divisor))
    return found


def half_even(value: Fraction) -> int:
    return round(value)


def nearest_f16(value: float) -> int:
    """The FP16 word nearest to a positive float32; 0x7C00 beyond the largest."""
    size = Fraction(value)
    low, high = 0, 0x7C00
    while high - low > 1:
        word = (low + high) // 2
        if Fraction(f16(word)) <= size:
            low = word
        else:
            high = word
    below = Fraction(f16(low))
    above = Fraction(65536) if low + 1 == 0x7C00 else Fraction(f16(low + 1))
    return low if size - below < above - size or (size - below == above - size and low % 2 == 0) else low + 1


def absmax_group(values: list[float], smallest: int, largest: int) -> tuple[list[int], int]:
    a = max(abs(x) for x in values)
    if a == 0:
        return [0] * len(values), 0
    word = nearest_f16(nearest_f32(Fraction(a) / largest)) or 1
    if word == 0x7C00:
        raise OverflowError
    inverse = nearest_f32(1 / Fraction(f16(word)))
    codes = [half_even(Fraction(nearest_f32(Fraction(x) * Fraction(inverse)))) for x in values]
    return [min(max(q, smallest), largest) for q in codes], word


def pack_row_split(name: str, codes: list[list[int]], scales: list[list[int]]) -> bytes:
    """The object of codes (a row of columns each) and scale words (a row of logical groups each), set bit by bit."""
    width, group, base, high, _, _ = GROUPED[name]
    rows, columns = len(codes), len(codes[0])
    groups, high_off, scale_off, total = sizes(name, rows, columns)
    data = bytearray(total)
    for r in range(rows):
        for k in range(groups * group):
            q = codes[r][k] if k < columns else 0
            u = (q + 1 if name.startswith("q2") else q) % 2**width
            x, i = r * groups + k // group, k % group
            low = width if width in (2, 4, 8) else 4
            for s in range(width):
                bit = u >> s & 1
                t = 8 * x * base + i * low + s if s < low else 8 * (high_off + x * high) + i * (width - 4) + s - 4
                data[t // 8] |= bit << (t % 8)
        for j in range(groups):
            word = scales[r][j] if j < len(scales[r]) else 0
            at = scale_off + 2 * (r * groups + j)
            data[at : at + 2] = word.to_bytes(2, "little")
    return bytes(data)


@lru_cache(maxsize=1 << 12)
def e4m3_size(size: Fraction) -> int:
    return min(range(127), key=lambda c: (abs(Fraction(e4m3(c)) - size), c & 1))


def e4m3_nearest(value: float) -> int:
    """The code nearest to a number within +-448, ties to the even code, by trying all."""
    return e4m3_size(abs(Fraction(value))) | (0x80 if str(value)[0] == "-" else 0)


E2M1_BOUNDS = [(0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)]


@lru_cache(maxsize=1 << 14)
def e2m1_size(size: float, divisor: float, scale: int) -> int:
    y = nearest_f32(Fraction(nearest_f32(Fraction(size) * Fraction(divisor))) / Fraction(e4m3(scale)))
    return sum(y >= bound if even else y > bound for bound, even in E2M1_BOUNDS)


@lru_cache(maxsize=1 << 14)
def nvfp4_scale(top: float, divisor: float) -> int:
    raw = nearest_f32(Fraction(nearest_f32(Fraction(top) * Fraction(divisor))) / 6)
    return e4m3_nearest(min(raw, 448.0)) or (1 if top else 0)


def encode_nvfp4(values: list[list[float]]) -> bytes:
    """The object of one source matrix, element by element; OverflowError where no divisor is left."""
    rows, columns = len(values), len(values[0])
    largest = max(abs(x) for row in values for x in row)
    divisor = nearest_f32(Fraction(2688.0 / largest)) if largest else 1.0
    if not divisor or isinf(divisor):
        raise OverflowError
    scale_off = up(rows * columns // 2, 256)
    data = bytearray(scale_off + rows * columns // 16 + 4)
    data[-4:] = f32_bits(divisor).to_bytes(4, "little")
    for n in range(rows):
        for j in range(columns // 16):
            block = values[n][16 * j : 16 * j + 16]
            scale = nvfp4_scale(max(abs(x) for x in block), divisor)
            tile = (n // 128) * (columns // 64) + j // 4
            data[scale_off + tile * 512 + (n % 32) * 16 + (n % 128) // 32 * 4 + j % 4] = scale
            for i, x in enumerate(block):
                code = 0
                if scale:
                    code = e2m1_size(abs(x), divisor, scale) | (8 if str(x)[0] == "-" else 0)
                data[(n * columns + 16 * j + i) // 2] |= code << (4 * (i % 2))
    return bytes(data)
