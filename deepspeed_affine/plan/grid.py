"""Placements of a model's parameters from shapes alone: a topology, how each tensor is cut, and ZeRO on top.

Ranks are numbered as DeepSpeed's pipeline topology numbers them: pipeline stages outermost, then data-parallel copies,
then tensor-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, replicated_map
from deepspeed_affine.ir.ints import INT64_MAX, product, row_major_strides, shown
from deepspeed_affine.plan.partition import FlatGroup, over_storages, reserved_numel
from deepspeed_affine.plan.placement import Placement

__all__ = ["Tensor", "Topology", "state_placements", "weight_placements"]

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter: its shape, and how it is cut.

    ``axis`` is the one tensor parallelism cuts, None if every rank holds the whole; ``units`` is how many equal parts
    of that axis stay together (heads, say; 0 for single rows). ``place``, from 0 to 1, is where in the model it lies.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    units: int = 0
    place: float = 0.0

    def __post_init__(self) -> None:
        if product(self.shape) > INT64_MAX:
            raise PolicyError(f"tensor {self.name!r}: shape {shown(self.shape)} has more elements than 64 bits count.")
        if self.axis is not None and not 0 <= self.axis < len(self.shape):
            raise PolicyError(f"tensor {self.name!r}: axis {self.axis} is no axis of shape {self.shape}.")
        if self.axis is not None and self.units and self.shape[self.axis] % self.units:
            raise PolicyError(
                f"tensor {self.name!r}: axis {self.axis} of shape {self.shape} has no {self.units} equal units."
            )


@dataclass(frozen=True, slots=True)
class Topology:
    """Parallel degrees and the ZeRO stage."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0

    @classmethod
    def parse(cls, text: str, zero: int = 0) -> Topology:
        """Read ``tp8,pp4,dp16,zero1``, in any order, what is left out being 1, and the ZeRO stage ``zero``."""
        found: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"(tp|pp|dp|zero)([0-9]{1,6})", part.strip())
            if match is None or match[1] in found:
                raise PolicyError(
                    f"topology {text!r}: {part.strip()!r} is not one of tpN, ppN, dpN, zeroS, each once; "
                    "expected for example tp8,pp4,dp16,zero1."
                )
            found[match[1]] = int(match[2])
        if min([found.get(key, 1) for key in ("tp", "pp", "dp")]) < 1 or found.get("zero", 0) > 3:
            raise PolicyError(f"topology {text!r}: degrees are 1 or more and the ZeRO stage is 0 to 3.")
        return cls(**{"zero": zero, **found})

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def rank(self, pp: int, dp: int, tp: int) -> int:
        return (pp * self.dp + dp) * self.tp + tp

    def stage_of(self, place: float) -> int:
        """The pipeline stage of a tensor."""
        return min(int(place * self.pp), self.pp - 1)

    def __str__(self) -> str:
        return f"tp{self.tp},pp{self.pp},dp{self.dp},zero{self.zero}"


