"""Trains with the Hugging Face Trainer on DeepSpeed, and resumes on another number of processes.

    torchrun --nproc_per_node 2 examples/hf_trainer.py train WORK
    ds_to_universal --affine --input_folder WORK/checkpoint-2/global_step2 \
        --output_folder WORK/checkpoint-2/global_step2_universal
    torchrun --nproc_per_node 1 examples/hf_trainer.py resume WORK

What a training script of your own needs is ``AffineCallback`` and, to resume,
``"checkpoint": {"load_universal": true}`` in its DeepSpeed configuration.
"""

import json
import os
import sys
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

import deepspeed_affine

SAMPLES, LENGTH, VOCABULARY, BATCH, GLOBAL_BATCH = 16, 8, 32, 2, 4


class AffineCallback(TrainerCallback):
    """Attaches deepspeed_affine to the engine the Trainer makes, before it resumes, and detaches when it has trained.

    The Trainer makes its engine and resumes in one breath, and has no event in between. So the callback is told of the
    engine by the Trainer's own accelerator, which prepares it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.accelerator = trainer.accelerator
        self.handle: deepspeed_affine.Attachment | None = None
        self.prepare = self.accelerator.prepare
        self.accelerator.prepare = self.prepare_and_attach

    def prepare_and_attach(self, *objects: Any, **options: Any) -> Any:
        prepared = self.prepare(*objects, **options)
        for each in prepared if isinstance(prepared, (list, tuple)) else (prepared,):
            if isinstance(each, DeepSpeedEngine) and (self.handle is None or self.handle.engine is not each):
                # A run that is started again, as with auto_find_batch_size, makes another engine of the same model.
                self.detach()
                self.handle = deepspeed_affine.attach(each)
        return prepared

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.detach()

    def detach(self) -> None:
        if self.handle is not None:
            self.handle.detach()
            self.handle = None


class Tokens(torch.utils.data.Dataset):
    """The same few sequences on every rank."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def deepspeed_config(resume: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": resume},
    }


def main(verb: str, work: str) -> None:
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    arguments = TrainingArguments(
        output_dir=work,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        # The Trainer resumes with the batch size per device it was saved with; accumulation keeps the whole batch.
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=GLOBAL_BATCH // BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        use_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
        deepspeed=deepspeed_config(resume=verb == "resume"),
        report_to=[],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.add_callback(AffineCallback(trainer))
    trainer.train(resume_from_checkpoint=os.path.join(work, "checkpoint-2") if verb == "resume" else None)
    if trainer.is_world_process_zero():
        losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
        print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("train", "resume"):
        sys.exit(f"usage: {sys.argv[0]} train|resume WORK_FOLDER")
    main(sys.argv[1], sys.argv[2])
