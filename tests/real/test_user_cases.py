"""Users' cases on checkpoints that DeepSpeed trained and saved, where a synthetic folder would prove little.

Tests are named after the rows of docs/user_cases.md. What every real checkpoint is put through anyway (DeepSpeed's own
converter as the oracle, every shard cut out again, DeepSpeed's loader) is in test_convert_parity.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import real_shards
import torch
from real_cases import Case, by_name

from deepspeed_affine.cli import ds_to_universal
from deepspeed_affine.hooks import stock
from deepspeed_affine.parity import compare_universal

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
SCRIPT = HERE / "train_user_cases.py"
FEW = ("few_bf16opt", "few_zero1", "few_zero2", "few_zero3")
SEQUENCE = ("sequence_zero1", "sequence_zero3")
ADAFACTOR = ("adafactor_zero1", "adafactor_zero3")
TURNS = ("turns_zero1", "turns_zero2")
STAGES = {"turns_zero2": 2, "few_zero2": 2, "few_zero3": 3, "sequence_zero3": 3, "adafactor_zero3": 3}


def convert(folder: Path, target: Path, *options: str) -> int:
    return ds_to_universal(
        ["--affine", "--no-fsync", "--input_folder", str(folder), "--output_folder", str(target), *options]
    )


def compared(real, name: str) -> Path:
    """The converted folder of ``name``, every rank's shard of every state found in it byte for byte."""
    universal, truth = real.ours(name), real.trained(name).truth()
    wrong, count = real_shards.faults(universal, by_name(name), truth)
    assert (wrong, count > 8) == ([], True)
    return universal


@dataclass(frozen=True)
class Made:
    """A checkpoint of train_user_cases.py, and what its ranks held."""

    case: Case
    folder: Path

    def truth(self) -> list[dict[str, Any]]:
        truth = self.folder.parent / "truth"
        return [torch.load(truth / f"rank{rank}.pt", weights_only=False) for rank in range(self.case.world)]


@pytest.fixture(scope="session")
def special(cache_folder):
    """A function from an environment (a ``Real``) and a kind to its checkpoint; all kinds are made in one start."""

    def made(real, kind: str) -> Made:
        digest = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]
        root = cache_folder / f"{real.key}-user-cases-{digest}"
        if not (root / kind / "train.json").exists():
            command = [sys.executable, str(SCRIPT), str(root), *FEW, *SEQUENCE, *ADAFACTOR, *TURNS]
            environment = real.environment.variables()
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
            assert ended.returncode == 0, ended.stderr[-3000:]
        result = json.loads((root / kind / "train.json").read_text(encoding="utf-8"))
        assert result["ok"], result["error"]
        return Made(
            Case(kind, world=2 if kind in (*ADAFACTOR, "turns_zero1") else 4, stage=STAGES.get(kind, 1)),
            root / kind / "global_step2",
        )

    return made


@pytest.fixture
def workdir():
    """A folder whose path DeepSpeed's converter can take, which pytest's own is not always."""
    made = Path(stock.plain_workdir())
    yield made
    shutil.rmtree(made)


@pytest.mark.cases("zero1_fp32", "zero2_bf16")
@pytest.mark.parametrize("name", ["zero1_fp32", "zero2_bf16"])
def test_p01_a_client_that_writes_no_info(real, tmp_path, capsys, name):
    folder = real.trained(name).folder
    assert convert(folder, tmp_path / "universal") == 2
    assert "--inject_missing_state" in capsys.readouterr().err
    assert convert(folder, tmp_path / "universal", "--inject_missing_state") == 0


@pytest.mark.parametrize("version", ["0.16.9", "0.18.9"])
@pytest.mark.parametrize("name", ["moe_zero1", "moe_zero2"])
def test_p04_native_experts_of_versions_that_record_no_shapes(other_versions, tmp_path, version, name):
    real = other_versions(version, ["moe_zero1", "moe_zero2"])
    trained = real.trained(name)
    saved = torch.load(trained.folder / "mp_rank_00_model_states.pt", weights_only=False)
    assert "param_shapes" not in saved
    assert convert(trained.folder, tmp_path / "universal", "--inject_missing_state") == 0
    wrong, count = real_shards.faults(tmp_path / "universal", by_name(name), trained.truth())
    assert (wrong, count > 50) == ([], True)


