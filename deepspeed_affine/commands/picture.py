"""Pictures of placements: which processes hold which region of F (needs matplotlib, the ``plot`` extra)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.errors import PolicyError, UnsupportedLayoutError
from deepspeed_affine.ir.algebra import lattices
from deepspeed_affine.ir.lattice import contains
from deepspeed_affine.plan.placement import Placement

__all__ = ["draw_maps", "held_by"]

SAMPLES = 192
"""Rows and columns of a picture at most; a larger F is sampled evenly, its first and last rows and columns included."""

SHOWN_SETS = 16


def held_by(placement: Placement) -> tuple[npt.NDArray[np.int32], list[tuple[int, ...]]]:
    """``(picture, sets)``: for sampled rows and columns of F, seen as a matrix, the number of the set of processes.

    Axis 0 of F are the rows, everything else the columns; a vector is one row. -1 is held by nobody. The cost is the
    samples times the pieces of the map, whatever the size of F.
    """
    layout = placement.layout
    shape = layout.logical_shape
    rows = shape[0] if len(shape) > 1 else 1
    columns = layout.numel // rows if rows else 0
    at_rows, at_columns = _samples(rows), _samples(columns)
    sets: dict[tuple[int, ...], int] = {}
    picture = np.full((len(at_rows), len(at_columns)), -1, np.int32)
    keyed = [
        (tuple(sorted([process for each in piece.locations for process in placement.holders[each]])), lattice)
        for rank, piece in layout.pieces()
        if rank == min(piece.locations) and piece.numel
        for lattice in lattices(piece, "source")
    ]
    for i, row in enumerate(at_rows):
        start = row * columns
        near = [(holders, x) for holders, x in keyed if x.key < start + columns and x.last >= start]
        for j, column in enumerate(at_columns):
            offset = start + column
            for holders, lattice in near:
                if contains(lattice, offset) is not None:
                    picture[i, j] = sets.setdefault(holders, len(sets))
                    break
    return picture, list(sets)


def _samples(extent: int) -> list[int]:
    if extent <= SAMPLES:
        return list(range(extent))
    return [number * (extent - 1) // (SAMPLES - 1) for number in range(SAMPLES)]


def draw_maps(path: str, name: str, sides: Sequence[tuple[Placement, str]]) -> None:
    """The picture of which processes hold what of one parameter, side by side, is in the file at ``path``.

    Raises UnsupportedLayoutError without matplotlib, and PolicyError where the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UnsupportedLayoutError(
            "--plot: needs matplotlib; expected it to be installed. pip install 'deepspeed-affine[plot]'."
        ) from error
    figure = Figure(figsize=(6 * len(sides), 5), layout="constrained")
    colors = matplotlib.colormaps["tab20"]
    figure.suptitle(name, parse_math=False)
    for number, (placement, label) in enumerate(sides, 1):
        layout = placement.layout
        picture, sets = held_by(placement)
        axes: Any = figure.add_subplot(1, len(sides), number)
        axes.set_title(f"{label}, F {' x '.join(map(str, layout.logical_shape)) or 'scalar'}")
        shape = layout.logical_shape
        rows = shape[0] if len(shape) > 1 else 1
        extent = (0, max(layout.numel // rows if rows else 0, 1), max(rows, 1), 0)
        if len(shape) < 2:
            axes.set_yticks([])
        if picture.size:
            axes.imshow(picture % 20, cmap=colors, vmin=0, vmax=19, aspect="auto", interpolation="none", extent=extent)
        handles = [Patch(color=colors(at % 20), label=_named(holders)) for at, holders in enumerate(sets[:SHOWN_SETS])]
        if len(sets) > SHOWN_SETS:
            handles.append(Patch(color="none", label=f"and {len(sets) - SHOWN_SETS} more"))
        if handles:
            axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    try:
        # Told the format, matplotlib writes that very file; otherwise it appends an ending where there is none.
        figure.savefig(path, format=os.path.splitext(path)[1][1:] or "png")
    except (OSError, ValueError) as error:
        raise PolicyError(f"--plot {path}: cannot be written ({error}). Give a .png in a folder there is.") from error


def _named(holders: tuple[int, ...]) -> str:
    if len(holders) == 1:
        return f"rank {holders[0]}"
    shown = ", ".join(map(str, holders[:6]))
    return f"ranks {shown}{' ...' if len(holders) > 6 else ''}"
