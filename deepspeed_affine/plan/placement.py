"""Where one parameter lies in a job: its map, and which processes hold each of the map's locations."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from deepspeed_affine.errors import Faults, InvalidMapError
from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.ir.ints import as_integer, shown

__all__ = ["Placement", "as_itemsize", "check_sides", "wrapper_prefix"]


def as_itemsize(value: object, what: str) -> int:
    """Bytes of an element, one or more; anything else is an ``InvalidMapError``."""
    nbytes = as_integer(value, what)
    if not nbytes:
        raise InvalidMapError(f"{what} is 0; expected the bytes of an element, one or more.")
    return nbytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one parameter lies: its map, the processes that hold each of the map's locations, bytes of an element."""

    layout: ParamAffineMap
    holders: Mapping[int, tuple[int, ...]]
    itemsize: int

    def __post_init__(self) -> None:
        if not isinstance(self.layout, ParamAffineMap) or not isinstance(self.holders, Mapping):
            raise InvalidMapError(
                f"A placement has the layout {shown(self.layout)} and the holders {shown(self.holders)}; expected a "
                "ParamAffineMap and a mapping from its locations to processes."
            )
        object.__setattr__(self, "itemsize", as_itemsize(self.itemsize, "A placement's itemsize"))
        if set(self.holders) != set(self.layout.ranks):
            raise InvalidMapError(
                f"The placement names holders of {shown(list(self.holders))}, but the map's locations are "
                f"{shown(list(self.layout.ranks))}; expected one entry each."
            )
        seen: set[int] = set()
        for location, ranks in self.holders.items():
            if not isinstance(ranks, tuple) or set(map(type, ranks)) - {int} or min(ranks, default=0) < 0:
                raise InvalidMapError(
                    f"Location {location} is held by {shown(ranks)}; expected a tuple of processes, each an integer "
                    "of 0 or more."
                )
            if not ranks or len(set(ranks)) != len(ranks) or not seen.isdisjoint(ranks):
                raise InvalidMapError(
                    f"Location {location} is held by {shown(ranks)}; expected one rank or more, none at two locations."
                )
            seen.update(ranks)

    @classmethod
    def own(cls, layout: ParamAffineMap, itemsize: int) -> Placement:
        """Every location of the map is one process, of the same number."""
        return cls(layout, {rank: (rank,) for rank in layout.ranks}, itemsize)


def check_sides(
    target: Mapping[str, Placement], source: Mapping[str, Placement], valid_rows: Mapping[str, int]
) -> None:
    """The source has every parameter of the target, as wide and of its shape; InvalidMapError lists those it has not.

    The shapes of those in ``valid_rows`` are not compared. It names parameters of either side: rows that are said of
    nothing would be read as if they were no padding.
    """
    faults = Faults()
    if not isinstance(valid_rows, Mapping):
        raise InvalidMapError(f"valid_rows is {shown(valid_rows)}; expected a mapping from parameter name to rows.")
    for side, given in (("target", target), ("source", source)):
        rows = given.items() if isinstance(given, Mapping) else ((None, None),)
        if not all(isinstance(name, str) and isinstance(each, Placement) for name, each in rows):
            raise InvalidMapError(f"The {side} is {shown(given)}; expected a mapping from parameter name to Placement.")
    prefix = None if target.keys() & source.keys() else wrapper_prefix(target.keys(), source.keys())
    if prefix is not None:
        who, other = ("source", "target") if prefix[0] else ("target", "source")
        raise InvalidMapError(
            f"The {who}'s names are the {other}'s with {prefix[1]!r} before them, which a wrapper around the model (as "
            "torch.compile makes) puts there; expected one name a parameter. Give live_shards the model inside it."
        )
    for name, placement in target.items():
        if name not in source:
            faults.add(
                InvalidMapError(
                    f"parameter {name!r}: the source has none of this name; expected one. Are both of one model?",
                    param=name,
                )
            )
        elif source[name].itemsize != placement.itemsize:
            faults.add(
                InvalidMapError(
                    f"parameter {name!r}: its elements have {source[name].itemsize} bytes in the source and "
                    f"{placement.itemsize} in the target; expected one width. Convert one side's dtype first.",
                    param=name,
                )
            )
        elif name not in valid_rows and source[name].layout.logical_shape != placement.layout.logical_shape:
            theirs, ours = source[name].layout.logical_shape, placement.layout.logical_shape
            advice = "Are both of one model?"
            if ours[1:] == theirs[1:]:
                advice = "For two paddings of one vocabulary give its real height in valid_rows."
            faults.add(
                InvalidMapError(
                    f"parameter {name!r}: has shape {theirs} in the source and {ours} in the target; expected one. "
                    f"{advice}",
                    param=name,
                )
            )
    for name in valid_rows:
        if name not in target and name not in source:
            faults.add(
                InvalidMapError(
                    f"valid_rows names {shown(name)}, which neither side has; expected the name of a parameter. Is it "
                    "misspelt?"
                )
            )
    faults.raise_if_any()


def wrapper_prefix(known: Set[str], stored: Set[str]) -> tuple[bool, str] | None:
    """What stands before all names of one side, and whether that is the stored one; None where nothing does."""
    for names, others, is_stored in ((stored, known, True), (known, stored, False)):
        first, last = min(names, default=""), max(names, default="")
        for at in (at for at, letter in enumerate(first, 1) if letter == "."):
            # What the first and the last share, all between them do.
            if last.startswith(first[:at]) and not others.isdisjoint(name[at:] for name in names):
                return is_stored, first[:at]
    return None
