"""The catalogue of real checkpoints: what is trained, in how many processes, and what the stock tools make of it.

Importable without torch, so that test collection stays cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["CASES", "Case", "by_name"]


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint: everything that decides its bytes, and what DeepSpeed 0.19.8 does with it."""

    name: str
    model: str = "plain"
    world: int = 2
    stage: int = 1
    dtype: str = "fp32"
    optimizer: str = "adamw"
    steps: int = 2
    tp: int = 1
    pp: int = 1
    ep: int = 1
    offload: str | None = None
    groups: int = 1
    model_options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    transformers: int | None = None
    family: str = "zero"
    train_error: str | None = None
    """Where DeepSpeed may be unable to train or save the case: what it then says, as a pattern."""
    stock_error: str | None = None
    """Where DeepSpeed 0.19.8's own converter fails: what it says, as a pattern."""
    our_error: str | None = None
    """Where ours refuses: what it says, as a pattern."""
    rules: tuple[str, ...] = ()
    """The parity rules whose expected differences this case shows; all of them and no other."""
    only_ours: str | None = None
    """A state DeepSpeed's converter drops without a word and ours carries."""
    load_error: str | None = None
    """Where stock ``load_universal`` cannot take a correct universal folder of this case: what it says."""
    load_wrong: str | None = None
    """Where stock ``load_universal`` takes it and fills in something else without a word: which names, as a pattern."""
    quick: bool = False
    """Whether the short run takes the case along."""

    def __post_init__(self) -> None:
        if self.world % (self.tp * self.pp):
            raise ValueError(f"case {self.name}: {self.world} processes do not divide into TP {self.tp} x PP {self.pp}")

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp)


def _zero() -> list[Case]:
    cases = []
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16"):
            cases.append(Case(f"zero{stage}_{dtype}", stage=stage, dtype=dtype))
        cases.append(Case(f"zero{stage}_fp16", stage=stage, dtype="fp16"))
        cases.append(Case(f"zero{stage}_dp1", stage=stage, world=1))
        cases.append(Case(f"zero{stage}_dp3", stage=stage, world=3, dtype="bf16" if stage == 2 else "fp32"))
        cases.append(Case(f"zero{stage}_frozen", stage=stage, model_options={"frozen": True, "buffers": True}))
        cases.append(Case(f"zero{stage}_tied", stage=stage, model_options={"tied": True}))
        cases.append(Case(f"zero{stage}_nograd", stage=stage, model_options={"unused": True}))
        cases.append(Case(f"zero{stage}_groups", stage=stage, groups=2))
        cases.append(Case(f"zero{stage}_step0", stage=stage, steps=0))
    cases.append(Case("zero0", stage=0))
    cases.append(Case("zero1_bf16opt", stage=1, dtype="bf16", config={"data_types": {"grad_accum_dtype": "fp32"}}))
    cases.append(
        Case("zero1_bf16opt_groups", dtype="bf16", groups=2, config={"data_types": {"grad_accum_dtype": "fp32"}})
    )
    cases.append(Case("zero1_empty", stage=1, model_options={"empty": True}))
    cases.append(Case("zero2_empty", stage=2, model_options={"empty": True}))
    cases.append(Case("zero2_offload", stage=2, offload="cpu"))
    cases.append(Case("zero3_offload", stage=3, offload="cpu"))
    cases.append(Case("zero3_nvme", stage=3, offload="nvme"))
    aligned = {"zero_optimization": {"parameter_alignment": True}}
    cases.append(Case("zero1_aligned", world=3, groups=2, config=aligned))
    cases.append(Case("zero2_aligned", stage=2, dtype="bf16", config=aligned))
    cases.append(Case("zero3_hpz", stage=3, world=4, config={"zero_optimization": {"zero_hpz_partition_size": 2}}))
    cases.append(Case("zero3_subgroups", stage=3, config={"zero_optimization": {"sub_group_size": 70}}))
    for name in ("sgd", "momentum", "adagrad", "lion", "amsgrad", "rmsprop", "muon", "adamax"):
        for stage in (1, 3):
            config = {"zero_optimization": {"reduce_scatter": False}} if name == "muon" else {}
            cases.append(Case(f"zero{stage}_{name}", stage=stage, optimizer=name, family="optimizers", config=config))
    return cases


_EVEN = {"heads": 4, "kv_heads": 2, "vocab": 32}
_UNEVEN = {"heads": 6, "kv_heads": 3, "vocab": 31}


