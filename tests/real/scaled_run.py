"""Biases that every rank holds divided by the number of ranks, through real steps and each way of converting them.

``scaled_run.py ROOT`` trains over two ranks a model whose output projection is Yuan's and whose convolution is cut
over its input channels, saves it with ``attach``, converts it with each value of ``--scaled-states`` and loads the
results at two ranks and at one.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forks import fork_ranks  # sets the environment of what is imported next

# isort: split
import deepspeed
import fused_run
import torch
import train
from deepspeed.module_inject import layers
from deepspeed.module_inject.tp_shard import AutoTPMeta
from real_models import _SumGradient
from torch import nn
from torch.nn import functional

import deepspeed_affine

VOCAB, WIDTH, HEADS, CHANNELS = 32, 16, 4, 6
TAG = "trained"
WAYS = ("refuse", "reset", "power")


class YuanOutput(layers.Yuan_LinearAllreduce):
    """DeepSpeed's own partition divides the bias and then fails to wrap it; this one returns it."""

    def _tp_partition(self, params_list: list[Any]) -> None:
        bias = params_list[1] if len(params_list) > 1 else None
        super()._tp_partition([params_list[0], None])
        if bias is not None:
            params_list[1].data = (bias / float(self.tp_world_size)).detach()


class Model(nn.Module):
    """Values and an output projection with a bias, then two convolutions of kernel one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv1, self.conv2 = nn.Conv2d(WIDTH, CHANNELS, 1), nn.Conv2d(CHANNELS, WIDTH, 1)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.group: Any = None
        generator = torch.Generator().manual_seed(99)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.2

    def cut(self, group: Any, rank: int, degree: int) -> None:
        # DeepSpeed's convolution holds its own under another name, at any degree.
        self.conv1 = layers.TensorParallelOcShardConv2d(self.conv1, rank, degree)
        self.conv2 = layers.TensorParallelIcShardConv2d(self.conv2, rank, degree)
        if degree == 1:
            return
        meta = AutoTPMeta(num_kv_heads=HEADS)
        layers.set_autotp_mode(training=True)
        self.v_proj = layers.Yuan_LinearLayer(self.v_proj, group, name="v_proj", tp_meta=meta)
        self.o_proj = YuanOutput(self.o_proj, group, name="o_proj", tp_meta=meta)
        self.group = group

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        hidden = hidden + self.o_proj(torch.tanh(self.v_proj(hidden)))
        image = self.norm(hidden).transpose(1, 2).unsqueeze(-1)
        if self.group is not None:
            image = _SumGradient.apply(image, self.group)
        image = self.conv2(torch.tanh(self.conv1(image)))
        logits = self.head(hidden + image.squeeze(-1).transpose(1, 2))
        return SimpleNamespace(loss=functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()))


def build_engine(degree: int, *, load_universal: bool = False) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    model, arguments = Model(), {}
    if load_universal:
        for param in model.parameters():
            param.data.fill_(0.5)
    if degree > 1:
        unit = train.Mpu(degree)
        model.cut(unit.get_model_parallel_group(), unit.get_model_parallel_rank(), degree)
        arguments["mpu"] = unit
    else:
        model.cut(None, 0, 1)
    return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()), **arguments)[0]


def run_save(folder: Path) -> dict[str, Any]:
    engine = build_engine(2)
    handle = deepspeed_affine.attach(engine)
    fused_run.train_steps(engine, 0, 2)
    engine.save_checkpoint(str(folder), tag=TAG)
    scales = {name: sorted({piece.scale for _, piece in live.layout.pieces()}) for name, live in handle.params.items()}
    torch.save(fused_run.held(engine), folder / f"saved{torch.distributed.get_rank()}.pt")
    return {"scales": scales, "sources": {name: live.source for name, live in handle.params.items()}}


def convert(folder: Path, way: str) -> dict[str, Any]:
    from deepspeed_affine.cli import ds_to_universal

    options = ["--affine", "--input_folder", str(folder / TAG), "--output_folder", str(folder / f"universal_{way}")]
    return {"code": ds_to_universal([*options, "--no-fsync", "--scaled-states", way])}


def run_load(folder: Path, converted: str, way: str, degree: int) -> dict[str, Any]:
    engine = build_engine(degree, load_universal=True)
    with deepspeed_affine.attach(engine, scaled_states=way):
        path, _ = engine.load_checkpoint(str(folder), tag=f"universal_{converted}")
        if path is None:
            raise RuntimeError("load_checkpoint loaded nothing")
    held = fused_run.held(engine)
    torch.save(held, folder / f"loaded_{converted}_{way}_{degree}_{torch.distributed.get_rank()}.pt")
    return {"steps": engine.global_steps}


def main(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}

    def stage(name: str, world: int, work: Any) -> None:
        done[name] = fork_ranks(world, work, root / f"log_{name}", fused_run.TIMEOUT)
        print(name, done[name]["ok"] or done[name]["error"], flush=True)

    stage("save", 2, partial(run_save, root))
    for way in WAYS:
        stage(f"convert_{way}", 1, partial(convert, root, way))
    for converted, way, degree in (
        ("power", "power", 2),
        ("power", "reset", 2),
        ("power", "refuse", 2),
        ("power", "refuse", 1),
        ("reset", "power", 2),
    ):
        stage(f"load_{converted}_{way}_{degree}", degree, partial(run_load, root, converted, way, degree))
    (root / "done.json").write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
