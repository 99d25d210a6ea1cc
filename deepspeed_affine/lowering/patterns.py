"""Parameter name patterns, matched the way DeepSpeed matches them, except where a pattern is a plain name.

A key of the form ``^re.escape(name)$`` is that name and nothing else, and wins over patterns that match it too;
every other key is a legacy pattern and is tried with ``re.match``, unanchored at the end, because that is what the
writer of it was tested with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.ir import exact_name
from deepspeed_affine.ir.ints import shown

__all__ = ["PatternList"]


@dataclass(frozen=True, slots=True, init=False)
class PatternList:
    """The patterns of one metadata entry, in stored order, each already known to be usable."""

    entry: str
    keys: tuple[str, ...]
    _exact: dict[str, str] = field(repr=False, compare=False)
    _legacy: tuple[tuple[str, re.Pattern[str]], ...] = field(repr=False, compare=False)

    def __init__(self, entry: str, keys: Iterable[object] = ()) -> None:
        kept: dict[str, None] = {}
        exact: dict[str, str] = {}
        legacy: list[tuple[str, re.Pattern[str]]] = []
        for key in keys:
            if type(key) is not str:
                raise CheckpointFormatError(
                    f"{entry} holds {shown(key)}, a {type(key).__name__}; expected parameter name patterns as strings."
                )
            if key in kept:
                continue
            kept[key] = None
            name = exact_name(key)
            if name is not None:
                exact[name] = key
                continue
            try:
                legacy.append((key, re.compile(key)))
            except (re.error, OverflowError, RecursionError) as fault:
                raise CheckpointFormatError(
                    f"{entry} holds the pattern {shown(key)}, which is not a regular expression ({fault}); "
                    "DeepSpeed could not read this checkpoint either. Correct the pattern in the metadata."
                ) from None
        object.__setattr__(self, "entry", entry)
        object.__setattr__(self, "keys", tuple(kept))
        object.__setattr__(self, "_exact", exact)
        object.__setattr__(self, "_legacy", tuple(legacy))

    def __bool__(self) -> bool:
        return bool(self.keys)

    def matches(self, name: str) -> tuple[str, ...]:
        """Every key that matches ``name``, in stored order."""
        found = [key for key, pattern in self._legacy if pattern.match(name)]
        exact = self._exact.get(name)
        if exact is None:
            return tuple(found)
        if not found:
            return (exact,)
        both = {exact, *found}
        return tuple(key for key in self.keys if key in both)

    def exact(self, name: str) -> str | None:
        """The key that is ``name`` and nothing else, or None."""
        return self._exact.get(name)

    def single(self, name: str) -> str | None:
        """The key that decides about ``name``, or None: its exact key, else the one pattern that matches it.

        Two patterns are refused, since they may mean different things.
        """
        exact = self._exact.get(name)
        if exact is not None:
            return exact
        found = self.matches(name)
        if len(found) > 1:
            raise CheckpointFormatError(
                f"Parameter {name} is matched by {len(found)} patterns of {self.entry}: "
                f"{', '.join(map(shown, found))}; expected at most one. Patterns match from the start of a name and "
                "may end anywhere in it: close the shorter one with '$', or list the name itself as '^name$'.",
                param=name,
            )
        return found[0] if found else None

    def searches(self, name: str) -> tuple[str, ...]:
        """Every key found anywhere in ``name``, for the entries whose patterns are written to be searched."""
        found = {key for key, pattern in self._legacy if pattern.search(name)}
        found.update({self._exact[name]} if name in self._exact else ())
        return tuple(key for key in self.keys if key in found)
