"""The catalogue of ``load_checkpoint`` runs: what stock DeepSpeed trains and saves, and the engines that load it.

Importable without torch, so that test collection stays cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from live_pairs import BF16_OPTIMIZER, LivePair
from real_cases import Case

__all__ = ["PAIRS", "Pair", "pair_named"]

WIDE = {"heads": 8, "kv_heads": 4, "vocab": 31}
UNEVEN = {"heads": 6, "kv_heads": 3, "vocab": 31}
TIED = {"heads": 4, "kv_heads": 2, "vocab": 32, "tied": True}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
PART = {"offload_optimizer": {"device": "cpu", "ratio": 0.4}, "sub_group_size": 70}
RATIO = Case("ratio", stage=3, optimizer="cpu_adam", config={"zero_optimization": PART})
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
FROZEN = {"frozen": True, "buffers": True}


@dataclass(frozen=True, slots=True)
class Pair(LivePair):
    """A run saved by DeepSpeed alone, and the engine that continues it by ``load_checkpoint``."""

    warm: int = 0
    """How many steps the engine has trained before it loads, so that nothing of them may be left."""
    local_ranks: int = 0
    """How many ranks a pretended node has; 0 for one node."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of ``load_checkpoint``."""
    fault: str | None = None
    """What is made to go wrong on rank 1 alone."""
    ordinary: bool = False
    """Whether the folder that was saved is loaded, and not what was converted of it."""
    stock_folder: bool = False
    """Whether DeepSpeed's own converter makes the folder."""
    unrestored: str | None = None
    """What the report must say was not restored, as a pattern; None for nothing at all."""

    def universal(self, root: Path) -> Path:
        """The folder that is loaded."""
        return self.source_folder(root) / ("stock" if self.stock_folder else "universal")


def _plain() -> list[Pair]:
    one = Case("zero1_dp2", steps=2)
    three = Case("zero3_dp2", stage=3, steps=2)
    two = Case("zero2_dp4_bf16", world=4, stage=2, dtype="bf16")
    bf16opt = Case("bf16opt_dp4", world=4, dtype="bf16", config=BF16_OPTIMIZER)
    zero = Case("zero0_dp2", stage=0)
    robin = Case("robin_dp2", stage=2, config=ROUND_ROBIN)
    hpz = {"zero_optimization": {"zero_hpz_partition_size": 2}}
    return [
        Pair("zero1_same", one, one, warm=1, quick=True),
        Pair("zero1_to_dp1", one, replace(one, world=1), stock=True),
        Pair("zero1_to_dp4", one, replace(one, world=4), warm=1, local_ranks=2),
        Pair("zero1_to_zero2", one, replace(one, stage=2, world=4), stock=True),
        Pair("zero1_to_zero3", one, replace(one, stage=3), warm=1, quick=True),
        Pair("zero1_to_zero3_dp4", one, replace(one, stage=3, world=4), local_ranks=2),
        Pair("zero1_to_zero0", one, replace(one, stage=0), warm=1),
        Pair("zero1_to_bf16", one, replace(one, dtype="bf16")),
        Pair("zero1_to_round_robin", one,
             replace(one, stage=2, world=4, config=ROUND_ROBIN), warm=1),
        Pair("round_robin_same", robin, robin, warm=1),
        Pair("round_robin_to_dp1", robin, replace(one, world=1)),
        Pair("round_robin_to_zero3_dp4", robin, replace(one, stage=3, world=4), warm=1),
        Pair("zero1_to_aligned", one,
             replace(one, world=4, config={"zero_optimization": {"parameter_alignment": True}}), warm=1),
        Pair("zero0_same", zero, zero, warm=1),
        Pair("zero0_to_zero1", zero, replace(zero, stage=1)),
        Pair("zero0_to_zero3_dp4", zero, replace(zero, stage=3, world=4), warm=1),
        Pair("zero3_same", three, three, warm=1),
        Pair("zero3_to_dp1", three, replace(three, world=1), stock=True),
        Pair("zero3_to_dp4", three, replace(three, world=4), warm=1, local_ranks=2),
        Pair("zero3_to_zero1", three, replace(three, stage=1), quick=True),
        Pair("zero3_to_hpz", three, replace(three, world=4, config=hpz), warm=1),
        Pair("zero3_to_persistent", three,
             replace(three, config={"zero_optimization": {"stage3_param_persistence_threshold": 70}}), warm=1),
        Pair("zero2_same_bf16", two, two, warm=1),
        Pair("zero2_to_bf16opt", two, replace(bf16opt, world=2), warm=1),
        Pair("bf16opt_same", bf16opt, bf16opt, stock=True),
        Pair("bf16opt_to_zero3", bf16opt, replace(two, stage=3)),
        Pair("bf16opt_to_fp32", bf16opt, replace(one, world=1)),
    ]  # fmt: skip


