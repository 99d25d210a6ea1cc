"""Who sends what: replicas are chosen so that no sender has much more to send than it must.

Choosing one holder for every region so that the heaviest sender is lightest is NP-hard. The rule here is greedy and
then repaired: regions with the fewest holders first and the largest among them, each to its lightest holder, then
moves of regions, or of parts of them, off the heaviest sender while one helps. The bound it is measured by is exact
for regions that could be shared among their holders: the least load T for which a flow from regions to holders fits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.plan.flow import Network

__all__ = ["SMALL_BYTES", "SPLIT_BYTES", "Demand", "Shares", "assign", "heaviest", "lower_bound"]

SMALL_BYTES = 64 << 10
"""Below this a region stays with its lowest holder: balancing crumbs only makes more senders talk to more targets."""


SPLIT_BYTES = 4 << 20
"""A region is shared between two senders only where each sends at least so much of it."""

Shares = tuple[tuple[int, int], ...]
"""``(sender, bytes)`` of one demand, senders in order."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A region one target needs from one of its holders, in bytes."""

    target: int
    holders: tuple[int, ...]
    nbytes: int

    def __post_init__(self) -> None:
        if not self.holders:
            raise InvalidMapError(
                f"Target {self.target} needs {self.nbytes} bytes that nobody holds.", rank=self.target
            )


def assign(
    demands: Sequence[Demand],
    *,
    small_bytes: int = SMALL_BYTES,
    split_bytes: int | None = SPLIT_BYTES,
    hosts: Mapping[int, int] | None = None,
) -> list[Shares]:
    """Return who sends how many bytes of every demand, deterministically.

    A target that holds a region itself copies it and sends nothing. With ``hosts`` (rank to machine) a region is taken
    from a holder on the target's own machine where there is one. Demands smaller than ``small_bytes`` stay with
    their lowest holder. Among holders that end up no heavier than need be, one that already sends to that target is
    taken. At most one region less than there are senders is shared by two or more, in parts of ``split_bytes`` or
    more, and none where that is None. Near-linear in the holders of all demands together.
    """
    shares: list[dict[int, int]] = [{} for _ in demands]
    loads: dict[int, int] = defaultdict(int)
    pairs: set[tuple[int, int]] = set()
    free: list[tuple[int, int, int]] = []
    options: dict[int, tuple[int, ...]] = {}
    for number, demand in enumerate(demands):
        holders = demand.holders
        if demand.target in holders:
            shares[number] = {demand.target: demand.nbytes}
            continue
        if hosts is not None:
            home = hosts.get(demand.target)
            holders = tuple([rank for rank in holders if hosts.get(rank, -1) == home]) or holders
        if demand.nbytes < small_bytes or len(holders) == 1:
            sender = min(holders)
            shares[number] = {sender: demand.nbytes}
            loads[sender] += demand.nbytes
            pairs.add((sender, demand.target))
        else:
            options[number] = holders
            free.append((len(holders), -demand.nbytes, number))
    free.sort()
    peak = max(loads.values(), default=0)
    for _, _, number in free:
        demand = demands[number]
        lightest = min(options[number], key=lambda rank: (loads[rank], rank))
        allowed = max(peak, loads[lightest] + demand.nbytes)
        known = [
            rank
            for rank in options[number]
            if (rank, demand.target) in pairs and loads[rank] + demand.nbytes <= allowed
        ]
        sender = min(known, key=lambda rank: (loads[rank], rank)) if known else lightest
        shares[number] = {sender: demand.nbytes}
        loads[sender] += demand.nbytes
        peak = max(peak, loads[sender])
        pairs.add((sender, demand.target))
    _repair(options, shares, loads, split_bytes)
    return [tuple(sorted(each.items())) for each in shares]


def _repair(
    options: Mapping[int, tuple[int, ...]], shares: list[dict[int, int]], loads: dict[int, int], split_bytes: int | None
) -> None:
    """Move regions, and then parts of regions, off the heaviest sender for as long as the heaviest load falls."""
    movable: dict[int, _Movable] = defaultdict(_Movable)
    for number, holders in options.items():
        for rank, nbytes in shares[number].items():
            movable[rank].add(holders, nbytes, number)
    heap = [(-load, rank) for rank, load in loads.items()]
    heapq.heapify(heap)
    splits = len({rank for holders in options.values() for rank in holders} | set(loads)) - 1
    for _ in range(4 * len(options) + 4 * splits):
        while heap and -heap[0][0] != loads[heap[0][1]]:
            heapq.heappop(heap)
        if not heap:
            return
        heavy = heap[0][1]
        move = _whole_move(heavy, movable[heavy], loads)
        if move is None and split_bytes is not None:
            move = _part_move(heavy, movable[heavy].numbers(), options, shares, loads, split_bytes, splits)
        if move is None:
            return
        number, rank, nbytes = move
        before = len(shares[number])
        for each, change in ((heavy, -nbytes), (rank, nbytes)):
            had = shares[number].pop(each, 0)
            if had:
                movable[each].remove(options[number], had, number)
            if had + change:
                shares[number][each] = had + change
                movable[each].add(options[number], had + change, number)
            loads[each] += change
            heapq.heappush(heap, (-loads[each], each))
        splits -= len(shares[number]) - before


