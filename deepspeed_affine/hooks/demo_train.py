"""One rank of the demo's training run: a small transformer under AutoTP, saved as DeepSpeed saves it.

Started by ``ds_affine demo`` as ``python -m deepspeed_affine.hooks.demo_train``, once for each rank. Needs torch
and DeepSpeed only. The ranks meet through a file, so no port and no host name is needed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["TinyTransformer", "main", "train"]

HEADS, KV_HEADS, HEAD_DIM, VOCAB = 6, 3, 8, 101
PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*attention\.[qkv]_proj\.weight$", r".*\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*attention\.o_proj\.weight$", r".*\.down\.weight$"], "partition_type": "row"},
    ],
}


class Attention(nn.Module):
    """Grouped-query attention with three key/value heads, which two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(width, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            projection(hidden).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.attention = Attention()
        self.attention_norm = nn.LayerNorm(width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 131)
        self.down = nn.Linear(131, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        out: torch.Tensor = hidden + self.down(functional.gelu(self.up(self.norm(hidden))))
        return out


class TinyTransformer(nn.Module):
    """Two blocks between an embedding and a head; ``forward`` returns the loss of predicting the next token."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        # AutoTP reads the head counts here, and cuts the projections at whole heads.
        self.config = SimpleNamespace(
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=width, model_type="demo"
        )
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(output: Path, steps: int) -> list[float]:
    """The checkpoint of ``steps`` training steps is under ``output``; returns the losses."""
    import deepspeed

    torch.manual_seed(1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": torch.distributed.get_world_size(), "partition_config": PARTITION},
    }
    model = TinyTransformer()
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        start = torch.randint(0, VOCAB, (4, 1), generator=generator)
        loss = engine((start + 3 * torch.arange(16)) % VOCAB)
        engine.backward(loss)
        # DeepSpeed 0.18 updates parameters outside its own no_grad block.
        with torch.no_grad():
            engine.step()
        losses.append(float(loss.detach()))
    engine.save_checkpoint(str(output), tag=f"global_step{steps}")
    return losses


def main() -> None:
    """Join the other ranks, train, save, and end the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    os.environ.update(
        RANK=str(args.rank),
        LOCAL_RANK=str(args.rank),
        WORLD_SIZE=str(args.world),
        LOCAL_SIZE=str(args.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    torch.set_num_threads(1)
    import deepspeed

    # Two ranks on one CPU need no shared-memory collectives, and building them takes a compiler and a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group(
        "gloo", init_method=args.store.absolute().as_uri(), rank=args.rank, world_size=args.world
    )
    deepspeed.init_distributed(dist_backend="gloo")
    losses = train(args.output, args.steps)
    if args.rank == 0:
        print("losses: " + ", ".join(f"{loss:.3f}" for loss in losses), flush=True)
    torch.distributed.barrier()
    # DeepSpeed keeps its groups, and a thread of one that drops its last tensor while Python ends aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
