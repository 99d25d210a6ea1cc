"""``load_checkpoint`` of a checkpoint as an engine saves it: what is found, what it gives, and what is refused."""

from __future__ import annotations

import shutil

import engines
import pytest
import synthetic
import torch
from resharding import reshard
from synthetic import COLUMN, REPLICATED, ROW, Cut, Param, World
from test_load_checkpoint import OPTIMIZERS, differences, held, save
from test_load_refusals import Wider, unchanged_by

import deepspeed_affine
from deepspeed_affine.errors import AffineError, CheckpointFormatError, IntegrityError, UnsupportedLayoutError
from deepspeed_affine.hooks import ordinary
from deepspeed_affine.hooks.live_values import read_tensor
from deepspeed_affine.lowering.policy import ScaledStates
from deepspeed_affine.storage.checkpoint_file import load_checkpoint_file

# ---------------------------------------------------------------- any topology, into one process

VOCABULARY = 13
WORLDS = {
    "zero1_dp3": World(dp=3, align=2),
    "zero2_tp2_dp2": World(stage=2, tp=2, dp=2, align=2),
    "zero3_dp4": World(stage=3, dp=4),
    "zero3_tp2_dp2": World(stage=3, tp=2, dp=2),
    "bf16opt_pp2_tp2_dp2": World(pp=2, tp=2, dp=2, prefix="bf16_", align=4),
}
TARGETS = {
    "zero0": (0, {}),
    "zero1": (1, {}),
    "zero2 offloaded": (2, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    "zero3 in sub-groups": (3, {"zero": {"sub_group_size": 40}}),
}


def params_of(world):
    """The small model's parameters, cut as that world cuts them."""
    rows = -(-VOCABULARY // world.tp) * world.tp
    embed = synthetic.random_full((VOCABULARY, 6), 1)
    padded = torch.cat([embed, torch.full((rows - VOCABULARY, 6), float("nan"))])
    last = (world.pp - 1,)
    return [
        Param("embed.weight", padded, Cut("vocab", original_rows=VOCABULARY), stages=tuple(range(world.pp))),
        Param("up.weight", synthetic.random_full((10, 6), 2), COLUMN),
        Param("up.bias", synthetic.random_full((10,), 3), COLUMN),
        Param("norm.weight", synthetic.random_full((10,), 4), REPLICATED, stages=last),
        Param("norm.bias", synthetic.random_full((10,), 5), REPLICATED, stages=last),
        Param("down.weight", synthetic.random_full((6, 10), 6), ROW, stages=last),
        Param("down.bias", synthetic.random_full((6,), 7), REPLICATED, stages=last),
    ]


def saved_in(world):
    """What an engine of that topology would have saved, and the tensors it was cut from."""
    return synthetic.make(world, params_of(world))


@pytest.fixture(scope="module")
def topologies(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            checkpoint, folder = saved_in(WORLDS[name]), tmp_path_factory.mktemp("saved") / "global_step7"
            checkpoint.save(folder)
            (folder.parent / "latest").write_text(folder.name)
            made[name] = checkpoint, folder
        return made[name]

    return get


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", WORLDS)
def test_an_engine_goes_on_from_any_other_topology(topologies, source, target):
    made, folder = topologies(source)
    stage, options = TARGETS[target]
    engine = engines.make_engine(stage, model=engines.Small(frozen=False), seed=2, **options)
    report = deepspeed_affine.load_checkpoint(engine, folder.parent, missing="ignore", check_replicas=True)
    assert report.path == str(folder)
    now = held(engine)
    wrong = [
        f"{name}:{state}"
        for (name, state), full in made.truth.items()
        if not torch.equal(now[f"{name}:{state}"], full.flatten())
    ]
    assert wrong == []
    assert {float(now[f"{name}:step"]) for name, _ in made.truth} == {7.0}
    assert report.bytes_read == sum(full.nbytes for full in made.truth.values())
    assert set(report.weights) == {name for name, _ in made.truth}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("source", [name for name in WORLDS if "pp2" not in name])
def test_frozen_weights_buffers_and_tied_names_come_too(tmp_path, source, stage):
    frozen = synthetic.random_full((10,), 4)
    params = [param for param in params_of(WORLDS[source]) if param.name != "norm.weight"]
    params += [
        Param("norm.weight", frozen, REPLICATED, kind="frozen"),
        Param("seen", torch.tensor([1.0, 2.0, 3.0]), kind="buffer"),
        Param("head.weight", params[0].full, params[0].cut, kind="alias", alias_of="embed.weight"),
    ]
    made = synthetic.make(WORLDS[source], params)
    for name, root in made.files.items():
        if name.endswith("_model_states.pt"):
            # ZeRO-3 partitions no buffer.
            root["module"]["seen"] = torch.tensor([1.0, 2.0, 3.0])
    made.save(tmp_path / "saved")
    engine = engines.make_engine(stage, seed=2)
    report = deepspeed_affine.load_checkpoint(engine, tmp_path / "saved")
    now = held(engine)
    assert torch.equal(now["norm.weight"].flatten(), frozen)
    assert torch.equal(now["seen"], torch.tensor([1.0, 2.0, 3.0]))
    assert report.buffers == ("seen",)
    assert all(
        torch.equal(now[f"{name}:{state}"], made.truth[name, state].flatten())
        for name in ("embed.weight", "up.weight", "down.weight")
        for state in ("fp32", "exp_avg", "exp_avg_sq")
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("source", "target"), [(1, 3), (3, 1), (0, 2)])
def test_whatever_states_an_optimizer_keeps_are_carried(tmp_path, name, source, target):
    engine = engines.make_engine(source, optimizer=OPTIMIZERS[name])
    engines.take_steps(engine, 2)
    engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    before, losses = held(engine), engines.take_steps(engine, 2, first=2)
    other = engines.make_engine(target, optimizer=OPTIMIZERS[name], seed=2)
    engines.take_steps(other, 1, first=70)
    report = deepspeed_affine.load_checkpoint(other, tmp_path)
    assert differences(held(other), before) == []
    # Without ZeRO states have no names, which the report says.
    assert report.complete, str(report)
    assert dict(report.client_state) == {"epoch": 3}
    assert engines.take_steps(other, 2, first=2) == pytest.approx(losses, rel=1e-6)


def test_groups_counters_scheduler_and_loss_scale_come_as_from_the_converted_folder(tmp_path):
    def build(seed, first):
        scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2}}
        engine = engines.make_engine(1, groups=2, seed=seed, scheduler=scheduler)
        engines.take_steps(engine, 3, first=first)
        return engine

    source = build(1, 0)
    source.optimizer.param_groups[1]["weight_decay"] = 0.25
    universal = save(source, tmp_path)
    told = []
    for folder in (universal, tmp_path / "ordinary" / "saved"):
        engine = build(2, 50)
        report = deepspeed_affine.load_checkpoint(engine, folder)
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
        ]
        told.append((
            groups, engine.global_steps, engine.global_samples, engine.skipped_steps, engine.lr_scheduler.state_dict(),
            engine.optimizer.cur_scale, report.restored, report.not_restored, report.states, report.weights,
        ))  # fmt: skip
        assert differences(held(engine), held(source)) == []
    assert told[0] == told[1]
    assert told[1][0][1]["weight_decay"] == 0.25


