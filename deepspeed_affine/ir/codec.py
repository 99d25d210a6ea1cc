"""Strict reading of one stored map: every departure from the format is its own error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ir.map import ParamAffineMap
from deepspeed_affine.ir.piece import AffinePiece

__all__ = ["map_from_dict"]

Built = TypeVar("Built")

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")

_PIECE_KEYS = ("shape", "source", "dest", "locations")


def map_from_dict(entry: object, param: str | None = None) -> ParamAffineMap:
    """Return the map a stored entry describes, or raise one error that lists what is wrong with it.

    Wrong types and missing or unknown keys are ``CheckpointFormatError``; numbers that contradict each other are
    ``InvalidMapError``. Both carry ``param`` where it is known.
    """
    subject = f"The map of {param}" if param is not None else "The map"
    where = _Where(subject, param)
    row = where.mapping(entry, ("logical_shape", "ranks"))
    logical_shape = where.extents(row["logical_shape"], "logical_shape")
    ranks = row["ranks"]
    if not isinstance(ranks, Mapping):
        raise where.fault(f"has ranks of type {type(ranks).__name__}; expected a mapping from rank to shard")
    faults = Faults()
    seen: dict[int, object] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    pieces: dict[int, list[AffinePiece]] = {}
    for key, value in ranks.items():
        try:
            rank = where.rank(key, seen)
            shapes[rank], pieces[rank] = _shard(value, _Where(f"{subject}, rank {rank},", param, rank))
        except AffineError as fault:
            faults.add(fault)
    faults.raise_if_any()
    return where.built(lambda: ParamAffineMap(logical_shape, shapes, pieces))


def _shard(value: object, where: _Where) -> tuple[tuple[int, ...], list[AffinePiece]]:
    row = where.mapping(value, ("shard_shape", "pieces"))
    listed = row["pieces"]
    if not isinstance(listed, (list, tuple)):
        raise where.fault(f"has pieces of type {type(listed).__name__}; expected a list")
    faults = Faults()
    pieces: list[AffinePiece] = []
    for number, entry in enumerate(listed):
        try:
            pieces.append(_piece(entry, number, where))
        except AffineError as fault:
            faults.add(fault)
    shape: tuple[int, ...] = ()
    try:
        shape = where.extents(row["shard_shape"], "shard_shape")
    except AffineError as fault:
        faults.add(fault)
    faults.raise_if_any()
    return shape, pieces


def _piece(entry: object, number: int, where: _Where) -> AffinePiece:
    at = _Where(f"{where.subject} piece {number}", where.param, where.of_rank)
    row = at.mapping(entry, _PIECE_KEYS, optional=("scale",))
    source_offset, source_strides = at.side(row["source"], "source")
    dest_offset, dest_strides = at.side(row["dest"], "dest")
    shape = at.extents(row["shape"], "shape")
    locations = at.extents(row["locations"], "locations")
    if len(set(locations)) != len(locations):
        raise at.fault(f"lists locations {shown(list(locations))}, one of them twice")
    scale = row.get("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise at.fault(f"has scale {shown(scale)} of type {type(scale).__name__}; expected a number")
    return at.built(
        lambda: AffinePiece(shape, source_offset, source_strides, dest_offset, dest_strides, locations, scale)
    )


class _Where:
    """The subject of a message: which map, rank and piece is being read."""

    def __init__(self, subject: str, param: str | None, rank: int | None = None) -> None:
        self.subject = subject
        self.param = param
        self.of_rank = rank

    def fault(self, text: str) -> CheckpointFormatError:
        return CheckpointFormatError(f"{self.subject} {text}.", param=self.param, rank=self.of_rank)

    def built(self, build: Callable[[], Built]) -> Built:
        """Run a constructor, and give its refusal this subject."""
        try:
            return build()
        except AffineError as fault:
            faults = Faults()
            for each in fault.faults:
                rank = each.rank if each.rank is not None else self.of_rank
                faults.add(type(each)(f"{self.subject}: {each.message}", param=self.param, rank=rank))
            faults.raise_if_any()
            raise

    def mapping(self, value: object, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.fault(f"is a {type(value).__name__}; expected a mapping with {', '.join(required)}")
        missing = [key for key in required if key not in value]
        if missing:
            raise self.fault(f"lacks {', '.join(missing)}")
        unknown = [key for key in value if key not in required and key not in optional]
        if unknown:
            raise self.fault(f"has unknown keys {', '.join(map(shown, unknown[:3]))}; expected {', '.join(required)}")
        return value

    def extents(self, value: object, what: str) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise self.fault(f"has {what} {shown(value)} of type {type(value).__name__}; expected a list of integers")
        for number in value:
            self.integer(number, what)
        return tuple(value)

    def integer(self, value: object, what: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fault(f"has {shown(value)} of type {type(value).__name__} in its {what}; expected an integer")
        if value < 0:
            raise self.fault(f"has {shown(value)} in its {what}; expected zero or more")
        return value

    def side(self, value: object, what: str) -> tuple[int, tuple[int, ...]]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise self.fault(f"has {what} {shown(value)}; expected [offset, strides]")
        return self.integer(value[0], f"{what} offset"), self.extents(value[1], f"{what} strides")

    def rank(self, key: object, seen: dict[int, object]) -> int:
        rank: int
        if isinstance(key, int) and not isinstance(key, bool):
            rank = key
        elif isinstance(key, str) and _DECIMAL.fullmatch(key):
            rank = int(key)
        else:
            raise self.fault(f"has rank key {shown(key)}; expected an integer or its decimal text")
        if rank < 0:
            raise self.fault(f"has rank key {shown(key)}; expected zero or more")
        if rank in seen:
            raise self.fault(f"names rank {rank} twice, as {shown(seen[rank])} and as {shown(key)}")
        seen[rank] = key
        return rank
