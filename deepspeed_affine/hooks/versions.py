"""What differs between DeepSpeed versions, asked of the installed code and not of its version number.

A version that lacks something answers with None or with the behaviour it has; nothing is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

__all__ = [
    "AUTOEP_META",
    "describes_itself",
    "layer_metadata",
    "metadata_attribute",
    "stock_collect",
    "stock_ucp_version",
]

AUTOEP_META = "ds_autoep_uc_meta"
"""The attribute of an expert parameter with its placement; written by 0.19.7 and later."""

Collect = Callable[[torch.nn.Module], dict[str, Any]]


def layer_metadata(param: torch.Tensor) -> Mapping[str, Any] | None:
    """The restore metadata an AutoTP layer put on ``param``, or None: from 0.18.9 on layers write it."""
    attribute = metadata_attribute()
    found = getattr(param, attribute, None) if attribute is not None else None
    return found if isinstance(found, Mapping) and found else None


def metadata_attribute() -> str | None:
    """The attribute under which a parameter carries that metadata."""
    found: str | None = _constant("DS_AUTOTP_UC_META")
    return found


def describes_itself(layer: torch.nn.Module) -> bool:
    """Whether the class that says how ``layer`` was cut knows of the function that cuts it.

    A subclass that overrides the partition and inherits the description (conv layers in every version, all fused and
    shared-QK layers of 0.18.9) carries the metadata of a layout it does not have.
    """
    order = type(layer).__mro__
    said = next((at for at, kind in enumerate(order) if "_mark_uc_metadata" in vars(kind)), None)
    done = next((at for at, kind in enumerate(order) if "_tp_partition" in vars(kind)), None)
    return said is not None and (done is None or said <= done)


def stock_collect() -> Collect | None:
    """DeepSpeed's own ``collect_autotp_universal_checkpoint_info``, or None before 0.18.9."""
    layers = import_module("deepspeed.module_inject.layers")
    found: Collect | None = getattr(layers, "collect_autotp_universal_checkpoint_info", None)
    return found


def stock_ucp_version() -> float:
    """The universal-checkpoint version the installed DeepSpeed stamps: 0.2, 0.3 from 0.19.4, 0.4 from 0.19.6."""
    return float(_constant("UNIVERSAL_CHECKPOINT_VERSION_VALUE") or 0.2)


def _constant(name: str) -> Any:
    return getattr(import_module("deepspeed.checkpoint.constants"), name, None)
