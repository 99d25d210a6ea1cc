"""Attributes set on single objects, and taken off again without a trace."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

__all__ = ["Instances"]

_ABSENT = object()


class Instances:
    """Remembers every instance attribute it sets; classes, modules and functions, which others share, are refused."""

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """``owner``'s own attribute ``name`` is ``value``, until ``restore``."""
        if isinstance(owner, (type, ModuleType, FunctionType)):
            raise TypeError(f"{name} would be set on {owner!r}, which others share; expected a single object")
        self._set.append((owner, name, vars(owner).get(name, _ABSENT), value))
        vars(owner)[name] = value

    def restore(self) -> None:
        """Every attribute is what it was; one that somebody else has set since keeps what they set."""
        while self._set:
            owner, name, before, ours = self._set.pop()
            own = vars(owner)
            if own.get(name, _ABSENT) is not ours:
                continue
            if before is _ABSENT:
                del own[name]
            else:
                own[name] = before
