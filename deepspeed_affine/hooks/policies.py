"""What the caller decides about parameters only one side has."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, PolicyError
from deepspeed_affine.hooks.report import Reporting

__all__ = ["POLICIES", "MissingError", "Strictness", "UnexpectedError", "first_line"]

POLICIES = ("raise", "warn", "ignore")
MISSING, UNEXPECTED = "missing", "unexpected"


@dataclass(frozen=True, slots=True)
class Strictness:
    """One named policy for what the checkpoint lacks, and one for what the model does not have."""

    missing: str
    unexpected: str

    def __post_init__(self) -> None:
        for option in (MISSING, UNEXPECTED):
            value = getattr(self, option)
            if value not in POLICIES:
                raise PolicyError(f"{option} is {value!r}; expected one of {', '.join(map(repr, POLICIES))}.")

    def lacks(self, what: str, why: str, faults: Faults, report: Reporting, *, param: str | None = None) -> None:
        """The checkpoint lacks ``what``, for the reason ``why``."""
        self._decide(MISSING, what, why, faults, report, param)

    def has_more(self, what: str, why: str, faults: Faults, report: Reporting, *, param: str | None = None) -> None:
        """The checkpoint has ``what``, and nothing in the engine takes it."""
        self._decide(UNEXPECTED, what, why, faults, report, param)

    def _decide(self, option: str, what: str, why: str, faults: Faults, report: Reporting, param: str | None) -> None:
        policy = getattr(self, option)
        if policy == "raise":
            kind = MissingError if option == MISSING else UnexpectedError
            faults.add(kind(f"{what}: {why}. Say {option}='ignore' or 'warn' to load without it.", param=param))
            return
        if policy == "warn":
            warnings.warn(f"{what}: {why}", stacklevel=2)
        report.left(what, why)


class MissingError(CheckpointFormatError):
    """Something the engine has and the checkpoint lacks."""


class UnexpectedError(CheckpointFormatError):
    """Something the checkpoint has and nothing in the engine takes."""


def first_line(path: str, faults: Sequence[AffineError]) -> str:
    """What kinds of faults there are, with counts."""
    missing = sum(isinstance(fault, MissingError) for fault in faults)
    unexpected = sum(isinstance(fault, UnexpectedError) for fault in faults)
    others = len(faults) - missing - unexpected
    counts = [(missing, "missing"), (unexpected, "unexpected"), (others, "that do not fit")]
    said = ", ".join(f"{count} {kind}" for count, kind in counts if count)
    return f"{path} was not loaded and the engine is unchanged: {said}."
