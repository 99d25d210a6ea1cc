"""What a save of a live engine says about its layouts, and by which of DeepSpeed's two ways it gets into the files.

The engine writes its module's attribute from 0.18.9 on. Models that cut their layers themselves pass the same key in
the client state, which wins over the attribute, and which the save of models with experts refuses from 0.19.4 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from deepspeed_affine.hooks.collect import collect_autotp_universal_checkpoint_info
from deepspeed_affine.hooks.given import require_engine, require_info

__all__ = ["ATTRIBUTE", "HANDLE", "refuses_key", "saves_attribute", "universal_info", "with_universal_info"]

ATTRIBUTE = "universal_checkpoint_info"
"""Both the module's attribute that the engine reads when it saves and the key it is saved under."""

HANDLE = "_deepspeed_affine_attachment"
"""Where an attached engine keeps its ``Attachment``."""


def with_universal_info(
    client_state: Mapping[str, Any] | None, engine: Any, info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A new ``client_state`` that also says how every parameter is cut, for ``engine.save_checkpoint``.

    ``info`` is the model's own ``universal_checkpoint_info``, where ``client_state`` does not hold it already; its keys
    are kept. The save of a model with experts refuses the key from DeepSpeed 0.19.4 on: there the module's attribute of
    that name is set instead (of an attached engine until it is detached), and the result is without the key. Call it on
    every rank.
    """
    require_engine(engine, "with_universal_info")
    require_info(info, "with_universal_info")
    state = dict(client_state or {})
    own = {**(state.pop(ATTRIBUTE, None) or {}), **(info or {})}
    attached = vars(engine).get(HANDLE)
    known = attached is not None and (not own or own == dict(attached.own))
    made = attached.info if known else universal_info(engine, own)
    if not refuses_key(engine):
        state[ATTRIBUTE] = dict(made)
    elif attached is None:
        vars(engine.module)[ATTRIBUTE] = dict(made)
    elif not known:
        attached.say(made)
    return state


def universal_info(engine: Any, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """``universal_checkpoint_info`` with the map of every parameter, over what the module and the user already say."""
    stated = stated_info(engine, own)
    made = collect_autotp_universal_checkpoint_info(engine.module, info=stated or None, mpu=engine.mpu)
    return MappingProxyType({**stated, **made})


def stated_info(engine: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """What the module's attribute and the user say, the user last."""
    stated = getattr(engine.module, ATTRIBUTE, None)
    require_info(stated, f"the module's {ATTRIBUTE}")
    return {**(stated or {}), **own}


def saves_attribute(engine: Any) -> bool:
    """Whether the installed DeepSpeed writes the module's attribute into this engine's checkpoints."""
    names = vars(import_module("deepspeed.runtime.engine"))
    return "UNIVERSAL_CHECKPOINT_INFO" in names and (not engine.has_moe_layers or knows_universal_experts())


def refuses_key(engine: Any) -> bool:
    """Whether the installed DeepSpeed refuses ``universal_checkpoint_info`` in this engine's client state."""
    return bool(engine.has_moe_layers) and knows_universal_experts()


def knows_universal_experts() -> bool:
    """Whether the installed DeepSpeed, from 0.19.4 on, saves and loads universal checkpoints of models with experts.

    Such a version also records how experts are folded into tensor parallelism, which is what it is told by.
    """
    return "FOLDING_METADATA_KEY" in vars(import_module("deepspeed.runtime.engine"))
