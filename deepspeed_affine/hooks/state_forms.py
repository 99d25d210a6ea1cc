"""Which states an optimizer keeps, and in what form: as its class would allocate them at its first step.

Of the optimizers of torch, DeepSpeed and Apex that is known by class; of others the checkpoint's own states are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed_affine.hooks.stored_params import STEP

if TYPE_CHECKING:
    import torch

__all__ = [
    "Kept",
    "first_number",
    "keeps_factors",
    "keeps_step_in_group",
    "kept_states",
    "number_in_form",
    "state_dtype",
    "used_states",
]


@dataclass(frozen=True, slots=True)
class Kept:
    """The per-element states an optimizer cannot step without, those it may have, and those that are one number."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    def __contains__(self, state: str) -> bool:
        return state in self.required or state in self.optional


_ADAM = Kept(("exp_avg", "exp_avg_sq"), ("max_exp_avg_sq",), (STEP,))
_MUON = Kept(("momentum_buffer",))
_KEPT: Mapping[str, Kept] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "RAdam": _ADAM,
    "NAdam": Kept(_ADAM.required, (), (STEP, "mu_product")),
    "FusedAdam": _ADAM,
    "DeepSpeedCPUAdam": _ADAM,
    "Adamax": Kept(("exp_avg", "exp_inf"), (), (STEP,)),
    "Adagrad": Kept(("sum",), (), (STEP,)),
    "RMSprop": Kept(("square_avg",), ("momentum_buffer", "grad_avg"), (STEP,)),
    "Adadelta": Kept(("square_avg", "acc_delta"), (), (STEP,)),
    "SGD": Kept((), ("momentum_buffer",)),
    "FusedLion": Kept(("exp_avg",), (), (STEP,)),
    "DeepSpeedCPULion": Kept(("exp_avg",), (), (STEP,)),
}
_KNOWN_HOMES = ("torch.optim.", "deepspeed.", "apex.")
_BY_OPTION = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
"""The option of a parameter group with which an optimizer steps by that state."""


def kept_states(optimizer: Any, options: Mapping[str, Any]) -> Kept | None:
    """What ``optimizer`` keeps for a parameter group with these ``options``; None for a class that is not known."""
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith(_KNOWN_HOMES):
        return None
    if kind.__name__.startswith(("Muon", "SingleDeviceMuon")):
        return _MUON if options.get("use_muon") else _ADAM
    return _KEPT.get(kind.__name__)


def used_states(kept: Kept, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The per-element states that a step with these ``options`` looks up in an optimizer which has begun."""
    asked = [state for state in kept.optional if options.get(_BY_OPTION.get(state, ""))]
    return (*kept.required, *asked)


def first_number(state: str) -> float:
    """What a state that is one number is before the first step."""
    return 1.0 if state == "mu_product" else 0


def state_dtype(optimizer: Any, tensor: torch.Tensor, stored: torch.dtype) -> torch.dtype:
    """The dtype in which the optimizer keeps a state of ``tensor``; ``stored`` is the one in the checkpoint."""
    import torch

    if not (stored.is_floating_point and tensor.is_floating_point()):
        return stored
    # DeepSpeed's CPU optimizers keep full states beside weights of low precision, unless they are told otherwise.
    return torch.float32 if getattr(optimizer, "fp32_optimizer_states", False) else tensor.dtype


def number_in_form(optimizer: Any, options: Mapping[str, Any], tensor: Any, state: str, old: Any, value: Any) -> Any:
    """``value`` as the optimizer keeps it: like ``old``, its present value, or as its class would make it.

    A tensor is changed in place, since the optimizer may have captured it.
    """
    import torch

    number = value.item() if torch.is_tensor(value) else value
    if torch.is_tensor(old):
        return old.fill_(number)
    if isinstance(old, (int, float)) and not isinstance(old, bool):
        return type(old)(number)
    home = f"{type(optimizer).__module__}."
    if home.startswith("torch.optim."):
        device = tensor.device if options.get("capturable") or options.get("fused") else "cpu"
        return torch.tensor(float(number), dtype=torch.float32, device=device)
    if home.startswith(_KNOWN_HOMES):
        return int(number) if state == STEP else number
    return value.clone() if torch.is_tensor(value) else value


def keeps_factors(optimizer: Any, tensor: torch.Tensor) -> bool:
    """Whether the optimizer keeps states of the rows and columns of ``tensor`` instead of its elements."""
    kind = type(optimizer)
    return kind.__name__ == "Adafactor" and f"{kind.__module__}.".startswith("torch.optim.") and tensor.dim() > 1


def keeps_step_in_group(optimizer: Any, options: Mapping[str, Any], states: Mapping[str, Any]) -> bool:
    """Whether the optimizer counts its steps once a group: Apex does, and has no step beside the moments."""
    if type(optimizer).__module__.startswith("apex."):
        return True
    return type(options.get(STEP)) is int and bool(states) and STEP not in states
