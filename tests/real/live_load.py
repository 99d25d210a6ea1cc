"""Runs of ``load_checkpoint``: stock engines train and save, other engines load what was converted and train on.

``live_load.py ROOT PAIR...`` makes every source of the pairs once, in ROOT/sources, and leaves there and in ROOT/PAIR
what the ranks held when they had saved and loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import live_engines as engines  # sets the environment of what is imported next

# isort: split
import live_direct
import torch
import train
from forks import is_before
from live_runs import Stage, run_pairs
from load_cases import Pair, pair_named
from real_cases import Case

import deepspeed_affine


def run_source(case: Case, folder: Path) -> dict[str, Any]:
    engine = engines.live_engine(case, loads=False)
    engines.take_steps(engine, case, 0, case.steps)
    client: dict[str, Any] = {"note": "saved by stock", "epoch": torch.tensor([3, 4])}
    info = engines.info_of(case)
    if info is not None:
        client["universal_checkpoint_info"] = info
    engine.save_checkpoint(str(folder), tag="saved", client_state=client)
    engines.keep(folder / "held", engine, case, linked=True)
    return {}


def convert(pair: Pair, source: Path, target: Path) -> dict[str, Any]:
    if pair.stock_folder:
        return train.convert_stock(source, target)
    # 0.18.9 forgets to list what every rank holds whole.
    forgets = pair.source.tp > 1 and pair.source.model in train.AUTOTP_MODELS and is_before(0, 19, 4)
    return train.convert_affine(source, target, *(["--identical-shards", "replicated"] if forgets else []))


def run_load(pair: Pair, universal: Path, folder: Path) -> dict[str, Any]:
    rank, case = torch.distributed.get_rank(), pair.target
    if pair.local_ranks:
        os.environ["LOCAL_RANK"] = str(rank % pair.local_ranks)
    engine = engines.live_engine(case, loads=True)
    engines.take_steps(engine, case, 90, pair.warm)
    before = engines.gather(engine, case) if pair.error else None
    load_dir = universal.parent
    if rank == 1 and pair.fault == "elsewhere":
        load_dir /= "nowhere"
    if rank == 1 and pair.fault in ("reading", "bug"):
        make_fail(pair.fault)
    tag = "saved" if pair.ordinary else universal.name
    if rank == 1 and pair.fault == "lost":
        load_dir = live_direct.without_a_file(load_dir / tag, folder)
    began = time.monotonic()
    try:
        report = deepspeed_affine.load_checkpoint(engine, load_dir, tag, **dict(pair.options))
    except Exception as error:
        if pair.error is None:
            raise
        changed = [] if pair.fault == "reading" else engines.different(before, engines.gather(engine, case))
        return {"refused": str(error), "kind": type(error).__name__, "changed": changed}
    seconds = time.monotonic() - began
    held = engines.keep(folder / "held", engine, case)
    return {
        "direct": live_direct.run_direct(engine, pair, universal.with_name("saved"), held),
        "stock": run_stock(case, universal, held) if pair.stock else None,
        "note": report.client_state.get("note"),
        "epoch": report.client_state["epoch"].tolist(),
        "not_restored": [str(row) for row in report.not_restored],
        "padding": dict(report.padding),
        "bytes_read": report.bytes_read,
        "text": str(report),
        "seconds": seconds,
    }


def run_stock(case: Case, universal: Path, held: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed's own loader makes of the same folder in an engine beside the first, and how it differs."""
    engine = engines.live_engine(case, loads=True, universal=True)
    loaded = engines.stock_load(engine, universal)
    differs = engines.different(engines.gather(engine, case), held) if loaded else ["nothing was loaded"]
    return {"differs": differs, "next_losses": engines.take_steps(engine, case, case.steps, 4)}


def make_fail(kind: str) -> None:
    from deepspeed_affine.hooks import offered

    def fail(*_: Any, **__: Any) -> None:
        if kind == "bug":
            raise RuntimeError("made to break")
        raise deepspeed_affine.CheckpointFormatError("made to fail")

    setattr(offered.Offered, "part" if kind == "bug" else "fill", fail)


def stages(pair: Pair, root: Path) -> Iterator[Stage]:
    source, folder = pair.source_folder(root), root / pair.name
    saved, universal = source / "saved", pair.universal(root)
    yield Stage("save", source / "log_save", pair.source.world, partial(run_source, pair.source, source))
    yield Stage("convert", source / f"log_{universal.name}", 1, partial(convert, pair, saved, universal))
    yield Stage("load", folder / "log_load", pair.target.world, partial(run_load, pair, universal, folder))


if __name__ == "__main__":
    run_pairs(pair_named, stages)
