"""``load_checkpoint`` finds everything wrong before it writes anything, says it once, and does what its options say."""

from __future__ import annotations

import shutil
import warnings

import engines
import pytest
import torch
from test_load_checkpoint import differences, held, save
from torch import nn

import deepspeed_affine
from deepspeed_affine.errors import AffineError, CheckpointFormatError, PolicyError, UnsupportedLayoutError


class Wider(engines.Small):
    """One matrix of another shape, one parameter more, one buffer more."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(12, 6)
        self.extra = nn.Parameter(torch.ones(3))
        self.register_buffer("more", torch.zeros(2))


class Narrower(engines.Small):
    def forward(self, tokens):
        return super().forward(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10, bias=False)
        del self._buffers["seen"]


class Odd(nn.Module):
    """A parameter of one element, and one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 13)
        self.scalar = nn.Parameter(torch.tensor([1.5]))
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, tokens):
        logits = self.embed(tokens) * self.scalar + self.nothing.sum()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    engine = engines.make_engine(1)
    engines.take_steps(engine, 2)
    return save(engine, tmp_path_factory.mktemp("saved"), client_state={"epoch": 3})


def unchanged_by(engine, *arguments, match, kind=AffineError, **options):
    before, steps = held(engine), engine.global_steps
    with pytest.raises(kind, match=match) as caught:
        deepspeed_affine.load_checkpoint(engine, *arguments, **options)
    assert differences(held(engine), before) == []
    assert engine.global_steps == steps
    return caught.value


# ---------------------------------------------------------------- which folder


def test_the_folder_is_found_by_tag_by_latest_universal_and_by_itself(saved):
    for arguments in [(saved.parent, saved.name), (str(saved.parent) + "/",), (saved,)]:
        engine = engines.make_engine(1, seed=2)
        assert deepspeed_affine.load_checkpoint(engine, *arguments).path == str(saved)
        assert engine.global_steps == 2


def test_what_is_no_checkpoint_is_said_to_be_none(saved, tmp_path):
    engine = engines.make_engine(1, seed=2)
    unchanged_by(engine, tmp_path, kind=CheckpointFormatError, match="holds no checkpoint")
    unchanged_by(engine, tmp_path / "nowhere", kind=CheckpointFormatError, match="is no folder")
    unchanged_by(engine, saved.parent, "other", kind=CheckpointFormatError, match="is no folder")
    (tmp_path / "latest_universal").write_text("gone")
    unchanged_by(engine, tmp_path, kind=CheckpointFormatError, match="gone: is no folder and latest_universal names it")


# ---------------------------------------------------------------- another model


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_wrong_model_is_one_error_with_every_fault(saved, stage):
    engine = engines.make_engine(stage, model=Wider())
    error = unchanged_by(engine, saved, kind=CheckpointFormatError, match="the engine is unchanged: 2 missing")
    lines = error.message.splitlines()
    assert lines[0].startswith(str(saved))
    assert "that do not fit" in lines[0]
    assert len(lines) == 12
    assert lines[-1].startswith("... and ")
    assert len(error.faults) == 10 + int(lines[-1].split()[2])
    assert {fault.param for fault in error.faults} >= {"extra", "up.weight", "up.bias", "norm.weight", "down.weight"}
    text = "\n".join(fault.message for fault in error.faults)
    assert "buffer more: is in the model and not in the checkpoint" in text
    assert "(10, 6)" in text or "shape (60,)" in text


def test_a_zero3_folder_is_checked_by_the_shapes_recorded_beside_its_flat_files(tmp_path):
    class Turned(engines.Small):
        def __init__(self) -> None:
            super().__init__()
            self.up.weight = nn.Parameter(torch.zeros(6, 10))

    engine = engines.make_engine(3)
    engines.take_steps(engine, 1)
    universal = save(engine, tmp_path)
    error = unchanged_by(engines.make_engine(3, model=Turned()), universal, match="was saved with shape")
    assert {fault.param for fault in error.faults} == {"up.weight"}


@pytest.mark.parametrize("policy", ["raise", "warn", "ignore"])
def test_what_the_checkpoint_lacks_follows_the_policy(saved, policy):
    class More(engines.Small):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.full((3,), 5.0))

        def forward(self, tokens):
            return super().forward(tokens) + self.extra.sum() * 0.0

    engine = engines.make_engine(1, model=More(), seed=2)
    if policy == "raise":
        unchanged_by(engine, saved, match="parameter extra: is in the model and not in the checkpoint")
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = deepspeed_affine.load_checkpoint(engine, saved, missing=policy)
    assert any("parameter extra" in str(each.message) for each in said) == (policy == "warn")
    assert "parameter extra" in {row.what for row in report.not_restored}
    assert "extra" not in report.weights
    assert bool((engine.module.extra == 5.0).all())
    engines.take_steps(engine, 1)


