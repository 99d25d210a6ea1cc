"""The contents of two folders compared by bytes: file by file where files correspond, else through F.

Nothing is rebuilt: tensors are compared in chunks, through the pieces that lead from F to the bytes of either side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepspeed_affine.commands.diff_names import PieceNames
from deepspeed_affine.commands.diff_rows import Contents, FoundTensor, Row, Settings, module_param, tensor_row
from deepspeed_affine.commands.graphs import GraphWalk, ValueDifference, is_in
from deepspeed_affine.commands.sides import CheckpointSide, Side, UniversalSide, readers
from deepspeed_affine.execute.compare import Difference, compare_tensors, stored_storage, stored_tensor
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.progress import Progress
from deepspeed_affine.execute.prove import find_drift
from deepspeed_affine.ir.ints import row_major_strides
from deepspeed_affine.lowering.states import FP32
from deepspeed_affine.plan.conversion import SourceStorage, TensorFile
from deepspeed_affine.plan.paths import state_path
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["compare_by_file", "compare_by_parameter", "compare_universal"]


class _Walks:
    """Object graphs of corresponding files; their tensors are collected and compared together at the end."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.found: list[FoundTensor] = []
        self._storages: tuple[list[SourceStorage], list[SourceStorage]] = ([], [])
        self._known: set[tuple[Any, Any]] = set()

    def add(self, file: str, a: Any, b: Any, *, param: str | None = None, state: str | None = None) -> None:
        """The plain values of two graphs are compared, their tensors noted."""
        walk = GraphWalk(a, b)
        for item in walk:
            if isinstance(item, ValueDifference):
                owner = param or module_param(item.place)
                place = is_in(item.place)
                self.contents.rows.append(Row("value", owner, state, file=file, place=place, a=item.a, b=item.b))
                continue
            refs = (item.a, item.b)
            if refs in self._known:
                continue
            self._known.add(refs)
            tasks = []
            for storages, ref in zip(self._storages, refs, strict=True):
                tasks.append(stored_tensor(ref, len(storages), param=param or "", state=state or ""))
                storages.append(stored_storage(ref.storage))
            self.found.append(FoundTensor(file, item, *tasks))
        self.contents.equal_values += walk.equal

    def compare(self, reader: ByteReader, settings: Settings) -> list[tuple[FoundTensor, Difference]]:
        """The tensors that differ, with where and how; those that agree are counted."""
        left, right = (PieceReader(storages, reader) for storages in self._storages)
        pairs = [(one.left, one.right) for one in self.found]
        found = _compare_pairs(self.contents, pairs, left, right, settings)
        return [(one, difference) for one, difference in zip(self.found, found, strict=True) if difference is not None]


def compare_universal(a: UniversalSide, b: UniversalSide, settings: Settings) -> Contents:
    """Every file of two universal folders, by name: each tensor and each plain value. Manifests are not compared."""
    contents = Contents("files")
    walks = _Walks(contents)
    _only(contents, a.folder.sizes, b.folder.sizes, ignored={"affine_manifest.json"})
    for name in sorted(a.states.keys() & b.states.keys()):
        one, other = a.states[name], b.states[name]
        values = [dict(stored.entries or {}) for stored in (one, other)]
        for entries, stored, twin in ((values[0], one, other), (values[1], other, one)):
            entries["param"] = stored.number if stored.tensor is None else _unflattened(stored.tensor, twin.tensor)
        walks.add(state_path(*name), *values, param=name[0], state=name[1])
    for path, roots in _both(a.model_roots, b.model_roots).items():
        walks.add(path, *roots)
    if a.folder.optimizer_state is not None and b.folder.optimizer_state is not None:
        walks.add("zero/optimizer_state.pt", a.optimizer_state, b.optimizer_state)
    with ByteReader() as reader:
        for found, difference in walks.compare(reader, settings):
            contents.rows.append(tensor_row(found, difference))
    return contents


