"""The ZeRO stage as a checkpoint records it: a number, or DeepSpeed's enumeration in either way Python pickles one."""

from __future__ import annotations

from typing import Any

from deepspeed_affine.storage.refs import Global, StandIn, is_instance_of

__all__ = ["as_stage", "is_stage"]

ENUMERATION = "ZeroStageEnum"
STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


def as_stage(value: Any) -> int | None:
    """The number ``value`` stands for, None for anything else.

    Python 3.11.0 to 3.11.3 pickle a member of an enumeration by its name, all others by its value.
    """
    if is_instance_of(value, "getattr"):
        owner, name = value.stand_in_args if len(value.stand_in_args) == 2 else (None, None)
        known = isinstance(owner, Global) and owner.qualname == ENUMERATION
        return STAGES.get(name) if known and isinstance(name, str) else None
    if isinstance(value, StandIn):
        value = value.stand_in_args[0] if value.stand_in_args else None
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def is_stage(value: Any) -> bool:
    """Whether ``value`` is a member of DeepSpeed's enumeration."""
    return is_instance_of(value, ENUMERATION) or (is_instance_of(value, "getattr") and as_stage(value) is not None)