def _tensor_parallel() -> list[Case]:
    cases = []
    for stage in (1, 2, 3):
        for shape, options in (("even", _EVEN), ("uneven", _UNEVEN)):
            cases.append(
                Case(
                    f"tp2_zero{stage}_{shape}",
                    model="llama",
                    stage=stage,
                    tp=2,
                    model_options=options,
                    transformers=4,
                    family="autotp",
                )
            )
    cases += [
        Case(
            "tp2_zero1_bf16", model="llama", tp=2, dtype="bf16", model_options=_UNEVEN, transformers=4, family="autotp"
        ),
        Case(
            "tp2_zero3_bf16",
            model="llama",
            tp=2,
            stage=3,
            dtype="bf16",
            model_options=_UNEVEN,
            transformers=4,
            family="autotp",
        ),
        Case(
            "tp2_zero1_frozen",
            model="llama",
            tp=2,
            model_options={**_EVEN, "frozen": True},
            transformers=4,
            family="autotp",
        ),
        Case(
            "tp2_zero3_frozen",
            model="llama",
            tp=2,
            stage=3,
            model_options={**_EVEN, "frozen": True},
            transformers=4,
            family="autotp",
        ),
        Case(
            "tp2_zero1_tied",
            model="llama",
            tp=2,
            model_options={**_EVEN, "tied": True},
            transformers=4,
            family="autotp",
        ),
        Case(
            "tp2_zero1_momentum",
            model="llama",
            tp=2,
            optimizer="momentum",
            model_options=_UNEVEN,
            transformers=4,
            family="optimizers",
        ),
        Case(
            "tp2_zero1_equal",
            model="llama",
            tp=2,
            model_options={**_EVEN, "inner": 32},
            transformers=4,
            family="autotp",
        ),
        Case("tp2_own_equal", model="own_tp", tp=2, model_options={**_EVEN, "inner": 32}, family="autotp"),
        Case("tp2_own", model="own_tp", tp=2, family="autotp"),
        Case("tp2dp2_mix", model="own_tp", world=4, tp=2, model_options={"mix": 100}, family="autotp4"),
        Case("tp2dp2_zero1", model="llama", world=4, tp=2, model_options=_UNEVEN, transformers=4, family="autotp4"),
        Case(
            "tp2dp2_zero2", model="llama", world=4, tp=2, stage=2, model_options=_EVEN, transformers=4, family="autotp4"
        ),
        Case(
            "tp2dp2_zero3",
            model="llama",
            world=4,
            tp=2,
            stage=3,
            model_options=_UNEVEN,
            transformers=4,
            family="autotp4",
        ),
        Case("mpu2_zero1", model="hand_tp", tp=2, family="megatron"),
        Case("mpu2_zero2", model="hand_tp", tp=2, stage=2, dtype="bf16", family="megatron"),
        Case("mpu2dp2_zero1", model="hand_tp", world=4, tp=2, family="megatron"),
    ]
    return cases


def _pipeline() -> list[Case]:
    return [
        Case("pp2_zero1", model="pipe", pp=2, family="pipeline"),
        Case("pp2_zero0", model="pipe", pp=2, stage=0, family="pipeline"),
        Case(
            "pp2_bf16",
            model="pipe",
            pp=2,
            dtype="bf16",
            config={"data_types": {"grad_accum_dtype": "fp32"}},
            family="pipeline",
        ),
        Case("pp2dp2_zero1", model="pipe", world=4, pp=2, family="pipeline"),
    ]


def _experts() -> list[Case]:
    cases = [
        Case("moe_zero1", model="moe", ep=2, family="moe"),
        Case("moe_zero2", model="moe", stage=2, ep=2, family="moe"),
    ]
    for stage in (1, 2, 3):
        cases.append(Case(f"ep2_zero{stage}", model="mixtral", stage=stage, ep=2, transformers=5, family="autoep"))
    cases.append(Case("ep2dp2_zero1", model="mixtral", world=4, ep=2, transformers=5, family="autoep"))
    cases.append(Case("ep2tp2_zero1", model="mixtral", world=4, ep=2, tp=2, transformers=5, family="autoep"))
    cases.append(Case("ep2tp2_zero2", model="mixtral", world=4, stage=2, ep=2, tp=2, transformers=5, family="autoep"))
    return cases


