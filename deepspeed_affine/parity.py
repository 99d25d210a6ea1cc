"""The parity harness: two universal folders compared file by file, and a partition function against its map.

Two folders are equal when they hold the same files and: model-state files and ``zero/optimizer_state.pt`` agree as
whole files; every converted file has the same keys in the same order, non-tensors of equal type and value, and
tensors of equal dtype, shape and C-order bytes. Compared after loading, because a zip holds padding and dates.
The differences that are right are listed in ``RULES``, each with its reason; there are no others.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import AffineError, CheckpointFormatError, PolicyError

if TYPE_CHECKING:
    import torch

    from deepspeed_affine.commands.parity import run_parity
    from deepspeed_affine.lowering.probing import assert_partition, probe

__all__ = [
    "RULES",
    "FrozenSlices",
    "ParityReport",
    "ParityRow",
    "Verdict",
    "assert_partition",
    "compare_universal",
    "probe",
    "run_parity",
]

MANIFEST = "affine_manifest.json"
OPTIMIZER_STATE = "zero/optimizer_state.pt"
_BLOCK = 1 << 22

RULES: Mapping[str, str] = {
    "storage_slack": "DeepSpeed saves a view (a truncated vocabulary, a parameter in its flat buffer) with the whole "
    "storage behind it; we write only what the tensor holds",
    "nested_files": "DeepSpeed walks into folders inside the checkpoint folder and mixes their files in; only the "
    "folder's own files are the checkpoint, so both converters were given those",
    "frozen_under_autotp": "DeepSpeed stops at a frozen parameter that tensor parallelism cuts, or writes one rank's "
    "shard as the whole; we write the whole",
    "enumeration_by_name": "Python 3.11.0 to 3.11.3 pickle the ZeRO stage by its name, others by its number; DeepSpeed "
    "writes it as the Python it runs in does, we as it was saved",
}
"""The expected differences: name and reason."""


def __getattr__(name: str) -> Any:
    # Probing imports torch, and comparing folders must not wait for what only a partition test needs.
    if name in ("probe", "assert_partition"):
        from deepspeed_affine.lowering import probing

        return getattr(probing, name)
    if name == "run_parity":
        from deepspeed_affine.commands.parity import run_parity

        return run_parity
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Verdict(Enum):
    """What comparing one file found."""

    EQUAL = "equal"
    EXPECTED = "expected difference"
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One file: equal, different as a rule allows, or different, and where."""

    path: str
    verdict: Verdict
    detail: str = ""
    rule: str | None = None
    nbytes: int = 0

    def __post_init__(self) -> None:
        if (self.rule is not None) != (self.verdict is Verdict.EXPECTED):
            raise PolicyError(f"{self.path}: a rule belongs to an expected difference and to nothing else.")
        if self.rule is not None and self.rule not in RULES:
            raise PolicyError(f"{self.path}: no parity rule is named {self.rule!r}; expected one of {sorted(RULES)}.")

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values, for JSON."""
        return {"path": self.path, "verdict": self.verdict.name.lower(), "detail": self.detail, "rule": self.rule}


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Every file of two folders, compared."""

    ours: str
    theirs: str
    rows: tuple[ParityRow, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs but what a rule allows."""
        return not self.different

    @property
    def different(self) -> tuple[ParityRow, ...]:
        return tuple(row for row in self.rows if row.verdict is Verdict.DIFFERENT)

    @property
    def expected(self) -> tuple[ParityRow, ...]:
        return tuple(row for row in self.rows if row.verdict is Verdict.EXPECTED)

    def with_rows(self, *rows: ParityRow) -> ParityReport:
        """This report with ``rows`` added at its end."""
        return ParityReport(self.ours, self.theirs, (*self.rows, *rows))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        counts = {verdict.name.lower(): sum(row.verdict is verdict for row in self.rows) for verdict in Verdict}
        return {
            "equal": self.equal,
            "ours": self.ours,
            "theirs": self.theirs,
            "files": counts,
            "rows": [row.to_dict() for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class FrozenSlices:
    """The frozen parameters of a checkpoint with tensor parallelism, and the shape each rank holds of them."""

    shapes: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> FrozenSlices:
        """Read from the model-state files of ``folder``, which every universal folder carries along."""
        from deepspeed_affine.storage.pt_reader import load_pickle

        by_rank: dict[str, dict[str, tuple[int, ...]]] = {}
        for path in sorted(Path(folder).glob("*mp_rank_*_model_states.pt")):
            if "_expert_" in path.name:
                continue
            rank = path.name[path.name.index("mp_rank_") :]
            by_rank.setdefault(rank, {}).update(_frozen_shapes(load_pickle(path).root))
        if len(by_rank) < 2:
            return cls()
        names = {name for shapes in by_rank.values() for name in shapes}
        return cls({name: tuple(shapes[name] for shapes in by_rank.values() if name in shapes) for name in names})

    def allows(self, path: str, theirs: tuple[int, ...] | None) -> bool:
        """Whether DeepSpeed writing nothing (None) or a tensor of shape ``theirs`` at ``path`` is that fault."""
        name = path.removeprefix("zero/").removesuffix("/fp32.pt")
        shards = self.shapes.get(name)
        return path == f"zero/{name}/fp32.pt" and shards is not None and (theirs is None or theirs in shards)


def _frozen_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    listed = state.get("frozen_param_shapes")
    if listed:
        return {name: tuple(shape) for name, shape in listed.items()}
    # ZeRO-1 in full precision lists none: they are what the module holds and neither the optimizer nor a buffer is.
    known = {name for group in state.get("param_shapes") or () for name in group}
    known |= set(state.get("buffer_names") or ()) | set(state.get("shared_params") or ())
    module = state.get("module") or {}
    return {name: tuple(value.shape) for name, value in module.items() if name not in known and hasattr(value, "shape")}


def compare_universal(
    ours: str | os.PathLike[str],
    theirs: str | os.PathLike[str],
    *,
    frozen: FrozenSlices | None = None,
) -> ParityReport:
    """Every file of the universal folder ``ours`` has been compared with the one of the same name in ``theirs``.

    ``frozen`` defaults to what the model-state files of ``theirs`` say. Our manifest is no part of the comparison.
    Raises CheckpointFormatError when a folder is missing; an unreadable file is a difference and not an error.
    """
    mine, other = _files(ours), _files(theirs)
    if frozen is None:
        frozen = FrozenSlices.of(theirs)
    rows = []
    for path in sorted(mine | other):
        if path not in mine:
            rows.append(ParityRow(path, Verdict.DIFFERENT, "only DeepSpeed wrote it"))
        elif path not in other and frozen.allows(path, None):
            rows.append(ParityRow(path, Verdict.EXPECTED, "DeepSpeed wrote nothing", "frozen_under_autotp"))
        elif path not in other:
            rows.append(ParityRow(path, Verdict.DIFFERENT, "only we wrote it"))
        else:
            rows.append(_compare_file(path, Path(ours, path), Path(theirs, path), frozen))
    return ParityReport(os.path.abspath(ours), os.path.abspath(theirs), tuple(rows))


def _files(folder: str | os.PathLike[str]) -> set[str]:
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointFormatError(f"{root}: is not a folder; expected a universal checkpoint.", file=str(root))
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
    return found - {MANIFEST}


def _compare_file(path: str, mine: Path, other: Path, frozen: FrozenSlices) -> ParityRow:
    size = mine.stat().st_size
    offset = _first_difference(mine, other)
    if offset is None:
        return ParityRow(path, Verdict.EQUAL, nbytes=size)
    if not path.startswith("zero/") or path == OPTIMIZER_STATE:
        sizes = f"{size} and {other.stat().st_size} bytes"
        if _differ_in_spelling(mine, other):
            return ParityRow(
                path, Verdict.EXPECTED, "the ZeRO stage by name and by number", "enumeration_by_name", size
            )
        return ParityRow(path, Verdict.DIFFERENT, f"first differing byte {offset} ({sizes})", nbytes=size)
    try:
        a, b = _load(mine), _load(other)
    except (AffineError, OSError, RuntimeError) as error:
        return ParityRow(path, Verdict.DIFFERENT, f"cannot be read: {error}", nbytes=size)
    where = next(_differences(a, b, ""), None)
    if where is None:
        slack = _slack(b) - _slack(a)
        if slack > 0:
            return ParityRow(path, Verdict.EXPECTED, f"{slack} bytes behind the tensor", "storage_slack", size)
        return ParityRow(path, Verdict.EQUAL, nbytes=size)
    shape = tuple(b["param"].shape) if isinstance(b, dict) and _is_tensor(b.get("param")) else ()
    if shape and frozen.allows(path, shape):
        detail = f"DeepSpeed wrote one shard, {list(shape)}"
        return ParityRow(path, Verdict.EXPECTED, detail, "frozen_under_autotp", size)
    return ParityRow(path, Verdict.DIFFERENT, where, nbytes=size)


def _differ_in_spelling(mine: Path, other: Path) -> bool:
    """Whether the files hold the same objects in the same order, but for how the ZeRO stage is pickled."""
    from deepspeed_affine.commands.graphs import GraphWalk, TensorPair
    from deepspeed_affine.storage.files import ByteReader
    from deepspeed_affine.storage.pt_reader import load_pickle
    from deepspeed_affine.storage.refs import is_instance_of

    try:
        a, b = (load_pickle(str(path)).root for path in (mine, other))
    except AffineError:
        return False
    with ByteReader() as reader:
        for found in GraphWalk(a, b):
            if not isinstance(found, TensorPair) or not (found.a.is_contiguous and found.b.is_contiguous):
                return False
            left, right = (reader.read(ref.storage.path, ref.byte_offset, ref.nbytes) for ref in (found.a, found.b))
            if left != right:
                return False
    stages = [[item for item in _values(root) if is_instance_of(item, "getattr")] for root in (a, b)]
    orders = [[list(item) for item in _values(root) if isinstance(item, Mapping)] for root in (a, b)]
    return len(stages[0]) != len(stages[1]) and orders[0] == orders[1]


def _values(root: Any) -> Iterator[Any]:
    """Every object of plain containers, in order; each container once."""
    waiting, seen = [root], set()
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting += reversed(list(value.values()) if isinstance(value, Mapping) else value)


def _first_difference(mine: Path, other: Path) -> int | None:
    offset = 0
    with mine.open("rb") as a, other.open("rb") as b:
        while True:
            left, right = a.read(_BLOCK), b.read(_BLOCK)
            if left != right:
                pairs = enumerate(zip(left, right, strict=False))
                return offset + next((i for i, (x, y) in pairs if x != y), min(len(left), len(right)))
            if not left:
                return None
            offset += len(left)


def _load(path: Path) -> Any:
    """The file's object, by torch's own reader: the harness must not look through the code it judges."""
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        # Objects torch does not know are never built from a file; they are compared as the inert values they are.
        from deepspeed_affine.storage.pt_reader import load_pickle

        return load_pickle(path).root


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _differences(a: Any, b: Any, where: str) -> Iterator[str]:
    here = where or "the file"
    if type(a) is not type(b):
        yield f"{here}: {type(a).__name__} against DeepSpeed's {type(b).__name__}"
    elif _is_tensor(a):
        yield from _tensor_differences(a, b, here)
    elif isinstance(a, Mapping):
        if list(a) != list(b):
            yield f"{here}: keys {list(a)} against DeepSpeed's {list(b)}"
            return
        for key in a:
            yield from _differences(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{here}: {len(a)} items against DeepSpeed's {len(b)}"
            return
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _differences(left, right, f"{where}[{index}]")
    elif isinstance(a, float):
        if struct.pack("<d", a) != struct.pack("<d", b):
            yield f"{here}: {a!r} against DeepSpeed's {b!r}"
    elif a != b and repr(a) != repr(b):
        yield f"{here}: {a!r} against DeepSpeed's {b!r}"


def _tensor_differences(a: torch.Tensor, b: torch.Tensor, where: str) -> Iterator[str]:
    import torch

    if a.dtype != b.dtype:
        yield f"{where}: {a.dtype} against DeepSpeed's {b.dtype}"
        return
    if a.shape != b.shape:
        yield f"{where}: shape {list(a.shape)} against DeepSpeed's {list(b.shape)}"
        return
    # As bytes: a NaN equals itself, and -0.0 is not 0.0.
    left = a.contiguous().reshape(-1).view(torch.uint8) if a.numel() else a.new_empty(0, dtype=torch.uint8)
    right = b.contiguous().reshape(-1).view(torch.uint8) if b.numel() else b.new_empty(0, dtype=torch.uint8)
    if torch.equal(left, right):
        return
    for start in range(0, left.numel(), _BLOCK):
        unequal = (left[start : start + _BLOCK] != right[start : start + _BLOCK]).nonzero()
        if unequal.numel():
            element = (start + int(unequal[0])) // a.element_size()
            values = f"{a.flatten()[element].item()!r} against DeepSpeed's {b.flatten()[element].item()!r}"
            yield f"{where}: first differing element {element} of {a.numel()}, {values}"
            return


def _slack(value: Any) -> int:
    """Bytes the file's storages hold beyond what its tensors show."""
    if _is_tensor(value):
        return int(value.untyped_storage().nbytes() - value.numel() * value.element_size())
    if isinstance(value, Mapping):
        return sum(_slack(item) for item in value.values())
    return 0
