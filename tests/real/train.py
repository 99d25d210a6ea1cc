"""Trains, saves, converts with DeepSpeed's converter, and loads real checkpoints, many cases per start.

``train.py train --root DIR CASE...`` forks the ranks of each case.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from forks import Work, fork_ranks, is_before  # sets the environment of what is imported next

# isort: split
import deepspeed
import real_models as models
import real_optimizers as optimizers
import torch
from real_cases import Case, by_name

AUTOTP_MODELS = ("llama", "own_tp", "mixtral")
STEP_TAG = "global_step"


def checkpoint_folder(root: Path, case: Case) -> Path:
    return root / case.name / f"{STEP_TAG}{case.steps}"


# ---------------------------------------------------------------- one rank


def build_config(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": case.stage},
    }
    if case.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if case.dtype != "fp32":
        config["bf16" if case.dtype == "bf16" else "fp16"] = {"enabled": True}
    if case.dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 4
        # The CPU accelerator denies fp16 by policy; torch computes it, and only the file layout matters here.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    if case.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": case.offload}
        if case.offload == "nvme":
            config["zero_optimization"]["offload_optimizer"]["nvme_path"] = os.environ["CASE_NVME"]
    if case.tp > 1 and case.model in AUTOTP_MODELS:
        config["tensor_parallel"] = {"autotp_size": case.tp}
        if case.model == "own_tp":
            config["tensor_parallel"]["partition_config"] = models.OWN_PARTITION
    if case.model == "mixtral":
        config["expert_parallel"] = {"enabled": True, "autoep_size": case.ep, "preset_model": "mixtral"}
        if case.tp > 1:
            config["tensor_parallel"]["preset_model"] = "mixtral"
    for key, value in case.config.items():
        if isinstance(value, dict):
            config.setdefault(key, {}).update(value)
        else:
            config[key] = value
    return config


def build_model(case: Case) -> torch.nn.Module:
    options = dict(case.model_options)
    if case.model == "plain":
        return models.Plain(**options)
    if case.model == "own_tp":
        return models.OwnTransformer(**options)
    if case.model == "llama":
        return models.build_llama(**options)
    if case.model == "mixtral":
        return models.build_mixtral()
    if case.model == "pipe":
        return models.build_pipe(case.pp)
    if case.model == "moe":
        return models.MoeNet(ep_size=case.ep)
    if case.model == "hand_tp":
        return models.HandTp(torch.distributed.get_rank() % case.tp, case.tp)
    raise ValueError(f"no model kind {case.model}")


class Mpu:
    """The model parallel unit Megatron would pass: TP ranks are neighbours."""

    def __init__(self, tp: int) -> None:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.tp, self.dp = tp, world // tp
        for start in range(0, world, tp):
            ranks = list(range(start, start + tp))
            group = torch.distributed.new_group(ranks)
            if rank in ranks:
                self.model_group = group
        for offset in range(tp):
            ranks = list(range(offset, world, tp))
            group = torch.distributed.new_group(ranks)
            if rank in ranks:
                self.data_group = group
        self.rank = rank

    def get_model_parallel_rank(self) -> int:
        return self.rank % self.tp

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_group(self) -> Any:
        return self.model_group

    def get_data_parallel_rank(self) -> int:
        return self.rank // self.tp

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def build_engine(case: Case, *, load_universal: bool) -> Any:
    # A loading engine starts from other weights, so that whatever the load leaves out is seen.
    torch.manual_seed(4321 if load_universal else 1234)
    config = build_config(case)
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    arguments: dict[str, Any] = {"config": config}
    if case.model == "hand_tp":
        arguments["mpu"] = Mpu(case.tp)
    model = build_model(case)
    if case.model == "hand_tp":
        model.group = arguments["mpu"].get_model_parallel_group()
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = parameters
    if case.groups == 2:
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.05, "betas": (0.8, 0.95)},
            {"params": [p for p in parameters if p.dim() <= 1], "lr": 3e-2, "weight_decay": 0.0},
        ]
    if case.model == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    if case.optimizer == "adamw":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.01}}
        # Up to 0.19.4 AutoTP replaces parameters behind the caller's list; the engine's own list is then the right one.
        stale = case.tp > 1 and case.model in AUTOTP_MODELS and is_before(0, 19, 6)
        arguments["model_parameters"] = None if stale else groups
    elif case.optimizer == "muon":
        for name, parameter in model.named_parameters():
            parameter.use_muon = parameter.dim() == 2 and "embed" not in name and "head" not in name
        config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.01}}
        arguments["model_parameters"] = parameters
    elif case.model in AUTOTP_MODELS:
        # AutoTP replaces parameters, so a client optimizer is built after the cut, by callable.
        arguments["optimizer"] = lambda params: optimizers.build(case.optimizer, params)
        arguments["model_parameters"] = groups
    else:
        arguments["optimizer"] = optimizers.build(case.optimizer, groups)
    return deepspeed.initialize(model=model, **arguments)[0]


def train_steps(engine: Any, case: Case, first: int, count: int) -> list[float]:
    losses = []
    dp_rank = int(os.environ["RANK"]) // case.tp if case.tp > 1 else int(os.environ["RANK"])
    vocab = int(
        case.model_options.get("vocab", 31 if case.model == "own_tp" else 32 if case.model == "mixtral" else 13)
    )
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + (0 if case.pp > 1 else dp_rank))
        tokens = torch.randint(0, vocab, (2, 5), generator=generator)
        if case.model == "pipe":
            losses.append(float(engine.train_batch(iter([(tokens, tokens)]))))
            continue
        if case.model in ("llama", "mixtral"):
            loss = engine(input_ids=tokens, labels=tokens).loss
        else:
            loss = engine(tokens)
        engine.backward(loss)
        with torch.no_grad():
            engine.step()
        losses.append(float(loss.detach()))
    return losses


def state_keys(parameter: torch.nn.Parameter) -> list[str]:
    if not parameter.requires_grad:
        return []
    if hasattr(parameter, "ds_id"):
        optimizer = parameter._z3_optimizer
        group, _, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        state = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[group]]
        numel = optimizer.fp32_partitioned_groups_flat[group].numel()
        return [
            key for key, value in state.items() if torch.is_tensor(value) and value.numel() == numel and key != "step"
        ]
    mapping = getattr(parameter, "_hp_mapping", None)
    return [] if mapping is None or mapping.optim_fragment is None else mapping.get_optim_state_keys()


def gather_truth(engine: Any, case: Case) -> dict[str, Any]:
    """This rank's TP (and EP, PP) share of every parameter and state, whole over data parallelism."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    world = torch.distributed.get_world_size()
    if case.stage in (1, 2) and (case.ep > 1 or case.groups > 1 or case.optimizer == "muon"):
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state as link_states

        # DeepSpeed links parameters to their states once, after the first group's step, when later groups have none.
        optimizer = engine.optimizer
        flat_groups = getattr(optimizer, "single_partition_of_fp32_groups", ())
        for group, partition in zip(getattr(optimizer, "bit16_groups", ()), flat_groups, strict=False):
            link_states(group, partition, optimizer.optimizer.state)
    params: dict[str, dict[str, torch.Tensor]] = {}
    # A rank without a fragment of a parameter knows none of its states, so the names are agreed on first; one exchange,
    # because pipeline stages do not walk the same parameters.
    mine = {name: state_keys(parameter) for name, parameter in engine.module.named_parameters() if case.stage}
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, mine)
    for name, parameter in engine.module.named_parameters():
        entry: dict[str, torch.Tensor] = {}
        if case.stage == 0 or (not hasattr(parameter, "ds_id") and not hasattr(parameter, "_hp_mapping")):
            entry["fp32"] = parameter.detach().float().clone()
        elif not parameter.requires_grad and hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                entry["fp32"] = parameter.detach().float().clone()
        else:
            entry["fp32"] = (
                safe_get_full_fp32_param(parameter)
                .clone()
                .reshape(parameter.ds_shape if hasattr(parameter, "ds_id") else parameter.shape)
            )
            for key in sorted({key for others in everyone for key in others.get(name, ())}):
                value = safe_get_full_optimizer_state(parameter, key)
                entry[key] = value.clone().reshape(entry["fp32"].shape)
        params[name] = entry
    if case.optimizer == "muon" and case.stage in (1, 2):
        add_whole_momentum(engine, params)
    if case.config.get("zero_optimization", {}).get("round_robin_gradients"):
        take_by_address(engine, params)
    frozen = [name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad]
    return {
        "params": params,
        "frozen": frozen,
        "buffers": {name: value.clone() for name, value in engine.module.named_buffers()},
    }


