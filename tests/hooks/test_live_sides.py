"""``live_shards`` in a process that is alone: models, their own memory, and moves between two of them."""

import pytest
import torch
from engines import Small, make_engine, start_process_group, take_steps

import deepspeed_affine
from deepspeed_affine.errors import InvalidMapError, PolicyError
from deepspeed_affine.ir import replicated_map


def test_a_model_is_one_side_in_its_own_memory():
    model = Small()
    side = deepspeed_affine.live_shards(model)
    named = dict(model.named_parameters())
    assert side.shards.keys() == side.placements.keys() == named.keys()
    for name, param in named.items():
        assert side.shards[name].data_ptr() == param.data_ptr()
        assert not side.shards[name].requires_grad
        place = side.placements[name]
        assert place.layout == replicated_map(param.shape, 1).canonical()
        assert place.holders == {0: (0,)}
        assert place.itemsize == param.element_size()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_is_evaluated_by_another_model(stage):
    engine = make_engine(stage)
    take_steps(engine, 2)
    tokens = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(9))
    model = Small()
    with torch.no_grad():
        assert float(model(tokens)) != pytest.approx(float(engine(tokens)), rel=1e-6)
        trained = deepspeed_affine.live_shards(engine)
        serving = deepspeed_affine.live_shards(model, filled=True)
        plan = deepspeed_affine.plan_model(serving.placements, trained.placements)
        report = deepspeed_affine.transfer(trained.shards, serving.shards, plan)
        assert float(model(tokens)) == pytest.approx(float(engine(tokens)), rel=1e-6)
    assert report.bytes_sent == 0
    assert report.bytes_copied == sum(4 * param.numel() for param in model.parameters())


def test_a_compiled_model_is_named_as_such_on_either_side():
    plain = deepspeed_affine.live_shards(Small()).placements
    compiled = deepspeed_affine.live_shards(torch.compile(Small())).placements
    with pytest.raises(InvalidMapError, match=r"The target's names are the source's with '_orig_mod\.' before them"):
        deepspeed_affine.plan_model(compiled, plain)
    with pytest.raises(InvalidMapError, match=r"The source's names are the target's with '_orig_mod\.' before them"):
        deepspeed_affine.plan_model(plain, compiled)


def test_what_is_no_group_is_refused_by_its_name():
    start_process_group()
    side = deepspeed_affine.live_shards(Small())
    plan = deepspeed_affine.plan_model({}, side.placements)
    for group in (object(), "world", 0):
        with pytest.raises(PolicyError, match=r"expected what torch\.distributed\.new_group returned"):
            deepspeed_affine.transfer(side.shards, {}, plan, group)


def test_no_engine_is_a_side_with_nothing_and_anything_else_is_refused():
    side = deepspeed_affine.live_shards(None)
    assert (side.placements, side.shards) == ({}, {})
    with pytest.raises(PolicyError, match="rank 0: was given a dict"):
        deepspeed_affine.live_shards({"w": torch.ones(3)})
    with pytest.raises(PolicyError, match="info is a list"):
        deepspeed_affine.live_shards(Small(), info=[])
