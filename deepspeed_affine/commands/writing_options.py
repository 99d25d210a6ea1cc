"""The options that every command which writes a checkpoint anew has, in one place and in the same words."""

from __future__ import annotations

import argparse
import os

from deepspeed_affine.commands.job import RANK_TIMEOUT, seconds
from deepspeed_affine.lowering.policy import IdenticalShards, ScaledStates

__all__ = ["add_choices", "add_safety"]


def add_choices(group: argparse._ActionsContainer) -> None:
    """``group`` has the options for what the checkpoint leaves open, but ``--on-drift``, whose choices differ."""
    group.add_argument(
        "--scaled-states",
        choices=[choice.value for choice in ScaledStates],
        default=ScaledStates.REFUSE.value,
        help="what to do with optimizer states of parameters that ranks hold scaled (default: %(default)s)",
    )
    group.add_argument(
        "--identical-shards",
        choices=[choice.value for choice in IdenticalShards],
        default=IdenticalShards.REFUSE.value,
        help="what to do with a parameter said to be split whose shards are byte-identical on all ranks "
        "(default: %(default)s)",
    )


def add_safety(group: argparse._ActionsContainer) -> None:
    """``group`` has the options on checksums, durability and lost processes, and ``--json``."""
    group.add_argument("--no-source-crc", action="store_true", help="do not check source storages against their CRC")
    group.add_argument("--no-fsync", action="store_true", help="do not wait until the output is on the disk")
    group.add_argument(
        "--rank-timeout",
        type=seconds,
        default=os.environ.get(RANK_TIMEOUT, "60"),
        metavar="SECONDS",
        help="started by torchrun, how long another process may give no sign of life before it counts as lost "
        f"(default: {RANK_TIMEOUT} in the environment, else 60)",
    )
    group.add_argument("--json", action="store_true", help="print the plan or the result as JSON")
