"""Runs every live transfer of ``live_transfers.py`` in forked ranks: ``live_ranks.py ROOT`` writes ROOT/results.json.

One job moves everything that ends well or is refused. In the others a rank is lost in the middle of a large transfer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from live_transfers import (
    CASES,
    ENDINGS,
    FAULTS,
    FILLER,
    LARGE,
    LARGE_STAGING,
    WORLD,
    Move,
    each,
    on,
    one,
    split,
    tp2_to_two_singles,
    tp4_to_tp2,
)

from deepspeed_affine.errors import AffineError
from deepspeed_affine.execute.live import transfer
from deepspeed_affine.ir import replicated_map

SMALL = 32 << 10
LOST_SECONDS, JOB_SECONDS = 2.0, 400.0


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def differs(move: Move, rank: int, target: dict[str, torch.Tensor | None], unfilled: Any) -> list[str]:
    """The parameters whose shard is not that of F where the plan fills it, and untouched where it does not."""
    wrong = []
    for name in move.target:
        expected, found = move.shard(name, move.target, rank), target[name]
        if expected is None or found is None:
            continue
        expected = expected.clone()
        for region in unfilled.get(name, ()):
            for address in region.offsets():
                expected.view(-1).view(torch.int32)[address] = FILLER * 0x01010101
        if not same_bytes(expected, found):
            wrong.append(name)
    return wrong


def moved(move: Move, **options: Any) -> dict[str, Any]:
    """What came of the move in this process, None where it is no member."""
    group = dist.new_group(list(move.members)) if len(move.members) < WORLD else None
    if dist.get_rank() not in move.members:
        return {}
    rank = move.members.index(dist.get_rank())
    plan = move.plan()
    source = {name: move.shard(name, move.source, rank) for name in move.source}
    target = {name: move.blank(name, rank) for name in move.target}
    before = {name: None if shard is None else shard.clone() for name, shard in source.items()}
    calls: list[tuple[int, int]] = []
    report = transfer(
        {name: shard for name, shard in source.items() if shard is not None},
        target,
        plan,
        group,
        progress=lambda done, total: calls.append((done, total)),
        **{**move.options, **options},
    )
    done = [done for done, _ in calls]
    return {
        "differs": differs(move, rank, target, report.unfilled),
        "source_changed": [n for n, shard in source.items() if shard is not None and not same_bytes(shard, before[n])],
        "sent": [report.bytes_sent, plan.sent.get(rank, 0)],
        "received": [report.bytes_received, plan.received.get(rank, 0)],
        "copied": [report.bytes_copied, plan.traffic.get((rank, rank), 0)],
        "staging": report.staging_bytes,
        "batches": [report.batches, report.messages_sent, report.messages_received, report.rounds],
        "progress": [done == sorted(done), calls[-1] if calls else (0, 0)],
        "unfilled": {name: sum(region.numel for region in rows) for name, rows in report.unfilled.items()},
    }


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in CASES.items():
        found[name] = [moved(make(), staging_bytes=SMALL), moved(make())]
    found["one parameter"] = one_parameter()
    for name in FAULTS:
        found[name] = refused(name)
    found["after all that"] = [moved(tp4_to_tp2())]
    for name, make in LARGE.items():
        found[name] = measured(make())
    return found


def one_parameter() -> dict[str, Any]:
    """The plan of a single parameter, with tensors as they are."""
    move, rank = tp4_to_tp2(), dist.get_rank()
    target = move.blank("w", rank)
    report = transfer(move.shard("w", move.source, rank), target, move.plan().plans["w"])
    return {"differs": differs(move, rank, {"w": target}, report.unfilled), "sent": report.bytes_sent}


CHANGES: dict[str, dict[str, Any]] = {
    "overlapping plan": {"target_offset": 1},
    "offset below zero": {"source_offset": -1},
    "process below zero": {"source_rank": -1},
    "no scale": {"scale": 0.0},
}
"""Of the first segment of a plan: process 0's, which begins at address 0."""


def refused(what: str) -> dict[str, Any]:
    """What is raised where one rank has something else than the others, and whether its target is untouched."""
    move, rank = tp4_to_tp2(), dist.get_rank()
    plan: Any = move.plan()
    source, target = move.shard("w", move.source, rank), move.blank("w", rank)
    sources: Any = {"w": source}
    options: dict[str, Any] = {}
    if what == "other plan" and rank == 2:
        plan = between_two(move).plan()
    elif what == "other options":
        options = {"staging_bytes": SMALL * (2 if rank == 2 else 1)}
    elif what == "wrong dtype" and rank == 2:
        sources = {"w": source.to(torch.bfloat16)}
    elif what == "other dtype" and rank == 2:
        sources = {"w": source.view(torch.int32)}
    elif what == "too short" and rank == 2:
        sources = {"w": source.view(-1)[:-1]}
    elif what == "target too long" and rank == 1:
        target = torch.full((target.numel() + 1,), 3.0)
    elif what == "missing" and rank == 3:
        sources = {"w": None}
    elif what == "not dense" and rank == 1:
        target = torch.full((target.numel(), 2), 3.0)[:, 0]
    elif what == "meta" and rank == 2:
        sources = {"w": source.to("meta")}
    elif what == "shared memory" and rank == 0:
        sources = {"w": target.view(-1)[: source.numel()]}
    elif what == "no plan" and rank == 1:
        plan = None
    elif what == "bad staging" and rank == 0:
        options = {"staging_bytes": 5}
    elif what == "endless staging" and rank == 2:
        # No text has so many digits, and the others must hear of it all the same.
        options = {"staging_bytes": 10**5000}
    elif what == "endless power" and rank == 1:
        options = {"scale_power": -(10**5000)}
    elif what in CHANGES:
        first, *rest = plan.plans["w"].segments
        changed = replace(first, **CHANGES[what])
        plan = replace(plan, plans={"w": replace(plan.plans["w"], segments=(changed, *rest))})
    elif what == "bad progress" and rank == 2:
        options = {"progress": 5}
    elif what == "bad timeout" and rank == 3:
        options = {"timeout": "soon"}
    elif what == "two sides" and rank == 3:
        plan = replace(plan, same_ranks=False)
    elif what == "raises" and rank == 2:
        sources = Raising()
    before = None if target is None else target.clone()
    try:
        transfer(sources, {"w": target}, plan, **options)
    except AffineError as error:
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "untouched": target is None or same_bytes(target, before),
        }
    return {"kind": None}


