"""Plan transfers beside DeepSpeed 0.19.8's planner, at sizes it takes and at sizes it refuses.

    python benchmarks/plan.py [--runs 5]

Every row is one run of both planners on the same maps, fresh objects each time, medians of the runs. "ratio" is theirs
over ours. A refusal is printed with DeepSpeed's own words.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import itertools

from deepspeed.checkpoint import affine as stock_affine
from deepspeed.checkpoint import affine_transfer as stock

from deepspeed_affine.ir import AffinePiece, ParamAffineMap
from deepspeed_affine.plan.balance import Demand, assign, heaviest, lower_bound
from deepspeed_affine.plan.grid import Topology, state_placements, weight_placements
from deepspeed_affine.plan.model import plan_model
from deepspeed_affine.plan.shapes import MODELS, llama_tensors
from deepspeed_affine.plan.transfer import plan_transfer

Maker = Callable[[int], tuple[ParamAffineMap, ParamAffineMap]]


def rows(pieces: int, ranks: int, shift: int) -> ParamAffineMap:
    """Blocks of four rows dealt out in turn, the cuts moved by ``shift`` rows."""
    height, width = 4 * pieces, 8
    cuts = [0, *range(shift or 4, height, 4), height]
    heights = dict.fromkeys(range(ranks), 0)
    found: dict[int, list[AffinePiece]] = {rank: [] for rank in range(ranks)}
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        rank = number % ranks
        shape, strides = (stop - start, width), (width, 1)
        found[rank].append(AffinePiece(shape, start * width, strides, heights[rank] * width, strides, [rank]))
        heights[rank] += stop - start
    return ParamAffineMap((height, width), {rank: (n, width) for rank, n in heights.items()}, found)


def grid(side: int, ranks: int, shift: int) -> ParamAffineMap:
    """A square of side by side blocks of four by four, dealt out in turn, the cuts moved by ``shift`` on both axes."""
    extent = 4 * side
    cuts = [0, *range(shift or 4, extent, 4), extent]
    spans = list(itertools.pairwise(cuts))
    sizes = dict.fromkeys(range(ranks), 0)
    found: dict[int, list[AffinePiece]] = {rank: [] for rank in range(ranks)}
    for number, (top, bottom) in enumerate(spans):
        for other, (left, right) in enumerate(spans):
            rank = (number * len(spans) + other) % ranks
            shape = (bottom - top, right - left)
            at = top * extent + left
            found[rank].append(AffinePiece(shape, at, (extent, 1), sizes[rank], (right - left, 1), [rank]))
            sizes[rank] += shape[0] * shape[1]
    return ParamAffineMap((extent, extent), {rank: (n,) for rank, n in sizes.items()}, found)


def columns(pieces: int, ranks: int, shift: int) -> ParamAffineMap:
    """Blocks of four columns of a matrix of sixteen rows, dealt out in turn."""
    width = 4 * pieces
    cuts = [0, *range(shift or 4, width, 4), width]
    found: dict[int, list[AffinePiece]] = {rank: [] for rank in range(ranks)}
    widths = dict.fromkeys(range(ranks), 0)
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        widths[number % ranks] += stop - start
    filled = dict.fromkeys(range(ranks), 0)
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        rank = number % ranks
        strides = (widths[rank], 1)
        found[rank].append(AffinePiece((16, stop - start), start, (width, 1), filled[rank], strides, [rank]))
        filled[rank] += stop - start
    return ParamAffineMap((16, width), {rank: (16, n) for rank, n in widths.items()}, found)


KINDS: dict[str, Maker] = {
    "rows, 4 to 8 ranks": lambda n: (rows(n, 4, 0), rows(n, 8, 2)),
    "rows, 512 to 256 ranks": lambda n: (rows(n, min(512, n // 2), 0), rows(n, min(256, n // 4), 2)),
    "columns, 4 to 8 ranks": lambda n: (columns(n, 4, 0), columns(n, 8, 2)),
    "grid, 4 to 8 ranks": lambda n: (grid(round(n**0.5), 4, 0), grid(round(n**0.5), 8, 2)),
}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(make: Maker, pieces: int, runs: int) -> None:
    ours, theirs, said = [], [], ""
    segments: tuple[object, object] = ("", "")
    for _ in range(runs):
        source, target = make(pieces)
        spent, plan = timed(lambda target=target, source=source: plan_transfer(target, source, policy="lowest"))
        ours.append(spent)
        stock_source = stock_affine.ParamAffineMap.from_dict(source.to_dict())
        stock_target = stock_affine.ParamAffineMap.from_dict(target.to_dict())
        segments = (len(plan.segments), "")
        if said:
            continue
        try:
            spent, other = timed(lambda t=stock_target, s=stock_source: stock.plan_transfer(t, s))
        except stock.AffineTransferError as error:
            said = str(error)
        else:
            theirs.append(spent)
            segments = (len(plan.segments), len(other.segments))
    mine = statistics.median(ours)
    print(f"{pieces:>8}{mine * 1000:>11.1f} ms{segments[0]:>9}", end="")
    if theirs and not said:
        other_time = statistics.median(theirs)
        print(f"{other_time * 1000:>11.1f} ms{segments[1]:>9}{other_time / mine:>9.1f}x")
    else:
        print(f"   refused: {said[:80]}")


def balance() -> None:
    import random

    print("\nbalance: 8 senders, 60 regions, 1 to 4 holders, 4 KiB to 256 MiB, seeds 0 to 299; heaviest sender / bound")
    kinds = {"balanced": {}, "without sharing regions": {"split_bytes": None}}
    ratios: dict[str, list[float]] = {"lowest": [], **{name: [] for name in kinds}}
    for seed in range(300):
        rng = random.Random(seed)
        demands = [
            Demand(100 + j, tuple(sorted(rng.sample(range(8), rng.randint(1, 4)))), int(2 ** rng.uniform(12, 28)))
            for j in range(60)
        ]
        bound = lower_bound(demands)
        ratios["lowest"].append(heaviest(demands, [((min(d.holders), d.nbytes),) for d in demands]) / bound)
        for name, options in kinds.items():
            ratios[name].append(heaviest(demands, assign(demands, **options)) / bound)
    for name, found in ratios.items():
        print(f"  {name:<26} mean {statistics.mean(found):.3f}  worst {max(found):.3f}")


MOVES = [
    ("tp8,pp4,dp64,zero1", "tp4,pp8,dp32,zero1"),
    ("tp8,pp4,dp64,zero3", "tp4,pp8,dp32,zero3"),
    ("tp8,pp4,dp64,zero1", "tp1,pp1,dp1024,zero3"),
]


def whole_models() -> None:
    print(
        "\nllama-70b, 2,048 ranks to 1,024; heaviest sender over the least possible, balanced and lowest side by side"
    )
    print(
        f"{'source':<21}{'target':<22}{'what':<9}{'seconds':>8}{'segments':>11}{'moved GB':>10}{'heaviest GB':>12}"
        f"{'balanced':>10}{'lowest':>8}{'peak MB':>9}"
    )
    tensors = llama_tensors(MODELS["llama-70b"])
    for before, after in MOVES:
        for what, place, width in (("weights", weight_placements, 2), ("states", state_placements, 12)):
            placed = [place(tensors, Topology.parse(text), width) for text in (before, after)]
            spent, plan = timed(lambda p=placed: plan_model(p[1], p[0], bound=True))
            heavy = max(plan.sent.values())
            lowest = max(plan_model(placed[1], placed[0], policy="lowest").sent.values())
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            bound = plan.balance.bound if plan.balance else 0
            print(
                f"{before:<21}{after:<22}{what:<9}{spent:>8.1f}{plan.segments:>11,}{plan.moved_bytes / 1e9:>10.0f}"
                f"{heavy / 1e9:>12.2f}{heavy / bound:>10.3f}{lowest / bound:>8.1f}{peak:>9.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    for name, make in KINDS.items():
        print(f"{name}\n{'pieces':>8}{'ours':>14}{'segments':>9}{'DeepSpeed':>14}{'segments':>9}{'ratio':>10}")
        for pieces in (64, 256, 1024, 4096, 16384):
            measure(make, pieces, runs if pieces <= 1024 else min(runs, 3))
    balance()
    whole_models()


if __name__ == "__main__":
    main()
