"""Whatever states an optimizer keeps are carried under their own names; what cannot be mapped is refused by name."""

import os

import pytest
import torch
from converting import assert_converts, assert_refuses, convert, listing, same, scalar, stored, wrong
from synthetic import COLUMN, Foreign, Param, World, make, random_full, save

OPTIMIZERS = {
    "sgd": ((), None),
    "momentum": (("momentum_buffer",), None),
    "adagrad": (("sum",), torch.tensor(3.0)),
    "lion": (("exp_avg",), None),
    "rmsprop": (("square_avg",), torch.tensor(3.0)),
    "amsgrad": (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), torch.tensor(3.0)),
    "adadelta": (("acc_delta", "square_avg"), 3),
}


def dense(tp=1):
    return [
        Param("up.weight", random_full((4 * tp, 3), 1), COLUMN),
        Param("norm.weight", random_full((5,), 2)),
        Param("bias", random_full((2,), 3), group=1),
    ]


def inner(made, dp=0, mp=0):
    optimizer = made.optim(dp, mp)
    return optimizer["optimizer_state_dict"] if made.world.stage == 3 else optimizer["base_optimizer_state"]


def state_files(target, param):
    return {name.removesuffix(".pt") for name in os.listdir(target / "zero" / param)}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_p49_every_optimizer(tmp_path, stage, tp, optimizer):
    states, step = OPTIMIZERS[optimizer]
    made = make(World(stage=stage, tp=tp, dp=2, states=states, step=step), dense(tp))
    target = assert_converts(made, tmp_path)
    expected = {"fp32", *states} | ({"step"} if step is not None and stage < 3 else set())
    assert state_files(target, "up.weight") == expected


@pytest.mark.parametrize("stage", [1, 3])
def test_p49_groups_of_one_run_with_different_optimizers(tmp_path, stage):
    params = dense()
    params[0].states = {"momentum_buffer": random_full((4, 3), 9)}
    params[1].states = {"momentum_buffer": random_full((5,), 10)}
    made = make(World(stage=stage, dp=2), params)
    target = assert_converts(made, tmp_path)
    assert "exp_avg" not in state_files(target, "up.weight")
    assert "momentum_buffer" not in state_files(target, "bias")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("tp", [1, 2])
def test_p49_muon_keeps_its_momentum_whole_per_parameter(tmp_path, stage, dp, tp):
    params = [Param(f"w{n}", random_full((6 * tp, n + 2), n), COLUMN) for n in range(4)]
    world = World(stage=stage, dp=dp, tp=tp, align=4, states=("momentum_buffer",), whole_states=("momentum_buffer",))
    assert_converts(make(world, params), tmp_path)


def test_p49_muon_copies_that_differ_are_refused(tmp_path, capsys):
    params = [Param("a", random_full((6, 5), 1)), Param("b", random_full((7, 5), 2))]
    world = World(dp=2, states=("momentum_buffer",), whole_states=("momentum_buffer",))
    made = make(world, params)
    touching = [dp for dp in range(2) if "b" in made.optim(dp)["param_slice_mappings"][0]]
    assert touching == [0, 1]
    inner(made, 1)["state"][0]["momentum_buffer"][0] += 1
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "'b'" in said
    assert "'momentum_buffer'" in said


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("step", [None, 0])
def test_p51_saved_before_the_first_step(tmp_path, stage, tp, step):
    made = make(World(stage=stage, tp=tp, dp=2, states=(), step=step), dense(tp))
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_p51_only_some_groups_have_states(tmp_path, stage):
    params = dense()
    params[2].states = {}
    made = make(World(stage=stage, dp=2, step=None), params)
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("value", [0.99, torch.tensor(0.99), torch.tensor([], dtype=torch.float32).sum(), True])
def test_scalar_states_other_than_step(tmp_path, value):
    made = make(World(dp=2, scalars={"mu_product": value}), dense())
    target = assert_converts(made, tmp_path)
    found = scalar(target, "up.weight", "mu_product")
    assert type(found) is type(value)
    assert found == value


def test_states_saved_as_none_are_named_and_not_written(tmp_path, capsys):
    made = make(World(dp=2), dense())
    for dp in range(2):
        inner(made, dp)["state"][0]["momentum_buffer"] = None
    target = assert_converts(made, tmp_path)
    assert "momentum_buffer" in capsys.readouterr().out
    assert "momentum_buffer" not in state_files(target, "up.weight")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "value", [torch.zeros(3, 3), [1.0, 2.0], "text", {"a": torch.zeros(2)}, Foreign(a=1), (torch.zeros(4),)]
)
def test_states_that_cannot_be_mapped_are_refused_by_name(tmp_path, capsys, stage, value):
    made = make(World(stage=stage, dp=2), dense())
    for dp in range(2):
        inner(made, dp)["state"][0]["preconditioner"] = value
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "'preconditioner'" in said


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_flat_states_of_another_length_are_refused(tmp_path, capsys, stage, length):
    """Adafactor's row and column statistics, or a state of another partition."""
    made = make(World(stage=stage, dp=2), dense())
    for dp in range(2):
        inner(made, dp)["state"][0]["exp_avg_sq_row"] = torch.zeros(length)
    assert assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_state_that_one_rank_lost_is_refused(tmp_path, capsys, stage, tp):
    made = make(World(stage=stage, tp=tp, dp=2), dense(tp))
    del inner(made, 1, tp - 1)["state"][0]["exp_avg"]
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "exp_avg" in said


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_one_rank_adds_is_refused(tmp_path, capsys, stage):
    made = make(World(stage=stage, dp=2), dense())
    state = inner(made, 1)["state"][0]
    state["extra"] = state["exp_avg"].clone()
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "'extra'" in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_any_precision(tmp_path, dtype, stage):
    params = dense()
    for param in params:
        param.states = {"exp_avg": random_full(param.full.shape, 5).to(dtype)}
    assert_converts(make(World(stage=stage, tp=1, dp=3), params), tmp_path)


