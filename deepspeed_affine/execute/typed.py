"""The little arithmetic a conversion can need: another dtype, a scale, an average. torch is imported only here.

A converted value equals what torch computes, and so what DeepSpeed's converter writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.execute.gather import Words

if TYPE_CHECKING:
    import torch

__all__ = ["as_numbers", "as_tensor", "convert_dtype"]

_SIGNED = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


def as_tensor(words: Words, dtype: str) -> torch.Tensor:
    """A tensor of ``dtype`` over the same memory; wide elements lose their axis of words."""
    import torch

    kind = getattr(torch, dtype)
    tensor: torch.Tensor = torch.from_numpy(words.view(_SIGNED[words.itemsize])).view(kind)
    return tensor.squeeze(-1) if kind.itemsize > words.itemsize else tensor


_NUMPY = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "complex64": "<c8",
    "bool": "?",
    **{f"{sign}int{8 * width}": f"<{kind}{width}" for sign, kind in (("", "i"), ("u", "u")) for width in (1, 2, 4, 8)},
}


def as_numbers(words: Words, dtype: str) -> npt.NDArray[Any]:
    """The same values as numbers numpy knows; wide elements lose their axis of words.

    torch is imported for the dtypes numpy has none for; those it cannot compute with raise RuntimeError or TypeError,
    unknown ones AttributeError.
    """
    words = np.ascontiguousarray(words)
    found: npt.NDArray[Any]
    if dtype == "bfloat16":
        # The upper half of a float32, by definition.
        found = np.left_shift(words.astype(np.uint32), 16).view(np.float32)
    elif dtype == "complex128":
        found = words.view("<c16")[..., 0]
    elif dtype in _NUMPY:
        found = words.view(_NUMPY[dtype])
    else:
        found = as_tensor(words, dtype).double().numpy()
    return found


def convert_dtype(words: Words, stored: str, wanted: str, out: Words) -> None:
    """``out`` holds the stored values in another dtype, rounded as torch rounds."""
    if (stored, wanted) == ("bfloat16", "float32"):
        # The same number by definition, without importing anything.
        np.left_shift(words, 16, out=out, dtype=np.uint32, casting="unsafe")
        return
    as_tensor(out, wanted).copy_(as_tensor(words, stored))
