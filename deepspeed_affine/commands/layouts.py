"""How every parameter of a checkpoint lies over its ranks, so that one that cannot be described hides no other.

No tensor byte is read. The layouts are those a conversion works with; this module adds what a person asks of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from deepspeed_affine.errors import AffineError, CheckpointFormatError
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.ir import ParamAffineMap, replicated_map
from deepspeed_affine.lowering.experts import expert_map
from deepspeed_affine.lowering.lowered import LoweredParam
from deepspeed_affine.lowering.merge import lower_param
from deepspeed_affine.lowering.states import shape_numel
from deepspeed_affine.lowering.uc_info import UcInfo
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["Ambiguity", "Kind", "Layouts", "ParamLayout", "describe_layouts"]

Kind = Literal["optimized", "expert", "frozen", "buffer", "tied"]
Shape = tuple[int, ...]

EXPERT_RULE = "the expert placement"
WHOLE_RULE = "every rank holds the whole"


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """One parameter or buffer: what it is, and how its shards make up F, or why that cannot be said.

    ``shards`` are the recorded shapes by tensor-parallel (for experts expert-parallel) rank. ``shape`` is F's as a
    universal checkpoint holds it, ``padded_shape`` with the vocabulary's padding. ``tied_to`` names the parameter a
    tied one stands for.
    """

    name: str
    kind: Kind
    shards: Mapping[int, Shape]
    layout: ParamAffineMap | None = None
    shape: Shape | None = None
    rule: str | None = None
    pattern: str | None = None
    tied_to: str | None = None
    fault: AffineError | None = None

    @property
    def layout_id(self) -> str | None:
        """Equal exactly for layouts that are equal, however they are cut; None where there is none."""
        return None if self.layout is None else _layout_id(self.layout)

    @property
    def padded_shape(self) -> Shape | None:
        return None if self.layout is None else self.layout.logical_shape

    @property
    def numel(self) -> int:
        """Elements of F as a universal checkpoint holds it, zero where F is not known."""
        return 0 if self.shape is None else shape_numel(self.shape)


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """A parameter that several patterns of one entry match; ``decided`` is the one that is taken, if one is."""

    param: str
    entry: str
    patterns: tuple[str, ...]
    decided: str | None


@dataclass(frozen=True, slots=True)
class Layouts:
    """Every parameter and buffer by name. ``info`` is None where the metadata is missing or cannot be read, and
    ``fault`` says why in the second case."""

    params: Mapping[str, ParamLayout]
    lowered: tuple[LoweredParam, ...]
    info: UcInfo | None
    fault: AffineError | None = None

    def ambiguities(self) -> Iterator[Ambiguity]:
        """The parameters that more than one pattern of an entry matches."""
        if self.info is None:
            return
        info = self.info
        for name in self.params:
            for patterns in (info.replicated, info.average, info.row, info.vocabulary, info.two_sub_params):
                found = patterns.matches(name)
                if len(found) > 1:
                    try:
                        decided = patterns.single(name)
                    except CheckpointFormatError:
                        decided = None
                    yield Ambiguity(name, patterns.entry, found, decided)


@lru_cache(maxsize=4096)
def _layout_id(layout: ParamAffineMap) -> str:
    return layout.layout_id()


def describe_layouts(checkpoint: Checkpoint) -> Layouts:
    """The layout of every parameter and buffer the checkpoint's readable files name."""
    info, fault = None, None
    try:
        recorded = checkpoint.uc_info if checkpoint.model_files else None
        info = None if recorded is None else UcInfo.parse(recorded)
    except AffineError as error:
        fault = error
    return _Describer(checkpoint, info, fault).describe()


