"""Maps of layouts that no metadata describes, found by running the code that does the partitioning.

The function is run on markers, the recovered index table is compressed to canonical pieces, and the result is
proved on independent random data. A function that no map can describe is refused with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from deepspeed_affine.errors import AffineError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap
from deepspeed_affine.ir.ints import as_extents, as_integer, coordinates
from deepspeed_affine.lowering.compress import HOLE, Ints, compress
from deepspeed_affine.lowering.probe_run import (
    SPREADS,
    Floats,
    PartitionFn,
    PartitionRun,
    RankTable,
    same_bytes,
)

__all__ = ["PartitionError", "assert_partition", "probe"]

DENOMINATORS = 1024
"""Up to this denominator a factor that rounds like a fraction is taken to be the simplest such fraction."""


class PartitionError(InvalidMapError, AssertionError):
    """A partition function does not do what its map says, or is no partition at all."""


def probe(
    partition_fn: PartitionFn,
    shape: Iterable[int],
    world_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    partial: bool = False,
    seed: int = 0,
) -> ParamAffineMap:
    """The canonical map of ``partition_fn(tensor, rank) -> shard``, proved on random data.

    The function is called with tensors of ``shape`` and ``dtype`` and may return a tensor, an ``nn.Parameter``, a
    tuple or list (its first entry counts, as in ``weight, bias``) or None for a rank that holds nothing; it may
    change its argument. A constant factor becomes the pieces' ``scale``. With ``partial`` the shards may contain
    zeros that stand for no element of F, and F may have elements nobody holds; without it both are refused.
    Exceptions of the function itself pass through unchanged.
    """
    run = PartitionRun(partition_fn, as_extents(shape, "The parameter's shape"), dtype)
    world_size = as_integer(world_size, "The world size")
    if world_size < 1:
        raise InvalidMapError(f"A partition over {world_size} ranks holds nothing; expected at least one rank.")
    tables = [run.table(rank) for rank in range(world_size)]
    _check_holes(run, tables, partial, seed)
    found = _build(run, tables)
    for spread in SPREADS:
        _prove(run, found, spread, seed, partial)
    found.validate(partial=partial)
    return found.canonical()


def assert_partition(
    partition_fn: PartitionFn,
    shape: Iterable[int],
    world_size: int,
    map: ParamAffineMap | Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> ParamAffineMap:
    """The function partitions F exactly as ``map`` says (without ``map``: as some map can say); else an
    ``AssertionError`` naming the first rank and element that differ. Returns the canonical map.
    """
    shape = as_extents(shape, "The parameter's shape")
    try:
        found = probe(partition_fn, shape, world_size, dtype=dtype)
    except AffineError as fault:
        raise PartitionError(fault.message, param=fault.param, rank=fault.rank) from fault
    if map is None:
        return found
    expected = (map if isinstance(map, ParamAffineMap) else ParamAffineMap.from_dict(map)).canonical()
    if expected != found:
        raise _difference(found, expected)
    return found


def _check_holes(run: PartitionRun, tables: list[RankTable], partial: bool, seed: int) -> None:
    """Entries that ones turned into zeros: padding, unless other data show them to be something else."""
    for rank, table in enumerate(tables):
        holes = np.flatnonzero(table.addresses == HOLE)
        if not len(holes):
            continue
        shard = run(run.random(torch.Generator().manual_seed(seed), 1.0), rank).reshape(-1)
        if bool((shard[torch.from_numpy(holes)] != 0).any()):
            run.refuse_by_kind(rank)
        if not partial:
            raise UnsupportedLayoutError(
                f"The partition function, rank {rank}: shard element {coordinates(int(holes[0]), table.shape)} and "
                f"{len(holes) - 1} more depend on no element of F (padding with zeros). Probe with the padded F, or "
                "pass partial=True to describe the rest.",
                rank=rank,
            )


def _build(run: PartitionRun, tables: list[RankTable]) -> ParamAffineMap:
    classes, holder_sets = _holder_classes(run.numel, [table.addresses.reshape(-1) for table in tables])
    pieces: dict[int, list[AffinePiece]] = {}
    for rank, table in enumerate(tables):
        held = table.addresses != HOLE
        factors, which = _distinct(table.scales)
        labels = np.full(table.addresses.shape, HOLE, dtype=np.int64)
        labels[held] = classes[table.addresses[held]] * len(factors) + which[held]
        pieces[rank] = [
            AffinePiece(
                block.shape,
                block.source,
                block.source_strides,
                block.dest,
                block.dest_strides,
                holder_sets[block.label // len(factors)],
                _factor(float(factors[block.label % len(factors)]), run.dtype),
            )
            for block in compress(table.addresses, labels)
        ]
    return ParamAffineMap(run.shape, {rank: table.shape for rank, table in enumerate(tables)}, pieces)


def _holder_classes(numel: int, addresses: list[Ints]) -> tuple[Ints, list[frozenset[int]]]:
    """For each element of F the number of its holder set, and the sets; ranks enter one at a time."""
    classes = np.zeros(numel, dtype=np.int64)
    holder_sets: list[frozenset[int]] = [frozenset()]
    for rank, table in enumerate(addresses):
        held = table[table != HOLE]
        before = np.flatnonzero(np.bincount(classes[held], minlength=len(holder_sets)))
        joined = np.full(len(holder_sets), HOLE, dtype=np.int64)
        joined[before] = len(holder_sets) + np.arange(len(before))
        holder_sets += [holder_sets[int(number)] | {rank} for number in before]
        classes[held] = joined[classes[held]]
    return classes, holder_sets


def _distinct(values: Floats) -> tuple[Floats, Ints]:
    """The different values and, for every entry, the number of its value; most tables have one value only."""
    if values.size and bool((values == values.reshape(-1)[0]).all()):
        return values.reshape(-1)[:1], np.zeros(values.shape, dtype=np.int64)
    found, which = np.unique(values, return_inverse=True)
    return found, which.reshape(values.shape)


def _factor(measured: float, dtype: torch.dtype) -> float:
    """The factor the function used, from the one it left behind in ``dtype``: 1/3 rather than its rounding."""
    denominators = torch.arange(1, DENOMINATORS + 1, dtype=torch.float64)
    fractions = (denominators * measured).round() / denominators
    rounded_alike = torch.nonzero(fractions.to(dtype).double() == measured)
    return float(fractions[rounded_alike[0, 0]]) if len(rounded_alike) else measured


def _prove(run: PartitionRun, found: ParamAffineMap, spread: float, seed: int, partial: bool) -> None:
    full = run.random(torch.Generator().manual_seed(seed), spread)
    for rank in found.ranks:
        shard = run(full.clone(), rank)
        expected = torch.zeros(shard.shape, dtype=run.dtype) if partial else torch.empty(shard.shape, dtype=run.dtype)
        _extract(full, found.pieces_by_rank[rank], expected)
        if same_bytes(shard, expected):
            continue
        scaled = any(piece.scale != 1.0 for piece in found.pieces_by_rank[rank])
        if not (scaled and _equal_but_rounding(shard, expected)):
            run.refuse_by_kind(rank)


def _extract(full: torch.Tensor, pieces: Iterable[AffinePiece], shard: torch.Tensor) -> None:
    flat_full, flat_shard = full.reshape(-1), shard.view(-1)
    for piece in pieces:
        block = torch.as_strided(flat_full, piece.shape, piece.source_strides, piece.source_offset)
        target = torch.as_strided(flat_shard, piece.shape, piece.dest_strides, piece.dest_offset)
        target.copy_(block if piece.scale == 1.0 else block.double() * piece.scale)


def _equal_but_rounding(shard: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a scaled shard differs by no more than dividing differs from multiplying by the reciprocal."""
    epsilon = torch.finfo(shard.dtype).eps
    left, right = shard.cpu().double(), expected.double()
    smallest = torch.finfo(shard.dtype).tiny
    return bool(((left - right).abs() <= 2 * epsilon * right.abs() + smallest).all())


