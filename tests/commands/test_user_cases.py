"""What users of DeepSpeed's converter ran into, each with the outcome it should have had.

docs/user_cases.md is the table, and a test is named after the row. Where a report is one of a kind, the test takes
the kind.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from converting import assert_converts, assert_refuses, convert, listing, same, scalar, stored, wrong
from edits import STEM, flip, mapped, native_moe, optimizer_state
from synthetic import (
    COLUMN,
    REPLICATED,
    ROW,
    Cut,
    ExpertLayer,
    Foreign,
    Param,
    World,
    ZeroStageByName,
    exact,
    make,
    random_full,
)

STAGES = (1, 2, 3)
PREFIXES = ("", "bf16_", "fp16_")


def simple(tp=1):
    """Parameters cut by columns, by rows and not at all; without tensor parallelism whole."""
    cuts = (COLUMN, ROW, REPLICATED) if tp > 1 else (REPLICATED,) * 3
    return [
        Param("up.weight", random_full((4 * tp, 3), 901), cuts[0]),
        Param("down.weight", random_full((3, 2 * tp), 902), cuts[1]),
        Param("norm.weight", random_full((3,), 903), cuts[2]),
    ]


def two_groups(tp=1):
    return [*simple(tp), Param("bias", random_full((2,), 904), group=1)]


def files_of(target, param):
    return {name.removesuffix(".pt") for name in os.listdir(target / "zero" / param)}


# Getting a conversion to start.


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_p01_missing_info_is_refused_and_injected_on_demand(tmp_path, capsys, stage, prefix):
    made = make(World(stage=stage, dp=2, prefix=prefix, with_info=False), simple())
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "universal_checkpoint_info" in said
    assert "--inject_missing_state" in said
    target = assert_converts(made, tmp_path, "--inject_missing_state")
    name = made.model_name()
    assert (target / name).read_bytes() == (tmp_path / "ckpt" / name).read_bytes()


def test_p01_zero3_needs_no_info(tmp_path):
    assert_converts(make(World(stage=3, dp=2, with_info=False), simple()), tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_p01_nothing_is_injected_into_a_tensor_parallel_checkpoint(tmp_path, capsys, stage):
    """DeepSpeed joins every shard along axis 0, exit 0: rows are cut wrongly and norms come out twice as long."""
    folder = make(World(stage=stage, tp=2, with_info=False), simple(2)).save(tmp_path / "ckpt")
    for options in ((), ("--inject_missing_state",)):
        said = assert_refuses(folder, tmp_path, capsys, *options)
        assert "universal_checkpoint_info" in said
        assert "2 tensor-parallel ranks" in said


@pytest.mark.parametrize("layers", [(0, 2, 3), (7, 100, 101), (1, 2, 3)])
@pytest.mark.parametrize("tp", [1, 2])
def test_p03_layer_files_with_gaps_in_their_numbers(tmp_path, layers, tp):
    params = [Param(f"{n}.w", random_full((4, 2), n), COLUMN, stages=(n % 2,)) for n in range(3)]
    made = make(World(stage=1, tp=tp, pp=2, dp=2, layer_files=True), params)
    for name in [name for name in made.files if name.startswith("layer_")]:
        del made.files[name]
    for number in layers:
        for rank in range(tp):
            made.files[f"layer_{number:02d}-model_{rank:02d}-model_states.pt"] = {"w": torch.zeros(1)}
    assert_converts(made, tmp_path)


MOE = {
    "two ranks": {},
    "four ranks": {"ep": 4},
    "one rank": {"ep": 1},
    "experts cut over two ranks": {"edp": 2},
    "experts cut over two ranks, data before expert": {"edp": 2, "data_before_expert": True},
    "experts cut over three ranks, aligned": {"edp": 3, "align": 4, "stage": 2},
    "layers of different size": {"experts": (4, 2, 6)},
    "tensor parallel": {"tp": 2, "edp": 2},
    "files of early releases": {"file_prefix": ""},
    "bf16": {"prefix": "bf16_"},
    "another optimizer": {"states": ("momentum_buffer",)},
    "before the first step": {"states": ()},
}


def assert_experts(made, experts, base):
    target = base / "out"
    assert convert(made.save(base / "ckpt"), target) == 0
    assert wrong(made, target) == []
    for (name, state), full in experts.items():
        assert same(stored(target, name, state), full), (name, state)
    assert len({name for name, _ in experts}) + 1 == len(
        {os.path.dirname(path) for path in listing(target / "zero") if path.endswith(".pt")} - {""}
    )


@pytest.mark.parametrize("kind", MOE)
def test_p04_native_experts_without_recorded_shapes(tmp_path, kind):
    """Up to 0.19.4 DeepSpeed leaves param_shapes out of a model-state file with experts."""
    assert_experts(*native_moe(shapes=False, **MOE[kind]), tmp_path)


@pytest.mark.parametrize("gone", [0, 1, 3])
@pytest.mark.parametrize("shapes", [True, False])
def test_p04_a_deleted_expert_file_is_refused_by_name(tmp_path, capsys, gone, shapes):
    made, _ = native_moe(shapes=shapes)
    name = f"layer_0_expert_{gone}_mp_rank_00_model_states.pt"
    del made.files[name]
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert name in said or f"0.{STEM}" in said


@pytest.mark.parametrize("shapes", [True, False])
def test_p04_all_expert_files_deleted_are_refused_by_layer(tmp_path, capsys, shapes):
    made, _ = native_moe(shapes=shapes, experts=(4, 2))
    made.files = {name: root for name, root in made.files.items() if "expert" not in name}
    assert f"0.{STEM}" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


@pytest.mark.parametrize("kind", MOE)
def test_p05_native_experts_are_converted_whole(tmp_path, kind):
    """DeepSpeed prints that it skips them, exit 0."""
    assert_experts(*native_moe(**MOE[kind]), tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_p07_zero0_converts_weights(tmp_path, tp, dtype):
    params = [
        *simple(tp),
        Param("frozen", random_full((3,), 5), kind="frozen"),
        Param("count", torch.tensor(5), kind="buffer"),
    ]
    made = make(World(tp=tp, module_dtype=dtype), params)
    made.files = {name: root for name, root in made.files.items() if "optim" not in name}
    for root in made.files.values():
        root["optimizer"] = {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1}]}
        root["ds_config"] = {"zero_optimization": {"stage": 0}}
        del root["param_shapes"]
    target = tmp_path / "out"
    assert convert(made.save(tmp_path / "ckpt"), target) == 0
    for param in params:
        full = param.full if param.kind == "buffer" else param.full.to(dtype)
        assert same(stored(target, param.name, "fp32"), full.float())
        assert files_of(target, param.name) == {"fp32"}
    assert torch.load(target / "zero" / "optimizer_state.pt")["param_groups"] == [{"lr": 0.1}]


def test_p07_zero0_of_a_pipeline_is_refused_by_name(tmp_path, capsys):
    """Its weights are in layer files under names local to each layer, and nothing records the whole names."""
    made = make(World(stage=0, pp=2, layer_files=True), [Param("0.w", random_full((4, 2), 1))])
    made.files = {name: root for name, root in made.files.items() if "optim" not in name}
    folder = made.save(tmp_path / "ckpt")
    assert f"{folder}: saved by a pipeline engine without ZeRO" in assert_refuses(folder, tmp_path, capsys)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tp", [1, 2])
def test_p08_every_prefix(tmp_path, prefix, stage, tp):
    assert_converts(make(World(stage=stage, prefix=prefix, tp=tp, dp=2), simple(tp)), tmp_path)


def test_p08_names_of_early_releases_lack_an_underscore(tmp_path):
    made = make(World(dp=2), simple())
    made.files = {name.replace("_optim_states", "optim_states"): root for name, root in made.files.items()}
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2), (1, 12)])
def test_p10_every_missing_rank_file_is_named(tmp_path, capsys, stage, tp, dp):
    made = make(World(stage=stage, tp=tp, dp=dp), simple(tp))
    folder = made.save(tmp_path / "ckpt")
    for name in made.files:
        path = os.path.join(folder, name)
        os.rename(path, tmp_path / "aside")
        assert name in assert_refuses(folder, tmp_path, capsys)
        os.rename(tmp_path / "aside", path)
    assert convert(folder, tmp_path / "out") == 0


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("last", [1, 2])
def test_p10_the_last_ranks_are_missed_where_no_file_says_how_many_there_were(tmp_path, capsys, stage, last):
    made = make(World(stage=stage, dp=4), [Param("w", random_full((11, 4), 1))])
    for name in list(made.files):
        root = made.files[name]
        root.pop("dp_world_size", None)
        root.pop("mp_world_size", None)
        if any(f"rank_{4 - n}_" in name for n in range(1, last + 1)):
            del made.files[name]
    assert "'w'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys) or stage == 3


def test_p10_missing_layer_and_expert_files_are_named(tmp_path, capsys):
    params = [Param(f"{n}.w", random_full((4, 2), n), COLUMN, stages=(n,)) for n in range(2)]
    pipeline = make(World(tp=2, pp=2, layer_files=True), params)
    experts, _ = native_moe(ep=4)
    for number, made in enumerate((pipeline, experts)):
        base = tmp_path / str(number)
        folder = made.save(base / "ckpt")
        for name in [name for name in made.files if "-model_00" in name or "expert_1" in name]:
            os.remove(os.path.join(folder, name))
            assert name in assert_refuses(folder, base, capsys)


def test_p10_half_of_the_files_in_a_folder_of_their_own(tmp_path, capsys):
    made = make(World(dp=4), simple())
    folder = made.save(tmp_path / "ckpt")
    os.mkdir(os.path.join(folder, "tmp-checkpoint-500"))
    for rank in (2, 3):
        name = made.optim_name(rank)
        os.rename(os.path.join(folder, name), os.path.join(folder, "tmp-checkpoint-500", name))
    said = assert_refuses(folder, tmp_path, capsys)
    assert made.optim_name(2) in said
    assert made.optim_name(3) in said


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("groups", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 2), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("tp", [1, 2])
def test_p12_several_parameter_groups(tmp_path, stage, groups, tp):
    params = [Param(f"p{n}", random_full((3, n + 2), n), group=group) for n, group in enumerate(groups)]
    assert_converts(make(World(stage=stage, tp=tp, dp=3), params), tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_p13_loading_restricted_to_weights_does_not_matter(tmp_path, monkeypatch, stage):
    """Files hold objects of DeepSpeed's classes and of the user's, which torch 2.6 and later refuse by default."""
    made = make(World(stage=stage, dp=2), simple())
    for root in made.files.values():
        root["schedule"] = Foreign(warmup=3)
    folder = made.save(tmp_path / "ckpt")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        torch.load(os.path.join(folder, made.optim_name()))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", None)
        assert convert(folder, tmp_path / "out") == 0
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    assert wrong(made, tmp_path / "out", flat=stage == 3) == []


LISTS = {
    "parameter_with_row_parallelism_patterns": exact("down.weight"),
    "tp_replicated_parameter_patterns": exact("norm.weight"),
    "parameter_to_average_patterns": None,
    "parameter_with_2_sub_params_cat_dim_0": None,
    "vocabulary_parameter_patterns": None,
}


@pytest.mark.parametrize("key", LISTS)
@pytest.mark.parametrize("typo", ["down.wieght", r"^layers\.(\d+)\.dense$", exact("down.wieght")])
@pytest.mark.parametrize("stage", [1, 3])
def test_p15_a_pattern_that_matches_nothing(tmp_path, capsys, key, typo, stage):
    info = {key: [pattern for pattern in (LISTS[key], typo) if pattern], "original_vocab_size": 3}
    made = make(World(stage=stage, tp=2, info=info), simple(2))
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert repr(typo) in said
    assert "--no_strict" in said
    assert_converts(made, tmp_path, "--no_strict")
    assert repr(typo) in capsys.readouterr().out


def test_p15_a_sub_parameter_rule_that_matches_nothing(tmp_path, capsys):
    rule = {"patterns": ["up.wieght"], "shape": ((4, 4), 3), "partition_dim": 0}
    made = make(World(tp=2, info={"parameter_with_sub_params": [rule]}), simple(2))
    assert "'up.wieght'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert_converts(made, tmp_path, "--no_strict")


@pytest.mark.parametrize("key", LISTS)
def test_p16_two_patterns_that_match_one_name_are_refused_by_name(tmp_path, capsys, key):
    params = [Param("w", random_full((4, 2), 1)), Param("w.extra", random_full((4,), 2))]
    info = {"tp_replicated_parameter_patterns": [], "original_vocab_size": 4, key: ["w", "w.*"]}
    said = assert_refuses(make(World(tp=2, info=info), params).save(tmp_path / "a"), tmp_path, capsys)
    for part in ("'w'", "'w.*'", "w.extra"):
        assert part in said


@pytest.mark.parametrize("stage", STAGES)
def test_p16_an_exact_key_wins_over_patterns(tmp_path, stage):
    """Of its own list and of any other; DeepSpeed stops at the first, and takes the wrong layout at the second."""
    names = ["w", "w.x", "w.x.y", "w.z"]
    cuts = [COLUMN, REPLICATED, ROW, Cut("average")]
    params = [Param(n, random_full((4, 4), i), cut) for i, (n, cut) in enumerate(zip(names, cuts, strict=True))]
    info = {
        "tp_replicated_parameter_patterns": ["w[.]x", exact("w.x"), "w[.].*"],
        "parameter_with_row_parallelism_patterns": ["w[.]x[.]", exact("w.x.y")],
        "parameter_to_average_patterns": [exact("w.z")],
    }
    assert_converts(make(World(stage=stage, tp=2, info=info), params), tmp_path)


def test_p16_names_that_begin_alike_have_exact_keys(tmp_path):
    names = ["w", "w.x", "wxx", "w.x.y"]
    cuts = [ROW, REPLICATED, COLUMN, REPLICATED]
    params = [Param(n, random_full((4, 4), i), cut) for i, (n, cut) in enumerate(zip(names, cuts, strict=True))]
    assert_converts(make(World(tp=2), params), tmp_path)


def test_p16_two_lists_that_hold_the_exact_name_are_refused_by_name(tmp_path, capsys):
    info = {
        "tp_replicated_parameter_patterns": [exact("norm.weight"), exact("up.weight")],
        "parameter_with_row_parallelism_patterns": [exact("down.weight"), exact("norm.weight")],
        "parameter_to_average_patterns": [exact("up.weight")],
    }
    params = [Param(p.name, p.full, ROW if p.name == "down.weight" else REPLICATED) for p in simple(2)]
    made = make(World(tp=2, info=info), params)
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    for part in ("'norm.weight'", "'up.weight'", "parameter_with_row_parallelism_patterns", "--no_strict"):
        assert part in said
    # DeepSpeed's order decides where the user insists.
    assert_converts(made, tmp_path, "--no_strict")


@pytest.mark.parametrize("numel", [1, 15, 32, 33])
@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("prefix", ["", "bf16_"])
@pytest.mark.parametrize("align", [1, 2, 16])
def test_p18_padding_on_the_last_rank(tmp_path, numel, strip, prefix, align):
    """More padding than its partition has elements, recorded as all of the group's, as BF16_Optimizer still does."""
    world = World(dp=12, prefix=prefix, strip_padding=strip, whole_padding_on_last=True, align=align)
    params = [Param("w", random_full((numel,), 1)), Param("v", random_full((3, 2), 2), group=1)]
    assert_converts(make(world, params), tmp_path)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("numel", [1, 15, 32])
