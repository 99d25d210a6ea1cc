"""The five layouts DeepSpeed's layers produce, as maps.

Names, argument order and meaning are those of ``deepspeed.checkpoint.affine``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir.ints import as_extents, as_integer, row_major_strides, shown
from deepspeed_affine.ir.map import ParamAffineMap
from deepspeed_affine.ir.piece import AffinePiece

__all__ = ["block_gather_map", "contiguous_split_map", "replicated_map", "segmented_map", "sub_param_map"]


def replicated_map(shape: Iterable[int], tp_degree: int, scale: float = 1.0) -> ParamAffineMap:
    """Every rank holds the whole parameter, times ``scale``.

    ``scale`` belongs here and not on a split, because the layers that pre-divide a value hold it whole: a row-parallel
    layer replicates its bias divided by the world size so that summing the outputs adds it exactly once.
    """
    shape = as_extents(shape, "The parameter's shape")
    ranks = range(as_integer(tp_degree, "The tensor-parallel degree"))
    strides = row_major_strides(shape)
    pieces = (AffinePiece(shape, 0, strides, 0, strides, ranks, scale),) if ranks else ()
    return ParamAffineMap(shape, dict.fromkeys(ranks, shape), dict.fromkeys(ranks, pieces))


def contiguous_split_map(shape: Iterable[int], per_rank_sizes: Iterable[int], partition_dim: int) -> ParamAffineMap:
    """Each rank holds one contiguous block along ``partition_dim``; the sizes may be uneven or zero.

    A scalar has no axis to cut: its sizes must name one rank that holds it (1) and the others none (0).
    """
    shape = as_extents(shape, "The parameter's shape")
    sizes = as_extents(per_rank_sizes, "A rank's size")
    if not shape:
        return _scalar_split(sizes, partition_dim)
    axis = _axis(shape, partition_dim)
    _require_total(sizes, shape[axis], f"The per-rank sizes along axis {axis}")
    return _assemble(shape, axis, {rank: [(start, size, (rank,))] for rank, start, size in _running(sizes)})


def sub_param_map(
    shape: Iterable[int],
    sub_dim_sizes: Sequence[int],
    shard_widths: Sequence[Sequence[int]],
    partition_dim: int,
) -> ParamAffineMap:
    """Several sub-parameters concatenated along ``partition_dim``, each split across the ranks on its own.

    ``shard_widths[i]`` gives the per-rank widths of sub-parameter ``i``. A rank's shard holds its slice of each in
    turn.
    """
    shape = as_extents(shape, "The parameter's shape")
    axis = _axis(shape, partition_dim)
    sizes = as_extents(sub_dim_sizes, "A sub-parameter's size")
    widths = _rows(shard_widths, "shard_widths", "A shard width")
    if len(widths) != len(sizes) or not sizes:
        raise InvalidMapError(
            f"{len(sizes)} sub-parameters come with {len(widths)} lists of shard widths; expected one each, and "
            "at least one."
        )
    return segmented_map(shape, [(size, False) for size in sizes], axis, len(widths[0]), widths)


def segmented_map(
    shape: Iterable[int],
    segments: Iterable[tuple[int, bool]],
    partition_dim: int,
    tp_degree: int,
    split_widths: Sequence[Sequence[int]],
) -> ParamAffineMap:
    """Blocks along one axis that are split or replicated independently.

    ``segments`` is an ordered list of ``(size, replicated)`` covering ``partition_dim``; ``split_widths`` gives the
    per-rank widths of each split segment in the same order. They are required because the sizes a layer splits to
    follow head counts or a grain size, and a map built by dividing covers the tensor while reading the wrong rows.
    Every segment is its own piece: a replicated block beside a private one cannot share its ``locations``.
    """
    shape = as_extents(shape, "The parameter's shape")
    axis = _axis(shape, partition_dim)
    degree = as_integer(tp_degree, "The tensor-parallel degree")
    everyone = tuple(range(degree))
    blocks: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {rank: [] for rank in everyone}
    remaining = _rows(split_widths, "split_widths", "A split width")
    start = 0
    for number, (size, replicated) in enumerate(_segments(segments)):
        if replicated:
            for rank in everyone:
                blocks[rank].append((start, size, everyone))
        else:
            if not remaining:
                raise InvalidMapError(f"Segment {number} of {size} elements is split, but no widths are left for it.")
            widths = remaining.pop(0)
            if len(widths) != degree:
                raise InvalidMapError(f"Segment {number} has widths {widths}; expected one for each of {degree} ranks.")
            _require_total(widths, size, f"The widths of segment {number}")
            for rank, offset, width in _running(widths):
                blocks[rank].append((start + offset, width, (rank,)))
        start += size
    if remaining:
        raise InvalidMapError(f"{len(remaining)} more lists of split widths than split segments were given.")
    _require_total((start,), shape[axis], f"The segments along axis {axis}")
    return _assemble(shape, axis, blocks)


def block_gather_map(
    shape: Iterable[int],
    block_ids_by_rank: Mapping[int, Sequence[int]],
    block_size: int,
    partition_dim: int,
) -> ParamAffineMap:
    """Each rank holds chosen blocks of one size, in the order given; consecutive ids become one piece.

    A block named by several ranks is held by all of them, and says so in its locations.
    """
    shape = as_extents(shape, "The parameter's shape")
    axis = _axis(shape, partition_dim)
    size = as_integer(block_size, "The block size")
    if not isinstance(block_ids_by_rank, Mapping):
        raise InvalidMapError(f"block_ids_by_rank is {shown(block_ids_by_rank)}; expected a mapping from rank.")
    chosen = {as_integer(rank, "A rank"): as_extents(ids, "A block id") for rank, ids in block_ids_by_rank.items()}
    holders: dict[int, set[int]] = {}
    for rank, ids in chosen.items():
        for block in ids:
            if (block + 1) * size > shape[axis]:
                raise InvalidMapError(
                    f"Rank {rank} names block {block} of {size} elements, beyond axis {axis} of extent {shape[axis]}.",
                    rank=rank,
                )
            holders.setdefault(block, set()).add(rank)
    blocks: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
    for rank, ids in chosen.items():
        runs: list[tuple[int, int, tuple[int, ...]]] = []
        for block in ids:
            start, locations = block * size, tuple(sorted(holders[block]))
            if runs and runs[-1][0] + runs[-1][1] == start and runs[-1][2] == locations:
                runs[-1] = (runs[-1][0], runs[-1][1] + size, locations)
            else:
                runs.append((start, size, locations))
        blocks[rank] = runs
    return _assemble(shape, axis, blocks)


def _assemble(
    shape: tuple[int, ...], axis: int, blocks: Mapping[int, Sequence[tuple[int, int, tuple[int, ...]]]]
) -> ParamAffineMap:
    """Lay each rank's ``(start, size, locations)`` blocks one after the other along ``axis`` of its shard."""
    source_strides = row_major_strides(shape)
    shard_shapes: dict[int, tuple[int, ...]] = {}
    pieces_by_rank: dict[int, list[AffinePiece]] = {}
    for rank, row in blocks.items():
        shard_shape = _with(shape, axis, sum(size for _, size, _ in row))
        dest_strides = row_major_strides(shard_shape)
        pieces = []
        filled = 0
        for start, size, locations in row:
            pieces.append(
                AffinePiece(
                    _with(shape, axis, size),
                    start * source_strides[axis],
                    source_strides,
                    filled * dest_strides[axis],
                    dest_strides,
                    locations,
                )
            )
            filled += size
        shard_shapes[rank] = shard_shape
        pieces_by_rank[rank] = pieces
    return ParamAffineMap(shape, shard_shapes, pieces_by_rank)


