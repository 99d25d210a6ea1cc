"""What the bytes say against the metadata: drift, NaN, identical shards, scaled pieces, vocabularies, ties."""

import json

import pytest
import torch
from converting import assert_converts, assert_refuses, bits, convert, same, stored, wrong
from synthetic import COLUMN, NAN, ROW, Cut, Param, World, exact, make, random_full

HALF_AND_HALF = [
    Param("norm.weight", random_full((3, 5), 1)),
    Param("up.weight", random_full((8, 3), 2), COLUMN),
]


def document(shards_of, full_shape, tp):
    """An affine_map entry from a function that cuts a tensor of addresses; one piece a run of addresses."""
    addresses = torch.arange(int(torch.tensor(full_shape).prod())).reshape(full_shape)
    shards = shards_of(addresses, tp)
    holders = {}
    for rank, shard in enumerate(shards):
        for address in shard.reshape(-1).tolist():
            holders.setdefault(address, []).append(rank)
    ranks = {}
    for rank, shard in enumerate(shards):
        flat = shard.reshape(-1).tolist()
        pieces = []
        start = 0
        for stop in range(1, len(flat) + 1):
            runs_on = stop < len(flat) and flat[stop] == flat[stop - 1] + 1
            if runs_on and holders[flat[stop]] == holders[flat[start]]:
                continue
            pieces.append(
                {
                    "shape": [stop - start],
                    "source": [flat[start], [1]],
                    "dest": [start, [1]],
                    "locations": holders[flat[start]],
                }
            )
            start = stop
        ranks[rank] = {"shard_shape": list(shard.shape), "pieces": pieces}
    return {"logical_shape": list(full_shape), "ranks": ranks}


def mapped(name, full, shards_of, tp, scale=None, spelling="params", **world):
    entry = document(shards_of, tuple(full.shape), tp)
    if scale is not None:
        for rank in entry["ranks"].values():
            for piece in rank["pieces"]:
                piece["scale"] = scale
    maps = {exact(name): entry}
    info = {"affine_map": {"version": 1, "params": maps} if spelling == "params" else {"version": 1, **maps}}
    param = Param(name, full, Cut("mapped", pieces=shards_of))
    return make(World(tp=tp, version=0.5, info=info, **world), [param])


def flip(made, tp, *, dp=0, state="fp32", element=4, bit=1, group=0):
    """One bit of one stored element differs."""
    optimizer = made.optim(dp, tp)
    if made.world.stage == 3:
        holder = optimizer["fp32_flat_groups"] if state == "fp32" else None
        inner = optimizer["optimizer_state_dict"]["state"][group]
    else:
        holder = optimizer["single_partition_of_fp32_groups"] if state == "fp32" else None
        inner = optimizer["base_optimizer_state"]["state"][group]
    tensor = holder[group] if holder is not None else inner[state]
    tensor.view(torch.int32)[element] ^= bit


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


def test_a_map_of_a_newer_version_is_refused(tmp_path, capsys):
    made = mapped("qkv", random_full((6, 3), 1), kv_shared, 2)
    for rank in range(2):
        made.model(rank)["universal_checkpoint_info"]["affine_map"]["version"] = 99
    assert "99" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


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


@pytest.mark.parametrize("tp", [2, 4])
def test_p35_scaled_bias_refuses_resets_or_applies_powers(tmp_path, capsys, tp):
    bias = random_full((6,), 3)
    made = mapped("o_proj.bias", bias, lambda full, n: [full.clone()] * n, tp, scale=1 / tp)
    moments = made.truth["o_proj.bias", "exp_avg"], made.truth["o_proj.bias", "exp_avg_sq"]
    for rank in range(tp):
        optimizer = made.optim(0, rank)
        optimizer["single_partition_of_fp32_groups"][0] /= tp
        state = optimizer["base_optimizer_state"]["state"][0]
        # d loss / d (F * s) = (d loss / d F) / s, and squared.
        state["exp_avg"] *= tp
        state["exp_avg_sq"] *= tp * tp
    folder = made.save(tmp_path / "ckpt")
    assert "--scaled-states" in assert_refuses(folder, tmp_path, capsys)
    assert convert(folder, tmp_path / "zero", "--scaled-states", "reset") == 0
    assert "reset to zeros: o_proj.bias/exp_avg, o_proj.bias/exp_avg_sq" in capsys.readouterr().out
    assert convert(folder, tmp_path / "power", "--scaled-states", "power") == 0
    for target in ("zero", "power"):
        assert same(stored(tmp_path / target, "o_proj.bias", "fp32"), bias)
    for state, value in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        assert same(stored(tmp_path / "zero", "o_proj.bias", state), torch.zeros(6))
        assert same(stored(tmp_path / "power", "o_proj.bias", state), value)


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