def test_integer_states(tmp_path):
    params = dense()
    for param in params:
        param.states = {"counts": torch.arange(param.full.numel()).reshape(param.full.shape)}
    assert_converts(make(World(dp=3), params), tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_p20_frozen_parameters_and_buffers_are_written(tmp_path, stage, tp):
    params = [
        *dense(tp),
        Param("frozen.weight", random_full((4 * tp, 3), 7), COLUMN, kind="frozen"),
        Param("bn.running_mean", random_full((3,), 8), kind="buffer"),
        Param("bn.num_batches_tracked", torch.tensor(123), kind="buffer"),
        Param("mask", torch.tensor([True, False]), kind="buffer"),
    ]
    made = make(World(stage=stage, tp=tp, dp=2, module_dtype=torch.bfloat16), params)
    target = assert_converts(made, tmp_path)
    if stage < 3:
        assert state_files(target, "frozen.weight") == {"fp32"}
        assert scalar(target, "frozen.weight", "fp32").keys() == {"param"}


def test_p20_a_drifted_frozen_replica_is_refused(tmp_path, capsys):
    frozen = Param("frozen", random_full((5,), 1), kind="frozen")
    made = make(World(tp=2), [*dense(2), frozen])
    made.model(1)["module"]["frozen"][3] += 1
    assert "'frozen'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_parameters_that_never_got_a_gradient_keep_their_weight(tmp_path, capsys):
    made = make(World(dp=2), [*dense(), Param("unused", random_full((3,), 9), group=2)])
    for dp in range(2):
        optimizer = made.optim(dp)
        optimizer["param_slice_mappings"][2].clear()
        del inner(made, dp)["state"][2]
    for state in ("exp_avg", "exp_avg_sq"):
        del made.truth["unused", state]
    assert_converts(made, tmp_path)
    assert "no optimizer file has a slice of unused" in capsys.readouterr().out


def test_a_parameter_nobody_stores_is_refused(tmp_path, capsys):
    made = make(World(dp=2), dense())
    del made.model()["module"]["bias"]
    for dp in range(2):
        made.optim(dp)["param_slice_mappings"][1].clear()
    assert "'bias'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_p56_output_is_as_large_as_what_it_holds(tmp_path):
    """Fragments saved as views of one large storage do not drag it along."""
    made = make(World(dp=4), [Param(f"p{n}", random_full((64, 64), n)) for n in range(6)])
    for dp in range(4):
        optimizer = made.optim(dp)
        whole = torch.cat([optimizer["single_partition_of_fp32_groups"][0], torch.zeros(10_000)])
        optimizer["single_partition_of_fp32_groups"][0] = whole[:-10_000]
    target = assert_converts(made, tmp_path)
    size = sum(os.path.getsize(target / name) for name in listing(target) if os.path.isfile(target / name))
    data = sum(full.numel() * 4 for full in made.truth.values())
    model = os.path.getsize(target / made.model_name())
    assert size - model < data + 1500 * len(listing(target))


def test_p57_the_shared_optimizer_state_of_zero3_is_the_first_ranks(tmp_path):
    made = make(World(stage=3, dp=4), [Param("w", random_full((10_000,), 1))])
    target = assert_converts(made, tmp_path)
    found = torch.load(target / "zero" / "optimizer_state.pt", weights_only=False)
    assert found["param_groups"] == found["optimizer_state_dict"]["param_groups"]
    assert same(found["fp32_flat_groups"][0], made.optim(0)["fp32_flat_groups"][0])


@pytest.mark.parametrize("stage", [1, 2])
def test_the_shared_optimizer_state_keeps_no_shard(tmp_path, stage):
    made = make(World(stage=stage, dp=3), dense())
    target = assert_converts(made, tmp_path)
    found = torch.load(target / "zero" / "optimizer_state.pt", weights_only=False)
    assert found["group_paddings"] == [0, 0]
    assert found["partition_count"] == [3, 3]
    assert {"base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups"}.isdisjoint(found)
    assert [group["lr"] for group in found["param_groups"]] == [0.01, 0.01]


def test_elastic_checkpoints_are_refused_with_what_to_do(tmp_path, capsys):
    made = make(World(dp=2), dense())
    for dp in range(2):
        made.optim(dp)["base_optimizer_state"] = [inner(made, dp)["state"][0]]
    assert "elastic_checkpoint" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_extra_files_of_an_nvme_offload_do_not_disturb(tmp_path):
    made = make(World(stage=3, dp=2), dense())
    folder = made.save(tmp_path / "ckpt")
    os.makedirs(os.path.join(folder, "offloaded_tensors", "rank0"))
    save(torch.zeros(2), os.path.join(folder, "offloaded_tensors", "rank0", "x.pt"))
    assert convert(folder, tmp_path / "out") == 0
    assert wrong(made, tmp_path / "out", flat=True) == []
    assert same(stored(tmp_path / "out", "bias", "fp32"), made.truth["bias", "fp32"])
