"""Real outputs verified: DeepSpeed's own converter as the oracle, right and wrong; and a bit that no checksum shows."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from real_cases import CASES, by_name

from deepspeed_affine.commands.verify import verify_folder

pytestmark = pytest.mark.real

CONVERTIBLE = [
    pytest.param(case.name, marks=[pytest.mark.quick] if case.quick else [], id=case.name)
    for case in CASES
    if case.train_error is None and case.our_error is None
]
STOCK_CONVERTS = [param for param in CONVERTIBLE if by_name(param.id).stock_error is None]


@pytest.mark.parametrize("case", CONVERTIBLE)
@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
def test_our_output_is_fine(real, case, quick):
    source = os.fspath(real.trained(case).folder)
    outcome = verify_folder(os.fspath(real.ours(case)), against=source, quick=quick)
    assert (outcome.exit_code, outcome.findings, outcome.notes) == (0, [], [])
    assert outcome.files > 5
    alone = verify_folder(os.fspath(real.ours(case)), quick=quick)
    assert (alone.exit_code, alone.findings) == (0, [])


@pytest.mark.parametrize("case", STOCK_CONVERTS)
def test_deepspeeds_output_is_fine_exactly_where_it_is_right(real, case):
    """Its files are others: other dates and padding, whole storages behind a view, no manifest."""
    facts = by_name(case)
    stock = real.stock(case)
    assert stock.ok, stock.error
    source = os.fspath(real.trained(case).folder)
    outcome = verify_folder(os.fspath(stock.folder), against=source, options={"inject_missing_state": True})
    if facts.only_ours is not None:
        names = {path.parent.name for path in stock.folder.rglob("exp_avg.pt")}
        missing = {(finding.kind, finding.file) for finding in outcome.findings}
        assert missing == {("missing", f"zero/{name}/{facts.only_ours}.pt") for name in names}
    elif "frozen_under_autotp" in facts.rules:
        assert {finding.kind for finding in outcome.findings} <= {"missing", "metadata"}
        assert outcome.findings
    else:
        assert (outcome.exit_code, outcome.findings) == (0, [])


@pytest.mark.cases("tp2_zero1_uneven", "zero3_bf16")
@pytest.mark.parametrize("name", ["tp2_zero1_uneven", "zero3_bf16"])
def test_one_bit_is_found_in_an_output_of_either_converter(real, tmp_path, name):
    source = os.fspath(real.trained(name).folder)
    for made_by, folder in (("ours", real.ours(name)), ("stock", real.stock(name).folder)):
        changed = tmp_path / made_by
        shutil.copytree(folder, changed)
        path = max(changed.glob("zero/*/exp_avg_sq.pt"), key=lambda path: path.stat().st_size)
        saved = torch.load(path, weights_only=True)
        tensor = saved["param"] if isinstance(saved, dict) else saved
        tensor.view(torch.int32).view(-1)[-3] ^= 1
        torch.save(saved, path)
        options = {"inject_missing_state": True} if made_by == "stock" else {}
        outcome = verify_folder(os.fspath(changed), against=source, options=options)
        found = [finding for finding in outcome.findings if finding.kind == "elements"]
        assert outcome.exit_code == 1
        assert [(finding.param, finding.state) for finding in found] == [(path.parent.name, "exp_avg_sq")]
        assert found[0].difference is not None
        assert (found[0].difference.first, found[0].difference.differing) == (tensor.numel() - 3, 1)
        assert found[0].difference.max_ulp == 1
        assert "optim_states.pt (dp " in str(found[0].source)
        assert {finding.file for finding in outcome.findings} <= {found[0].file}