def _scalar_split(sizes: tuple[int, ...], partition_dim: int) -> ParamAffineMap:
    if partition_dim not in (0, -1):
        raise InvalidMapError(f"The partition axis is {partition_dim}; a scalar has none, expected 0.")
    _require_total(sizes, 1, "The per-rank sizes of a scalar")
    shapes = {rank: () if size else (0,) for rank, size in enumerate(sizes)}
    return ParamAffineMap(
        (), shapes, {rank: [AffinePiece((), 0, (), 0, (), (rank,))] if size else [] for rank, size in enumerate(sizes)}
    )


def _rows(value: object, name: str, what: str) -> list[tuple[int, ...]]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidMapError(f"{name} is {shown(value)}; expected a list of widths for each block.")
    return [as_extents(row, what) for row in value]


def _segments(value: Any) -> list[tuple[int, bool]]:
    rows = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]
    if not all(isinstance(row, (tuple, list)) and len(row) == 2 for row in rows):
        raise InvalidMapError(f"segments is {shown(value)}; expected a list of (size, replicated).")
    return [(as_integer(row[0], "A segment's size"), bool(row[1])) for row in rows]


def _axis(shape: tuple[int, ...], partition_dim: int) -> int:
    if isinstance(partition_dim, bool) or not isinstance(partition_dim, int):
        raise InvalidMapError(f"The partition axis is {shown(partition_dim)}; expected an integer.")
    if not -len(shape) <= partition_dim < len(shape):
        raise InvalidMapError(
            f"The partition axis is {partition_dim}, but the parameter's shape {shape} has no such axis."
        )
    return partition_dim % len(shape)


def _with(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def _running(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """``(rank, start, size)`` for consecutive blocks of these sizes."""
    start, rows = 0, []
    for rank, size in enumerate(sizes):
        rows.append((rank, start, size))
        start += size
    return rows


def _require_total(sizes: Sequence[int], total: int, what: str) -> None:
    if sum(sizes) != total:
        raise InvalidMapError(f"{what} are {list(sizes)}, together {sum(sizes)}; expected {total}.")