def compare_by_file(a: CheckpointSide, b: CheckpointSide, settings: Settings) -> Contents:
    """Two checkpoints whose files correspond: each tensor and each plain value of each file.

    What differs in an optimizer's flat partitions is named by parameter, state and rank, in F's coordinates.
    """
    contents = Contents("files")
    walks = _Walks(contents)
    files = [{file.name: file.path for file in side.checkpoint.folder.files} for side in (a, b)]
    _only(contents, *files)
    for name, paths in _both(*files).items():
        walks.add(name, *(load_pickle(path).root for path in paths))
    with ByteReader() as reader:
        found = walks.compare(reader, settings)
        contents.rows += PieceNames(a, b, reader).rows(found) if found else []
    return contents


def compare_by_parameter(a: Side, b: Side, settings: Settings) -> Contents:
    """Two folders laid out differently: every state of every parameter, element by element of F.

    Compared besides are numbers such as ``step``, parameter groups and counters; copies that a checkpoint's own ranks
    hold must agree. What is one rank's alone (half-precision copies of the weights, padding, random states) is not.
    """
    contents = Contents("parameters")
    with ByteReader() as reader:
        _compare_named(contents, a, b, reader, settings)
        _compare_numbers(contents, a, b)
        walks = _Walks(contents)
        one, other = a.model_roots, b.model_roots
        if one.keys() == other.keys() and "universal" in (a.kind, b.kind):
            for path, roots in _both(one, other).items():
                walks.add(path, *roots)
            walks.add("zero/optimizer_state.pt", a.optimizer_state, b.optimizer_state)
        else:
            shared = (a.shared, b.shared)
            both = shared[0].keys() & shared[1].keys()
            walks.add("model and optimizer state", *({key: one[key] for key in both} for one in shared))
            contents.notes.append("values and tensors that only one rank keeps are not compared")
        contents.rows += [tensor_row(found, difference) for found, difference in walks.compare(reader, settings)]
        for name, side in (("A", a), ("B", b)):
            if isinstance(side, CheckpointSide):
                contents.rows += _drift_rows(name, side, reader, settings)
    return contents


def _compare_named(contents: Contents, a: Side, b: Side, reader: ByteReader, settings: Settings) -> None:
    sides: list[dict[tuple[str, str], tuple[TensorFile, PieceReader]]] = []
    for side in (a, b):
        known: dict[tuple[str, str], tuple[TensorFile, PieceReader]] = {}
        for tensors, pieces in readers(side, reader):
            known |= {name: (task, pieces) for name, task in tensors.files.items()}
        sides.append(known)
    left, right = sides
    _only_named(contents, a, b, left.keys(), right.keys())
    groups: dict[tuple[int, int], list[tuple[TensorFile, TensorFile]]] = defaultdict(list)
    pieces_of: dict[tuple[int, int], tuple[PieceReader, PieceReader]] = {}
    for name in sorted(left.keys() & right.keys()):
        (task, ours), (twin, theirs) = left[name], right[name]
        if task.numel != twin.numel:
            # Flat on both sides, the padding of a vocabulary is there on both.
            task, twin = a.tensors.flat.get(name, task), b.tensors.flat.get(name, twin)
        if task.dtype != twin.dtype or task.numel != twin.numel or not _one_shape(task.shape, twin.shape):
            texts = [f"{one.dtype}, shape {list(one.shape)}" for one in (task, twin)]
            contents.rows.append(Row("value", *name, a=texts[0], b=texts[1]))
            continue
        key = (id(ours), id(theirs))
        groups[key].append((task, twin))
        pieces_of[key] = (ours, theirs)
    for key, pairs in groups.items():
        found = _compare_pairs(contents, pairs, *pieces_of[key], settings)
        for (task, twin), difference in zip(pairs, found, strict=True):
            if difference is not None:
                shape = max(task.shape, twin.shape, key=len)
                contents.rows.append(
                    Row("tensor", task.param, task.state, difference=difference, shape=shape, total=task.numel)
                )


