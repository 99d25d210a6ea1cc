"""Trains a tiny model for two steps with DeepSpeed on CPU and saves its checkpoint. Run under torchrun."""

import argparse
import os
import sys

import deepspeed
import torch

STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    args = parser.parse_args()
    # The shared-memory op would be compiled first, for a minute or more.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 5))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
    }
    if args.dtype != "fp32":
        config[args.dtype] = {"enabled": True}
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    for _ in range(STEPS):
        loss = engine(torch.randn(2, 8, dtype=dtype)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(args.out, tag="step")
    torch.distributed.barrier()
    # DeepSpeed keeps its groups, and a thread of one that drops its last tensor while Python ends aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