@pytest.mark.cases("moe_zero1", "moe_zero2")
@pytest.mark.parametrize("name", ["moe_zero1", "moe_zero2"])
def test_p05_every_expert_is_whole(real, name):
    universal = compared(real, name)
    experts = {
        path.parent.name.split("deepspeed_experts.")[1].split(".")[0] for path in universal.glob("zero/*expert*/*")
    }
    assert experts == {str(number) for number in range(real_shards.EXPERTS)}


@pytest.mark.cases("zero0")
def test_p07_zero0_converts_weights(real):
    universal = compared(real, "zero0")
    assert {path.name for path in universal.glob("zero/*/*.pt")} == {"fp32.pt"}


@pytest.mark.cases("zero1_bf16opt", "zero2_bf16", "zero3_bf16", "zero1_fp16")
@pytest.mark.parametrize(
    ("name", "prefix"),
    [("zero1_bf16opt", "bf16_"), ("zero2_bf16", "bf16_"), ("zero3_bf16", "bf16_"), ("zero1_fp16", "")],
)
def test_p08_prefixes_as_deepspeed_writes_them(real, name, prefix):
    names = [path.name for path in real.trained(name).folder.glob("*_optim_states.pt")]
    assert names
    assert all(found.startswith(f"{prefix}zero_pp_rank_") for found in names)
    compared(real, name)


@pytest.mark.cases("zero3_groups")
def test_p12_zero3_with_two_groups(real):
    universal = compared(real, "zero3_groups")
    shared = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    assert [group["lr"] for group in shared["param_groups"]] == [1e-2, 3e-2]


