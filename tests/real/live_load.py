"""Runs of ``load_checkpoint``: stock engines train and save, other engines load what was converted and train on.

``live_load.py ROOT PAIR...`` makes every source of the pairs once, in ROOT/sources/CASE, and leaves in ROOT/PAIR what
the ranks held when they had loaded. Ranks are forked as ``train.py`` does it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import train  # sets the environment that torch and DeepSpeed read when they are imported

# isort: split
import deepspeed
import real_models as models
import torch
from load_cases import Pair, pair_named
from real_cases import Case
from torch import nn
from train_user_cases import Few, sequence

import deepspeed_affine

ROWS = 4
"""Samples of one step over all ranks together, so that every topology trains on the same."""
_train_config, _train_model = train.build_config, train.build_model


# ---------------------------------------------------------------- engines


class TpBlock(nn.Module):
    """A column and a row parallel matrix behind a norm, cut by hand, for a pipeline."""

    def __init__(self, tp: int, width: int = 6, inner: int = 8) -> None:
        super().__init__()
        self.group = model_group(tp)
        rank = torch.distributed.get_rank() % tp
        self.norm = nn.LayerNorm(width)
        self.up = nn.ParameterDict(
            {"weight": nn.Parameter((torch.randn(inner, width) * 0.3).chunk(tp, 0)[rank].clone())}
        )
        self.down = nn.ParameterDict(
            {"weight": nn.Parameter((torch.randn(width, inner) * 0.3).chunk(tp, 1)[rank].clone())}
        )
        for name, parameter in self.named_parameters():
            parameter.tensor_model_parallel = "norm" not in name

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = models._SumGradient.apply(self.norm(hidden), self.group)
        inner = torch.tanh(nn.functional.linear(inner, self.up["weight"]))
        return hidden + models._Sum.apply(nn.functional.linear(inner, self.down["weight"]), self.group)


_groups: dict[int, Any] = {}


def model_group(tp: int) -> Any:
    """The tensor-parallel group: neighbours, as PipeModelDataParallelTopology orders its last axis."""
    if tp not in _groups:
        for start in range(0, torch.distributed.get_world_size(), tp):
            ranks = list(range(start, start + tp))
            group = torch.distributed.new_group(ranks)
            if torch.distributed.get_rank() in ranks:
                _groups[tp] = group
    return _groups[tp]


def build_tp_pipe(case: Case) -> nn.Module:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    model_group(case.tp)
    layers = [
        TiedLayerSpec("embed", models.PipeEmbedding, tied_weight_attr="weight"),
        *(LayerSpec(TpBlock, case.tp) for _ in range(3)),
        TiedLayerSpec("embed", models.PipeEmbedding, forward_fn=models._logits, tied_weight_attr="weight"),
    ]
    topology = PipeModelDataParallelTopology(case.pp, case.tp, case.dp)
    # A seed of the module itself would draw the same numbers for both halves of a matrix.
    return PipelineModule(layers=layers, topology=topology, loss_fn=models.pipe_loss, partition_method="uniform")


TP_PIPE_INFO = {
    "universal_checkpoint_version": 0.2,
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.word_embeddings\.weight"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
    "tp_replicated_parameter_patterns": [r"\d+\.norm\.(weight|bias)", r"tied_modules\..*"],
}
PIPE_INFO = {
    key: TP_PIPE_INFO[key] for key in ("universal_checkpoint_version", "pipeline_replicated_parameter_patterns")
}
INFOS = {"hand_tp": models.HAND_TP_INFO, "pipe": PIPE_INFO, "tp_pipe": TP_PIPE_INFO}


def build_model(case: Case) -> nn.Module:
    if case.model == "few":
        return Few()
    if case.model == "tp_pipe":
        return build_tp_pipe(case)
    if case.model == "hand_tp":
        # Each degree pads the thirteen tokens to a height of its own.
        return models.HandTp(torch.distributed.get_rank() % case.tp, case.tp, vocab={1: 13, 2: 14, 4: 16}[case.tp])
    return _train_model(case)


def build_config(case: Case) -> dict[str, Any]:
    config = _train_config(case)
    # Two ranks of a sequence are one of the data.
    config["train_micro_batch_size_per_gpu"] = rows_of(case) * (2 if case.model == "sequence" else 1)
    if case.model in ("plain", "pipe") and case.optimizer == "adamw" and not case.name.startswith("groups"):
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2}}
    return config


train.build_config, train.build_model = build_config, build_model


def rows_of(case: Case) -> int:
    return max(1, ROWS // case.dp)


def build_engine(case: Case, *, seed: int) -> Any:
    if case.model == "sequence":
        torch.manual_seed(seed)
        return sequence(case)
    if case.model != "few":
        engine = train.build_engine(case, load_universal=seed != 1234)
        # The switch is for DeepSpeed's own loading, which must play no part.
        engine._config.load_universal_checkpoint = False
        return engine
    torch.manual_seed(seed)
    config = build_config(case)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    model = Few()
    groups = [
        {"params": [model.embed.weight, model.head.weight]},
        {"params": [model.scale], "weight_decay": 0.0},
        {"params": [model.shift, model.other], "lr": 3e-2},
    ]
    return deepspeed.initialize(model=model, config=config, model_parameters=groups)[0]


# ---------------------------------------------------------------- steps


def dp_rank(case: Case) -> int:
    rank = torch.distributed.get_rank()
    if case.model in ("pipe", "tp_pipe"):
        return rank // case.tp % case.dp
    return rank // case.tp


def take_steps(engine: Any, case: Case, first: int, count: int) -> list[float]:
    """The losses of ``count`` steps over the samples of all ranks together; its number alone decides a step's."""
    losses = []
    options = case.model_options
    vocab = int(options.get("vocab", 31 if case.model == "own_tp" else 32 if case.model == "mixtral" else 13))
    for step in range(first, first + count):
        tokens = torch.randint(0, vocab, (ROWS, 5), generator=torch.Generator().manual_seed(1000 + step))
        mine = tokens[dp_rank(case) * rows_of(case) % ROWS :][: rows_of(case)]
        if case.model in ("pipe", "tp_pipe"):
            losses.append(float(engine.train_batch(iter([(mine, mine)]))))
            continue
        loss = engine(input_ids=mine, labels=mine).loss if case.model in ("llama", "mixtral") else engine(mine)
        engine.backward(loss)
        with torch.no_grad():
            engine.step()
        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / torch.distributed.get_world_size())
    return losses


