"""Attached runs: trains and saves with ``attach``, converts, and loads with stock DeepSpeed and ``attach``.

``live.py ROOT PAIR...`` runs each pair into ROOT/PAIR, in forked ranks as ``train.py`` does, and leaves there what the
ranks held: ``saved/rank0.pt`` when they saved, ``held/rank0.pt`` when they had loaded.
"""

from __future__ import annotations

import json
import os
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


class ScaledTp(models.HandTp):
    """The last bias is added before the sum over ranks, so every rank holds it divided by their number."""

    def __init__(self, rank: int, world: int, **sizes: int) -> None:
        super().__init__(rank, world, **sizes)
        self.dense_4h_to_h["bias"].data /= world

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.word_embeddings["weight"]
        mine = (tokens >= self.vocab_start) & (tokens < self.vocab_start + table.shape[0])
        hidden = table[(tokens - self.vocab_start).clamp(0, table.shape[0] - 1)] * mine.unsqueeze(-1)
        hidden = models._SumGradient.apply(self.norm(models._Sum.apply(hidden, self.group)), self.group)
        gate, value = torch.nn.functional.linear(hidden, self.swiglu["weight"]).chunk(2, -1)
        up = self.dense_h_to_4h
        inner = torch.tanh(torch.nn.functional.linear(hidden, up["weight"], up["bias"])) + torch.sigmoid(gate) * value
        down = self.dense_4h_to_h
        out = models._Sum.apply(torch.nn.functional.linear(inner, down["weight"], down["bias"]), self.group)
        return (out.float() - 1).square().mean()


def scaled_info(tp: int) -> dict[str, Any]:
    """As a user says it: a map of the one parameter that no list of patterns describes."""
    ranks = tuple(range(tp))
    piece = deepspeed_affine.AffinePiece((6,), 0, (1,), 0, (1,), ranks, 1 / tp)
    layout = deepspeed_affine.ParamAffineMap((6,), dict.fromkeys(ranks, (6,)), dict.fromkeys(ranks, (piece,)))
    document = {"version": 1, r"^dense_4h_to_h\.bias$": layout.to_dict()}
    return {**models.HAND_TP_INFO, "affine_map": document}


def build_model(case: Case) -> torch.nn.Module:
    if case.model == "few":
        return Few()
    if case.model == "hand_tp":
        # Each degree pads the thirteen tokens to a height of its own.
        vocab = {1: 13, 2: 14, 4: 16}[case.tp]
        rank = torch.distributed.get_rank() % case.tp
        kind = ScaledTp if case.name.startswith("scaled") else models.HandTp
        return kind(rank, case.tp, vocab=vocab)
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
    if case.name.startswith("scaled"):
        return scaled_info(case.tp)
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
    if options.pop("nodes"):
        os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1")
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


def run_stock_load(case: Case, folder: Path) -> dict[str, Any]:
    """DeepSpeed alone: its own converter's folder, its own loader, no ``attach``."""
    engine = build_engine(case, load_universal=True)
    path, _ = engine.load_checkpoint(str(folder), tag="stock")
    if path is None:
        raise RuntimeError("load_checkpoint loaded nothing")
    if train.is_before(0, 19, 8) and case.stage in (1, 2):
        train.relink_weights(engine.optimizer)
    keep(folder / "stock_held", train.gather_truth(engine, case))
    return {}


def keep(folder: Path, held: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(held, folder / f"rank{torch.distributed.get_rank()}.pt")


def damage(universal: Path, kind: str) -> None:
    import shutil

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


def run_pair(pair: Pair, root: Path) -> dict[str, Any]:
    folder = root / pair.name
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    source = folder / f"global_step{pair.source.steps}"
    options = {**(pair.attach or {}), "nodes": pair.nodes}
    stages = {
        "save": (pair.source.world, partial(run_save, pair.source, folder)),
        "convert": (1, partial(convert, source, folder / "universal", pair)),
        "load": (
            pair.target.world,
            partial(run_load, pair.target, folder, options),
        ),
    }
    if pair.stock:
        stages["stock"] = (1, partial(train.convert_stock, source, folder / "stock"))
        stages["stock_load"] = (pair.target.world, partial(run_stock_load, pair.target, folder))
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
