"""Whatever states an optimizer keeps are carried under their own names; what cannot be mapped is refused by name."""

import os

import pytest
import torch
from converting import assert_converts, assert_refuses, convert, same, scalar, stored, wrong
from synthetic import COLUMN, Foreign, Param, World, make, random_full, save


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


def test_a_parameter_of_the_optimizer_without_a_slice_is_refused(tmp_path, capsys):
    """DeepSpeed slices also those that never got a gradient; without slices its moments would be lost in silence."""
    made = make(World(dp=2), [*dense(), Param("unused", random_full((3,), 9), group=2)])
    for dp in range(2):
        made.optim(dp)["param_slice_mappings"][2].clear()
    assert "'unused'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_parameters_that_never_got_a_gradient_have_zero_states(tmp_path):
    unused = Param("unused", random_full((3,), 9), group=2)
    unused.states = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    assert_converts(make(World(dp=2), [*dense(), unused]), tmp_path)


def test_a_parameter_nobody_stores_is_refused(tmp_path, capsys):
    made = make(World(dp=2), dense())
    del made.model()["module"]["bias"]
    for dp in range(2):
        made.optim(dp)["param_slice_mappings"][1].clear()
    assert "'bias'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


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
