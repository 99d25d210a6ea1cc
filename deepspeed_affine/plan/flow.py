"""Maximum flow by Dinic's algorithm, in whole numbers."""

from __future__ import annotations

from collections import deque

__all__ = ["Network"]


class Network:
    """A directed graph with capacities; node numbers run from zero."""

    __slots__ = ("_edges", "_head", "_room")

    def __init__(self, nodes: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(nodes)]
        self._head: list[int] = []
        self._room: list[int] = []

    def connect(self, start: int, end: int, capacity: int) -> None:
        """Add an edge. Edge ``e`` and its reverse ``e ^ 1`` are neighbours in the lists."""
        self._edges[start].append(len(self._head))
        self._edges[end].append(len(self._head) + 1)
        self._head += [end, start]
        self._room += [capacity, 0]

    def maximum_flow(self, source: int, sink: int) -> int:
        """Send as much as fits from ``source`` to ``sink`` and return how much; O(V**2 E), as a rule far less."""
        total = 0
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return total
            total += self._blocking_flow(source, sink, level)

    def reachable(self, source: int) -> set[int]:
        """The nodes to which more could still be sent: after ``maximum_flow``, the source's side of a minimum cut."""
        return {node for node, depth in enumerate(self._levels(source)) if depth >= 0}

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self._edges)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                end = self._head[edge]
                if self._room[edge] and level[end] < 0:
                    level[end] = level[node] + 1
                    queue.append(end)
        return level

    def _blocking_flow(self, source: int, sink: int, level: list[int]) -> int:
        head, room = self._head, self._room
        at = [0] * len(self._edges)
        total = 0
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = min([room[edge] for edge in path])
                total += amount
                for edge in path:
                    room[edge] -= amount
                    room[edge ^ 1] += amount
                full = next(number for number, edge in enumerate(path) if not room[edge])
                node = head[path[full] ^ 1]
                del path[full:]
                continue
            edges = self._edges[node]
            while at[node] < len(edges):
                edge = edges[at[node]]
                if room[edge] and level[head[edge]] == level[node] + 1:
                    break
                at[node] += 1
            if at[node] < len(edges):
                path.append(edges[at[node]])
                node = head[edges[at[node]]]
            elif not path:
                return total
            else:
                # Nothing more gets through this node: step back and pass it by.
                node = head[path.pop() ^ 1]
                at[node] += 1