def test_p18_padding_of_several_ranks(tmp_path, stage, numel):
    assert_converts(make(World(stage=stage, dp=12, align=2), [Param("w", random_full((numel,), 1))]), tmp_path)


# A wrong result and no error.


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p20_frozen_parameters_and_buffers_are_written(tmp_path, stage, tp, dtype):
    params = [
        *two_groups(tp),
        Param("frozen.weight", random_full((4 * tp, 3), 7), COLUMN, kind="frozen"),
        Param("bn.running_mean", random_full((3,), 8), kind="buffer"),
        Param("bn.num_batches_tracked", torch.tensor(123), kind="buffer"),
        Param("mask", torch.tensor([True, False]), kind="buffer"),
    ]
    made = make(World(stage=stage, tp=tp, dp=2, module_dtype=dtype), params)
    target = assert_converts(made, tmp_path)
    if stage < 3:
        assert files_of(target, "frozen.weight") == {"fp32"}
        assert scalar(target, "frozen.weight", "fp32").keys() == {"param"}
    for mp in range(tp):
        for dp in range(2 if stage == 3 else 1):
            # Where DeepSpeed's loader may look for them again.
            name = made.model_name(mp, dp)
            assert (target / name).read_bytes() == (tmp_path / "ckpt" / name).read_bytes()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("shape", [(4, 3), (1, 5), (3, 1, 2)])
