"""From encoded bytes to values, a bounded block of rows at a time.

Values are float32, and int32 for ``int32``; every bfloat16 is a float32. Each value is rounded once, from the exact
product (or quotient) its format defines. Codes outside a format are not looked for here: see ``validate``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.ninfer.errors import RangeError
from deepspeed_affine.ninfer.floats import E2M1, E4M3FN, U8, bf16_to_float32, widen_bf16
from deepspeed_affine.ninfer.formats import CONTIGUOUS, DIRECT, GROUPED, NVFP4
from deepspeed_affine.ninfer.grouped import unpack_floats
from deepspeed_affine.ninfer.layouts import TILE_ROWS, Geometry

__all__ = ["Fetch", "decode", "decode_range", "natural_scales", "value_dtype"]

Fetch = Callable[[int, int], U8]
"""``fetch(offset, count)`` gives bytes of one encoded object."""
Values = npt.NDArray[Any]

BLOCK_ELEMENTS = 1 << 17
"""Elements decoded at once, so that what is between the bytes and the values stays in a processor's cache."""
_TILE = 64


def value_dtype(format_name: str) -> np.dtype[Any]:
    """The numpy type of decoded values."""
    return np.dtype(np.int32 if format_name == "int32" else np.float32)


def decode(geometry: Geometry, data: U8 | bytes | bytearray | memoryview) -> Values:
    """All values of an encoded object, in its shape."""
    encoded = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    encoded = np.ascontiguousarray(encoded).reshape(-1).view(np.uint8)
    if encoded.nbytes != geometry.total:
        raise RangeError(f"{encoded.nbytes} bytes of a {geometry.format} tensor were given; expected {geometry.total}.")
    found = np.empty(geometry.elements, value_dtype(geometry.format))
    decode_range(geometry, lambda offset, count: encoded[offset : offset + count], 0, geometry.elements, found)
    return found.reshape(geometry.shape)


def decode_range(geometry: Geometry, fetch: Fetch, begin: int, end: int, out: Values) -> None:
    """``out`` (flat, contiguous) holds elements ``[begin, end)`` in C order; only rows that have some are fetched."""
    if not 0 <= begin <= end <= geometry.elements or out.size != end - begin:
        raise RangeError(
            f"Elements [{begin}, {end}) of a tensor of {geometry.elements} were asked for, into room for {out.size}; "
            "expected a range inside it, and as much room."
        )
    if geometry.layout == CONTIGUOUS:
        _decode_words(geometry, fetch, begin, end, out)
        return
    columns, unit = geometry.columns, geometry.row_unit
    rows = max(unit, BLOCK_ELEMENTS // columns // unit * unit)
    row = begin // columns // unit * unit
    # A divisor covers whole tiles of rows, so that a block that ends where one does has rows of one matrix only.
    matrix = geometry.rows // geometry.divisors
    while row * columns < end:
        stop = min(row + rows, geometry.rows, (row // matrix + 1) * matrix, -(-end // (columns * unit)) * unit)
        first, last = row * columns, stop * columns
        if begin <= first and last <= end:
            _decode_rows(geometry, fetch, row, stop, out[first - begin : last - begin].reshape(stop - row, columns))
        else:
            block = np.empty((stop - row, columns), out.dtype)
            _decode_rows(geometry, fetch, row, stop, block)
            low, high = max(begin, first), min(end, last)
            out[low - begin : high - begin] = block.reshape(-1)[low - first : high - first]
        row = stop


def _decode_words(geometry: Geometry, fetch: Fetch, begin: int, end: int, out: Values) -> None:
    width = DIRECT[geometry.format]
    step = 32 * BLOCK_ELEMENTS if width == 4 else 8 * BLOCK_ELEMENTS
    for at in range(begin, end, step):
        stop = min(at + step, end)
        stored = fetch(at * width, (stop - at) * width)
        place = out[at - begin : stop - begin].view(np.uint32)
        if width == 4:
            place[:] = stored.view("<u4")
            continue
        widen_bf16(stored.view("<u2").astype(np.uint16, copy=False), place)


def _decode_rows(geometry: Geometry, fetch: Fetch, row: int, stop: int, out: Values) -> None:
    spans = {span.name: fetch(span.offset, span.nbytes) for span in geometry.row_spans(row, stop)}
    if geometry.format in GROUPED:
        _decode_grouped(geometry, spans, out)
    elif geometry.format == NVFP4:
        _decode_nvfp4(geometry, spans, row, out)
    else:
        np.take(E4M3FN, spans["codes"], out=out.reshape(-1), mode="wrap")
        with np.errstate(invalid="ignore", over="ignore"):
            np.multiply(out, bf16_to_float32(spans["scales"].view("<u2"))[:, None], out=out)


def _decode_grouped(geometry: Geometry, spans: dict[str, U8], out: Values) -> None:
    form = GROUPED[geometry.format]
    rows, width = len(out), geometry.groups * form.group
    wide = out if width == geometry.columns else np.empty((rows, width), np.float32)
    grouped = wide.reshape(rows * geometry.groups, form.group)
    unpack_floats(form, spans["base"], spans.get("high"), spans["scales"].view("<u2"), grouped)
    if wide is not out:
        out[:] = wide[:, : geometry.columns]


def _decode_nvfp4(geometry: Geometry, spans: dict[str, U8], row: int, out: Values) -> None:
    scales = E4M3FN[natural_scales(spans["scales"], len(out), geometry.columns)]
    np.take(_code_pairs(), spans["codes"], out=out.reshape(-1).view(np.uint64), mode="wrap")
    blocks = out.reshape(-1, 16)
    divisor = spans["divisors"].view("<f4")[row // (geometry.rows // geometry.divisors)]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        # Codes and scales have few enough bits for the product to be exact, so that only the quotient rounds.
        np.multiply(blocks, scales.reshape(-1, 1), out=blocks)
        np.divide(out, divisor, out=out)


@lru_cache(maxsize=1)
def _code_pairs() -> npt.NDArray[np.uint64]:
    """The two float32 values of each byte of codes, low nibble first, as one item."""
    words = np.arange(256)
    pairs = np.ascontiguousarray(np.stack([E2M1[words & 15], E2M1[words >> 4]], axis=1))
    return pairs.view(np.uint64)[:, 0]


def natural_scales(stored: U8, rows: int, columns: int) -> U8:
    """Block scales of whole tiles of 128 rows, one row of scales a row of the matrix."""
    tiles = stored.reshape(rows // TILE_ROWS, columns // _TILE, 32, 4, 4)
    found: U8 = np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, columns // 16)
    return found
