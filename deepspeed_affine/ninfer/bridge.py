"""Bindings as maps and maps as bindings: a stored parent is a shard, and the parameter is F.

So a checkpoint's tensor-parallel shards can be published as objects with F bound to them, and an artifact's parameters
can be planned with as any other layout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    The map is partial, since a parent may hold more than what is bound. A tensor that gives one range twice has a
    location for each time, as no shard address may be named twice.
    """

    map: ParamAffineMap
    objects: tuple[str, ...]


def bindings_to_map(directory: Directory, name: str, shape: Sequence[int] | None = None) -> BoundMap:
    """The map of a parameter with the given shape: every element of F at its place in a stored tensor.

    Without a shape, a whole object has its own and parts are flat. Raises BindingError where there is no such parameter
    or it has another number of elements, and InvalidMapError for offsets beyond 63 bits.
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
    objects: list[str] = []
    taken = _Taken()
    pieces: dict[int, list[AffinePiece]] = {}
    at = 0
    for part in parts:
        location = taken.location(part, objects)
        piece = AffinePiece((part.elements,), at, (1,), part.begin, (1,), (location,))
        pieces.setdefault(location, []).append(piece)
        at += part.elements
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


class _Ranges:
    """Ranges of one object that one location already gives, in order of their starts, none over or next to another."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def takes(self, begin: int, end: int) -> bool:
        """Whether ``[begin, end)`` was free; if so, it is given from now on."""
        at = bisect_left(self._ranges, (begin, end))
        if (at and self._ranges[at - 1][1] > begin) or (at < len(self._ranges) and self._ranges[at][0] < end):
            return False
        # What continues a neighbour is one with it, so that parts in order, or in reverse, stay a short list.
        if at < len(self._ranges) and self._ranges[at][0] == end:
            end = self._ranges.pop(at)[1]
        if at and self._ranges[at - 1][1] == begin:
            self._ranges[at - 1] = (self._ranges[at - 1][0], end)
        else:
            self._ranges.insert(at, (begin, end))
        return True


class _Taken:
    """The locations of each object with the ranges they give already."""

    def __init__(self) -> None:
        self._locations: dict[str, list[tuple[int, _Ranges]]] = {}
        self._full: dict[Part, int] = {}

    def location(self, part: Part, objects: list[str]) -> int:
        """The first location of the part's object that does not give any of its range yet; ``objects`` gets a new one
        where there is none."""
        found = self._locations.setdefault(part.object, [])
        # Where this same range did not fit before it does not fit now: a range may be given very many times.
        for at in range(self._full.get(part, 0), len(found)):
            location, ranges = found[at]
            if ranges.takes(part.begin, part.end):
                self._full[part] = at + 1
                return location
        ranges = _Ranges()
        ranges.takes(part.begin, part.end)
        found.append((len(objects), ranges))
        self._full[part] = len(found)
        objects.append(part.object)
        return len(objects) - 1


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