def _tensor_parallel() -> list[Pair]:
    base = Case("wide", model="llama", model_options=WIDE)
    one, two, four = (replace(base, name=f"wide_tp{tp}", tp=tp, world=tp) for tp in (1, 2, 4))
    wide3 = replace(two, name="wide_tp2dp2_zero3", world=4, stage=3)
    bf16 = replace(base, name="wide_dp2_zero3_bf16", stage=3, dtype="bf16")
    uneven = Case("uneven_tp2_zero2", model="llama", tp=2, stage=2, model_options=UNEVEN)
    tied = Case("tied_tp2", model="llama", tp=2, model_options=TIED)
    hand = Case("hand_tp2", model="hand_tp", tp=2)
    return [
        Pair("tp2_same", two, two, warm=1, stock=True),
        Pair("tp2_to_tp1", two, one, quick=True, stock=True),
        Pair("tp2_to_tp4", two, four, warm=1, stock=True, options=(("check_replicas", True),)),
        Pair("tp2_to_tp1dp2_zero2", two, replace(one, world=2, stage=2)),
        Pair("tp2_to_tp2dp2_zero3", two, replace(two, world=4, stage=3), warm=1),
        Pair("tp4_to_tp2dp2", four, replace(two, world=4)),
        Pair("tp4_to_dp4_zero3", four, replace(one, world=4, stage=3)),
        Pair("tp2dp2_zero3_same", wide3, wide3, warm=1),
        Pair("tp2dp2_zero3_to_tp1", wide3, one),
        Pair("tp2dp2_zero3_to_tp4_zero2", wide3, replace(four, stage=2)),
        Pair("dp2_zero3_to_tp2_bf16", bf16, replace(two, dtype="bf16"), warm=1),
        Pair("dp2_zero3_to_tp4_zero3_bf16", bf16, replace(four, stage=3, dtype="bf16")),
        Pair("uneven_same", uneven, uneven),
        Pair("uneven_to_dp2_zero3", uneven, replace(uneven, tp=1, stage=3)),
        Pair("tied_to_tp1", tied, replace(tied, tp=1, world=1)),
        Pair("tied_to_zero3", tied, replace(tied, stage=3)),
        Pair("hand_same", hand, hand, quick=True, stock=True),
        Pair("hand_to_tp1", hand, replace(hand, tp=1, world=1)),
        Pair("hand_to_tp4", hand, replace(hand, tp=4, world=4)),
    ]


def _pipeline() -> list[Pair]:
    pipe = Case("pipe_pp2", model="pipe", pp=2)
    bf16 = Case("pipe_pp2dp2_bf16", model="pipe", pp=2, world=4, dtype="bf16", config=BF16_OPTIMIZER)
    both = Case("both_tp2pp2", model="tp_pipe", tp=2, pp=2, world=4)
    return [
        Pair("pp2_same", pipe, pipe, warm=1),
        Pair("pp2_to_dp2", pipe, replace(pipe, pp=1)),
        Pair("pp2_to_pp2dp2", pipe, replace(pipe, world=4), warm=1, stock=True),
        Pair("pp2dp2_bf16_to_pp2", bf16, replace(bf16, world=2)),
        Pair("tp2pp2_same", both, both, warm=1),
        Pair("tp2pp2_to_pp2dp2", both, replace(both, tp=1)),
        Pair("tp2pp2_to_tp2dp2", both, replace(both, pp=1), options=(("check_replicas", True),)),
        Pair("tp2pp2_to_tp4_bf16opt", both, replace(both, pp=1, tp=4, dtype="bf16", config=BF16_OPTIMIZER)),
        Pair("tp2pp2_to_one", both, replace(both, pp=1, tp=1, world=1)),
    ]