def test_weights_alone_need_no_states(topologies):
    made, folder = topologies("zero2_tp2_dp2")
    engine = engines.make_engine(1, model=engines.Small(frozen=False), seed=2)
    report = deepspeed_affine.load_checkpoint(engine, folder, missing="ignore", load_module_only=True)
    assert torch.equal(held(engine)["up.weight:fp32"], made.truth["up.weight", "fp32"].flatten())
    assert report.states == {}
    assert engine.global_steps == 0


@pytest.mark.parametrize("place", ["argument", "module"])
def test_a_checkpoint_that_does_not_say_how_it_is_cut_is_read_by_the_engines_info(tmp_path, place):
    world = World(stage=2, tp=2, dp=2, align=2, with_info=False)
    made = saved_in(world)
    made.save(tmp_path / "saved")
    unchanged_by(whole(), tmp_path / "saved", missing="ignore", match="'universal_checkpoint_info' is missing")
    info = saved_in(WORLDS["zero2_tp2_dp2"]).model()["universal_checkpoint_info"]
    engine = whole()
    if place == "module":
        engine.module.universal_checkpoint_info = info
    options = {"info": info} if place == "argument" else {}
    deepspeed_affine.load_checkpoint(engine, tmp_path / "saved", missing="ignore", **options)
    now = held(engine)
    assert all(torch.equal(now[f"{name}:{state}"], full.flatten()) for (name, state), full in made.truth.items())