def test_p20_buffers_saved_expanded_are_written_whole(tmp_path, tp, shape):
    full = random_full((1, *shape[1:]), 8).expand(shape)
    params = [*simple(tp), Param("mask", full, kind="buffer"), Param("same", torch.ones(1).expand(7), kind="frozen")]
    made = make(World(tp=tp, dp=2), params)
    for mp in range(tp):
        # Not a copy: torch.save keeps that one stored element stands for several.
        made.model(mp)["module"].update(mask=full, same=torch.ones(1).expand(7))
    assert_converts(made, tmp_path)


def test_p20_a_frozen_replica_that_drifted_is_refused_by_name(tmp_path, capsys):
    made = make(World(tp=2), [*simple(2), Param("frozen", random_full((5,), 1), kind="frozen")])
    made.model(1)["module"]["frozen"][3] += 1
    assert "'frozen'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


@pytest.mark.parametrize("inner", ["backup", "global_step5", "universal", "backup/deeper", "zero"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_p23_an_older_copy_inside_the_folder_does_not_count(tmp_path, inner, stage, ranks):
    made = make(World(stage=stage, dp=2), simple())
    older = make(World(stage=stage, dp=ranks), [Param(p.name, p.full + 1) for p in simple()])
    older.save(tmp_path / "ckpt" / inner)
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_p25_output_inside_the_input_twice(tmp_path, stage):
    made = make(World(stage=stage, dp=2), simple())
    folder = made.save(tmp_path / "ckpt")
    for name in ("universal", "universal2", "deeper/universal", "universal"):
        target = os.path.join(folder, name)
        assert convert(folder, target) == 0
        assert wrong(made, target, flat=stage == 3) == []
    assert convert(folder, folder) == 2
    assert set(made.files) <= listing(folder)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dp", [12, 101])
def test_p26_ranks_in_numeric_order(tmp_path, stage, dp):
    params = [Param("early", random_full((4 * dp,), 1)), Param("w", random_full((11, dp), 2))]
    assert_converts(make(World(stage=stage, dp=dp), params), tmp_path)


@pytest.mark.parametrize("dp", [4, 8, 16])
def test_p27_zero3_of_several_nodes(tmp_path, dp):
    """A file's place follows from its global rank in the name, whatever node it was written on."""
    params = [Param("w", random_full((11, 3), 1)), Param("v", random_full((dp - 1,), 2), group=1)]
    assert_converts(make(World(stage=3, dp=dp), params), tmp_path)


EXPERTS = {
    "uniform": ((0, 1), (2, 3)),
    "out of order": ((3, 0), (1, 2)),
    "one rank has more": ((0, 1, 3), (2,)),
    "one expert twice": ((0, 1), (1, 2, 3)),
    "four ranks": ((0,), (1,), (2,), (3,)),
}


@pytest.mark.parametrize("placement", EXPERTS)
@pytest.mark.parametrize(("stage", "data_first"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("edp", [1, 2])
def test_p29_experts_keep_weights_and_moments(tmp_path, placement, stage, data_first, edp):
    placed = EXPERTS[placement]
    weights = {w: random_full((4, 2, 3), 40 + i) for i, w in enumerate(("w1", "w2", "w3"))}
    layer = ExpertLayer("mlp.experts", weights, placed, descriptor=placement != "uniform")
    world = World(stage=stage, dp=edp * len(placed), data_before_expert=data_first)
    made = make(world, [Param("gate", random_full((3, 2), 1))], [layer])
    target = assert_converts(made, tmp_path)
    moments = {made.truth["mlp.experts.w1", state].numpy().tobytes() for state in ("fp32", "exp_avg", "exp_avg_sq")}
    assert len(moments) == 3
    assert files_of(target, "mlp.experts.w1") == {"fp32", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_p30_weights_and_moments_are_kept_apart(tmp_path, tp, stage):
    params = [Param(p.name, p.full, p.cut) for p in simple(tp)]
    made = make(World(stage=stage, tp=tp, dp=2), params)
    target = assert_converts(made, tmp_path)
    for param in params:
        found = {stored(target, param.name, state).numpy().tobytes() for state in ("fp32", "exp_avg", "exp_avg_sq")}
        assert len(found) == 3


STEPS = [5, 5.0, torch.tensor(5.0), torch.tensor(5), torch.tensor(5, dtype=torch.int32), torch.tensor(0.0)]


@pytest.mark.parametrize("step", STEPS, ids=repr)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tp", [1, 2])
def test_p32_the_step_is_kept_as_it_was_saved(tmp_path, step, stage, tp):
    target = assert_converts(make(World(stage=stage, tp=tp, dp=2, step=step), simple(tp)), tmp_path)
    if stage == 3:
        # DeepSpeed's ZeRO-3 loader takes it from the shared state.
        shared = torch.load(target / "zero" / "optimizer_state.pt", weights_only=False)
        found = shared["optimizer_state_dict"]["state"][0]["step"]
    else:
        found = scalar(target, "up.weight", "step")
    assert type(found) is type(step)
    assert found == step
    assert getattr(found, "dtype", None) == getattr(step, "dtype", None)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("other", [8, torch.tensor(8.0), 7, float("nan")], ids=repr)
def test_p33_steps_that_disagree_are_refused_by_name(tmp_path, capsys, stage, other):
    made = make(World(stage=stage, dp=2), simple())
    optimizer_state(made, 1)["state"][0]["step"] = other
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    for part in ("'step'", "'up.weight'", "dp 1", made.optim_name(1)):
        assert part in said
    assert_converts(made, tmp_path, "--on-drift", "first")


def test_p33_steps_that_disagree_between_tensor_parallel_ranks(tmp_path, capsys):
    made = make(World(tp=2, dp=1), two_groups(2))
    optimizer_state(made, 0, 1)["state"][1]["step"] = torch.tensor(6.0)
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "'bias'" in said
    assert "tp 1" in said


@pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("stage", STAGES)
def test_p35_a_mean_of_ranks_that_differ_is_refused_by_name(tmp_path, capsys, state, stage):
    """A mean cannot be undone; DeepSpeed writes it for the weights and for both moments."""
    made = make(World(stage=stage, tp=2), [Param("w", torch.ones(3), Cut("average")), *simple(2)])
    flip(made, 1, state=state, element=1)
    folder = made.save(tmp_path / "ckpt")
    said = assert_refuses(folder, tmp_path, capsys)
    for part in ("'w'", f"'{state}'", "--on-drift"):
        assert part in said
    assert convert(folder, tmp_path / "out", "--on-drift", "first") == 0
    assert wrong(made, tmp_path / "out") == []


def test_p35_a_mean_is_written_on_demand_and_reported(tmp_path, capsys):
    made = make(World(tp=2), [Param("w", torch.ones(3), Cut("average"))])
    made.optim(0, 1)["single_partition_of_fp32_groups"][0][:] = 3.0
    folder = made.save(tmp_path / "ckpt")
    assert convert(folder, tmp_path / "out", "--on-drift", "average") == 0
    assert stored(tmp_path / "out", "w", "fp32").tolist() == [2.0, 2.0, 2.0]
    assert "averaged: w" in capsys.readouterr().out


@pytest.mark.parametrize("tp", [2, 4])
def test_p35_a_scaled_bias_refuses_resets_or_applies_powers(tmp_path, capsys, tp):
    bias = random_full((6,), 3)
    made = mapped("o_proj.bias", bias, lambda full, n: [full.clone()] * n, tp, scale=1 / tp)
    moments = made.truth["o_proj.bias", "exp_avg"], made.truth["o_proj.bias", "exp_avg_sq"]
    for rank in range(tp):
        made.optim(0, rank)["single_partition_of_fp32_groups"][0] /= tp
        state = optimizer_state(made, 0, rank)["state"][0]
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


# Layouts and names.

ODD_FOLDERS = [
    "o+x(1)",
    "[abc]",
    "with space",
    "ünïcode-β",
    "a.b.c",
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0",
    "*?",
    "$HOME",
    "-dash",
    "tail ",
    "100%",
    "back\\slash",
    "q'uo\"te",
    "line\nbreak",
    "{0}",
    "~home",
    "a|b^c$",
]


@pytest.mark.parametrize("name", ODD_FOLDERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_p36_odd_folder_names_on_both_sides(tmp_path, name, stage):
    made = make(World(stage=stage, dp=2), simple())
    source, target = tmp_path / name / "in", tmp_path / "deep" / name
    made.save(source)
    assert convert(source, target) == 0
    assert wrong(made, target, flat=stage == 3) == []
    assert (tmp_path / "deep" / "latest_universal").read_text() == name


SPELLINGS = ["out/", "out//", "./out", "./out/", "deep/er/out", "deep/../out", "in/../out/"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("absolute", [False, True])
def test_p38_a_slash_at_the_end_of_the_output(tmp_path, monkeypatch, spelling, absolute):
    monkeypatch.chdir(tmp_path)
    made = make(World(dp=2), simple())
    made.save("in")
    assert convert("in/", os.path.join(tmp_path, spelling) if absolute else spelling) == 0
    target = os.path.normpath(spelling)
    assert wrong(made, target) == []
    assert (tmp_path / os.path.dirname(target) / "latest_universal").read_text() == "out"
    assert "latest_universal" not in os.listdir(target)
    assert not [name for name in listing(tmp_path) if name.endswith(".partial")]


@pytest.mark.parametrize("source", ["in", "../in", "in/../in"])
def test_p39_relative_paths(tmp_path, monkeypatch, source):
    made = make(World(dp=2), simple())
    made.save(tmp_path / "in")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd" if source.startswith("..") else tmp_path)
    assert convert(source, "relout") == 0
    assert wrong(made, "relout") == []
    assert (tmp_path / os.getcwd() / "latest_universal").read_text() == "relout"


@pytest.mark.parametrize(("count", "rows", "fits"), [(3, (3, 3), True), (3, (4, 2), False), (2, (4, 4), True)])
@pytest.mark.parametrize("version", [0.1, 0.2, 0.3])
def test_p41_a_legacy_count_of_sub_parameters(tmp_path, capsys, count, rows, fits, version):
    """The count says nothing of uneven shards, so those are refused; an even cut has one answer."""
    full = random_full((sum(rows), 4), 1)
    info = {
        "parameter_with_sub_params": [{"patterns": [exact("w")], "shape": (count, -1), "partition_dim": 0}],
        "sub_param_shard_widths": None,
    }
    made = make(World(tp=2, version=version, info=info), [Param("w", full, Cut("legacy", rows))])
    folder = made.save(tmp_path / "ckpt")
    if not fits:
        assert "w" in assert_refuses(folder, tmp_path, capsys)
        return
    assert convert(folder, tmp_path / "out") == 0
    halves = [full[: rows[0]], full[rows[0] :]]
    each = rows[0] // count
    expected = torch.cat([torch.cat([half[n * each : (n + 1) * each] for half in halves]) for n in range(count)])
    assert same(stored(tmp_path / "out", "w", "fp32").reshape(full.shape), expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kept", [701, 799, 1])
def test_p43_truncated_vocabulary_leaves_no_padding_in_the_file(tmp_path, tp, kept):
    made = make(World(tp=tp), [Param("emb", random_full((800, 50), 1), Cut("vocab", original_rows=kept))])
    target = assert_converts(made, tmp_path)
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        assert stored(target, "emb", state).untyped_storage().nbytes() == kept * 50 * 4
        assert (target / "zero" / "emb" / f"{state}.pt").stat().st_size < kept * 50 * 4 + 2000


@pytest.mark.parametrize("stage", STAGES)
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
@pytest.mark.parametrize("stage", STAGES)
def test_p46_tied_weights(tmp_path, tp, stage):
    """Under ZeRO 1 and 2 under both names, under ZeRO 3 under the one the optimizer knows, as DeepSpeed writes them."""
    full = random_full((4, 3), 1)
    alias = Param("head.weight", full, COLUMN, kind="alias", alias_of="emb.weight")
    made = make(World(stage=stage, tp=tp, dp=2), [Param("emb.weight", full, COLUMN), alias])
    if tp > 1 and stage < 3:
        # As DeepSpeed: the alias is the first rank's shard, and is never read back.
        made.truth["head.weight", "fp32"] = full[:2]
    target = assert_converts(made, tmp_path)
    assert (target / "zero" / "head.weight").exists() == (stage < 3)
    assert not (target / "zero" / "head.weight" / "exp_avg.pt").exists()


def tied_stages(listed):
    params = [
        Param("word.emb", random_full((4, 3), 1), COLUMN, stages=(0, 1)),
        Param("a", random_full((3, 4), 2), ROW, stages=(0,)),
        Param("b", random_full((5,), 3), stages=(1,)),
    ]
    info = {"pipeline_replicated_parameter_patterns": [exact("word.emb")]} if listed else {}
    return make(World(tp=2, pp=2, dp=2, info=info, layer_files=True), params)


@pytest.mark.parametrize("listed", [True, False])
def test_p47_tied_across_pipeline_stages(tmp_path, capsys, listed):
    made = tied_stages(listed)
    assert_converts(made, tmp_path)
    flip(made, 3, element=2)
    folder = made.save(tmp_path / "drifted" / "ckpt")
    said = assert_refuses(folder, tmp_path / "drifted", capsys)
    assert "'word.emb'" in said
    assert "pp 1, tp 1" in said


# Optimizers.

OPTIMIZERS = {
    "sgd": ((), None),
    "momentum": (("momentum_buffer",), None),
    "adagrad": (("sum",), torch.tensor(3.0)),
    "lion": (("exp_avg",), None),
    "rmsprop": (("square_avg",), torch.tensor(3.0)),
    "rmsprop centered with momentum": (("square_avg", "momentum_buffer", "grad_avg"), torch.tensor(3.0)),
    "amsgrad": (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), torch.tensor(3.0)),
    "adadelta": (("acc_delta", "square_avg"), 3),
    "adamax": (("exp_avg", "exp_inf"), torch.tensor(3.0)),
    "asgd": (("ax",), torch.tensor(3.0)),
    "rprop": (("prev", "step_size"), torch.tensor(3.0)),
    "one of its own": (("state/of mine", "ß"), 3),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_p49_every_optimizer(tmp_path, stage, tp, optimizer):
    states, step = OPTIMIZERS[optimizer]
    made = make(World(stage=stage, tp=tp, dp=2, states=states, step=step), two_groups(tp))
    target = assert_converts(made, tmp_path)
    written = {"fp32", *states} | ({"step"} if step is not None and stage < 3 else set())
    found = {
        path[len("up.weight/") : -3] for path in listing(target / "zero") if path.endswith(".pt") and "up." in path
    }
    assert found == written


@pytest.mark.parametrize("stage", STAGES)
def test_p49_groups_of_one_run_with_different_optimizers(tmp_path, stage):
    params = two_groups()
    for param in params[:3]:
        param.states = {"momentum_buffer": random_full(param.full.shape, 9)}
    target = assert_converts(make(World(stage=stage, dp=2), params), tmp_path)
    assert "exp_avg" not in files_of(target, "up.weight")
    assert "momentum_buffer" not in files_of(target, "bias")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("tp", [1, 2])
def test_p49_muon_keeps_its_momentum_whole_per_parameter(tmp_path, stage, dp, tp):
    params = [Param(f"w{n}", random_full((6 * tp, n + 2), n), COLUMN) for n in range(4)]
    world = World(stage=stage, dp=dp, tp=tp, align=4, states=("momentum_buffer",), whole_states=("momentum_buffer",))
    assert_converts(make(world, params), tmp_path)


def test_p49_muon_copies_that_differ_are_refused_by_name(tmp_path, capsys):
    params = [Param("a", random_full((6, 5), 1)), Param("b", random_full((7, 5), 2))]
    made = make(World(dp=2, states=("momentum_buffer",), whole_states=("momentum_buffer",)), params)
    assert [dp for dp in range(2) if "b" in made.optim(dp)["param_slice_mappings"][0]] == [0, 1]
    optimizer_state(made, 1)["state"][0]["momentum_buffer"][0] += 1
    said = assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)
    assert "'b'" in said
    assert "'momentum_buffer'" in said


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tp", [1, 2])
def test_p49_adafactor_keeps_its_statistics_and_not_each_partitions_norm(tmp_path, capsys, stage, tp):
    """On a flat partition it does not factor, so every state is one of elements, but for the norm of the partition."""
    made = make(World(stage=stage, tp=tp, dp=2, states=("exp_avg_sq",), step=3), two_groups(tp))
    for mp in range(tp):
        for dp in range(2):
            for group in range(2):
                optimizer_state(made, dp, mp)["state"][group]["RMS"] = torch.tensor(0.1 * (1 + dp + mp))
    target = assert_converts(made, tmp_path)
    assert "RMS" in capsys.readouterr().out
    for param in ("up.weight", "bias"):
        assert set(os.listdir(target / "zero" / param)) <= {"fp32.pt", "exp_avg_sq.pt", "step.pt"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [torch.zeros(3, 3), torch.zeros(5), [1.0], {"row": torch.zeros(2)}, Foreign(a=1)])
def test_p49_states_that_cannot_be_mapped_are_refused_by_name(tmp_path, capsys, stage, value):
    """Adafactor's row and column statistics, Shampoo's preconditioners."""
    made = make(World(stage=stage, dp=2), simple())
    for dp in range(2):
        optimizer_state(made, dp)["state"][0]["exp_avg_sq_row"] = value
    assert "'exp_avg_sq_row'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("step", [None, 0, torch.tensor(0.0)])
def test_p51_saved_before_the_first_step(tmp_path, stage, tp, step):
    made = make(World(stage=stage, tp=tp, dp=2, states=(), step=step), two_groups(tp))
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_p51_only_some_groups_have_states(tmp_path, stage):
    params = two_groups()
    params[3].states = {}
    assert_converts(make(World(stage=stage, dp=2, step=None), params), tmp_path)


@pytest.mark.parametrize("stage", [1, 2])
def test_p56_the_output_is_as_large_as_what_it_holds(tmp_path, stage):
    """Fragments saved as views of one large storage do not drag it along, and nothing is written twice."""
    made = make(World(stage=stage, dp=4), [Param(f"p{n}", random_full((64, 64), n)) for n in range(6)])
    for dp in range(4):
        masters = made.optim(dp)["single_partition_of_fp32_groups"]
        masters[0] = torch.cat([masters[0], torch.zeros(10_000)])[:-10_000]
    target = assert_converts(made, tmp_path)
    files = [path for path in (target / name for name in listing(target)) if path.suffix == ".pt" and path.is_file()]
    size = sum(path.stat().st_size for path in files) - (target / made.model_name()).stat().st_size
    data = sum(full.numel() * 4 for full in made.truth.values())
    assert size < data + 1600 * len(files)
    assert set(os.listdir(tmp_path)) == {"ckpt", "out", "latest_universal"}


@pytest.mark.parametrize("dp", [1, 4])
def test_p57_the_shared_optimizer_state_of_zero3_is_the_first_ranks(tmp_path, dp):
    made = make(World(stage=3, dp=dp), [Param("w", random_full((10_000,), 1))])
    target = assert_converts(made, tmp_path)
    found = torch.load(target / "zero" / "optimizer_state.pt", weights_only=False)
    assert found["param_groups"] == found["optimizer_state_dict"]["param_groups"]
    assert same(found["fp32_flat_groups"][0], made.optim(0)["fp32_flat_groups"][0])


@pytest.mark.parametrize("stage", [1, 2])
def test_p57_the_shared_optimizer_state_keeps_no_shard(tmp_path, stage):
    target = assert_converts(make(World(stage=stage, dp=3), two_groups()), tmp_path)
    found = torch.load(target / "zero" / "optimizer_state.pt", weights_only=False)
    assert found["group_paddings"] == [0, 0]
    assert found["partition_count"] == [3, 3]
    assert {"base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups"}.isdisjoint(found)
    assert [group["lr"] for group in found["param_groups"]] == [0.01, 0.01]


# Fixtures worth having that nobody has reported.


@pytest.mark.parametrize("align", [4, 16])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_x1_padding_between_parameters(tmp_path, align, stage, dp):
    params = [Param(f"p{n}", random_full((n + 1, 3), n), group=n % 2) for n in range(5)]
    assert_converts(make(World(stage=stage, dp=dp, align=align), params), tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_x2_more_than_a_hundred_model_ranks_with_uneven_shards(tmp_path, stage):
    tp = 103
    sizes = tuple(1 + rank % 3 for rank in range(tp))
    params = [
        Param("w", random_full((sum(sizes), 2), 1), Cut("column", sizes)),
        Param("r", random_full((2, sum(sizes)), 2), Cut("row", sizes)),
        Param("n", random_full((3,), 3)),
    ]
    assert_converts(make(World(stage=stage, tp=tp, states=("exp_avg",)), params), tmp_path)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("dp", "sp"), [(2, 2), (4, 2), (6, 3), (12, 12)])
def test_x3_sequence_parallel_ranks_named_as_model_ranks(tmp_path, stage, dp, sp):
    """Before #8226 Ulysses' files carry the sequence rank where the model rank belongs; it cuts no weight."""
    made = make(World(stage=stage, dp=dp), two_groups())
    renamed = {}
    for name, root in made.files.items():
        for rank in range(dp):
            name = name.replace(f"zero_pp_rank_{rank}_mp_rank_00_", f"zero_pp_rank_{rank}_mp_rank_{rank % sp:02d}_")
        renamed[name] = root
    made.files = renamed
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_x3_sequence_parallelism_recorded_as_tensor_parallelism(tmp_path, stage):
    """What 0.19.8 records among the degrees; its own converter then misses a model-state file."""
    made = make(World(stage=stage, dp=4), two_groups())
    for root in made.files.values():
        if "param_shapes" in root:
            root["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 2}
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("version", [2, 99, 1.5, "2"])
def test_x4_a_map_of_a_newer_version_is_refused_by_number(tmp_path, capsys, version):
    made = mapped("qkv", random_full((6, 3), 1), lambda full, tp: list(torch.chunk(full, tp)), 2)
    for rank in range(2):
        made.model(rank)["universal_checkpoint_info"]["affine_map"]["version"] = version
    assert str(version) in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


@pytest.mark.parametrize("groups", [1, 3])
def test_x5_all_parameter_groups_are_kept_however_many(tmp_path, groups):
    """DeepSpeed's loader pairs them up and drops the rest; the file holds them all."""
    params = [Param(f"p{n}", random_full((3, 2), n), group=n) for n in range(groups)]
    target = assert_converts(make(World(stage=2, dp=2), params), tmp_path)
    found = torch.load(target / "zero" / "optimizer_state.pt", weights_only=False)
    assert [group["params"] for group in found["param_groups"]] == [[n] for n in range(groups)]


@pytest.mark.parametrize("stage", STAGES)
def test_x7_a_stage_pickled_by_name(tmp_path, stage):
    made = make(World(stage=stage, dp=2), [Param("w", random_full((3, 2), 1))])
    for rank in range(2):
        made.optim(rank)["zero_stage"] = ZeroStageByName(stage)
    assert_converts(made, tmp_path)


@pytest.mark.parametrize(
    ("stage", "dp", "count", "more"),
    [
        (1, 2, 3, {}),
        (2, 3, 7, {"states": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}),
        (2, 4, 9, {"align": 4, "dtype": torch.bfloat16}),
        (1, 3, 5, {"tp": 2}),
        (1, 3, 5, {"whole_states": ("momentum_buffer",), "states": ("momentum_buffer",)}),
        (2, 3, 3, {}),
        (2, 1, 3, {}),
        (3, 2, 3, {}),
    ],
)
def test_x8_gradients_in_turns_record_other_slices(tmp_path, stage, dp, count, more):
    """What lies where follows from the order in which the model-state file lists the parameters."""
    world = World(stage=stage, dp=dp, turns=True, **more)
    sizes = [(3, 2), (1,), (5, 4), (2, 2), (7,)]
    params = [
        Param(f"p{n}", random_full(sizes[n % len(sizes)], n), group=n % 2 if count > 5 else 0) for n in range(count)
    ]
    assert_converts(make(world, params), tmp_path)


def test_x8_slices_of_no_known_order_are_refused(tmp_path, capsys):
    made = make(World(stage=1, dp=2, turns=True), [Param(f"p{n}", random_full((n + 1,), n)) for n in range(4)])
    shapes = made.files[made.model_name()]["param_shapes"]
    shapes[0] = type(shapes[0])(reversed(shapes[0].items()))
    assert "round_robin_gradients" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_x8_an_order_that_is_not_recorded_is_refused(tmp_path, capsys):
    params = [Param(f"p{n}", random_full((n + 1,), n)) for n in range(4)]
    for ranks in (1, 2):
        made = make(World(stage=1, dp=ranks, turns=True), params)
        made.files[made.model_name()]["param_shapes"] = None
        if ranks == 1:
            assert_converts(made, tmp_path / "alone")
        else:
            assert "records no 'param_shapes'" in assert_refuses(made.save(tmp_path / "ckpt"), tmp_path, capsys)


def test_every_row_of_the_table_has_its_tests():
    """docs/user_cases.md names every test of this file and no other, and every reported row once."""
    root = Path(__file__).parents[2]
    table = (root / "docs" / "user_cases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([PX]\d+) ", table, re.MULTILINE)
    assert rows == sorted(set(rows))
    named = {"commands": set(), "real": set()}
    for line in table.splitlines():
        ordinary, _, real = line.partition("real: ")
        for kind, text in (("commands", ordinary), ("real", real)):
            named[kind] |= set(re.findall(r"`(test_[px]\d\w+)`", text))
    here = {name for name in globals() if re.match(r"test_[px]\d", name)}
    real = (root / "tests" / "real" / "test_user_cases.py").read_text(encoding="utf-8")
    assert named["commands"] == here
    assert named["real"] == set(re.findall(r"^def (test_[px]\d\w+)", real, re.MULTILINE))
    tested = {name.split("_")[1].upper() for name in here | named["real"]}
    assert tested == set(rows)
