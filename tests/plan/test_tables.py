"""The draft's tables (8.1, 8.2) against the real partition functions with F never built, and DeepSpeed's planner."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import affine as stock_affine
from deepspeed.checkpoint import affine_transfer as stock

from deepspeed_affine.execute.transfer import run_plan
from deepspeed_affine.ir import (
    ParamAffineMap,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from deepspeed_affine.lowering import probe
from deepspeed_affine.plan.transfer import plan_transfer


def _load():
    path = Path(__file__).parents[2] / "benchmarks" / "layouts.py"
    spec = importlib.util.spec_from_file_location("benchmark_layouts_of_plans", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


layouts = _load()
LAYOUTS = {
    "codegen": lambda tp, hidden=8: ((96 * hidden // 8, 8), layouts.fused("CodeGenBlock", tp, num_kv_heads=32)),
    "bigcode": lambda tp, hidden=8: (
        (96 * hidden // 8, 8),
        layouts.fused("GPTBigCodeBlock", tp, n_embd=64 * hidden // 8),
    ),
    "yuan_value": lambda tp, hidden=8: ((64 * hidden // 8, 8), layouts.yuan(tp, 16, value=True)),
    "yuan_oproj": lambda tp, rows=64: ((rows, 32), layouts.yuan(tp, 8, value=False)),
}
TABLE = [
    ("codegen", 2, 4, 20),
    ("codegen", 4, 2, 20),
    ("codegen", 2, 8, 8),
    ("codegen", 8, 2, 8),
    ("codegen", 4, 8, 40),
    ("codegen", 8, 4, 40),
    ("bigcode", 2, 4, 7),
    ("bigcode", 4, 2, 6),
    ("bigcode", 2, 8, 15),
    ("bigcode", 8, 2, 10),
    ("bigcode", 4, 8, 15),
    ("bigcode", 8, 4, 12),
    ("yuan_value", 2, 4, 4),
    ("yuan_value", 4, 2, 4),
    ("yuan_oproj", 2, 4, 4),
    ("yuan_oproj", 4, 2, 4),
]


def probed(name, tp, *size):
    shape, partition = LAYOUTS[name](tp, *size)
    return probe(partition, shape, tp), partition


def real_shards(name, tp, values, *size):
    """What DeepSpeed's own code leaves on every rank."""
    _, partition = LAYOUTS[name](tp, *size)
    found = {}
    for rank in range(tp):
        shard = partition(values.clone(), rank)
        found[rank] = (shard[0] if isinstance(shard, tuple) else shard).detach().contiguous()
    return found


@pytest.mark.parametrize(("name", "source_tp", "target_tp", "most"), TABLE)
def test_strided_layouts_compose_in_few_segments(name, source_tp, target_tp, most):
    shape, _ = LAYOUTS[name](source_tp)
    source, _ = probed(name, source_tp)
    target, _ = probed(name, target_tp)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    given, expected = real_shards(name, source_tp, values), real_shards(name, target_tp, values)
    for policy in ("lowest", "balanced"):
        plan = plan_transfer(target, source, policy=policy)
        out = {rank: torch.full_like(shard, float("nan")) for rank, shard in expected.items()}
        run_plan(plan, given, out)
        assert all(torch.equal(out[rank], expected[rank]) for rank in expected)
        extra = source_tp - 1 if policy == "balanced" else 0
        assert len(plan.segments) <= most + extra


@pytest.mark.parametrize(("name", "source_tp", "target_tp", "most"), TABLE)
def test_their_number_does_not_grow_with_the_model(name, source_tp, target_tp, most):
    sizes = (4, 16, 64, 128) if name == "yuan_oproj" else (8, 16, 32, 64)
    counts = {
        len(plan_transfer(probed(name, target_tp, size)[0], probed(name, source_tp, size)[0], policy="lowest").segments)
        for size in sizes
    }
    assert len(counts) == 1
    assert max(counts) <= most
    if name == "yuan_oproj":
        assert counts == {4}


def stock_map(layout):
    return stock_affine.ParamAffineMap.from_dict(layout.to_dict())