def _compare_numbers(contents: Contents, a: Side, b: Side) -> None:
    ours, theirs = a.numbers, b.numbers
    if ours is None or theirs is None:
        if ours or theirs:
            contents.notes.append("numbers such as step are compared only where both folders keep them by parameter")
        return
    _only_named(contents, a, b, ours.keys(), theirs.keys())
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] == theirs[name] and len(ours[name]) == 1:
            contents.equal_values += 1
        else:
            texts = [", ".join(sorted(map(_number_text, numbers))) for numbers in (ours[name], theirs[name])]
            contents.rows.append(Row("value", *name, a=texts[0], b=texts[1]))


def _only_named(
    contents: Contents, a: Side, b: Side, ours: Iterable[tuple[str, str]], theirs: Iterable[tuple[str, str]]
) -> None:
    """What one side alone has. The names of tied weights need not be there, nor, in a universal folder made from
    ZeRO-3, what its model-state files hold."""
    left, right = set(ours), set(theirs)
    aliases = {*a.aliases, *b.aliases}
    for only, other, names in ((left - right, b, contents.only_a), (right - left, a, contents.only_b)):
        carried = {name for name, state in only if state == FP32 and _carries(other, name)}
        if carried:
            contents.notes.append(f"{len(carried)} buffers or frozen parameters are in model-state files on one side")
        names += [f"{name}/{state}" for name, state in sorted(only) if name not in aliases and name not in carried]


def _carries(side: Side, name: str) -> bool:
    return isinstance(side, UniversalSide) and any(
        name in file.frozen_shapes or name in file.buffers for file in side.models if (name, FP32) not in side.states
    )


def _drift_rows(name: str, side: CheckpointSide, reader: ByteReader, settings: Settings) -> list[Row]:
    return [
        Row(
            "holders",
            drift.param,
            drift.state,
            holder=f"{drift.labels[0]} and {drift.labels[1]} of {name}",
            note=f"in {name} itself {drift.describe()}",
        )
        for drift in find_drift(side.plan, PieceReader(side.plan.storages, reader), settings.workers)
    ]


def _one_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether the shapes are one, or one of them is the flat form of the other (the sizes agree)."""
    return tuple(a) == tuple(b) or min(len(a), len(b)) == 1


def _unflattened(tensor: TensorRef, twin: TensorRef | None) -> TensorRef:
    """``tensor``, in its twin's shape where it is the flat form of it, as ZeRO-3 without tensor parallelism saves."""
    if twin is None or len(tensor.shape) != 1 or tensor.numel != twin.numel or not tensor.is_contiguous:
        return tensor
    return TensorRef(tensor.storage, tensor.offset, twin.shape, row_major_strides(twin.shape))


def _number_text(number: tuple[str, bytes]) -> str:
    kind, data = number
    return f"{data.decode()} ({kind})" if kind in ("int", "float", "bool") else f"0x{data[::-1].hex()} ({kind})"


def _only(contents: Contents, a: Iterable[str], b: Iterable[str], ignored: Iterable[str] = ()) -> None:
    left, right = set(a).difference(ignored), set(b).difference(ignored)
    contents.only_a += sorted(left - right)
    contents.only_b += sorted(right - left)


def _both(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a[name], b[name]) for name in sorted(a.keys() & b.keys())}


def _compare_pairs(
    contents: Contents,
    pairs: Sequence[tuple[TensorFile, TensorFile]],
    left: PieceReader,
    right: PieceReader,
    settings: Settings,
) -> list[Difference | None]:
    total = sum(task.nbytes for task, _ in pairs)
    with Progress(total, len(pairs), shown=settings.progress, what="comparing") as progress:
        found = compare_tensors(pairs, left, right, workers=settings.workers, advance=progress.advance)
    contents.nbytes += total
    contents.equal_tensors += sum(difference is None for difference in found)
    return found