Move = tuple[int, int, int]
"""Which demand, to which sender, how many bytes."""


class _Movable:
    """What one sender sends of regions that others hold too: ``(bytes, region)`` by the region's holders, rising."""

    def __init__(self) -> None:
        self.by_holders: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def add(self, holders: tuple[int, ...], nbytes: int, number: int) -> None:
        insort(self.by_holders.setdefault(holders, []), (nbytes, number))

    def remove(self, holders: tuple[int, ...], nbytes: int, number: int) -> None:
        rows = self.by_holders[holders]
        del rows[bisect_left(rows, (nbytes, number))]
        if not rows:
            del self.by_holders[holders]

    def numbers(self) -> list[int]:
        return [number for rows in self.by_holders.values() for _, number in rows]

    def around(self, holders: tuple[int, ...], nbytes: int) -> Iterator[tuple[int, int]]:
        """The largest of at most ``nbytes`` and the smallest of more, each the first region of its size."""
        rows = self.by_holders[holders]
        above = bisect_left(rows, (nbytes + 1, -1))
        if above:
            yield rows[bisect_left(rows, (rows[above - 1][0], -1))]
        if above < len(rows):
            yield rows[above]


def _whole_move(heavy: int, movable: _Movable, loads: Mapping[int, int]) -> Move | None:
    """The move of all that ``heavy`` sends of one region that leaves the heavier of the two lightest.

    Of regions with the same holders that is one of the two whose size is next to half the difference of the loads.
    """
    top = loads[heavy]
    best: tuple[int, Move] | None = None
    for holders in movable.by_holders:
        rank = min(holders, key=lambda each: (loads.get(each, 0), each))
        if rank == heavy:
            continue
        load = loads.get(rank, 0)
        for nbytes, number in movable.around(holders, (top - load) // 2):
            level = max(load + nbytes, top - nbytes)
            if level < top and (best is None or (level, (number, rank, nbytes)) < best):
                best = (level, (number, rank, nbytes))
    return None if best is None else best[1]


def _part_move(
    heavy: int,
    movable: Iterable[int],
    options: Mapping[int, tuple[int, ...]],
    shares: Sequence[Mapping[int, int]],
    loads: Mapping[int, int],
    split_bytes: int,
    splits: int,
) -> Move | None:
    """The part of one region whose move levels ``heavy`` with the lightest other holder, if both parts are worth it."""
    best: tuple[int, Move] | None = None
    for number in movable:
        mine = shares[number][heavy]
        rank = min(options[number], key=lambda each: (loads.get(each, 0), each))
        theirs = shares[number].get(rank, 0)
        nbytes = min((loads[heavy] - loads.get(rank, 0)) // 2, mine - split_bytes)
        if rank == heavy or nbytes < split_bytes >> 6 or theirs + nbytes < split_bytes or (not theirs and splits < 1):
            continue
        level = loads[heavy] - nbytes
        if best is None or (level, (number, rank, nbytes)) < best:
            best = (level, (number, rank, nbytes))
    return None if best is None else best[1]


def heaviest(demands: Sequence[Demand], shares: Sequence[Shares]) -> int:
    """Bytes sent by the heaviest sender; what a target holds itself is not sent."""
    loads: dict[int, int] = defaultdict(int)
    for demand, shared in zip(demands, shares, strict=True):
        for sender, nbytes in shared:
            if sender != demand.target:
                loads[sender] += nbytes
    return max(loads.values(), default=0)


def lower_bound(demands: Sequence[Demand]) -> int:
    """The least bytes that the heaviest sender must send, whoever chooses, even if regions could be shared out.

    The largest over sets S of senders of what only S holds, divided by the number of S: found by maximum flow, raising
    the load to what the last minimum cut proves until everything flows. Regions of equal holders count as one.
    """
    wanted: dict[tuple[int, ...], int] = defaultdict(int)
    for demand in demands:
        if demand.target not in demand.holders and demand.nbytes:
            wanted[tuple(sorted(set(demand.holders)))] += demand.nbytes
    if not wanted:
        return 0
    senders = sorted({rank for holders in wanted for rank in holders})
    bound = max(-(-sum(wanted.values()) // len(senders)), *[-(-n // len(h)) for h, n in wanted.items()])
    while True:
        cut = _tight_set(wanted, senders, bound)
        if cut is None:
            return bound
        inside = sum(nbytes for holders, nbytes in wanted.items() if cut.issuperset(holders))
        bound = -(-inside // len(cut))


def _tight_set(wanted: Mapping[tuple[int, ...], int], senders: Sequence[int], limit: int) -> set[int] | None:
    """None if every sender can stay within ``limit``; otherwise senders that hold more together than they may send."""
    node = {rank: 2 + number for number, rank in enumerate(senders)}
    network = Network(2 + len(senders) + len(wanted))
    for rank in senders:
        network.connect(node[rank], 1, limit)
    for number, (holders, nbytes) in enumerate(wanted.items(), 2 + len(senders)):
        network.connect(0, number, nbytes)
        for rank in holders:
            network.connect(number, node[rank], nbytes)
    if network.maximum_flow(0, 1) == sum(wanted.values()):
        return None
    reached = network.reachable(0)
    return {rank for rank in senders if node[rank] in reached}
