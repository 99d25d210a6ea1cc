"""DeepSpeed's own descriptions of a layout, turned into maps.

Reading metadata needs neither torch nor numpy; only probing does, so names are resolved when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_affine.lowering.layer_meta import lower_layer_meta
    from deepspeed_affine.lowering.lowered import LoweredParam, Rule, SubParamEntry
    from deepspeed_affine.lowering.merge import lower_param, unused_patterns
    from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift, ScaledStates
    from deepspeed_affine.lowering.probing import PartitionError, assert_partition, probe
    from deepspeed_affine.lowering.stock_rules import StockRules
    from deepspeed_affine.lowering.uc_info import UcInfo

__all__ = [
    "IdenticalShards",
    "LoweredParam",
    "OnDrift",
    "PartitionError",
    "Rule",
    "ScaledStates",
    "StockRules",
    "SubParamEntry",
    "UcInfo",
    "assert_partition",
    "lower_layer_meta",
    "lower_param",
    "probe",
    "unused_patterns",
]

_HOMES = {
    "IdenticalShards": "policy",
    "LoweredParam": "lowered",
    "OnDrift": "policy",
    "PartitionError": "probing",
    "Rule": "lowered",
    "ScaledStates": "policy",
    "StockRules": "stock_rules",
    "SubParamEntry": "lowered",
    "UcInfo": "uc_info",
    "assert_partition": "probing",
    "lower_layer_meta": "layer_meta",
    "lower_param": "merge",
    "probe": "probing",
    "unused_patterns": "merge",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
