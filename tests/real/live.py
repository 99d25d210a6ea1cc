"""Attached runs: trains and saves with ``attach``, converts, and loads with stock DeepSpeed and ``attach``.

``live.py ROOT PAIR...`` runs each pair into ROOT/PAIR, in forked ranks as ``train.py`` does, and leaves there what the
ranks held: ``saved/rank0.pt`` when they saved, ``held/rank0.pt`` when they had loaded.
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import train  # sets the environment that torch and DeepSpeed read when they are imported

# isort: split
import deepspeed
import real_models as models
import torch
from live_cases import Pair, pair_named
from real_cases import Case
from train_user_cases import Few

import deepspeed_affine

PIPE_INFO = {
    "universal_checkpoint_version": 0.2,
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.word_embeddings\.weight"],
}
# Muon has DeepSpeed build an extension first.
TIMEOUT = 400.0
_build_model = train.build_model


def build_model(case: Case) -> torch.nn.Module:
    if case.model == "few":
        return Few()
    if case.model == "hand_tp":
        # Each degree pads the thirteen tokens to a height of its own.
        vocab = {1: 13, 2: 14, 4: 16}[case.tp]
        rank = torch.distributed.get_rank() % case.tp
        return models.HandTp(rank, case.tp, vocab=vocab)
    return _build_model(case)


train.build_model = build_model


def few_groups(model: Few) -> list[dict[str, Any]]:
    return [
        {"params": [model.embed.weight, model.head.weight]},
        {"params": [model.scale], "weight_decay": 0.0},
        {"params": [model.shift, model.other], "lr": 3e-2},
    ]


def build_engine(case: Case, *, load_universal: bool) -> Any:
    if case.model != "few":
        return train.build_engine(case, load_universal=load_universal)
    torch.manual_seed(4321 if load_universal else 1234)
    config = train.build_config(case)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    model = Few()
    return deepspeed.initialize(model=model, config=config, model_parameters=few_groups(model))[0]


def info_of(case: Case) -> dict[str, Any] | None:
    return {"hand_tp": models.HAND_TP_INFO, "pipe": PIPE_INFO}.get(case.model)


def client_state(engine: Any, case: Case) -> dict[str, Any]:
    client: dict[str, Any] = {"note": "saved with attach"}
    if case.model in ("hand_tp", "pipe"):
        client["universal_checkpoint_info"] = info_of(case)
    return deepspeed_affine.with_universal_info(client, engine)


def run_save(case: Case, folder: Path) -> dict[str, Any]:
    engine = build_engine(case, load_universal=False)
    handle = deepspeed_affine.attach(engine, info=info_of(case))
    losses = train.train_steps(engine, case, 0, case.steps)
    engine.save_checkpoint(str(folder), tag=f"global_step{case.steps}", client_state=client_state(engine, case))
    handle.detach()
    truth = train.gather_truth(engine, case)
    truth["losses"] = losses
    truth["next_losses"] = train.train_steps(engine, case, case.steps, 2)
    keep(folder / "saved", truth)
    return {"losses": losses, "emits": handle.emits}


def run_load(case: Case, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    engine = build_engine(case, load_universal=True)
    with (
        deepspeed_affine.attach(engine, info=info_of(case), **options) as handle,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        path, client = engine.load_checkpoint(str(folder), tag="universal")
        if path is None:
            raise RuntimeError("load_checkpoint loaded nothing")
        sources = {name: live.source for name, live in handle.params.items()}
    held = train.gather_truth(engine, case)
    steps = engine.global_steps
    held["tp_rank"] = torch.distributed.get_rank() % case.tp
    held["losses"] = train.train_steps(engine, case, case.steps, 2)
    keep(folder / "held", held)
    return {
        "global_steps": steps,
        "note": client.get("note"),
        "sources": sources,
        "warned": [str(each.message) for each in said if "load_checkpoint" in str(each.message)],
    }


def keep(folder: Path, held: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(held, folder / f"rank{torch.distributed.get_rank()}.pt")


def damage(universal: Path, kind: str) -> None:
    import shutil

    param = universal / "zero" / "up.weight"
    if kind == "missing_param":
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


def run_pair(pair: Pair, root: Path) -> dict[str, Any]:
    folder = root / pair.name
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    source = folder / f"global_step{pair.source.steps}"
    stages = {
        "save": (pair.source.world, partial(run_save, pair.source, folder)),
        "convert": (1, partial(convert, source, folder / "universal", pair)),
        "load": (pair.target.world, partial(run_load, pair.target, folder, dict(pair.attach or {}))),
    }
    for stage, (world, work) in stages.items():
        outcomes = train.fork_ranks(world, work, folder / f"log_{stage}", TIMEOUT)
        done[stage] = train.summarise(outcomes)
        if not done[stage]["ok"]:
            break
    return done


def convert(source: Path, target: Path, pair: Pair) -> dict[str, Any]:
    from deepspeed_affine.cli import ds_to_universal

    code = ds_to_universal(
        ["--affine", "--input_folder", str(source), "--output_folder", str(target), "--no-fsync", *pair.convert]
    )
    if code:
        raise RuntimeError(f"converting ended with exit code {code}")
    if pair.damage:
        damage(target, pair.damage)
    return {}


def main(root: Path, names: list[str]) -> None:
    for name in names:
        done = run_pair(pair_named(name), root)
        (root / name / "done.json").write_text(json.dumps(done), encoding="utf-8")
        print(f"{name}: " + ", ".join(f"{k} {'ok' if v['ok'] else v['error']}" for k, v in done.items()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
