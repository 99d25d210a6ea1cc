"""How long a live transfer takes beside the bare messages of the same bytes, and beside gathering F and cutting it.

``python benchmarks/transfer.py [--megabytes 256] [--runs 5]``: two processes of this machine, gloo, interleaved runs,
the best of each. Staging is what ``transfer`` held; gathering holds F and its parts besides.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from deepspeed_affine import ParamAffineMap, Placement, contiguous_split_map, plan_model, replicated_map, transfer

MESSAGE = 16 << 20
Side = tuple[ParamAffineMap, dict[int, tuple[int, ...]]]


def cases(shape: tuple[int, int]) -> dict[str, tuple[Side, Side]]:
    rows = contiguous_split_map(shape, (shape[0] // 2,) * 2, 0)
    columns = contiguous_split_map(shape, (shape[1] // 2,) * 2, 1)
    each, exchanged, both = {0: (0,), 1: (1,)}, {0: (1,), 1: (0,)}, {0: (0, 1)}
    whole = replicated_map(shape, 1)
    return {
        "rows, exchanged": ((rows, each), (rows, exchanged)),
        "rows to whole": ((rows, each), (whole, both)),
        "columns to whole": ((columns, each), (whole, both)),
        "columns to rows": ((columns, each), (rows, each)),
    }


def shard(full: torch.Tensor, side: Side, rank: int) -> torch.Tensor:
    layout, holders = side
    (location,) = [location for location, ranks in holders.items() if rank in ranks]
    return layout.extract(full, location)


def seconds(work: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def bare(nbytes: int, rank: int) -> None:
    sent, received = torch.ones(MESSAGE, dtype=torch.uint8), torch.empty(MESSAGE, dtype=torch.uint8)
    for start in range(0, nbytes, MESSAGE):
        count = min(MESSAGE, nbytes - start)
        operations = [
            dist.P2POp(dist.isend, sent[:count], 1 - rank),
            dist.P2POp(dist.irecv, received[:count], 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def gathered(source: torch.Tensor, axis: int, target: torch.Tensor, side: Side, rank: int) -> None:
    parts = [torch.empty_like(source) for _ in range(2)]
    dist.all_gather(parts, source)
    target.copy_(shard(torch.cat(parts, axis), side, rank))


def measured(full: torch.Tensor, before: Side, after: Side, rank: int, runs: int) -> str:
    """The row of one case."""
    plan = plan_model({"w": Placement(*after, 4)}, {"w": Placement(*before, 4)})
    source, expected = shard(full, before, rank), shard(full, after, rank)
    target = torch.zeros_like(expected)
    axis = 0 if source.shape[0] < full.shape[0] else 1
    times: list[list[float]] = [[], [], []]
    report = transfer({"w": source}, {"w": target}, plan)
    assert torch.equal(target, expected)
    for _ in range(runs):
        times[0].append(seconds(lambda: transfer({"w": source}, {"w": target}, plan)))
        times[1].append(seconds(lambda: bare(report.bytes_sent, rank)))
        times[2].append(seconds(lambda: gathered(source, axis, target, after, rank)))
        assert torch.equal(target, expected)
    best = " | ".join(f"{min(each):.3f} s" for each in times)
    return f"{best} | {report.bytes_sent >> 20} MiB | {report.staging_bytes >> 20} MiB"


def one(rank: int, store: str, megabytes: int, runs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    shape = (4096, (megabytes << 20) // (4096 * 4))
    full = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    if rank == 0:
        print("| | transfer | bare messages | gather and cut | sent by each | staging |")
        print("|---|---|---|---|---|---|")
    for name, (before, after) in cases(shape).items():
        row = measured(full, before, after, rank, runs)
        if rank == 0:
            print(f"| {name} | {row} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="size of F")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(one, (str(Path(folder, "store")), options.megabytes, options.runs), nprocs=2)


if __name__ == "__main__":
    main()
