"""``ds_affine reshard``: every element where explicit concatenation, padding and cutting put it, or a refusal."""

import itertools
import json
import os
import random
from dataclasses import replace

import pytest
import torch
from converting import convert, leftovers, wrong
from resharding import model_of, optimizer_of, reshard, value, wrong_files
from synthetic import COLUMN, FP32, REPLICATED, ROW, Cut, Param, World, make, random_full

STAGES = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2), (3, 3)]


def params_of(*, frozen=True, wide=False):
    sub = Cut("sub", sub_sizes=(8, 4, 4))
    found = [
        Param("a.weight", random_full((8, 6), 1), COLUMN),
        Param("a.bias", random_full((8,), 2), COLUMN),
        Param("b.weight", random_full((5, 8), 3), ROW),
        Param("norm", random_full((7,), 4), group=1),
        Param("scale", random_full((), 5), group=1),
        Param("c.weight", random_full((16, 3), 6), sub),
    ]
    if frozen:
        found.append(Param("frozen", random_full((4, 3), 7), COLUMN, kind="frozen"))
    if wide:
        found.append(Param("wide", random_full((64, 50), 8), COLUMN))
    return found


def saved(tmp_path, world, params, name="in"):
    made = make(world, params)
    return made, made.save(tmp_path / name)


def shards_at(world, params):
    return make(world, params).shards


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("stage", "to"), STAGES)
def test_every_degree_and_stage(tmp_path, stage, to, tp):
    params = params_of()
    world = World(stage=stage, tp=tp, dp=3)
    _, source = saved(tmp_path, world, params)
    for dp in (1, 2, 3, 5):
        target = tmp_path / f"out{dp}"
        assert reshard(source, target, "--dp", dp, "--zero-stage", to) == 0
        wanted = replace(world, stage=to, dp=dp)
        assert list(wrong_files(target, wanted, params, shards_at(wanted, params), 7)) == []
        assert (tmp_path / "latest").read_text() == f"out{dp}"


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.heavy) for n in range(6, 60))])
def test_any_shapes_groups_and_degrees(tmp_path, seed):
    rng = random.Random(seed)
    tp = rng.choice([1, 1, 2, 4])
    stage, to = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    pp = rng.choice([1, 2]) if stage == to == 1 else 1
    world = World(
        stage=stage, tp=tp, pp=pp, dp=rng.randint(1, 5), align=1 if stage == 3 else 2, strip_padding=rng.random() < 0.8,
        states=tuple(rng.sample(["exp_avg", "exp_avg_sq", "other"], rng.randint(0, 3))),
        # What ZeRO-3 leaves of a parameter in these files has no dtype of its own.
        module_dtype=torch.float32 if stage == 3 else rng.choice([torch.float32, torch.bfloat16]),
    )  # fmt: skip
    params = []
    for number in range(rng.randint(1, 9)):
        cut = rng.choice([REPLICATED, COLUMN, ROW])
        shape = [rng.randint(1, 6) for _ in range(rng.randint(2, 3))]
        if cut is COLUMN:
            shape[0] *= tp
        elif cut is ROW:
            shape[1] *= tp
        stages = (rng.randrange(pp),)
        params.append(Param(f"p{number}", random_full(shape, seed + number), cut, rng.randint(0, 1), stages))
    for pp_rank in range(pp):
        params += [Param(f"g{g}.{pp_rank}", random_full((3,), 9 + g), group=g, stages=(pp_rank,)) for g in range(2)]
    _, source = saved(tmp_path, world, params)
    wanted = replace(world, stage=to, dp=rng.randint(1, 6))
    assert reshard(source, tmp_path / "out", "--dp", wanted.dp, "--zero-stage", to) == 0
    assert list(wrong_files(tmp_path / "out", wanted, params, shards_at(wanted, params), 7)) == []
    # And back, to the same numbers as the converter finds in the original.
    back = tmp_path / "back"
    assert reshard(tmp_path / "out", back, "--dp", world.dp, "--zero-stage", stage) == 0
    assert convert(back, tmp_path / "universal", "--identical-shards", "split") == 0
    made = make(world, params)
    assert wrong(made, tmp_path / "universal", flat=stage == 3 and tp == 1) == []


