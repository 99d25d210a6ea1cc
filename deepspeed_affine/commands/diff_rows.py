"""What a comparison of two folders finds, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed_affine.commands.graphs import Place, TensorPair, is_in
from deepspeed_affine.execute.compare import Difference
from deepspeed_affine.plan.conversion import TensorFile

__all__ = ["Contents", "FoundTensor", "Row", "Settings", "module_param", "tensor_row"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a comparison runs: threads, and whether a bar is shown."""

    workers: int = 2
    progress: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that differs. ``param`` and ``state`` say whose it is, ``holder`` which rank's copy, ``file`` and
    ``place`` where in a file it stands; what does not apply is None. A tensor that differs has ``difference``, its
    ``shape`` and the number of elements compared, anything else the two values as text."""

    kind: str
    param: str | None = None
    state: str | None = None
    holder: str | None = None
    file: str | None = None
    place: str | None = None
    difference: Difference | None = None
    shape: tuple[int, ...] = ()
    total: int = 0
    a: str | None = None
    b: str | None = None
    note: str | None = None


@dataclass(slots=True)
class Contents:
    """What comparing contents found. ``method`` is ``files`` or ``parameters``; names in ``only_a`` and ``only_b`` are
    files, or ``parameter/state``."""

    method: str
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    equal_tensors: int = 0
    equal_values: int = 0
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.rows)


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor pair of a walk, and the file it is in."""

    file: str
    pair: TensorPair
    left: TensorFile
    right: TensorFile


def tensor_row(found: FoundTensor, difference: Difference, unnamed: int = 0) -> Row:
    task = found.left
    return Row(
        "tensor",
        task.param or module_param(found.pair.place),
        task.state or None,
        file=found.file,
        place=is_in(found.pair.place),
        difference=difference,
        shape=task.shape,
        total=task.numel,
        note=f"{unnamed} of them belong to no parameter" if unnamed else None,
    )


def module_param(place: Place) -> str | None:
    """The parameter whose copy stands there in a model-state file."""
    if len(place) == 2 and place[0].key in ("module", "frozen_param_fragments") and isinstance(place[1].key, str):
        return place[1].key
    return None