def _others() -> list[Pair]:
    few = Case("few", model="few", world=4, groups=2)
    few3 = replace(few, name="few_zero3", stage=3)
    frozen = Case("frozen", model_options=FROZEN)
    frozen3 = Case("frozen_zero3", stage=3, model_options=FROZEN)
    thawed = Case("thawed", model_options={"buffers": True})
    groups = Case("groups", groups=2)
    groups3 = Case("groups_zero3", groups=2, stage=3)
    sequence = Case("sequence", model="sequence", world=4)
    moe = Case("moe", model="moe", ep=2)
    merged = r"(lr|weight_decay|betas) of parameter group 0: its parameters were in 2 saved groups, with "
    fresh = r"optimizer states of (up\.weight|norm\.bias): the checkpoint has none for it"
    momentum = Case("momentum", optimizer="momentum")
    amsgrad = Case("amsgrad_zero3", stage=3, optimizer="amsgrad")
    muon = Case("muon", optimizer="muon", config={"zero_optimization": {"reduce_scatter": False}})
    return [
        Pair("few_same", few, few, warm=1),
        Pair("few_to_bf16opt", few, replace(few, world=2, dtype="bf16", config=BF16_OPTIMIZER)),
        Pair("few_to_zero3", few, replace(few3, world=2)),
        Pair("frozen_same", frozen, frozen, warm=1, quick=True),
        Pair("frozen_to_zero3", frozen, replace(frozen3, world=4), warm=1),
        Pair("frozen_zero3_same", frozen3, frozen3, warm=1),
        Pair("frozen_zero3_to_zero1", frozen3, replace(frozen, world=1)),
        Pair("thawing", frozen, thawed, warm=1, unrestored=fresh),
        Pair("freezing", thawed, frozen, unrestored=r"optimizer states of (up\.weight|norm\.bias): no optimizer of"),
        Pair("groups_same", groups, groups, warm=1),
        Pair("groups_to_zero3", groups, replace(groups3, world=4)),
        Pair("groups_zero3_same", groups3, groups3, warm=1),
        Pair("groups_merged", groups, replace(groups, groups=1), unrestored=merged),
        Pair("groups_split", Case("groups_one"), groups,
             unrestored=r"(lr|weight_decay|betas) of parameter group \d: .* was saved for one group that is now"),
        Pair("sequence_same", sequence, sequence, warm=1),
        Pair("sequence_to_zero3_dp2", sequence, Case("plain", world=2, stage=3), unrestored="lr_scheduler: the check"),
        Pair("moe_same", moe, moe, warm=1),
        Pair("moe_to_ep1", moe, replace(moe, ep=1)),
        Pair("moe_to_ep4", moe, replace(moe, ep=4, world=4, stage=2)),
        Pair("momentum_to_zero3", momentum, replace(momentum, stage=3), warm=1),
        Pair("amsgrad_zero3_to_dp4", amsgrad, replace(amsgrad, stage=1, world=4), warm=1),
        Pair("muon_same", muon, muon, warm=1),
        Pair("muon_to_dp4", muon, replace(muon, world=4)),
        Pair("muon_to_zero3", muon, replace(muon, stage=3)),
        Pair("fp16_same", Case("fp16", dtype="fp16"), Case("fp16", dtype="fp16"), warm=1),
        Pair("step0", Case("step0", steps=0), Case("step0", steps=0, stage=3), warm=1,
             unrestored="optimizer states of .*: the checkpoint has none"),
    ]  # fmt: skip


def _special() -> list[Pair]:
    """Where DeepSpeed keeps master weights and states otherwise than most runs have it."""
    pairs = []
    for dtype in ("bf16", "fp16"):
        unfused = Case(f"plain0_{dtype}", stage=0, dtype=dtype, groups=2)
        fused = Case(f"fused0_{dtype}", stage=0, dtype=dtype, optimizer="fused_adam")
        pairs += [
            Pair(f"zero0_same_{dtype}", unfused, unfused, warm=1),
            Pair(f"zero0_to_zero2_{dtype}", unfused, replace(unfused, stage=2), warm=1),
            Pair(f"fused_same_{dtype}", fused, fused, warm=1),
            Pair(f"fused_to_zero3_{dtype}", fused, replace(fused, stage=3, world=4)),
        ]
    hpz = Case("hpz", stage=3, world=4, dtype="bf16", config={"zero_optimization": {"zero_hpz_partition_size": 2}})
    cpu = Case("cpu_adam", stage=2, optimizer="cpu_adam", config=OFFLOAD)
    low = {"enabled": True, "bf16_master_weights_and_grads": True}
    masters = Case(
        "low_masters", stage=2, dtype="bf16", optimizer="cpu_adam", groups=2, config={**OFFLOAD, "bf16": low}
    )
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    param = Case("offload_param", stage=3, config={"zero_optimization": both})
    accumulate = Case("accumulate", stage=2, dtype="bf16", config={**BF16_OPTIMIZER, "gradient_accumulation_steps": 2})
    moe = Case("moe_zero0", model="moe", stage=0, ep=2)
    alone = replace(moe, name="moe_zero0_ep1", ep=1)
    return [
        *pairs,
        Pair("hpz_same", hpz, hpz, warm=1),
        Pair("hpz_to_zero1", hpz, replace(hpz, stage=1, world=2, config={})),
        Pair("offload_to_ratio", replace(RATIO, name="offload", config=OFFLOAD), RATIO, warm=1),
        Pair("low_masters_same", masters, masters, warm=1),
        Pair("cpu_adam_to_dp1", cpu, replace(cpu, world=1), stock=True),
        Pair("offload_param_same", param, param, warm=1),
        Pair("offload_param_to_zero2", param, replace(param, stage=2, config={}), warm=1),
        Pair("accumulate_same", accumulate, accumulate, warm=1),
        Pair("accumulate_zero3_same", replace(accumulate, name="accumulate3", stage=3),
             replace(accumulate, name="accumulate3", stage=3), warm=1),
        Pair("accumulate_to_bf16opt", accumulate, replace(accumulate, stage=1), warm=1),
        Pair("moe_zero0_same", moe, moe, warm=1, unrestored=r"^optimizer states of (\d+ .*)?(experts|moe\..*): the"),
        Pair("moe_zero0_ep1", alone, alone, warm=1),
    ]  # fmt: skip