def test_vocabulary_padding_of_one_rank_is_known_by_the_engines_info(tmp_path):
    padded = torch.cat([synthetic.random_full((VOCABULARY, 6), 1), torch.full((3, 6), float("nan"))])
    world = World(dp=2, with_info=False)
    made = synthetic.make(world, [Param("embed.weight", padded, Cut("vocab", original_rows=VOCABULARY))])
    made.save(tmp_path)
    options = {"missing": "ignore", "unexpected": "ignore"}
    unchanged_by(whole(), tmp_path, match=r"holds shape \(16, 6\)", **options)
    info = synthetic.uc_info(world, [Param("embed.weight", padded, Cut("vocab", original_rows=VOCABULARY))])
    engine = whole()
    deepspeed_affine.load_checkpoint(engine, tmp_path, info=info, **options)
    assert torch.equal(held(engine)["embed.weight:exp_avg"], made.truth["embed.weight", "exp_avg"].flatten())


# ---------------------------------------------------------------- which checkpoint


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """One folder with an ordinary checkpoint of three steps and a universal one of two."""
    root = tmp_path_factory.mktemp("both")
    engine = engines.make_engine(1)
    engines.take_steps(engine, 2)
    universal = save(engine, root / "first")
    engines.take_steps(engine, 1, first=2)
    engine.save_checkpoint(str(root / "checkpoints"), tag="global_step3")
    shutil.copytree(universal, root / "checkpoints" / "global_step2_universal")
    (root / "checkpoints" / "latest_universal").write_text("global_step2_universal")
    return root / "checkpoints"


def loaded_steps(*arguments, **options):
    engine = engines.make_engine(1, seed=2, **options)
    deepspeed_affine.load_checkpoint(engine, *arguments)
    return engine.global_steps


def test_latest_is_taken_as_deepspeed_takes_it(both, tmp_path):
    assert loaded_steps(both) == 3
    assert loaded_steps(both, checkpoint={"load_universal": True}) == 2
    assert loaded_steps(both, "global_step2_universal") == 2
    assert loaded_steps(both, "global_step3", checkpoint={"load_universal": True}) == 3
    assert loaded_steps(both / "global_step3") == 3
    (tmp_path / "latest_universal").write_text("universal")
    shutil.copytree(both / "global_step2_universal", tmp_path / "universal")
    assert loaded_steps(tmp_path) == 2


def test_it_may_lie_in_an_object_store(both):
    store = pytest.importorskip("fsspec").filesystem("memory")
    for path in (both / "latest", *(both / "global_step3").iterdir()):
        store.pipe(f"/checkpoints/{path.relative_to(both)}", path.read_bytes())
    near, far = (engines.make_engine(3, seed=2) for _ in range(2))
    deepspeed_affine.load_checkpoint(near, both)
    report = deepspeed_affine.load_checkpoint(far, "memory://checkpoints")
    assert report.path == "memory://checkpoints/global_step3"
    assert differences(held(far), held(near)) == []


def test_a_tag_that_leads_nowhere_is_not_replaced_by_another(both, tmp_path):
    shutil.copytree(both / "global_step2_universal", tmp_path / "global_step2_universal")
    (tmp_path / "latest_universal").write_text("global_step2_universal")
    (tmp_path / "latest").write_text("global_step3")
    engine = engines.make_engine(1, seed=2)
    unchanged_by(engine, tmp_path, kind=CheckpointFormatError, match="is no folder and latest names it")
    unchanged_by(engine, both, "global_step4", kind=CheckpointFormatError, match="is no folder; expected a checkpoint")


def test_a_folder_of_both_kinds_is_refused(both, tmp_path):
    shutil.copytree(both / "global_step3", tmp_path / "mixed")
    shutil.copytree(both / "global_step2_universal" / "zero", tmp_path / "mixed" / "zero")
    engine = engines.make_engine(1, seed=2)
    unchanged_by(engine, tmp_path, "mixed", kind=CheckpointFormatError, match="holds a universal checkpoint and the")


