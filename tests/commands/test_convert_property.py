"""Whatever world a checkpoint was saved in, the full tensors come back byte for byte, however chunks cut them."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from converting import execute_plan, is_flat, same, wrong
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import COLUMN, REPLICATED, ROW, Cut, ExpertLayer, Param, World, make, random_full, uc_info

from deepspeed_affine.lowering.merge import lower_param

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES = ("w", "w.extra", "a+b(c)[d]", "h.0.q", "ünïcode.β", "with space", "dir/inner", "h.0.qq", "^x$", "z" * 90)


@st.composite
def cuts(draw, tp):
    kind = draw(st.sampled_from(["replicated", "column", "row", "vocab", "sub", "average"]))
    width = draw(st.integers(1, 4))
    if kind == "sub":
        sizes = tuple(tp * draw(st.integers(1, 3)) for _ in range(draw(st.integers(2, 3))))
        return Cut("sub", sub_sizes=sizes), (sum(sizes), width)
    if kind in ("replicated", "average"):
        return Cut(kind), tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    sizes = tuple(draw(st.integers(1, 4)) for _ in range(tp))
    if kind == "row":
        return Cut("row", sizes), (width, sum(sizes))
    if kind == "vocab":
        return Cut("vocab", sizes, original_rows=max(1, sum(sizes) - 1)), (sum(sizes), width)
    rest = draw(st.sampled_from([(), (width,), (2, width)]))
    return Cut("column", sizes), (sum(sizes), *rest)


@st.composite
def checkpoints(draw):
    stage = draw(st.sampled_from([1, 2, 3]))
    tp = draw(st.integers(1, 4))
    world = World(
        stage=stage,
        tp=tp,
        pp=draw(st.integers(1, 2)) if stage < 3 else 1,
        dp=draw(st.integers(1, 5)),
        prefix=draw(st.sampled_from(["", "bf16_", "fp16_"])),
        align=draw(st.sampled_from([1, 4, 16])),
        strip_padding=draw(st.booleans()),
        whole_padding_on_last=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        state_dtype=draw(st.sampled_from(DTYPES)),
        states=draw(st.sampled_from([(), ("momentum_buffer",), ("exp_avg", "exp_avg_sq"), ("a", "b", "c")])),
        record_degrees=True,
    )
    params = []
    vocabulary = None
    for index, name in enumerate(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))):
        cut, shape = draw(cuts(tp))
        if cut.kind == "vocab":
            # The vocabulary's size is one number for the whole model.
            if vocabulary is not None and vocabulary > shape[0]:
                cut = Cut("column", cut.sizes)
            else:
                vocabulary = vocabulary or cut.original_rows
                cut = Cut("vocab", cut.sizes, original_rows=vocabulary)
        stages = draw(st.sampled_from([(0,), (0, 1), (1,)])) if world.pp == 2 else (0,)
        full = random_full(shape, 7919 * (index + 1))
        params.append(Param(name, full, cut, group=draw(st.integers(0, 1)), stages=stages))
    return world, params


@settings(max_examples=40)
@given(checkpoints(), st.sampled_from([1, 8, 20, 64, 1 << 20]), st.integers(1, 3))
def test_full_tensors_come_back(case, chunk_bytes, workers):
    made = make(*case)
    folder = tempfile.mkdtemp()
    try:
        plan = execute_plan(
            made.save(Path(folder) / "in"), Path(folder) / "out", chunk_bytes=chunk_bytes, workers=workers
        )
        assert wrong(made, Path(folder) / "out", flat=is_flat(made)) == []
        assert len(plan.tensors) == len(made.truth)
    finally:
        shutil.rmtree(folder)


@settings(max_examples=40)
@given(checkpoints())
def test_every_shard_is_cut_again_from_its_full_tensor(case):
    world, params = case
    made = make(world, params)
    info = uc_info(world, params)
    for param in params:
        shards = [made.shards[param.name, "fp32", rank] for rank in range(world.tp)]
        lowered = lower_param(info, param.name, [tuple(shard.shape) for shard in shards], world.tp)
        for rank, shard in enumerate(shards):
            assert same(lowered.map.extract(param.full.to(world.dtype), rank), shard)


@st.composite
def placements(draw):
    ranks = draw(st.integers(1, 4))
    count = draw(st.integers(1, 6))
    held = [set(draw(st.sets(st.integers(0, count - 1)))) for _ in range(ranks)]
    for expert in range(count):
        if not any(expert in own for own in held):
            held[draw(st.integers(0, ranks - 1))].add(expert)
    return tuple(tuple(draw(st.permutations(sorted(own)))) for own in held)


@settings(max_examples=40)
@given(placements(), st.integers(1, 3), st.sampled_from([1, 4]), st.sampled_from([8, 1 << 20]))
def test_experts_come_back_wherever_they_were_placed(placement, edp, align, chunk_bytes):
    count = 1 + max(max(own) for own in placement if own)
    weights = {w: random_full((count, 2, 3), 40 + i) for i, w in enumerate(("w1", "w2", "w3"))}
    world = World(stage=1, dp=edp * len(placement), align=align)
    layer = ExpertLayer("mlp.experts", weights, placement, descriptor=True)
    made = make(world, [Param("gate", random_full((3, 2), 1))], [layer])
    if not placement[0]:
        return  # a rank without experts records no shape to go by; refused elsewhere
    folder = tempfile.mkdtemp()
    try:
        execute_plan(made.save(Path(folder) / "in"), Path(folder) / "out", chunk_bytes=chunk_bytes)
        assert wrong(made, Path(folder) / "out") == []
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("descriptor", [False, True])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_experts_uniform_and_folded_with_tensor_parallelism(tmp_path, descriptor, tp, dp):
    placement = ((0, 1), (2, 3))
    weights = {w: random_full((4, 2, 3), 40 + i) for i, w in enumerate(("w1", "w2", "w3"))}
    layer = ExpertLayer("mlp.experts", weights, placement, descriptor=descriptor)
    dense = [Param("gate", random_full((3, 2), 1)), Param("up", random_full((4, 2), 2), COLUMN)]
    dense.append(Param("down", random_full((2, 4), 3), ROW if tp > 1 else REPLICATED))
    made = make(World(stage=2, tp=tp, dp=dp), dense, [layer])
    execute_plan(made.save(tmp_path / "in"), tmp_path / "out", chunk_bytes=8)
    assert wrong(made, tmp_path / "out") == []
