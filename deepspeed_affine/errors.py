"""Every error this package raises on purpose, as one small tree.

A message says four things: the subject, the fact, what was expected, and what to do. The subject is also
carried in fields (``param``, ``rank``, ``file``) so that callers need not parse text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = [
    "AffineError",
    "BudgetExceededError",
    "CheckpointFormatError",
    "Faults",
    "IntegrityError",
    "InvalidMapError",
    "PolicyError",
    "UnsupportedLayoutError",
]

SHOWN_FAULTS = 10
"""How many faults of one pass are printed; the rest are counted."""


class AffineError(ValueError):
    """The root: bad input, or input this package declines, with the subject in its fields."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        rank: int | None = None,
        file: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.rank = rank
        self.file = file
        self.faults: tuple[AffineError, ...] = (self,)

    def to_dict(self) -> dict[str, object]:
        """The fault as plain values, for JSON."""
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "param": self.param,
            "rank": self.rank,
            "file": self.file,
        }

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message,), {**self.__dict__, "faults": None})

    def __setstate__(self, state: dict[str, object] | None) -> None:
        for key, value in (state or {}).items():
            setattr(self, key, value)
        if not self.faults:
            self.faults = (self,)


class InvalidMapError(AffineError):
    """A map contradicts itself or the parameter it claims to describe."""


class UnsupportedLayoutError(AffineError, NotImplementedError):
    """A legitimate layout or state that is not expressed here; the message says what to do instead."""


class BudgetExceededError(UnsupportedLayoutError):
    """An exact answer would need more work than the stated budget allows."""


class CheckpointFormatError(AffineError):
    """A file or key is missing, truncated, of a wrong type, or newer than this package."""


class IntegrityError(AffineError):
    """Bytes that must agree do not."""


class PolicyError(AffineError):
    """An option or a callback of the caller asks for something contradictory."""


class Faults:
    """A pass's faults, collected so that one error can show them all.

    ``raise_if_any`` raises the single fault as it is, or one error of the first fault's class whose message
    lists the first ten and counts the rest.
    """

    def __init__(self) -> None:
        self._faults: list[AffineError] = []

    def __bool__(self) -> bool:
        return bool(self._faults)

    def __len__(self) -> int:
        return len(self._faults)

    def __iter__(self) -> Iterator[AffineError]:
        return iter(self._faults)

    def add(self, fault: AffineError) -> None:
        self._faults.extend(fault.faults)

    def extend(self, faults: Iterable[AffineError]) -> None:
        for fault in faults:
            self.add(fault)

    def raise_if_any(self) -> None:
        if not self._faults:
            return
        if len(self._faults) == 1:
            raise self._faults[0]
        shown = self._faults[:SHOWN_FAULTS]
        lines = [fault.message for fault in shown]
        hidden = len(self._faults) - len(shown)
        if hidden:
            lines.append(f"... and {hidden} more")
        error = type(self._faults[0])("\n".join(lines))
        error.faults = tuple(self._faults)
        raise error
