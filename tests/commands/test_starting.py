"""What users hit before anything was converted: file sets, prefixes, patterns, groups. P numbers are user reports."""

import os
import shutil

import pytest
import torch
from converting import assert_converts, assert_refuses, convert, listing, same, scalar, stored, wrong
from synthetic import COLUMN, REPLICATED, ROW, Cut, Param, World, exact, make, random_full, save


def simple(tp=1):
    return [
        Param("up.weight", random_full((4 * tp, 3), 1), COLUMN),
        Param("down.weight", random_full((3, 2 * tp), 2), ROW),
        Param("norm.weight", random_full((3,), 3)),
    ]


def without_tp():
    return [Param(param.name, param.full) for param in simple()]


@pytest.mark.parametrize("stage", [1, 2])
def test_p01_missing_info_is_refused_and_injected_on_demand(tmp_path, capsys, stage):
    made = make(World(stage=stage, dp=2, with_info=False), without_tp())
    folder = made.save(tmp_path / "ckpt")
    said = assert_refuses(folder, tmp_path, capsys)
    assert "universal_checkpoint_info" in said
    assert "--inject_missing_state" in said
    target = assert_converts(made, tmp_path, "--inject_missing_state")
    name = made.model_name()
    assert (target / name).read_bytes() == (tmp_path / "ckpt" / name).read_bytes()


def test_p01_without_info_zero3_needs_none_and_tensor_parallel_zero3_is_refused(tmp_path, capsys):
    assert_converts(make(World(stage=3, dp=2, with_info=False), without_tp()), tmp_path)
    folder = make(World(stage=3, tp=2, with_info=False), simple(2)).save(tmp_path / "tp")
    shutil.rmtree(tmp_path / "out")
    assert "universal_checkpoint_info" in assert_refuses(folder, tmp_path, capsys)


@pytest.mark.parametrize("layers", [(0, 2, 3), (7, 100, 101)])
@pytest.mark.parametrize("tp", [1, 2])
def test_p03_layer_files_with_gaps_in_their_numbers(tmp_path, layers, tp):
    params = [Param(f"{n}.w", random_full((4, 2), n), COLUMN, stages=(n % 2,)) for n in range(3)]
    made = make(World(stage=1, tp=tp, pp=2, dp=2, layer_files=True), params)
    names = [name for name in made.files if name.startswith("layer_")]
    for name in names:
        del made.files[name]
    for number in layers:
        for rank in range(tp):
            made.files[f"layer_{number:02d}-model_{rank:02d}-model_states.pt"] = {"w": torch.zeros(1)}
    assert_converts(made, tmp_path)


def native_moe(dp=2, experts=4):
    """DeepSpeed's own MoE: each rank numbers its experts from 0, the expert files number them all."""
    stem = "moe.deepspeed_moe.experts.deepspeed_experts."
    local = experts // dp
    dense = Param("gate", random_full((2, 3), 1))
    full = {number: random_full((3, 2), 10 + number) for number in range(experts)}
    made = make(World(dp=dp), [dense, *(Param(f"{stem}{n}.w", full[n], group=1) for n in range(local))])
    for rank in range(dp):
        # Every rank is the only holder of its experts, so its group is not cut any further.
        own = [full[rank * local + n] for n in range(local)]
        optimizer = made.optim(rank)
        optimizer["single_partition_of_fp32_groups"][1] = torch.cat([value.reshape(-1) for value in own])
        state = optimizer["base_optimizer_state"]["state"][1]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.cat([value.reshape(-1) * 2 for value in own])
        mapping = optimizer["param_slice_mappings"][1]
        mapping.clear()
        for n in range(local):
            mapping[f"{stem}{n}.w"] = type(made.optim(0)["param_slice_mappings"][0]["gate"])(numel=6, start=6 * n)
        optimizer["group_paddings"][1] = 0
    module = made.model()["module"]
    for n in range(local):
        del module[f"{stem}{n}.w"]
    for number, value in full.items():
        made.files[f"layer_0_expert_{number}_mp_rank_00_model_states.pt"] = {f"{stem}{number}.w": value}
    return made, {f"{stem}{number}.w": value for number, value in full.items()}


