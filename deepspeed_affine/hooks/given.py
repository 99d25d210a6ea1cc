"""What a caller gave, before anything is done with it: an engine, a model, an info, a number of threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.hooks.stated import StatedInfo

__all__ = ["ENGINE", "require_engine", "require_info", "require_model", "require_threads"]

ENGINE = ("module", "optimizer", "load_checkpoint", "save_checkpoint")
"""What every engine of DeepSpeed has, and neither a model nor an optimizer has all of."""


def require_engine(engine: Any, who: str) -> None:
    """``engine`` is one, or PolicyError on behalf of ``who``."""
    for name in ENGINE:
        if not hasattr(engine, name):
            raise PolicyError(
                f"{who} was given a {type(engine).__name__}, which has no {name!r}; expected the engine that "
                "deepspeed.initialize returns."
            )


def require_model(model: Any, who: str) -> None:
    """``model`` is a module and no engine, whose names of parameters are others than its module's."""
    import torch

    if isinstance(model, torch.nn.Module) and not all(hasattr(model, name) for name in ENGINE):
        return
    raise PolicyError(f"{who} was given a {type(model).__name__}; expected the model: pass engine.module.")


def require_info(info: Any, who: str) -> None:
    """``info`` is None or can be read: a rank that found out later would leave the others in a collective."""
    if info is None:
        return
    if not isinstance(info, Mapping):
        raise PolicyError(
            f"{who}: info is a {type(info).__name__}; expected the model's universal_checkpoint_info, a dictionary."
        )
    StatedInfo(info)


def require_threads(threads: Any) -> None:
    """``threads`` is a number of threads."""
    if type(threads) is not int or threads < 1:
        raise PolicyError(f"threads is {threads!r}; expected a whole number of at least 1.")