def gather(engine: Any, case: Case) -> dict[str, Any]:
    """What this rank holds, through DeepSpeed's own accessors, whose links are not set up again before."""
    held = train.gather_truth(engine, replace(case, groups=1, ep=1, optimizer="adamw"))
    if case.config.get("zero_optimization", {}).get("round_robin_gradients"):
        # DeepSpeed links parameters to master weights in the order they had before it went round.
        held["params"] = by_fragments(engine)
    if case.optimizer == "muon" and case.stage in (1, 2):
        train.add_whole_momentum(engine, held["params"])
    if case.stage == 0:
        add_plain_states(engine, held["params"])
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    held["groups"] = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    steps = [state["step"] for state in inner.state.values() if "step" in state]
    held["steps"] = sorted({float(step) for step in steps})
    held["step_types"] = sorted({type(step).__name__ for step in steps})
    held["global_steps"], held["global_samples"] = engine.global_steps, engine.global_samples
    held["scheduler"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    held["scale"] = float(getattr(engine.optimizer, "cur_scale", 1.0))
    held["low"] = {name: whole_low(parameter).detach().clone() for name, parameter in engine.module.named_parameters()}
    return held


def by_fragments(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Every parameter's weights and states, brought together from the fragments of all ranks."""
    from deepspeed_affine.hooks.optimizers import fragments

    found = {
        name: {state: torch.zeros(parameter.numel()) for state in ("fp32", "exp_avg", "exp_avg_sq")}
        for name, parameter in engine.module.named_parameters()
    }
    for fragment in fragments(engine):
        for state, value in {"fp32": fragment.master, **fragment.states()}.items():
            found[fragment.name][state][fragment.start :][: fragment.numel] = value
    for name, parameter in engine.module.named_parameters():
        for state, value in found[name].items():
            torch.distributed.all_reduce(value)
            found[name][state] = value.reshape(parameter.shape)
    return found


def whole_low(parameter: Any) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def add_plain_states(engine: Any, params: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, parameter in engine.module.named_parameters():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if key != "step":
                params[name][key] = value.clone()


def keep(folder: Path, held: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(held, folder / f"rank{torch.distributed.get_rank()}.pt")


# ---------------------------------------------------------------- runs


def run_source(case: Case, folder: Path) -> dict[str, Any]:
    engine = build_engine(case, seed=1234)
    take_steps(engine, case, 0, case.steps)
    client: dict[str, Any] = {"note": "saved by stock", "epoch": torch.tensor([3, 4])}
    if case.model in INFOS:
        client["universal_checkpoint_info"] = INFOS[case.model]
    engine.save_checkpoint(str(folder / "ordinary"), tag="saved", client_state=client)
    held = gather(engine, case)
    held["next_losses"] = take_steps(engine, case, case.steps, 4)
    held["after"] = gather(engine, case)
    keep(folder / "held", held)
    return {}


def convert(case: Case, folder: Path) -> dict[str, Any]:
    from deepspeed_affine.cli import ds_to_universal

    if case.config.get("zero_optimization", {}).get("round_robin_gradients"):
        # Ours refuses it; what DeepSpeed's converter makes of it is the folder a user may have.
        return train.convert_stock(folder / "ordinary" / "saved", folder / "universal")
    # 0.18.9 forgets to list what every rank holds whole.
    forgets = case.tp > 1 and case.model in train.AUTOTP_MODELS and train.is_before(0, 19, 4)
    options = ["--identical-shards", "replicated"] if forgets else []

    folders = ["--input_folder", str(folder / "ordinary" / "saved"), "--output_folder", str(folder / "universal")]
    code = ds_to_universal(["--affine", *folders, "--inject_missing_state", "--no-fsync", *options])
    if code:
        raise RuntimeError(f"converting ended with exit code {code}")
    return {}


def run_load(pair: Pair, source: Path, folder: Path) -> dict[str, Any]:
    rank, case = torch.distributed.get_rank(), pair.target
    if pair.local_ranks:
        os.environ["LOCAL_RANK"] = str(rank % pair.local_ranks)
    engine = build_engine(case, seed=4321)
    take_steps(engine, case, 90, pair.warm)
    before = gather(engine, case) if pair.error else None
    load_dir, tag = str(source), "universal"
    if rank == 1 and pair.fault == "elsewhere":
        load_dir = str(source / "nowhere")
    if rank == 1 and pair.fault in ("reading", "bug"):
        make_fail(pair.fault)
    began = time.monotonic()
    try:
        report = deepspeed_affine.load_checkpoint(engine, load_dir, tag, **dict(pair.options))
    except Exception as error:
        if pair.error is None:
            raise
        changed = [] if pair.fault == "reading" else different(before, gather(engine, case))
        return {"refused": str(error), "kind": type(error).__name__, "changed": changed}
    seconds = time.monotonic() - began
    held = gather(engine, case)
    held["next_losses"] = take_steps(engine, case, case.steps, 4)
    held["after"] = gather(engine, case)
    keep(folder / "held", held)
    return {
        "stock": run_stock(case, source, held) if pair.stock else None,
        "note": report.client_state.get("note"),
        "epoch": report.client_state["epoch"].tolist(),
        "not_restored": [str(row) for row in report.not_restored],
        "padding": dict(report.padding),
        "bytes_read": report.bytes_read,
        "text": str(report),
        "seconds": seconds,
    }


def run_stock(case: Case, source: Path, held: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed's own loader makes of the same folder in an engine beside the first, and how it differs."""
    engine = train.build_engine(case, load_universal=True)
    path, _ = engine.load_checkpoint(str(source), tag="universal")
    if train.is_before(0, 19, 8):
        train.relink_weights(engine.optimizer)
    differs = different(gather(engine, case), held) if path else ["nothing was loaded"]
    return {"differs": differs, "next_losses": take_steps(engine, case, case.steps, 4)}


def make_fail(kind: str) -> None:
    from deepspeed_affine.hooks import offered

    def fail(*_: Any, **__: Any) -> None:
        if kind == "bug":
            raise RuntimeError("made to break")
        raise deepspeed_affine.CheckpointFormatError("made to fail")

    setattr(offered.Offered, "part" if kind == "bug" else "fill", fail)


def different(before: Any, now: Any) -> list[str]:
    wrong = []
    for name, states in before["params"].items():
        wrong += [f"{name}:{key}" for key, value in states.items() if not torch.equal(value, now["params"][name][key])]
    for key in ("groups", "steps", "global_steps", "global_samples", "scale"):
        if before[key] != now[key]:
            wrong.append(key)
    return wrong


def main(root: Path, names: list[str]) -> None:
    made: dict[str, dict[str, Any]] = {}
    for pair in map(pair_named, names):
        folder, source = root / pair.name, root / "sources" / pair.source.name
        began = time.monotonic()
        for each in (folder, source):
            each.mkdir(parents=True, exist_ok=True)
        if pair.source.name not in made:
            made[pair.source.name] = done = {}
            for stage, world, work in (
                ("save", pair.source.world, partial(run_source, pair.source, source)),
                ("convert", 1, partial(convert, pair.source, source)),
            ):
                outcomes = train.fork_ranks(world, work, source / f"log_{stage}", train.CASE_TIMEOUT)
                done[stage] = train.summarise(outcomes)
                if not done[stage]["ok"]:
                    break
        done = dict(made[pair.source.name])
        if all(stage["ok"] for stage in done.values()):
            work = partial(run_load, pair, source, folder)
            outcomes = train.fork_ranks(pair.target.world, work, folder / "log_load", train.CASE_TIMEOUT)
            done["load"] = train.summarise(outcomes)
        (folder / "done.json").write_text(json.dumps(done), encoding="utf-8")
        said = ", ".join(f"{stage} {'ok' if end['ok'] else end['error']}" for stage, end in done.items())
        print(f"{pair.name}: {said} ({time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
