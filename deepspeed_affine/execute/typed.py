"""The little arithmetic a conversion can need: another dtype, a scale, an average. torch is imported only here.

A converted value equals what torch computes, and so what DeepSpeed's converter writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepspeed_affine.execute.gather import Words

if TYPE_CHECKING:
    import torch

__all__ = ["as_tensor", "convert_dtype"]

_SIGNED = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


def as_tensor(words: Words, dtype: str) -> torch.Tensor:
    """A tensor of ``dtype`` over the same memory; wide elements lose their axis of words."""
    import torch

    kind = getattr(torch, dtype)
    tensor: torch.Tensor = torch.from_numpy(words.view(_SIGNED[words.itemsize])).view(kind)
    return tensor.squeeze(-1) if kind.itemsize > words.itemsize else tensor


def convert_dtype(words: Words, stored: str, wanted: str, out: Words) -> None:
    """``out`` holds the stored values in another dtype, rounded as torch rounds."""
    if (stored, wanted) == ("bfloat16", "float32"):
        # The same number by definition, without importing anything.
        np.left_shift(words, 16, out=out, dtype=np.uint32, casting="unsafe")
        return
    as_tensor(out, wanted).copy_(as_tensor(words, stored))
