"""Trains with Accelerate on DeepSpeed, and resumes on another number of processes.

    torchrun --nproc_per_node 2 examples/hf_accelerate.py train WORK
    ds_to_universal --affine --input_folder WORK/state/pytorch_model --output_folder WORK/universal/pytorch_model
    torchrun --nproc_per_node 1 examples/hf_accelerate.py resume WORK

Three lines make the difference to a script without deepspeed_affine: the import, ``attach`` after ``prepare``, and
``"load_universal"`` in the configuration of the run that resumes. Accelerate's own ``save_state`` and ``load_state``,
which call the engine, do the rest.
"""

import json
import os
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn

import deepspeed_affine  # 1 of 3

SAMPLES, BATCH, WIDTH = 16, 4, 6


def accelerator_for(resume: bool) -> Accelerator:
    config = {
        "train_micro_batch_size_per_gpu": BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": resume},  # 2 of 3
    }
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


def main(verb: str, work: str) -> None:
    resume = verb == "resume"
    accelerator = accelerator_for(resume)
    # The run that resumes starts from other weights; whatever it was not given back would show.
    torch.manual_seed(1 if resume else 0)
    model = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    deepspeed_affine.attach(model)  # 3 of 3
    if resume:
        accelerator.load_state(os.path.join(work, "universal"))
    losses = {}
    for step in range(2 if resume else 0, 4):
        if step == 2 and not resume:
            accelerator.save_state(os.path.join(work, "state"))
        rows = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = rows.chunk(accelerator.num_processes)[accelerator.process_index].to(accelerator.device)
        loss = model(mine).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[str(step + 1)] = accelerator.gather(loss.detach().reshape(1)).mean().item()
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses}))
    accelerator.end_training()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("train", "resume"):
        sys.exit(f"usage: {sys.argv[0]} train|resume WORK_FOLDER")
    main(sys.argv[1], sys.argv[2])