def test_what_was_resharded_is_loaded_as_what_an_engine_saved(both, tmp_path):
    assert reshard(both / "global_step3", tmp_path / "made", "--dp", 2, "--zero-stage", 3) == 0
    engines_of = [engines.make_engine(1, seed=seed) for seed in (2, 3)]
    for engine, folder in zip(engines_of, (both / "global_step3", tmp_path / "made"), strict=True):
        report = deepspeed_affine.load_checkpoint(engine, folder.parent, folder.name)
        assert report.complete, str(report)
    assert differences(*map(held, engines_of)) == []
    # Half of it is damaged, and no universal folder that lacks the rest.
    next((tmp_path / "made").glob("*rank_1_*_optim_states.pt")).unlink()
    unchanged_by(engines_of[0], tmp_path, "made", kind=CheckpointFormatError, match=r"optim_states\.pt: is missing")


def test_every_rank_of_zero3_has_the_buffers_that_it_saved(tmp_path):
    world = World(stage=3, dp=2)
    params = [*params_of(world), Param("seen", torch.ones(3), REPLICATED, kind="buffer")]
    synthetic.make(world, params).save(tmp_path)
    for rank, number in enumerate((1.0, 5.0)):
        path = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        root = torch.load(path, weights_only=False)
        root["module"]["seen"] = torch.full((3,), number)
        torch.save(root, path)
    offered = ordinary.OrdinaryOffered(str(tmp_path), ScaledStates.REFUSE)

    def seen(rank, count):
        found = read_tensor(offered.buffer("seen", offered.own_module(0, 1, rank, count)), offered.reader)
        return set(found.tolist())

    assert [seen(0, 2), seen(1, 2)] == [{1.0}, {5.0}]
    # Of a job with other ranks nobody has any.
    assert [seen(0, 1), seen(3, 4)] == [{1.0}, {1.0}]
    offered.close()


def test_a_folder_of_checkpoints_is_none_itself(both):
    engine = engines.make_engine(1, seed=2)
    unchanged_by(engine, both.parent, both.name, kind=CheckpointFormatError, match="holds checkpoints and is none")


@pytest.mark.parametrize("target", [1, 3])
def test_what_no_optimizer_steps_of_a_pipeline_is_in_the_files_of_its_layers(tmp_path, target):
    world = World(pp=2, dp=2, layer_files=True)
    made = synthetic.make(world, params_of(world))
    layer = {"scale": torch.arange(4.0), "count": torch.tensor(2**40 + 1)}
    made.files["layer_03-model_00-model_states.pt"] = layer
    made.save(tmp_path)

    def model():
        built = engines.Small(frozen=False)
        del built._buffers["seen"]
        third = torch.nn.Module()
        third.scale = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        third.register_buffer("count", torch.tensor(0))
        built.add_module("3", third)
        return built

    engine = engines.make_engine(target, model=model(), seed=2)
    report = deepspeed_affine.load_checkpoint(engine, tmp_path)
    assert (len(report.weights), tuple(report.buffers)) == (8, ("3.count",))
    found = held(engine)
    assert (found["3.scale"].tolist(), int(found["3.count"])) == ([0.0, 1.0, 2.0, 3.0], 2**40 + 1)

    # Of a layer that two ranks cut, each file has a part.
    world = World(pp=2, tp=2, layer_files=True)
    made = synthetic.make(world, params_of(world))
    made.files.update({f"layer_03-model_{rank:02d}-model_states.pt": layer for rank in range(2)})
    made.save(tmp_path / "cut")
    engine = engines.make_engine(target, model=model(), seed=2)
    error = unchanged_by(engine, tmp_path / "cut", match="2 missing")
    assert {fault.param for fault in error.faults} == {"3.scale", None}


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def spoilt(topologies, tmp_path):
    """A copy of a checkpoint that may be spoilt."""
    shutil.copytree(topologies("zero2_tp2_dp2")[1], tmp_path / "saved")
    return tmp_path / "saved"


def whole(seed=2):
    return engines.make_engine(1, model=engines.Small(frozen=False), seed=seed)


@pytest.mark.parametrize(
    "lost", ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_01_model_states.pt", "mp_rank_00_model_states.pt"]
)
def test_the_file_of_a_rank_is_missing(spoilt, lost):
    (spoilt / lost).unlink()
    error = unchanged_by(whole(), spoilt, missing="ignore", kind=CheckpointFormatError, match=lost)
    assert "is missing; expected" in error.message


def test_all_optimizer_files_are_missing(spoilt):
    for path in spoilt.glob("*_optim_states.pt"):
        path.unlink()
    unchanged_by(whole(), spoilt, missing="ignore", kind=CheckpointFormatError, match="saved under ZeRO stage 2")