def step_zero(world, params):
    """A checkpoint that the target's engine saved before its first step, with other weights."""
    others = [replace(p, full=torch.zeros_like(p.full)) for p in params]
    made = make(replace(world, states=(), step=None), others)
    for name, root in made.files.items():
        if "optim_states" in name:
            optimizer = root["optimizer_state_dict"]
            optimizer["optimizer_state_dict" if world.stage == 3 else "base_optimizer_state"]["state"] = {}
    return made


@pytest.mark.parametrize("how", ["like", "layout"])
@pytest.mark.parametrize(("stage", "tp", "to", "wanted_tp"), [(1, 2, 1, 4), (1, 4, 3, 1), (3, 1, 2, 2), (3, 2, 3, 4)])
def test_another_tensor_parallel_degree(tmp_path, stage, tp, to, wanted_tp, how):
    params = params_of()
    _, source = saved(tmp_path, World(stage=stage, tp=tp, dp=2), params)
    wanted = World(stage=to, tp=wanted_tp, dp=3)
    like = step_zero(wanted, params).save(tmp_path / "like")
    given = ["--like", like]
    if how == "layout":
        from deepspeed_affine.cli import ds_affine

        assert ds_affine(["layout", like, "-o", str(tmp_path / "layout.json")]) == 0
        given = ["--layout", tmp_path / "layout.json"]
    assert reshard(source, tmp_path / "out", *given) == 0
    assert list(wrong_files(tmp_path / "out", wanted, params, shards_at(wanted, params), 7)) == []
    # The maps of the target's own run are recorded, so that the result can be converted.
    assert convert(tmp_path / "out", tmp_path / "universal") == 0
    assert wrong(make(wanted, params), tmp_path / "universal", flat=to == 3 and wanted_tp == 1) == []


def test_another_number_of_pipeline_stages_and_another_order(tmp_path):
    params = [replace(p, stages=(n % 2,)) for n, p in enumerate(params_of(frozen=False)) if p.group == 0]
    _, source = saved(tmp_path, World(stage=1, tp=2, pp=2, dp=2), params)
    wanted = World(stage=1, tp=2, pp=1, dp=3)
    others = [replace(p, stages=(0,)) for p in reversed(params)]
    like = step_zero(wanted, others).save(tmp_path / "like")
    assert reshard(source, tmp_path / "out", "--like", like) == 0
    shards = dict(shards_at(replace(wanted, pp=2), params).items())
    assert list(wrong_files(tmp_path / "out", wanted, others, shards, 7)) == []


def test_vocabulary_padding_of_the_source_is_not_read_and_that_of_the_target_is_zero(tmp_path):
    rows = random_full((13, 4), 1)

    def param(height):
        full = torch.full((height, 4), float("nan"))
        full[:13] = rows
        return Param("embed", full, Cut("vocab", original_rows=13), states={"exp_avg": full.clone()})

    other = Param("w", random_full((4, 2), 2), COLUMN, states={"exp_avg": random_full((4, 2), 3)})
    _, source = saved(tmp_path, World(tp=2, dp=2), [param(14), other])
    wanted = World(tp=4, dp=2)
    like = step_zero(wanted, [replace(param(16), states={}), replace(other, states={})]).save(tmp_path / "like")
    assert reshard(source, tmp_path / "out", "--like", like) == 0
    padded = [replace(p, full=p.full.nan_to_num(0), states={"exp_avg": p.states["exp_avg"].nan_to_num(0)})
              for p in (param(16), other)]  # fmt: skip
    assert list(wrong_files(tmp_path / "out", wanted, padded, shards_at(wanted, padded), 7)) == []
    # Cut the same way, the rows are carried over as they are.
    assert reshard(source, tmp_path / "same", "--dp", 1) == 0
    held = value(model_of(tmp_path / "same", 1)["module"]["embed"])
    assert held.shape == (7, 4)
    assert held[6:].isnan().all()


