"""Checkpoints that users reported and the catalogue of cases has no word for: groups of few elements, sequence ranks.

``train_user_cases.py ROOT KIND...`` trains and saves each kind into ROOT/KIND, beside what its ranks held.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from forks import fork_ranks  # sets the environment of what is imported next

# isort: split
import deepspeed
import torch
import train
from real_cases import Case
from real_models import Plain
from torch import nn


class Few(nn.Module):
    """A matrix, and groups of one and of fifteen elements beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.shift = nn.Parameter(torch.zeros(6))
        self.other = nn.Parameter(torch.ones(9))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale + self.shift + self.other[:6] * self.other[3:]
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def configured(case: Case, load_universal: bool) -> dict[str, Any]:
    config = train.build_config(case)
    config["checkpoint"] = {"load_universal": load_universal}
    return config


def few(case: Case, *, load_universal: bool = False) -> Any:
    model = Few()
    config = configured(case, load_universal)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    groups = [
        {"params": [model.embed.weight, model.head.weight]},
        {"params": [model.scale], "weight_decay": 0.0},
        {"params": [model.shift, model.other], "lr": 3e-2},
    ]
    return deepspeed.initialize(model=model, config=config, model_parameters=groups)[0]


def adafactor(case: Case) -> Any:
    from transformers import Adafactor

    model = Plain()
    config = train.build_config(case)
    optimizer = Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False)
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def sequence(case: Case, *, load_universal: bool = False) -> Any:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    model = Plain()
    config = configured(case, load_universal)
    # Its ranks together are one micro batch.
    del config["gradient_accumulation_steps"]
    config["train_batch_size"] = 2 * case.world // 2
    config["sequence_parallel_size"] = 2
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    parameters = list(model.parameters())
    return deepspeed.initialize(model=model, config=config, model_parameters=parameters, mpu=parallel_state_sp)[0]


def ordinary(case: Case) -> Any:
    return _build_engine(case, load_universal=False)


_build_engine = train.build_engine
TURNS = {"zero_optimization": {"round_robin_gradients": True}}
BF16 = {"data_types": {"grad_accum_dtype": "fp32"}}
KINDS = {
    "few_bf16opt": (few, Case("few_bf16opt", world=4, groups=2, dtype="bf16", config=BF16)),
    "few_zero1": (few, Case("few_zero1", world=4, groups=2)),
    "few_zero2": (few, Case("few_zero2", world=4, groups=2, stage=2)),
    "few_zero3": (few, Case("few_zero3", world=4, groups=2, stage=3)),
    "adafactor_zero1": (adafactor, Case("adafactor_zero1", world=2)),
    "adafactor_zero3": (adafactor, Case("adafactor_zero3", world=2, stage=3)),
    "turns_zero1": (ordinary, Case("turns_zero1", groups=2, config=TURNS)),
    "turns_zero2": (ordinary, Case("turns_zero2", world=4, stage=2, dtype="bf16", config=TURNS)),
    "sequence_zero1": (sequence, Case("sequence_zero1", world=4)),
    "sequence_zero3": (sequence, Case("sequence_zero3", world=4, stage=3)),
}


def main(root: Path, kinds: list[str]) -> None:
    for kind in kinds:
        build, case = KINDS[kind]

        def engine(case: Case, *, load_universal: bool, build: Any = build) -> Any:
            torch.manual_seed(1234)
            return build(case)

        train.build_engine = engine
        folder = root / kind
        folder.mkdir(parents=True, exist_ok=True)
        result = fork_ranks(case.world, partial(train.run_train, case, root), folder / "log")
        (folder / "train.json").write_text(json.dumps(result), encoding="utf-8")
        print(f"{kind}: {'ok' if result['ok'] else result['error']}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