def _refused() -> list[Pair]:
    case = Case("zero1_dp2", steps=2)
    robin = Case("robin_dp2", stage=2, config=ROUND_ROBIN)
    narrow = Case("narrow", model_options={"unused": True})
    return [
        Pair(
            "ratio_source", RATIO, RATIO, error=r"optimizer state 'exp_avg' of \S+: is kept by .* checkpoint has none"
        ),
        Pair("one_rank_elsewhere", case, case, fault="elsewhere", error=r"is no folder"),
        Pair("one_rank_cannot_read", case, case, fault="reading", error=r"was loaded in part.*made to fail"),
        Pair("one_rank_breaks", case, case, fault="bug", error=r"made to break"),
        Pair("one_rank_lacks_a_file", case, case, ordinary=True, fault="lost", error=r"optim_states\.pt: is missing"),
        Pair(
            "one_rank_cannot_read_what_was_saved",
            case,
            case,
            ordinary=True,
            fault="reading",
            error=r"saved was loaded in part.*made to fail",
        ),
        Pair(
            "round_robin_source", robin, case, stock_folder=True, error=r"is not what the module held when it was saved"
        ),
        Pair("missing", case, narrow, error=r"2 missing\.\nparameter unused\.\w+: is in the model and not in"),
        Pair("unexpected", narrow, case, error=r"2 unexpected\.\nparameter unused\.\w+: is in the checkpoint and not"),
    ]


def _versions() -> list[Pair]:
    pairs = []
    for version in ("0.16.9", "0.18.9", "0.19.4", "0.19.6"):
        at = f"v{version.replace('.', '')}"
        one, three = Case(f"{at}_zero1"), Case(f"{at}_zero3", stage=3, groups=2)
        frozen = Case(f"{at}_frozen", model_options=FROZEN)
        hand = Case(f"{at}_hand", model="hand_tp", tp=2)
        pairs += [
            Pair(f"{at}_zero1_to_zero3", one, replace(one, stage=3), warm=1, environment=version),
            Pair(f"{at}_zero3_to_zero1", three, replace(three, stage=1, world=1), environment=version),
            Pair(f"{at}_frozen_to_zero2", frozen, replace(frozen, stage=2), warm=1, environment=version),
            Pair(f"{at}_hand_to_tp1", hand, replace(hand, tp=1, world=1), environment=version),
        ]
    equal = Case("own_tp2", model="own_tp", tp=2, model_options={"heads": 4, "kv_heads": 2, "vocab": 32, "inner": 32})
    for version in ("0.18.9", "0.19.4", "0.19.6"):
        at = f"v{version.replace('.', '')}"
        source = replace(equal, name=f"{at}_own")
        pairs.append(Pair(f"{at}_tp2_to_tp1", source, replace(source, tp=1, world=1), environment=version))
    return pairs


def _experts() -> list[Pair]:
    one = Case("autoep_ep2", model="mixtral", ep=2, transformers=5)
    three = replace(one, name="autoep_ep2_zero3", stage=3)
    return [
        Pair("autoep_same", one, one, warm=1, environment="hf5"),
        Pair("autoep_to_ep4", one, replace(one, ep=4, world=4), environment="hf5"),
        Pair("autoep_to_zero3", one, three, environment="hf5"),
        Pair("autoep_zero3_to_ep1", three, replace(one, ep=1, world=2), environment="hf5"),
    ]


PAIRS: tuple[Pair, ...] = (
    *_plain(), *_tensor_parallel(), *_pipeline(), *_others(), *_special(), *_refused(), *_versions(), *_experts(),
)  # fmt: skip


def pair_named(name: str) -> Pair:
    return next(pair for pair in PAIRS if pair.name == name)
