"""Cutting F into the ranks' shards again, from what the models are and without a word of the code under test."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from real_cases import Case

LOCAL_EXPERT = re.compile(r"(?P<head>.*deepspeed_experts\.)(?P<index>\d+)(?P<tail>\..*)")
EXPERTS = 4


def universal_name(case: Case, rank: int, name: str) -> str:
    """The name in a universal folder of what ``rank`` calls ``name``: native MoE numbers experts on each rank."""
    found = LOCAL_EXPERT.fullmatch(name)
    if found is None:
        return name
    local = EXPERTS // case.ep
    return f"{found['head']}{int(found['index']) + local * (rank % case.ep)}{found['tail']}"


def read_state(universal: Path, name: str, state: str) -> torch.Tensor:
    """The tensor of one universal file; ZeRO-3 files without tensor parallelism hold it bare."""
    loaded = torch.load(universal / "zero" / name / f"{state}.pt", weights_only=True)
    value = loaded["param"] if isinstance(loaded, dict) else loaded
    assert isinstance(value, torch.Tensor)
    return value


def cut(full: torch.Tensor, case: Case, name: str, rank: int, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """What ``rank`` holds of ``full``; ``shards`` are all ranks' shards, for their shapes."""
    mine = shards[rank]
    if case.stage == 3 and case.tp == 1 and full.dim() == 1 and not is_expert(case, name):
        full = full.reshape(mine.shape)
    if name == "swiglu.weight":
        halves = full.chunk(2, 0)
        return torch.cat([half.chunk(case.tp, 0)[rank % case.tp] for half in halves])
    if name == "word_embeddings.weight" and case.model == "hand_tp":
        padded = torch.cat([full, full.new_zeros(case.tp * mine.shape[0] - full.shape[0], full.shape[1])])
        return padded.chunk(case.tp, 0)[rank % case.tp][: max(0, full.shape[0] - (rank % case.tp) * mine.shape[0])]
    if is_expert(case, name):
        return full.chunk(case.ep, 0)[rank % case.ep]
    if full.shape == mine.shape:
        return full
    parts = [shards[(rank // case.tp) * case.tp + tp] for tp in range(case.tp)]
    dims = [
        dim
        for dim in range(full.dim())
        if sum(part.shape[dim] for part in parts) == full.shape[dim]
        and all(part.shape[:dim] + part.shape[dim + 1 :] == full.shape[:dim] + full.shape[dim + 1 :] for part in parts)
    ]
    assert len(dims) == 1, f"{name}: shards {[tuple(part.shape) for part in parts]} do not cut {tuple(full.shape)}"
    start = sum(part.shape[dims[0]] for part in parts[: rank % case.tp])
    return full.narrow(dims[0], start, mine.shape[dims[0]])


def is_expert(case: Case, name: str) -> bool:
    return case.model == "mixtral" and ".experts.w" in name


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def faults(universal: Path, case: Case, truth: Sequence[Mapping[str, Any]]) -> tuple[list[str], int]:
    """Every shard cut out of ``universal`` that is not what its rank held, and how many were compared."""
    wrong, compared = [], 0
    for rank, held in enumerate(truth):
        for name, states in held["params"].items():
            known = universal_name(case, rank, name)
            if case.stage == 3 and case.tp == 1 and name in held["frozen"]:
                # DeepSpeed's ZeRO-3 keeps frozen parameters in the model-state files, which are copied.
                continue
            if not (universal / "zero" / known).is_dir():
                wrong.append(f"{known}: not in the universal folder")
                continue
            written = {path.stem for path in (universal / "zero" / known).glob("*.pt")}
            held_states = {state for other in truth for state in other["params"].get(name, ())}
            if written - {"step"} != held_states:
                wrong.append(f"{known}: files {sorted(written)}, states held {sorted(held_states)}")
            for state, shard in states.items():
                if state not in written:
                    continue
                shards = [other["params"].get(name, {}).get(state, shard) for other in truth]
                mine = cut(read_state(universal, known, state), case, name, rank, shards)
                if name == "word_embeddings.weight" and case.model == "hand_tp":
                    shard = shard[: mine.shape[0]]
                compared += 1
                if not same_bytes(mine, shard):
                    wrong.append(f"rank {rank}: {name}:{state} differs")
    return wrong, compared
