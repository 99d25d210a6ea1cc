"""Typed access to what a pickle holds: every value has the type the rest of the package relies on, or is refused.

A checkpoint's dictionaries are data from outside. Whoever reads one asks here, so that a damaged or foreign file
ends in a sentence naming the file, the entry and what was expected, wherever in the graph the damage is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed_affine.errors import AffineError, CheckpointFormatError

__all__ = ["as_count", "as_mapping", "as_names", "as_shape", "as_stored", "naming", "refuse", "shape_numel"]


def refuse(file: str, subject: str, value: Any, expected: str, param: str | None = None) -> CheckpointFormatError:
    """The error that says what ``subject`` of ``file`` is and what it should be."""
    return CheckpointFormatError(
        f"{file}: {subject} is {_shown(value)}; {expected} is expected. The file is damaged, or another program wrote "
        "it: use another checkpoint.",
        param=param,
        file=file,
    )


def as_mapping(value: Any, subject: str, file: str) -> Mapping[str, Any]:
    """``value``, a dictionary whose keys are strings."""
    if not isinstance(value, Mapping):
        raise refuse(file, subject, value, "a dictionary")
    for key in value:
        if not isinstance(key, str):
            raise refuse(file, f"a key of {subject}", key, "a string")
    return value


def as_shape(value: Any, subject: str, file: str) -> tuple[int, ...]:
    """``value`` as a tuple of extents."""
    if not isinstance(value, (tuple, list)) or not all(type(extent) is int and extent >= 0 for extent in value):
        raise refuse(file, subject, value, "a shape")
    return tuple(value)


def as_count(value: Any, subject: str, file: str, *, least: int = 0) -> int:
    """``value``, a whole number of at least ``least``."""
    if type(value) is not int or value < least:
        raise refuse(file, subject, value, f"a whole number of at least {least}")
    return value


def as_names(value: Any, subject: str, file: str) -> frozenset[str]:
    """``value`` as a set of names; None means none."""
    if value is None:
        return frozenset()
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in value):
        raise refuse(file, subject, value, "a list of names")
    return frozenset(value)


def as_stored(value: Any, subject: str, file: str, *, dimensions: int | None = None) -> Any:
    """``value``, a stored tensor, of ``dimensions`` dimensions where that is given."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or not isinstance(dtype, str):
        raise refuse(file, subject, value, "a tensor")
    if dimensions is not None and len(shape) != dimensions:
        raise refuse(file, subject, value, f"a tensor of {dimensions} dimension(s)")
    return value


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Give faults that do not know which parameter they are about its name."""
    try:
        yield
    except AffineError as fault:
        if fault.param is not None:
            raise
        raise type(fault)(f"Parameter {name}: {fault.message}", param=name, rank=fault.rank) from fault


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"a tensor of shape {tuple(shape)}"
    text = repr(value) if isinstance(value, (bool, int, float, str)) else ""
    return text if text and len(text) <= 60 else f"a {type(value).__name__}"


def shape_numel(shape: Iterable[int]) -> int:
    """The number of elements of a recorded shape (``torch.Size`` or a tuple)."""
    count = 1
    for extent in shape:
        count *= int(extent)
    return count
