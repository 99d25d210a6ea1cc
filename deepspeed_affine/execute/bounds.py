"""How much memory a conversion will hold, stated before it starts."""

from __future__ import annotations

from deepspeed_affine.execute.convert import ExecutionOptions
from deepspeed_affine.execute.gather import SCRATCH_BYTES
from deepspeed_affine.plan.conversion import ConversionPlan

__all__ = ["memory_bound"]

SLACK_BYTES = 64 << 20
"""Open files, the journal, the allocator's own."""

BYTES_PER_FILE = 4 << 10
"""What is kept of a file until the end: its journal entry, its job, its line in the manifest."""

TORCH_BYTES = 256 << 20
"""torch, once imported: only plans with arithmetic need it."""


def memory_bound(plan: ConversionPlan, options: ExecutionOptions, *, may_average: bool = False) -> int:
    """The most anonymous memory, in bytes, the conversion will hold at once: what the process holds now (interpreter,
    metadata, plan), buffers for every worker, and torch where the plan needs arithmetic.

    ``may_average`` says that copies found to have drifted will be averaged.
    """
    buffers = options.workers * (2 * max(options.chunk_bytes, 16) + SCRATCH_BYTES)
    metadata = BYTES_PER_FILE * len(plan.paths)
    computes = _needs_torch(plan) or (may_average and any(task.replicas for task in plan.tensors))
    return _resident_bytes() + buffers + metadata + (TORCH_BYTES if computes else 0) + SLACK_BYTES


def _resident_bytes() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        lines = [line.split() for line in status if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(int(line[1]) * 1024 for line in lines)


def _needs_torch(plan: ConversionPlan) -> bool:
    for task in plan.gathered:
        if task.fill == "average":
            return True
        for piece in task.pieces:
            (index,) = piece.locations
            stored = plan.storages[index].dtype
            if piece.scale != 1.0 or (stored != task.dtype and (stored, task.dtype) != ("bfloat16", "float32")):
                return True
    return False