def test_p05_native_experts_are_converted_not_skipped(tmp_path):
    made, experts = native_moe()
    assert convert(made.save(tmp_path / "ckpt"), tmp_path / "out") == 0
    for name, full in experts.items():
        assert same(stored(tmp_path / "out", name, "fp32"), full)
        assert same(stored(tmp_path / "out", name, "exp_avg"), full * 2)


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_p04_a_deleted_expert_file_is_refused(tmp_path, capsys, gone):
    made, _ = native_moe()
    del made.files[f"layer_0_expert_{gone}_mp_rank_00_model_states.pt"]
    assert "expert" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_p04_model_state_without_shapes_takes_them_from_the_weights(tmp_path):
    made, experts = native_moe()
    del made.model()["param_shapes"]
    assert convert(made.save(tmp_path / "ckpt"), tmp_path / "out") == 0
    for name, full in experts.items():
        assert same(stored(tmp_path / "out", name, "fp32"), full)
    assert same(stored(tmp_path / "out", "gate", "exp_avg"), made.truth["gate", "exp_avg"])


def test_p07_zero0_has_only_weights(tmp_path):
    made = make(World(), without_tp())
    root = made.model()
    root["optimizer"] = {"state": {}, "param_groups": [{"lr": 0.1}]}
    made.files = {made.model_name(): root}
    assert convert(made.save(tmp_path / "ckpt"), tmp_path / "out") == 0
    for param in without_tp():
        assert same(stored(tmp_path / "out", param.name, "fp32"), param.full)


@pytest.mark.parametrize("prefix", ["", "bf16_", "fp16_"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_p08_every_prefix(tmp_path, prefix, stage):
    assert_converts(make(World(stage=stage, prefix=prefix, dp=2), without_tp()), tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2), (1, 12)])
def test_p10_every_missing_rank_file_is_named(tmp_path, capsys, stage, tp, dp):
    made = make(World(stage=stage, tp=tp, dp=dp), simple(tp) if tp > 1 else without_tp())
    folder = made.save(tmp_path / "ckpt")
    for name in list(made.files):
        if stage == 1 and tp == dp == 1 and "mp_rank_00_model" in name:
            continue
        path = os.path.join(folder, name)
        os.rename(path, tmp_path / "aside")
        assert name in assert_refuses(folder, tmp_path, capsys)
        os.rename(tmp_path / "aside", path)
    assert convert(folder, tmp_path / "out") == 0


def test_p10_half_of_the_files_in_a_folder_of_their_own(tmp_path, capsys):
    made = make(World(dp=4), without_tp())
    folder = made.save(tmp_path / "ckpt")
    os.mkdir(os.path.join(folder, "tmp-checkpoint-500"))
    for rank in (2, 3):
        name = made.optim_name(rank)
        os.rename(os.path.join(folder, name), os.path.join(folder, "tmp-checkpoint-500", name))
    said = assert_refuses(folder, tmp_path, capsys)
    assert made.optim_name(2) in said
    assert made.optim_name(3) in said


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("groups", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 2)])
def test_p12_several_parameter_groups(tmp_path, stage, groups):
    params = [Param(f"p{n}", random_full((3, n + 2), n), group=group) for n, group in enumerate(groups)]
    assert_converts(make(World(stage=stage, dp=3), params), tmp_path)


def test_p15_a_pattern_that_matches_nothing(tmp_path, capsys):
    typo = {"parameter_with_row_parallelism_patterns": [exact("down.weight"), "down.wieght"]}
    made = make(World(tp=2, info=typo), simple(2))
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "down.wieght" in said
    assert "--no_strict" in said
    assert_converts(made, tmp_path, "--no_strict")
    assert "down.wieght" in capsys.readouterr().out


def test_p16_two_patterns_match_one_name(tmp_path, capsys):
    params = [Param("w", random_full((4, 2), 1), COLUMN), Param("w.extra", random_full((4,), 2))]
    both = {"tp_replicated_parameter_patterns": ["w", "w.*"]}
    said = assert_refuses(make(World(tp=2, info=both), params).save(tmp_path / "a"), tmp_path, capsys)
    assert "'w'" in said
    assert "'w.*'" in said
    assert "w.extra" in said
    closed = {"tp_replicated_parameter_patterns": ["w$", "w[.].*"]}
    assert_converts(make(World(tp=2, info=closed), [Param("w", random_full((4, 2), 1)), params[1]]), tmp_path)


def test_p16_names_that_begin_alike_have_exact_patterns(tmp_path):
    names = ["w", "w.x", "wxx", "w.x.y"]
    cuts = [ROW, REPLICATED, COLUMN, REPLICATED]
    params = [Param(n, random_full((4, 4), i), cut) for i, (n, cut) in enumerate(zip(names, cuts, strict=True))]
    assert_converts(make(World(tp=2), params), tmp_path)


@pytest.mark.parametrize("numel", [15, 32, 1])
@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_p18_padding_of_several_ranks(tmp_path, numel, strip, prefix):
    world = World(dp=12, prefix=prefix, strip_padding=strip, whole_padding_on_last=not strip, align=2)
    assert_converts(make(world, [Param("w", random_full((numel,), 1))]), tmp_path)


