"""Where in an object graph a storage is used, spelled as Python would index it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_affine.storage.refs import StandIn, StorageRef, TensorRef

__all__ = ["place_names"]

_LONGEST = 100


def place_names(root: Any, key: str) -> list[str]:
    """Every place in ``root`` that holds a tensor of storage ``key``, in the order of the graph."""
    return [
        place or "the tensor itself"
        for place, value in _walk(root)
        if (value.storage if isinstance(value, TensorRef) else value).key == key
    ]


def _walk(root: Any) -> Iterator[tuple[str, TensorRef | StorageRef]]:
    # Without recursion, since a file may nest as deep as it likes; and one object may be at several places.
    pending: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while pending:
        place, value = pending.pop()
        if isinstance(value, (TensorRef, StorageRef)):
            yield place, value
            continue
        inner = list(_inside(value))
        if inner and id(value) not in seen:
            seen.add(id(value))
            pending.extend((place + step, item) for step, item in reversed(inner))


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{_short(key)}]", item
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            yield f"[{at}]", item
    elif isinstance(value, StandIn):
        for part in ("class", "args", "kwargs", "state", "list", "dict"):
            yield "" if part == "state" else f".{part}", getattr(value, f"stand_in_{part}")


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
