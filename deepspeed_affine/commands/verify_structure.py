"""One output file as an object: compared with what the plan would write, its tensors paired for a comparison by bytes.

Needed where a file is not, byte for byte, what would be written: another converter wrote it, or it is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepspeed_affine.commands.graphs import GraphWalk, ValueDifference, is_in
from deepspeed_affine.commands.verify_findings import Finding
from deepspeed_affine.commands.verify_manifest import Name, holds, without_file
from deepspeed_affine.errors import AffineError
from deepspeed_affine.execute.compare import stored_storage, stored_tensor
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.ir.ints import row_major_strides
from deepspeed_affine.plan.conversion import ConversionPlan, CopiedFile, ObjectFile, SourceStorage, TensorFile
from deepspeed_affine.storage.files import ByteReader, join
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.refs import StorageRef, TensorRef

__all__ = ["Pair", "Pairs", "Planned", "Structure", "name_of_planned", "read_structure", "whole_storages"]

Planned = TensorFile | ObjectFile | CopiedFile
_PLANNED_PATH = ""


@dataclass(frozen=True, slots=True)
class Structure:
    """What a file is but for its tensors' elements: everything that is not as planned, and the tensors that are, each
    with the stored one it should equal (None: the planned file's own, made of pieces)."""

    planned: Planned
    findings: tuple[Finding, ...]
    tensors: tuple[tuple[str, TensorRef | None, TensorRef], ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor as it should be and as it is. ``left`` names storages of the plan, or for a tensor that is carried over
    (``carried``) the one it is carried from."""

    planned: Planned
    place: str
    left: TensorFile
    right: TensorFile
    carried: StorageRef | None = None


def name_of_planned(planned: Planned) -> Name:
    """Whose state the planned file holds, if anyone's."""
    return (None, None) if isinstance(planned, CopiedFile) else (planned.param, planned.state)


def read_structure(planned: Planned, folder: str) -> Structure:
    """The file of ``folder`` that should be what is planned, read without its tensors' elements."""
    path, name = join(folder, planned.path), name_of_planned(planned)
    try:
        root = load_pickle(path).root
    except AffineError as fault:
        said = without_file(fault, path) + holds(name)
        return Structure(planned, (Finding("damaged", planned.path, said, *name),))
    expected = _expected(planned)
    findings: list[Finding] = []
    tensors: dict[tuple[TensorRef, TensorRef], tuple[str, TensorRef | None, TensorRef]] = {}
    for item in GraphWalk(expected, root):
        place = is_in(item.place)
        if isinstance(item, ValueDifference):
            detail = f"{place}: {item.a or 'nothing'} expected, {item.b or 'nothing'} found{holds(name)}"
            findings.append(Finding("metadata", planned.path, detail, *name, place=place))
            continue
        own = item.a.storage.path == _PLANNED_PATH
        tensors.setdefault((item.a, item.b), (place, None if own else item.a, item.b))
    return Structure(planned, tuple(findings), tuple(tensors.values()))


def _expected(planned: Planned) -> Any:
    if isinstance(planned, CopiedFile):
        return load_pickle(planned.source).root
    if isinstance(planned, ObjectFile):
        return planned.root
    storage = StorageRef(_PLANNED_PATH, "", planned.dtype, planned.numel, 0, None, "cpu")
    tensor = TensorRef(storage, 0, planned.shape, row_major_strides(planned.shape))
    if planned.entries is None:
        return tensor
    return {key: tensor if key == planned.tensor_key else value for key, value in planned.entries}


def whole_storages(structure: Structure) -> Structure:
    """The storages behind tensors that are carried over, as tensors: they hold more than the tensors show."""
    pairs = {(expected.storage, found.storage) for _, expected, found in structure.tensors if expected is not None}
    tensors = [
        (f"storage {found.key!r}", _flat(expected), _flat(found))
        for expected, found in sorted(pairs, key=lambda pair: pair[1].byte_offset)
        if (expected.dtype, expected.numel) == (found.dtype, found.numel)
    ]
    return Structure(structure.planned, (), tuple(tensors))


def _flat(storage: StorageRef) -> TensorRef:
    return TensorRef(storage, 0, (storage.numel,), (1,))


@dataclass(slots=True)
class Pairs:
    """Tensors to be compared, with the storages they lie in on either side."""

    pairs: list[Pair] = field(default_factory=list)
    _carried: list[SourceStorage] = field(default_factory=list)
    _found: list[SourceStorage] = field(default_factory=list)

    def add(self, structure: Structure) -> list[Finding]:
        """The tensors of ``structure`` are to be compared; returns those that cannot be, as findings."""
        findings = []
        param, state = name_of_planned(structure.planned)
        for place, expected, found in structure.tensors:
            right = stored_tensor(found, len(self._found), param=param or "", state=state or "")
            left = structure.planned
            if expected is not None:
                left = stored_tensor(expected, len(self._carried), param=param or "", state=state or "")
            if not isinstance(left, TensorFile) or left.numel != right.numel:
                detail = f"{place}: holds {right.numel} elements and repeats them{holds((param, state))}"
                findings.append(Finding("metadata", structure.planned.path, detail, param, state, place))
                continue
            if expected is not None:
                self._carried.append(stored_storage(expected.storage))
            self._found.append(stored_storage(found.storage))
            carried = None if expected is None else expected.storage
            self.pairs.append(Pair(structure.planned, place, left, right, carried))
        return findings

    def readers(self, plan: ConversionPlan, reader: ByteReader) -> tuple[PieceReader, PieceReader, PieceReader]:
        """What reads the plan's storages, the carried ones, and those of the output."""
        return (
            PieceReader(plan.storages, reader),
            PieceReader(self._carried, reader),
            PieceReader(self._found, reader),
        )
