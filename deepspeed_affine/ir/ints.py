"""Checked integers: the arithmetic every offset, stride and extent goes through."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from deepspeed_affine.errors import InvalidMapError

__all__ = ["INT64_MAX", "as_extents", "as_integer", "coordinates", "product", "row_major_strides", "shown"]

INT64_MAX = 2**63 - 1
"""Offsets are arguments of ``torch.as_strided``, which holds them in 64 signed bits."""


_SHOWN_CHARACTERS = 120


def shown(value: object) -> str:
    """Return the value as a message quotes it: short, whatever a damaged file holds.

    Python itself refuses to spell out an integer of thousands of digits.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def as_integer(value: object, what: str) -> int:
    """Return ``value`` as a non-negative int that fits in 64 signed bits.

    Anything that is an integer by ``__index__`` is taken, so sizes and numpy scalars pass; bool and float are
    refused, because a flag or a rounded quotient in a shape is a caller's mistake and not a number.
    """
    if type(value) is int:
        number = value
    else:
        if isinstance(value, bool):
            raise InvalidMapError(f"{what} is {shown(value)}; expected an integer, not a bool.")
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            kind = type(value).__name__
            raise InvalidMapError(f"{what} is {shown(value)} of type {kind}; expected an integer.") from None
    if number < 0:
        raise InvalidMapError(f"{what} is {shown(number)}; expected zero or more.")
    if number > INT64_MAX:
        raise InvalidMapError(f"{what} is {shown(number)}, which does not fit in 64 signed bits.")
    return number


def as_extents(values: object, what: str) -> tuple[int, ...]:
    """Return a tuple of checked integers from any iterable that is not text."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidMapError(f"{what} is {values!r}; expected a sequence of integers.")
    return tuple([as_integer(value, what) for value in values])


def product(extents: Iterable[int]) -> int:
    count = 1
    for extent in extents:
        count *= extent
    return count


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Element stride per axis of a densely packed tensor of this shape."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def coordinates(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Index per axis of the element at this row-major offset; zeros along axes without extent."""
    index: list[int] = []
    for extent in reversed(shape):
        index.append(offset % extent if extent else 0)
        offset //= extent or 1
    return tuple(reversed(index))
