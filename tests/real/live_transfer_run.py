"""Weights moved from live DeepSpeed engines into models and back, over two ranks; ``live_transfer_run.py ROOT``.

Each move says, rank by rank, which parameters are not what the engine's own full weights are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forks import fork_ranks  # sets the environment of what is imported next

# isort: split
import deepspeed
import fused_run
import live_models
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

import deepspeed_affine
from deepspeed_affine.execute.memory import rebuild
from deepspeed_affine.hooks.layouts import live_params

KIND = "codegen"


def engine_of(stage: int, tp: int) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 8} if stage == 3 else {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    if tp > 1:
        config["tensor_parallel"] = {"autotp_size": tp}
    model = live_models.build(KIND)
    engine = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]
    fused_run.train_steps(engine, 0, 1)
    return engine


def spoiled() -> nn.Module:
    model = live_models.build(KIND)
    for param in model.parameters():
        param.data.fill_(0.5)
    return model


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter in full, by what DeepSpeed gives and the ranks' shards put together."""
    found = {}
    lives = live_params(engine.module)
    for name, param in engine.module.named_parameters():
        shard = safe_get_full_fp32_param(param).clone()
        live = lives[name]
        if len(live.layout.ranks) > 1:
            rows: list[Any] = [None] * 2
            torch.distributed.all_gather_object(rows, shard)
            shard = rebuild(live.layout, dict(enumerate(rows)))
        found[name] = shard.reshape(live.layout.logical_shape)
    return found


def wrong(full: Mapping[str, torch.Tensor], model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if not torch.equal(param.detach(), full[name])]


def moved(source: Any, target: Any) -> dict[str, Any]:
    trained = deepspeed_affine.live_shards(source)
    serving = deepspeed_affine.live_shards(target, filled=True)
    plan = deepspeed_affine.plan_model(serving.placements, trained.placements)
    report = deepspeed_affine.transfer(trained.shards, serving.shards, plan)
    return {"params": len(plan.plans), "sent": report.bytes_sent, "copied": report.bytes_copied}


def loss_of(model: Any) -> float:
    tokens = torch.randint(0, live_models.VOCAB, (2, 5), generator=torch.Generator().manual_seed(77))
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def tensor_parallel() -> dict[str, Any]:
    """An engine cut over both ranks into a whole model on each; then other weights back into it."""
    engine, model = engine_of(1, 2), spoiled()
    full = whole(engine)
    done = moved(engine, model)
    losses = [loss_of(engine), loss_of(model)]
    into_model = wrong(full, model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    moved(model, engine)
    lives = live_params(engine.module)
    back = [
        name
        for name, param in engine.module.named_parameters()
        if not torch.equal(lives[name].layout.extract(full[name] * 0.5, lives[name].rank), param.detach())
    ]
    return {**done, "losses": losses, "wrong": into_model, "wrong_back": back, "changed": changed(full)}


def partitioned() -> dict[str, Any]:
    """An engine under ZeRO-3 over both ranks into a model that only the second has; and the other way refused."""
    engine = engine_of(3, 1)
    model = spoiled() if torch.distributed.get_rank() == 1 else None
    full = whole(engine)
    done = moved(engine, model)
    rank = torch.distributed.get_rank()
    sources = {
        "filled": (model, engine),
        "no model": ("a name", None),
        "absent": (engine if rank == 0 else None, model),
        "unlike": (spoiled().to(torch.bfloat16 if rank else torch.float32), None),
    }
    refusals = {}
    for name, (source, target) in sources.items():
        try:
            moved(source, target)
        except deepspeed_affine.AffineError as error:
            refusals[name] = str(error)
    left = [] if model is None else wrong(full, model)
    return {**done, "wrong": left, "changed": changed(full), "refusals": refusals}


def changed(full: Mapping[str, torch.Tensor]) -> int:
    """How many parameters the step has changed, so that the comparison is not of what was built."""
    return len(wrong(full, live_models.build(KIND)))


RUNS: dict[str, Callable[[], dict[str, Any]]] = {"tensor_parallel": tensor_parallel, "partitioned": partitioned}


def main(root: Path) -> None:
    done = {name: fork_ranks(2, work, root / name) for name, work in RUNS.items()}
    (root / "done.json").write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
