"""Placements of a checkpoint's parameters: which process has which part of what, by its layout.

Processes are numbered as DeepSpeed's pipeline topology numbers them: pipeline stages outermost, then data-parallel
ranks, then tensor-parallel ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal

from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout
from deepspeed_affine.plan.partition import Run, over_storages, reserved_numel
from deepspeed_affine.plan.placement import Placement

__all__ = ["Content", "checkpoint_placements"]

Content = Literal["weights", "states"]
"""The module's own tensors, or the master weights with all optimizer states."""

Part = tuple[int, int, int, int]
"""``(tensor-parallel rank, process, start, stop)``: elements of a rank's flattened shard."""


def checkpoint_placements(
    layout: CheckpointLayout, content: Content, itemsizes: Mapping[str, int]
) -> dict[str, Placement]:
    """Where every parameter lies: ``weights`` on all data-parallel ranks (ZeRO-3: cut), ``states`` cut over them.

    ``itemsizes`` are bytes of an element by parameter, for states of all states together. Parameters on several
    pipeline stages (tied ones) are on each, experts on the data-parallel ranks that have them. Frozen parameters and
    buffers have no states.
    """
    if content == "weights" and layout.stage != 3:
        return {name: Placement(layout.params[name].layout, held, itemsizes[name]) for name, held in _copies(layout)}
    parts: dict[str, list[Part]] = defaultdict(list)
    for name, part in _parts(layout, frozen=content == "weights"):
        parts[name].append(part)
    placements = {name: Placement.own(_cut(layout, name, rows), itemsizes[name]) for name, rows in parts.items()}
    if content == "weights":
        for name, held in _copies(layout):
            if name not in placements:
                placements[name] = Placement(layout.params[name].layout, held, itemsizes[name])
    return placements


def _process(layout: CheckpointLayout, mp: int, dp: int) -> int:
    return (mp // layout.tp * layout.dp + dp) * layout.tp + mp % layout.tp


def _copies(layout: CheckpointLayout) -> Iterator[tuple[str, dict[int, tuple[int, ...]]]]:
    found: dict[str, dict[int, list[int]]] = {}
    for mp, rank in enumerate(layout.ranks):
        for name in dict.fromkeys([*rank.optimized, *(rank.names or ())]):
            if name in rank.aliases:
                continue
            expert = layout.expert_layer((name,)) is not None
            for dp in range(layout.dp):
                held = layout.held_by((name,), dp)[0][0] if expert else name
                found.setdefault(held, {}).setdefault(mp % layout.tp, []).append(_process(layout, mp, dp))
    for name, by_location in found.items():
        yield name, {location: tuple(ranks) for location, ranks in sorted(by_location.items())}


def _parts(layout: CheckpointLayout, *, frozen: bool) -> Iterator[tuple[str, Part]]:
    """What is cut over data-parallel ranks. ZeRO-3 cuts ``frozen`` parameters too, though no optimizer has them."""
    for mp, rank in enumerate(layout.ranks):
        tp = mp % layout.tp
        if layout.stage == 3:
            others = [name for name in rank.names or () if frozen and name not in rank.aliases]
            names = [*rank.optimized, *[name for name in others if layout.params[name].kind == "frozen"]]
            for name in names:
                numel = layout.params[name].shard_numel(tp)
                reserved = reserved_numel(numel, layout.dp)
                for dp in range(layout.dp):
                    start, stop = dp * reserved, min((dp + 1) * reserved, numel)
                    if start < stop:
                        yield name, (tp, _process(layout, mp, dp), start, stop)
            continue
        for number, group in enumerate(rank.groups):
            runs: dict[int, list[Run]] = defaultdict(list)
            for place, run in layout.flat_group(mp, number).runs():
                runs[place].append(run)
            for dp in range(layout.dp):
                names_there, place, _ = layout.held_by(group, dp)
                for run in runs[place]:
                    yield names_there[run.index], (tp, _process(layout, mp, dp), run.start, run.start + run.numel)


def _cut(layout: CheckpointLayout, name: str, parts: list[Part]) -> ParamAffineMap:
    """The map whose locations are processes, each holding one interval of a flattened shard."""
    intervals: dict[int, list[tuple[int, int, int]]] = {tp: [] for tp in layout.params[name].layout.ranks}
    for tp, process, start, stop in parts:
        intervals[tp].append((process, start, stop))
    return over_storages(layout.params[name].layout, intervals)
