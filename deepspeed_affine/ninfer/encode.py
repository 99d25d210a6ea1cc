"""From values to encoded bytes, plane by plane, so that a matrix can be encoded a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.errors import EncodingError, ValueDomainError
from deepspeed_affine.ninfer.floats import (
    CACHED,
    E4M3FN,
    U8,
    as_array,
    as_float32,
    bf16_to_float32,
    e2m1_words,
    e4m3fn_words,
    round_to_bf16,
)
from deepspeed_affine.ninfer.formats import CONTIGUOUS, DIRECT, FP8_ROW, GROUPED, NVFP4
from deepspeed_affine.ninfer.grouped import encode_absmax, encode_ternary, pack_codes, padded
from deepspeed_affine.ninfer.layouts import Geometry, plan_geometry

__all__ = ["ENCODERS", "Region", "divisor_of", "encode", "encode_rows", "join", "nvfp4_divisor", "swizzled", "words_of"]

Region = tuple[int, U8]
"""``(offset, bytes)`` within one encoded object."""
Values = npt.NDArray[Any]

ENCODERS = {
    "q4_g64_fp16": "MAXABS_F16_RECIP_RNE_V1",
    "q5_g64_fp16": "MAXABS_F16_RECIP_RNE_V1",
    "q6_g64_fp16": "MAXABS_F16_RECIP_RNE_V1",
    "q8_g32_fp16": "MAXABS_F16_RECIP_RNE_V1",
    "t2_g128_fp16": "exact ternary",
    FP8_ROW: "fp8_row_maxabs",
    NVFP4: "maxabs 2688, rescued block scales",
}
"""How values become codes, by format, as provenance names it; formats left out keep every bit or take codes only."""

_BLOCK_ELEMENTS = 1 << 18
_NVFP4_TOP = 2688.0


def encode(format_name: str, values: Any, divisors: int = 1) -> U8:
    """The encoded object of the values, whose shape is the tensor's.

    Numpy arrays and torch tensors are taken. ``bf16`` takes words (uint16) or float32 numbers that are bfloat16
    already, ``fp32`` and ``int32`` their own type; nothing is rounded there. The others take finite floats and round as
    ``ENCODERS`` names it, ``t2_g128_fp16`` exact ternary ones only. ``nvfp4`` with ``divisors`` encodes that many
    stacked matrices. ``q2_g64_fp16`` has no encoder: its codes are imported (``pack``). Raises ValueDomainError for
    values the format cannot take.
    """
    array = as_array(values, format_name)
    geometry = plan_geometry(format_name, None, array.shape, divisors)
    if geometry.layout == CONTIGUOUS:
        words = words_of(format_name, array)
        return words.copy() if np.shares_memory(words, array) else words
    return join(geometry, _regions(geometry, array))


def _regions(geometry: Geometry, array: Values) -> Iterator[Region]:
    matrix = geometry.rows // geometry.divisors
    step = max(1, _BLOCK_ELEMENTS // geometry.columns // geometry.row_unit) * geometry.row_unit
    for start in range(0, geometry.rows, matrix):
        source = array[start : start + matrix]
        divisor = nvfp4_divisor(source) if geometry.format == NVFP4 else None
        for row in range(start, start + matrix, step):
            yield from encode_rows(geometry, row, array[row : min(row + step, start + matrix)], divisor)


def join(geometry: Geometry, regions: Iterator[Region]) -> U8:
    """The object of those regions; what lies between planes is zero."""
    found = np.zeros(geometry.total, np.uint8)
    for offset, data in regions:
        found[offset : offset + data.nbytes] = data
    return found


def words_of(format_name: str, values: Values) -> U8:
    """The little-endian bytes of directly stored elements, every bit kept."""
    array = np.asarray(values)
    if format_name == "bf16" and array.dtype == np.float32:
        array = _halves(np.ascontiguousarray(array).view(np.uint32).reshape(-1)).reshape(array.shape)
    wanted = {"bf16": "<u2", "fp32": "<f4", "int32": "<i4"}[format_name]
    if array.dtype.kind != wanted[1] or array.dtype.itemsize != DIRECT[format_name]:
        raise ValueDomainError(f"{format_name}: has values of type {array.dtype}; expected {np.dtype(wanted)}.")
    # As words, because a float move may quieten a NaN.
    word = f"u{DIRECT[format_name]}"
    packed = (
        np.ascontiguousarray(array).view(array.dtype.byteorder.replace("|", "=") + word).astype(f"<{word}", copy=False)
    )
    return packed.reshape(-1).view(np.uint8)


def _halves(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """The bfloat16 words of float32 ones, which have to be bfloat16 numbers already."""
    found = np.empty(len(words), np.uint16)
    for low in range(0, len(words), CACHED):
        piece = words[low : low + CACHED]
        if np.bitwise_or.reduce(piece) & np.uint32(0xFFFF):
            raise ValueDomainError(
                "bf16: a float32 value is no bfloat16; expected such ones. Round with round_to_bf16."
            )
        np.right_shift(piece, np.uint32(16), out=found[low : low + CACHED], casting="unsafe")
    return found


def encode_rows(geometry: Geometry, row: int, values: Any, divisor: Any = None) -> list[Region]:
    """The regions of a matrix's rows from ``row`` on; with its first rows come the gaps, with a matrix's its divisor.

    ``divisor`` is what ``nvfp4_divisor`` says of the whole source matrix these rows are of.
    """
    array = as_array(values, geometry.format)
    what = f"rows from {row} in {geometry.format}"
    if geometry.layout == CONTIGUOUS or array.ndim != 2 or array.shape[1] != geometry.columns:
        raise EncodingError(
            f"{what}: values of shape {array.shape} were given; expected rows of a matrix of shape {geometry.shape}."
        )
    spans = geometry.row_spans(row, row + len(array))
    source = as_float32(array, what)
    if geometry.format in GROUPED:
        planes = _grouped_planes(geometry, source, what)
    elif geometry.format == FP8_ROW:
        planes = _fp8_planes(source, what)
    else:
        planes = _nvfp4_planes(source, divisor, what)
    regions = [(span.offset, planes[span.name].reshape(-1)) for span in spans if span.name != "divisors"]
    if divisor is not None and row % (geometry.rows // geometry.divisors) == 0:
        number = row // (geometry.rows // geometry.divisors)
        stored = np.array([divisor], "<f4").view(np.uint8)
        regions.append((geometry.plane("divisors").offset + 4 * number, stored))
    if row == 0:
        regions += [(begin, np.zeros(end - begin, np.uint8)) for begin, end in geometry.gaps()]
    return regions


def _grouped_planes(geometry: Geometry, source: npt.NDArray[np.float32], what: str) -> dict[str, U8]:
    form = GROUPED[geometry.format]
    groups = padded(form, source, geometry.groups)
    if form.name == "t2_g128_fp16":
        codes, scales = encode_ternary(groups, what)
    elif form.bias:
        raise ValueDomainError(
            f"{what}: values cannot be rounded to this format; expected codes and scales, as trained."
        )
    else:
        codes, scales = encode_absmax(form, groups, what)
    base, high = pack_codes(form, codes)
    planes = {"base": base, "scales": scales.astype("<u2").view(np.uint8)}
    return planes if high is None else {**planes, "high": high}


def _fp8_planes(source: npt.NDArray[np.float32], what: str) -> dict[str, U8]:
    rows = bf16_to_float32(round_to_bf16(source))
    if not np.isfinite(rows).all():
        raise ValueDomainError(f"{what}: has a value that rounds to an infinite bfloat16; expected smaller ones.")
    largest = np.abs(rows).max(axis=1)
    with np.errstate(under="ignore"):
        words = round_to_bf16((largest.astype(np.float64) / 448.0).astype(np.float32))
    words[(words == 0) & (largest > 0)] = 1
    used = words != 0
    scales = bf16_to_float32(words)
    inverse = np.zeros(len(words), np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        inverse[used] = (1.0 / scales[used].astype(np.float64)).astype(np.float32)
        scaled = rows * inverse[:, None]
    if not np.isfinite(scaled).all():
        raise ValueDomainError(f"{what}: has a row of values so small that no scale is left for them; expected larger.")
    np.clip(scaled, -448.0, 448.0, out=scaled)
    codes = e4m3fn_words(scaled)
    codes[~used] = 0
    return {"codes": codes, "scales": words.astype("<u2").view(np.uint8)}


def nvfp4_divisor(matrix: Any, what: str = "nvfp4") -> Any:
    """The divisor a source matrix is encoded with: its largest value becomes the largest that can be told, 2688."""
    largest = float(np.abs(as_float32(as_array(matrix, NVFP4), what)).max())
    return divisor_of(largest, what)


def divisor_of(largest: float, what: str = "nvfp4") -> Any:
    """The divisor for a matrix whose largest absolute value is known."""
    if largest == 0.0:
        return np.float32(1)
    with np.errstate(over="ignore", under="ignore"):
        divisor = np.float32(_NVFP4_TOP / largest)
    if not np.isfinite(divisor) or divisor <= 0:
        raise ValueDomainError(
            f"{what}: the largest value {shown(largest)} leaves no float32 divisor; expected others."
        )
    return divisor


def _nvfp4_planes(source: npt.NDArray[np.float32], divisor: Any, what: str) -> dict[str, U8]:
    if divisor is None:
        raise EncodingError(f"{what}: no divisor was given; expected that of the whole source matrix.")
    blocks = source.reshape(-1, 16)
    largest = np.abs(blocks).max(axis=1)
    with np.errstate(over="ignore"):
        raw = np.minimum((largest * divisor) / np.float32(6), np.float32(448))
    scales = e4m3fn_words(raw)
    scales[(scales == 0) & (largest > 0)] = 1
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = (blocks * divisor) / E4M3FN[scales][:, None]
    codes = e2m1_words(scaled)
    codes[scales == 0] = 0
    codes = codes.reshape(source.shape)
    packed = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    rows, columns = source.shape
    return {"codes": packed, "scales": swizzled(scales.reshape(rows, columns // 16))}


def swizzled(natural: U8) -> U8:
    """Block scales of whole tiles of 128 rows as they are stored."""
    rows, groups = natural.shape
    tiles = natural.reshape(rows // 128, 4, 32, groups // 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles).reshape(-1)
