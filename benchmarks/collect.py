"""How large the map of every parameter is, and how long collecting it takes, for a model of Llama-70B's shape.

    python benchmarks/collect.py [--degrees 8 64] [--layers 80] [--rank 0]

The model is built on the meta device out of DeepSpeed's own AutoTP layers, whose process group's size and rank are
answered here: no weights, no processes. Bytes are those of compact JSON; a .pt file stores equal maps once and
takes those given as pickled.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

LIMIT_BYTES = 4_700_000
LIMIT_SECONDS = 5.0
LIMITED_DEGREE = 8
HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 8192, 64, 8, 28672, 128256


def build(degree: int, rank: int, layers: int) -> nn.Module:
    """Llama-70B's parameters by their own names, cut over ``degree`` ranks as AutoTP cuts them."""
    from deepspeed.module_inject import layers as autotp
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    meta = AutoTPMeta(num_kv_heads=KV_HEADS, num_attention_heads=HEADS, n_embd=HIDDEN)
    group = object()

    def linear(rows: int, columns: int) -> nn.Linear:
        return nn.Linear(columns, rows, bias=False, device="meta", dtype=torch.bfloat16)

    def column(name: str, rows: int, **options: bool) -> nn.Module:
        return autotp.LinearLayer(linear(rows, HIDDEN), group, name=name, tp_meta=meta, **options)

    def row(name: str, columns: int) -> nn.Module:
        return autotp.LinearAllreduce(linear(HIDDEN, columns), group, name=name, tp_meta=meta)

    def norm() -> nn.Module:
        return nn.RMSNorm(HIDDEN, device="meta", dtype=torch.bfloat16)

    def block() -> nn.Module:
        made = nn.Module()
        made.self_attn, made.mlp = nn.Module(), nn.Module()
        for name, rows in (("q_proj", HIDDEN), ("k_proj", HIDDEN // HEADS * KV_HEADS)):
            setattr(made.self_attn, name, column(f"self_attn.{name}", rows))
        made.self_attn.v_proj = column("self_attn.v_proj", HIDDEN // HEADS * KV_HEADS)
        made.self_attn.o_proj = row("self_attn.o_proj", HIDDEN)
        made.mlp.gate_proj, made.mlp.up_proj = column("mlp.gate_proj", INNER), column("mlp.up_proj", INNER)
        made.mlp.down_proj = row("mlp.down_proj", INNER)
        made.input_layernorm, made.post_attention_layernorm = norm(), norm()
        return made

    model = nn.Module()
    with ExitStack() as answered:
        answered.enter_context(mock.patch.object(autotp.dist, "get_world_size", return_value=degree))
        answered.enter_context(mock.patch.object(autotp.dist, "get_rank", return_value=rank))
        if hasattr(autotp, "pg_utils"):
            answered.enter_context(mock.patch.object(autotp.pg_utils, "is_parallel", return_value=degree > 1))
        model.model = nn.Module()
        model.model.embed_tokens = nn.Embedding(VOCAB, HIDDEN, device="meta", dtype=torch.bfloat16)
        model.model.layers = nn.ModuleList(block() for _ in range(layers))
        model.model.norm = norm()
        model.lm_head = column("lm_head", VOCAB, gather_output=True)
    model.config = SimpleNamespace(num_key_value_heads=KV_HEADS, hidden_size=HIDDEN)
    return model


def measure(degree: int, rank: int, layers: int) -> dict[str, float]:
    from deepspeed_affine import collect_autotp_universal_checkpoint_info

    model = build(degree, rank, layers)
    began = time.perf_counter()
    info = collect_autotp_universal_checkpoint_info(model)
    seconds = time.perf_counter() - began
    compact = len(json.dumps(info["affine_map"], separators=(",", ":")))
    return {
        "degree": degree,
        "tensors": len(info["affine_map"]["params"]),
        "bytes": compact,
        "pickled": len(pickle.dumps(info["affine_map"], protocol=2)),
        "seconds": round(seconds, 2),
        "version": info["universal_checkpoint_version"],
        "allocated": sum(param.numel() for param in model.parameters() if not param.is_meta),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degrees", type=int, nargs="+", default=[LIMITED_DEGREE, 64])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    failed = False
    for degree in arguments.degrees:
        row = measure(degree, arguments.rank, arguments.layers)
        print(json.dumps(row))
        failed |= row["seconds"] > LIMIT_SECONDS or (degree == LIMITED_DEGREE and row["bytes"] > LIMIT_BYTES)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