def test_what_stands_beside_the_tensors_comes_along(tmp_path):
    made = make(World(dp=2), params_of())
    for mp in range(1):
        root = made.model(mp)
        root.update(global_steps=41, global_samples=99, skipped_steps=3, lr_scheduler={"last": torch.tensor(5)})
        root["client"] = {"epoch": 4, "seen": torch.arange(6)}
    for dp in range(2):
        made.optim(dp)["base_optimizer_state"]["param_groups"][1]["lr"] = 0.25
    source = made.save(tmp_path / "in")
    assert reshard(source, tmp_path / "out", "--zero-stage", 3, "--dp", 3) == 0
    for dp in range(3):
        root = model_of(tmp_path / "out", 0, dp)
        assert (root["global_steps"], root["global_samples"], root["skipped_steps"]) == (41, 99, 3)
        assert value(root["lr_scheduler"]["last"]) == 5
        assert root["client"]["epoch"] == 4
        assert torch.equal(value(root["client"]["seen"]), torch.arange(6))
        optimizer = optimizer_of(tmp_path / "out", dp, 0)
        groups = optimizer["optimizer_state_dict"]["param_groups"]
        assert [(group["lr"], group["params"]) for group in groups] == [(0.01, [0]), (0.25, [1])]
        assert optimizer["loss_scaler"].cur_scale == 1.0


def test_sub_groups_have_steps_of_their_own(tmp_path):
    """Two flat tensors that shared one step would count every step twice."""
    params = params_of(frozen=False)
    _, source = saved(tmp_path, World(dp=2), params)
    assert reshard(source, tmp_path / "out", "--zero-stage", 3, "--sub-group-size", 20) == 0
    optimizer = optimizer_of(tmp_path / "out", 0, 0)
    states = optimizer["optimizer_state_dict"]["state"]
    assert [group["params"] for group in optimizer["optimizer_state_dict"]["param_groups"]] == [[0, 1, 2], [3]]
    assert [len(shapes) for shapes in model_of(tmp_path / "out", 0, 0)["param_shapes"]] == [1, 2, 1, 2]
    assert len({(state["step"].storage.key) for state in states.values()}) == 4
    assert reshard(tmp_path / "out", tmp_path / "back", "--zero-stage", 1) == 0
    assert list(wrong_files(tmp_path / "back", World(dp=2), params, shards_at(World(dp=2), params), 7)) == []


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_group_of_frozen_parameters_has_no_sub_group(tmp_path, capsys, place):
    params = params_of(frozen=False)
    made = make(World(stage=3, dp=2), params)
    for dp in range(2):
        groups = made.optim(dp)["optimizer_state_dict"]["param_groups"]
        groups.insert(place, {**groups[0], "lr": 0.5, "params": []})
    source = made.save(tmp_path / "in")
    assert reshard(source, tmp_path / "out", "--dp", 3) == 0
    wanted = World(stage=3, dp=3)
    numbered = [[0], [1]]
    numbered.insert(place, [])
    for dp in range(3):
        inner = optimizer_of(tmp_path / "out", dp, 0)["optimizer_state_dict"]
        assert [group["params"] for group in inner["param_groups"]] == numbered
        assert inner["param_groups"][place]["lr"] == 0.5
        # Apart from it everything is as if it were not there.
        del inner["param_groups"][place]
    assert reshard(tmp_path / "out", tmp_path / "back", "--dp", 2) == 0
    assert len(model_of(tmp_path / "out", 0, 0)["param_shapes"]) == 2
    lone = [*wrong_files(tmp_path / "out", wanted, params, shards_at(wanted, params), 7)]
    assert [line for line in lone if "param_groups" not in line] == []
    assert f"parameter group {place} has no parameter" in refused(capsys, tmp_path, source, "--zero-stage", 1)


