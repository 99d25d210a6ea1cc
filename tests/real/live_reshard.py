"""Runs of ``ds_affine reshard``: stock engines train and save, other stock engines load what it made and train on.

``live_reshard.py ROOT PAIR...`` makes every source of the pairs once, in ROOT/sources, and leaves there and in
ROOT/PAIR what the ranks held when they had saved and loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import live_engines as engines  # sets the environment of what is imported next

# isort: split
import torch
import train
from live_runs import Stage, run_pairs
from real_cases import Case
from reshard_cases import Pair, pair_named

import deepspeed_affine

# Every data-parallel degree takes a whole number of them.
engines.ROWS = 12


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


def run_like(pair: Pair, folder: Path) -> dict[str, Any]:
    """The layout of the target's engine, as a checkpoint without a step or as it describes itself."""
    case = pair.target
    engine = engines.live_engine(case, loads=True)
    info = engines.info_of(case)
    if pair.described:
        layout = deepspeed_affine.describe(engine, info=info)
        if torch.distributed.get_rank() == 0:
            (folder / "layout.json").write_text(json.dumps(layout), encoding="utf-8")
        return {}
    client = {} if info is None else {"universal_checkpoint_info": info}
    engine.save_checkpoint(str(folder), tag="like", client_state=client)
    return {}


def run_reshard(pair: Pair, source: Path, folder: Path) -> dict[str, Any]:
    from deepspeed_affine.cli import ds_affine

    case = pair.target
    wanted = ["--dp", str(case.dp), "--zero-stage", str(case.stage)]
    if pair.like:
        wanted = ["--like", str(folder / "like")]
    if pair.described:
        wanted = ["--layout", str(folder / "layout.json")]
    folders = ["--input_folder", str(source), "--output_folder", str(folder / "resharded" / "made")]
    code = ds_affine(["reshard", *folders, *wanted, *pair.options, "--no-fsync"])
    if code:
        raise RuntimeError(f"exit code {code}")
    return {}


def run_load(pair: Pair, universal: Path, folder: Path) -> dict[str, Any]:
    case = pair.target
    engine = engines.live_engine(case, loads=True)
    # Without a tag, so that the file beside the folder must name it.
    path, client = engine.load_checkpoint(str(folder / "resharded"))
    if path is None:
        raise RuntimeError("load_checkpoint loaded nothing")
    link_states(engine)
    held = engines.keep(folder / "held", engine, case)
    return {
        "stock": run_universal(case, universal, held) if pair.stock else None,
        "note": client.get("note"),
        "epoch": client["epoch"].tolist(),
    }


def link_states(engine: Any) -> None:
    """Parameters know their states: DeepSpeed links them with the first step, and after it loads."""
    from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state as link

    optimizer = engine.optimizer
    low = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", ())
    flat = getattr(optimizer, "single_partition_of_fp32_groups", None) or getattr(
        optimizer, "fp32_groups_flat_partition", ()
    )
    for group, partition in zip(low, flat, strict=False):
        link(group, partition, optimizer.optimizer.state)


def run_universal(case: Case, universal: Path, held: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed makes of the converted source in an engine beside the first, and how it differs."""
    engine = engines.live_engine(case, loads=True, universal=True)
    loaded = engines.stock_load(engine, universal)
    differs = engines.different(engines.gather(engine, case), held) if loaded else ["nothing was loaded"]
    return {"differs": differs, "next_losses": engines.take_steps(engine, case, case.steps, 4)}


def stages(pair: Pair, root: Path) -> Iterator[Stage]:
    source, folder = pair.source_folder(root), root / pair.name
    saved, universal = source / "saved", pair.universal(root)
    yield Stage("save", source / "log_save", pair.source.world, partial(run_source, pair.source, source))
    yield Stage("convert", source / "log_convert", 1, partial(train.convert_affine, saved, universal))
    if pair.like or pair.described:
        yield Stage("like", folder / "log_like", pair.target.world, partial(run_like, pair, folder))
    yield Stage("reshard", folder / "log_reshard", 1, partial(run_reshard, pair, saved, folder))
    yield Stage("load", folder / "log_load", pair.target.world, partial(run_load, pair, universal, folder))


if __name__ == "__main__":
    run_pairs(pair_named, stages)
