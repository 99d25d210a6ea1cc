"""What a training script set for all of torch does not reach into a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["usual_modes"]


@contextmanager
def usual_modes() -> Iterator[None]:
    """New tensors are on the CPU and can be changed in place later, whatever the caller's thread has set.

    Optimizer states made under ``torch.inference_mode`` could be stepped by nobody outside of it; with a default device
    what is read from a file would not be in memory.
    """
    import torch

    with torch.inference_mode(False), torch.device("cpu"):
        yield
