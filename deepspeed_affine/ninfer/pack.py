"""Finished codes and scales, as another tool trained or computed them, made an encoded object without changing any."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.encode import join, swizzled
from deepspeed_affine.ninfer.errors import EncodingError, ValueDomainError
from deepspeed_affine.ninfer.floats import U8
from deepspeed_affine.ninfer.formats import FP8_ROW, GROUPED, NVFP4
from deepspeed_affine.ninfer.grouped import pack_codes, padded
from deepspeed_affine.ninfer.layouts import Geometry, plan_geometry
from deepspeed_affine.ninfer.validate import check_values

__all__ = ["pack_fp8", "pack_grouped", "pack_nvfp4"]


def pack_grouped(format_name: str, codes: Any, scales: Any) -> U8:
    """The object of integer codes, of the matrix's shape, and FP16 scale words, one row of groups a row of it.

    Raises ValueDomainError for a code or a scale the format does not have.
    """
    form = GROUPED.get(format_name)
    if form is None:
        raise EncodingError(f"format {shown(format_name)} has no groups; expected one of {', '.join(GROUPED)}.")
    given = np.asarray(codes)
    geometry = plan_geometry(format_name, None, given.shape)
    if given.dtype.kind not in "iu" or given.min() < form.smallest or given.max() > form.largest:
        raise ValueDomainError(
            f"{format_name}: codes of type {given.dtype}; expected integers from {form.smallest} to {form.largest}."
        )
    used = -(-geometry.columns // form.group)
    words = np.zeros((geometry.rows, geometry.groups), "<u2")
    words[:, :used] = _words(scales, np.float16, (geometry.rows, used), f"{format_name}: its scales")
    base, high = pack_codes(form, padded(form, given.astype(np.int8), geometry.groups))
    planes = {"base": base, "high": high, "scales": words.view(np.uint8)}
    return _checked(geometry, planes)


def pack_fp8(codes: Any, scales: Any) -> U8:
    """The object of E4M3FN codes (uint8, of the matrix's shape) and one bfloat16 scale word a row."""
    given = _words(codes, np.uint8, np.shape(codes), "fp8: its codes")
    geometry = plan_geometry(FP8_ROW, None, given.shape)
    words = _words(scales, np.uint16, (geometry.rows,), "fp8: its scales")
    return _checked(geometry, {"codes": given, "scales": words.astype("<u2").view(np.uint8)})


def pack_nvfp4(codes: Any, scales: Any, divisors: Any) -> U8:
    """The object of packed E2M1 codes (uint8, two a byte, low nibble first), one E4M3FN scale per 16 columns in the
    order of the matrix, and the float32 divisor of each stacked matrix."""
    packed = np.asarray(codes)
    shape = (packed.shape[0], packed.shape[1] * 2) if packed.ndim == 2 else packed.shape
    stack = _words(divisors, np.float32, (np.size(divisors),), "nvfp4: its divisors")
    geometry = plan_geometry(NVFP4, None, shape, max(1, stack.size))
    packed = _words(packed, np.uint8, packed.shape, "nvfp4: its codes")
    natural = _words(scales, np.uint8, (geometry.rows, geometry.groups), "nvfp4: its scales")
    planes = {"codes": packed, "scales": swizzled(natural), "divisors": stack.astype("<f4").view(np.uint8)}
    return _checked(geometry, planes)


def _words(given: Any, kind: Any, shape: tuple[int, ...], what: str) -> npt.NDArray[Any]:
    found = np.asarray(given)
    if kind is np.float16:
        found = found.view(np.uint16) if found.dtype == np.float16 else found
        kind = np.uint16
    if found.dtype == np.float32 and kind is np.float32:
        return found.reshape(shape)
    if found.dtype != np.dtype(kind) or found.shape != shape:
        raise ValueDomainError(
            f"{what} are {found.dtype} of shape {found.shape}; expected {np.dtype(kind)} of shape {shape}."
        )
    return found


def _checked(geometry: Geometry, planes: dict[str, Any]) -> U8:
    regions = ((geometry.plane(n).offset, data.reshape(-1)) for n, data in planes.items() if data is not None)
    made = join(geometry, iter(regions))
    check_values(geometry, lambda offset, count: made[offset : offset + count], geometry.format)
    return made
