"""Two ways of reading a folder in steps: the first fault ends it, or every fault is kept and reading goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from deepspeed_affine.errors import AffineError, Faults
from deepspeed_affine.storage.pt_reader import Loaded

__all__ = ["Reading"]

Step = TypeVar("Step")


class Reading:
    """How a folder is read: ``load`` reads one file. With ``faults`` it is a survey, which collects them there."""

    def __init__(self, load: Callable[[str], Loaded], faults: Faults | None = None) -> None:
        self.load = load
        self.faults = faults

    @property
    def is_survey(self) -> bool:
        return self.faults is not None

    @property
    def said(self) -> tuple[AffineError, ...]:
        """Every fault so far, once: a file may be asked twice, and gives the same answer."""
        return tuple({fault.message: fault for fault in reversed(list(self.faults or ()))}.values())[::-1]

    def settle(self, faults: Faults) -> None:
        """The faults of one pass are raised together, or collected."""
        if self.faults is None:
            faults.raise_if_any()
        else:
            self.faults.extend(faults)

    def attempt(self, otherwise: Step, step: Callable[..., Step], *args: Any) -> Step:
        """What ``step`` returns; in a survey ``otherwise`` where it raises."""
        if self.faults is None:
            return step(*args)
        try:
            return step(*args)
        except AffineError as fault:
            self.faults.add(fault)
            return otherwise
