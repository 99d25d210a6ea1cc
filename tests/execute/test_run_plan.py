"""Plans carried out in memory: what does not fit is refused before a byte is written."""

from dataclasses import replace

import pytest
import torch

from deepspeed_affine.errors import AffineError, IntegrityError, InvalidMapError, PolicyError, UnsupportedLayoutError
from deepspeed_affine.execute.transfer import run_plan
from deepspeed_affine.ir import contiguous_split_map, replicated_map
from deepspeed_affine.plan.transfer import plan_transfer

SOURCE, TARGET = contiguous_split_map((4, 4), (2, 2), 1), replicated_map((4, 4), 1)
PLAN = plan_transfer(TARGET, SOURCE)
FULL = torch.arange(16.0).view(4, 4)


def given():
    return {rank: SOURCE.extract(FULL, rank) for rank in SOURCE.ranks}


def blank():
    return torch.full((4, 4), -1.0)


def with_first(**changes):
    first, *rest = PLAN.segments
    return replace(PLAN, segments=(replace(first, **changes), *rest))


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (with_first(source_offset=1), IntegrityError),
        (with_first(source_rank=7), IntegrityError),
        (with_first(target_offset=2), InvalidMapError),
        (with_first(target_strides=(0, 1)), InvalidMapError),
        (with_first(target_rank=5), IntegrityError),
        (with_first(source_offset=-1), InvalidMapError),
        (with_first(source_strides=(1,)), InvalidMapError),
        (with_first(scale=0.0), InvalidMapError),
        (with_first(scale=float("nan")), InvalidMapError),
        (replace(PLAN, segments=PLAN.segments[1:]), IntegrityError),
        (replace(PLAN, segments=PLAN.segments * 2), IntegrityError),
    ],
)
def test_a_plan_that_does_not_fit(plan, error):
    target = blank()
    with pytest.raises(error):
        run_plan(plan, given(), {0: target})
    assert torch.equal(target, blank())


@pytest.mark.parametrize(
    "change",
    [
        lambda sources: sources.pop(1),
        lambda sources: sources.update({1: sources[1][:3]}),
        lambda sources: sources.update({1: sources[1].double()}),
        lambda sources: sources.update({1: sources[1].int()}),
        lambda sources: sources.update({1: sources[1].to("meta")}),
        lambda sources: sources.update({1: None}),
    ],
)
def test_a_source_that_does_not_fit(change):
    sources, target = given(), blank()
    change(sources)
    with pytest.raises(AffineError):
        run_plan(PLAN, sources, {0: target})
    assert torch.equal(target, blank())


@pytest.mark.parametrize(
    "target",
    [
        torch.full((5, 5), -1.0),
        torch.full((3, 4), -1.0),
        torch.full((4, 8), -1.0)[:, ::2],
        torch.full((4, 4), -1.0).t(),
        torch.full((1, 4), -1.0).expand(4, 4),
        torch.full((4, 4), -1.0, dtype=torch.float16),
        torch.empty((4, 4), device="meta"),
        None,
    ],
)
def test_a_target_that_does_not_fit(target):
    with pytest.raises(AffineError):
        run_plan(PLAN, given(), {0: target})
    if target is not None and target.device.type == "cpu":
        assert bool((target == -1).all())


def test_memory_in_common_is_refused():
    memory = torch.arange(16.0)
    with pytest.raises(PolicyError, match=r"rank 0: its .* share memory"):
        run_plan(PLAN, {0: memory[:8], 1: memory[8:]}, {0: memory})
    assert torch.equal(memory, torch.arange(16.0))
    pair = plan_transfer(replicated_map((4, 4), 2), SOURCE)
    with pytest.raises(PolicyError, match="share memory"):
        run_plan(pair, given(), {0: memory, 1: memory})


def test_a_plan_fills_those_of_its_targets_that_are_given():
    pair = plan_transfer(replicated_map((4, 4), 2), SOURCE)
    target = torch.nn.Parameter(blank())
    # Sources are copied where they are not dense.
    run_plan(pair, {0: given()[0], 1: FULL[:, 2:]}, {1: target})
    assert torch.equal(target, FULL)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_what_cannot_be_scaled(dtype):
    plan = plan_transfer(replicated_map((4,), 1, 0.5), replicated_map((4,), 1))
    source, target = torch.ones(4).to(dtype), torch.zeros(4).to(dtype)
    with pytest.raises(UnsupportedLayoutError, match="cannot carry"):
        run_plan(plan, {0: source}, {0: target})
    assert not target.any()
    run_plan(plan, {0: source}, {0: target}, scale_power=0)
    assert torch.equal(target, source)
    with pytest.raises(PolicyError, match="scale_power"):
        run_plan(plan, {0: source}, {0: target}, scale_power=0.5)
