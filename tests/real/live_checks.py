"""What attached and loaded runs must have left, found without a word of the code under test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import real_shards
import torch
from live_pairs import LivePair
from real_cases import Case

__all__ = ["chosen", "held", "next_losses", "wrong_after", "wrong_shards"]

AnyPair = TypeVar("AnyPair", bound=LivePair)
Held = dict[str, Any]
VOCABULARY = "word_embeddings.weight"
TOKENS = 13


def chosen(pairs: Iterable[AnyPair], condition: Callable[[AnyPair], Any]) -> list[Any]:
    """The pairs of a test."""
    return [
        pytest.param(pair.name, marks=[pytest.mark.quick] if pair.quick else [], id=pair.name)
        for pair in pairs
        if condition(pair)
    ]


def held(folder: Path, world: int) -> list[Held]:
    """What every rank kept there."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def wrong_shards(
    pair: LivePair,
    universal: Path,
    before: Sequence[Held],
    now: Sequence[Held],
    stored: Callable[[str, str, torch.Tensor], torch.Tensor] = lambda name, state, full: full,
) -> tuple[list[str], int]:
    """Every shard cut out of ``universal`` that is not, byte for byte, what its rank holds, and how many were compared.

    ``stored`` makes of a parameter's state what the engine's ranks must have of it. Frozen parameters are left out.
    """
    wrong, compared = [], 0
    # Without ZeRO F has the module's weights, and where these are of low precision the optimizer others.
    low = pair.source.stage == 0 and pair.source.dtype != "fp32" and pair.target.stage
    for rank, holding in enumerate(now):
        for name, states in holding["params"].items():
            known = real_shards.universal_name(pair.target, rank, name)
            for state, shard in states.items():
                kept = before[0]["plain"].get(name, {}).get(state) if low else None
                if name in holding["frozen"] or not (
                    kept is not None or (universal / "zero" / known / f"{state}.pt").is_file()
                ):
                    continue
                if kept is None:
                    full = stored(name, state, stored_whole(pair, universal, known, state, before))
                else:
                    full = kept.reshape(shard.shape)
                shards = [other["params"].get(name, {}).get(state, shard) for other in now]
                mine = real_shards.cut(full, replace(pair.target, stage=1), name, rank, shards)
                real = rows(pair.target, rank, name, shard)
                if shard[real.stop :].any():
                    wrong.append(f"rank {rank}: {name}:{state} has padding that does not start as zeros")
                compared += 1
                # Master weights of low precision are handed out in float32.
                exact = mine[real].to(shard.dtype) if mine.dtype == torch.bfloat16 else mine[real]
                if not real_shards.same_bytes(exact, shard[real]):
                    wrong.append(f"rank {rank}: {name}:{state} differs")
    return wrong, compared


def stored_whole(pair: LivePair, universal: Path, name: str, state: str, before: Sequence[Held]) -> torch.Tensor:
    """F of one state, in its shape: files of ZeRO-3 without tensor parallelism are flat."""
    full = real_shards.read_state(universal, name, state)
    if full.dim() == 1 and pair.source.tp == 1 and not real_shards.is_expert(pair.source, name):
        for rank in before:
            for local, states in rank["params"].items():
                if real_shards.universal_name(pair.source, 0, local) == name and states["fp32"].numel() == full.numel():
                    return full.reshape(states["fp32"].shape)
    return full


def rows(case: Case, rank: int, name: str, shard: torch.Tensor) -> slice:
    """The rows of a shard that the checkpoint has: those of a vocabulary that belong to no token are padding."""
    if name != VOCABULARY or case.model != "hand_tp":
        return slice(None, shard.shape[0])
    height = shard.shape[0]
    return slice(None, max(0, min(height, TOKENS - rank % case.tp * height)))


def wrong_after(case: Case, before: Sequence[Held], now: Sequence[Held]) -> list[str]:
    """What is not, to the last bit, as the uninterrupted run has it four steps later."""
    wrong = []
    for rank, (saved, loaded) in enumerate(zip(before, now, strict=True)):
        if loaded["next_losses"] != saved["next_losses"]:
            wrong.append(f"rank {rank}: losses {loaded['next_losses']}, not {saved['next_losses']}")
        for name, states in saved["plain"].items():
            wrong += [
                f"rank {rank}: {name}:{state} was not restored"
                for state, value in states.items()
                if not real_shards.same_bytes(value, loaded["plain"][name][state])
            ]
        saved, loaded = saved["after"], loaded["after"]
        for key in ("steps", "step_types", "groups", "global_steps", "global_samples", "scheduler", "scale"):
            if loaded[key] != saved[key]:
                wrong.append(f"rank {rank}: {key} {loaded[key]}, not {saved[key]}")
        for kind in ("params", "plain"):
            for name, states in saved[kind].items():
                for state, value in states.items():
                    real = rows(case, rank, name, value) if value.dim() else ...
                    if not real_shards.same_bytes(value[real], loaded[kind][name][state][real]):
                        wrong.append(f"rank {rank}: {name}:{state} differs")
    return wrong


def next_losses(pair: LivePair, before: Sequence[Held], now: Sequence[Held]) -> tuple[list[float], Any]:
    """The losses of the next steps, and what they must equal at any topology: the sums have another order there."""
    dtypes = {pair.source.dtype, pair.target.dtype}
    # DeepSpeed's own stages differ by 1e-3 after four steps of fp16.
    tolerance = 1e-2 if len(dtypes) > 1 or "fp16" in dtypes else 1e-6 if dtypes == {"fp32"} else 1e-3
    if pair.source.optimizer == "cpu_adam":
        # It multiplies its betas up from step to step, and takes powers of them in its first.
        tolerance = max(tolerance, 1e-5)
    return now[0]["next_losses"], pytest.approx(before[0]["next_losses"], rel=tolerance)
