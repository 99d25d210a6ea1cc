"""Engines of the attached and of the loaded runs: built, trained, and asked what they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from forks import is_before  # sets the environment of what is imported next

# isort: split
import deepspeed
import live_parallel
import real_models as models
import torch
import train
from real_cases import Case
from torch import nn
from train_user_cases import few, sequence

__all__ = ["different", "gather", "info_of", "keep", "live_engine", "stock_load", "take_steps"]

ROWS = 4
"""Samples of one step over all ranks together, so that every topology trains on the same."""
_train_config, _train_model = train.build_config, train.build_model
SAVED_SEED, LOADED_SEED = 1234, 4321


def info_of(case: Case) -> dict[str, Any] | None:
    """What the user of a model that cuts its layers itself says of them."""
    if case.name.startswith("scaled"):
        return live_parallel.scaled_info(case.tp)
    infos = {"hand_tp": models.HAND_TP_INFO, "pipe": live_parallel.PIPE_INFO, "tp_pipe": live_parallel.TP_PIPE_INFO}
    return infos.get(case.model)


def build_model(case: Case) -> nn.Module:
    if case.model == "tp_pipe":
        return live_parallel.build_tp_pipe(case)
    if case.model == "hand_tp":
        # Each degree pads the thirteen tokens to a height of its own.
        vocab = {1: 13, 2: 14, 4: 16}[case.tp]
        kind = live_parallel.ScaledTp if case.name.startswith("scaled") else models.HandTp
        return kind(torch.distributed.get_rank() % case.tp, case.tp, vocab=vocab)
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


def live_engine(case: Case, *, loads: bool, universal: bool = False) -> Any:
    """An engine that trains and saves, or one that ``loads``, which starts from other weights; ``universal`` says
    whether DeepSpeed's own loading is switched to universal checkpoints."""
    if case.model in ("few", "sequence"):
        torch.manual_seed(LOADED_SEED if loads else SAVED_SEED)
        return (few if case.model == "few" else sequence)(case, load_universal=universal)
    accelerator = deepspeed.accelerator.get_accelerator()
    named = accelerator._name
    try:
        if case.name.startswith("ratio"):
            # Of an accelerator that is the CPU nothing stays there.
            accelerator._name = "cpu:0"
        engine = train.build_engine(case, load_universal=loads)
    finally:
        accelerator._name = named
    if loads and not universal:
        engine._config.load_universal_checkpoint = False
    return engine


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


def gather(engine: Any, case: Case, *, linked: bool = False) -> dict[str, Any]:
    """What this rank holds, through DeepSpeed's own accessors. Their links are set up before where ``linked`` is said:
    after training DeepSpeed leaves some out, after loading they must all be there."""
    held = train.gather_truth(engine, case if linked else replace(case, groups=1, ep=1, optimizer="adamw"))
    if case.optimizer == "muon" and case.stage in (1, 2):
        train.add_whole_momentum(engine, held["params"])
    held["plain"] = plain_states(engine) if case.stage == 0 else {}
    for name, states in held["plain"].items() if case.dtype == "fp32" else ():
        # Of low precision a universal folder has the module's weights and not the optimizer's.
        held["params"][name].update({key: value for key, value in states.items() if key != "step"})
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    held["groups"] = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    steps = [state["step"] for state in inner.state.values() if "step" in state]
    held["steps"] = sorted({float(step) for step in steps})
    held["step_types"] = sorted({type(step).__name__ for step in steps})
    held["global_steps"], held["global_samples"] = engine.global_steps, engine.global_samples
    held["scheduler"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    scale = getattr(engine.optimizer, "loss_scale_config", engine.optimizer)
    held["scale"] = float(getattr(scale, "cur_scale", 1.0))
    held["low"] = {name: whole_low(parameter) for name, parameter in engine.module.named_parameters()}
    return held


def whole_low(parameter: Any) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def plain_states(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """What optimizers without ZeRO keep: a state a parameter, beside master weights one by one or flat for a group."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found: dict[str, dict[str, torch.Tensor]] = {}

    def add(name: str, master: torch.Tensor, of: Any) -> None:
        kept = {key: value for key, value in inner.state.get(master, {}).items() if torch.is_tensor(value)}
        found[name] = {
            key: (of(value) if value.dim() else value).detach().clone()
            for key, value in {"fp32": master, **kept}.items()
        }

    groups = getattr(optimizer, "fp16_groups", None) or [group["params"] for group in inner.param_groups]
    flats = getattr(optimizer, "fp32_groups_flat", None)
    masters = getattr(optimizer, "fp32_groups", groups)
    for index, group in enumerate(groups):
        start = 0
        for at, parameter in enumerate(group):
            if flats is None:
                add(names[id(parameter)], masters[index][at], lambda value: value)
            else:
                part = slice(start, start + parameter.numel())
                add(names[id(parameter)], flats[index], lambda value, part=part: value[part])
            start += parameter.numel()
    return found


def keep(folder: Path, engine: Any, case: Case, *, linked: bool = False) -> dict[str, Any]:
    """Keep what this rank holds, what the next four steps lose, and what it holds after them."""
    held = gather(engine, case, linked=linked)
    held["next_losses"] = take_steps(engine, case, case.steps, 4)
    held["after"] = gather(engine, case, linked=linked)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(held, folder / f"rank{torch.distributed.get_rank()}.pt")
    return held


def stock_load(engine: Any, universal: Path) -> bool:
    """Whether DeepSpeed's own loader has loaded; its links from weights are put right where it leaves them astray."""
    path, _ = engine.load_checkpoint(str(universal.parent), tag=universal.name)
    if is_before(0, 19, 8):
        train.relink_weights(engine.optimizer)
    return path is not None


def different(before: Any, now: Any) -> list[str]:
    wrong = []
    for name, states in before["params"].items():
        wrong += [f"{name}:{key}" for key, value in states.items() if not torch.equal(value, now["params"][name][key])]
    for key in ("groups", "steps", "global_steps", "global_samples", "scale"):
        if before[key] != now[key]:
            wrong.append(key)
    return wrong
