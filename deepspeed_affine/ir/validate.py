"""Proving a map: coverage, exact locations, and no shard address written twice, from its pieces alone.

Acceptance is by polynomial fingerprints (see ``fingerprint``), so its cost is near-linear in pieces and does not know
how many elements they have. With F(r, L) the sum over rank r's pieces labelled L (locations and scale):

    F(r, L) is the same for every r in L, and the sum over labels of F(L) is that of ``[0, N)``

holds exactly when every element lies in one class L and is held by all ranks of L and no other. A shard is tiled when
its addresses sum to those of ``[0, n)``. A map that may leave addresses out is proved with its computed gaps added:
pieces and gaps must tile together. A failing identity is always a true fault, and is then explained: prefixes of the
same sums, halved until the first faulty address is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from deepspeed_affine.errors import BudgetExceededError, Faults, InvalidMapError
from deepspeed_affine.ir.algebra import Side, lattices
from deepspeed_affine.ir.fingerprint import PRIME, Fingerprint
from deepspeed_affine.ir.ints import coordinates, product
from deepspeed_affine.ir.lattice import Budget, Lattice, coalesce, contains
from deepspeed_affine.ir.piece import AffinePiece
from deepspeed_affine.ir.regions import Region, complement, distinct, run

if TYPE_CHECKING:
    from deepspeed_affine.ir.map import ParamAffineMap

__all__ = ["check_addresses", "validate_map"]

Label = tuple[frozenset[int], float]
Named = tuple[int, AffinePiece]
Identity = tuple[list[Lattice], list[Lattice]]

_EXPLAIN_STEPS = 200_000


@lru_cache(maxsize=1)
def _fingerprint() -> Fingerprint:
    """One secret point per process: nothing outside can know it, so no input can be built against it."""
    return Fingerprint()


def validate_map(layout: ParamAffineMap, *, whole_shards: bool, whole_parameter: bool) -> None:
    """Return if the map holds what it says; otherwise raise ``InvalidMapError`` with the first fault of each part.

    ``whole_shards`` demands that every shard address is written, ``whole_parameter`` that every element of F is held.
    """
    faults = Faults()
    for rank in layout.ranks:
        fault = _shard_fault(layout, rank, whole_shards)
        if fault is not None:
            faults.add(fault)
    faults.raise_if_any()
    fault = _parameter_fault(layout, whole_parameter)
    if fault is not None:
        raise fault


def check_addresses(pieces: Sequence[AffinePiece]) -> None:
    """Return if no shard address is named twice by one rank's pieces; otherwise raise ``InvalidMapError``."""
    numel = max([piece.dest_end for piece in pieces if piece.numel], default=0)
    fault = _address_fault(pieces, (numel,), "The rank", None, whole=False)
    if fault is not None:
        raise fault


def _shard_fault(layout: ParamAffineMap, rank: int, whole: bool) -> InvalidMapError | None:
    return _address_fault(layout.pieces_by_rank[rank], layout.shard_shapes[rank], f"Rank {rank}", rank, whole=whole)


def _address_fault(
    listed: Sequence[AffinePiece], shape: tuple[int, ...], subject: str, rank: int | None, *, whole: bool
) -> InvalidMapError | None:
    mark = _fingerprint()
    numel = product(shape)
    pieces = [piece for piece in listed if piece.numel]
    total = sum([mark.block(piece.dest_offset, piece.shape, piece.dest_strides) for piece in pieces])
    full = mark.progression(numel, 1) if numel else 0
    if (total - full) % PRIME == 0:
        return None
    keyed = [x for piece in pieces for x in lattices(piece, "dest")]
    if not whole and len(keyed) == 1:
        return None
    gaps: list[Lattice] = []
    if not whole:
        gaps = complement(keyed, 0, numel)
        if (total + sum([_value(mark, gap) for gap in gaps]) - full) % PRIME == 0:
            return None
    address = _first_fault([(keyed + gaps, [run(0, numel)])], numel, mark)
    writers = [piece for piece in pieces if _keyed_at(piece, "dest", address)]
    times = sum(len(_keyed_at(piece, "dest", address)) for piece in writers)
    where = f"address {coordinates(address, shape)} of its shard of shape {shape}"
    if not writers:
        region = _grown(keyed, address, numel, shape)
        return InvalidMapError(
            f"{subject} leaves {where} unwritten; the first unwritten block is {region}. "
            "Expected every address of the shard exactly once.",
            rank=rank,
        )
    doubled = " and ".join(str(piece) for piece in writers[:2])
    return InvalidMapError(
        f"{subject} writes {where} {times} times, by {doubled}, so one block would silently overwrite another. "
        "Expected every address at most once.",
        rank=rank,
    )


def _parameter_fault(layout: ParamAffineMap, whole: bool) -> InvalidMapError | None:
    mark = _fingerprint()
    sums: dict[Label, dict[int, int]] = {}
    for rank, piece in layout.pieces():
        if piece.numel:
            row = sums.setdefault((piece.locations, piece.scale), {})
            row[rank] = row.get(rank, 0) + mark.block(piece.source_offset, piece.shape, piece.source_strides)
    full = mark.progression(layout.numel, 1) if layout.numel else 0
    total = -full
    alike = True
    for (locations, _), row in sums.items():
        values = [value % PRIME for value in row.values()]
        alike = alike and len(values) == len(locations) and all(value == values[0] for value in values)
        total += values[0]
    if alike and total % PRIME == 0:
        return None
    return _examine(layout, whole, mark)


