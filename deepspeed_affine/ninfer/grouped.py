"""Grouped integer codes: unpacking by table, packing, and the encoders that choose codes and scales."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.ninfer.errors import ValueDomainError
from deepspeed_affine.ninfer.floats import F32, U8, U16
from deepspeed_affine.ninfer.formats import Grouped

__all__ = ["codes_of", "encode_absmax", "encode_ternary", "pack_codes", "padded", "unpack_floats"]

I8 = npt.NDArray[np.int8]
Table = npt.NDArray[Any]


@cache
def _tables(bits: int, bias: int) -> tuple[Table, Table]:
    """Per base byte the codes of its lanes, as float32 and as int8; a byte's lanes are one item, moved at once."""
    lanes = 8 // min(bits, 4) if bits < 8 else 1
    width = 8 // lanes
    words = (np.arange(256)[:, None] >> (width * np.arange(lanes))) & (2**width - 1)
    if bits in (2, 4):
        codes = words - bias if bias else np.where(words >= 2 ** (bits - 1), words - 2**bits, words)
    elif bits == 8:
        codes = np.where(words >= 128, words - 256, words)
    else:
        codes = words
    return _items(codes.astype(np.float32)), _items(codes.astype(np.int8))


@cache
def _high_table(bits: int) -> Table:
    """Per high byte what its lanes add to their low nibbles; the top bit counts negatively."""
    width = bits - 4
    words = (np.arange(256)[:, None] >> (width * np.arange(8 // width))) & (2**width - 1)
    added = 16 * words - np.where(words >= 2 ** (width - 1), 2**bits, 0)
    return _items(added.astype(np.int8))


def _items(rows: Table) -> Table:
    rows = np.ascontiguousarray(rows)
    size = rows.shape[1] * rows.itemsize
    return rows.view({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[size])[:, 0]


def unpack_floats(form: Grouped, base: U8, high: U8 | None, scales: U16, out: F32) -> None:
    """``out`` (groups by columns of a group, contiguous) holds the values; one rounding each."""
    floats, codes = _tables(form.bits, form.bias)
    flat = out.reshape(-1)
    if high is not None:
        np.copyto(flat, _joined(form, base, high, codes))
    elif form.bits == 8:
        np.copyto(flat, base.view(np.int8))
    else:
        np.take(floats, base, out=flat.view(floats.dtype), mode="wrap")
    with np.errstate(invalid="ignore", over="ignore"):
        np.multiply(out, scales.view("<f2").astype(np.float32)[:, None], out=out)


def codes_of(form: Grouped, base: U8, high: U8 | None) -> I8:
    """The codes, flat, lanes in order; a word outside the format gives the number it would be."""
    if form.bits == 8:
        return base.view(np.int8)
    _, codes = _tables(form.bits, form.bias)
    if high is not None:
        return _joined(form, base, high, codes)
    found: I8 = np.take(codes, base).view(np.int8)
    return found


def _joined(form: Grouped, base: U8, high: U8, codes: Table) -> I8:
    found: I8 = np.take(codes, base).view(np.int8)
    found += np.take(_high_table(form.bits), high).view(np.int8)
    return found


def pack_codes(form: Grouped, codes: I8) -> tuple[U8, U8 | None]:
    """``(base, high)`` bytes of codes (groups by columns of a group); the codes are within the format."""
    words = (codes.view(np.uint8) + np.uint8(form.bias)) & np.uint8(2**form.bits - 1)
    if form.bits == 8:
        return words, None
    if form.bits == 2:
        lanes = [words[:, at::4] << np.uint8(2 * at) for at in range(4)]
        return lanes[0] | lanes[1] | lanes[2] | lanes[3], None
    low = words & np.uint8(15)
    base = low[:, 0::2] | (low[:, 1::2] << np.uint8(4))
    if form.bits == 4:
        return base, None
    width = form.bits - 4
    stream = np.stack([(words >> np.uint8(4 + at)) & np.uint8(1) for at in range(width)], axis=-1)
    return base, np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little")


def padded(form: Grouped, rows: npt.NDArray[Any], groups: int) -> npt.NDArray[Any]:
    """Rows of a matrix as groups by columns of a group, zeros where a row ends before its last group does."""
    count, columns = rows.shape
    whole = groups * form.group
    if columns != whole:
        wide = np.zeros((count, whole), rows.dtype)
        wide[:, :columns] = rows
        rows = wide
    return np.ascontiguousarray(rows).reshape(count * groups, form.group)


def encode_absmax(form: Grouped, values: F32, what: str) -> tuple[I8, U16]:
    """``(codes, scale words)`` of groups of finite values: the largest of a group gets the largest code.

    Everything rounds to nearest even in binary32, and codes come from the reciprocal of the scale: dividing by the
    scale would choose others.
    """
    largest = np.abs(values).max(axis=1)
    with np.errstate(over="ignore", under="ignore"):
        raw = (largest.astype(np.float64) / form.largest).astype(np.float32)
        scales = raw.astype(np.float16)
    words = scales.view(np.uint16)
    if np.isinf(scales).any():
        worst = float(largest[np.isinf(scales)].max())
        raise ValueDomainError(
            f"{what}: has a value of size {worst}, whose scale no FP16 holds; expected smaller ones."
        )
    words[(words == 0) & (largest > 0)] = 1
    inverse = np.zeros(len(words), np.float32)
    used = words != 0
    inverse[used] = (1.0 / scales[used].astype(np.float64)).astype(np.float32)
    scaled = values * inverse[:, None]
    np.rint(scaled, out=scaled)
    np.clip(scaled, form.smallest, form.largest, out=scaled)
    return scaled.astype(np.int8), words


def encode_ternary(values: F32, what: str) -> tuple[I8, U16]:
    """``(codes, scale words)`` of groups that are exactly -s, 0 and +s for one FP16 number s; others are refused."""
    largest = np.abs(values).max(axis=1)
    with np.errstate(over="ignore", under="ignore"):
        scales = largest.astype(np.float16)
    exact = scales.astype(np.float32) == largest
    inside = (np.abs(values) == largest[:, None]) | (values == 0)
    fair = exact & inside.all(axis=1)
    if not fair.all():
        at = int(np.flatnonzero(~fair)[0])
        raise ValueDomainError(
            f"{what}: group {at} of these rows is not made of -s, 0 and +s for one FP16 number s; expected exactly "
            "that. Ternary weights are imported as codes and scales, not rounded."
        )
    return np.sign(values).astype(np.int8), scales.view(np.uint16)
