"""What ranks say of the whole without holding it: compared, whatever the grid."""

import pytest
import torch
from converting import assert_converts, assert_refuses
from edits import native_moe, optimizer_state
from synthetic import COLUMN, Param, World, make, random_full


def many(**world):
    """Parameters of one group, each of which lies in one rank's partition alone."""
    return make(World(**world), [Param(f"p{n}", random_full((4,), 700 + n)) for n in range(6)])


def test_a_rank_without_elements_of_a_group_may_lack_its_states(tmp_path):
    made = make(World(dp=12), [Param("w", random_full((40,), 1)), Param("b", random_full((1,), 2), group=1)])
    for dp in range(1, 12):
        del optimizer_state(made, dp)["state"][1]
    assert_converts(made, tmp_path)


def test_a_step_that_differs_in_a_partition_of_its_own_is_refused(tmp_path, capsys):
    made = many(dp=3)
    optimizer_state(made, 2)["state"][0]["step"] = torch.tensor(8.0)
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    for part in ("parameter group 0", made.optim_name(2), made.optim_name(0), "'step'", "--on-drift first"):
        assert part in said


def test_it_is_noted_where_the_user_takes_the_first(tmp_path, capsys):
    made = many(dp=3)
    optimizer_state(made, 2)["state"][0]["step"] = torch.tensor(8.0)
    assert_converts(made, tmp_path, "--on-drift", "first")
    assert "state 'step' differs; the first is written" in capsys.readouterr().out


def test_a_state_that_one_partition_alone_lost_is_refused(tmp_path, capsys):
    made = many(dp=3)
    del optimizer_state(made, 1)["state"][0]["exp_avg_sq"]
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    for part in (made.optim_name(1), "'exp_avg_sq'", "group 0", "'p2'"):
        assert part in said


def test_a_state_saved_as_none_on_one_rank_is_one_that_is_lost(tmp_path, capsys):
    made = many(dp=3)
    optimizer_state(made, 1)["state"][0]["exp_avg_sq"] = None
    assert "'exp_avg_sq'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_one_partition_alone_in_another_precision_is_refused(tmp_path, capsys):
    made = many(dp=3)
    masters = made.optim(1)["single_partition_of_fp32_groups"]
    masters[0] = masters[0].bfloat16()
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert made.optim_name(1) in said
    assert "bfloat16" in said


def test_groups_may_differ_from_each_other(tmp_path):
    params = [Param("a", random_full((4, 2), 1), COLUMN), Param("b", random_full((4, 2), 2), COLUMN, group=1)]
    params[1].states = {"momentum_buffer": random_full((4, 2), 3).bfloat16()}
    made = make(World(tp=2, dp=2), params)
    for mp in range(2):
        for dp in range(2):
            optimizer_state(made, dp, mp)["state"][1]["step"] = torch.tensor(3.0)
    assert_converts(made, tmp_path)


def test_experts_of_every_rank_are_one_group(tmp_path, capsys):
    made, _ = native_moe(ep=4)
    del optimizer_state(made, 3)["state"][1]["exp_avg"]
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert made.optim_name(3) in said


def test_metadata_that_lays_nothing_out_may_differ_between_ranks(tmp_path):
    made = make(World(tp=2), [Param("w", random_full((4, 2), 1), COLUMN)])
    for mp in range(2):
        made.model(mp)["universal_checkpoint_info"] = {**made.model(mp)["universal_checkpoint_info"], "rank": mp}
    assert_converts(made, tmp_path)


def test_shapes_that_differ_on_one_data_rank_are_refused(tmp_path, capsys):
    made = make(World(stage=3, dp=2), [Param("w", random_full((4, 2), 1)), Param("v", random_full((2, 4), 2))])
    shapes = made.model(0, 1)["param_shapes"][0]
    made.model(0, 1)["param_shapes"] = [{"w": shapes["v"], "v": shapes["w"]}]
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert made.model_name(0, 1) in said


@pytest.mark.parametrize("value", [3, torch.tensor(3), True])
def test_a_count_that_differs_is_no_number_of_a_partition(tmp_path, capsys, value):
    made = many(dp=3, scalars={"count": 2 if value is not True else False})
    optimizer_state(made, 2)["state"][0]["count"] = value
    assert "'count'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_a_fraction_that_differs_where_no_step_is_kept_is_refused(tmp_path, capsys):
    made = many(dp=3, step=None, scalars={"progress": 0.5})
    optimizer_state(made, 2)["state"][0]["progress"] = 0.75
    assert "'progress'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_a_fraction_that_agrees_is_a_number_of_every_parameter(tmp_path):
    target = assert_converts(many(dp=3, scalars={"mu_product": 0.9}), tmp_path)
    assert all((target / "zero" / f"p{n}" / "mu_product.pt").exists() for n in range(6))
