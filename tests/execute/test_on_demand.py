"""Parts of shards straight from the files of another topology: what cutting F again gives, and nothing else is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import synthetic
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import COLUMN, REPLICATED, ROW, Cut, Param, World, make, random_full

from deepspeed_affine.errors import IntegrityError, UnsupportedLayoutError
from deepspeed_affine.execute import tensor_files
from deepspeed_affine.execute.checkpoint import read_checkpoint
from deepspeed_affine.execute.on_demand import OnDemand
from deepspeed_affine.execute.planned_part import PlannedPart
from deepspeed_affine.execute.tensor_files import ConversionOptions
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, contiguous_split_map, replicated_map
from deepspeed_affine.lowering.policy import ScaledStates
from deepspeed_affine.lowering.stock_rules import NEWEST_KNOWN, StockRules
from deepspeed_affine.storage.files import ByteReader

ROWS = 13
VOCABULARY = Cut("vocab", original_rows=ROWS)
SWIGLU = Cut("sub", sub_sizes=(8, 8))
WORLDS = {
    "zero1": World(),
    "zero1_dp3": World(dp=3, align=2),
    "zero2_tp2_dp2": World(stage=2, tp=2, dp=2, align=2),
    "bf16opt_tp4": World(tp=4, dp=2, prefix="bf16_", align=4),
    "pp2_tp2": World(pp=2, tp=2, dp=2, align=2),
    "zero3_dp3": World(stage=3, dp=3),
    "zero3_tp2_dp2": World(stage=3, tp=2, dp=2),
}


def params(world):
    height = -(-ROWS // world.tp) * world.tp if world.stage < 3 or world.tp > 1 else ROWS
    padded = torch.cat([random_full((ROWS, 4), 1), torch.full((height - ROWS, 4), float("nan"))])
    return [
        Param("embed", padded, VOCABULARY),
        Param("norm", random_full((6,), 2), REPLICATED),
        Param("up", random_full((8, 6), 3), COLUMN),
        Param("down", random_full((6, 8), 4), ROW, group=1),
        Param("gate", random_full((16, 3), 5), SWIGLU, stages=(world.pp - 1,)),
    ]


class Source:
    """A synthetic checkpoint on the disk, planned on demand."""

    def __init__(self, world, folder, made=None, **options):
        self.made = made or make(world, params(world))
        self.path = self.made.save(folder)
        self.reader = ByteReader()
        rules = StockRules.for_version(NEWEST_KNOWN)
        self.plans = OnDemand(
            read_checkpoint(self.path), ConversionOptions(rules, strict=False, **options), self.reader
        )

    def part(self, name, state, layout, rank, start=0, numel=None):
        numel = layout.shard_numel(rank) if numel is None else numel
        return PlannedPart(self.plans.tensors(name)[state], self.plans.storages, layout, rank, start, numel)

    def filled(self, *where, dtype=torch.float32, power=1, **window):
        part = self.part(*where, **window)
        out = torch.full((part.numel,), 77.0, dtype=dtype)
        part.fill(out, self.reader, power=power)
        return out, part


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = Source(WORLDS[name], tmp_path_factory.mktemp("saved"))
        return made[name]

    return get


def targets(shape):
    """How an engine may hold it: whole, or along either axis, evenly and not."""
    yield replicated_map(shape, 2), lambda full, rank: full
    for axis, extent in enumerate(shape):
        for sizes in ([extent // 2, extent - extent // 2], [1, extent - 3, 2]):
            starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
            yield (
                contiguous_split_map(shape, sizes, axis),
                lambda full, rank, axis=axis, sizes=sizes, starts=starts: full.narrow(axis, starts[rank], sizes[rank]),
            )


@pytest.mark.parametrize("world", WORLDS)
def test_every_shard_of_every_state_is_cut_from_f_without_f(sources, world):
    source = sources(world)
    for (name, state), full in source.made.truth.items():
        for layout, cut in targets(tuple(full.shape)):
            for rank in layout.ranks:
                out, part = source.filled(name, state, layout, rank)
                expected = cut(full, rank).flatten()
                assert torch.equal(out, expected), (name, state, rank)
                assert part.covered == expected.numel()
                assert part.nbytes == expected.numel() * 4
        assert set(source.plans.states[name]) == {"fp32", "exp_avg", "exp_avg_sq", "step"}


@settings(max_examples=60)
@given(data=st.data())
def test_any_interval_of_a_shard_is_what_lies_there(sources, data):
    source = sources(data.draw(st.sampled_from(sorted(WORLDS))))
    name, state = data.draw(st.sampled_from(sorted(source.made.truth)))
    full = source.made.truth[name, state]
    layout, cut = data.draw(st.sampled_from(list(targets(tuple(full.shape)))))
    rank = data.draw(st.sampled_from(layout.ranks))
    shard = cut(full, rank).flatten()
    start = data.draw(st.integers(0, shard.numel()))
    numel = data.draw(st.integers(0, shard.numel() - start))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    out, _ = source.filled(name, state, layout, rank, start=start, numel=numel, dtype=dtype)
    assert torch.equal(out, shard[start : start + numel].to(dtype))


@pytest.mark.parametrize("world", [name for name in WORLDS if name != "zero3_dp3"])
def test_padding_of_either_vocabulary_is_neither_read_nor_made_up(sources, world):
    source = sources(world)
    full = source.made.truth["embed", "fp32"]
    for height in (ROWS, ROWS + 1, 3 * ROWS):
        sizes = [height // 2, height - height // 2]
        layout = contiguous_split_map((height, 4), sizes, 0)
        for rank, first in ((0, 0), (1, sizes[0])):
            out, part = source.filled("embed", "fp32", layout, rank)
            real = full[first : first + sizes[rank]]
            expected = torch.cat([real, torch.zeros(sizes[rank] - len(real), 4)])
            assert torch.equal(out, expected.flatten())
            assert part.covered == real.numel()
    for shape in ((ROWS, 4), source.plans.tensors("embed")["fp32"].map_shape):
        assert not source.plans.take_as_copies("embed", shape)


def test_bytes_read_are_those_of_the_part(sources):
    source = sources("zero2_tp2_dp2")
    layout = contiguous_split_map((8, 6), [2, 6], 0)
    read = []

    class Counting(ByteReader):
        def read_into(self, path, offset, out):
            read.append(out.nbytes)
            super().read_into(path, offset, out)

    part = source.part("up", "exp_avg", layout, 0)
    part.fill(torch.empty(part.numel), Counting())
    assert sum(read) == part.nbytes == 2 * 6 * 4


def scaled_source(tmp_path, **options):
    """A bias that both tensor-parallel ranks hold halved, as its own map says."""
    world = World(tp=2, dp=2)
    bias = random_full((6,), 9)
    layout = ParamAffineMap(
        (6,),
        {0: (6,), 1: (6,)},
        {rank: [AffinePiece((6,), 0, (1,), 0, (1,), (0, 1), 1 / 3)] for rank in (0, 1)},
    )
    world = replace(
        world,
        version=0.5,
        info={"affine_map": {"version": 1, "params": {synthetic.exact("bias"): layout.to_dict()}}},
    )
    made = make(world, [Param("bias", bias, REPLICATED), Param("up", random_full((8, 6), 3), COLUMN)])
    return Source(world, tmp_path, made, **options), bias


def test_storages_are_described_once_however_many_parameters_are_asked_for(tmp_path, monkeypatch):
    """Else planning the few trained parameters of a large frozen model takes the product of the two."""
    described = []
    monkeypatch.setattr(
        tensor_files, "source_storage", lambda ref, real=tensor_files.source_storage: described.append(ref) or real(ref)
    )
    frozen = [Param(f"frozen{n}", random_full((3,), n), kind="frozen") for n in range(20)]
    trained = [Param(f"trained{n}", random_full((3,), n)) for n in range(20)]
    source = Source(World(), tmp_path / "in", make(World(), [*frozen, *trained]))
    for param in trained:
        assert set(source.plans.tensors(param.name)) == {"fp32", "exp_avg", "exp_avg_sq"}
    assert len(source.plans.storages) >= 20 + 3
    # Beside them the step of each parameter.
    assert len(described) <= len(source.plans.storages) + len(trained)


def test_elements_a_rank_saved_twice_count_once(tmp_path):
    twice = ParamAffineMap((4,), {0: (8,)}, {0: [AffinePiece((4,), 0, (1,), at, (1,), (0,)) for at in (0, 4)]})
    world = World(
        version=0.5, info={"affine_map": {"version": 1, "params": {synthetic.exact("keys"): twice.to_dict()}}}
    )
    full = random_full((4,), 9)
    made = make(world, [Param("keys", torch.cat([full, full]), REPLICATED)])
    source = Source(world, tmp_path, made)
    out, part = source.filled("keys", "fp32", replicated_map((6,), 1), 0)
    assert torch.equal(out, torch.cat([full, torch.zeros(2)]))
    assert (part.covered, part.nbytes) == (4, 16)


def test_scales_of_both_sides_are_applied_as_converting_and_loading_would(tmp_path):
    source, stored = scaled_source(tmp_path, scaled_states=ScaledStates.POWER)
    third, fifth = 1 / 3, 1 / 5
    target = ParamAffineMap((6,), {0: (6,)}, {0: [AffinePiece((6,), 0, (1,), 0, (1,), (0,), fifth)]})
    out, _ = source.filled("bias", "fp32", target, 0)
    assert torch.equal(out, (stored / third) * fifth)
    moment = source.made.truth["bias", "exp_avg"]
    out, _ = source.filled("bias", "exp_avg", target, 0, power=-1)
    assert torch.equal(out, (moment / third**-1) * fifth**-1)


def test_states_of_a_scaled_parameter_are_refused_or_zeros(tmp_path):
    source, _ = scaled_source(tmp_path / "a", scaled_states=ScaledStates.REFUSE)
    with pytest.raises(UnsupportedLayoutError, match="the ranks hold the parameter scaled"):
        source.plans.tensors("bias")
    source, _ = scaled_source(tmp_path / "b", scaled_states=ScaledStates.RESET)
    assert source.plans.tensors("bias")["exp_avg"].fill == "zero"


def test_weights_of_low_precision_arrive_as_they_are(tmp_path):
    world = World(module_dtype=torch.bfloat16)
    frozen = random_full((40, 30), 8)
    made = make(world, [Param("up", random_full((8, 6), 3)), Param("frozen", frozen, kind="frozen")])
    source = Source(world, tmp_path, made)
    layout = contiguous_split_map((40, 30), [10, 20], 1)
    for dtype in (torch.bfloat16, torch.float32):
        out, _ = source.filled("frozen", "fp32", layout, 1, dtype=dtype)
        assert torch.equal(out, frozen[:, 10:].to(torch.bfloat16).to(dtype).flatten())


def test_copies_that_differ_are_found_by_reading_them(tmp_path):
    world = World(tp=2, dp=2, align=2)
    made = make(world, params(world))
    source = Source(world, tmp_path / "good", made)
    assert [source.plans.drift(name) for name in source.plans.states] == [[]] * 5
    spoilt = made.copy()
    address = spoilt.optim(0, 1)["param_slice_mappings"][0]["norm"]
    spoilt.optim(0, 1)["base_optimizer_state"]["state"][0]["exp_avg"][address.start] += 1
    source = Source(world, tmp_path / "bad", spoilt)
    (drift,) = source.plans.drift("norm")
    assert (drift.state, drift.first, drift.differing) == ("exp_avg", (0,), 1)


def test_copies_of_what_the_module_holds_are_compared_by_their_checksums(tmp_path):
    world = World(tp=2)
    made = make(
        world, [Param("up", random_full((8, 6), 3), COLUMN), Param("scale", random_full((5,), 8), kind="frozen")]
    )
    Source(world, tmp_path / "good", made)
    made.model(1)["module"]["scale"][2] += 1
    with pytest.raises(IntegrityError, match="'scale', state 'fp32': tp 0 and tp 1 saved different values"):
        Source(world, tmp_path / "bad", made)


def test_what_no_pattern_names_is_taken_for_copies_where_the_engine_holds_it_whole(tmp_path):
    world = World(tp=2, dp=2, align=2)
    made = make(world, params(world))
    for mp in (0, 1):
        made.model(mp)["universal_checkpoint_info"]["tp_replicated_parameter_patterns"] = []
    source = Source(world, tmp_path / "forgot", made)
    assert source.plans.tensors("norm")["fp32"].shape == (12,)
    assert not source.plans.take_as_copies("norm", (5,))
    assert source.plans.take_as_copies("norm", (6,))
    out, _ = source.filled("norm", "exp_avg", replicated_map((6,), 1), 0)
    assert torch.equal(out, made.truth["norm", "exp_avg"])
    assert not source.plans.take_as_copies("down", (6, 4))
    frozen = make(
        world, [Param("up", random_full((8, 6), 3), COLUMN), Param("scale", random_full((5,), 8), kind="frozen")]
    )
    for mp in (0, 1):
        frozen.model(mp)["universal_checkpoint_info"]["tp_replicated_parameter_patterns"] = []
    of_module = Source(world, tmp_path / "frozen", frozen)
    assert of_module.plans.take_as_copies("scale", (5,))
    out, _ = of_module.filled("scale", "fp32", replicated_map((5,), 1), 0)
    assert torch.equal(out, frozen.truth["scale", "fp32"])
    address = made.optim(0, 1)["param_slice_mappings"][0]["norm"]
    made.optim(0, 1)["single_partition_of_fp32_groups"][0][address.start] += 1
    source = Source(world, tmp_path / "differ", made)
    assert source.plans.tensors("norm")["fp32"].shape == (12,)
    with pytest.raises(IntegrityError, match="Copies of one value must agree"):
        source.plans.take_as_copies("norm", (6,))
