"""DeepSpeed engines of one process, for tests that need a real optimizer and no second rank."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
# DeepSpeed asks for it whenever it partitions.
os.environ.setdefault("LOCAL_RANK", "0")

import torch
from torch import nn


class Small(nn.Module):
    """A few parameters of odd sizes: one tied, one frozen, one in no gradient, one buffer."""

    def __init__(self, *, frozen: bool = True, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.up = nn.Linear(width, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, width)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))
        if frozen:
            self.norm.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.tanh(self.norm(self.up(self.embed(tokens)))))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


RANK_OF_ONE = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}


@contextmanager
def as_a_job_of_one() -> Iterator[None]:
    """What a launcher would set is set, for DeepSpeed alone: other tests of the session are no part of a job."""
    before = {name: os.environ.get(name) for name in RANK_OF_ONE}
    os.environ.update(RANK_OF_ONE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_process_group() -> None:
    """A gloo group of this process alone; the second call finds it started."""
    import deepspeed

    if torch.distributed.is_initialized():
        return
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = f"file://{tempfile.mkdtemp()}/store"
    with as_a_job_of_one():
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="gloo")


def make_engine(
    stage: int,
    *,
    dtype: str = "fp32",
    optimizer: Any = None,
    model: nn.Module | None = None,
    seed: int = 1,
    groups: int = 1,
    zero: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """An engine over one process. ``optimizer`` builds a client optimizer from parameter groups, or None for AdamW."""
    import deepspeed

    start_process_group()
    torch.manual_seed(seed)
    model = Small() if model is None else model
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        **config,
    }
    settings["zero_optimization"].update(zero or {})
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    members: list[dict[str, Any]] = [{"params": parameters}]
    if groups == 2:
        members = [
            {"params": [p for p in parameters if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.05},
            {"params": [p for p in parameters if p.dim() <= 1], "lr": 3e-2, "weight_decay": 0.0},
        ]
    build = optimizer or (lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.01))
    with as_a_job_of_one():
        return deepspeed.initialize(model=model, optimizer=build(members), config=settings)[0]


def take_steps(engine: Any, count: int, first: int = 0) -> list[float]:
    """The losses of ``count`` steps; the data of a step depend on its number alone."""
    losses = []
    for step in range(first, first + count):
        tokens = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(step))
        loss = engine(tokens)
        engine.backward(loss)
        with torch.no_grad():
            engine.step()
        losses.append(float(loss.detach()))
    return losses
