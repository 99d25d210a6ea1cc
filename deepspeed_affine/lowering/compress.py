"""Index tables into strided blocks: which block of F, element by element known, becomes few affine pieces.

The tables of real layouts are sums of one function per axis, however large they are; such a table is compressed
one axis at a time. Anything else is first cut into parts that are. The result is exact but not yet maximally
merged: that is the canonical form's work.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepspeed_affine.errors import BudgetExceededError

__all__ = ["HOLE", "Block", "compress"]

Ints = npt.NDArray[np.int64]

HOLE = -1
"""The label of a table entry that belongs to no block."""

BLOCK_BUDGET = 1 << 18


class Block(NamedTuple):
    """``shape`` elements from ``source`` on in F and from ``dest`` on in the table, all of one label."""

    shape: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    dest: int
    dest_strides: tuple[int, ...]
    label: int


class _Run(NamedTuple):
    first: int
    length: int
    step: int


def compress(table: Ints, labels: Ints) -> list[Block]:
    """Blocks that together are exactly ``table``: entry k of the flattened table addresses F at ``table[k]``.

    A block's elements share one label of ``labels`` (of the table's shape); entries labelled ``HOLE`` are left out.
    """
    blocks: list[Block] = []
    if table.size:
        strides = tuple(step // table.itemsize for step in np.ascontiguousarray(table).strides)
        _compress(table, labels, 0, strides, blocks)
    return blocks


def _compress(table: Ints, labels: Ints, dest: int, strides: tuple[int, ...], out: list[Block]) -> None:
    """Append the blocks of ``table``, whose entry at index i lies at shard address ``dest + i . strides``."""
    keep = [axis for axis, extent in enumerate(table.shape) if extent > 1]
    table = table.reshape([table.shape[axis] for axis in keep])
    labels = labels.reshape(table.shape)
    strides = tuple(strides[axis] for axis in keep)
    if table.ndim == 1:
        folded = _fold_period(table, labels)
        if folded is not None:
            rows, width = folded
            shape = (rows, width)
            _compress(table.reshape(shape), labels.reshape(shape), dest, (strides[0] * width, strides[0]), out)
            return
    if table.ndim <= 1 or _is_separable(table):
        _product_blocks(table, labels, dest, strides, out)
        return
    relative = table - table.reshape(table.shape[0], -1)[:, 0].reshape((-1,) + (1,) * (table.ndim - 1))
    same = (relative[1:] == relative[:-1]) & (labels[1:] == labels[:-1])
    starts = [0, *(np.flatnonzero(~same.reshape(len(same), -1).all(axis=1)) + 1).tolist(), len(table)]
    for start, stop in pairwise(starts):
        if stop - start == 1:
            _compress(table[start], labels[start], dest + start * strides[0], strides[1:], out)
        else:
            # Within the group every slice repeats the first one at another offset: a sum over axis 0 and the rest.
            inner: list[Block] = []
            _compress(relative[start], labels[start], 0, strides[1:], inner)
            offsets = table[start:stop].reshape(stop - start, -1)[:, 0]
            for run in _runs(offsets, np.zeros(stop - start, dtype=bool)):
                base = int(offsets[run.first])
                at = dest + (start + run.first) * strides[0]
                for block in inner:
                    _append(
                        out,
                        (run.length, *block.shape),
                        base + block.source,
                        (run.step, *block.source_strides),
                        at + block.dest,
                        (strides[0], *block.dest_strides),
                        block.label,
                    )


def _is_separable(table: Ints) -> bool:
    """Whether the table is a sum of one function per axis."""
    if table.ndim == 1:
        return True
    # Peeling one axis at a time compares every entry once per axis and allocates one table's worth at most.
    first = table[:1]
    column = table.reshape(len(table), -1)[:, 0].reshape((-1,) + (1,) * (table.ndim - 1))
    if not np.array_equal(table - column, np.broadcast_to(first - first.reshape(-1)[0], table.shape)):
        return False
    return _is_separable(first[0])


def _product_blocks(table: Ints, labels: Ints, dest: int, strides: tuple[int, ...], out: list[Block]) -> None:
    """The blocks of a separable table: the product, over the axes, of each axis' runs."""
    runs: list[list[_Run]] = []
    for axis in range(table.ndim):
        line = table[tuple(slice(None) if other == axis else 0 for other in range(table.ndim))]
        breaks = np.zeros(len(line), dtype=bool)
        others = tuple(other for other in range(table.ndim) if other != axis)
        breaks[1:] = (np.diff(labels, axis=axis) != 0).any(axis=others)
        runs.append(_runs(line, breaks))
    for cell in product(*runs):
        corner = tuple(run.first for run in cell)
        _append(
            out,
            tuple(run.length for run in cell),
            int(table[corner]),
            tuple(run.step for run in cell),
            dest + sum(run.first * stride for run, stride in zip(cell, strides, strict=True)),
            strides,
            int(labels[corner]),
        )


def _append(
    out: list[Block],
    shape: tuple[int, ...],
    source: int,
    source_strides: tuple[int, ...],
    dest: int,
    dest_strides: tuple[int, ...],
    label: int,
) -> None:
    if label == HOLE:
        return
    if len(out) >= BLOCK_BUDGET:
        raise BudgetExceededError(
            f"A rank's shard falls into more than {BLOCK_BUDGET} blocks of F; a layout is expected to have a number of "
            "blocks that does not grow with the parameter. This is a permutation of single elements, not a partition."
        )
    out.append(Block(shape, source, source_strides, dest, dest_strides, label))


def _runs(line: Ints, breaks: npt.NDArray[np.bool_]) -> list[_Run]:
    """``line`` as arithmetic runs with positive step, cut before every position marked in ``breaks``."""
    count = len(line)
    if count == 1:
        return [_Run(0, 1, 1)]
    steps = np.diff(line)
    usable = (steps > 0) & ~breaks[1:]
    # A stretch ends at each step that is not usable or differs from the one before it.
    changes = np.ones(count, dtype=bool)
    changes[1:-1] = (steps[1:] != steps[:-1]) | ~usable[1:] | ~usable[:-1]
    edges = np.flatnonzero(changes[: count - 1]).tolist()
    ends = [*edges[1:], count - 1]
    result: list[_Run] = []
    position = 0
    for index, (edge, end) in enumerate(zip(edges, ends, strict=True)):
        # Steps edge .. end-1 are one stretch, joining elements edge .. end.
        if position > edge and position >= end:
            continue
        start = max(position, edge)
        length = end - start
        longer_next = index + 1 < len(edges) and ends[index + 1] - end > length and bool(usable[end])
        if not usable[start] or (length == 1 and longer_next):
            result += [_Run(element, 1, 1) for element in range(start, end)]
            position = end
        else:
            result.append(_Run(start, length + 1, int(steps[start])))
            position = end + 1
    result += [_Run(element, 1, 1) for element in range(position, count)]
    return result


def _fold_period(line: Ints, labels: Ints) -> tuple[int, int] | None:
    """Rows and width of a two-axis table that ``line`` is the flattened form of, or None.

    A matrix cut by columns and then flattened has as many runs as rows; seen as a matrix again it has one.
    """
    count = len(line)
    if count < 64:
        return None
    steps = np.diff(line)
    ends = np.flatnonzero(steps[1:] != steps[:-1])[:8] + 2
    for width in dict.fromkeys(int(end) for end in (*ends, *(ends - 1))):
        if 1 < width < count and count % width == 0:
            table = line.reshape(-1, width)
            rows = labels.reshape(-1, width)
            if _is_separable(table) and not (rows[1:] != rows[:-1]).any():
                return count // width, width
    return None