def add_whole_momentum(engine: Any, params: dict[str, dict[str, torch.Tensor]]) -> None:
    """Muon keeps the momentum of every parameter a partition touches whole, end to end, on that partition's rank."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for group, partition in enumerate(optimizer.single_partition_of_fp32_groups):
        momentum = optimizer.optimizer.state[partition].get("momentum_buffer")
        offset = 0
        for parameter in optimizer.params_in_partition[group] if momentum is not None else ():
            whole = momentum[offset : offset + parameter.numel()]
            params[names[id(parameter)]]["momentum_buffer"] = whole.clone().reshape(parameter.shape)
            offset += parameter.numel()


def take_by_address(engine: Any, params: dict[str, dict[str, torch.Tensor]]) -> None:
    """Weights and states by where the parameter lies in its group's flat buffer, where the links lead elsewhere."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for index, partition in enumerate(optimizer.single_partition_of_fp32_groups):
        group = optimizer.real_dp_process_group[index]
        flat = optimizer.bit16_groups_flat[index]
        kept = {key: value for key, value in optimizer.optimizer.state[partition].items() if value.dim()}
        for key, value in {"fp32": partition.detach(), **kept}.items():
            parts = [torch.empty_like(value) for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather(parts, value, group=group)
            whole = torch.cat(parts)
            for parameter in optimizer.bit16_groups[index]:
                start = (parameter.data_ptr() - flat.data_ptr()) // parameter.element_size()
                held = whole[start : start + parameter.numel()].reshape(parameter.shape)
                params[names[id(parameter)]][key] = held.clone()


def run_train(case: Case, root: Path) -> dict[str, Any]:
    engine = build_engine(case, load_universal=False)
    losses = train_steps(engine, case, 0, case.steps)
    client: dict[str, Any] = {"note": "saved by the test session"}
    if case.model == "hand_tp":
        client["universal_checkpoint_info"] = models.HAND_TP_INFO
    elif case.model == "pipe":
        client["universal_checkpoint_info"] = {
            "universal_checkpoint_version": 0.2,
            "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.word_embeddings\.weight"],
        }
    engine.save_checkpoint(str(root / case.name), tag=f"{STEP_TAG}{case.steps}", client_state=client)
    truth_folder = root / case.name / "truth"
    truth_folder.mkdir(exist_ok=True)
    truth = gather_truth(engine, case)
    truth["losses"] = losses
    truth["next_losses"] = [] if case.stage == 0 else train_steps(engine, case, case.steps, 1)
    torch.save(truth, truth_folder / f"rank{os.environ['RANK']}.pt")
    return {"losses": losses, "versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__}}


def relink_weights(optimizer: Any) -> None:
    """Point every parameter at its weights again: before 0.19.8 loading leaves the link on the last moment it read."""
    flat_groups = getattr(optimizer, "single_partition_of_fp32_groups", ())
    for group, flat in zip(getattr(optimizer, "bit16_groups", ()), flat_groups, strict=False):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:
                address = mapping.hp_fragment_address
                mapping.hp_fragment = flat.narrow(0, address.start, address.numel)


def compare_truth(engine: Any, case: Case, truth: dict[str, Any]) -> dict[str, list[str]]:
    """What differs from the saved truth: among the optimizer's parameters, and among the frozen ones and buffers."""
    wrong, not_restored = [], []
    if is_before(0, 19, 8) and case.stage in (1, 2):
        relink_weights(engine.optimizer)
    trainable = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    now = gather_truth(engine, case)
    for name, entry in truth["params"].items():
        for key, value in entry.items():
            got = now["params"][name].get(key)
            if got is not None and name == "word_embeddings.weight" and case.model == "hand_tp":
                # Rows of vocabulary padding belong to no token and are not in a universal checkpoint.
                kept = max(
                    0, min(value.shape[0], models.HAND_TP_INFO["original_vocab_size"] - engine.module.vocab_start)
                )
                value, got = value[:kept], got[:kept]
            if got is None or got.shape != value.shape or not torch.equal(got, value):
                fault = f"{name}:{key} {'missing' if got is None else 'differs'}"
                (wrong if name in trainable else not_restored).append(fault)
    for name, value in truth["buffers"].items():
        if not torch.equal(now["buffers"][name], value):
            not_restored.append(f"{name} differs")
    return {"wrong": wrong, "not_restored": not_restored}


def run_load(case: Case, root: Path, universal: Path) -> dict[str, Any]:
    """Loads a universal folder with stock DeepSpeed into a fresh engine and compares with the saved truth."""
    engine = build_engine(case, load_universal=True)
    path, client = engine.load_checkpoint(str(universal.parent), tag=universal.name)
    if path is None:
        raise RuntimeError("load_checkpoint loaded nothing")
    truth = torch.load(root / case.name / "truth" / f"rank{os.environ['RANK']}.pt", weights_only=False)
    compared = compare_truth(engine, case, truth)
    steps = engine.global_steps
    losses = train_steps(engine, case, case.steps, 1)
    return {
        **compared,
        "global_steps": steps,
        "losses": losses,
        "expected_losses": truth["next_losses"],
        "note": client.get("note"),
    }


# ---------------------------------------------------------------- conversion and the command


def convert_stock(source: Path, target: Path) -> dict[str, Any]:
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    return {}


def convert_affine(source: Path, target: Path, *options: str) -> dict[str, Any]:
    from deepspeed_affine.cli import ds_to_universal

    folders = ["--input_folder", str(source), "--output_folder", str(target)]
    code = ds_to_universal(["--affine", *folders, "--inject_missing_state", "--no-fsync", *options])
    if code:
        raise RuntimeError(f"exit code {code}")
    return {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("train", "stock", "affine", "load"))
    parser.add_argument("--root", type=Path, required=True, help="folder that holds one folder per case")
    parser.add_argument(
        "--universal", type=Path, help="load: folder that holds CASE/universal; stock: where to put them"
    )
    parser.add_argument("cases", nargs="+")
    args = parser.parse_args()
    root: Path = args.root.absolute()
    for name in args.cases:
        case = by_name(name)
        began = time.monotonic()
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["CASE_NVME"] = str(folder / "nvme")
        target = (args.universal or root).absolute() / name / "universal"
        logs = (folder if args.verb == "train" else target.parent) / f"log_{args.verb}"
        source = checkpoint_folder(root, case)
        works: dict[str, tuple[int, Work]] = {
            "train": (case.world, partial(run_train, case, root)),
            "stock": (1, partial(convert_stock, source, target)),
            "affine": (1, partial(convert_affine, source, target)),
            "load": (case.world, partial(run_load, case, root, target)),
        }
        world, work = works[args.verb]
        result = fork_ranks(world, work, logs)
        result["seconds"] = round(time.monotonic() - began, 2)
        print(f"{args.verb} {name}: {'ok' if result['ok'] else result['error']} ({result['seconds']} s)", flush=True)
        (target.parent if args.verb != "train" else folder).joinpath(f"{args.verb}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
