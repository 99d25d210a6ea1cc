"""Names in which a sequence-parallel rank stands where the model-parallel rank belongs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_affine.storage.folder import CheckpointFile

__all__ = ["without_sequence_ranks"]


def without_sequence_ranks(files: list[CheckpointFile], dp_degree: int | None, mp_degree: int | None) -> None:
    """In ``files``, those of a run under sequence parallelism are of model-parallel rank 0.

    It cuts no weight, but DeepSpeed before #8226 wrote its rank into the names. Such files state one model-parallel
    rank, and hold every data-parallel rank once.
    """
    for kind in ("zero_optim", "zero_model"):
        ranks = sorted(file.dp or 0 for file in files if file.kind == kind)
        if mp_degree == 1 and len(ranks) == dp_degree and ranks == list(range(len(ranks))):
            files[:] = [replace(file, mp=0) if file.kind == kind else file for file in files]