@pytest.mark.parametrize("inner", ["backup", "global_step5", "universal", "backup/deeper"])
@pytest.mark.parametrize("stage", [1, 3])
def test_p23_an_older_copy_inside_the_folder_does_not_count(tmp_path, inner, stage):
    made = make(World(stage=stage, dp=2), without_tp())
    older = make(World(stage=stage, dp=3), [Param(p.name, p.full + 1) for p in without_tp()])
    older.save(tmp_path / "ckpt" / inner)
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_p25_output_inside_the_input_twice(tmp_path, stage):
    made = make(World(stage=stage, dp=2), without_tp())
    folder = made.save(tmp_path / "ckpt")
    for name in ("universal", "universal2", "deeper/universal"):
        target = os.path.join(folder, name)
        assert convert(folder, target) == 0
        assert wrong(made, target, flat=stage == 3) == []
    assert convert(folder, os.path.join(folder, "universal")) == 2
    assert convert(folder, folder) == 2
    assert set(made.files) <= listing(folder)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dp", [12, 101])
def test_p26_ranks_in_numeric_order(tmp_path, stage, dp):
    params = [Param("early", random_full((4 * dp,), 1)), Param("w", random_full((11, dp), 2))]
    assert_converts(make(World(stage=stage, dp=dp), params), tmp_path)


def test_p26_more_than_a_hundred_model_ranks_with_uneven_shards(tmp_path):
    tp = 103
    sizes = tuple(1 + rank % 3 for rank in range(tp))
    params = [
        Param("w", random_full((sum(sizes), 2), 1), Cut("column", sizes)),
        Param("r", random_full((2, sum(sizes)), 2), Cut("row", sizes)),
        Param("n", random_full((3,), 3)),
    ]
    assert_converts(make(World(tp=tp, states=("exp_avg",)), params), tmp_path)


def test_a_folder_of_another_kind_says_which_was_meant(tmp_path, capsys):
    made = make(World(dp=2), without_tp())
    made.save(tmp_path / "run" / "global_step7")
    (tmp_path / "run" / "latest").write_text("global_step7")
    assert "global_step7" in assert_refuses(tmp_path / "run", tmp_path, capsys)
    (tmp_path / "run" / "latest").unlink()
    assert "global_step7" in assert_refuses(tmp_path / "run", tmp_path, capsys)
    (tmp_path / "empty").mkdir()
    assert "no checkpoint file" in assert_refuses(tmp_path / "empty", tmp_path, capsys)
    assert "cannot be listed" in assert_refuses(tmp_path / "absent", tmp_path, capsys)
    file = tmp_path / "run" / "global_step7" / made.model_name()
    assert "is a file" in assert_refuses(file, tmp_path, capsys)
    assert convert(tmp_path / "run" / "global_step7", tmp_path / "uni") == 0
    assert "universal checkpoint already" in assert_refuses(tmp_path / "uni", tmp_path, capsys)
    assert "no checkpoint file" in assert_refuses(tmp_path / "uni" / "zero", tmp_path, capsys)


def test_other_files_of_the_folder_are_left_alone(tmp_path):
    made = make(World(dp=2), without_tp())
    folder = tmp_path / "ckpt"
    made.save(folder)
    save({"x": 1}, folder / "scheduler.pt")
    (folder / "zero_to_fp32.py").write_text("raise SystemExit('never run')")
    (folder / "model.safetensors").write_bytes(b"\0" * 10)
    target = assert_converts(made, tmp_path)
    assert {"scheduler.pt", "zero_to_fp32.py", "model.safetensors"}.isdisjoint(listing(target))


def test_p32_step_kinds_are_kept(tmp_path):
    for number, step in enumerate([5, 5.0, torch.tensor(5.0), torch.tensor(5), torch.tensor(5, dtype=torch.int32)]):
        base = tmp_path / str(number)
        target = assert_converts(make(World(dp=2, step=step), without_tp()), base)
        found = scalar(target, "up.weight", "step")
        assert type(found) is type(step)
        assert found == step
        assert getattr(found, "dtype", None) == getattr(step, "dtype", None)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("other", [8, torch.tensor(8.0), 7, float("nan")])
def test_p33_steps_that_disagree_are_refused_by_rank(tmp_path, capsys, stage, other):
    made = make(World(stage=stage, dp=2), without_tp())
    optimizer = made.optim(1)
    inner = optimizer["base_optimizer_state"] if stage < 3 else optimizer["optimizer_state_dict"]
    inner["state"][0]["step"] = other
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "'step'" in said
    assert "dp 1" in said
    assert_converts(made, tmp_path, "--on-drift", "first")
