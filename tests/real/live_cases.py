"""The catalogue of attached runs: what is trained and saved with ``attach``, and what loads it by stock DeepSpeed.

Importable without torch, so that test collection stays cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from live_pairs import BF16_OPTIMIZER, LivePair
from real_cases import Case

__all__ = ["PAIRS", "Pair", "pair_named"]

QUICK = ("plain_zero1_fp32", "plain_zero3_fp32", "tp1to2_zero1", "hand2to1", "stage1to3")
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
EVEN = {"heads": 4, "kv_heads": 2, "vocab": 32}
UNEVEN = {"heads": 6, "kv_heads": 3, "vocab": 31}
WIDE = {"heads": 8, "kv_heads": 4, "vocab": 31}


@dataclass(frozen=True, slots=True)
class Pair(LivePair):
    """A run that saves with ``attach``, and one that loads with it; DeepSpeed alone is tried on what is ``stock``."""

    convert: tuple[str, ...] = ()
    attach: Mapping[str, Any] = field(default_factory=dict)
    """Options of the loading run's ``attach``."""
    lost: str | None = None
    """What DeepSpeed's loader loses whoever asks it: what is said of it, as a pattern."""
    nodes: bool = False
    """Whether every rank is the first of a machine of its own."""
    damage: str | None = None
    """What is done to the universal folder before it is loaded."""

    def universal(self, root: Path) -> Path:
        """The folder that is loaded."""
        parent = root / self.name if self.damage else self.source_folder(root)
        return parent / "-".join(["universal", *(option.strip("-") for option in self.convert)])


def same(name: str, case: Case, **options: Any) -> Pair:
    return Pair(name, case, case, **options)


def _plain() -> list[Pair]:
    pairs = []
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16"):
            case = Case(f"zero{stage}_{dtype}", stage=stage, dtype=dtype)
            pairs.append(same(f"plain_zero{stage}_{dtype}", case, stock=True))
        case = Case(f"zero{stage}_fp32", stage=stage)
        pairs.append(Pair(f"plain_zero{stage}_dp1", case, replace(case, world=1)))
        pairs.append(Pair(f"plain_zero{stage}_dp3", case, replace(case, world=3)))
        pairs.append(same(f"plain_zero{stage}_tied", replace(case, name="tied", model_options={"tied": True})))
        lost = "hyperparameters of all parameter groups but the first" if stage == 3 else None
        pairs.append(same(f"plain_zero{stage}_groups", replace(case, name="groups", groups=2), lost=lost))
    bf16 = Case("bf16opt", dtype="bf16", config=BF16_OPTIMIZER)
    pairs += [
        same("bf16opt", bf16),
        same("bf16opt_groups", replace(bf16, groups=2)),
        Pair("bf16opt_dp3", bf16, replace(bf16, world=3)),
        same("plain_offload", Case("offload", offload="cpu")),
        same("plain_momentum", Case("momentum", optimizer="momentum")),
        same("plain_amsgrad", Case("amsgrad", optimizer="amsgrad")),
        same("plain_hpz", Case("hpz", stage=3, world=4, config={"zero_optimization": {"zero_hpz_partition_size": 2}})),
        same("plain_subgroups", Case("subgroups", stage=3, config={"zero_optimization": {"sub_group_size": 70}})),
        same("plain_empty", Case("empty", model_options={"empty": True})),
        same(
            "plain_frozen",
            Case("frozen", model_options={"frozen": True, "buffers": True}),
            lost=r"2 frozen parameter\(s\) \(up\.weight, norm\.bias\), 3 buffer\(s\) \(batch_norm\.running_mean",
        ),
        same("plain_number_step", Case("zero1_fp32"), damage="number_step"),
        same("plain_zero3_nodes", Case("zero3_fp32", stage=3), nodes=True),
        same("few_zero1", Case("few_zero1", model="few", world=4, groups=2)),
        same("few_bf16opt", Case("few_bf16opt", model="few", world=4, groups=2, dtype="bf16", config=BF16_OPTIMIZER)),
    ]
    return pairs


