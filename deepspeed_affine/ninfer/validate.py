"""Codes, scales and padding against their format: what a reader need not look at, and a producer must get right."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.ninfer.decode import Fetch
from deepspeed_affine.ninfer.errors import ValueDomainError
from deepspeed_affine.ninfer.floats import U8
from deepspeed_affine.ninfer.formats import CONTIGUOUS, GROUPED, NVFP4, Grouped
from deepspeed_affine.ninfer.grouped import codes_of
from deepspeed_affine.ninfer.layouts import Geometry

__all__ = ["check_values"]

_BLOCK_BYTES = 1 << 20
_F16_INFINITE = 0x7C00


def check_values(geometry: Geometry, fetch: Fetch, subject: str = "A tensor") -> None:
    """Return if every code, scale, divisor and padding bit is one the format allows.

    Raises ValueDomainError naming the first that is not, with its row. Words of ``bf16``, ``fp32`` and ``int32`` are
    all allowed.
    """
    if geometry.layout == CONTIGUOUS:
        return
    for begin, end in geometry.gaps():
        if fetch(begin, end - begin).any():
            raise ValueDomainError(
                f"{subject}: bytes [{begin}, {end}) between its planes are not zero; expected zeros."
            )
    if geometry.format == NVFP4:
        divisors = fetch(geometry.plane("divisors").offset, geometry.plane("divisors").nbytes).view("<f4")
        fair = np.isfinite(divisors) & (divisors > 0)
        if not fair.all():
            at = int(np.flatnonzero(~fair)[0])
            raise ValueDomainError(f"{subject}: divisor {at} is {divisors[at]}; expected a finite number above zero.")
    rows = max(1, _BLOCK_BYTES // geometry.columns // geometry.row_unit) * geometry.row_unit
    for row in range(0, geometry.rows, rows):
        stop = min(row + rows, geometry.rows)
        spans = {
            span.name: fetch(span.offset, span.nbytes)
            for span in geometry.row_spans(row, stop)
            if span.name != "divisors" and (span.name != "codes" or geometry.format != NVFP4)
        }
        if geometry.format == NVFP4:
            # Every code is allowed, and block scales are unsigned numbers.
            _refuse(spans["scales"] >= 0x7F, f"{subject}: near row {row}, a block scale is negative or NaN")
        elif geometry.format in GROUPED:
            _check_grouped(geometry, GROUPED[geometry.format], spans, f"{subject}: rows from {row}")
        else:
            _check_fp8(spans, stop - row, f"{subject}: rows from {row}")


def _check_grouped(geometry: Geometry, form: Grouped, spans: dict[str, U8], what: str) -> None:
    scales = spans["scales"].view("<u2")
    _refuse((scales & _F16_INFINITE) == _F16_INFINITE, f"{what}, a scale is not finite")
    codes = codes_of(form, spans["base"], spans.get("high")).reshape(-1, form.group)
    if form.bits == 8 or (form.bits == 2 and not form.bias):
        _refuse(codes < form.smallest, f"{what}, a code is below {form.smallest}")
    if not form.bias:
        _refuse(scales == 0x8000, f"{what}, a scale is minus zero")
        _refuse((scales == 0)[:, None] & (codes != 0), f"{what}, a group of scale zero has a code other than 0")
    width = geometry.groups * form.group
    if width != geometry.columns:
        padding = codes.reshape(-1, width)[:, geometry.columns :]
        _refuse(padding != 0, f"{what}, a column beyond {geometry.columns} has a code other than 0")
        used = -(-geometry.columns // form.group)
        unused = scales.reshape(-1, geometry.groups)[:, used:]
        _refuse(unused != 0, f"{what}, a group beyond the last column has a scale other than zero")


def _check_fp8(spans: dict[str, U8], rows: int, what: str) -> None:
    codes, scales = spans["codes"].reshape(rows, -1), spans["scales"].view("<u2")
    _refuse((codes & 0x7F) == 0x7F, f"{what}, a code is NaN")
    _refuse(scales >= 0x7F80, f"{what}, a scale is negative or not finite")
    _refuse((scales == 0)[:, None] & ((codes & 0x7F) != 0), f"{what}, a row of scale zero has a code other than 0")


def _refuse(wrong: npt.NDArray[Any], fact: str) -> None:
    if wrong.any():
        raise ValueDomainError(
            f"{fact}, {int(np.count_nonzero(wrong))} times in this block; expected none. Write it again."
        )
