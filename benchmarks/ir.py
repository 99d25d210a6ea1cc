"""How the IR's cost grows: with pieces, near-linearly; with elements, not at all.

    python benchmarks/ir.py

Prints validation times for 1k, 4k and 16k pieces of five layouts with the growth per fourfold, the same layout over 1 M
and 1 G elements, and the cost of meet, compose and the canonical form.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from itertools import pairwise

from deepspeed_affine.ir import (
    AffinePiece,
    ParamAffineMap,
    compose,
    contiguous_split_map,
    meet,
    segmented_map,
)

SIZES = (1024, 4096, 16384)


def one_axis(count: int) -> ParamAffineMap:
    """``count`` ranks with one row block each."""
    return contiguous_split_map((count * 3, 64), [3] * count, 0)


def grid(count: int) -> ParamAffineMap:
    """A square grid of tiles, one rank per tile: 128 x 128 at 16k."""
    side = int(count**0.5)
    width = 16 * side
    pieces = {
        r * side + c: [AffinePiece((16, 16), r * 16 * width + c * 16, (width, 1), 0, (16, 1), [r * side + c])]
        for r in range(side)
        for c in range(side)
    }
    return ParamAffineMap((width, width), dict.fromkeys(pieces, (16, 16)), pieces)


def block_cyclic(count: int) -> ParamAffineMap:
    """Blocks of 64 dealt to eight ranks in turn, one piece per block."""
    ranks = 8
    each = count // ranks
    pieces = {
        r: [AffinePiece((64,), (k * ranks + r) * 64, (1,), k * 64, (1,), [r]) for k in range(each)]
        for r in range(ranks)
    }
    return ParamAffineMap((count * 64,), dict.fromkeys(pieces, (each * 64,)), pieces)


def permuted(count: int) -> ParamAffineMap:
    """Every rank holds its row block transposed, so both sides run in another order."""
    pieces = {r: [AffinePiece((8, 32), r * 256, (32, 1), 0, (1, 8), [r])] for r in range(count)}
    return ParamAffineMap((count * 8, 32), dict.fromkeys(pieces, (32, 8)), pieces)


def improper(count: int) -> ParamAffineMap:
    """Digits that interleave: strides (1, 2) over extents (2, 6) name twelve neighbours out of order."""
    pieces = {r: [AffinePiece((2, 6), r * 12, (1, 2), 0, (1, 2), [r])] for r in range(count)}
    return ParamAffineMap((count * 12,), dict.fromkeys(pieces, (12,)), pieces)


LAYOUTS: dict[str, Callable[[int], ParamAffineMap]] = {
    "one cut axis": one_axis,
    "grid": grid,
    "block-cyclic": block_cyclic,
    "permuted": permuted,
    "improper": improper,
}


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def validate_seconds(layout: ParamAffineMap, repeats: int = 3) -> float:
    """The best of some validations; a map remembers a proof, so each one gets a copy."""
    best = float("inf")
    for _ in range(repeats):
        fresh = ParamAffineMap(layout.logical_shape, layout.shard_shapes, layout.pieces_by_rank)
        start = time.perf_counter()
        fresh.validate()
        best = min(best, time.perf_counter() - start)
    return best


def print_growth(sizes: tuple[int, ...]) -> None:
    print(f"{'validate, ms':<16}" + "".join(f"{size:>10}" for size in sizes) + "   growth per step")
    for name, build in LAYOUTS.items():
        times = [validate_seconds(build(size)) for size in sizes]
        growth = "  ".join(f"x{b / a:.1f}" for a, b in pairwise(times))
        print(f"{name:<16}" + "".join(f"{1000 * each:>10.1f}" for each in times) + f"   {growth}")


def print_elements() -> None:
    print("\nthe same 1024 pieces over more elements, ms")
    for label, width in (("1 M elements", 2**10), ("1 G elements", 2**20)):
        layout = contiguous_split_map((1024, width), [1] * 1024, 0)
        columns = contiguous_split_map((1024, width), [width // 1024] * 1024, 1)
        print(f"  {label}: rows {1000 * validate_seconds(layout):.1f}, columns {1000 * validate_seconds(columns):.1f}")


def print_algebra() -> None:
    print("\nalgebra, ms")
    wide = contiguous_split_map((50257, 12288), [1536] * 8, 1)
    other = contiguous_split_map((50257, 12288), [3072] * 4, 1)
    a, b = wide.pieces_by_rank[3][0], other.pieces_by_rank[1][0]
    print(f"  meet of two column blocks of 50257 x 12288: {1000 * seconds(lambda: meet(a, b)):.3f}")
    flat = [AffinePiece((1_000_003,), 1_000_003 * k, (1,), 0, (1,), [k]) for k in range(64)]
    shard = wide.pieces_by_rank[3]
    print(f"  compose one column shard with 64 flat fragments: {1000 * seconds(lambda: compose(shard, flat)):.2f}")
    outer = [AffinePiece((64,), 64 * k, (1,), 64 * k, (1,), [0]) for k in range(16384)]
    inner = [AffinePiece((64,), 64 * k + 32, (1,), 0, (1,), [k]) for k in range(16383)]
    print(f"  compose 16384 with 16383 blocks: {1000 * seconds(lambda: compose(outer, inner), 1):.0f}")
    fused = segmented_map((6144, 4096), [(4096, False), (2048, True)], 0, 8, [[512] * 8])
    print(f"  canonical form, fused weight over 8 ranks: {1000 * seconds(fused.canonical):.2f}")
    print(f"  canonical form, column split of 50257 x 12288 over 8 ranks: {1000 * seconds(wide.canonical):.2f}")
    cyclic = block_cyclic(16384)
    print(f"  canonical form, block-cyclic, 16384 pieces: {1000 * seconds(cyclic.canonical, 1):.0f}")
    order = list(range(2048))
    random.Random(0).shuffle(order)
    scrambled = ParamAffineMap(
        (2048 * 64,),
        {0: (2048 * 64,)},
        {0: [AffinePiece((64,), 64 * s, (1,), 64 * d, (1,), [0]) for d, s in enumerate(order)]},
    )
    print(f"  canonical form, 2048 blocks in random order: {1000 * seconds(scrambled.canonical, 1):.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quarter of the sizes, for a quick look")
    arguments = parser.parse_args()
    print_growth(tuple(size // 4 for size in SIZES) if arguments.small else SIZES)
    print_elements()
    print_algebra()


if __name__ == "__main__":
    main()