def _tensor_parallel() -> list[Pair]:
    pairs = []
    for stage in (1, 2, 3):
        for shape, options in (("even", EVEN), ("uneven", UNEVEN)):
            case = Case(f"tp2_zero{stage}_{shape}", model="llama", stage=stage, tp=2, model_options=options)
            pairs.append(same(f"tp2_zero{stage}_{shape}", case, stock=True))
    base = Case("tp", model="llama", model_options=WIDE)
    tied = replace(base, model_options={**EVEN, "tied": True})
    for stage in (1, 3):
        one, two, four = (replace(base, stage=stage, tp=tp, world=tp) for tp in (1, 2, 4))
        pairs += [
            Pair(f"tp2to1_zero{stage}", two, one),
            Pair(f"tp1to2_zero{stage}", one, two),
            Pair(f"tp2to4_zero{stage}", two, four),
            Pair(f"tp4to2dp2_zero{stage}", four, replace(two, world=4)),
        ]
    pairs += [
        same("tp2_tied", replace(tied, tp=2)),
        same("tp2_bf16opt", replace(base, tp=2, dtype="bf16", config=BF16_OPTIMIZER)),
        same("tp2dp2_mix", Case("mix", model="own_tp", world=4, tp=2, model_options={"mix": 100})),
    ]
    return pairs


def _others() -> list[Pair]:
    hand = Case("hand", model="hand_tp", tp=2)
    return [
        same("hand2", hand, stock=True),
        same("hand2dp2", replace(hand, world=4)),
        same("hand2_zero2", replace(hand, stage=2, dtype="bf16")),
        Pair("hand2to1", hand, replace(hand, world=1, tp=1)),
        Pair("hand1to2", replace(hand, world=1, tp=1), hand),
        Pair("hand2to4", hand, replace(hand, world=4, tp=4)),
        Pair("hand4to2", replace(hand, world=4, tp=4), hand),
        same("pipe2", Case("pipe", model="pipe", pp=2), stock=True),
        same("pipe2_bf16", Case("pipe", model="pipe", pp=2, dtype="bf16", config=BF16_OPTIMIZER)),
        same("pipe2dp2", Case("pipe", model="pipe", world=4, pp=2)),
        same("moe", Case("moe", model="moe", ep=2)),
        same("moe_zero2", Case("moe", model="moe", stage=2, ep=2)),
    ]


def _scaled() -> list[Pair]:
    """A bias that every rank holds divided by their number: its states follow only as the user says."""
    two = Case("scaled", model="hand_tp", tp=2)
    one = replace(two, tp=1, world=1)
    power, reset = ("--scaled-states", "power"), ("--scaled-states", "reset")
    return [
        same("scaled_power", two, convert=power, attach={"scaled_states": "power"}),
        Pair("scaled_power_2to1", two, one, convert=power),
        Pair("scaled_power_1to2", one, two, attach={"scaled_states": "power"}),
        Pair("scaled_reset_1to2", one, two, attach={"scaled_states": "reset"}),
        Pair("scaled_reset_2to1", two, one, convert=reset),
        Pair("scaled_refuse", one, two, error=r"dense_4h_to_h\.bias.*scaled_states='reset'"),
    ]


def _experts() -> list[Pair]:
    case = Case("autoep", model="mixtral", ep=2, transformers=5)
    return [
        same("autoep_zero1", case, environment="hf5", stock=True),
        same("autoep_zero2", replace(case, stage=2), environment="hf5"),
        same("autoep_zero3", replace(case, stage=3), environment="hf5", lost="hyperparameters of all parameter groups"),
        same("autoep_dp2", replace(case, world=4), environment="hf5"),
        same("autoep_tp2", replace(case, world=4, tp=2), environment="hf5"),
    ]


def _versions() -> list[Pair]:
    hand = Case("hand", model="hand_tp", tp=2)
    equal = Case("equal", model="own_tp", tp=2, model_options={**EVEN, "inner": 32})
    pairs = []
    for version in ("0.16.9", "0.18.9", "0.19.4", "0.19.6"):
        at = f"v{version.replace('.', '')}"
        for stage in (1, 2, 3):
            pairs.append(same(f"{at}_zero{stage}", Case("plain", stage=stage), environment=version))
        pairs.append(same(f"{at}_zero3_nodes", Case("plain", stage=3), environment=version, nodes=True))
        pairs.append(same(f"{at}_hand2", hand, environment=version, stock=True))
        pairs.append(
            Pair(
                f"{at}_hand2to1",
                hand,
                replace(hand, world=1, tp=1),
                environment=version,
                error=r"model-parallel degree 2, this engine has 1.*deepspeed_affine\.load_checkpoint",
            )
        )
    pairs += [
        same("v0189_tp2", equal, environment="0.18.9", stock=True),
        same("v0194_tp2", equal, environment="0.19.4"),
        same("v0194_tp2_llama", Case("l", model="llama", tp=2, model_options=EVEN), environment="0.19.4"),
        same("v0196_tp2", Case("l", model="llama", tp=2, model_options=UNEVEN), environment="0.19.6", stock=True),
        same("v0196_tp2_zero3", Case("l", model="llama", tp=2, stage=3, model_options=UNEVEN), environment="0.19.6"),
    ]
    return pairs


