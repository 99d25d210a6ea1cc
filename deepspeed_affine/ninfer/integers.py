"""Integers and names as the container defines them; every sum, product and aligned value stays within 64 bits."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from deepspeed_affine.errors import AffineError
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.errors import BindingError, RangeError, SchemaError

__all__ = [
    "MAX_RANK",
    "U64_MAX",
    "align_up",
    "checked_sum",
    "elements",
    "extents",
    "identifier",
    "name_fault",
    "positive",
    "shape_of",
    "u64",
    "whole",
]

U64_MAX = 2**64 - 1
MAX_RANK = 16


def u64(value: object, what: str, error: type[AffineError] = SchemaError) -> int:
    """``value`` as it is, an int from 0 to 2**64 - 1; a float, a bool or text is none, however it reads."""
    if type(value) is not int or not 0 <= value <= U64_MAX:
        raise error(f"{what} is {shown(value)}; expected an integer from 0 to {U64_MAX}.")
    return value


def positive(value: object, what: str, error: type[AffineError] = SchemaError) -> int:
    """``value`` as it is, an int from 1 to 2**64 - 1."""
    if type(value) is not int or not 1 <= value <= U64_MAX:
        raise error(f"{what} is {shown(value)}; expected an integer from 1 to {U64_MAX}.")
    return value


def whole(value: object, what: str, error: type[AffineError] = RangeError) -> int:
    """What a caller gives, as an int: numpy's integers are taken, a float, a bool or text is not."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise error(f"{what} is {shown(value)}; expected an integer.")


def extents(value: object, what: str) -> tuple[int, ...]:
    """A shape a caller asks for: integers from 1 on, numpy's and torch's too; anything else is a ``BindingError``."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise BindingError(f"{what} is {shown(value)}; expected a sequence of positive integers.")
    found = tuple(whole(extent, f"An extent of {what}", BindingError) for extent in value)
    if min(found, default=1) < 1:
        raise BindingError(f"{what} is {shown(found)}; expected positive integers.")
    return found


def name_fault(value: object) -> str:
    """What keeps ``value`` from being an ID; empty when nothing does."""
    if type(value) is not str:
        return f"a {type(value).__name__}"
    if not value:
        return "empty"
    if "\0" in value:
        return f"{shown(value)}, which holds U+0000"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return f"{shown(value)}, which UTF-8 cannot spell"
    return ""


def identifier(value: object, what: str) -> str:
    """``value`` as it is: nonempty text without U+0000, compared code point by code point."""
    fault = name_fault(value)
    if fault or not isinstance(value, str):
        raise SchemaError(f"{what} is {fault}; expected nonempty text without U+0000 that UTF-8 can spell.")
    return value


def shape_of(value: object, what: str) -> tuple[int, ...]:
    """``value`` as a tuple of at most 16 positive extents whose product fits in 64 bits; none is a scalar."""
    if not isinstance(value, (list, tuple)):
        raise SchemaError(f"{what} is {shown(value)}; expected a list of positive integers.")
    if len(value) > MAX_RANK:
        raise SchemaError(f"{what} has {len(value)} axes; expected at most {MAX_RANK}.")
    shape = tuple(positive(extent, f"An extent of {what}") for extent in value)
    elements(shape, what)
    return shape


def elements(shape: Iterable[int], what: str = "the shape") -> int:
    """How many elements a shape has, one for a scalar; a product beyond 64 bits is a ``RangeError``."""
    count = 1
    for extent in shape:
        count *= extent
        if count > U64_MAX:
            raise RangeError(f"{what} has more elements than 64 bits can count; expected at most {U64_MAX}.")
    return count


def checked_sum(values: Iterable[int], what: str) -> int:
    """The sum; beyond 64 bits a ``RangeError``."""
    total = 0
    for value in values:
        total += value
        if total > U64_MAX:
            raise RangeError(f"{what} exceed 64 bits; expected a sum of at most {U64_MAX}.")
    return total


def align_up(value: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``value``; beyond 64 bits a ``RangeError``."""
    aligned = -(-value // unit) * unit
    if aligned > U64_MAX:
        raise RangeError(f"{shown(value)} aligned to {unit} exceeds 64 bits; expected at most {U64_MAX}.")
    return aligned
