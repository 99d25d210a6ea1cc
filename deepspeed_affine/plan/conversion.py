"""The conversion plan: which bytes of which storages make up every tensor of a universal checkpoint.

A plan is data. It is computed from maps and metadata alone, can be printed, and names every read and write
before the first one happens. Addresses are in elements of a storage; anything in bytes says so in its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deepspeed_affine.errors import CheckpointFormatError, InvalidMapError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, compose, meet, overlapping

__all__ = [
    "AGAIN",
    "ConversionPlan",
    "CopiedFile",
    "ObjectFile",
    "Replica",
    "ShardPieces",
    "SourceStorage",
    "TensorFile",
    "overlapping_pairs",
    "plan_sources",
]

Fill = Literal["copy", "average", "zero"]

AGAIN = " (again)"
"""Ends the label of a holder that is a second copy within one rank's own shard."""


@dataclass(frozen=True, slots=True)
class SourceStorage:
    """One stored storage of one source file; a plan's pieces name it by its index in ``ConversionPlan.storages``."""

    file: str
    key: str
    dtype: str
    numel: int
    byte_offset: int
    nbytes: int
    crc32: int | None

    @property
    def itemsize(self) -> int:
        return self.nbytes // self.numel if self.numel else 0


@dataclass(frozen=True, slots=True)
class ShardPieces:
    """One stored copy of one rank's shard: pieces from shard addresses to storage addresses.

    ``label`` names the copy to a person, for example ``tp 1`` or ``pp 1, tp 0``.
    """

    pieces: tuple[AffinePiece, ...]
    label: str


