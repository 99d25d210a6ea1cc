"""Every kind of layer DeepSpeed cuts, built rank by rank by its own constructors, beside the parameter it was cut from.

Works under every DeepSpeed of the version matrix: what a version does not have is left out. Run as a script it checks
the law of ``check`` for all of them and prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.module_inject import layers, tp_shard

from deepspeed_affine.hooks import layouts, stock
from deepspeed_affine.hooks.collect import collect_autotp_universal_checkpoint_info
from deepspeed_affine.hooks.layouts import LiveParam, live_params


@dataclass(frozen=True)
class Case:
    """One layer: its class, the shape of its weight, the head counts that decide its cut, and where it is legal."""

    kind: str
    shape: tuple[int, ...]
    heads: int | None = None
    queries: int | None = None
    embedding: int | None = None
    block: str | None = None
    bias: bool = True
    degrees: tuple[int, ...] = (1, 2, 3, 4, 8)
    options: dict[str, Any] = field(default_factory=dict)
    at: str = "block"
    """The layer's name in its model; DeepSpeed takes some names for a vocabulary."""
    map_only: bool = False
    """Whether no pattern list of any version describes it."""
    probed: bool = False
    """Whether DeepSpeed 0.19.8 leaves it undescribed or describes it as something else."""


def fused(block: str, shape: tuple[int, ...], **facts: Any) -> Case:
    return Case("fused_LinearLayer", shape, block=block, **facts)


CASES = {
    "column": Case("LinearLayer", (16, 6), options={"name": "up"}),
    "column_uneven": Case("LinearLayer", (13, 6), options={"name": "up"}),
    "column_heads": Case("LinearLayer", (20, 6), heads=5, options={"name": "q"}),
    "row": Case("LinearAllreduce", (6, 16), options={"name": "down"}),
    "row_uneven": Case("LinearAllreduce", (6, 13), options={"name": "down"}),
    "lm_head": Case("LinearLayer", (13, 6), bias=False, degrees=(1, 2, 3), options={"name": "lm_head"}, at="lm_head"),
    "row_lm_head": Case("LinearAllreduce", (13, 6), degrees=(1, 2, 3), options={"name": "lm_head"}, at="lm_head"),
    "vocabulary": Case("VocabParallelLinear", (13, 6), bias=False, options={"name": "lm_head"}),
    "vocabulary_embedding": Case("VocabParallelEmbedding", (13, 6), options={"name": "embed_tokens"}),
    "hidden_embedding": Case("HiddenParallelEmbedding", (7, 10), options={"name": "embed_tokens"}),
    "head": Case("LmHeadLinearAllreduce", (7, 16), bias=False),
    "replicated_input": Case("LinearAllreduceWithReplicatedInput", (7, 10), bias=False, options={"name": "lm_head"}),
    "gate_up": Case("GateUpPack_LinearLayer", (32, 6), options={"name": "mlp"}),
    "gate_up_uneven": Case("GateUpPack_LinearLayer", (26, 6), options={"name": "mlp"}),
    "sub_count": Case("SubParamLinearLayer", (48, 6), options={"name": "qkv", "shape": (3, -1)}),
    "sub_sizes": Case("SubParamLinearLayer", (32, 6), options={"name": "qkv", "shape": ((16, 8, 8), -1)}),
    "sub_uneven": Case("SubParamLinearLayer", (40, 6), heads=5, options={"name": "qkv", "shape": ((20, 10, 10), -1)}),
    "sub_view": Case(
        "SubParamLinearLayer", (64, 6), options={"name": "x", "shape": (2, (16, 8, 8), 6), "partition_dim": 1}
    ),
    "sub_row": Case(
        "SubParamLinearAllreduce", (6, 32), options={"name": "o", "shape": (6, (16, 8, 8)), "partition_dim": 1}
    ),
    "bloom": fused("BloomBlock", (60, 8), heads=5),
    "falcon": fused("FalconDecoderLayer", (48, 8), heads=4),
    "unknown_block": fused("SomeBlock", (48, 8), heads=4),
    "glm": fused("GLMBlock", (48, 8), heads=4),
    "glm_uneven": fused("MPTBlock", (90, 8), heads=5),
    "baichuan": fused("BaichuanLayer", (48, 8), heads=8),
    "chatglm": fused("GLMBlock", (48, 32), heads=2, embedding=32, degrees=(1, 2)),
    "chatglm_idle_ranks": fused("GLMBlock", (48, 32), heads=2, embedding=32, degrees=(3, 4)),
    "qwen": fused("QWenBlock", (48, 16), heads=4, degrees=(1, 2, 3, 4)),
    "phi3": fused("Phi3DecoderLayer", (32, 16), heads=4, queries=8, bias=False),
    "bigcode": fused("GPTBigCodeBlock", (48, 32), heads=8, embedding=32, degrees=(2, 3, 4, 8), map_only=True),
    "bigcode_one_head": fused("GPTBigCodeBlock", (40, 32), heads=1, embedding=32, degrees=(2,), map_only=True),
    "codegen": fused("CodeGenBlock", (96, 32), heads=16, bias=False, degrees=(1, 2, 4), map_only=True),
    "codegen_three": fused("CodeGenBlock", (72, 24), heads=24, bias=False, degrees=(2, 3), map_only=True),
    "codegen_eight": fused("CodeGenBlock", (96, 32), heads=32, bias=False, degrees=(4, 8), map_only=True),
    "shared_value": Case("Yuan_LinearLayer", (32, 8), heads=16, degrees=(2, 4, 8), map_only=True),
    "shared_value_odd": Case("Yuan_LinearLayer", (24, 8), heads=6, degrees=(2,), map_only=True, probed=True),
    "shared_value_odd_four": Case("Yuan_LinearLayer", (24, 8), heads=12, degrees=(4,), map_only=True, probed=True),
    "shared_output": Case("Yuan_LinearAllreduce", (8, 32), heads=16, bias=False, degrees=(2, 4, 8), map_only=True),
    "shared_output_odd": Case(
        "Yuan_LinearAllreduce", (8, 24), heads=6, bias=False, degrees=(2,), map_only=True, probed=True
    ),
    "conv_column": Case(
        "conv_LinearLayer", (12, 12), bias=False, degrees=(2, 3, 4), options={"name": "c"}, probed=True
    ),
    "conv_column_uneven": Case(
        "conv_LinearLayer", (13, 13), bias=False, degrees=(2, 3), options={"name": "c"}, probed=True
    ),
    "conv_row": Case(
        "Conv_LinearALlreduce", (12, 12), bias=False, degrees=(2, 3), options={"name": "c"}, map_only=True, probed=True
    ),
    "conv_outputs": Case("TensorParallelOcShardConv2d", (10, 6, 3, 3), degrees=(2, 3, 4), probed=True),
    "conv_inputs": Case("TensorParallelIcShardConv2d", (6, 10, 3, 3), degrees=(2, 3, 4), probed=True),
}