class _Describer:
    def __init__(self, checkpoint: Checkpoint, info: UcInfo | None, fault: AffineError | None) -> None:
        self.checkpoint = checkpoint
        self.info = info
        self.fault = fault
        self.lowered: list[LoweredParam] = []

    def describe(self) -> Layouts:
        checkpoint = self.checkpoint
        params: dict[str, ParamLayout] = {}
        for name, shapes in checkpoint.shapes.items():
            kind: Kind = "expert" if name in checkpoint.experts else "optimized"
            params[name] = self._one(
                name, kind, {rank: shape for rank, shape in enumerate(shapes) if shape is not None}
            )
        for name in checkpoint.states:
            # Its shape is in a file that cannot be read.
            params.setdefault(name, ParamLayout(name, "optimized", {}))
        aliases = {alias: name for file in checkpoint.model_files for alias, name in file.aliases.items()}
        buffers = {name for file in checkpoint.model_files for name in file.buffers}
        for name, shards in self._unoptimized(params).items():
            if name in aliases:
                continue
            params[name] = self._one(name, "buffer" if name in buffers else "frozen", shards)
        for alias, name in aliases.items():
            original = params.get(name)
            if original is not None:
                params[alias] = ParamLayout(
                    alias,
                    "tied",
                    original.shards,
                    original.layout,
                    original.shape,
                    original.rule,
                    original.pattern,
                    tied_to=name,
                )
            else:
                params[alias] = ParamLayout(alias, "tied", {}, tied_to=name)
        return Layouts(params, tuple(self.lowered), self.info, self.fault)

    def _unoptimized(self, known: Mapping[str, ParamLayout]) -> dict[str, dict[int, Shape]]:
        """The shards of what only the module holds: frozen parameters, buffers, experts without an optimizer."""
        found: dict[str, dict[int, Shape]] = {}
        for file in self.checkpoint.model_files:
            for name, shape in file.frozen_shapes.items():
                found.setdefault(name, {}).setdefault(file.shard.tp, shape)
            for name, value in (file.module or {}).items():
                # Under ZeRO-3 the module holds placeholders for every parameter.
                placeholder = self.checkpoint.stage == 3 and name not in file.buffers
                if isinstance(value, TensorRef) and not placeholder and name not in known:
                    found.setdefault(name, {}).setdefault(file.shard.tp, value.shape)
        for name, by_rank in self.checkpoint.expert_tensors.items():
            if name not in known:
                found[name] = {rank: value.shape for rank, value in by_rank.items()}
        return {name: shards for name, shards in found.items() if name not in known}

    def _one(self, name: str, kind: Kind, shards: Mapping[int, Shape]) -> ParamLayout:
        try:
            if kind == "expert":
                return self._expert(name, shards)
            whole = kind == "buffer" and len(set(shards.values())) == 1
            if self.checkpoint.tp_degree == 1 and self.info is None:
                whole = True
            if whole:
                layout = replicated_map(next(iter(shards.values())), self.checkpoint.tp_degree).canonical()
                return ParamLayout(name, kind, shards, layout, layout.logical_shape, WHOLE_RULE)
            if self.info is None:
                # Nothing says how it is cut; that is one fault of the folder and not one of every parameter.
                return ParamLayout(name, kind, shards)
            return self._lowered(name, kind, [shards.get(rank) for rank in range(self.checkpoint.tp_degree)], self.info)
        except AffineError as fault:
            return ParamLayout(name, kind, shards, fault=fault)

    def _lowered(self, name: str, kind: Kind, shapes: Sequence[Shape | None], info: UcInfo) -> ParamLayout:
        lowered = lower_param(info, name, shapes, self.checkpoint.tp_degree)
        self.lowered.append(lowered)
        shards = {rank: shape for rank, shape in enumerate(shapes) if shape is not None}
        return ParamLayout(name, kind, shards, lowered.map, lowered.stored_shape, lowered.rule.value, lowered.pattern)

    def _expert(self, name: str, recorded: Mapping[int, Shape]) -> ParamLayout:
        layer = self.checkpoint.experts[name]
        shape = next((shape for shape in recorded.values() if shape), None)
        if shape is None:
            return ParamLayout(name, "expert", recorded)
        layout = expert_map(layer, name, shape[1:])
        return ParamLayout(name, "expert", layout.shard_shapes, layout, layout.logical_shape, EXPERT_RULE)
