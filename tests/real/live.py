"""Attached runs: trains and saves with ``attach``, converts, and loads with stock DeepSpeed and ``attach``.

``live.py ROOT PAIR...`` makes every source of the pairs once, in ROOT/sources, and leaves there and in ROOT/PAIR what
the ranks held when they had saved and loaded.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import live_engines as engines  # sets the environment of what is imported next

# isort: split
import torch
import train
from live_cases import Pair, pair_named
from live_runs import Stage, run_pairs
from real_cases import Case

import deepspeed_affine

# Muon has DeepSpeed build an extension first.
TIMEOUT = 400.0


def run_save(case: Case, folder: Path) -> dict[str, Any]:
    engine = engines.live_engine(case, loads=False)
    handle = deepspeed_affine.attach(engine, info=engines.info_of(case))
    engines.take_steps(engine, case, 0, case.steps)
    client: dict[str, Any] = {"note": "saved with attach"}
    if case.model in ("hand_tp", "pipe"):
        client["universal_checkpoint_info"] = engines.info_of(case)
    client = deepspeed_affine.with_universal_info(client, engine)
    engine.save_checkpoint(str(folder), tag="saved", client_state=client)
    handle.detach()
    engines.keep(folder / "held", engine, case, linked=True)
    return {"emits": handle.emits}


def run_load(pair: Pair, universal: Path, folder: Path) -> dict[str, Any]:
    case = pair.target
    if pair.nodes:
        os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1")
    engine = engines.live_engine(case, loads=True, universal=True)
    with (
        deepspeed_affine.attach(engine, info=engines.info_of(case), **pair.attach) as handle,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        path, client = engine.load_checkpoint(str(universal.parent), tag=universal.name)
        if path is None:
            raise RuntimeError("load_checkpoint loaded nothing")
        sources = {name: live.source for name, live in handle.params.items()}
    engines.keep(folder / "held", engine, case)
    return {
        "note": client.get("note"),
        "sources": sources,
        "warned": [str(each.message) for each in said if "load_checkpoint" in str(each.message)],
    }


def run_stock_load(case: Case, universal: Path, folder: Path) -> dict[str, Any]:
    """DeepSpeed alone: its own converter's folder, its own loader, no ``attach``."""
    engine = engines.live_engine(case, loads=True, universal=True)
    if not engines.stock_load(engine, universal):
        raise RuntimeError("load_checkpoint loaded nothing")
    engines.keep(folder / "stock_held", engine, case)
    return {}


def damage(whole: Path, universal: Path, kind: str) -> dict[str, Any]:
    shutil.copytree(whole, universal)
    # It would say that something is missing before anybody looks at what.
    (universal / "affine_manifest.json").unlink()
    param = universal / "zero" / "up.weight"
    if kind == "number_step":
        for path in (universal / "zero").glob("*/step.pt"):
            torch.save(int(torch.load(path, weights_only=True)), path)
    elif kind == "missing_param":
        shutil.rmtree(param)
    elif kind == "missing_weights":
        (param / "fp32.pt").unlink()
    elif kind == "truncated":
        path = param / "exp_avg.pt"
        path.write_bytes(path.read_bytes()[:200])
    else:
        path = param / "fp32.pt"
        stored = torch.load(path, weights_only=True)
        if kind == "wrong_shape":
            stored["param"] = stored["param"].t().contiguous()
        elif kind == "fewer_rows":
            stored["param"] = stored["param"][:-1].clone()
        else:
            stored = stored[:-1].clone()
        torch.save(stored, path)
    return {}


def stages(pair: Pair, root: Path) -> Iterator[Stage]:
    source, folder, target = pair.source_folder(root), root / pair.name, pair.target.world
    saved, universal = source / "saved", pair.universal(root)
    whole = source / universal.name
    convert = partial(train.convert_affine, saved, whole, *pair.convert)
    yield Stage("save", source / "log_save", pair.source.world, partial(run_save, pair.source, source))
    yield Stage("convert", source / f"log_{whole.name}", 1, convert)
    if pair.damage:
        yield Stage("damage", folder / "log_damage", 1, partial(damage, whole, universal, pair.damage))
    yield Stage("load", folder / "log_load", target, partial(run_load, pair, universal, folder))
    if pair.stock:
        stock = source / "stock"
        yield Stage("stock", source / "log_stock", 1, partial(train.convert_stock, saved, stock))
        yield Stage(
            "stock_load", folder / "log_stock_load", target, partial(run_stock_load, pair.target, stock, folder)
        )


if __name__ == "__main__":
    run_pairs(pair_named, stages, TIMEOUT)