@pytest.mark.cases("zero1_fp32")
@pytest.mark.parametrize("kind", FEW)
def test_p18_padding_on_the_last_rank(real, special, tmp_path, workdir, kind):
    """BF16_Optimizer records more padding on its last rank than the rank holds; DeepSpeed's converter stops there."""
    made = special(real, kind)
    assert convert(made.folder, tmp_path / "universal", "--inject_missing_state") == 0
    wrong, count = real_shards.faults(tmp_path / "universal", made.case, made.truth())
    assert (wrong, count > 50) == ([], True)
    theirs = stock.convert(made.folder, workdir / "universal", inject_missing_state=True)
    if kind == "few_bf16opt":
        last = torch.load(made.folder / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", weights_only=False)
        paddings = last["optimizer_state_dict"]["group_paddings"]
        held = [flat.numel() for flat in last["optimizer_state_dict"]["single_partition_of_fp32_groups"]]
        assert any(padding > count for padding, count in zip(paddings, held, strict=True))
        assert "narrow(): length must be non-negative" in theirs.message
        return
    assert theirs.ok, theirs.message
    assert compare_universal(tmp_path / "universal", workdir / "universal").different == ()


@pytest.mark.cases("zero1_frozen", "zero2_frozen", "tp2_zero1_frozen")
@pytest.mark.parametrize("name", ["zero1_frozen", "zero2_frozen", "tp2_zero1_frozen"])
def test_p20_frozen_parameters_and_buffers_are_written(real, name):
    universal, truth = compared(real, name), real.trained(name).truth()[0]
    assert truth["frozen"]
    for frozen in truth["frozen"]:
        assert [path.name for path in (universal / "zero" / frozen).iterdir()] == ["fp32.pt"]
    for buffer, value in truth["buffers"].items():
        if (universal / "zero" / buffer).is_dir():
            found = real_shards.read_state(universal, buffer, "fp32")
            assert torch.equal(found, value.float())
    assert name.startswith("tp2") or any("running_mean" in buffer for buffer in truth["buffers"])


@pytest.mark.cases("ep2dp2_zero1", "ep2_zero2", "ep2_zero3")
@pytest.mark.parametrize("case", ["ep2dp2_zero1", "ep2_zero2", "ep2_zero3"])
def test_p29_experts_keep_weights_and_moments(real, case):
    universal = compared(real, case)
    experts = [path.parent for path in universal.glob("zero/*.experts.w1/exp_avg.pt")]
    assert experts
    for expert in experts:
        states = [real_shards.read_state(universal, expert.name, s) for s in ("fp32", "exp_avg", "exp_avg_sq")]
        assert len({state.detach().numpy().tobytes() for state in states}) == 3


@pytest.mark.cases("tp2_zero1_uneven")
def test_p30_two_ranks_go_on_as_if_nothing_had_happened(real):
    """Weights and moments come back where they were, and the next step's loss is the one it would have been."""
    compared(real, "tp2_zero1_uneven")
    loaded = real.loaded("tp2_zero1_uneven")
    assert loaded.ok, loaded.error
    for rank in loaded.ranks:
        assert rank["wrong"] == []
        assert rank["losses"] == rank["expected_losses"]


@pytest.mark.cases("zero1_fp32", "zero3_fp32")
@pytest.mark.parametrize("name", ["zero1_fp32", "zero3_fp32"])
def test_p33_a_rank_that_skipped_a_step_is_refused_by_name(real, tmp_path, capsys, name):
    folder = tmp_path / "checkpoint"
    shutil.copytree(real.trained(name).folder, folder)
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    saved = torch.load(path, weights_only=False)
    optimizer = saved["optimizer_state_dict"]
    states = optimizer["base_optimizer_state" if name == "zero1_fp32" else "optimizer_state_dict"]["state"]
    states[0]["step"] += 1
    torch.save(saved, path)
    assert convert(folder, tmp_path / "universal", "--inject_missing_state") == 2
    said = capsys.readouterr().err
    assert "'step'" in said
    assert path.name in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.cases("zero1_tied", "zero3_tied", "tp2_zero1_tied")
@pytest.mark.parametrize("name", ["zero1_tied", "zero3_tied", "tp2_zero1_tied"])
def test_p46_tied_weights(real, name):
    universal = compared(real, name)
    alias = "lm_head.weight" if name.startswith("tp2") else "head.weight"
    assert (universal / "zero" / alias).is_dir() == ("zero1" in name)


@pytest.mark.cases("pp2_zero1", "pp2dp2_zero1")
@pytest.mark.parametrize("name", ["pp2_zero1", "pp2dp2_zero1"])
def test_p47_tied_across_pipeline_stages(real, tmp_path, capsys, name):
    compared(real, name)
    folder = tmp_path / "checkpoint"
    shutil.copytree(real.trained(name).folder, folder)
    for path in folder.glob("zero_pp_rank_*_mp_rank_01_optim_states.pt"):
        saved = torch.load(path, weights_only=False)
        optimizer = saved["optimizer_state_dict"]
        tied = "tied_modules.embed.word_embeddings.weight"
        address = optimizer["param_slice_mappings"][0].get(tied)
        if address is not None:
            optimizer["single_partition_of_fp32_groups"][0].detach()[address.start] += 1
            torch.save(saved, path)
    assert convert(folder, tmp_path / "universal") == 2
    assert "tied_modules.embed.word_embeddings.weight" in capsys.readouterr().err


OPTIMIZERS = {
    "sgd": set(),
    "momentum": {"momentum_buffer"},
    "adagrad": {"sum"},
    "lion": {"exp_avg"},
    "amsgrad": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "rmsprop": {"square_avg", "momentum_buffer", "grad_avg"},
    "adamax": {"exp_avg", "exp_inf"},
}


@pytest.mark.cases(*(f"zero{stage}_{name}" for name in (*OPTIMIZERS, "muon") for stage in (1, 3)))
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "muon"])
def test_p49_every_optimizer(real, stage, optimizer):
    universal = compared(real, f"zero{stage}_{optimizer}")
    states = {path.stem for path in universal.glob("zero/up.weight/*.pt")} - {"fp32", "step"}
    assert states == OPTIMIZERS.get(optimizer, {"momentum_buffer"})


