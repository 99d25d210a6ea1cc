"""How large a side of a plan may be before planning it would take the machine with it."""

from __future__ import annotations

from deepspeed_affine.commands.text import counted
from deepspeed_affine.errors import PolicyError

__all__ = ["MOST_SHARDS", "require_shards"]

MOST_SHARDS = 1 << 24
"""What one side may have of all parameters together: 10,000 parameters on 1,600 processes, some gigabytes of plan."""


def require_shards(side: str, params: int, tp: int, dp: int, pp: int) -> None:
    """A side of so many parameters and these degrees has no more than ``MOST_SHARDS``; PolicyError otherwise."""
    shards = max(params * tp * dp, tp * dp * pp)
    if shards > MOST_SHARDS:
        raise PolicyError(
            f"{side}: makes {shards:,} shards of {counted(params, 'parameter')}; expected {MOST_SHARDS:,} at the most. "
            "Give fewer ranks, or a model of fewer tensors."
        )
