"""What a load did, in plain values: restored, not restored and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["LoadReport", "NotRestored", "Reporting"]

SHOWN = 10
"""How many lines of one kind ``str`` shows; the rest are counted."""


@dataclass(frozen=True, slots=True)
class NotRestored:
    """One thing the load left as the engine had it, or started afresh, and why."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What ``load_checkpoint`` did on this rank.

    ``weights`` are the parameters and ``buffers`` the buffers that have the checkpoint's values now; ``states`` counts
    per optimizer state the parameters of which this rank restored elements. ``restored`` lists everything else, such
    as counters and the scheduler. ``not_restored`` says what is missing, and why. ``padding`` counts per parameter the
    elements of this rank that the checkpoint has no rows for (vocabulary padding), which are zero. ``client_state`` is
    what the user saved.
    """

    path: str
    weights: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    states: Mapping[str, int] = field(default_factory=dict)
    restored: tuple[str, ...] = ()
    not_restored: tuple[NotRestored, ...] = ()
    padding: Mapping[str, int] = field(default_factory=dict)
    client_state: Mapping[str, Any] = field(default_factory=dict)
    bytes_read: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing was left out."""
        return not self.not_restored

    def __str__(self) -> str:
        lines = [f"loaded {self.path}: {len(self.weights)} parameters, {self.bytes_read} bytes read by this rank"]
        if self.buffers:
            lines.append(f"  buffers: {len(self.buffers)}")
        if self.states:
            counts = ", ".join(f"{state} of {count} parameters" for state, count in self.states.items())
            lines.append(f"  optimizer states, of what this rank holds: {counts}")
        if self.restored:
            lines.append(f"  also: {', '.join(self.restored)}")
        if self.padding:
            lines += _listed("padding", [f"{name}: {count} elements" for name, count in self.padding.items()])
        if self.client_state:
            lines.append(f"  client state: {', '.join(map(str, self.client_state))}")
        lines += _listed("not restored", _by_reason(self.not_restored))
        return "\n".join(lines)


class Reporting:
    """A report in the making."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.weights: dict[str, None] = {}
        self.buffers: dict[str, None] = {}
        self.states: Counter[str] = Counter()
        self.restored: list[str] = []
        self.not_restored: dict[NotRestored, None] = {}
        self.padding: Counter[str] = Counter()
        self.bytes_read = 0

    def left(self, what: str, why: str) -> None:
        """Note that ``what`` was not restored; said once however often it is met."""
        self.not_restored[NotRestored(what, why)] = None

    def finished(self, client_state: Mapping[str, Any]) -> LoadReport:
        return LoadReport(
            self.path,
            tuple(self.weights),
            tuple(self.buffers),
            MappingProxyType(dict(sorted(self.states.items()))),
            tuple(self.restored),
            tuple(self.not_restored),
            MappingProxyType(dict(self.padding)),
            client_state,
            self.bytes_read,
        )


def _by_reason(rows: Iterable[NotRestored]) -> list[str]:
    """One line a reason, so that what has another is not hidden behind a model's parameters."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.why, []).append(row.what)
    return [
        f"{what[0]}{f' and {len(what) - 1} more like it' if len(what) > 1 else ''}: {why}"
        for why, what in found.items()
    ]


def _listed(title: str, items: Iterable[object]) -> list[str]:
    texts = [str(item) for item in items]
    if not texts:
        return []
    shown = [f"    {text}" for text in texts[:SHOWN]]
    hidden = [f"    ... and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return [f"  {title}:", *shown, *hidden]
