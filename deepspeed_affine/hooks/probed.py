"""Maps of live layers found by running their partition function, checked against the shards the ranks really hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from deepspeed_affine.errors import AffineError, UnsupportedLayoutError
from deepspeed_affine.hooks.partitions import Partition
from deepspeed_affine.hooks.thin import found_map, shape_on
from deepspeed_affine.ir import ParamAffineMap, replicated_map

__all__ = ["Prober"]

Shape = tuple[int, ...]
Shards = tuple[Shape, ...]

SEARCHED = 1 << 12
"""How many extents of F are tried where the layer does not remember it and no closed form gives it."""


class Prober:
    """Probes layers, each distinct one once: a model's blocks repeat."""

    def __init__(self) -> None:
        self._found: dict[object, ParamAffineMap | AffineError] = {}
        self._full: dict[object, Shape] = {}
        self._maps: dict[object, ParamAffineMap] = {}

    def map_of(self, partition: Partition, shards: dict[str, Shards], attribute: str, name: str) -> ParamAffineMap:
        """The canonical map of one of the layer's parameters; ``shards`` gives every rank's shape by attribute."""
        key = (partition.key(), tuple(sorted(shards.items())), attribute)
        found = self._found.get(key)
        if found is None:
            try:
                found = self._probe(partition, shards, attribute)
            except AffineError as fault:
                found = fault
            except Exception as fault:
                found = UnsupportedLayoutError(
                    f"the layer's own partition function fails on it: {type(fault).__name__}: {fault}"
                )
            self._found[key] = found
        if isinstance(found, AffineError):
            kind = type(partition_layer(partition)).__name__
            raise type(found)(
                f"Parameter {name} ({kind}): {found.message} Describe it in universal_checkpoint_info by hand, with an "
                "affine_map of its own.",
                param=name,
                rank=found.rank,
            ) from found
        return found

    def _probe(self, partition: Partition, shards: dict[str, Shards], attribute: str) -> ParamAffineMap:
        # The bias does not change how a weight is cut, while some functions read the weight to cut a bias.
        weight = self._full_shape(partition, shards, "weight")
        if attribute == "weight":
            return self._map(partition, shards, attribute, weight, {"bias": None})
        if _divides_bias(partition):
            return replicated_map(shards["bias"][0], partition.degree, 1.0 / partition.degree).canonical()
        full = self._full_shape(partition, shards, "bias")
        return self._map(partition, shards, attribute, full, {"weight": weight})

    def _map(
        self, partition: Partition, shards: dict[str, Shards], attribute: str, full: Shape, other: dict[str, Any]
    ) -> ParamAffineMap:
        key = (partition.key(), shards[attribute], attribute, full, tuple(other.items()))
        if key not in self._maps:
            self._maps[key] = found_map(partition.function(attribute, other), full, partition.degree)
        return self._maps[key]

    def _full_shape(self, partition: Partition, shards: dict[str, Shards], attribute: str) -> Shape:
        known = partition.shapes_known.get(attribute)
        if known is not None:
            return known
        key = (partition.key(), tuple(sorted(shards.items())), attribute)
        if key not in self._full:
            self._full[key] = self._search(partition, shards, attribute)
        return self._full[key]

    def _search(self, partition: Partition, shards: dict[str, Shards], attribute: str) -> Shape:
        """The one shape of F that the function cuts into these shards, all of F being held."""
        other: dict[str, Any] = {"bias": None}
        if attribute == "bias":
            other = {"weight": self._full_shape(partition, shards, "weight")}
        cut = partition.function(attribute, other)

        def fits(full: Shape) -> bool:
            try:
                return all(shape_on(cut, full, rank) == shape for rank, shape in enumerate(shards[attribute]))
            except Exception:
                return False

        tried: set[Shape] = set()
        for full in chain(_joined(shards[attribute]), _solved(cut, shards[attribute]), _between(shards[attribute])):
            if full in tried:
                continue
            tried.add(full)
            if not fits(full):
                continue
            try:
                self._map(partition, shards, attribute, full, other)
            except AffineError:
                continue
            return full
        raise UnsupportedLayoutError(
            f"no shape of the whole parameter is cut into shards of {sorted(set(shards[attribute]))} by the layer's "
            "partition function, so what it was cut from is unknown."
        )


def partition_layer(partition: Any) -> Any:
    """The layer a partition stands for."""
    return partition.layer


def _divides_bias(partition: Any) -> bool:
    """Yuan's row-parallel layer holds its bias divided by the number of ranks. Its function computes exactly that and
    then raises while it wraps the result (in all versions up to 0.19.8), so it cannot be asked."""
    layer = partition.layer
    yuan = next((kind for kind in type(layer).__mro__ if kind.__name__ == "Yuan_LinearAllreduce"), None)
    return yuan is not None and type(layer)._tp_partition is vars(yuan).get("_tp_partition")


def _joined(shards: Shards) -> Iterator[Shape]:
    """Shapes of F when the shards join along one axis, or are F itself; then the same for an F that is transposed."""
    first = shards[0]
    for swapped in (False, True) if len(first) > 1 else (False,):
        base = _oriented(first, swapped)
        for axis in range(len(base)):
            yield _with(base, axis, sum(_oriented(shape, swapped)[axis] for shape in shards))
        yield base


def _solved(cut: Any, shards: Shards) -> Iterator[Shape]:
    """Shapes of F when part of it is held by several ranks: what the ranks hold together grows with F's extent either
    by one multiple of it, or by one for every rank."""
    for axis in range(len(shards[0])):
        held = sum(shape[axis] for shape in shards)
        try:
            doubled = sum(shape_on(cut, _with(shards[0], axis, held), rank)[axis] for rank in range(len(shards)))
        except Exception:
            continue
        for extent in (held * held // max(1, doubled), held - (doubled - held) // len(shards)):
            if extent > 0:
                yield _with(shards[0], axis, extent)


def _between(shards: Shards) -> Iterator[Shape]:
    """Every extent between the largest shard and all shards together, along each axis."""
    for axis in range(len(shards[0])):
        total = sum(shape[axis] for shape in shards)
        least = max(shape[axis] for shape in shards)
        for extent in range(total - 1, max(least, total - SEARCHED) - 1, -1):
            yield _with(shards[0], axis, extent)


def _oriented(shape: Shape, swapped: bool) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2]) if swapped else shape


def _with(shape: Shape, axis: int, extent: int) -> Shape:
    return (*shape[:axis], extent, *shape[axis + 1 :])