STATES = ("fp32", "exp_avg", "exp_avg_sq")

GRID = [(name, degree) for name, case in CASES.items() for degree in case.degrees]


def exists(name: str) -> bool:
    return hasattr(layers, CASES[name].kind)


@contextmanager
def answered(degree: int, rank: int) -> Iterator[None]:
    """DeepSpeed's questions about the tensor-parallel group, answered for one rank of a group that need not exist."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(layers.dist, "get_world_size", return_value=degree))
        stack.enter_context(mock.patch.object(layers.dist, "get_rank", return_value=rank))
        if hasattr(layers, "pg_utils"):
            stack.enter_context(mock.patch.object(layers.pg_utils, "is_parallel", return_value=degree > 1))
        yield


def source_module(case: Case) -> torch.nn.Module:
    """The module as the model had it before it was cut, with weights that depend on its shape alone."""
    if "Conv2d" in case.kind:
        outputs, inputs, *kernel = case.shape
        module: torch.nn.Module = torch.nn.Conv2d(inputs, outputs, tuple(kernel), padding=1, bias=case.bias)
    elif "Embedding" in case.kind:
        module = torch.nn.Embedding(*case.shape)
    else:
        module = torch.nn.Linear(case.shape[1], case.shape[0], bias=case.bias)
    generator = torch.Generator().manual_seed(sum(case.shape))
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    return module


def block_of(case: Case) -> torch.nn.Module | None:
    if case.block is None:
        return None
    block = type(case.block, (torch.nn.Module,), {})()
    block.attn = torch.nn.Module()
    block.attn.split_size = case.shape[0] // 3
    return block


def metadata(case: Case) -> dict[str, Any]:
    """How this version learns the head counts: from the layer's argument, or from globals."""
    if hasattr(tp_shard, "AutoTPMeta"):
        meta = tp_shard.AutoTPMeta(
            num_kv_heads=case.heads, num_attention_heads=case.queries or case.heads, n_embd=case.embedding
        )
        return {"tp_meta": meta}
    tp_shard.set_num_kv_heads(case.heads)
    tp_shard.set_num_attention_heads(case.queries or case.heads)
    tp_shard.set_n_embd(case.embedding)
    return {}


def cut(name: str, degree: int, rank: int) -> torch.nn.Module:
    """One rank's layer, cut by its own constructor."""
    case = CASES[name]
    kind, module = getattr(layers, case.kind), source_module(case)
    if "Conv2d" in case.kind:
        return kind(module, rank, degree)
    options = {**case.options, **metadata(case)}
    if case.block is not None:
        options["fused_module"] = block_of(case)
    options.setdefault("name", name)
    if case.kind == "LmHeadLinearAllreduce":
        options.pop("name")
    with answered(degree, rank):
        return kind(module, object(), **options)


def model_of(layer: torch.nn.Module, at: str = "block") -> torch.nn.Module:
    """A model of the layer and a norm that nothing cuts."""
    model = torch.nn.Module()
    setattr(model, at, layer)
    model.norm = torch.nn.LayerNorm(4)
    return model


