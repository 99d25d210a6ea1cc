"""What the user decides where a checkpoint leaves a choice: three small enumerations.

Their values are the words of the command line. The defaults refuse, because each of the other answers
changes numbers that somebody trained.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["IdenticalShards", "OnDrift", "ScaledStates"]


class OnDrift(str, Enum):
    """What becomes of a parameter whose replicas disagree."""

    ERROR = "error"
    """Refuse, with the drift measured."""
    AVERAGE = "average"
    """Write the mean of the replicas, computed as DeepSpeed computes it."""
    FIRST = "first"
    """Write the copy of the lowest rank."""


class ScaledStates(str, Enum):
    """What becomes of an optimizer state whose parameter is held scaled."""

    REFUSE = "refuse"
    """Refuse: lr and eps would stay in the coordinate of the source."""
    RESET = "reset"
    """Write zeros."""
    POWER = "power"
    """Apply the state's own power of the scale (``SCALE_POWER_BY_STATE``)."""


class IdenticalShards(str, Enum):
    """What becomes of a parameter said to be split whose shards are byte-identical on every rank."""

    REFUSE = "refuse"
    """Refuse, with the list of such parameters."""
    REPLICATED = "replicated"
    """Take one copy: the metadata forgot to say that every rank holds the whole."""
    SPLIT = "split"
    """Believe the metadata and concatenate."""
