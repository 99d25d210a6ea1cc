"""What the bytes say against the metadata: drift, NaN, identical shards, scaled pieces, vocabularies, ties."""

import json

import pytest
import torch
from converting import assert_converts, assert_refuses, bits, convert, same, stored, wrong
from edits import flip, mapped
from synthetic import COLUMN, NAN, Param, World, exact, make, random_full

HALF_AND_HALF = [
    Param("norm.weight", random_full((3, 5), 1)),
    Param("up.weight", random_full((8, 3), 2), COLUMN),
]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq"])
def test_one_bit_of_drift_is_refused_with_parameter_ranks_and_element(tmp_path, capsys, stage, state):
    made = make(World(stage=stage, tp=3), [Param("norm.weight", random_full((3, 5), 1))])
    flip(made, 2, state=state, element=7)
    folder = made.save(tmp_path / "ckpt")
    said = assert_refuses(folder, tmp_path, capsys)
    for part in ("'norm.weight'", f"'{state}'", "tp 0", "tp 2", "(1, 2)", "1 of 15", "1 ulp", "--on-drift"):
        assert part in said
    assert convert(folder, tmp_path / "first", "--on-drift", "first") == 0
    assert wrong(made, tmp_path / "first") == []
    assert convert(folder, tmp_path / "mean", "--on-drift", "average") == 0
    full = made.truth["norm.weight", state]
    other = full.clone()
    other.view(torch.int32).view(-1)[7] ^= 1
    expected = (full + full + other) / 3
    assert same(stored(tmp_path / "mean", "norm.weight", state), expected)
    rest = [entry for entry in made.truth if entry != ("norm.weight", state)]
    assert all(same(stored(tmp_path / "mean", *entry), made.truth[entry]) for entry in rest)
    assert "averaged: norm.weight" in capsys.readouterr().out


def test_drift_is_measured_and_reported_as_json(tmp_path, capsys):
    made = make(World(tp=2), [Param("w", torch.zeros(4))])
    made.optim(0, 1)["single_partition_of_fp32_groups"][0][2] = -0.0
    folder = made.save(tmp_path / "ckpt")
    assert convert(folder, tmp_path / "out", "--json") == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["kind"] == "IntegrityError"
    assert error["param"] == "w"
    assert "first at element (2,)" in error["message"]
    assert convert(folder, tmp_path / "out", "--json", "--on-drift", "first") == 0
    assert len(json.loads(capsys.readouterr().out)["drift"]) == 1


def test_nan_replicas_that_agree_are_accepted_and_that_differ_are_not(tmp_path, capsys):
    full = random_full((3, 5), 1)
    full[1, 1] = NAN
    full.view(torch.int32)[2, 0] = 0x7FC00123
    made = make(World(tp=4), [Param("w", full)])
    target = assert_converts(made, tmp_path)
    assert bits(stored(target, "w", "fp32")) == bits(full)
    flip(made, 3, element=10)
    folder = made.save(tmp_path / "ckpt2")
    assert "(2, 0)" in assert_refuses(folder, tmp_path / "ckpt2", capsys)


def kv_shared(full, tp):
    """Every rank has rows of its own, and all of them share the last two: whole, not cut."""
    own, shared = full[:-2], full[-2:]
    return [torch.cat([part, shared]) for part in torch.chunk(own, tp)]


def shared_cut_otherwise(full, tp):
    """The shared rows as rows on rank 0, as columns on rank 1."""
    own, shared = full[:-2], full[-2:]
    halves = torch.chunk(own, tp)
    first = torch.cat([halves[0].reshape(-1), shared.reshape(-1)])
    columns = [shared[:, column] for column in range(shared.shape[1])]
    second = torch.cat([*columns, halves[1].reshape(-1)])
    return [first, second]


@pytest.mark.parametrize("spelling", ["params", "draft"])
@pytest.mark.parametrize("cut", [kv_shared, shared_cut_otherwise])
def test_replicas_cut_differently_are_compared(tmp_path, capsys, cut, spelling):
    made = mapped("qkv", random_full((6, 3), 1), cut, 2, spelling=spelling, dp=2)
    assert_converts(made, tmp_path)
    broken = mapped("qkv", random_full((6, 3), 1), cut, 2, spelling=spelling, dp=2)
    # Rank 1 stores the shared rows first when it cuts them into columns, and last when it keeps them whole.
    flip(broken, 1, dp=0 if cut is shared_cut_otherwise else 1, element=1)
    folder = broken.save(tmp_path / "broken" / "ckpt")
    assert "'qkv'" in assert_refuses(folder, tmp_path / "broken", capsys)


