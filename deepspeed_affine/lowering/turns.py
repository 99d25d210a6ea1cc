"""Slices of a run with ``round_robin_gradients``, which DeepSpeed records in another order than the weights lie in.

ZeRO-1 and 2 then deal a group's parameters out in turns: of ``count`` ranks, parameter ``i`` is in turn ``i % count``,
and the flat buffer holds one turn after the other. ``param_shapes`` lists them so. The slices beside the partitions are
made as if the parameters lay in the order they were given in, in every version up to 0.19.8; only where alignment
leaves gaps between them does 0.19.8 record the true ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.lowering.reading import as_count, refuse, shape_numel

__all__ = ["Dealt", "as_dealt"]

Slices = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Dealt:
    """One parameter group over ``count`` partitions: elements of its parameters in the order in which they lie, and
    the padding after each."""

    sizes: Mapping[str, int]
    gaps: Sequence[int]
    count: int

    def slices(self, recorded: Mapping[str, tuple[int, int]], rank: int, length: int, *, file: str) -> Slices:
        """Where the parameters lie in the partition of ``rank``, which has ``length`` elements with all padding.

        Raises CheckpointFormatError where ``recorded`` is neither that nor what the order they were given in makes.
        """
        held = {name: slice for name, slice in recorded.items() if slice[1]}
        first = rank * length
        true = _cut(zip(self.sizes.items(), self.gaps, strict=True), first, length)
        if held in (true, _cut(((item, 0) for item in self._as_given()), first, length)):
            return true
        raise CheckpointFormatError(
            f"{file}: was saved with round_robin_gradients, and its slices are neither in the order in which "
            f"{len(self.sizes)} parameters are dealt out over {self.count} ranks nor in the order they were given in; "
            "one of both is expected. Go on in DeepSpeed with the same ranks and configuration, set "
            "round_robin_gradients to false and save again.",
            rank=rank,
            file=file,
        )

    def _as_given(self) -> list[tuple[str, int]]:
        places = [at for turn in range(self.count) for at in range(turn, len(self.sizes), self.count)]
        return [item for _, item in sorted(zip(places, self.sizes.items(), strict=True))]


def as_dealt(shapes: Sequence[Mapping[str, Any]], optimizer: Mapping[str, Any], group: int, file: str) -> Dealt:
    """What the files say of one group; ``shapes`` are the shard shapes of every group, in the order they lie in."""
    counts = _of_group(optimizer.get("partition_count"), "'partition_count'", group, file)
    if counts is None or len(shapes) <= group:
        raise CheckpointFormatError(
            f"{file}: was saved with round_robin_gradients, and of parameter group {group} both the parameters and the "
            f"number of partitions must be known; {len(shapes)} groups have parameters, and the number is {counts}. "
            "The files come from different saves: copy all of one.",
            file=file,
        )
    sizes = {name: shape_numel(shape) for name, shape in shapes[group].items()}
    gaps = _of_group(optimizer.get("param_alignment_paddings"), "'param_alignment_paddings'", group, file)
    if gaps is None:
        gaps = [0] * len(sizes)
    if not isinstance(gaps, (list, tuple)) or len(gaps) != len(sizes):
        raise refuse(file, "'param_alignment_paddings' of a group", gaps, f"a list of {len(sizes)} numbers")
    paddings = [as_count(gap, "an entry of 'param_alignment_paddings'", file) for gap in gaps]
    return Dealt(sizes, paddings, as_count(counts, "an entry of 'partition_count'", file, least=1))


def _of_group(value: Any, subject: str, group: int, file: str) -> Any:
    """The group's entry of a list with one for each, None where there is none."""
    if value is not None and not isinstance(value, (list, tuple)):
        raise refuse(file, subject, value, "a list with one entry a group")
    return value[group] if value is not None and len(value) > group else None


def _cut(laid: Iterable[tuple[tuple[str, int], int]], first: int, length: int) -> Slices:
    """What of parameters that lie one after another falls into ``[first, first + length)``."""
    found: Slices = {}
    at = 0
    for (name, numel), gap in laid:
        begin, end = max(at, first), min(at + numel, first + length)
        if begin < end:
            found[name] = begin - first, end - begin
        at += numel + gap
    return found