def accepted():
    """Pairs of maps that DeepSpeed 0.19.8's planner takes."""
    for source_tp in (1, 2, 3, 4):
        for target_tp in (1, 2, 3, 4):
            for axis in (0, 1):
                yield (
                    contiguous_split_map((12, 24), (([12, 24][axis]) // source_tp,) * source_tp, axis),
                    contiguous_split_map((12, 24), (([12, 24][axis]) // target_tp,) * target_tp, axis),
                )
            yield (
                contiguous_split_map((12, 24), (12 // source_tp,) * source_tp, 0),
                contiguous_split_map((12, 24), (24 // target_tp,) * target_tp, 1),
            )
            yield replicated_map((12, 24), source_tp), contiguous_split_map((12, 24), (12 // target_tp,) * target_tp, 0)
            yield (
                sub_param_map((36, 8), (12, 24), ((12 // source_tp,) * source_tp, (24 // source_tp,) * source_tp), 0),
                sub_param_map((36, 8), (12, 24), ((12 // target_tp,) * target_tp, (24 // target_tp,) * target_tp), 0),
            )
            yield (
                segmented_map((36, 8), [(24, False), (12, True)], 0, source_tp, [[24 // source_tp] * source_tp]),
                segmented_map((36, 8), [(24, False), (12, True)], 0, target_tp, [[24 // target_tp] * target_tp]),
            )


def moves(plan):
    """Every element's move, whoever planned it."""
    found = set()
    for segment in plan.segments:
        indices = [()]
        for extent in segment.shape:
            indices = [(*index, i) for index in indices for i in range(extent)]
        for index in indices:
            found.add(
                (
                    segment.source_rank,
                    segment.source_offset + sum(i * s for i, s in zip(index, segment.source_strides, strict=True)),
                    segment.target_rank,
                    segment.target_offset + sum(i * s for i, s in zip(index, segment.target_strides, strict=True)),
                )
            )
    return found


def test_what_deepspeed_plans_we_plan_alike_in_no_more_segments():
    for source, target in accepted():
        theirs = stock.plan_transfer(stock_map(target), stock_map(source))
        ours = plan_transfer(target, source, policy="lowest")
        assert moves(ours) == moves(theirs)
        assert len(ours.segments) <= len(theirs.segments)
        assert ours.moved_elements == theirs.moved_elements
        # Their reader takes our segments.
        read = [stock.TransferSegment.from_dict(segment.to_dict()) for segment in ours.segments]
        assert {segment.numel for segment in read} == {segment.numel for segment in ours.segments}


def test_a_selector_written_for_deepspeed_is_asked_the_same():
    source, target = replicated_map((12, 24), 3), contiguous_split_map((12, 24), (6, 6), 0)

    def last(request):
        return max(candidate.source_rank for candidate in request.candidates)

    theirs = stock.plan_transfer(stock_map(target), stock_map(source), replica_selector=last)
    assert moves(plan_transfer(target, source, replica_selector=last)) == moves(theirs)


def test_what_deepspeed_refuses():
    permuted = ParamAffineMap.from_dict(
        {
            "logical_shape": [4, 6],
            "ranks": {
                0: {
                    "shard_shape": [6, 4],
                    "pieces": [{"shape": [6, 4], "source": [0, [1, 6]], "dest": [0, [4, 1]], "locations": [0]}],
                }
            },
        }
    )
    scaled = replicated_map((4, 6), 2, 0.5)
    many = contiguous_split_map((600, 2), (1,) * 600, 0)
    for source, target in ((permuted, scaled), (scaled, permuted), (many, contiguous_split_map((600, 2), (600,), 0))):
        with pytest.raises(stock.AffineTransferError):
            stock.plan_transfer(stock_map(target), stock_map(source))
        values = torch.arange(float(source.numel)).view(source.logical_shape)
        out = {rank: torch.empty(target.shard_shapes[rank]) for rank in target.ranks}
        run_plan(plan_transfer(target, source), {rank: source.extract(values, rank) for rank in source.ranks}, out)
        assert all(torch.equal(out[rank], target.extract(values, rank)) for rank in target.ranks)