def test_pipeline_stages_keep_the_hyperparameters_they_have(tmp_path, capsys):
    params = [replace(p, stages=(n % 2,)) for n, p in enumerate(params_of(frozen=False)) if p.group == 0]
    made = make(World(pp=2, dp=2), params)
    for dp in range(2):
        made.optim(dp, 1)["base_optimizer_state"]["param_groups"][0]["lr"] = 0.25
    source = made.save(tmp_path / "in")
    assert reshard(source, tmp_path / "out", "--dp", 3) == 0
    for dp, mp in itertools.product(range(3), range(2)):
        (group,) = optimizer_of(tmp_path / "out", dp, mp)["base_optimizer_state"]["param_groups"]
        assert group["lr"] == (0.25 if mp else 0.01)
    others = [replace(p, stages=(0,)) for p in params]
    like = step_zero(World(dp=1), others).save(tmp_path / "like")
    assert "has another 'lr' than" in refused(capsys, tmp_path, source, "--like", like)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_save_without_its_frozen_parameters_does_not_say_that_there_are_none(tmp_path, stage):
    """DeepSpeed looks up every frozen parameter of the engine where an entry is there, and none where it is None."""
    _, source = saved(tmp_path, World(stage=stage, dp=2), params_of(frozen=False))
    for to in (2, 3):
        assert reshard(source, tmp_path / f"out{to}", "--dp", 1, "--zero-stage", to) == 0
        root = model_of(tmp_path / f"out{to}", 0, 0 if to == 3 else None)
        assert (root["frozen_param_shapes"], root["frozen_param_fragments"]) == (None, None)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_frozen_after_the_optimizer_had_it_stays_among_the_frozen(tmp_path, stage):
    """It is stepped no more and lies in the optimizer's partitions still, and DeepSpeed looks it up where it is not."""
    params = params_of(frozen=False)
    made = make(World(stage=stage, dp=2), params)
    full = params[0].full
    for dp in range(2 if stage == 3 else 1):
        model = made.model(0, dp)
        model["frozen_param_shapes"] = {"a.weight": full.shape}
        held = full if stage == 2 else full.flatten().chunk(2)[dp]
        model["frozen_param_fragments"] = {"a.weight": held.to(model["module"]["a.weight"].dtype)}
    source = made.save(tmp_path / "in")
    for to in (2, 3):
        assert reshard(source, tmp_path / f"out{to}", "--dp", 3, "--zero-stage", to) == 0
        roots = [model_of(tmp_path / f"out{to}", 0, dp if to == 3 else None) for dp in range(3 if to == 3 else 1)]
        parts = [value(root["frozen_param_fragments"]["a.weight"]) for root in roots]
        assert all(list(root["frozen_param_shapes"]) == ["a.weight"] for root in roots)
        assert all("a.weight" in root["param_shapes"][0] for root in roots)
        found = torch.cat([part.flatten() for part in parts])[: full.numel()]
        assert torch.equal(found, full.flatten().to(found.dtype))


def test_states_of_two_precisions_do_not_share_a_flat_tensor(tmp_path, capsys):
    made = make(World(stage=3, dp=2), params_of(frozen=False))
    for dp in range(2):
        inner = made.optim(dp)["optimizer_state_dict"]
        inner["param_groups"] = [{**inner["param_groups"][0], "params": [0, 1]}]
        inner["state"][1]["exp_avg"] = inner["state"][1]["exp_avg"].bfloat16()
    source = made.save(tmp_path / "in")
    said = refused(capsys, tmp_path, source, "--zero-stage", 1)
    assert "states 'exp_avg' of dtypes ['bfloat16', 'float32']" in said


def test_a_tied_weight_is_written_once(tmp_path):
    params = [
        *params_of(frozen=False),
        Param("head", random_full((8, 6), 1), COLUMN, kind="alias", alias_of="a.weight"),
    ]
    made = make(World(stage=3, dp=2), params)
    source = made.save(tmp_path / "in")
    assert reshard(source, tmp_path / "out", "--zero-stage", 1) == 0
    module = model_of(tmp_path / "out", 0)["module"]
    assert module["head"].storage == module["a.weight"].storage
    assert torch.equal(value(module["head"]), made.shards["a.weight", FP32, 0])
    assert model_of(tmp_path / "out", 0)["shared_params"] == {"head": "a.weight"}


