"""The eleven numeric formats and the layouts that may hold them: names, constants, nothing computed."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.errors import EncodingError

__all__ = [
    "BLOCK_SCALE",
    "CONTIGUOUS",
    "DIRECT",
    "FP8_ROW",
    "GROUPED",
    "NVFP4",
    "RAW_BYTES",
    "ROW_SCALE",
    "ROW_SPLIT",
    "Grouped",
    "layout_of_format",
]

CONTIGUOUS = "contiguous_le_v1"
ROW_SPLIT = "row_split_k128_v1"
BLOCK_SCALE = "block_scale_k16_m128x4_v1"
ROW_SCALE = "row_scale_v1"
RAW_BYTES = "raw_bytes_v1"

NVFP4 = "nvfp4"
FP8_ROW = "fp8_e4m3fn_row_bf16"
DIRECT = MappingProxyType({"bf16": 2, "fp32": 4, "int32": 4})
"""Formats whose elements are words of their own, with the bytes of one."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Integer codes in groups of ``group`` columns that share one FP16 multiplier.

    ``bits`` of a code are stored as the word ``code + bias`` modulo ``2**bits``: ``base_bytes`` of a group hold the low
    bits of its codes (all of them below 5 and at 8 bits) and ``high_bytes`` the rest.
    """

    name: str
    bits: int
    group: int
    base_bytes: int
    high_bytes: int
    smallest: int
    largest: int
    bias: int = 0

    @property
    def padding_byte(self) -> int:
        """What a base byte of padding columns, whose code is 0, holds."""
        return 0x55 if self.bias else 0


GROUPED = MappingProxyType(
    {
        form.name: form
        for form in (
            Grouped("q2_g64_fp16", 2, 64, 16, 0, -1, 2, bias=1),
            Grouped("q4_g64_fp16", 4, 64, 32, 0, -8, 7),
            Grouped("q5_g64_fp16", 5, 64, 32, 8, -16, 15),
            Grouped("q6_g64_fp16", 6, 64, 32, 16, -32, 31),
            Grouped("q8_g32_fp16", 8, 32, 32, 0, -127, 127),
            Grouped("t2_g128_fp16", 2, 128, 32, 0, -1, 1),
        )
    }
)

_LAYOUTS = {
    **dict.fromkeys(DIRECT, CONTIGUOUS),
    **dict.fromkeys(GROUPED, ROW_SPLIT),
    NVFP4: BLOCK_SCALE,
    FP8_ROW: ROW_SCALE,
}


def layout_of_format(name: str, subject: str = "a tensor") -> str:
    """The one layout that holds the format; an unknown format is an ``EncodingError``."""
    found = _LAYOUTS.get(name) if isinstance(name, str) else None
    if found is None:
        raise EncodingError(f"{subject}: format {shown(name)} is not known; expected one of {', '.join(_LAYOUTS)}.")
    return found