@lru_cache(maxsize=4096)
def _tensor_parallel(shape: tuple[int, ...], axis: int | None, units: int, tp: int) -> ParamAffineMap:
    """Units dealt out in order, the first ranks having one more where they do not come out even.

    With fewer units than ranks, neighbouring ranks hold the same one, as grouped key and value heads are held.
    """
    if axis is None or tp == 1:
        return replicated_map(shape, tp)
    count = units or shape[axis]
    extent = shape[axis] // count
    spans: list[Interval] = []
    for rank in range(tp):
        if count < tp:
            first = rank * count // tp
            spans.append((first * extent, (first + 1) * extent))
        else:
            first = rank * (count // tp) + min(rank, count % tp)
            spans.append((first * extent, (first + count // tp + (rank < count % tp)) * extent))
    holders = {span: [rank for rank, other in enumerate(spans) if other == span] for span in spans}
    shapes, pieces = {}, {}
    strides = row_major_strides(shape)
    for rank, (start, stop) in enumerate(spans):
        own = (*shape[:axis], stop - start, *shape[axis + 1 :])
        shapes[rank] = own
        pieces[rank] = [
            AffinePiece(own, start * strides[axis], strides, 0, row_major_strides(own), holders[start, stop])
        ]
    return ParamAffineMap(shape, shapes, pieces)


def weight_placements(tensors: Sequence[Tensor], topology: Topology, itemsize: int) -> dict[str, Placement]:
    """Where the weights lie: whole on every data-parallel copy, or cut over them under ZeRO-3."""
    if topology.zero == 3:
        return _cut(tensors, topology, itemsize)
    stages = [_copies(topology, stage) for stage in range(topology.pp)]
    return {
        each.name: Placement(
            _tensor_parallel(each.shape, each.axis, each.units, topology.tp),
            stages[topology.stage_of(each.place)],
            itemsize,
        )
        for each in tensors
    }


def state_placements(tensors: Sequence[Tensor], topology: Topology, itemsize: int) -> dict[str, Placement]:
    """Where master weights and optimizer states lie: cut over the data-parallel copies from ZeRO-1 on."""
    if topology.zero == 0:
        return weight_placements(tensors, topology, itemsize)
    return _cut(tensors, topology, itemsize)


def _copies(topology: Topology, stage: int) -> Mapping[int, tuple[int, ...]]:
    return {tp: tuple([topology.rank(stage, dp, tp) for dp in range(topology.dp)]) for tp in range(topology.tp)}


def _cut(tensors: Sequence[Tensor], topology: Topology, itemsize: int) -> dict[str, Placement]:
    spans = _spans_of_stage_3(tensors, topology) if topology.zero == 3 else _spans_of_a_flat_group(tensors, topology)
    found = {}
    for each in tensors:
        layout = _over_data_parallel(
            _tensor_parallel(each.shape, each.axis, each.units, topology.tp), spans[each.name], topology.dp
        )
        stage = topology.stage_of(each.place)
        base = topology.rank(stage, 0, 0)
        holders = {
            location: (base + location % topology.dp * topology.tp + location // topology.dp,)
            for location in layout.ranks
        }
        found[each.name] = Placement(layout, holders, itemsize)
    return found


Spans = tuple[tuple[tuple[int, int, int], ...], ...]
"""By tensor-parallel rank: ``(data-parallel rank, start, stop)`` of its flattened shard."""


def _numels(each: Tensor, topology: Topology) -> list[int]:
    layout = _tensor_parallel(each.shape, each.axis, each.units, topology.tp)
    return [layout.shard_numel(rank) for rank in layout.ranks]


def _spans_of_stage_3(tensors: Iterable[Tensor], topology: Topology) -> dict[str, Spans]:
    """Every shard on its own in equal parts, the last ones short."""
    found = {}
    for each in tensors:
        rows = []
        for numel in _numels(each, topology):
            part = reserved_numel(numel, topology.dp)
            cuts = [(dp, dp * part, min((dp + 1) * part, numel)) for dp in range(topology.dp)]
            rows.append(tuple([cut for cut in cuts if cut[1] < cut[2]]))
        found[each.name] = tuple(rows)
    return found


def _spans_of_a_flat_group(tensors: Iterable[Tensor], topology: Topology) -> dict[str, Spans]:
    """All shards of one rank laid end to end and cut into equal parts, as ZeRO-1 and ZeRO-2 do with one group."""
    by_stage: dict[int, list[Tensor]] = {}
    for each in tensors:
        by_stage.setdefault(topology.stage_of(each.place), []).append(each)
    found: dict[str, Spans] = {}
    for members in by_stage.values():
        numels = [_numels(each, topology) for each in members]
        rows: list[list[list[tuple[int, int, int]]]] = [[[] for _ in range(topology.tp)] for _ in members]
        for tp in range(topology.tp):
            for dp, run in FlatGroup(tuple([row[tp] for row in numels]), topology.dp).runs():
                rows[run.index][tp].append((dp, run.start, run.start + run.numel))
        found.update({each.name: tuple(map(tuple, row)) for each, row in zip(members, rows, strict=True)})
    return found


@lru_cache(maxsize=4096)
def _over_data_parallel(layout: ParamAffineMap, spans: Spans, dp: int) -> ParamAffineMap:
    """The map whose location ``tp * dp + d`` is what data-parallel copy ``d`` of rank ``tp`` keeps."""
    return over_storages(
        layout, {tp: [(tp * dp + copy, start, stop) for copy, start, stop in cuts] for tp, cuts in enumerate(spans)}
    )