def full_tensors(name: str) -> dict[str, torch.Tensor]:
    """F of every parameter of the model."""
    case = CASES[name]
    prefix = f"{case.at}.conv." if "Conv2d" in case.kind else f"{case.at}."
    whole = {f"{prefix}{each}": param.detach() for each, param in source_module(case).named_parameters()}
    return {**whole, "norm.weight": torch.ones(4), "norm.bias": torch.zeros(4)}


@contextmanager
def told_shapes(models: list[torch.nn.Module]) -> Iterator[None]:
    """The ranks' exchange of shapes, answered from the models of all ranks; no process group is needed."""
    held = [{name: tuple(param.shape) for name, param in model.named_parameters()} for model in models]

    def gathered(wanted: Any, group: Any) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {name: tuple(row[name] for row in held) for name in wanted}

    with mock.patch.object(layouts, "gather_shapes", gathered):
        yield


def built(name: str, degree: int) -> list[torch.nn.Module]:
    return [model_of(cut(name, degree, rank), CASES[name].at) for rank in range(degree)]


def check(name: str, degree: int) -> list[dict[str, LiveParam]]:
    """The law: all ranks get the same maps, and F by the map is, byte for byte, the shard the layer holds."""
    models, full = built(name, degree), full_tensors(name)
    found = []
    with told_shapes(models):
        for rank, model in enumerate(models):
            with answered(degree, rank):
                found.append(live_params(model))
    for rank, (model, params) in enumerate(zip(models, found, strict=True)):
        held = dict(model.named_parameters())
        if list(params) != list(held):
            raise AssertionError(f"{name}: {list(params)} of {list(held)}")
        for each, param in params.items():
            if param.layout != found[0][each].layout or param.layout != param.layout.canonical():
                raise AssertionError(f"{name} {each}: ranks 0 and {rank} disagree, or the map is not canonical")
            if param.rank != rank:
                raise AssertionError(f"{name} {each}: rank {param.rank} of {rank}")
            shard = param.layout.extract(full[each].reshape(param.layout.logical_shape), rank)
            if not torch.equal(shard.flatten(), held[each].detach().flatten()):
                raise AssertionError(f"{name} {each}, rank {rank}: the map gives another shard than the layer holds")
    return found


def collected(models: list[torch.nn.Module], **options: Any) -> dict[str, Any]:
    """The info of all ranks, which is one and the same."""
    found = []
    with told_shapes(models):
        for rank, model in enumerate(models):
            with answered(len(models), rank):
                found.append(collect_autotp_universal_checkpoint_info(model, **options))
    if any(info != found[0] for info in found):
        raise AssertionError("the ranks collect different infos")
    return found[0]


def stock_merge(info: dict[str, Any], name: str, shards: list[torch.Tensor], folder: Path) -> torch.Tensor | str:
    """F as the installed DeepSpeed's own converter makes it out of these shards, or what it stopped with."""
    folder.mkdir(parents=True)
    for rank, shard in enumerate(shards):
        (folder / "tmp" / name / str(rank)).mkdir(parents=True)
        for state in STATES if shard.numel() else ():
            torch.save(shard.detach().flatten().clone(), folder / "tmp" / name / str(rank) / f"{state}.00")
    try:
        shapes = [tuple(shard.shape) for shard in shards]
        stock.merge_tp_slices(info, folder / "zero", folder / "tmp", name, shapes)
        stored: torch.Tensor = torch.load(folder / "zero" / name / "fp32.pt", weights_only=False)["param"]
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"
    return stored


def merges(name: str, degree: int, folder: Path) -> dict[str, str]:
    """By parameter, "F" where the installed converter gives F, "WRONG" where it gives something else, else why it
    stopped: with the map in the info, and, as "name!", with the pattern lists alone."""
    models, full = built(name, degree), full_tensors(name)
    info = collected(models)
    bare = {key: value for key, value in info.items() if key != "affine_map"}
    results: dict[str, str] = {}
    for each, expected in full.items():
        shards = [dict(model.named_parameters())[each].detach() for model in models]
        for mark, given in (("", info), ("!", bare)):
            found = stock_merge(given, each, shards, folder / f"{name}{degree}{each}{len(mark)}")
            if isinstance(found, torch.Tensor):
                same = found.numel() == expected.numel() and torch.equal(found.flatten(), expected.flatten())
                found = "F" if same else "WRONG"
            results[each + mark] = found
    return results


def main() -> int:
    layers.set_autotp_mode(training="training" in sys.argv)
    rows: dict[str, Any] = {}
    for name, degree in GRID:
        if not exists(name):
            continue
        try:
            cut(name, degree, degree - 1)
        except Exception as fault:
            rows[f"{name}/{degree}"] = f"not built: {fault}"
            continue
        try:
            found = check(name, degree)
            source = next(param.source for each, param in found[0].items() if "norm" not in each)
            with tempfile.TemporaryDirectory() as folder:
                rows[f"{name}/{degree}"] = {"source": source, "merges": merges(name, degree, Path(folder))}
        except Exception as fault:
            rows[f"{name}/{degree}"] = f"FAILED {type(fault).__name__}: {fault}"
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