def test_p35_averaging_ranks_that_differ_is_a_choice_and_reported(tmp_path, capsys):
    made = make(World(tp=2), [Param("w", torch.ones(3), Cut("average"))])
    optimizer = made.optim(0, 1)
    optimizer["single_partition_of_fp32_groups"][0][:] = 3.0
    folder = made.save(tmp_path / "ckpt")
    assert "'w'" in assert_refuses(folder, tmp_path, capsys)
    assert convert(folder, tmp_path / "out", "--on-drift", "average") == 0
    assert stored(tmp_path / "out", "w", "fp32").tolist() == [2.0, 2.0, 2.0]
    assert "averaged: w" in capsys.readouterr().out


@pytest.mark.parametrize(("rows", "fits"), [((3, 3), True), ((4, 2), False)])
def test_p41_legacy_sub_parameter_count(tmp_path, capsys, rows, fits):
    full = random_full((6, 4), 1)
    info = {
        "parameter_with_sub_params": [{"patterns": [exact("w")], "shape": (3, -1), "partition_dim": 0}],
        "sub_param_shard_widths": None,
    }
    made = make(World(tp=2, version=0.2, info=info), [Param("w", full, Cut("legacy", rows))])
    folder = made.save(tmp_path / "ckpt")
    if fits:
        assert convert(folder, tmp_path / "out") == 0
        halves = [full[:3], full[3:]]
        expected = torch.cat([torch.stack([half[n] for half in halves]) for n in range(3)])
        assert same(stored(tmp_path / "out", "w", "fp32").reshape(6, 4), expected)
    else:
        assert "w" in assert_refuses(folder, tmp_path, capsys)


def test_p43_truncated_vocabulary_leaves_no_padding_in_the_file(tmp_path):
    full = random_full((800, 50), 1)
    made = make(World(tp=2), [Param("emb", full, Cut("vocab", original_rows=701))])
    target = assert_converts(made, tmp_path)
    found = stored(target, "emb", "fp32")
    assert found.untyped_storage().nbytes() == 701 * 50 * 4
    assert (target / "zero" / "emb" / "fp32.pt").stat().st_size < 701 * 50 * 4 + 2000


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), ()])
@pytest.mark.parametrize("tp", [1, 2])
def test_p44_parameters_without_elements_and_scalars(tmp_path, stage, shape, tp):
    params = [Param("odd", random_full(shape, 1)), Param("w", random_full((4, 3), 2), COLUMN)]
    made = make(World(stage=stage, tp=tp, dp=2), params)
    if stage < 3 and 0 in shape:
        # Such a parameter has no slice in any optimizer file; the module gives its weight.
        del made.truth["odd", "exp_avg"], made.truth["odd", "exp_avg_sq"]
    assert_converts(made, tmp_path)


def test_p44_only_empty_parameters(tmp_path):
    made = make(World(dp=2), [Param("odd", torch.zeros(0, 4))])
    del made.truth["odd", "exp_avg"], made.truth["odd", "exp_avg_sq"]
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
def test_p46_tied_weights_are_written_under_both_names(tmp_path, tp):
    full = random_full((4, 3), 1)
    alias = Param("head.weight", full, COLUMN, kind="alias", alias_of="emb.weight")
    made = make(World(tp=tp, dp=2), [Param("emb.weight", full, COLUMN), alias])
    if tp > 1:
        # As DeepSpeed: the alias is the first rank's shard, and is never read back.
        made.truth["head.weight", "fp32"] = full[:2]
    target = assert_converts(made, tmp_path)
    assert not (target / "zero" / "head.weight" / "exp_avg.pt").exists()


def test_p47_tied_across_pipeline_stages(tmp_path, capsys):
    params = [
        Param("word.emb", random_full((4, 3), 1), COLUMN, stages=(0, 1)),
        Param("a", random_full((3, 4), 2), ROW, stages=(0,)),
        Param("b", random_full((5,), 3), stages=(1,)),
    ]
    info = {"pipeline_replicated_parameter_patterns": [exact("word.emb")]}
    made = make(World(tp=2, pp=2, dp=2, info=info, layer_files=True), params)
    assert_converts(made, tmp_path)
    flip(made, 3, element=2)
    folder = made.save(tmp_path / "drifted" / "ckpt")
    said = assert_refuses(folder, tmp_path / "drifted", capsys)
    assert "'word.emb'" in said
    assert "pp 1, tp 1" in said


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