def _special() -> list[Pair]:
    """Where DeepSpeed keeps master weights and states otherwise than most runs have it."""
    hpz = Case("hpz", stage=3, world=4, dtype="bf16", config={"zero_optimization": {"zero_hpz_partition_size": 2}})
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    accumulate = Case("accumulate", stage=2, dtype="bf16", config={**BF16_OPTIMIZER, "gradient_accumulation_steps": 2})
    late = {**BF16_OPTIMIZER, "bf16": {"enabled": True, "immediate_grad_update": False}}
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    part = {"offload_optimizer": {"device": "cpu", "ratio": 0.4}, "sub_group_size": 70}
    full = Case("offload", stage=3, optimizer="cpu_adam", config=offload)
    low = {"enabled": True, "bf16_master_weights_and_grads": True}
    masters = Case("low_masters", stage=2, dtype="bf16", optimizer="cpu_adam", config={**offload, "bf16": low})
    mics = Case("mics", stage=3, config={"zero_optimization": {"mics_shard_size": 1}})
    ours = r"Call deepspeed_affine\.load_checkpoint"
    return [
        same("hpz_bf16", hpz),
        same("offload_param", Case("offload_param", stage=3, config={"zero_optimization": both})),
        same("accumulate", accumulate),
        same("accumulate_zero3", replace(accumulate, stage=3)),
        same("bf16opt_late", Case("late", dtype="bf16", config=late)),
        Pair("offload_to_ratio", full, replace(full, name="ratio", config={"zero_optimization": part}),
             error=rf"offload_optimizer\.ratio below 1.*{ours}"),
        same("low_masters", masters, error=rf"master weights in torch\.bfloat16.*{ours}"),
        *(same(f"zero0_{dtype}", Case("zero0", stage=0, dtype=dtype), error=rf"runs without ZeRO\. {ours}")
          for dtype in ("bf16", "fp16")),
        Pair("v0196_mics", Case("plain", stage=3), mics, environment="0.19.6",
             error=r"is a MiCS_Optimizer.*Leave mics_shard_size out"),
    ]  # fmt: skip


def _refused() -> list[Pair]:
    case = Case("zero1_fp32")
    ours = r"deepspeed_affine\.load_checkpoint"
    return [
        Pair("stage1to3", case, replace(case, stage=3), error=rf"no model-state file.*{ours}"),
        Pair("stage3to1", replace(case, stage=3), case, error=rf"no model-state file.*{ours}"),
        same("zero3_momentum", Case("m", stage=3, optimizer="momentum"),
             error=rf"no exp_avg and no exp_avg_sq.*{ours}"),
        same("muon", Case("m", optimizer="muon", config={"zero_optimization": {"reduce_scatter": False}}),
             error=rf"Muon keeps its momentum_buffer whole.*{ours}"),
        same("round_robin", Case("robin", stage=2, config=ROUND_ROBIN),
             error=rf"round_robin_gradients on several ranks.*{ours}"),
        same("missing_param", case, damage="missing_param", error=r"parameter 'up\.weight'.*cannot be listed"),
        same("missing_weights", case, damage="missing_weights", error=r"parameter 'up\.weight'.*holds no fp32\.pt"),
        same("truncated", case, damage="truncated", error=r"exp_avg\.pt"),
        same("wrong_shape", case, damage="wrong_shape", error=r"parameter 'up\.weight'.*holds shape \(6, 10\)"),
        same("fewer_rows", case, damage="fewer_rows", error=r"parameter 'up\.weight'.*marked 'vocab_tensor'"),
        same("zero3_wrong_shape", replace(case, stage=3), damage="wrong_numel", error=r"parameter 'up\.weight'"),
    ]  # fmt: skip


PAIRS: tuple[Pair, ...] = tuple(
    replace(pair, quick=pair.name in QUICK)
    for pair in (
        *_plain(), *_tensor_parallel(), *_others(), *_scaled(), *_experts(), *_versions(), *_special(), *_refused(),
    )
)  # fmt: skip


def pair_named(name: str) -> Pair:
    return next(pair for pair in PAIRS if pair.name == name)