def test_parameters_held_scaled(tmp_path, capsys):
    """The states follow the powers where the target holds the parameter scaled, and come back as they were."""
    full = random_full((6,), 1)
    info = {"universal_checkpoint_version": 0.5}

    def scaled(tp):
        def cut(tensor, ranks):
            return [tensor / ranks for _ in range(ranks)]

        piece = {"shape": [6], "source": [0, [1]], "dest": [0, [1]], "locations": list(range(tp)), "scale": 1 / tp}
        ranks = {rank: {"shard_shape": [6], "pieces": [piece]} for rank in range(tp)}
        row = {"logical_shape": [6], "ranks": ranks}
        document = {"version": 1, "params": {"^bias$": row}}
        return Param("bias", full, Cut("own", pieces=cut)), {**info, "affine_map": document}

    two, info_two = scaled(2)
    four, info_four = scaled(4)
    made = make(World(tp=2, dp=2, info=info_two), [two])
    source = made.save(tmp_path / "in")
    like = step_zero(World(tp=4, dp=1, info=info_four), [four]).save(tmp_path / "like")
    assert reshard(source, tmp_path / "no", "--like", like) == 2
    assert "--scaled-states" in capsys.readouterr().err
    assert reshard(source, tmp_path / "power", "--like", like, "--scaled-states", "power") == 0
    stored = {state: made.shards["bias", state, 0] for state in (FP32, "exp_avg", "exp_avg_sq")}
    optimizer = optimizer_of(tmp_path / "power", 0, 3)
    state = optimizer["base_optimizer_state"]["state"][0]
    assert torch.equal(value(optimizer["single_partition_of_fp32_groups"][0])[:6], stored[FP32] / 2)
    assert torch.equal(value(state["exp_avg"])[:6], stored["exp_avg"] * 2)
    assert torch.equal(value(state["exp_avg_sq"])[:6], stored["exp_avg_sq"] * 4)
    assert reshard(source, tmp_path / "reset", "--like", like, "--scaled-states", "reset") == 0
    state = optimizer_of(tmp_path / "reset", 0, 0)["base_optimizer_state"]["state"][0]
    assert not value(state["exp_avg"]).any()
    # Cut the same way nothing is scaled, and nothing need be chosen.
    assert reshard(source, tmp_path / "same", "--dp", 1) == 0
    optimizer = optimizer_of(tmp_path / "same", 0, 1)
    assert torch.equal(value(optimizer["single_partition_of_fp32_groups"][0]), stored[FP32])
    assert torch.equal(value(optimizer["base_optimizer_state"]["state"][0]["exp_avg"]), stored["exp_avg"])


# ---------------------------------------------------------------- what is refused


def refused(capsys, tmp_path, source, *options):
    before = sorted(os.listdir(tmp_path))
    capsys.readouterr()
    assert reshard(source, tmp_path / "refused", *options) == 2
    said = capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == before
    assert "internal error" not in said
    assert "Traceback" not in said
    assert all(line.startswith("ds_affine: error: ") for line in said.strip().splitlines())
    return said


def test_options_that_say_nothing_or_contradict(tmp_path, capsys):
    _, source = saved(tmp_path, World(dp=2), params_of())
    assert "--dp, --zero-stage or both" in refused(capsys, tmp_path, source)
    assert "only ZeRO-3 has sub-groups" in refused(capsys, tmp_path, source, "--dp", 3, "--sub-group-size", 5)
    assert "cannot be read" in refused(capsys, tmp_path, source, "--layout", tmp_path / "absent.json")
    assert "is a folder; expected a layout" in refused(capsys, tmp_path, source, "--layout", source)
    assert "is a URL" in _refused_url(capsys, source)
    assert reshard(source, tmp_path / "in" / "made", "--dp", 3) == 2
    assert "lies in the input folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        reshard(source, tmp_path / "x", "--like", "a", "--layout", "b")
    with pytest.raises(SystemExit):
        reshard(source, tmp_path / "x", "--dp", 0)


