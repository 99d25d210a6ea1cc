"""Every real checkpoint: our files equal DeepSpeed's, every rank's shard comes out again, and DeepSpeed loads it."""

from __future__ import annotations

import re
import shutil

import pytest
import real_shards
import torch
from real_cases import CASES, by_name

from deepspeed_affine.cli import ds_to_universal
from deepspeed_affine.parity import compare_universal

pytestmark = pytest.mark.real


def chosen(condition):
    return [
        pytest.param(case.name, marks=[pytest.mark.quick] if case.quick else [], id=case.name)
        for case in CASES
        if condition(case)
    ]


CONVERTIBLE = chosen(lambda case: case.train_error is None and case.our_error is None)
STOCK_CONVERTS = chosen(lambda case: case.train_error is None and case.stock_error is None)
STOCK_FAILS = chosen(lambda case: case.stock_error is not None)
REFUSED = chosen(lambda case: case.our_error is not None)
LOADABLE = chosen(lambda case: case.train_error is None and case.our_error is None)


@pytest.mark.parametrize("case", STOCK_CONVERTS)
def test_every_file_equals_deepspeeds(real, case):
    facts = by_name(case)
    stock = real.stock(case)
    assert stock.ok, stock.error
    report = compare_universal(real.ours(case), stock.folder)
    unlike = {row.path: row.detail for row in report.different}
    if facts.only_ours is None:
        assert unlike == {}
    else:
        names = {path.parent.name for path in stock.folder.rglob("exp_avg.pt")}
        assert unlike == {f"zero/{name}/{facts.only_ours}.pt": "only we wrote it" for name in names}
    assert tuple(sorted({row.rule for row in report.expected})) == facts.rules
    assert len(report.rows) > 5


@pytest.mark.parametrize("case", STOCK_FAILS)
def test_deepspeeds_converter_fails_as_documented(real, case):
    stock = real.stock(case)
    assert not stock.ok, "DeepSpeed now converts this case: compare it instead"
    assert re.search(by_name(case).stock_error, stock.error), stock.error


@pytest.mark.parametrize("case", CONVERTIBLE)
def test_every_shard_of_every_state_is_in_it_byte_for_byte(real, case):
    universal = real.ours(case)
    truth = real.trained(case).truth()
    wrong, compared = real_shards.faults(universal, by_name(case), truth)
    assert wrong == []
    assert compared >= sum(len(held["params"]) for held in truth)


@pytest.mark.cases("tp2_zero1_uneven")
@pytest.mark.parametrize("state", ["fp32", "exp_avg"])
def test_one_changed_bit_in_our_output_would_be_seen(real, tmp_path, state):
    name = "model.layers.0.self_attn.k_proj.weight"
    universal = tmp_path / "universal"
    shutil.copytree(real.ours("tp2_zero1_uneven"), universal)
    changed = universal / "zero" / name / f"{state}.pt"
    saved = torch.load(changed, weights_only=True)
    saved["param"].view(torch.int32)[-1, -1] ^= 1
    torch.save(saved, changed)
    wrong, _ = real_shards.faults(universal, by_name("tp2_zero1_uneven"), real.trained("tp2_zero1_uneven").truth())
    assert wrong == [f"rank 1: {name}:{state} differs"]
    report = compare_universal(universal, real.stock("tp2_zero1_uneven").folder)
    assert [row.path for row in report.different] == [f"zero/{name}/{state}.pt"]


@pytest.mark.parametrize("case", CONVERTIBLE)
def test_the_step_is_the_number_of_steps_trained(real, case):
    facts = by_name(case)
    steps = [torch.load(path, weights_only=True) for path in real.ours(case).glob("zero/*/step.pt")]
    keeps_step = facts.optimizer in ("adamw", "amsgrad", "adagrad", "rmsprop", "adamax", "muon")
    # DeepSpeed's ZeRO-3 reads the step from optimizer_state.pt and has no step files.
    if keeps_step and facts.stage in (1, 2) and facts.steps:
        assert steps
    assert all(int(step) == facts.steps for step in steps)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name(real, case, tmp_path, capsys):
    trained = real.trained(case)
    folders = ["--input_folder", str(trained.folder), "--output_folder", str(tmp_path / "universal")]
    assert ds_to_universal(["--affine", *folders, "--inject_missing_state"]) == 2
    assert re.search(by_name(case).our_error, capsys.readouterr().err)
    assert not (tmp_path / "universal").exists()


@pytest.mark.parametrize("case", LOADABLE)
def test_deepspeed_loads_it(real, case):
    facts = by_name(case)
    others = [name for name in real.wanted if not by_name(name).train_error]
    for name in [case, *others]:
        if not by_name(name).our_error:
            real.ours(name)
    loaded = real.loaded(case, together=others)
    if facts.load_error is not None:
        assert not loaded.ok, "DeepSpeed now loads this case: drop its load_error"
        assert re.search(facts.load_error, loaded.error), loaded.error
        return
    assert loaded.ok, loaded.error
    if facts.load_wrong is not None:
        wrong = [fault for rank in loaded.ranks for fault in rank["wrong"]]
        assert wrong, "DeepSpeed now loads this case rightly: drop its load_wrong"
        assert [fault for fault in wrong if not re.search(facts.load_wrong, fault)] == []
        return
    for rank in loaded.ranks:
        assert rank["wrong"] == []
        assert rank["global_steps"] == facts.steps
        assert rank["note"] == "saved by the test session"
        # What is frozen or a buffer stays fresh after load_universal, whoever converted: DeepSpeed never reads it.
        if facts.model_options.get("frozen") or facts.model_options.get("buffers"):
            assert rank["not_restored"]
            continue
        unrestored = [name for name in rank["not_restored"] if "tokens_per_expert" not in name]
        assert unrestored == []
        assert rank["losses"] == rank["expected_losses"]


@pytest.mark.parametrize("case", ["zero3_nvme"])
def test_nvme_offload_converts_or_deepspeed_names_what_it_lacks(real, case):
    training = real.training(case)
    if not training.ok:
        assert re.search(by_name(case).train_error, training.error), training.error
        return
    wrong, compared = real_shards.faults(real.ours(case), by_name(case), real.trained(case).truth())
    assert (wrong, compared > 0) == ([], True)
