"""Sharing work out over processes: by bytes, and the same in every process without a word between them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping

from deepspeed_affine.plan.conversion import ConversionPlan

__all__ = ["FILE_BYTES", "share_files", "shares"]

FILE_BYTES = 64 << 10
"""What a file costs beside its bytes, in bytes: it is created, synced and closed."""


def shares(items: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """The items' names dealt out to ``count`` processes so that none has much more than its part.

    The largest first, each to whoever has the least. So the largest share exceeds the average by less than the largest
    item. Equal ones are dealt in the order of their names: the order of ``items`` does not matter.
    """
    loads = [(0, process) for process in range(count)]
    dealt: list[list[str]] = [[] for _ in range(count)]
    for name, nbytes in sorted(items.items(), key=lambda item: (-item[1], item[0])):
        load, process = heapq.heappop(loads)
        dealt[process].append(name)
        heapq.heappush(loads, (load + nbytes, process))
    return tuple(map(tuple, dealt))


def share_files(plan: ConversionPlan, count: int, without: Collection[str] = ()) -> tuple[frozenset[str], ...]:
    """The files of the plan (but those in ``without``), by the process that is to write each.

    The states of one parameter stay together, since they share a folder, unless that alone would be more than a
    process's part.
    """
    sizes = {task.path: task.nbytes for task in plan.tensors}
    sizes.update((file.path, file.nbytes) for file in plan.objects)
    sizes.update((file.path, file.nbytes) for file in plan.copies)
    sizes = {path: nbytes + FILE_BYTES for path, nbytes in sizes.items() if path not in without}
    together: dict[str, list[str]] = defaultdict(list)
    for path in sizes:
        together[path.rpartition("/")[0] or path].append(path)
    part = sum(sizes.values()) / count
    bundles: dict[str, list[str]] = {}
    for folder, paths in together.items():
        if sum(sizes[path] for path in paths) <= part:
            bundles[folder] = paths
        else:
            bundles.update((path, [path]) for path in paths)
    dealt = shares({name: sum(sizes[path] for path in paths) for name, paths in bundles.items()}, count)
    return tuple(frozenset(path for name in names for path in bundles[name]) for names in dealt)
