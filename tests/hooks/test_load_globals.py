"""What is beside the parameters comes back too: scheduler, loss scaler, counters; and engines without an optimizer."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict, deque

import engines
import pytest
import torch
from test_load_checkpoint import differences, held, save

import deepspeed_affine
from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.storage.files import ByteReader


@pytest.fixture
def half_precision(monkeypatch):
    """The CPU accelerator denies fp16 by policy; torch computes it."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


def fp16(stage, seed=1, **options):
    return engines.make_engine(stage, seed=seed, fp16={"enabled": True, "initial_scale_power": 5, **options})


def scale_of(engine):
    from deepspeed_affine.hooks.globals import scale_holder

    holder = scale_holder(engine.optimizer)
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "scale_window")
    return {name: getattr(holder, name) for name in names if hasattr(holder, name)}


@pytest.mark.parametrize(("source", "target"), [(1, 1), (1, 3), (3, 2), (1, 0), (0, 1), (0, 0)])
def test_a_dynamic_loss_scale_continues(half_precision, tmp_path, source, target):
    engine = fp16(source)
    engines.take_steps(engine, 2)
    holder = scale_holder_of(engine)
    holder.cur_scale, holder.last_overflow_iter = 4.0, 1
    universal = save(engine, tmp_path)
    other = fp16(target, seed=2)
    report = deepspeed_affine.load_checkpoint(other, universal)
    saved, now = scale_of(engine), scale_of(other)
    assert {name: now[name] for name in saved if name in now} == {name: saved[name] for name in saved if name in now}
    assert now["cur_scale"] == 4.0
    assert "loss scale 4.0" in report.restored


def scale_holder_of(engine):
    from deepspeed_affine.hooks.globals import scale_holder

    return scale_holder(engine.optimizer)


def test_a_scaler_of_another_kind_stays_and_is_reported(half_precision, tmp_path):
    engine = fp16(1)
    engines.take_steps(engine, 1)
    universal = save(engine, tmp_path)
    static = fp16(1, seed=2, loss_scale=8.0)
    report = deepspeed_affine.load_checkpoint(static, universal)
    assert static.optimizer.cur_scale == 8.0
    assert "loss scaler: it was dynamic and the engine's is static" in map(str, report.not_restored)
    report = deepspeed_affine.load_checkpoint(engines.make_engine(1, dtype="bf16", seed=2), universal)
    assert "loss scaler: it was dynamic and the engine's is static" in map(str, report.not_restored)


WARM = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.05, "warmup_type": "linear"}}


def test_a_scheduler_continues_its_ramp(tmp_path):
    engine = engines.make_engine(1, scheduler=WARM)
    engines.take_steps(engine, 3)
    universal = save(engine, tmp_path)
    expected = [engine.get_lr()[0], engines.take_steps(engine, 2, first=3), engine.get_lr()[0]]
    other = engines.make_engine(3, scheduler=WARM, seed=2)
    report = deepspeed_affine.load_checkpoint(other, universal)
    assert "lr_scheduler" in report.restored
    got = [other.get_lr()[0], engines.take_steps(other, 2, first=3), other.get_lr()[0]]
    assert (got[0], got[2]) == (expected[0], expected[2])
    assert got[1] == pytest.approx(expected[1], rel=1e-6)

    other = engines.make_engine(1, scheduler=WARM, seed=2)
    report = deepspeed_affine.load_checkpoint(other, universal, load_lr_scheduler_states=False)
    assert other.lr_scheduler.state_dict() != engine.lr_scheduler.state_dict()
    assert "lr_scheduler: load_lr_scheduler_states=False was said" in map(str, report.not_restored)
    report = deepspeed_affine.load_checkpoint(engines.make_engine(1, seed=2), universal)
    assert "lr_scheduler: the engine has none" in map(str, report.not_restored)


class Held:
    """What no load builds."""