@pytest.mark.parametrize("stage", [1, 3])
def test_identical_shards_are_refused_replicated_or_split(tmp_path, capsys, stage):
    made = make(World(stage=stage, tp=2, dp=2), [Param("norm.weight", random_full((6,), 1)), HALF_AND_HALF[1]])
    for rank in range(2):
        for dp in range(2 if stage == 3 else 1):
            made.model(rank, dp)["universal_checkpoint_info"]["tp_replicated_parameter_patterns"] = []
    folder = made.save(tmp_path / "ckpt")
    said = assert_refuses(folder, tmp_path, capsys)
    assert "'norm.weight'" in said
    assert "up.weight" not in said
    assert convert(folder, tmp_path / "one", "--identical-shards", "replicated") == 0
    assert wrong(made, tmp_path / "one") == []
    assert convert(folder, tmp_path / "two", "--identical-shards", "split") == 0
    full = made.truth["norm.weight", "fp32"]
    assert same(stored(tmp_path / "two", "norm.weight", "fp32"), torch.cat([full, full]))


def test_identical_weights_with_different_moments_are_parts(tmp_path):
    full = torch.ones(8, 3)
    assert_converts(make(World(tp=2), [Param("w", full, COLUMN)]), tmp_path)


def yuan(full, tp):
    return [full / tp for _ in range(tp)]


def test_scaled_states_that_drifted_are_averaged_in_the_right_coordinate(tmp_path):
    made = mapped("b", torch.full((2,), 8.0), lambda full, n: [full.clone()] * n, 2, scale=0.5)
    for rank, moment in ((0, 4.0), (1, 8.0)):
        optimizer = made.optim(0, rank)
        optimizer["single_partition_of_fp32_groups"][0] *= 0.5
        optimizer["base_optimizer_state"]["state"][0]["exp_avg"][:] = moment
        optimizer["base_optimizer_state"]["state"][0]["exp_avg_sq"][:] = 16.0
    folder = made.save(tmp_path / "ckpt")
    options = ("--scaled-states", "power", "--on-drift", "average")
    assert convert(folder, tmp_path / "out", *options) == 0
    assert stored(tmp_path / "out", "b", "exp_avg").tolist() == [3.0, 3.0]
    assert stored(tmp_path / "out", "b", "exp_avg_sq").tolist() == [4.0, 4.0]
    # States written as zeros are not read, so their drift does not matter.
    assert convert(folder, tmp_path / "reset", "--scaled-states", "reset") == 0
    assert stored(tmp_path / "reset", "b", "exp_avg").tolist() == [0.0, 0.0]


def test_one_parameter_in_two_groups_is_compared(tmp_path, capsys):
    made = make(World(), [Param("w", random_full((4,), 1)), Param("x", random_full((4,), 2), group=1)])
    optimizer = made.optim()
    for group in (0, 1):
        optimizer["param_slice_mappings"][group] = {"w": optimizer["param_slice_mappings"][0]["w"]}
    del made.model()["param_shapes"][1]["x"]
    made.model()["universal_checkpoint_info"]["tp_replicated_parameter_patterns"] = [exact("w")]
    folder = made.save(tmp_path / "ckpt")
    assert "'w'" in assert_refuses(folder, tmp_path, capsys)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_different_precision_are_refused(tmp_path, capsys, stage):
    made = make(World(stage=stage, dp=2), [Param("w", random_full((8,), 1))])
    optimizer = made.optim(1)
    inner = optimizer["base_optimizer_state"] if stage == 1 else optimizer["optimizer_state_dict"]
    inner["state"][0]["exp_avg"] = inner["state"][0]["exp_avg"].bfloat16()
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "bfloat16" in said
    assert "float32" in said


def test_a_tensor_only_the_module_holds_and_nothing_names_is_written_once_where_ranks_agree(tmp_path, capsys):
    made = make(World(tp=2), [Param("w", random_full((8, 4), 1), COLUMN)])
    gate = random_full((3, 5), 2)
    for rank in range(2):
        made.model(rank)["module"]["gate.weight"] = gate.clone()
    assert convert(made.save(tmp_path / "in"), tmp_path / "out") == 0
    assert same(stored(tmp_path / "out", "gate.weight", "fp32"), gate)
    assert "gate.weight: no pattern names it" in capsys.readouterr().out
    assert convert(tmp_path / "in", tmp_path / "split", "--identical-shards", "split") == 0
    assert same(stored(tmp_path / "split", "gate.weight", "fp32"), torch.cat([gate, gate]))
    made.model(1)["module"]["gate.weight"][0, 0] += 1
    assert convert(made.save(tmp_path / "other"), tmp_path / "parts") == 0
    assert stored(tmp_path / "parts", "gate.weight", "fp32").shape == (6, 5)