_FACTS: dict[str, dict[str, Any]] = {
    "zero0": {
        "stock_error": r"FileNotFoundError: can't find \*_optim_states\.pt",
        "load_error": "AttributeError: 'AdamW' object has no attribute 'update_lp_params'",
    },
    "pp2_zero0": {
        "stock_error": r"FileNotFoundError: can't find \*_optim_states\.pt",
        "our_error": "saved by a pipeline engine without ZeRO",
    },
    "zero3_step0": {"stock_error": "KeyError: 0", "load_error": "KeyError: 0"},
    "zero3_nvme": {"train_error": "Unable to JIT load the async_io op"},
    "zero1_sgd": {"stock_error": "KeyError: 'exp_avg'"},
    "zero3_sgd": {"stock_error": "KeyError: 0", "load_error": "KeyError: 0"},
    "zero1_momentum": {"stock_error": "KeyError: 'exp_avg'"},
    "zero3_momentum": {"stock_error": "KeyError: 'exp_avg'", "load_error": "KeyError: 'step'"},
    "zero1_adagrad": {"stock_error": "KeyError: 'exp_avg'"},
    "zero3_adagrad": {"stock_error": "KeyError: 'exp_avg'", "load_error": r"FileNotFoundError: .*exp_avg\.pt"},
    "zero1_rmsprop": {"stock_error": "KeyError: 'exp_avg'"},
    "zero3_rmsprop": {"stock_error": "KeyError: 'exp_avg'", "load_error": r"FileNotFoundError: .*exp_avg\.pt"},
    # Its loader cuts the momentum by the parameter's own partition, and Muon keeps it whole on every rank it touches.
    "zero1_muon": {"stock_error": "KeyError: 'exp_avg'", "load_error": "RuntimeError: shape .* is invalid for input"},
    "zero3_muon": {"stock_error": "KeyError: 'exp_avg'", "load_error": "KeyError: 'step'"},
    "zero1_lion": {"stock_error": "KeyError: 'exp_avg_sq'"},
    "zero3_lion": {"stock_error": "KeyError: 'exp_avg_sq'", "load_error": "KeyError: 'step'"},
    "zero1_adamax": {"stock_error": "KeyError: 'exp_avg_sq'"},
    "zero3_adamax": {"stock_error": "KeyError: 'exp_avg_sq'", "load_error": r"FileNotFoundError: .*exp_avg_sq\.pt"},
    "zero1_amsgrad": {"only_ours": "max_exp_avg_sq"},
    "zero3_amsgrad": {"only_ours": "max_exp_avg_sq", "load_error": "KeyError: 'max_exp_avg_sq'"},
    "tp2_zero1_momentum": {"stock_error": "KeyError: 'exp_avg'"},
    "tp2_zero1_frozen": {"stock_error": "AssertionError: Unused patterns="},
    "tp2_zero3_frozen": {"stock_error": "AssertionError: Unused patterns="},
    "tp2_zero1_tied": {"rules": ("storage_slack",)},
    "zero1_tied": {"rules": ("storage_slack",)},
    "zero2_tied": {"rules": ("storage_slack",)},
    "zero1_step0": {"rules": ("storage_slack",)},
    "zero2_step0": {"rules": ("storage_slack",)},
    "mpu2_zero1": {"rules": ("storage_slack",)},
    "mpu2_zero2": {"rules": ("storage_slack",)},
    "mpu2dp2_zero1": {"rules": ("storage_slack",)},
    # The loader looks experts up under the number they have on their rank, so rank 1 gets rank 0's.
    "moe_zero1": {"stock_error": "RuntimeError: shape .* is invalid for input", "load_wrong": r"deepspeed_experts\."},
    "moe_zero2": {"stock_error": "RuntimeError: shape .* is invalid for input", "load_wrong": r"deepspeed_experts\."},
    "ep2tp2_zero1": {"stock_error": "AssertionError: Unused patterns="},
    "ep2tp2_zero2": {"stock_error": "AssertionError: Unused patterns="},
}
"""What DeepSpeed 0.19.8 makes of the cases where the answer is not "the same as ours"."""

_QUICK = (
    "zero1_fp32", "zero2_bf16", "zero3_fp32", "zero1_momentum", "tp2_zero1_uneven", "tp2dp2_zero1", "mpu2_zero1",
    "pp2_zero1", "moe_zero1", "ep2_zero1", "ep2_zero3",
)  # fmt: skip


def _known() -> tuple[Case, ...]:
    cases = [*_zero(), *_tensor_parallel(), *_pipeline(), *_experts()]
    unknown = (set(_FACTS) | set(_QUICK)) - {case.name for case in cases}
    if unknown:
        raise ValueError(f"facts about cases that do not exist: {sorted(unknown)}")
    return tuple(replace(case, **_FACTS.get(case.name, {}), quick=case.name in _QUICK) for case in cases)


CASES: tuple[Case, ...] = _known()


def by_name(name: str) -> Case:
    for case in CASES:
        if case.name == name:
            return case
    raise KeyError(f"no case is named {name}")
