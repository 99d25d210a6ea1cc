"""The same conversions beside other DeepSpeed versions: each trains, converts and loads with its own code."""

from __future__ import annotations

import re

import pytest
import real_shards
from real_cases import by_name

from deepspeed_affine.cli import ds_to_universal
from deepspeed_affine.parity import compare_universal

pytestmark = pytest.mark.real

PLAIN = ("zero1_fp32", "zero2_bf16", "zero3_fp32")
MATRIX = {
    "0.16.9": PLAIN,
    "0.18.9": PLAIN,
    "0.19.4": (*PLAIN, "tp2_own_equal", "tp2_zero1_even"),
    "0.19.6": (*PLAIN, "tp2_zero1_uneven", "tp2_zero2_even", "tp2_zero3_uneven"),
}
DOUBLED = "0.18.9"
LOAD_FAILS = {("0.19.4", "tp2_zero1_even"): "RuntimeError: shape .* is invalid for input of size"}
"""0.19.4 converts uneven shards and cannot restore them: its loader expects the first rank's size everywhere."""
PAIRS = [pytest.param(version, name, id=f"{version}-{name}") for version, names in MATRIX.items() for name in names]


@pytest.mark.parametrize(("version", "name"), PAIRS)
def test_ours_equals_that_versions_and_loads_there(other_versions, version, name):
    real = other_versions(version, MATRIX[version])
    facts = by_name(name)
    trained = real.trained(name)
    stock, ours = real.stock(name), real.ours_elsewhere(name)
    assert stock.ok, stock.error
    assert ours.ok, ours.error
    report = compare_universal(ours.folder, stock.folder)
    assert {row.path: row.detail for row in report.different} == {}
    assert len(report.rows) > 20
    wrong, compared = real_shards.faults(ours.folder, facts, trained.truth())
    assert (wrong, compared > 20) == ([], True)
    loaded = real.loaded(name)
    if (version, name) in LOAD_FAILS:
        assert not loaded.ok
        assert re.search(LOAD_FAILS[version, name], loaded.error), loaded.error
        return
    assert loaded.ok, loaded.error
    for rank in loaded.ranks:
        assert (rank["wrong"], rank["not_restored"]) == ([], [])
        assert rank["losses"] == rank["expected_losses"]


def test_what_0_18_9_saves_of_replicated_parameters_is_not_doubled(other_versions, tmp_path, capsys):
    """Its collected info omits them, and its own converter then writes them twice as tall, exit 0."""
    real = other_versions(DOUBLED, MATRIX[DOUBLED])
    name = "tp2_own_equal"
    trained, facts = real.trained(name), by_name(name)
    stock = real.stock(name)
    assert stock.ok, stock.error
    held = trained.truth()[0]["params"]["norm.weight"]["fp32"]
    doubled = real_shards.read_state(stock.folder, "norm.weight", "fp32")
    assert doubled.shape[0] == 2 * held.shape[0]
    arguments = ["--affine", "--input_folder", str(trained.folder), "--output_folder", str(tmp_path / "universal")]
    arguments.append("--no-fsync")
    assert ds_to_universal(arguments) == 2
    said = capsys.readouterr().err
    assert "norm.weight" in said
    assert "--identical-shards" in said
    assert not (tmp_path / "universal").exists()
    assert ds_to_universal([*arguments, "--identical-shards", "replicated"]) == 0
    wrong, compared = real_shards.faults(tmp_path / "universal", facts, trained.truth())
    assert (wrong, compared > 20) == ([], True)