@pytest.mark.parametrize("policy", ["raise", "warn", "ignore"])
def test_what_the_checkpoint_has_beside_the_model_follows_the_policy(saved, policy):
    engine = engines.make_engine(1, model=Narrower(), seed=2)
    if policy == "raise":
        error = unchanged_by(engine, saved, match="the engine is unchanged: 2 unexpected")
        assert {fault.param for fault in error.faults} == {"norm.bias", "seen"}
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = deepspeed_affine.load_checkpoint(engine, saved, unexpected=policy)
    assert any("parameter norm.bias" in str(each.message) for each in said) == (policy == "warn")
    assert {"parameter norm.bias", "parameter seen"} <= {row.what for row in report.not_restored}


@pytest.mark.parametrize("option", ["missing", "unexpected", "scaled_states"])
def test_an_unknown_policy_is_refused_with_the_known_ones(saved, option):
    engine = engines.make_engine(1, seed=2)
    error = unchanged_by(engine, saved, kind=PolicyError, match=f"{option} is 'maybe'", **{option: "maybe"})
    assert ("'raise', 'warn', 'ignore'" in error.message) == (option != "scaled_states")


class Untied(engines.Small):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.zeros(13, 6))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_that_was_tied_goes_on_from_what_its_partner_had(tmp_path, stage):
    engine = engines.make_engine(stage)
    engines.take_steps(engine, 2)
    universal = save(engine, tmp_path)
    other = engines.make_engine(1, model=Untied())
    report = deepspeed_affine.load_checkpoint(other, universal)
    assert torch.equal(other.module.head.weight, other.module.embed.weight)
    now, before = held(other), held(engine)
    assert torch.equal(now["embed.weight:exp_avg"], before["embed.weight:exp_avg"])
    assert torch.equal(now["head.weight:exp_avg"], before["embed.weight:exp_avg"])
    assert "head.weight from embed.weight, to which it was tied" in report.restored
    assert report.complete, str(report)
    engines.take_steps(other, 1)


def test_parameters_saved_apart_are_not_loaded_into_one(tmp_path):
    engine = engines.make_engine(1, model=Untied())
    engines.take_steps(engine, 2)
    universal = save(engine, tmp_path)
    unchanged_by(
        engines.make_engine(1), universal, match=r"head\.weight: is tied to embed\.weight in the model, and was"
    )
    other = engines.make_engine(1, seed=2)
    deepspeed_affine.load_checkpoint(other, universal, unexpected="ignore")
    assert torch.equal(other.module.embed.weight, engine.module.embed.weight)


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", ["truncated", "not a zip", "no weights"])
def test_a_damaged_file_is_found_before_anything_is_written(saved, tmp_path, damage):
    universal = tmp_path / "universal"
    shutil.copytree(saved, universal)
    path = universal / "zero" / "down.weight" / ("fp32.pt" if damage == "no weights" else "exp_avg.pt")
    if damage == "no weights":
        path.unlink()
        (universal / "mp_rank_00_model_states.pt").unlink()
    else:
        path.write_bytes(path.read_bytes()[:300] if damage == "truncated" else b"nothing" * 100)
    unchanged_by(
        engines.make_engine(1, seed=2), universal, match="model_states" if damage == "no weights" else "exp_avg"
    )


# ---------------------------------------------------------------- optimizers


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def test_another_optimizer_is_refused_state_by_state_and_loads_where_that_is_said(saved):
    engine = engines.make_engine(1, optimizer=sgd, seed=2)
    error = unchanged_by(engine, saved, match="SGD keeps no such state")
    assert "12 unexpected" in error.message
    report = deepspeed_affine.load_checkpoint(engine, saved, unexpected="ignore")
    assert dict(report.states) == {}
    assert engine.optimizer.optimizer.param_groups[0]["weight_decay"] == 0.01
    assert engine.optimizer.optimizer.param_groups[0]["momentum"] == 0.9
    assert "momentum of parameter group 0: it was not saved" in map(str, report.not_restored)
    engines.take_steps(engine, 1)


def test_a_state_the_optimizer_needs_and_the_checkpoint_lacks_is_named(saved, tmp_path):
    universal = tmp_path / "universal"
    shutil.copytree(saved, universal)
    (universal / "affine_manifest.json").unlink()
    for path in universal.glob("zero/*/exp_avg_sq.pt"):
        path.unlink()
    unchanged_by(engines.make_engine(1, seed=2), universal, match=r"optimizer state 'exp_avg_sq' of \S+: is kept by")
    for path in universal.glob("zero/*/step.pt"):
        path.unlink()
    unchanged_by(engines.make_engine(3, seed=2), universal, match="12 missing")


def test_steps_that_differ_within_one_partition_are_refused(saved, tmp_path):
    universal = tmp_path / "universal"
    shutil.copytree(saved, universal)
    torch.save(torch.tensor(7.0), universal / "zero" / "up.bias" / "step.pt")
    unchanged_by(engines.make_engine(1, seed=2), universal, match=r"saved at step \d and others of its group at \d")
    engine = engines.make_engine(0, seed=2)
    deepspeed_affine.load_checkpoint(engine, universal)
    steps = {
        name: float(engine.optimizer.state[value]["step"])
        for name, value in engine.module.named_parameters()
        if value.requires_grad
    }
    assert (steps["up.bias"], steps["up.weight"]) == (7.0, 2.0)