@pytest.mark.cases("zero1_fp32")
@pytest.mark.parametrize("kind", ADAFACTOR)
def test_p49_adafactor_keeps_its_statistics_and_not_each_partitions_norm(real, special, tmp_path, capsys, kind):
    made = special(real, kind)
    assert convert(made.folder, tmp_path / "universal", "--inject_missing_state") == 0
    assert "RMS" in capsys.readouterr().out
    wrong, count = real_shards.faults(tmp_path / "universal", made.case, made.truth())
    assert (wrong, count > 30) == ([], True)


@pytest.mark.cases("zero1_step0", "zero2_step0", "zero3_step0")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_p51_saved_before_the_first_step(real, stage):
    universal = compared(real, f"zero{stage}_step0")
    assert {path.stem for path in universal.glob("zero/*/*.pt")} == {"fp32"}


@pytest.mark.cases("zero3_fp32")
def test_p57_the_shared_optimizer_state_of_zero3_is_the_first_ranks(real):
    universal, folder = real.ours("zero3_fp32"), real.trained("zero3_fp32").folder
    shared = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    first = torch.load(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)["optimizer_state_dict"]
    assert real_shards.same_bytes(shared["fp32_flat_groups"][0], first["fp32_flat_groups"][0])


@pytest.mark.cases("zero1_aligned", "zero2_aligned")
@pytest.mark.parametrize("name", ["zero1_aligned", "zero2_aligned"])
def test_x1_padding_between_parameters(real, name):
    compared(real, name)
    (path, *_) = real.trained(name).folder.glob("*zero_pp_rank_0_*_optim_states.pt")
    saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
    assert any(any(paddings) for paddings in saved["param_alignment_paddings"])


@pytest.mark.cases("zero1_fp32")
@pytest.mark.parametrize("kind", SEQUENCE)
def test_x3_sequence_parallel_ranks(real, special, tmp_path, kind):
    made = special(real, kind)
    assert convert(made.folder, tmp_path / "universal", "--inject_missing_state") == 0
    wrong, count = real_shards.faults(tmp_path / "universal", made.case, made.truth())
    assert (wrong, count > 100) == ([], True)


@pytest.mark.parametrize("version", ["0.18.9", "0.19.4"])
@pytest.mark.parametrize("kind", SEQUENCE)
def test_x3_sequence_parallel_ranks_named_as_model_ranks(other_versions, special, tmp_path, version, kind):
    made = special(other_versions(version), kind)
    names = {path.name for path in made.folder.glob("*_optim_states.pt")}
    assert "zero_pp_rank_1_mp_rank_01_optim_states.pt" in names
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" not in names
    assert convert(made.folder, tmp_path / "universal", "--inject_missing_state") == 0
    wrong, count = real_shards.faults(tmp_path / "universal", made.case, made.truth())
    assert (wrong, count > 100) == ([], True)


@pytest.mark.cases("zero3_hpz")
def test_x6_a_secondary_partition_does_not_change_the_first(real):
    compared(real, "zero3_hpz")


@pytest.mark.cases("zero1_fp32")
@pytest.mark.parametrize("kind", TURNS)
def test_x8_gradients_in_turns(real, special, tmp_path, workdir, kind):
    """What DeepSpeed's converter makes of the recorded slices is not what the ranks held; what ours makes is."""
    made = special(real, kind)
    assert convert(made.folder, tmp_path / "universal", "--inject_missing_state") == 0
    wrong, count = real_shards.faults(tmp_path / "universal", made.case, made.truth())
    assert (wrong, count > 50) == ([], True)
    theirs = stock.convert(made.folder, workdir / "universal", inject_missing_state=True)
    assert theirs.ok, theirs.message
    wrong, _ = real_shards.faults(workdir / "universal", made.case, made.truth())
    assert len(wrong) > 20
