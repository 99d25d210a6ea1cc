"""Strict JSON for the small files written beside tensors: what is read back is what was written, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

__all__ = ["Fields", "canonical", "parse_object", "path_fault", "plain"]

_SHOWN = 60
_DEEPEST = 100


def canonical(value: object) -> bytes:
    """The one spelling of a plain JSON value: equal bytes exactly for equal values (true is not 1)."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode(
        "ascii"
    )


def plain(value: object, depth: int = 0) -> Any:
    """``value`` with mappings as dicts and sequences as lists; ValueError for what JSON cannot hold unchanged."""
    if depth > _DEEPEST:
        raise ValueError("nested deeper than any value of this kind")
    if value is None or isinstance(value, (bool, int, str)):
        # Subclasses (enumerations, numpy numbers) would come back as something else.
        if value is None or type(value) in (bool, int, str):
            return value
    elif isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise ValueError("a key that is no text")
        return {key: plain(item, depth + 1) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    raise ValueError(f"a {type(value).__name__}; only text, integers, true, false, null, lists and objects are stored")


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that ``data`` spells; ValueError for anything else, keys twice, numbers not whole."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_number, parse_float=_no_number
        )
    except RecursionError:
        raise ValueError("nested deeper than any file of this kind") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where an object is expected")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} twice in one object")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text}, which is no integer")


def path_fault(path: object) -> str:
    """What keeps ``path`` from naming a file inside a folder, with "/" between its parts; empty if nothing does."""
    if type(path) is not str:
        return "is no text"
    if "\0" in path:
        return "holds a NUL character"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "is no relative path of named parts"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "is not valid text"
    return ""


class Fields:
    """The members of one object, each taken with its type; ValueError says which is wrong and where."""

    def __init__(self, value: object, where: str = "") -> None:
        self._where = f"{where}: " if where else ""
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._where}{_short(value)} where an object is expected")
        self._members = value

    def only(self, names: Iterable[str]) -> None:
        """No other members than these are there."""
        unknown = sorted(set(self._members) - set(names))
        if unknown:
            raise ValueError(f"{self._where}unknown key {_short(unknown[0])}")

    def text(self, name: str) -> str:
        value = self._take(name)
        return value if type(value) is str else self._wrong(name, value, "text")

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if name in self._members else None

    def flag(self, name: str) -> bool:
        value = self._take(name)
        return value if type(value) is bool else self._wrong(name, value, "true or false")

    def count(self, name: str) -> int:
        """A member that counts something: an integer of at least 0."""
        value = self._take(name)
        return value if type(value) is int and value >= 0 else self._wrong(name, value, "a count")

    def crc(self, name: str) -> int:
        """A CRC-32, spelled as eight lower-case hexadecimal digits."""
        value = self._take(name)
        if type(value) is str and len(value) == 8 and set(value) <= set("0123456789abcdef"):
            return int(value, 16)
        return self._wrong(name, value, "eight hexadecimal digits")

    def counts(self, name: str) -> tuple[int, ...]:
        value = self._take(name)
        if type(value) is list and all(type(item) is int and item >= 0 for item in value):
            return tuple(value)
        return self._wrong(name, value, "a list of counts")

    def objects(self, name: str) -> dict[str, Any]:
        value = self._take(name)
        return value if type(value) is dict else self._wrong(name, value, "an object")

    def _take(self, name: str) -> object:
        if name not in self._members:
            raise ValueError(f"{self._where}{name!r} is missing")
        return self._members[name]

    def _wrong(self, name: str, value: object, expected: str) -> NoReturn:
        raise ValueError(f"{self._where}{name!r} is {_short(value)}, expected {expected}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