def test_an_optimizer_on_nvme_or_offloaded_for_now_is_refused_by_name(saved):
    engine = engines.make_engine(3, seed=2)
    before = held(engine)
    engine.optimizer.swap_optimizer = True
    with pytest.raises(UnsupportedLayoutError, match=r"states on NVMe .*Set offload_optimizer\.device to 'cpu'"):
        deepspeed_affine.load_checkpoint(engine, saved)
    engine.optimizer.swap_optimizer = False
    engine.optimizer.offloaded_states = {"hp_params"}
    with pytest.raises(UnsupportedLayoutError, match=r"engine\.reload_states\(\)"):
        deepspeed_affine.load_checkpoint(engine, saved)
    engine.optimizer.offloaded_states = set()
    assert differences(held(engine), before) == []


# ---------------------------------------------------------------- options


def test_only_what_is_asked_for_is_loaded(saved):
    engine = engines.make_engine(1, seed=2)
    report = deepspeed_affine.load_checkpoint(engine, saved, load_module_only=True)
    assert (engine.global_steps, dict(report.states)) == (0, {})
    assert dict(report.client_state) == {"epoch": 3}
    assert engine.optimizer.optimizer.state == {}

    engine = engines.make_engine(1, seed=2)
    engine.optimizer.optimizer.param_groups[0]["lr"] = 0.5
    report = deepspeed_affine.load_checkpoint(engine, saved, load_optimizer_states=False)
    assert (engine.global_steps, dict(report.states)) == (2, {})
    assert engine.optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert engine.optimizer.optimizer.state == {}
    whole = engines.make_engine(1, seed=2)
    deepspeed_affine.load_checkpoint(whole, saved)
    for name, weight in engine.module.named_parameters():
        assert torch.equal(weight, dict(whole.module.named_parameters())[name])


def test_a_second_load_over_a_trained_engine_leaves_nothing_of_it(saved):
    once, twice = engines.make_engine(1, seed=2), engines.make_engine(1, seed=3)
    deepspeed_affine.load_checkpoint(once, saved)
    engines.take_steps(twice, 3, first=50)
    flat = twice.optimizer.single_partition_of_fp32_groups[0]
    moment = twice.optimizer.optimizer.state[flat]["exp_avg"]
    deepspeed_affine.load_checkpoint(twice, saved)
    assert differences(held(twice), held(once)) == []
    # What DeepSpeed has links to is changed in place.
    assert twice.optimizer.optimizer.state[flat]["exp_avg"] is moment
    assert engines.take_steps(twice, 2) == engines.take_steps(once, 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_of_one_element_and_one_of_none_are_carried(tmp_path, stage):
    engine = engines.make_engine(1, model=Odd())
    engines.take_steps(engine, 2)
    universal = save(engine, tmp_path)
    other = engines.make_engine(stage, model=Odd(), seed=2)
    report = deepspeed_affine.load_checkpoint(other, universal)
    assert report.complete, str(report)
    assert torch.equal(other.module.scalar, engine.module.scalar)
    assert engines.take_steps(other, 1, first=2) == pytest.approx(engines.take_steps(engine, 1, first=2), rel=1e-6)


# ---------------------------------------------------------------- client state


class Mine:
    """An object of the training code."""


def test_objects_of_classes_are_not_handed_to_the_user(tmp_path):
    import numpy

    engine = engines.make_engine(1)
    client = {"mine": Mine(), "array": numpy.arange(3), "nested": {"t": torch.ones(2, 3).t(), "size": torch.Size([2])}}
    universal = save(engine, tmp_path, client_state=client)
    report = deepspeed_affine.load_checkpoint(engines.make_engine(1, seed=2), universal)
    assert set(report.client_state) == {"array", "nested"}
    assert report.client_state["array"].tolist() == [0, 1, 2]
    assert torch.equal(report.client_state["nested"]["t"], torch.ones(3, 2))
    assert type(report.client_state["nested"]["size"]) is torch.Size
    (row,) = [row for row in report.not_restored if row.what.startswith("client_state")]
    assert "client_state['mine']: holds an object of" in str(row)
    assert "Mine" in str(row)
    assert "not restored" in str(report)


def test_loading_never_calls_deepspeeds_own(saved, monkeypatch):
    import deepspeed
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    def never(*_, **__):
        raise AssertionError("DeepSpeed's own loading was called")

    for kind, names in (
        (deepspeed.DeepSpeedEngine, ("load_checkpoint", "_load_checkpoint", "_load_zero_checkpoint")),
        (DeepSpeedZeroOptimizer, ("load_state_dict", "_load_universal_checkpoint")),
        (torch, ("load",)),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, never)
    deepspeed_affine.load_checkpoint(engines.make_engine(1, seed=2), saved)