def test_a_scheduler_goes_on_from_milestones_and_is_never_begun_again_unasked(tmp_path):
    # torch keeps milestones in a counter.
    def build(stage, seed):
        engine = engines.make_engine(stage, seed=seed)
        engine.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(engine.optimizer.optimizer, [1, 2, 4, 4])
        return engine

    engine = build(1, 1)
    engines.take_steps(engine, 3)
    engine.save_checkpoint(str(tmp_path), tag="saved")
    other = build(3, 2)
    report = deepspeed_affine.load_checkpoint(other, tmp_path)
    assert report.complete, str(report)
    assert other.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()
    assert engines.take_steps(other, 2, first=3) == pytest.approx(engines.take_steps(engine, 2, first=3), rel=1e-6)
    assert other.get_lr() == engine.get_lr()

    engine.lr_scheduler.milestones = Held()
    engine.save_checkpoint(str(tmp_path), tag="held")
    other = build(3, 2)
    with pytest.raises(
        UnsupportedLayoutError, match=r"lr_scheduler: holds an object of .*load_lr_scheduler_states=False"
    ):
        deepspeed_affine.load_checkpoint(other, tmp_path, "held")
    assert other.global_steps == 0
    assert not deepspeed_affine.load_checkpoint(other, tmp_path, "held", load_lr_scheduler_states=False).complete


@pytest.mark.parametrize("target", [1, 3])
def test_rates_that_a_scheduler_keeps_by_place_do_not_change_places(tmp_path, target):
    def build(stage, seed, turned, rates=(0.03, 0.003)):
        def make(groups):
            groups = [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)]
            return torch.optim.AdamW(groups[::-1] if turned else groups)

        engine = engines.make_engine(stage, optimizer=make, seed=seed, groups=2)
        engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer.optimizer, lambda step: 0.9**step)
        return engine

    engine = build(1, 1, False)
    engines.take_steps(engine, 2)
    engine.save_checkpoint(str(tmp_path), tag="saved")
    other = build(target, 2, True)
    with pytest.raises(
        UnsupportedLayoutError, match="lr_scheduler: keeps values of every parameter group by its place"
    ):
        deepspeed_affine.load_checkpoint(other, tmp_path)
    with pytest.raises(
        UnsupportedLayoutError, match="lr_scheduler: keeps values of every parameter group by its place"
    ):
        deepspeed_affine.load_checkpoint(other, tmp_path, load_optimizer_states=False)
    assert other.global_steps == 0
    report = deepspeed_affine.load_checkpoint(other, tmp_path, load_lr_scheduler_states=False)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    assert [group["lr"] for group in other.optimizer.param_groups] == rates[::-1]
    assert [str(row).split(":")[0] for row in report.not_restored] == ["lr_scheduler"]

    # One rate for all has no place.
    engine = build(1, 1, False, (0.01, 0.01))
    engines.take_steps(engine, 2)
    engine.save_checkpoint(str(tmp_path), tag="alike")
    other = build(target, 2, True, (0.01, 0.01))
    assert deepspeed_affine.load_checkpoint(other, tmp_path).complete
    assert engines.take_steps(other, 2, first=2) == pytest.approx(engines.take_steps(engine, 2, first=2), rel=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_a_schedule_of_one_group_is_none_of_two(tmp_path, nested):
    def build(groups, seed):
        engine = engines.make_engine(1, groups=groups, seed=seed)
        inner = engine.optimizer.optimizer
        parts = [torch.optim.lr_scheduler.ExponentialLR(inner, 0.9) for _ in range(1 + nested)]
        engine.lr_scheduler = torch.optim.lr_scheduler.SequentialLR(inner, parts, [2]) if nested else parts[0]
        return engine

    engine = build(1, 1)
    engines.take_steps(engine, 1)
    engine.save_checkpoint(str(tmp_path), tag="saved")
    other = build(2, 2)
    with pytest.raises(UnsupportedLayoutError, match=r"lr_scheduler: was saved for \[1\] parameter groups .*\[2\]"):
        deepspeed_affine.load_checkpoint(other, tmp_path)
    assert other.global_steps == 0
    deepspeed_affine.load_checkpoint(other, tmp_path, load_lr_scheduler_states=False)
    assert other.global_steps == 1


def test_counters_queues_and_dictionaries_with_defaults_of_the_client_state_come_back(tmp_path):
    counts = defaultdict(list, {"a": [1, torch.ones(2)]})
    state = {"seen": Counter("abca"), "last": deque([1, "x"], maxlen=5), "counts": counts, "none": defaultdict(None)}
    odd = {"odd": defaultdict(Held), "own": Held()}
    engines.make_engine(0).save_checkpoint(str(tmp_path), tag="saved", client_state={**state, **odd})
    report = deepspeed_affine.load_checkpoint(engines.make_engine(0, seed=2), tmp_path)
    found = dict(report.client_state)
    assert torch.equal(found["counts"]["a"].pop(), counts["a"].pop())
    assert found == state
    assert [type(found[key]) for key in state] == [type(value) for value in state.values()]
    assert (found["last"].maxlen, found["counts"].default_factory, found["none"].default_factory) == (5, list, None)
    left = [str(row).split(":")[0] for row in report.not_restored if "client_state" in str(row)]
    assert left == ["client_state['odd']", "client_state['own']"]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_without_an_optimizer_takes_the_weights(tmp_path, stage):
    import deepspeed

    engine = engines.make_engine(1)
    engines.take_steps(engine, 2)
    engine.module.seen.fill_(5.0)
    universal = save(engine, tmp_path, client_state={"epoch": 3})
    torch.manual_seed(2)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    other = deepspeed.initialize(model=engines.Small(), config=config)[0]
    report = deepspeed_affine.load_checkpoint(other, universal)
    assert set(report.weights) == {name for name, _ in other.module.named_parameters()}
    for name, parameter in other.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            assert torch.equal(parameter, dict(engine.module.named_parameters())[name]), name
    assert bool((other.module.seen == 5.0).all())
    assert other.global_steps == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_what_deepspeeds_own_converter_wrote_loads_as_well(tmp_path, stage):
    from deepspeed.checkpoint import ds_to_universal

    engine = engines.make_engine(stage, groups=2)
    engines.take_steps(engine, 2)
    save(engine, tmp_path)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(tmp_path / "ordinary" / "saved"), "output_folder": str(tmp_path / "stock")}
    ds_to_universal.main(argparse.Namespace(**folders, **options, inject_missing_state=True))
    other = engines.make_engine(1, groups=2, seed=2)
    report = deepspeed_affine.load_checkpoint(other, tmp_path, "stock")
    assert differences(held(other), held(engine)) == []
    assert report.complete, str(report)


