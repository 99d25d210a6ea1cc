"""Bindings as maps and maps as bindings: a stored parent is a shard, and the parameter is F.

So a checkpoint's tensor-parallel shards can be published as objects with F bound to them, and an artifact's parameters
can be planned with as any other layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from itertools import pairwise

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap
from deepspeed_affine.ir.ints import product, shown
from deepspeed_affine.ninfer.directory import Directory
from deepspeed_affine.ninfer.errors import BindingError
from deepspeed_affine.ninfer.records import Binding, Part

__all__ = ["MOST_PARTS", "BoundMap", "bindings_to_map", "map_to_bindings"]

MOST_PARTS = 1 << 20
"""Parts a binding may be lowered to: each is a line of the directory, which is read whole."""


@dataclass(frozen=True, slots=True)
class BoundMap:
    """A parameter as a map: location ``n`` is the stored tensor ``objects[n]``.

    The map is partial, since a parent may hold more than what is bound. A tensor that gives an element several times,
    by one range again or by ranges that overlap, has a location for each time, as no shard address may be named twice.
    """

    map: ParamAffineMap
    objects: tuple[str, ...]


def bindings_to_map(directory: Directory, name: str, shape: Sequence[int] | None = None) -> BoundMap:
    """The map of a parameter with the given shape: every element of F at its place in a stored tensor.

    Without a shape, a whole object has its own and parts are flat. Raises BindingError where there is no such parameter
    or it has another number of elements, and InvalidMapError for offsets beyond 63 bits. O(n log n) in parts.
    """
    binding = directory.bindings.get(name)
    if binding is None:
        raise BindingError(f"Parameter {shown(name)} has no binding; expected one.", param=name)
    parts = binding.parts
    if binding.object is not None:
        whole = directory.tensor(binding.object)
        parts = (Part(whole.id, 0, whole.elements),)
        shape = whole.shape if shape is None else tuple(shape)
        if shape != whole.shape:
            raise BindingError(
                f"Parameter {shown(name)}: is the whole object {shown(whole.id)} of shape {whole.shape}; expected that "
                f"shape, {shape} was asked for.",
                param=name,
            )
    count = sum(part.elements for part in parts)
    shape = (count,) if shape is None else tuple(shape)
    if product(shape) != count:
        raise BindingError(
            f"Parameter {shown(name)}: its parts have {count} elements; expected {product(shape)}, for shape {shape}.",
            param=name,
        )
    runs = _continued(parts)
    locations, objects = _locations(runs)
    pieces: dict[int, list[AffinePiece]] = {}
    at = 0
    for run, location in zip(runs, locations, strict=True):
        piece = AffinePiece((run.elements,), at, (1,), run.begin, (1,), (location,))
        pieces.setdefault(location, []).append(piece)
        at += run.elements
    shapes = {location: directory.tensor(object_id).shape for location, object_id in enumerate(objects)}
    return BoundMap(ParamAffineMap(shape, shapes, pieces), tuple(objects))


def map_to_bindings(layout: ParamAffineMap, objects: Mapping[int, str] | Sequence[str]) -> Binding:
    """The binding of F to the objects that hold its shards, ``objects[rank]`` that of the rank's.

    An element held by several ranks is taken from the lowest. Parts are as long as they can be; where F is one whole
    shard of its own shape, the binding is that object. Raises UnsupportedLayoutError naming the piece where one is no
    sequence of C-order runs, or is scaled, and InvalidMapError where an element of F is held by nobody.
    """
    layout.validate(partial=True, whole_parameter=True)
    if not layout.numel:
        raise UnsupportedLayoutError(
            f"A parameter of shape {layout.logical_shape} has no elements; parts have one each."
        )
    runs: list[tuple[int, int, int, int]] = []
    for rank, piece in layout.pieces():
        if piece.numel and rank == min(piece.locations):
            runs += _runs(rank, piece, MOST_PARTS - len(runs))
    merged: list[tuple[int, int, int, int]] = []
    seen = 0
    for source, dest, length, rank in sorted(runs):
        # A rank may hold an element at two addresses; its first is taken.
        skip = max(0, seen - source)
        if skip >= length:
            continue
        source, dest, length = source + skip, dest + skip, length - skip
        seen = source + length
        if merged:
            before_source, before_dest, before_length, before_rank = merged[-1]
            if before_rank == rank and before_dest + before_length == dest:
                merged[-1] = (before_source, before_dest, before_length + length, rank)
                continue
        merged.append((source, dest, length, rank))
    if len(merged) == 1:
        _, dest, length, rank = merged[0]
        if not dest and layout.shard_shapes[rank] == layout.logical_shape:
            return Binding(_named(objects, rank))
    return Binding(parts=tuple(Part(_named(objects, rank), dest, dest + n) for _, dest, n, rank in merged))


def _continued(parts: Sequence[Part]) -> list[Part]:
    """The parts in order, those that go on where the one before ends as one with it."""
    found: list[Part] = []
    first, end = parts[0], parts[0].end
    for part in parts[1:]:
        if part.object != first.object or part.begin != end:
            found.append(Part(first.object, first.begin, end))
            first = part
        end = part.end
    found.append(Part(first.object, first.begin, end))
    return found


def _locations(runs: Sequence[Part]) -> tuple[list[int], list[str]]:
    """The location of each run, numbered as they first occur, and the object of each location.

    Runs of one location do not overlap, and an object has as many locations as the element of it that is given most
    often is given times: runs are placed by their starts, each where another has ended if there is such a place. O(n
    log n) in runs, however they overlap.
    """
    places: dict[int, tuple[str, int]] = {}
    taken: dict[str, list[tuple[int, int]]] = {}
    for number in sorted(range(len(runs)), key=lambda n: runs[n].begin):
        run = runs[number]
        ends = taken.setdefault(run.object, [])
        if ends and ends[0][0] <= run.begin:
            place = ends[0][1]
            heapreplace(ends, (run.end, place))
        else:
            place = len(ends)
            heappush(ends, (run.end, place))
        places[number] = (run.object, place)
    numbers: dict[tuple[str, int], int] = {}
    locations = [numbers.setdefault(places[n], len(numbers)) for n in range(len(runs))]
    return locations, [object_id for object_id, _ in numbers]


def _runs(rank: int, piece: AffinePiece, most: int) -> list[tuple[int, int, int, int]]:
    """``(source, dest, length, rank)`` of the runs a piece consists of."""
    if piece.scale != 1.0:
        raise UnsupportedLayoutError(
            f"Rank {rank} holds {piece}, scaled by {piece.scale}; a binding gives stored values as they are. Store the "
            "shard without its scale.",
            rank=rank,
        )
    axes = [(n, s, d) for n, s, d in zip(piece.shape, piece.source_strides, piece.dest_strides, strict=True) if n > 1]
    axes.sort(key=lambda axis: axis[1])
    length = 1
    while axes and axes[0][1:] == (length, length):
        length *= axes.pop(0)[0]
    # Runs of one element are fine in F's own order, as of a column; a transposed matrix is nothing but such runs.
    if length == 1 and any(a[2] >= b[2] for a, b in pairwise(axes)):
        raise UnsupportedLayoutError(
            f"Rank {rank} holds {piece}, whose neighbours in F are not neighbours in the shard; a binding's parts are "
            "runs of elements in C order. Store the shard in F's own order of axes.",
            rank=rank,
        )
    count = product(n for n, _, _ in axes)
    if count > most:
        raise UnsupportedLayoutError(
            f"Rank {rank} holds {piece}, which is {count} runs of {length} elements; a binding "
            f"of more than {MOST_PARTS} parts is not written. Store the parameter whole.",
            rank=rank,
        )
    starts = [(piece.source_offset, piece.dest_offset)]
    for n, s, d in reversed(axes):
        starts = [(source + i * s, dest + i * d) for source, dest in starts for i in range(n)]
    return [(source, dest, length, rank) for source, dest in starts]


def _named(objects: Mapping[int, str] | Sequence[str], rank: int) -> str:
    try:
        return objects[rank]
    except (KeyError, IndexError):
        raise BindingError(
            f"Rank {rank} holds a part of the parameter and has no object; expected one.", rank=rank
        ) from None
