"""A load that breaks off, or that finds an engine in the middle of something; and what it takes of a scheduler."""

from __future__ import annotations

import engines
import pytest
import torch
from test_load_checkpoint import KINDS, differences, held, save
from test_load_misuse import adamax

import deepspeed_affine
from deepspeed_affine.errors import AffineError
from deepspeed_affine.storage.files import ByteReader


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    engine = engines.make_engine(1)
    engines.take_steps(engine, 2)
    return save(engine, tmp_path_factory.mktemp("saved"))


# ---------------------------------------------------------------- in the middle


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("anything")])
def test_a_load_that_breaks_off_says_that_the_engine_is_half_loaded(saved, monkeypatch, error):
    engine = engines.make_engine(1, seed=2)
    really = ByteReader.read_into

    def broken(reader, path, at, out):
        if path.endswith("up.weight/fp32.pt"):
            raise error
        really(reader, path, at, out)

    monkeypatch.setattr(ByteReader, "read_into", broken)
    with pytest.raises(AffineError, match="was loaded in part, and the engine is of no use") as caught:
        deepspeed_affine.load_checkpoint(engine, saved)
    assert str(error) in caught.value.message
    assert caught.value.__cause__ is error
    monkeypatch.undo()
    deepspeed_affine.load_checkpoint(engine, saved)
    fresh = engines.make_engine(1, seed=3)
    deepspeed_affine.load_checkpoint(fresh, saved)
    assert differences(held(engine), held(fresh)) == []


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "device"])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_set_for_all_of_torch_does_not_reach_into_a_load(saved, stage, mode):
    engine, usual = (engines.make_engine(stage, seed=2) for _ in range(2))
    with mode():
        deepspeed_affine.load_checkpoint(engine, saved)
    deepspeed_affine.load_checkpoint(usual, saved)
    assert engines.take_steps(engine, 2) == engines.take_steps(usual, 2)
    assert differences(held(engine), held(usual)) == []


def micro_batch(engine, number):
    loss = engine(torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(number)))
    engine.backward(loss)
    with torch.no_grad():
        engine.step()
    return float(loss.detach())


ACCUMULATING = [
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2 offloaded",
    "zero3 offloaded",
    "zero0 bf16",
    "bf16 optimizer",
]


@pytest.mark.parametrize("kind", ACCUMULATING)
def test_gradients_of_the_weights_that_were_reach_no_step_after_a_load(saved, kind):
    stage, options = KINDS[kind]
    losses = []
    for before in (0, 3):
        engine = engines.make_engine(stage, seed=2, gradient_accumulation_steps=2, **options)
        for number in range(before):
            micro_batch(engine, 40 + number)
        deepspeed_affine.load_checkpoint(engine, saved)
        losses.append([micro_batch(engine, number) for number in range(5)])
    assert losses[0] == losses[1]


def test_a_backward_without_its_step_reaches_none_after_a_load(saved):
    losses = []
    for before in (False, True):
        engine = engines.make_engine(0, seed=2)
        if before:
            engine.backward(engine(torch.arange(10).reshape(2, 5)))
        deepspeed_affine.load_checkpoint(engine, saved)
        losses.append(engines.take_steps(engine, 2))
    assert losses[0] == losses[1]


# ---------------------------------------------------------------- schedulers


WARM = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.05}}
SCHEDULES = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
}


def scheduled(kind, seed):
    """An engine whose scheduler is DeepSpeed's ``WarmupLR``, or one of torch's."""
    if kind == "warm":
        return engines.make_engine(1, scheduler=WARM, seed=seed)
    engine = engines.make_engine(1, seed=seed)
    engine.lr_scheduler = SCHEDULES[kind](engine.optimizer.optimizer)
    return engine


@pytest.mark.parametrize("source", ["warm", *SCHEDULES])
def test_a_scheduler_takes_nothing_from_one_of_another_kind(tmp_path, source):
    engine = scheduled(source, 1)
    engines.take_steps(engine, 3)
    universal = save(engine, tmp_path)
    for target in ("warm", *SCHEDULES):
        other = scheduled(target, 2)
        before = dict(other.lr_scheduler.state_dict())
        report = deepspeed_affine.load_checkpoint(other, universal)
        if source == target:
            assert other.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()
            assert "lr_scheduler" in report.restored
            continue
        (row,) = [row for row in report.not_restored if row.what == "lr_scheduler"]
        assert f"is not what a {type(other.lr_scheduler).__name__} keeps" in row.why
        assert other.lr_scheduler.state_dict() == before


# ---------------------------------------------------------------- DeepSpeed's own loader


class Unfrozen(engines.Small):
    def __init__(self) -> None:
        super().__init__(frozen=False)


@pytest.mark.parametrize(
    ("stage", "options", "match"),
    [
        (1, {"groups": 2}, r"was saved with 1 parameter group\(s\), the engine has 2"),
        (1, {"model": Unfrozen}, "'norm.weight': no step is stored, and step 2 of 'embed.weight'"),
        (1, {"optimizer": adamax}, "no exp_inf, without which the engine's Adamax cannot step"),
        (3, {"optimizer": adamax}, "no exp_inf, without which the engine's Adamax cannot step"),
    ],
)
def test_deepspeeds_loader_is_stopped_before_it_fills_half_an_engine(saved, tmp_path, stage, options, match):
    universal = saved
    if stage == 3:
        source = engines.make_engine(3)
        engines.take_steps(source, 1)
        universal = save(source, tmp_path)
    model = options.get("model", engines.Small)()
    engine = engines.make_engine(stage, seed=2, **{**options, "model": model}, checkpoint={"load_universal": True})
    before = held(engine)
    with deepspeed_affine.attach(engine), pytest.raises(AffineError, match=match) as caught:
        engine.load_checkpoint(str(universal.parent), tag=universal.name)
    assert "deepspeed_affine.load_checkpoint(engine, load_dir)" in caught.value.message
    assert differences(held(engine), before) == []