def _refused_url(capsys, source):
    assert reshard(source, "memory://out", "--dp", 3) == 2
    return capsys.readouterr().err


def test_targets_that_deepspeed_refuses(tmp_path, capsys):
    params = [replace(p, stages=(n % 2,)) for n, p in enumerate(params_of(frozen=False)) if p.group == 0]
    _, source = saved(tmp_path, World(tp=1, pp=2, dp=2), params)
    said = refused(capsys, tmp_path, source, "--zero-stage", 3)
    assert "ZeRO-3 with 2 pipeline stages" in said


def test_a_like_of_another_model_is_refused_with_every_difference(tmp_path, capsys):
    params = params_of(frozen=False)
    _, source = saved(tmp_path, World(dp=2), params)
    others = [
        replace(p, full=random_full((9, 6), 1)) if p.name == "a.weight" else p for p in params if p.name != "norm"
    ]
    others.append(Param("new", random_full((3,), 1)))
    others = [replace(p, group=0) if p.name == "scale" else p for p in others]
    like = step_zero(World(dp=1), others)
    for root in like.files.values():
        if "optimizer_state_dict" in root:
            for group in root["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
                del group["betas"]
                group["momentum"] = 0.9
    said = refused(capsys, tmp_path, source, "--like", like.save(tmp_path / "like"))
    for line in (
        "parameter 'a.weight' has shape (9, 6) in it and (8, 6) in the checkpoint",
        "parameter 'new' is in it and not in the checkpoint",
        "parameter 'norm' is in the checkpoint and not in it",
        "parameter 'scale' is in parameter group 0 in it and in 1 in the checkpoint",
        "its optimizer has 1 parameter groups, that of the checkpoint 2",
    ):
        assert line in said
    assert len(said.strip().splitlines()) == 5


def test_all_differences_are_shown_where_they_are_asked_for(tmp_path, capsys):
    params = params_of(frozen=False)
    _, source = saved(tmp_path, World(dp=2), params)
    others = [*params, *(Param(f"new{at:02}", random_full((3,), 1)) for at in range(14))]
    like = step_zero(World(dp=1), others).save(tmp_path / "like")
    few = refused(capsys, tmp_path, source, "--like", like).strip().splitlines()
    every = refused(capsys, tmp_path, source, "--like", like, "--all").strip().splitlines()
    assert few == [*every[:10], f"ds_affine: error: ... and {len(every) - 10} more (--all)"]
    assert sum("is in it and not in the checkpoint" in line for line in every) == 14


def test_a_layout_replaces_nothing_but_a_layout(tmp_path, capsys):
    from deepspeed_affine.cli import ds_affine

    _, source = saved(tmp_path, World(dp=2), params_of())
    layout = tmp_path / "layout.json"
    assert ds_affine(["layout", str(source), "-o", str(layout)]) == 0
    written = layout.read_bytes()
    layout.write_bytes(written + b" ")
    assert ds_affine(["layout", str(source), "-o", str(layout)]) == 0
    assert layout.read_bytes() == written
    latest = tmp_path / "latest"
    latest.write_text("global_step7")
    absent = tmp_path / "absent" / "layout.json"
    for path, why in ((latest, "is no layout file"), (tmp_path, "is a folder"), (absent, "folder does not exist")):
        capsys.readouterr()
        assert ds_affine(["layout", str(source), "-o", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"ds_affine: error: --output {path}: ")
        assert why in line
    assert latest.read_text() == "global_step7"


def test_a_loss_scaler_goes_with_float16_alone(tmp_path, capsys):
    params = params_of(frozen=False)
    made = make(World(dp=2, module_dtype=torch.float16), params)
    for dp in range(2):
        made.optim(dp).update(dynamic_loss_scale=True)
        made.optim(dp)["loss_scaler"].cur_scale = 4096.0
    half = made.save(tmp_path / "half")
    like = step_zero(World(dp=1, module_dtype=torch.bfloat16), params).save(tmp_path / "like")
    assert reshard(half, tmp_path / "same", "--dp", 3) == 0
    assert optimizer_of(tmp_path / "same", 0, 0)["loss_scaler"].cur_scale == 4096.0
    for stage in (1, 3):
        assert reshard(half, tmp_path / f"out{stage}", "--like", like, "--zero-stage", stage) == 0
        assert "loss scaler of float16 is left out" in capsys.readouterr().out
        found = optimizer_of(tmp_path / f"out{stage}", 0, 0)
        assert (found["loss_scaler"].cur_scale, found["dynamic_loss_scale"]) == (1.0, False)
    # Gradients of float16 that nothing scales would vanish without a word.
    assert "no loss scale is stored" in refused(capsys, tmp_path, like, "--like", half)


def test_another_optimizer_is_refused(tmp_path, capsys):
    params = params_of(frozen=False)
    _, source = saved(tmp_path, World(dp=2), params)
    like = make(World(dp=1, states=("momentum_buffer",)), params).save(tmp_path / "like")
    assert "its optimizer keeps states ['momentum_buffer', 'step']" in refused(capsys, tmp_path, source, "--like", like)
    fresh = step_zero(World(dp=1), params)
    for root in fresh.files.values():
        if "optimizer_state_dict" in root:
            for group in root["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
                del group["betas"]
                group["momentum"] = 0.9
    said = refused(capsys, tmp_path, source, "--like", fresh.save(tmp_path / "fresh"))
    assert "parameter group 0 has hyperparameters ['momentum'] in it and ['betas'] in the checkpoint" in said


def test_frozen_in_one_run_and_not_in_the_other(tmp_path, capsys):
    params = params_of()
    _, source = saved(tmp_path, World(dp=2), params)
    thawed = [replace(p, kind="optimized") for p in params]
    like = step_zero(World(dp=1), thawed).save(tmp_path / "like")
    assert "'frozen' is optimized in it and frozen in the checkpoint" in refused(
        capsys, tmp_path, source, "--like", like
    )


def test_what_is_not_written_anew(tmp_path, capsys):
    from synthetic import ExpertLayer

    layer = ExpertLayer("moe.experts", {"w1": random_full((4, 2, 3), 1)}, ((0, 1), (2, 3)))
    experts = make(World(dp=2), params_of(frozen=False)[:2], [layer]).save(tmp_path / "experts")
    assert "is of a mixture of experts" in refused(capsys, tmp_path, experts, "--dp", 4)
    made = make(World(dp=2), params_of())
    for root in made.files.values():
        root["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
    said = refused(capsys, tmp_path, made.save(tmp_path / "robin"), "--dp", 4)
    assert "round_robin_gradients" in said


def test_drifted_copies(tmp_path, capsys):
    made = make(World(tp=2, dp=2), params_of(frozen=False))
    state = made.optim(0, 1)["base_optimizer_state"]["state"][1]
    state["exp_avg"][0] += 1
    source = made.save(tmp_path / "in")
    said = refused(capsys, tmp_path, source, "--dp", 1)
    assert "'norm', state 'exp_avg'" in said
    assert reshard(source, tmp_path / "out", "--dp", 1, "--on-drift", "first") == 0
    assert "hold different bytes" in capsys.readouterr().out


def test_the_plan_and_the_result_as_json(tmp_path, capsys):
    _, source = saved(tmp_path, World(dp=2), params_of())
    assert reshard(source, tmp_path / "out", "--dp", 3, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["to"] == {"zero_stage": 1, "tp": 1, "pp": 1, "dp": 3}
    assert "bytes_written" not in plan
    assert leftovers(tmp_path / "out") == []
    assert reshard(source, tmp_path / "out", "--dp", 3, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert done["from"] == {"zero_stage": 1, "tp": 1, "pp": 1, "dp": 2}
    assert done["files"] == plan["files"] == 4
    assert done["bytes_written"] > plan["bytes_out"] > 0
    assert done["reused_files"] == 0