def _difference(found: ParamAffineMap, expected: ParamAffineMap) -> PartitionError:
    """The first thing in which two maps differ, as the error to raise."""
    if found.logical_shape != expected.logical_shape:
        return PartitionError(
            f"The map describes a parameter of shape {expected.logical_shape}; the function was run on "
            f"{found.logical_shape}."
        )
    if found.ranks != expected.ranks:
        return PartitionError(
            f"The map describes ranks {list(expected.ranks)}; the function was run for {list(found.ranks)}."
        )
    for rank in found.ranks:
        if found.shard_shapes[rank] != expected.shard_shapes[rank]:
            return PartitionError(
                f"Rank {rank}: the function gives a shard of shape {found.shard_shapes[rank]}, the map says "
                f"{expected.shard_shapes[rank]}.",
                rank=rank,
            )
        (got, got_label, kinds), (want, want_label, _) = _flat_tables(found, expected, rank)
        differing = np.flatnonzero((got != want) | (got_label != want_label))
        if not len(differing):
            continue
        at = int(differing[0])
        place = f"Rank {rank}, shard element {coordinates(at, found.shard_shapes[rank])}"
        if got[at] != want[at]:
            taken, said = (coordinates(int(table[at]), found.logical_shape) for table in (got, want))
            return PartitionError(
                f"{place}: the function takes element {taken} of F, the map says {said}.",
                rank=rank,
            )
        (locations, scale), (stated, stated_scale) = kinds[int(got_label[at])], kinds[int(want_label[at])]
        return PartitionError(
            f"{place}: the function gives it to ranks {sorted(locations)} times {scale}, the map says "
            f"{sorted(stated)} times {stated_scale}.",
            rank=rank,
        )
    return PartitionError("The map and the function describe the same elements in pieces that do not compare equal.")


Kind = tuple[frozenset[int], float]


def _flat_tables(
    found: ParamAffineMap, expected: ParamAffineMap, rank: int
) -> tuple[tuple[Ints, Ints, list[Kind]], tuple[Ints, Ints, list[Kind]]]:
    """For both maps: the address of F at every shard address of ``rank``, and the number of its (holders, scale)."""
    kinds: dict[Kind, int] = {}
    tables: list[tuple[Ints, Ints]] = []
    for described in (found, expected):
        numel = math.prod(described.shard_shapes[rank])
        addresses = np.full(numel, HOLE, dtype=np.int64)
        labels = np.full(numel, HOLE, dtype=np.int64)
        for piece in described.pieces_by_rank[rank]:
            label = kinds.setdefault((piece.locations, piece.scale), len(kinds))
            places = _places(piece.shape, piece.dest_offset, piece.dest_strides)
            addresses[places] = _places(piece.shape, piece.source_offset, piece.source_strides)
            labels[places] = label
        tables.append((addresses, labels))
    listed = list(kinds)
    return (*tables[0], listed), (*tables[1], listed)


def _places(shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Ints:
    places = np.full((), offset, dtype=np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        places = places[..., None] + np.arange(extent, dtype=np.int64) * stride
    return places.reshape(-1)