@dataclass(frozen=True, slots=True)
class Replica:
    """A second holder of elements that are read from elsewhere: its bytes must equal those of the first.

    ``pieces`` and ``primary`` lead from addresses in F to storage addresses and cover the same elements.
    """

    primary: tuple[AffinePiece, ...]
    pieces: tuple[AffinePiece, ...]
    primary_label: str
    label: str


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One ``.pt`` file of the output holding one tensor, and the pieces (F to storage) it is filled from.

    ``shape`` is what is written; it may have fewer rows than ``map_shape``, never more. ``entries`` are the
    dictionary entries in the order they are pickled, with ``tensor_key`` standing for the tensor; ``None`` means
    the file holds the bare tensor. ``pieces[i].scale`` divides. ``fill`` says whether replicas are averaged
    (``average``: every holder of an element counts once) or the file is written as zeros. ``requires_grad`` is the flag
    the tensor is pickled with.
    """

    path: str
    param: str
    state: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    map_shape: tuple[int, ...]
    entries: tuple[tuple[str, Any], ...] | None
    tensor_key: str
    pieces: tuple[AffinePiece, ...]
    replicas: tuple[Replica, ...] = ()
    fill: Fill = "copy"
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as written."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """One output file that holds a pickled object graph, rewritten from a source file's.

    ``nbytes`` is at most the size of the file it comes from; ``storages`` are those of that file it carries over.
    ``param`` and ``state`` say what it holds where that is one state of one parameter. ``filled`` pairs each new tensor
    in ``root`` with what fills it, flat; their bytes are in ``nbytes`` too.
    """

    path: str
    root: Any = field(repr=False)
    nbytes: int = 0
    storages: tuple[SourceStorage, ...] = ()
    param: str | None = None
    state: str | None = None
    filled: tuple[tuple[Any, TensorFile], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """One output file that is a source file, byte for byte; ``storages`` are the tensors in it."""

    path: str
    source: str
    nbytes: int
    storages: tuple[SourceStorage, ...] = ()


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything a conversion will do: what is read, compared and written, and what it leaves out.

    ``layouts`` has the map of every parameter in ``tensors``, from F to the shards of its model-parallel ranks.
    """

    storages: tuple[SourceStorage, ...]
    tensors: tuple[TensorFile, ...]
    objects: tuple[ObjectFile, ...]
    copies: tuple[CopiedFile, ...]
    notes: tuple[str, ...] = ()
    layouts: Mapping[str, ParamAffineMap] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file of the output, relative to its folder."""
        return (
            *(task.path for task in self.tensors),
            *(file.path for file in self.objects),
            *(file.path for file in self.copies),
        )

    @property
    def gathered(self) -> tuple[TensorFile, ...]:
        """Every tensor that is filled from pieces, in a file of its own or not."""
        return (*self.tensors, *(task for file in self.objects for _, task in file.filled))

    @property
    def carried_storages(self) -> tuple[SourceStorage, ...]:
        """The storages that reach the output inside a file that is rewritten or copied."""
        rewritten = [storage for file in self.objects for storage in file.storages]
        return (*rewritten, *(storage for file in self.copies for storage in file.storages))

    @property
    def checked_storages(self) -> tuple[SourceStorage, ...]:
        """Every stored storage that reaches the output, once: gathered from, or carried over in its file."""
        once: dict[tuple[str, str], SourceStorage] = {}
        for storage in (*self.storages, *self.carried_storages):
            known = once.setdefault((storage.file, storage.key), storage)
            # A reference may name fewer elements than the file stores; the checksum is of them all.
            if storage.nbytes > known.nbytes:
                once[storage.file, storage.key] = storage
        return tuple(once.values())

    @property
    def bytes_in(self) -> int:
        """Bytes read from source files: every element once, and every replica that is compared."""
        read = 0
        for task in self.gathered:
            groups = [task.pieces, *(replica.pieces for replica in task.replicas)]
            for piece in (piece for group in groups for piece in group):
                (index,) = piece.locations
                read += piece.numel * self.storages[index].itemsize
        return read + self._kept_bytes - sum(task.nbytes for file in self.objects for _, task in file.filled)

    @property
    def bytes_out(self) -> int:
        """Bytes of the output, without the few hundred a file needs for its own structure."""
        return sum(task.nbytes for task in self.tensors) + self._kept_bytes

    @property
    def _kept_bytes(self) -> int:
        return sum(file.nbytes for file in self.objects) + sum(file.nbytes for file in self.copies)

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task.param for task in self.tensors))


def plan_sources(
    layout: ParamAffineMap, shards: Mapping[int, Sequence[ShardPieces]], *, param: str, state: str
) -> tuple[tuple[AffinePiece, ...], tuple[Replica, ...]]:
    """``(pieces, replicas)``: one source for every element of F, and every further holder to compare with it.

    ``layout`` leads from F to the ranks' shards, ``shards`` from each rank's shard to storages, once per stored
    copy. Elements held by several ranks are read from the lowest rank's first copy, so that few files are open.
    Both results are near-linear in the number of pieces.

    Raises CheckpointFormatError when a rank that holds elements has no stored shard.
    """
    by_class: dict[frozenset[int], dict[int, list[AffinePiece]]] = defaultdict(lambda: defaultdict(list))
    for rank in layout.shard_shapes:
        for piece in layout.pieces_by_rank[rank]:
            if piece.numel:
                by_class[piece.locations][rank].append(piece)

    pieces: list[AffinePiece] = []
    replicas: list[Replica] = []
    for holders, held in by_class.items():
        first = min(holders)
        primary: tuple[AffinePiece, ...] = ()
        primary_label = ""
        for rank in sorted(holders):
            stored = shards.get(rank, ())
            if not stored:
                raise CheckpointFormatError(
                    f"parameter {param!r}, state {state!r}: rank {rank} holds {_numel(held[rank])} elements but no "
                    "file of the checkpoint stores them. A rank's file is missing, or its optimizer lost this state.",
                    param=param,
                    rank=rank,
                )
            for copy, shard in enumerate(stored):
                composed = tuple(compose(held[rank], shard.pieces))
                if _numel(composed) != _numel(held[rank]):
                    raise InvalidMapError(
                        f"parameter {param!r}, state {state!r}: {shard.label} stores {_numel(composed)} of the "
                        f"{_numel(held[rank])} elements its map describes. The files come from different saves.",
                        param=param,
                        rank=rank,
                    )
                if rank == first and copy == 0:
                    primary, primary_label = composed, shard.label
                    pieces.extend(composed)
                else:
                    replicas.append(Replica(primary, composed, primary_label, shard.label))
                twice = _held_twice(composed)
                if twice:
                    one, other = zip(*twice, strict=True)
                    replicas.append(Replica(one, other, shard.label, f"{shard.label}{AGAIN}"))
    pieces.sort(key=lambda piece: piece.source_offset)
    return tuple(pieces), tuple(replicas)


def overlapping_pairs(
    left: Sequence[AffinePiece], right: Sequence[AffinePiece]
) -> Iterator[tuple[AffinePiece, AffinePiece]]:
    """Every ``(left, right)`` pair of sub-pieces that address the same elements of F.

    Only pairs whose address ranges touch are intersected: near-linear in the pieces and the touching pairs.
    """
    for i, j in overlapping(_hulls(left), _hulls(right)):
        yield from meet(left[i], right[j])


def _held_twice(pieces: Sequence[AffinePiece]) -> list[tuple[AffinePiece, AffinePiece]]:
    """Sub-pieces of different pieces of one shard that hold the same elements of F."""
    hulls = _hulls(pieces)
    return [pair for i, j in overlapping(hulls, hulls) if i < j for pair in meet(pieces[i], pieces[j])]


def _hulls(pieces: Sequence[AffinePiece]) -> list[tuple[int, int]]:
    return [(piece.source_offset, piece.source_end if piece.numel else piece.source_offset) for piece in pieces]


def _numel(pieces: Iterable[AffinePiece]) -> int:
    return sum(piece.numel for piece in pieces)
