"""One rank of two that loads a checkpoint of some 300 MB straight into an engine of another topology; prints figures.

``direct_run.py PAIR RANK STORE FOLDER``; ``direct_run.py PAIR save FOLDER`` makes the checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", TORCH_COMPILE_DISABLE="1")
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import synthetic
import torch
from synthetic import COLUMN, REPLICATED, ROW, Cut, Param, World

LAYERS, WIDTH = 3, 2048
PAIRS = {
    "zero2_tp2_dp2_to_zero3_dp2": (World(stage=2, tp=2, dp=2, align=2), 3, 1),
    "zero3_dp3_to_zero1_tp2": (World(stage=3, dp=3), 1, 2),
    "zero1_tp4_to_zero1_tp2": (World(tp=4), 1, 2),
}


def full_of(index: int, shape: tuple[int, ...]) -> torch.Tensor:
    return synthetic.random_full(shape, index)


def kinds() -> dict[str, tuple[tuple[int, ...], Cut]]:
    found: dict[str, tuple[tuple[int, ...], Cut]] = {}
    for layer in range(LAYERS):
        found[f"layers.{layer}.up"] = ((WIDTH, WIDTH), COLUMN)
        found[f"layers.{layer}.down"] = ((WIDTH, WIDTH), ROW)
        found[f"layers.{layer}.norm"] = ((WIDTH,), REPLICATED)
    return found


def save(pair: str, folder: str) -> None:
    world = PAIRS[pair][0]
    params = []
    for index, (name, (shape, cut)) in enumerate(kinds().items()):
        full = full_of(index, shape)
        params.append(Param(name, full, cut, states={"exp_avg": full * 0.5, "exp_avg_sq": full.square()}))
    synthetic.make(world, params).save(folder)


class Unit:
    """The model parallel unit of two neighbours, or of none."""

    def __init__(self, rank: int, tp: int) -> None:
        self.tp, self.rank = tp, rank
        alone = [torch.distributed.new_group([each]) for each in (0, 1)][rank]
        self.model_group, self.data_group = (None, alone) if tp == 2 else (alone, None)

    def get_model_parallel_rank(self) -> int:
        return self.rank if self.tp == 2 else 0

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_group(self) -> Any:
        return self.model_group or torch.distributed.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return 0 if self.tp == 2 else self.rank

    def get_data_parallel_world_size(self) -> int:
        return 1 if self.tp == 2 else 2

    def get_data_parallel_group(self) -> Any:
        return self.data_group or torch.distributed.group.WORLD


def shard(full: torch.Tensor, cut: Cut, rank: int, tp: int) -> torch.Tensor:
    return cut.shards(full, tp)[rank if tp > 1 else 0]


def engine_of(stage: int, tp: int, rank: int) -> Any:
    import deepspeed

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.ParameterDict() for _ in range(LAYERS)])
    for name, (shape, cut) in kinds().items():
        _, layer, local = name.split(".")
        model.layers[int(layer)][local] = torch.nn.Parameter(shard(torch.zeros(shape), cut, rank, tp).clone())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 5_000_000},
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=Unit(rank, tp))[0]


def figure(path: str, name: str) -> int:
    rows = (line.split() for line in Path(path).read_text(encoding="ascii").splitlines())
    return next(int(row[1]) for row in rows if row[0] == name)


def resident() -> int:
    return 1024 * (figure("/proc/self/status", "RssAnon:") + figure("/proc/self/status", "RssShmem:"))


class Peak(threading.Thread):
    """The most memory this process had, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.most = resident()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.003):
            self.most = max(self.most, resident())


def wrong(engine: Any, tp: int, rank: int) -> list[str]:
    """The fragments that do not hold what was saved."""
    from deepspeed_affine.hooks.optimizers import fragments

    found = []
    places = {name: (index, shape, cut) for index, (name, (shape, cut)) in enumerate(kinds().items())}
    for fragment in fragments(engine):
        index, shape, cut = places[fragment.name]
        mine = shard(full_of(index, shape), cut, rank, tp).flatten()[fragment.start :][: fragment.numel]
        states = fragment.states()
        good = torch.equal(fragment.master, mine)
        good = good and torch.equal(states["exp_avg"], mine * 0.5) and torch.equal(states["exp_avg_sq"], mine.square())
        found += [] if good else [fragment.name]
    return found


def run(pair: str, rank: int, store: str, folder: str) -> dict[str, Any]:
    import deepspeed

    import deepspeed_affine

    world, stage, tp = PAIRS[pair]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = "0"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    engine = engine_of(stage, tp, rank)
    info = synthetic.uc_info(world, [Param(name, torch.empty(0), cut) for name, (_, cut) in kinds().items()])
    # What is imported on the way is no part of the load.
    _ = deepspeed_affine.load_checkpoint
    peak = Peak()
    before = figure("/proc/self/io", "rchar:")
    peak.start()
    report = deepspeed_affine.load_checkpoint(engine, folder, info=info if tp > 1 else None)
    peak.over.set()
    read = figure("/proc/self/io", "rchar:") - before
    held = sum(part.tensor.nbytes * 3 for part in partitions(engine))
    return {
        "read": read,
        "needed": report.bytes_read,
        "held": held,
        "extra": peak.most - peak.first,
        "wrong": wrong(engine, tp, rank),
    }


def partitions(engine: Any) -> list[Any]:
    from deepspeed_affine.hooks.optimizers import partitions as of

    return of(engine)


if __name__ == "__main__":
    if sys.argv[2] == "save":
        save(sys.argv[1], sys.argv[3])
    else:
        print(json.dumps(run(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])), flush=True)
        # DeepSpeed keeps its groups, and a thread of one that drops its last tensor while Python ends aborts.
        os._exit(0)
