"""When every message of a transfer is sent: in rounds, in each of which a process sends one and receives one at most.

The messages are the edges of a bipartite multigraph between senders and receivers. Koenig's theorem: its edges have a
proper colouring with as many colours as the busiest process has messages, and the colours are the rounds. Fewer rounds
are impossible, because that process takes part in one message a round.

Why nothing waits for ever. All processes have the same rounds, since they follow from the plan, and each does its own
in order: it starts its send and its receive of the round together and goes on when both are done. Suppose some wait.
Among the rounds they are in let k be the first. A message of round k that is not done has two ends, and neither is in
a round before k, by the choice of k, nor beyond k, because then the message would be done. So both ends are in round k
and both have started it: it proceeds. No end waits for anything else, so round k ends, and by induction every round
does, whatever the number of processes and whether or not a send needs its receiver to be there.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping

__all__ = ["rounds"]

Pair = tuple[int, int]


def rounds(counts: Mapping[Pair, int]) -> dict[Pair, tuple[int, ...]]:
    """In which rounds each ``(source, target)`` pair sends, rising, given how many messages it has.

    Deterministic, whatever the order of the mapping. The number of rounds is the largest number of messages that one
    process sends or that one receives. Linear in the messages, and for every pair as many alternating paths, of at most
    the number of processes, as its number of messages has binary digits; none where the pair's place in the round robin
    of all processes is free, as it is when everybody sends to everybody.
    """
    colouring = _coloured(counts, 1 + max([process for pair in counts for process in pair], default=0))
    found: dict[Pair, list[int]] = {pair: [] for pair in sorted(counts)}
    for source, taken in colouring.sends.items():
        for colour, target in taken.items():
            found[source, target].append(colour)
    return {pair: tuple(sorted(colours)) for pair, colours in found.items()}


def _coloured(counts: Mapping[Pair, int], processes: int) -> _Colouring:
    """Half of every pair's messages, twice over, and then those that are left.

    That is as few colours as ever: whoever has the most messages has at least twice as many as in the half.
    """
    colouring = _Colouring()
    done = 0
    half = {pair: count // 2 for pair, count in counts.items() if count > 1}
    if half:
        done = _most(half)
        colouring.take_twice(_coloured(half, processes), done)
    most = _most(counts)
    for source, target in sorted(counts):
        if counts[source, target] % 2:
            colouring.add(source, target, 2 * done + (target - source) % processes - 1, most)
    return colouring


def _most(counts: Mapping[Pair, int]) -> int:
    """The largest number of messages that one process sends or that one receives."""
    degrees: dict[tuple[str, int], int] = defaultdict(int)
    for (source, target), count in counts.items():
        degrees["sends", source] += count
        degrees["receives", target] += count
    return max(degrees.values(), default=0)


class _Side(defaultdict[int, dict[int, int]]):
    """By process and colour the process at the other end; and for each process which of its colours are free.

    Those are colours that were released, in a heap in which some may be taken again, and all from ``lowest`` on that
    are not taken.
    """

    def __init__(self) -> None:
        super().__init__(dict)
        self.lowest: dict[int, int] = defaultdict(int)
        self.released: dict[int, list[int]] = defaultdict(list)

    def free(self, process: int) -> int:
        taken, released, colour = self[process], self.released[process], self.lowest[process]
        while colour in taken:
            colour += 1
        self.lowest[process] = colour
        while released and released[0] in taken:
            heapq.heappop(released)
        return min(colour, released[0]) if released else colour

    def release(self, process: int, colour: int) -> None:
        del self[process][colour]
        heapq.heappush(self.released[process], colour)


class _Colouring:
    """A proper edge colouring that grows by one edge at a time."""

    def __init__(self) -> None:
        self.sends = _Side()
        self.receives = _Side()

    def take_twice(self, other: _Colouring, colours: int) -> None:
        """All edges of ``other``, which has so many colours, and all once more in as many colours of their own."""
        for mine, theirs in ((self.sends, other.sends), (self.receives, other.receives)):
            for process, taken in theirs.items():
                mine[process] = {**taken, **{colour + colours: end for colour, end in taken.items()}}

    def add(self, source: int, target: int, wish: int, most: int) -> None:
        """One more message; its colour is free at both ends, after a path has exchanged two colours if need be.

        It is the ``wish`` where that is one of ``most`` colours and free. No more than ``most`` are ever taken, since a
        process with fewer messages than that has one of them free.
        """
        colour, other = wish, self.receives.free(target)
        if not 0 <= wish < most or wish in self.sends[source] or wish in self.receives[target]:
            colour = self.sends.free(source)
        if colour in self.receives[target]:
            if other not in self.sends[source]:
                colour = other
            else:
                self._exchange(target, colour, other)
        self.sends[source][colour] = target
        self.receives[target][colour] = source

    def _exchange(self, target: int, colour: int, other: int) -> None:
        """Free ``colour`` at ``target``, where ``other`` is free: the path of the two from there exchanges them.

        It reaches sending processes by ``colour`` only, and so never the one where ``colour`` is free.
        """
        path: list[tuple[int, int, int]] = []
        at, follow, receiving = target, colour, True
        while True:
            side = self.receives if receiving else self.sends
            partner = side[at].get(follow)
            if partner is None:
                break
            path.append((partner, at, follow) if receiving else (at, partner, follow))
            at, follow, receiving = partner, colour + other - follow, not receiving
        for source, receiver, taken in path:
            self.sends.release(source, taken)
            self.receives.release(receiver, taken)
        for source, receiver, taken in path:
            self.sends[source][colour + other - taken] = receiver
            self.receives[receiver][colour + other - taken] = source
