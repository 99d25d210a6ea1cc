"""Convert, verify and move DeepSpeed checkpoints through an affine description of every shard.

Importing this package imports neither torch nor deepspeed; names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepspeed_affine._version import __version__

if TYPE_CHECKING:
    from deepspeed_affine.errors import (
        AffineError,
        BudgetExceededError,
        CheckpointFormatError,
        IntegrityError,
        InvalidMapError,
        PolicyError,
        UnsupportedLayoutError,
    )
    from deepspeed_affine.execute.live import TransferReport, transfer
    from deepspeed_affine.hooks.attach import Attachment, attach
    from deepspeed_affine.hooks.client_state import with_universal_info
    from deepspeed_affine.hooks.collect import collect_autotp_universal_checkpoint_info
    from deepspeed_affine.hooks.describe import describe
    from deepspeed_affine.hooks.live_shards import LiveShards, live_shards
    from deepspeed_affine.hooks.load import load_checkpoint
    from deepspeed_affine.hooks.report import LoadReport
    from deepspeed_affine.ir import (
        AFFINE_MAP_FORMAT_VERSION,
        SCALE_POWER_BY_STATE,
        AffinePiece,
        ParamAffineMap,
        block_gather_map,
        compose,
        compose_maps,
        contiguous_split_map,
        meet,
        replicated_map,
        segmented_map,
        sub_param_map,
    )
    from deepspeed_affine.plan.model import ModelPlan, plan_model
    from deepspeed_affine.plan.placement import Placement
    from deepspeed_affine.plan.transfer import PlanBudget, plan_transfer
    from deepspeed_affine.plan.transfer_plan import TransferPlan

_HOMES = {
    "deepspeed_affine.execute.live": ("TransferReport", "transfer"),
    "deepspeed_affine.hooks.attach": ("Attachment", "attach"),
    "deepspeed_affine.hooks.client_state": ("with_universal_info",),
    "deepspeed_affine.hooks.collect": ("collect_autotp_universal_checkpoint_info",),
    "deepspeed_affine.hooks.describe": ("describe",),
    "deepspeed_affine.hooks.live_shards": ("LiveShards", "live_shards"),
    "deepspeed_affine.hooks.load": ("load_checkpoint",),
    "deepspeed_affine.hooks.report": ("LoadReport",),
    "deepspeed_affine.errors": (
        "AffineError",
        "BudgetExceededError",
        "CheckpointFormatError",
        "IntegrityError",
        "InvalidMapError",
        "PolicyError",
        "UnsupportedLayoutError",
    ),
    "deepspeed_affine.ir": (
        "AFFINE_MAP_FORMAT_VERSION",
        "SCALE_POWER_BY_STATE",
        "AffinePiece",
        "ParamAffineMap",
        "block_gather_map",
        "compose",
        "compose_maps",
        "contiguous_split_map",
        "meet",
        "replicated_map",
        "segmented_map",
        "sub_param_map",
    ),
    "deepspeed_affine.plan.model": ("ModelPlan", "plan_model"),
    "deepspeed_affine.plan.placement": ("Placement",),
    "deepspeed_affine.plan.transfer": ("PlanBudget", "plan_transfer"),
    "deepspeed_affine.plan.transfer_plan": ("TransferPlan",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AFFINE_MAP_FORMAT_VERSION",
    "SCALE_POWER_BY_STATE",
    "AffineError",
    "AffinePiece",
    "Attachment",
    "BudgetExceededError",
    "CheckpointFormatError",
    "IntegrityError",
    "InvalidMapError",
    "LiveShards",
    "LoadReport",
    "ModelPlan",
    "ParamAffineMap",
    "Placement",
    "PlanBudget",
    "PolicyError",
    "TransferPlan",
    "TransferReport",
    "UnsupportedLayoutError",
    "__version__",
    "attach",
    "block_gather_map",
    "collect_autotp_universal_checkpoint_info",
    "compose",
    "compose_maps",
    "contiguous_split_map",
    "describe",
    "live_shards",
    "load_checkpoint",
    "meet",
    "plan_model",
    "plan_transfer",
    "replicated_map",
    "segmented_map",
    "sub_param_map",
    "transfer",
    "with_universal_info",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
