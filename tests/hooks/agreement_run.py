"""One rank of two, without an engine: what each does with what only one of them finds. Prints what was raised."""

from __future__ import annotations

import datetime
import json
import sys
from functools import partial
from typing import Any

import torch.distributed as dist

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.hooks.agreement import together, union_of_names
from deepspeed_affine.hooks.given import require_info
from deepspeed_affine.hooks.load import load_checkpoint
from deepspeed_affine.hooks.wholeness import check_agreed

ALIKE = {"load_module_only": False, "info": None}


def said(work: Any) -> str:
    try:
        return f"fine: {work()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def in_a_block(work: Any, **options: Any) -> None:
    with together("the block", **options):
        work()


def fault(rank: int) -> None:
    if rank:
        raise CheckpointFormatError("of rank 1")


def bug(rank: int) -> None:
    if rank:
        raise ZeroDivisionError("of rank 1")


def main(rank: int, store: str) -> None:
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    mine = "/folder" if rank == 0 else "/copy"
    unlike = {**ALIKE, "load_module_only": rank == 1}
    found = {
        "copies": said(partial(check_agreed, mine, 7, ALIKE)),
        "two checkpoints": said(partial(check_agreed, mine, rank, ALIKE)),
        "options": said(partial(check_agreed, mine, 7, unlike)),
        "fault": said(partial(in_a_block, partial(fault, rank))),
        "bug": said(partial(in_a_block, partial(bug, rank))),
        "bug described": said(partial(in_a_block, partial(bug, rank), describe=lambda faults: "half done:")),
        "info": said(partial(in_a_block, partial(require_info, {"affine_map": 3} if rank else None, "it"))),
        "no engine": said(partial(load_checkpoint, object() if rank else None, "/folder")),
        "names": sorted(union_of_names(["a", f"of {rank}"])),
    }
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