@pytest.mark.parametrize("length", [0, 200, -20])
def test_a_file_cut_short(spoilt, length):
    path = spoilt / "zero_pp_rank_1_mp_rank_01_optim_states.pt"
    path.write_bytes(path.read_bytes()[:length])
    unchanged_by(whole(), path.parent, missing="ignore", kind=CheckpointFormatError, match=path.name)


def test_another_save_among_the_files(spoilt, topologies):
    made = topologies("zero2_tp2_dp2")[0].copy()
    made.optim(1, 1)["base_optimizer_state"]["state"][0]["step"] = torch.tensor(8.0)
    name = made.optim_name(1, 1)
    synthetic.save(made.files[name], spoilt / name)
    unchanged_by(whole(), spoilt, missing="ignore", kind=AffineError, match="state 'step' differs")


def test_a_rank_of_another_precision(spoilt, topologies):
    made = topologies("zero2_tp2_dp2")[0].copy()
    state = made.optim(1, 1)["base_optimizer_state"]["state"][0]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    name = made.optim_name(1, 1)
    synthetic.save(made.files[name], spoilt / name)
    unchanged_by(whole(), spoilt, missing="ignore", match="state 'exp_avg' of parameter group 0 .* has dtype bfloat16")


def test_every_file_is_parsed_once(topologies, monkeypatch):
    parsed = []

    def load(path):
        parsed.append(path)
        return load_checkpoint_file(path)

    monkeypatch.setattr(ordinary, "load_checkpoint_file", load)
    deepspeed_affine.load_checkpoint(whole(), topologies("zero3_tp2_dp2")[1], missing="ignore")
    assert len(parsed) == len(set(parsed)) == 8


def test_copies_that_differ_are_found_when_asked(spoilt, topologies):
    made = topologies("zero2_tp2_dp2")[0].copy()
    for dp in (0, 1):
        for slices in made.optim(dp, 1)["param_slice_mappings"]:
            if "norm.bias" in slices:
                made.optim(dp, 1)["single_partition_of_fp32_groups"][0][slices["norm.bias"].start] += 1
        synthetic.save(made.files[made.optim_name(dp, 1)], spoilt / made.optim_name(dp, 1))
    unchanged_by(
        whole(), spoilt, missing="ignore", check_replicas=True, kind=IntegrityError, match="'norm.bias', state 'fp32'"
    )
    engine = whole()
    deepspeed_affine.load_checkpoint(engine, spoilt, missing="ignore")
    assert torch.equal(held(engine)["norm.bias:fp32"], made.truth["norm.bias", "fp32"])


def test_a_wrong_model_is_one_error_with_every_fault(both):
    engine = engines.make_engine(1, model=Wider())
    error = unchanged_by(engine, both, kind=CheckpointFormatError, match="the engine is unchanged: 2 missing")
    assert {fault.param for fault in error.faults} >= {"extra", "up.weight", "up.bias", "norm.weight", "down.weight"}


def test_a_pipeline_without_zero_says_what_to_do(tmp_path):
    folder = tmp_path / "pipeline"
    folder.mkdir()
    for mp in (0, 1):
        root = {"module": None, "dp_world_size": 1, "mp_world_size": 2, "ds_config": {}, "param_shapes": None}
        synthetic.save(root, folder / f"mp_rank_{mp:02d}_model_states.pt")
        synthetic.save({"weight": torch.zeros(3)}, folder / f"layer_0{mp}-model_states.pt")
    unchanged_by(whole(), folder, kind=UnsupportedLayoutError, match="saved by a pipeline engine without ZeRO")


def test_pipeline_stages_with_hyperparameters_of_their_own_are_not_mixed(tmp_path):
    made = saved_in(WORLDS["bf16opt_pp2_tp2_dp2"])
    for dp, mp in ((0, 2), (0, 3), (1, 2), (1, 3)):
        made.optim(dp, mp)["base_optimizer_state"]["param_groups"][0]["lr"] = 0.25
    made.save(tmp_path / "stages")
    options = {"missing": "ignore"}
    unchanged_by(whole(), tmp_path / "stages", kind=UnsupportedLayoutError, match="has another 'lr'", **options)
    engine = whole()
    deepspeed_affine.load_checkpoint(engine, tmp_path / "stages", load_optimizer_states=False, **options)
    assert torch.equal(engine.module.up.bias, made.truth["up.bias", "fp32"])
