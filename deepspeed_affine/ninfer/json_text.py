"""The directory's JSON, strictly: what two readers could understand differently is refused."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from deepspeed_affine.errors import AffineError
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.errors import JsonError, SchemaError

__all__ = ["parse_json", "write_json"]

_MOST_DIGITS = 4000
"""Python itself refuses to read a longer integer; the largest any field takes has 20 digits."""


def parse_json(text: bytes, file: str, what: str = "the directory") -> Any:
    """The value the text spells: UTF-8 without a byte order mark, every member once at every depth, finite numbers.

    Raises JsonError naming ``file`` and ``what`` of it the text is.
    """
    try:
        decoded = text.decode("utf-8")
        return json.loads(
            decoded,
            object_pairs_hook=_once,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_whole,
        )
    except AffineError as fault:
        raise type(fault)(f"{file}: {what} {fault.message}", file=file) from None
    except RecursionError:
        reason = "is nested deeper than can be read"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 at byte {error.start}"
    except ValueError as error:
        # The decoder's own message quotes no more than a position.
        reason = f"is no JSON: {error}"
    raise JsonError(f"{file}: {what} {reason}. Expected one strict JSON value.", file=file)


def write_json(value: Any, what: str) -> bytes:
    """The compact spelling of a plain value, UTF-8; what JSON cannot hold unchanged is a ``SchemaError``."""
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        _require_names(value)
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError:
            # A lone surrogate has a spelling in JSON, as an escape, and none in UTF-8.
            return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"{what}: cannot be written as JSON: {error}. Expected plain finite values.") from None


def _require_names(value: Any) -> None:
    """Return if every member has text for its name: the encoder writes another key as text. ``value`` has no cycle."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise TypeError(f"the member name {shown(key)} is no text")
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"has the member {shown(key)} twice in one object. Expected every member once.")
            seen.add(key)
    return found


def _no_number(text: str) -> NoReturn:
    raise JsonError(f"has the value {text}. Expected JSON, which has no such number.")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonError(f"has the number {shown(text)}. Expected one that a double can hold.")
    return number


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise SchemaError(f"has an integer of {len(text)} digits. Expected at most {_MOST_DIGITS}.")
    return int(text)
