"""From which of its holders each needed element is taken, and what that copies from where to where."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from deepspeed_affine.errors import PolicyError, UnsupportedLayoutError
from deepspeed_affine.ir.canonical import fold_pairs
from deepspeed_affine.ir.ints import coordinates, product, row_major_strides, shown
from deepspeed_affine.ir.lattice import Lattice, Meeting, proper
from deepspeed_affine.plan.balance import Demand, Shares, assign
from deepspeed_affine.plan.holdings import Need, common

__all__ = [
    "Copies",
    "Policy",
    "ReplicaCandidate",
    "ReplicaSelectionRequest",
    "ReplicaSelector",
    "check_policy",
    "chosen",
    "copied",
    "divided",
    "ratio",
    "selected",
]

Policy = Literal["balanced", "lowest"]
"""``balanced`` levels what the source ranks send; ``lowest`` reads everything from its lowest holder."""


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    """Where one holder has the requested block: element k of the block is at this offset and these strides."""

    source_rank: int
    source_offset: int
    source_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplicaSelectionRequest:
    """A block of F that several ranks hold, one of which is to be chosen.

    The block has ``shape`` and starts at ``logical_origin`` in F; its digits step by ``logical_strides`` there, and by
    the strides given on either side.
    """

    target_rank: int
    logical_origin: tuple[int, ...]
    logical_strides: tuple[int, ...]
    shape: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]
    candidates: tuple[ReplicaCandidate, ...]


ReplicaSelector = Callable[[ReplicaSelectionRequest], int]


Copies = dict[tuple[int, int, float], list[Lattice]]
"""By source rank, target rank and ratio of scales: lattices from target to source addresses."""


def check_policy(policy: object) -> None:
    if policy not in ("balanced", "lowest"):
        raise PolicyError(f"The replica policy is {shown(policy)}; expected 'balanced' or 'lowest'.")


def ratio(need: Need) -> float:
    """By what the copies of a need are multiplied; UnsupportedLayoutError where a double cannot hold it."""
    found = need.scale / need.source.scale
    if not sys.float_info.min <= abs(found) <= sys.float_info.max:
        raise UnsupportedLayoutError(
            f"Target rank {need.target} holds a block times {need.scale} and its source times {need.source.scale}, "
            "whose ratio a double cannot hold; expected moderate scales.",
            rank=need.target,
        )
    return found


def chosen(found: Sequence[Need], shape: tuple[int, ...], policy: Policy, same_ranks: bool, itemsize: int) -> Copies:
    """What is copied when the policy chooses."""
    copies: Copies = defaultdict(list)
    for need, shared in zip(found, _shares(found, policy, same_ranks, itemsize), strict=True):
        scale = ratio(need)
        if len(shared) == 1:
            copies[shared[0][0], need.target, scale] += copied(need, shared[0][0], shape)
        else:
            for sender, pieces in divided(need, shared):
                copies[sender, need.target, scale] += copied(need, sender, shape, pieces)
    return copies


def copied(need: Need, sender: int, shape: tuple[int, ...], pieces: Sequence[Lattice] | None = None) -> list[Lattice]:
    """Lattices from target to source addresses of what the need, or these ``pieces`` of it, takes from one holder."""
    if pieces is None:
        if sender == need.source.holders[0]:
            return _keyed(need.found)
        pieces = need.pieces()
    return _keyed([meeting for _, meeting in common(pieces, need.source.copies[sender], shape)])


def _shares(found: Sequence[Need], policy: Policy, same_ranks: bool, itemsize: int) -> list[Shares]:
    """Who sends each need; between different numberings of processes no target holds anything itself."""
    if policy == "lowest":
        return [
            ((need.target if same_ranks and need.target in need.source.holders else need.source.holders[0], 0),)
            for need in found
        ]
    demands = [
        Demand(need.target if same_ranks else -1 - need.target, need.source.holders, need.numel * itemsize)
        for need in found
    ]
    return assign(demands)


def _keyed(meetings: Iterable[Meeting]) -> list[Lattice]:
    return [x for m in meetings for x in proper(m.mate_a, m.mate_b, [(n, u, w) for n, _, u, w in m.digits])]


def divided(need: Need, shared: Shares) -> list[tuple[int, list[Lattice]]]:
    """The needed pieces dealt out in proportion to the shares, cut across their outermost digits."""
    keyed = [x for p in need.pieces() for x in proper(p.mate, p.key, [(n, u, s) for n, s, u in p.digits])]
    # Folded first, so that the cuts do not depend on how the maps were cut.
    waiting = [
        x
        for target, source, digits in reversed(fold_pairs(keyed))
        for x in reversed(proper(source, target, [(n, s, u) for n, u, s in digits]))
    ]
    total, nbytes = need.numel, sum([share for _, share in shared])
    result: list[tuple[int, list[Lattice]]] = []
    given = sent = 0
    for sender, share in shared:
        given += share
        room = total * given // nbytes - sent
        taken: list[Lattice] = []
        while room and waiting:
            head, rest = _cut(waiting.pop(), room, within=not taken)
            waiting += reversed(rest)
            if head is None:
                break
            taken.append(head)
            room -= head.numel
            sent += head.numel
        result.append((sender, taken))
    result[-1][1].extend(reversed(waiting))
    return [part for part in result if part[1]]


def _cut(lattice: Lattice, room: int, *, within: bool) -> tuple[Lattice | None, list[Lattice]]:
    """As many whole rows of the lattice as fit, and the rest; the first row itself is cut only ``within``."""
    if lattice.numel <= room:
        return lattice, []
    (extent, stride, mate), inner = lattice.digits[0], lattice.digits[1:]
    fit = room // product([digit[0] for digit in inner])

    def rows(start: int, stop: int) -> Lattice:
        digits = ((stop - start, stride, mate), *inner) if stop - start > 1 else inner
        return Lattice(lattice.key + start * stride, lattice.mate + start * mate, digits)

    if fit:
        return rows(0, fit), [rows(fit, extent)]
    if not within:
        return None, [lattice]
    head, rest = _cut(rows(0, 1), room, within=True)
    return head, [*rest, rows(1, extent)]


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of F (a proper lattice) with its ``(offset, strides)`` on the target's side and in every copy so far."""

    key: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    sides: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, meeting: Meeting) -> _Block:
        extents, strides, ours, theirs = zip(*meeting.digits, strict=True) if meeting.digits else ((), (), (), ())
        return cls(meeting.key, extents, strides, ((meeting.mate_a, ours), (meeting.mate_b, theirs)))

    def numbered(self) -> Lattice:
        """The block with the row-major number of each element for a mate, from which every side can be told."""
        return Lattice(
            self.key, 0, tuple(zip(self.extents, self.strides, row_major_strides(self.extents), strict=True))
        )

    def part(self, meeting: Meeting) -> _Block:
        """The elements of one meeting of ``numbered()`` with a further copy, which becomes the last side."""
        first = coordinates(meeting.mate_a, self.extents)
        steps = [coordinates(digit[2], self.extents) for digit in meeting.digits]
        sides = [
            (offset + _dot(first, strides), tuple([_dot(step, strides) for step in steps]))
            for offset, strides in self.sides
        ]
        sides.append((meeting.mate_b, tuple([digit[3] for digit in meeting.digits])))
        digits = meeting.digits
        return _Block(meeting.key, tuple([d[0] for d in digits]), tuple([d[1] for d in digits]), tuple(sides))


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum([i * stride for i, stride in zip(index, strides, strict=True)])


