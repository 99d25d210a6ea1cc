"""Fused attention under AutoTP: saved with ``attach`` before and after real steps, converted, and loaded elsewhere.

``fused_run.py ROOT KIND...`` runs each kind of ``live_models`` into ROOT/KIND. It is loaded at the degree it was saved
at and, where DeepSpeed can change the degree, at 1. ``full.pt`` is every parameter as it was before anything was cut.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from forks import fork_ranks, is_before  # sets the environment of what is imported next

# isort: split
import deepspeed
import live_models
import torch
import train

import deepspeed_affine

TIMEOUT = 400.0
DEGREE = 2
START, TRAINED = "start", "trained"
DRIFTING = ("bigcode",)
"""Where ranks hold the same rows and do not reduce their gradients, so that the rows drift apart."""


def build_engine(kind: str, degree: int, *, load_universal: bool = False) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    if degree > 1:
        config["tensor_parallel"] = {"autotp_size": degree}
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    model = live_models.build(kind)
    if load_universal:
        for param in model.parameters():
            param.data.fill_(0.5)
    stale = degree > 1 and is_before(0, 19, 6)
    return deepspeed.initialize(
        model=model, config=config, model_parameters=None if stale else list(model.parameters())
    )[0]


def train_steps(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        tokens = torch.randint(0, live_models.VOCAB, (2, 5), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        with torch.no_grad():
            engine.step()
        losses.append(float(loss.detach()))
    return losses


def held(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's weights and states; data parallelism is one rank wide here."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, param in engine.module.named_parameters():
        entry = {"fp32": safe_get_full_fp32_param(param).clone().reshape(param.shape)}
        for key in train.state_keys(param):
            entry[key] = safe_get_full_optimizer_state(param, key).clone().reshape(param.shape)
        found[name] = entry
    return found


def run_save(kind: str, folder: Path) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    if rank == 0:
        model = live_models.build(kind)
        torch.save({name: param.detach().clone() for name, param in model.named_parameters()}, folder / "full.pt")
    engine = build_engine(kind, DEGREE)
    handle = deepspeed_affine.attach(engine)
    engine.save_checkpoint(str(folder), tag=START)
    weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    losses = train_steps(engine, 0, 2)
    engine.save_checkpoint(str(folder), tag=TRAINED)
    layouts = {name: live.layout.to_dict() for name, live in handle.params.items()}
    truth = {"start": weights, "trained": held(engine), "layouts": layouts, "next": train_steps(engine, 2, 2)}
    torch.save(truth, folder / f"saved{rank}.pt")
    return {
        "losses": losses,
        "sources": {name: live.source for name, live in handle.params.items()},
        "kinds": sorted(
            {type(module).__name__ for module in engine.module.modules() if hasattr(module, "_tp_partition")}
        ),
    }


def convert(kind: str, folder: Path, tag: str) -> dict[str, Any]:
    from deepspeed_affine.cli import ds_to_universal

    target = folder / f"universal_{tag}"
    options = ["--affine", "--input_folder", str(folder / tag), "--output_folder", str(target), "--no-fsync"]
    drifts = kind in DRIFTING and tag == TRAINED
    if drifts and ds_to_universal(options) != 2:
        raise RuntimeError("rows that drifted apart were converted without a word")
    code = ds_to_universal([*options, *(["--on-drift", "average"] if drifts else [])])
    if code:
        raise RuntimeError(f"converting {tag} ended with exit code {code}")
    return {}


def convert_stock(folder: Path, tag: str) -> dict[str, Any]:
    return train.convert_stock(folder / tag, folder / f"stock_{tag}")


def run_load(kind: str, folder: Path, degree: int) -> dict[str, Any]:
    engine = build_engine(kind, degree, load_universal=True)
    with deepspeed_affine.attach(engine) as handle:
        path, _ = engine.load_checkpoint(str(folder), tag=f"universal_{TRAINED}")
        if path is None:
            raise RuntimeError("load_checkpoint loaded nothing")
        layouts = {name: live.layout.to_dict() for name, live in handle.params.items()}
    truth = {"held": held(engine), "layouts": layouts}
    truth["next"] = train_steps(engine, 2, 2)
    torch.save(truth, folder / f"loaded{degree}_{torch.distributed.get_rank()}.pt")
    return {"steps": engine.global_steps}


def run_kind(kind: str, root: Path) -> dict[str, Any]:
    folder = root / kind
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}

    def stage(name: str, world: int, work: Any) -> bool:
        done[name] = fork_ranks(world, work, folder / f"log_{name}", TIMEOUT)
        return bool(done[name]["ok"])

    if stage("save", DEGREE, partial(run_save, kind, folder)):
        for tag in (START, TRAINED):
            stage(f"convert_{tag}", 1, partial(convert, kind, folder, tag))
        # Before the first step there are no states, and DeepSpeed's converter then stops in every map.
        stage(f"stock_{TRAINED}", 1, partial(convert_stock, folder, TRAINED))
        degrees = [DEGREE] if is_before(0, 19, 8) else [DEGREE, 1]
        for degree in degrees if done[f"convert_{TRAINED}"]["ok"] else []:
            stage(f"load{degree}", degree, partial(run_load, kind, folder, degree))
    return done


def main(root: Path, kinds: list[str]) -> None:
    for kind in kinds:
        done = run_kind(kind, root)
        (root / kind / "done.json").write_text(json.dumps(done), encoding="utf-8")
        print(f"{kind}: " + ", ".join(f"{k} {'ok' if v['ok'] else v['error']}" for k, v in done.items()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
