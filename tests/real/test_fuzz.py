"""Real checkpoints, damaged at random: an error that names its subject, or the truth, and nothing else.

``DEEPSPEED_AFFINE_FUZZ_COUNT`` and ``DEEPSPEED_AFFINE_FUZZ_SEED`` ask for more of it, or for other mutations. A failure
names the seed and the number that make it again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import real_shards
from real_cases import by_name

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fuzzing import Base, base_of, campaign

pytestmark = pytest.mark.real

COUNT = int(os.environ.get("DEEPSPEED_AFFINE_FUZZ_COUNT", "5000"))
SEED = int(os.environ.get("DEEPSPEED_AFFINE_FUZZ_SEED", "20261130"))

CASES = (
    "zero0", "zero1_fp32", "zero1_groups", "zero1_dp3", "zero1_tied", "zero1_muon", "zero1_bf16opt_groups",
    "zero2_bf16", "zero2_frozen", "zero3_fp32", "zero3_groups", "zero3_frozen", "zero3_lion", "mpu2dp2_zero1",
    "tp2_own", "pp2_zero1", "moe_zero2",
)  # fmt: skip
EXPERT_CASES = ("ep2_zero1", "ep2_zero3", "ep2tp2_zero1")


@pytest.fixture(scope="session")
def bases(_installed, _experts) -> list[Base]:
    """Intact checkpoints with their conversions, every rank's shard of which was found byte for byte."""
    made = []
    for name in (*CASES, *(EXPERT_CASES if _experts is not None else ())):
        case = by_name(name)
        real = _experts if case.transformers == 5 else _installed
        trained, universal = real.trained(name), real.ours(name)
        assert real_shards.faults(universal, case, trained.truth())[0] == []
        family = repr((case.model, case.world, case.tp, case.pp, case.ep, case.groups, sorted(case.model_options)))
        made.append(base_of(name, family, trained.folder, universal))
    return made


@pytest.mark.cases(*CASES, *EXPERT_CASES)
def test_a_sample_of_mutations(bases):
    report = campaign(bases, 300, 1)
    assert not report.failures, report.failed


@pytest.mark.heavy
@pytest.mark.cases(*CASES, *EXPERT_CASES)
def test_thousands_of_mutations(bases):
    report = campaign(bases, COUNT, SEED)
    print(f"seed {SEED}: {report}")
    assert not report.failures, report.failed
    assert sum(report.outcomes.values()) == COUNT
    refused = sum(count for (_, outcome), count in report.outcomes.items() if outcome == "refused")
    # Most damage is damage, and some hits nothing that matters.
    assert COUNT / 2 < refused < COUNT
