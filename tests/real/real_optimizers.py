"""Optimizers whose per-parameter states are not Adam's two moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum; one state tensor, called ``exp_avg`` as the published code calls it."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum, gradient = state["exp_avg"], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_((momentum * beta1 + gradient * (1 - beta1)).sign_(), alpha=-group["lr"])
                momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)


def build(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.05)
    if name == "momentum":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    if name == "adagrad":
        return torch.optim.Adagrad(params, lr=0.05)
    if name == "lion":
        return Lion(params)
    if name == "amsgrad":
        return torch.optim.AdamW(params, lr=0.01, amsgrad=True)
    if name == "rmsprop":
        return torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True)
    if name == "adamax":
        return torch.optim.Adamax(params, lr=0.01)
    if name == "fused_adam":
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(params, lr=0.01)
    if name == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, lr=0.01)
    raise ValueError(f"no optimizer {name}")
