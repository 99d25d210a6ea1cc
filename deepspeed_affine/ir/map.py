"""How one parameter is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import Faults, InvalidMapError
from deepspeed_affine.ir.ints import INT64_MAX, as_extents, as_integer, product, shown
from deepspeed_affine.ir.piece import AffinePiece

if TYPE_CHECKING:
    import torch

    from deepspeed_affine.ir.regions import Region

__all__ = ["AFFINE_MAP_FORMAT_VERSION", "SCALE_POWER_BY_STATE", "ParamAffineMap"]

AFFINE_MAP_FORMAT_VERSION = 1
"""Encoding version of a stored map, apart from the universal checkpoint version so that the two move separately."""

SCALE_POWER_BY_STATE: Mapping[str, int] = MappingProxyType({"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2})
"""The power of a piece's scale that applies to each state stored for a parameter.

Scaling a parameter by s scales its gradient by 1/s, so Adam's first moment carries the inverse and its second moment
the inverse square.
"""


class ParamAffineMap:
    """One parameter's shards: the shape every rank holds, and the pieces of the full tensor that make it up.

    A map that exists names only ranks it knows, elements F has and addresses the shards have; what needs all pieces
    at once (coverage, exact locations, no address written twice) is ``validate``'s. It is immutable and hashable by its
    fields; two maps that say the same thing in other pieces are equal as ``canonical()`` forms.
    """

    __slots__ = ("_hash", "_proved", "logical_shape", "pieces_by_rank", "shard_shapes")

    logical_shape: tuple[int, ...]
    shard_shapes: Mapping[int, tuple[int, ...]]
    pieces_by_rank: Mapping[int, tuple[AffinePiece, ...]]
    _hash: int
    _proved: set[tuple[bool, bool]]

    def __init__(
        self,
        logical_shape: Iterable[int],
        shard_shapes: Mapping[int, Iterable[int]],
        pieces_by_rank: Mapping[int, Iterable[AffinePiece]],
    ) -> None:
        put = object.__setattr__
        put(self, "logical_shape", as_extents(logical_shape, "The parameter's shape"))
        for what, value in (("shard_shapes", shard_shapes), ("pieces_by_rank", pieces_by_rank)):
            if not isinstance(value, Mapping):
                raise InvalidMapError(f"A map's {what} are {shown(value)}; expected a mapping from rank.")
        shapes = {
            as_integer(rank, "A rank"): as_extents(shape, f"The shard shape of rank {rank}")
            for rank, shape in shard_shapes.items()
        }
        pieces = {as_integer(rank, "A rank"): _as_row(row, rank) for rank, row in pieces_by_rank.items()}
        for rank in shapes:
            pieces.setdefault(rank, ())
        shapes = {rank: shapes[rank] for rank in sorted(shapes)}
        put(self, "shard_shapes", MappingProxyType(shapes))
        put(self, "pieces_by_rank", MappingProxyType({rank: pieces[rank] for rank in sorted(pieces)}))
        put(self, "_proved", set())
        self._check()
        rows = (tuple(shapes.items()), tuple(self.pieces_by_rank.items()))
        put(self, "_hash", hash((self.logical_shape, rows)))

    def _check(self) -> None:
        faults = Faults()
        full = self.numel
        for what, shape in [("The parameter", self.logical_shape), *self._named_shapes()]:
            if product(shape) > INT64_MAX:
                faults.add(InvalidMapError(f"{what} of shape {shape} has more elements than 64 signed bits can count."))
        known = frozenset(self.shard_shapes)
        # A replicated parameter names every rank in every piece, so each distinct set is compared once.
        foreign: dict[frozenset[int], frozenset[int]] = {}
        for rank, pieces in self.pieces_by_rank.items():
            if rank not in known:
                faults.add(InvalidMapError(f"Rank {rank} has pieces but no shard shape.", rank=rank))
                continue
            numel = product(self.shard_shapes[rank])
            for number, piece in enumerate(pieces):
                if not isinstance(piece, AffinePiece):
                    raise InvalidMapError(
                        f"Piece {number} of rank {rank} is a {type(piece).__name__}; expected an AffinePiece.",
                        rank=rank,
                    )
                if piece.locations not in foreign:
                    foreign[piece.locations] = piece.locations - known
                fault = _piece_fault(piece, rank, full, numel, foreign[piece.locations])
                if fault:
                    faults.add(InvalidMapError(f"Piece {number} of rank {rank} {fault}; it is {piece}.", rank=rank))
        faults.raise_if_any()

    def _named_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"The shard of rank {rank}", shape) for rank, shape in self.shard_shapes.items()]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A ParamAffineMap is immutable; {name} cannot be set.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"A ParamAffineMap is immutable; {name} cannot be deleted.")

    def __reduce__(self) -> tuple[Any, ...]:
        return (ParamAffineMap, (self.logical_shape, dict(self.shard_shapes), dict(self.pieces_by_rank)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParamAffineMap):
            return NotImplemented
        return (
            self.logical_shape == other.logical_shape
            and dict(self.shard_shapes) == dict(other.shard_shapes)
            and dict(self.pieces_by_rank) == dict(other.pieces_by_rank)
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        counts = {rank: len(pieces) for rank, pieces in self.pieces_by_rank.items()}
        return f"ParamAffineMap(logical_shape={self.logical_shape}, pieces_per_rank={counts})"

    @property
    def numel(self) -> int:
        return product(self.logical_shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the map in increasing order."""
        return tuple(self.shard_shapes)

    def shard_numel(self, rank: int) -> int:
        """Return how many elements the rank's shard has; a rank the map does not have is an ``InvalidMapError``."""
        return product(self.shard_shapes[self._known(rank)])

    def _known(self, rank: int) -> int:
        known = as_integer(rank, "The rank")
        if known not in self.shard_shapes:
            raise InvalidMapError(
                f"Rank {known} is not a rank of this map; it has {shown(list(self.ranks))}.", rank=known
            )
        return known

    def pieces(self) -> Iterator[tuple[int, AffinePiece]]:
        """Yield ``(rank, piece)`` over the whole map, ranks in order."""
        for rank, pieces in self.pieces_by_rank.items():
            for piece in pieces:
                yield rank, piece

    def is_replicated_somewhere(self) -> bool:
        """Whether any piece is held by more than one rank."""
        return any(len(piece.locations) > 1 for _, piece in self.pieces())

    def validate(self, partial: bool = False, *, whole_parameter: bool | None = None) -> None:
        """Return if the map is true to itself, else raise ``InvalidMapError`` naming the first fault and its place.

        Proved: every element of F is held (P1), ``locations`` and scale are exact for every element (P5), no shard
        address is written twice and all are written (P6). A ``partial`` map may leave shard addresses unwritten and
        elements unheld; ``gaps`` and ``uncovered_regions`` list them. ``whole_parameter=True`` demands P1 of a partial
        map all the same, as for shards composed down to storages with padding. The cost is near-linear in pieces.
        """
        whole = not partial if whole_parameter is None else whole_parameter
        if (partial, whole) in self._proved:
            return
        from deepspeed_affine.ir.validate import validate_map

        validate_map(self, whole_shards=not partial, whole_parameter=whole)
        self._proved.add((partial, whole))

    def validate_coverage(self) -> None:
        """The full check under DeepSpeed's name; ``validate`` already does it."""
        self.validate()

    def uncovered_regions(self) -> list[Region]:
        """Return disjoint regions of the elements of F no rank holds, lowest first; empty for a complete map."""
        from deepspeed_affine.ir.holding import uncovered_regions

        return uncovered_regions(self)

    def uncovered_offsets(self) -> Iterator[int]:
        """Yield the offsets of F that no rank holds, in increasing order, one at a time."""
        from deepspeed_affine.ir.holding import uncovered_offsets

        return uncovered_offsets(self)

    def gaps(self, rank: int) -> list[Region]:
        """Return disjoint regions of the addresses of this rank's shard no piece writes, lowest first."""
        from deepspeed_affine.ir.holding import gaps

        return gaps(self, self._known(rank))

    def holder_regions(self) -> list[tuple[Region, frozenset[int]]]:
        """Return disjoint regions of F with the ranks that hold every element of each, in order of first offset."""
        from deepspeed_affine.ir.holding import holder_regions

        return holder_regions(self)

    def holders(self) -> Mapping[int, frozenset[int]]:
        """Return a mapping from each held offset of F to the ranks holding it, answered from regions.

        Looking one offset up costs the regions; only iterating over the whole mapping costs the elements.
        """
        from deepspeed_affine.ir.holding import Holders

        return Holders(self)

    def canonical(self) -> ParamAffineMap:
        """Return the same layout in its one canonical form; two layouts are equal exactly when these are."""
        from deepspeed_affine.ir.canonical import canonical_map

        return canonical_map(self)

    def layout_id(self) -> str:
        """Return the sha256 of the canonical form: equal exactly for layouts that are equal however they are cut."""
        from deepspeed_affine.ir.canonical import layout_id

        return layout_id(self.canonical())

    def maximal_runs(self, rank: int) -> list[AffinePiece]:
        """Return this rank's maximal 1-D runs; see ``ir.canonical.maximal_runs``."""
        from deepspeed_affine.ir.canonical import maximal_runs

        known = self._known(rank)
        return maximal_runs(self.pieces_by_rank[known], self.logical_shape, self.shard_shapes[known])

    def restrict_rows(self, start: int, stop: int) -> ParamAffineMap:
        """Return the map of rows ``start <= row < stop`` of F's axis 0, partial over the same shards.

        F keeps its shape and coordinates, and the shards keep theirs: rows outside the range are named by no piece.
        Truncating a vocabulary is ``restrict_rows(0, original_vocab_size)``; because the range starts F's rows at the
        same offsets, the result composes with a map of another padded height without translation.
        """
        if not self.logical_shape:
            raise InvalidMapError("A scalar parameter has no rows to restrict.")
        first, last = as_integer(start, "The first row"), as_integer(stop, "The end row")
        if not first <= last <= self.logical_shape[0]:
            raise InvalidMapError(
                f"Rows {first} to {last} are not a range of a parameter of {self.logical_shape[0]} rows."
            )
        from deepspeed_affine.ir.algebra import meet

        row = product(self.logical_shape[1:])
        pieces: dict[int, list[AffinePiece]] = {rank: [] for rank in self.ranks}
        for rank, piece in self.pieces():
            if first * row <= piece.source_offset and piece.source_end <= last * row:
                pieces[rank].append(piece)
            elif last > first and row:
                window = AffinePiece(((last - first) * row,), first * row, (1,), 0, (1,), (0,))
                pieces[rank] += [kept for kept, _ in meet(piece, window)]
        return ParamAffineMap(self.logical_shape, self.shard_shapes, pieces)

    def extract(self, full_param: torch.Tensor, rank: int, scale_power: int = 1) -> torch.Tensor:
        """Return one rank's shard of the full parameter; see ``execute.memory.extract``."""
        from deepspeed_affine.execute.memory import extract

        return extract(self, full_param, rank, scale_power)

    def rebuild(self, shards: Mapping[int, torch.Tensor], scale_power: int = 1) -> torch.Tensor:
        """Return the full parameter from the ranks' shards; see ``execute.memory.rebuild``."""
        from deepspeed_affine.execute.memory import rebuild

        return rebuild(self, shards, scale_power)

    def to_dict(self) -> dict[str, Any]:
        """Serialise to plain scalars with integer rank keys, pieces as they are."""
        return {
            "logical_shape": list(self.logical_shape),
            "ranks": {
                rank: {
                    "shard_shape": list(self.shard_shapes[rank]),
                    "pieces": [piece.to_dict() for piece in pieces],
                }
                for rank, pieces in self.pieces_by_rank.items()
            },
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> ParamAffineMap:
        """Read what ``to_dict`` wrote, or refuse it; rank keys may be integers or, from JSON, their text."""
        from deepspeed_affine.ir.codec import map_from_dict

        return map_from_dict(entry)


def _as_row(pieces: object, rank: object) -> tuple[AffinePiece, ...]:
    if isinstance(pieces, (str, bytes)) or not isinstance(pieces, Iterable):
        raise InvalidMapError(f"The pieces of rank {shown(rank)} are {shown(pieces)}; expected a sequence of pieces.")
    return tuple(pieces)


def _piece_fault(piece: AffinePiece, rank: int, full: int, shard: int, foreign: frozenset[int]) -> str | None:
    if piece.numel and piece.source_end > full:
        return f"reaches element {piece.source_end - 1} of a parameter of {full} elements"
    if piece.numel and piece.dest_end > shard:
        return f"reaches address {piece.dest_end - 1} of a shard of {shard} elements"
    if rank not in piece.locations:
        return f"lists locations {sorted(piece.locations)} without rank {rank} itself"
    if foreign:
        return f"lists locations {sorted(foreign)}, which are no ranks of this map"
    return None
