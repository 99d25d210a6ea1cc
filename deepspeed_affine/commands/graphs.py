"""Two object graphs walked side by side: plain values compared on the way, tensors handed on as pairs.

The graphs are what reading a file without executing it gives. The order of dictionary keys, whether a tensor wants a
gradient, and the numbers that ZeRO-3 gives tensors while it runs, are no content.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed_affine.execute.zero_stage import as_stage, is_stage
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.storage.refs import StandIn, StorageRef, TensorRef

__all__ = ["GraphWalk", "Place", "Step", "TensorPair", "ValueDifference", "is_in"]


class Step(NamedTuple):
    """One step into a graph: as text, and the key of a dictionary as it is."""

    text: str
    key: Any = None


RUN_ATTRIBUTES = ("ds_id",)
"""Of tensors: what ZeRO-3 numbers them with while it runs, and finds anew in the next run."""

Place = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two stored tensors of one dtype and shape that stand at the same place."""

    place: Place
    a: TensorRef
    b: TensorRef


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """Two values that differ at the same place, as text; None where one side has nothing there."""

    place: Place
    a: str | None
    b: str | None


def is_in(place: Place) -> str:
    """A place as Python would index it."""
    return "".join(step.text for step in place) or "the file"


class GraphWalk:
    """Iterating yields every tensor pair and value difference; ``equal`` then counts the plain values that agree."""

    def __init__(self, a: Any, b: Any) -> None:
        self.equal = 0
        self._pending: list[tuple[Place, Any, Any]] = [((), a, b)]
        self._seen: set[tuple[int, int]] = set()

    def __iter__(self) -> Iterator[TensorPair | ValueDifference]:
        # Without recursion, since a file may nest as deep as it likes.
        while self._pending:
            place, a, b = self._pending.pop()
            a, b = _as_tensor(a), _as_tensor(b)
            if isinstance(a, TensorRef) and isinstance(b, TensorRef):
                yield from self._tensors(place, a, b)
            elif isinstance(a, Mapping) and isinstance(b, Mapping):
                yield from self._mappings(place, a, b)
            elif type(a) is not type(b):
                yield ValueDifference(place, _text(a), _text(b))
            elif isinstance(a, (list, tuple)):
                yield from self._sequences(place, a, b)
            elif is_stage(a) and is_stage(b) and as_stage(a) == as_stage(b):
                # Pickled by another Python; see there.
                self.equal += 1
            elif isinstance(a, StandIn):
                yield from self._stand_ins(place, a, b)
            elif _same(a, b):
                self.equal += 1
            else:
                yield ValueDifference(place, shown(a), shown(b))

    def _first_visit(self, a: Any, b: Any) -> bool:
        """Graphs may hold one object at several places, or within itself."""
        pair = (id(a), id(b))
        if pair in self._seen:
            return False
        self._seen.add(pair)
        return True

    def _tensors(self, place: Place, a: TensorRef, b: TensorRef) -> Iterator[TensorPair | ValueDifference]:
        if (a.dtype, a.shape, a.is_meta) != (b.dtype, b.shape, b.is_meta):
            yield ValueDifference(place, _text(a), _text(b))
        elif not a.is_meta:
            yield TensorPair(place, a, b)
        ours, theirs = _content(a.state), _content(b.state)
        if ours is not None or theirs is not None:
            self._pending.append(((*place, Step(".__dict__")), ours, theirs))

    def _mappings(self, place: Place, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> Iterator[ValueDifference]:
        if not self._first_visit(a, b):
            return
        inner = []
        ours, theirs = ({_spelled(key): key for key in mapping} for mapping in (a, b))
        for spelled, key in ours.items():
            here = (*place, Step(f"[{shown(key)}]", key))
            if spelled in theirs:
                inner.append((here, a[key], b[theirs[spelled]]))
            else:
                yield ValueDifference(here, _text(a[key]), None)
        for spelled, key in theirs.items():
            if spelled not in ours:
                yield ValueDifference((*place, Step(f"[{shown(key)}]", key)), None, _text(b[key]))
        self._pending += reversed(inner)

    def _sequences(self, place: Place, a: Any, b: Any) -> Iterator[ValueDifference]:
        if not self._first_visit(a, b):
            return
        if len(a) != len(b):
            yield ValueDifference(place, f"{len(a)} items", f"{len(b)} items")
        pairs = list(zip(a, b, strict=False))
        self._pending += [((*place, Step(f"[{at}]")), *pairs[at]) for at in range(len(pairs) - 1, -1, -1)]

    def _stand_ins(self, place: Place, a: StandIn, b: StandIn) -> Iterator[ValueDifference]:
        if not self._first_visit(a, b):
            return
        nested = isinstance(a.stand_in_class, StandIn) and isinstance(b.stand_in_class, StandIn)
        if a.stand_in_op != b.stand_in_op or not (nested or a.stand_in_class == b.stand_in_class):
            yield ValueDifference(place, repr(a), repr(b))
            return
        parts = ("class", "args", "kwargs", "state", "list", "dict")
        for part in reversed(parts):
            one, other = getattr(a, f"stand_in_{part}"), getattr(b, f"stand_in_{part}")
            plain = part == "class" and not isinstance(one, StandIn)
            if not plain:
                self._pending.append(((*place, Step("" if part == "state" else f".{part}")), one, other))


def _as_tensor(value: Any) -> Any:
    """A storage that stands for itself is the flat tensor over it."""
    return TensorRef(value, 0, (value.numel,), (1,)) if isinstance(value, StorageRef) else value


def _content(state: Any) -> Any:
    """A tensor's own attributes without the number under which one process keeps it; None where nothing is left."""
    if not isinstance(state, Mapping):
        return state
    return {key: value for key, value in state.items() if key not in RUN_ATTRIBUTES} or None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag)
    return bool(a == b)


def _spelled(key: Any) -> Any:
    """A key as it is written: ``1``, ``1.0`` and ``True`` are one to a dictionary, and so are the two zeros."""
    if isinstance(key, tuple):
        return tuple, tuple(_spelled(part) for part in key)
    return type(key), struct.pack("<d", key) if isinstance(key, float) else key


def _text(value: Any) -> str:
    if isinstance(value, TensorRef):
        return f"a tensor of {value.dtype}, shape {list(value.shape)}{' without values' if value.is_meta else ''}"
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return f"a {type(value).__name__} of {len(value)} items"
    return shown(value)