def between_two(move: Move) -> Move:
    return replace(move, target={"w": on(split((64, 48), (31, 33)), each(0, 1), 4)})


class Raising(dict):
    def get(self, name: object, default: object = None) -> object:
        raise ZeroDivisionError("on purpose")


def measured(move: Move) -> dict[str, Any]:
    """How much more memory the process has taken at the most, beside the shards it was given."""
    group = dist.new_group(list(move.members))
    if dist.get_rank() not in move.members:
        return {}
    rank = dist.get_rank()
    plan = move.plan()
    source, target = move.shard("w", move.source, rank), move.blank("w", rank)
    # What a process takes for its first transfer alone is not the transfer's.
    small = tp2_to_two_singles()
    transfer({"w": small.shard("w", small.source, rank)}, {"w": small.blank("w", rank)}, small.plan(), group)
    base, peak, over = rss_anon(), [0], threading.Event()

    def sample() -> None:
        while not over.wait(0.002):
            peak[0] = max(peak[0], rss_anon())

    thread = threading.Thread(target=sample)
    thread.start()
    report = transfer({"w": source}, {"w": target}, plan, group, staging_bytes=LARGE_STAGING)
    over.set()
    thread.join()
    return {
        "differs": differs(move, rank, {"w": target}, report.unfilled),
        "staging": report.staging_bytes,
        "grown": max(0, peak[0] - base),
        "moved": report.bytes_sent + report.bytes_received + report.bytes_copied,
        "rounds": report.rounds,
    }


def rss_anon() -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(rows["RssAnon"].split()[0]) << 10


def lost(how: str) -> Callable[[], dict[str, Any]]:
    """One of three is lost in the middle: every other ends with an error."""

    def work() -> dict[str, Any]:
        rank, number = dist.get_rank(), getattr(signal, how.split()[0])
        idle = "nothing to send" in how
        move = to_last() if idle else all_to_all()
        plan = move.plan()
        source, target = ({"w": shard} for shard in (move.shard("w", move.source, rank), move.blank("w", rank)))
        pids: list[int] = [0] * 3
        dist.all_gather_object(pids, os.getpid())
        # Who has nothing to send makes no progress of its own.
        speaks = 0 if idle else 1
        count = 0

        def progress(done: int, total: int) -> None:
            nonlocal count
            count += 1
            if rank == speaks and (done == total if "last" in how else count == 5):
                os.kill(pids[1], number)

        began = time.monotonic()
        try:
            transfer(source, target, plan, staging_bytes=SMALL, timeout=LOST_SECONDS, progress=progress)
        except AffineError as error:
            return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
        return {"kind": None}

    return work


def all_to_all() -> Move:
    shape = (96, 4096)
    return one(on(split(shape, (32,) * 3), each(0, 1, 2), 4), on(replicated_map(shape, 1), {0: (0, 1, 2)}, 4))


def to_last() -> Move:
    """From process 0 to process 2, while process 1 looks on."""
    shape = (96, 4096)
    return one(on(replicated_map(shape, 1), {0: (0,)}, 4), on(replicated_map(shape, 1), {0: (2,)}, 4))


def job(world: int, work: Callable[[], dict[str, Any]], folder: Path, expected: int) -> list[Any]:
    """The results of all ranks, None of those that left none; all have ended afterwards.

    Where no more than ``expected`` are to come, the rest is killed as soon as they have.
    """
    folder.mkdir(parents=True)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            run(world, rank, work, folder)
        children.append(child)
    end = time.monotonic() + JOB_SECONDS
    running = set(children)
    while running and time.monotonic() < end and len(list(folder.glob("*.json"))) < expected:
        running -= {child for child in running if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    if expected == world:
        grace = time.monotonic() + 10
        while running and time.monotonic() < grace:
            running -= {child for child in running if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.02)
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [
        json.loads(path.read_text()) if (path := folder / f"{rank}.json").exists() else None for rank in range(world)
    ]


def run(world: int, rank: int, work: Callable[[], dict[str, Any]], folder: Path) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        dist.barrier()
        result = work()
        part = folder / f"{rank}.part"
        part.write_text(json.dumps(result), encoding="utf-8")
        part.rename(folder / f"{rank}.json")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main(root: Path) -> None:
    results = {"moved": job(WORLD, everything, root / "moved", WORLD)}
    for how in ENDINGS:
        results[how] = job(3, lost(how), root / how.replace(" ", "_"), 2)
    (root / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
