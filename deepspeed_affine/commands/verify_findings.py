"""What a verification finds, as values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_affine.commands.text import counted, size
from deepspeed_affine.errors import AffineError
from deepspeed_affine.execute.compare import Difference
from deepspeed_affine.execute.sampling import Sample

__all__ = ["FINE", "PERCENTAGES", "Finding", "Outcome", "Sampled", "in_order"]

FINE, DIFFERENT, COULD_NOT = 0, 1, 2
FORMAT = 1
PERCENTAGES = (1, 10)
"""Of how many damaged units in a hundred a sample says with what probability it misses all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, in ``file`` (relative to the folder).

    ``kind`` is ``missing``, ``extra``, ``size``, ``damaged`` (bytes are not those that were written), ``metadata``,
    ``elements``, ``bytes`` (of a copied file, outside of its tensors), ``manifest`` (it contradicts the files, or
    cannot be used), ``source`` (the manifest names another one), or ``unreadable``. ``elements`` has ``difference``,
    the tensor's ``shape``, and ``source``: where the first differing element comes from. A finding that is not
    ``decided`` may be the source's fault.
    """

    kind: str
    file: str
    detail: str
    param: str | None = None
    state: str | None = None
    place: str | None = None
    difference: Difference | None = None
    shape: tuple[int, ...] = ()
    total: int = 0
    source: str | None = None
    decided: bool = True

    def describe(self) -> str:
        """The finding in words, without the file."""
        if self.difference is None:
            return self.detail
        found = self.difference
        ulp = "" if found.max_ulp is None else f", {found.max_ulp} ulp"
        source = f"; it should come from {self.source}" if self.source else ""
        return (
            f"{self.detail}first at element {found.coordinates(self.shape)}: {found.values[0]} expected, "
            f"{found.values[1]} found; {found.differing} of {self.total} elements differ, by at most "
            f"{found.max_abs:g}{ulp}{source}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; described in docs/commands.md."""
        found: dict[str, Any] = {
            "kind": self.kind,
            "file": self.file,
            "detail": self.describe(),
            "param": self.param,
            "state": self.state,
            "place": self.place,
            "decided": self.decided,
        }
        if self.difference is not None:
            far = self.difference.max_abs
            found |= {
                "shape": list(self.shape),
                "first": list(self.difference.coordinates(self.shape)),
                "differing": self.difference.differing,
                "compared": self.total,
                # JSON has no spelling for what is not finite.
                "max_abs": far if math.isfinite(far) else str(far),
                "max_ulp": self.difference.max_ulp,
                "expected": self.difference.values[0],
                "found": self.difference.values[1],
                "source": self.source,
            }
        return found


@dataclass(frozen=True, slots=True)
class Sampled:
    """What of a folder's data was looked at. ``unit`` is ``block``, or ``group``: of files, of which ``files`` says how
    many were read and how many there are."""

    sample: Sample
    unit: str
    nbytes: int
    total_bytes: int
    files: tuple[int, int] | None = None

    @property
    def missed(self) -> dict[int, float]:
        """For each of ``PERCENTAGES``, the probability that damage to so many units in a hundred is missed."""
        sample = self.sample
        return {percent: sample.missed(math.ceil(sample.units * percent / 100)) for percent in PERCENTAGES}

    def describe(self) -> list[str]:
        """The sample in words: what was chosen, what the choice finds, how to repeat it."""
        sample = self.sample
        if sample.chosen == sample.units:
            units = counted(sample.units, self.unit) if self.files is None else counted(self.files[1], "file")
            return [f"all data was read: {units}, {size(self.total_bytes)}"]
        missed = " and ".join(
            f"damage to {percent} % of the {self.unit}s is missed with probability {_probability(chance)}"
            for percent, chance in self.missed.items()
        )
        chosen = f"{sample.chosen:,} of {counted(sample.units, self.unit)}"
        if self.files is not None:
            chosen += f" of files ({self.files[0]:,} of {counted(self.files[1], 'file')})"
        return [
            f"sampled: {chosen}, {size(self.nbytes)} of "
            f"{size(self.total_bytes)}, seed {sample.seed} (--seed {sample.seed} chooses them again)",
            f"a single damaged byte of the data is found with probability {_probability(sample.found)}; {missed}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "seed": self.sample.seed,
            "unit": self.unit,
            "units": self.sample.units,
            "chosen": self.sample.chosen,
            "files": None if self.files is None else self.files[0],
            "bytes": self.nbytes,
            "total_bytes": self.total_bytes,
            "single_byte_found": self.sample.found,
            "missed": {f"{percent}%": chance for percent, chance in self.missed.items()},
            "statement": self.describe()[-1],
        }


@dataclass(slots=True)
class Outcome:
    """A verification. ``source_faults`` say what of the source is damaged; nothing can be proved by that."""

    folder: str
    against: str | None = None
    files: int = 0
    nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    source_faults: list[AffineError] = field(default_factory=list)
    sampled: Sampled | None = None

    @property
    def different(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.decided]

    @property
    def undecided(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.decided]

    @property
    def exit_code(self) -> int:
        """1 where a difference is proved; else 2 where something could not be told."""
        if self.different:
            return DIFFERENT
        return COULD_NOT if self.findings or self.source_faults else FINE

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; described in docs/commands.md."""
        return {
            "format": FORMAT,
            "folder": self.folder,
            "against": self.against,
            "result": ("fine", "different", "cannot tell")[self.exit_code],
            "files": self.files,
            "bytes": self.nbytes,
            "findings": [finding.to_dict() for finding in in_order(self.findings)],
            "damaged_source": [fault.to_dict() for fault in self.source_faults],
            "notes": self.notes,
            "sample": None if self.sampled is None else self.sampled.to_dict(),
        }


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """As they are shown: that all is compared with another source comes first, the rest by file."""
    return sorted(findings, key=lambda finding: (finding.kind != "source", finding.file, finding.kind, finding.detail))


def _probability(value: float) -> str:
    """Rounded, but never to a certainty that there is not."""
    if value in (0.0, 1.0):
        return f"{value:.0f}"
    text = f"{value:.3g}"
    if text == "1":
        return f"1 - {1 - value:.1g}"
    return text