def _examine(layout: ParamAffineMap, whole: bool, mark: Fingerprint) -> InvalidMapError | None:
    """Decide what the quick sums could not: partial coverage, and elements a rank holds at two shard addresses."""
    held: dict[Label, dict[int, list[Lattice]]] = {}
    for rank, piece in layout.pieces():
        if piece.numel:
            row = held.setdefault((piece.locations, piece.scale), {})
            row.setdefault(rank, []).extend(lattices(piece, "source"))
    classes: list[Lattice] = []
    identities: list[Identity] = []
    for (locations, _), row in held.items():
        by_rank = {rank: distinct(row.get(rank, ())) for rank in sorted(locations)}
        reference = by_rank[min(locations)]
        classes += reference
        identities += [(by_rank[rank], reference) for rank in sorted(locations)[1:]]
    gaps = [] if whole else complement(classes, 0, layout.numel)
    identities.append((classes + gaps, [run(0, layout.numel)] if layout.numel else []))
    if all(_balanced(identity, mark) for identity in identities):
        return None
    offset = _first_fault(identities, layout.numel, mark)
    return _holding_fault(layout, offset)


def _holding_fault(layout: ParamAffineMap, offset: int) -> InvalidMapError:
    holding = [(rank, piece) for rank, piece in layout.pieces() if _keyed_at(piece, "source", offset)]
    element = f"element {coordinates(offset, layout.logical_shape)} of the parameter of shape {layout.logical_shape}"
    if not holding:
        held = [x for _, piece in layout.pieces() for x in lattices(piece, "source")]
        region = _grown(held, offset, layout.numel, layout.logical_shape)
        return InvalidMapError(
            f"No rank holds {element}; the first uncovered block is {region}. Expected every element on at least one "
            "rank, or the parameter cannot be rebuilt."
        )
    holders = frozenset(rank for rank, _ in holding)
    for rank, piece in holding:
        if piece.locations != holders:
            return InvalidMapError(
                f"Rank {rank} lists {piece}, whose locations are {sorted(piece.locations)}, but {element} is held by "
                f"ranks {sorted(holders)}. Expected locations to be exactly the holders of every element of the piece; "
                "cut the piece where its holders change.",
                rank=rank,
            )
    (first, one), (second, other) = next((holding[0], each) for each in holding if each[1].scale != holding[0][1].scale)
    return InvalidMapError(
        f"Ranks {first} and {second} hold {element} by different scales, {one.scale} and {other.scale}. "
        "Expected holders of one element to agree in scale.",
        rank=second,
    )


def _value(mark: Fingerprint, lattice: Lattice) -> int:
    return mark.block(lattice.key, [d[0] for d in lattice.digits], [d[1] for d in lattice.digits])


def _balanced(identity: Identity, mark: Fingerprint) -> bool:
    left, right = identity
    return (sum([_value(mark, x) for x in left]) - sum([_value(mark, x) for x in right])) % PRIME == 0


def _first_fault(identities: Iterable[Identity], end: int, mark: Fingerprint) -> int:
    """The smallest address at which the two sides of some identity hold it unequally often."""
    best = end
    for left, right in identities:
        if _balanced((left, right), mark):
            continue
        signed = [(1, x) for x in left] + [(-1, x) for x in right]
        # The sums below ``low`` agree and those below ``high`` do not: coefficients never cancel across addresses, so
        # the first fault stays visible in every longer prefix. Blocks that end before ``low`` are summed once, blocks
        # from ``high`` on are dropped, so that each halving looks only at blocks that straddle what is left.
        low, high, settled = 0, end, 0
        while high - low > 1:
            middle = (low + high) // 2
            if (settled + sum([sign * mark.prefix(x, middle) for sign, x in signed])) % PRIME:
                high = middle
                signed = [(sign, x) for sign, x in signed if x.key < high]
            else:
                low = middle
                settled += sum([sign * _value(mark, x) for sign, x in signed if x.last < low])
                signed = [(sign, x) for sign, x in signed if x.last >= low]
        best = min(best, low)
    return best


def _keyed_at(piece: AffinePiece, side: Side, address: int) -> list[Lattice]:
    start, stop = (piece.source_offset, piece.source_end) if side == "source" else (piece.dest_offset, piece.dest_end)
    if not start <= address < stop:
        return []
    found = lattices(piece, side)
    return [x for x in found if contains(x, address) is not None]


def _grown(held: list[Lattice], address: int, end: int, shape: tuple[int, ...]) -> str:
    """The largest block of unheld addresses that is cheap to name and begins at ``address``."""
    found: list[Lattice]
    try:
        found = [x for x in complement(held, 0, end, Budget("Naming a gap", _EXPLAIN_STEPS)) if x.key == address]
    except BudgetExceededError:
        found = []
    lattice = max(found, key=lambda x: x.numel) if found else run(address, address + 1)
    region = Region.of(Lattice(lattice.key, 0, coalesce(list(lattice.digits))))
    box = region.box(shape)
    if box is not None:
        return "[" + ", ".join(f"{axis.start}:{axis.stop}" for axis in box) + "]"
    return f"{region.numel} elements from offset {region.offset}, shape {region.shape}, strides {region.strides}"