def selected(found: Sequence[Need], shape: tuple[int, ...], selector: ReplicaSelector) -> Copies:
    """What is copied when the caller's selector chooses: it is asked for every block that is one in all its shards."""
    copies: Copies = defaultdict(list)
    for need in found:
        scale = ratio(need)
        holders = need.source.holders
        if len(holders) == 1:
            copies[holders[0], need.target, scale] += _keyed(need.found)
            continue
        blocks = [_Block.of(meeting) for meeting in need.found]
        for rank in holders[1:]:
            meetings = common([block.numbered() for block in blocks], need.source.copies[rank], shape)
            blocks = [blocks[number].part(meeting) for number, meeting in meetings]
        for block in sorted(blocks, key=lambda each: each.key):
            (offset, strides), copies_of = block.sides[0], block.sides[1:]
            candidates = [ReplicaCandidate(rank, *side) for rank, side in zip(holders, copies_of, strict=True)]
            request = ReplicaSelectionRequest(
                need.target,
                coordinates(block.key, shape),
                block.strides,
                block.extents,
                offset,
                strides,
                tuple(candidates),
            )
            chosen = selector(request)
            if type(chosen) is not int or chosen not in holders:
                raise PolicyError(
                    f"The replica selector returned {shown(chosen)} for target rank {need.target}; expected one of the "
                    f"candidates' ranks {list(holders)}.",
                    rank=need.target,
                )
            source = candidates[holders.index(chosen)]
            digits = zip(block.extents, strides, source.source_strides, strict=True)
            copies[chosen, need.target, scale] += proper(offset, source.source_offset, digits)
    return copies