def test_only_the_bytes_the_fragments_need_are_read(tmp_path, monkeypatch):
    engine = engines.make_engine(1)
    engines.take_steps(engine, 1)
    universal = save(engine, tmp_path)
    read: list[int] = []
    really = ByteReader.read_into
    monkeypatch.setattr(
        ByteReader, "read_into", lambda self, path, at, out: (read.append(out.nbytes), really(self, path, at, out))[1]
    )
    other = engines.make_engine(3, seed=2)
    report = deepspeed_affine.load_checkpoint(other, universal)
    numel = sum(parameter.ds_numel for parameter in other.module.parameters())
    trained = sum(parameter.ds_numel for parameter in other.module.parameters() if parameter.requires_grad)
    assert report.bytes_read == 4 * (numel + 2 * trained + 3)
    # And the numbers: a step of every parameter.
    assert report.bytes_read <= sum(read) <= report.bytes_read + 4 * 16


def test_a_folder_behind_a_url_loads_like_one_on_a_disk(tmp_path):
    fsspec = pytest.importorskip("fsspec")

    engine = engines.make_engine(1)
    engines.take_steps(engine, 1)
    universal = save(engine, tmp_path)
    fsspec.filesystem("memory").put(str(universal.parent), "memory://load_by_url", recursive=True)
    other = engines.make_engine(2, seed=2)
    report = deepspeed_affine.load_checkpoint(other, "memory://load_by_url")
    assert differences(held(other), held(engine)) == []
    assert report.path == f"memory://load_by_url/{universal.name}"
