"""The catalogue of resharded checkpoints: what stock DeepSpeed saves, and the engines that load what is made of it.

Importable without torch, so that test collection stays cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from live_pairs import BF16_OPTIMIZER, LivePair
from real_cases import Case

__all__ = ["PAIRS", "Pair", "pair_named"]

WIDE = {"heads": 8, "kv_heads": 4, "vocab": 31}
TIED = {"heads": 4, "kv_heads": 2, "vocab": 32, "tied": True}
FROZEN = {"frozen": True, "buffers": True}


@dataclass(frozen=True, slots=True)
class Pair(LivePair):
    """A run saved by DeepSpeed, and one of another topology that its own ``load_checkpoint`` continues."""

    options: tuple[str, ...] = ()
    """Of ``reshard``; without ``like`` or ``described`` beside the degree and stage of the target."""
    like: bool = False
    """Whether the target's layout is that of a checkpoint the target's engine saved before its first step."""
    described: bool = False
    """Whether the target's layout is what ``describe`` says of its engine."""

    def universal(self, root: Path) -> Path:
        """What the stored tensors are, in full."""
        return self.source_folder(root) / "universal"


def _plain() -> list[Pair]:
    one, three = Case("zero1_dp2"), Case("zero3_dp2", stage=3)
    two = Case("zero2_dp2_bf16", stage=2, dtype="bf16")
    # It leaves no room between parameters, whatever is configured.
    aligned = {"zero_optimization": {"parameter_alignment": True}}
    bf16opt = Case("bf16opt_dp2", dtype="bf16", config={**BF16_OPTIMIZER, **aligned})
    groups = Case("groups", groups=2)
    frozen = Case("frozen", model_options=FROZEN)
    small = {"zero_optimization": {"sub_group_size": 70}}
    fp16 = Case("fp16", dtype="fp16", stage=2)
    muon = Case("muon", optimizer="muon", config={"zero_optimization": {"reduce_scatter": False}})
    return [
        Pair("zero1_same", one, one),
        Pair("zero1_to_dp1", one, replace(one, world=1), stock=True, quick=True),
        Pair("zero1_to_dp3", one, replace(one, world=3), stock=True),
        Pair("zero1_to_dp4", one, replace(one, world=4), stock=True),
        Pair("zero1_to_zero3", one, replace(one, stage=3, world=4), quick=True),
        Pair("zero3_to_zero1", three, replace(three, stage=1), quick=True),
        Pair("zero3_to_zero2_dp3", three, replace(three, stage=2, world=3)),
        Pair("zero3_to_dp3", three, replace(three, world=3), stock=True),
        Pair("zero2_bf16_to_zero3", two, replace(two, stage=3)),
        Pair("zero3_bf16_to_zero1", replace(two, stage=3), replace(two, stage=1, world=3)),
        Pair("bf16opt_to_dp3", bf16opt, replace(bf16opt, world=3)),
        Pair("bf16opt_to_zero3", bf16opt, replace(bf16opt, stage=3)),
        Pair("zero3_to_bf16opt", replace(bf16opt, stage=3), replace(bf16opt, world=3)),
        Pair("groups_to_zero3", groups, replace(groups, stage=3)),
        Pair("groups_zero3_to_dp3", replace(groups, stage=3), replace(groups, world=3)),
        Pair("frozen_to_zero3", frozen, replace(frozen, stage=3)),
        Pair("frozen_zero3_to_zero2", replace(frozen, stage=3), replace(frozen, stage=2)),
        Pair("to_sub_groups", one, replace(three, config=small), options=("--sub-group-size", "70")),
        Pair("from_sub_groups", replace(three, config=small), replace(one, world=3)),
        Pair("fp16_to_dp3", fp16, replace(fp16, world=3)),
        Pair("muon_to_dp3", muon, replace(muon, world=3)),
        Pair("muon_to_zero3", muon, replace(muon, stage=3)),
        Pair("muon_zero3_to_zero1", replace(muon, stage=3), replace(muon, world=3)),
        Pair("momentum_to_zero3", Case("momentum", optimizer="momentum"),
             Case("momentum", optimizer="momentum", stage=3, world=3)),
    ]  # fmt: skip


def _model_parallel() -> list[Pair]:
    base = Case("wide", model="llama", model_options=WIDE)
    one, two, four = (replace(base, name=f"wide_tp{tp}", tp=tp, world=tp) for tp in (1, 2, 4))
    tied = Case("tied_tp2", model="llama", tp=2, model_options=TIED)
    hand = Case("hand_tp2", model="hand_tp", tp=2)
    pipe = Case("pipe_pp2", model="pipe", pp=2)
    moe = Case("moe", model="moe", ep=2)
    return [
        Pair("tp2_to_dp2", two, replace(two, world=4)),
        Pair("tp2_to_tp4", two, four, like=True, stock=True, quick=True),
        Pair("tp2_to_tp1_zero3", two, replace(one, stage=3, world=2), like=True),
        Pair("tp1_zero3_to_tp2", replace(one, stage=3, world=2), replace(two, world=4), described=True),
        Pair("tp2_zero3_to_tp4", replace(two, stage=3), replace(four, stage=3), like=True),
        Pair("tied_to_tp1", tied, replace(tied, tp=1, world=2), like=True),
        Pair("hand_to_tp4", hand, replace(hand, tp=4, world=4), like=True),
        Pair("moe_to_dp4", moe, replace(moe, world=4, stage=2)),
        Pair("moe_to_ep4", moe, replace(moe, ep=4, world=4), like=True),
        Pair("pp2_to_dp2", pipe, replace(pipe, world=4)),
        Pair("pp2_to_pp1", pipe, replace(pipe, pp=1), like=True),
        Pair("pp1_to_pp2", replace(pipe, pp=1), pipe, described=True),
        Pair("plain_described", Case("groups", groups=2), Case("groups", groups=2, stage=3, world=3), described=True),
    ]  # fmt: skip


def _versions() -> list[Pair]:
    one, three = Case("v0169_zero1"), Case("v0189_zero3", stage=3, groups=2)
    return [
        Pair("v0169_zero1_to_zero3", one, replace(one, stage=3, world=3), environment="0.16.9"),
        Pair("v0189_zero3_to_zero1", three, replace(three, stage=1, world=3), environment="0.18.9"),
    ]


PAIRS: tuple[Pair, ...] = (*_plain(), *_model_parallel(), *_versions())


def pair_named(name: str) -> Pair:
    return next(pair for pair in PAIRS if pair.name == name)
