"""Experts as maps over expert-parallel ranks, from records that may say anything."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.errors import AffineError, CheckpointFormatError, InvalidMapError
from deepspeed_affine.lowering.experts import (
    ExpertLayer,
    NativeExperts,
    expert_layers,
    expert_map,
    folded_expert_rank,
    recorded_expert_rank,
    zero12_expert_rank,
)


def record(**changes):
    base = {
        "expert_key_prefix": "m.experts",
        "moe_layer_id": 0,
        "num_experts": 4,
        "num_local_experts": 2,
        "ep_size": 2,
        "ep_rank": 1,
        "expert_data_parallel_rank": 3,
    }
    return {**base, **changes}


def placement(*ranks, count=4, version=1):
    return {
        "version": version,
        "num_experts": count,
        "ep_size": len(ranks),
        "ranks": [{"rank": rank, "experts": list(experts)} for rank, experts in enumerate(ranks)],
    }


@st.composite
def layers(draw):
    count, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    held = [draw(st.sets(st.integers(0, count - 1))) for _ in range(ranks)]
    for expert in range(count):
        if not any(expert in own for own in held):
            held[draw(st.integers(0, ranks - 1))].add(expert)
    return ExpertLayer("m", 0, count, tuple(tuple(draw(st.permutations(sorted(own)))) for own in held))


@given(layers(), st.sampled_from([(), (3,), (2, 3), (0, 2)]))
def test_every_rank_holds_its_experts_in_packed_order(layer, inner):
    full = torch.randn(layer.num_experts, *inner)
    layout = expert_map(layer, "m.w1", inner)
    layout.validate()
    shards = {}
    for rank, experts in enumerate(layer.placement):
        shards[rank] = layout.extract(full, rank)
        assert torch.equal(shards[rank], full[list(experts)])
    assert torch.equal(layout.rebuild(shards), full)
    assert layout.canonical() == layout


def test_uniform_and_explicit_records_mean_the_same():
    uniform = expert_layers([record()], file="f")["m.experts.w1"]
    explicit = expert_layers([record(expert_placement=placement((0, 1), (2, 3)))], file="f")["m.experts.w1"]
    assert uniform == explicit
    assert uniform.placement == ((0, 1), (2, 3))
    assert uniform.ep_size == 2
    assert uniform.params == ("m.experts.w1", "m.experts.w2", "m.experts.w3")


def test_no_record_means_no_layer():
    assert expert_layers(None, file="f") == {}
    assert expert_layers([], file="f") == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_key_prefix": None},
        {"expert_key_prefix": 3},
        {"num_experts": 0},
        {"num_experts": "4"},
        {"num_experts": True},
        {"num_experts": 5},
        {"num_experts": 2**70},
        {"num_local_experts": 3},
        {"num_local_experts": -2, "ep_size": -2},
        {"ep_size": 0},
        {"ep_size": None},
        {"moe_layer_id": "x"},
        {"moe_layer_id": -1},
        {"affine_maps": 3},
        {"affine_maps": {"version": 1, "params": [1]}},
        {"expert_placement": 7},
        {"expert_placement": placement((0, 1), (2, 3), version=2)},
        {"expert_placement": placement((0, 1), (2, 3), count=5)},
        {"expert_placement": placement((0, 1, 2, 3))},
        {"expert_placement": placement((0, 1), (2, 2))},
        {"expert_placement": placement((0, 1), (2, 4))},
        {"expert_placement": placement((0, 1), (2, -1))},
        {"expert_placement": placement((0, 1), (2,))},
        {"expert_placement": {**placement((0, 1), (2, 3)), "ranks": None}},
        {"expert_placement": {**placement((0, 1), (2, 3)), "ranks": [None, None]}},
        {"expert_placement": {**placement((0, 1), (2, 3)), "ranks": [{"rank": 0, "experts": [0]}] * 2}},
        {"expert_placement": {**placement((0, 1), (2, 3)), "ranks": [{"rank": 0}, {"rank": 1}]}},
    ],
)
def test_records_that_contradict_themselves_are_refused(changes):
    with pytest.raises(AffineError):
        expert_layers([record(**changes)], file="f")


@pytest.mark.parametrize("value", [3, "x", {"a": 1}, [None], [3]])
def test_records_of_another_kind_are_refused(value):
    with pytest.raises(CheckpointFormatError, match="ds_autoep_layers"):
        expert_layers(value, file="f")


def test_two_layers_of_one_prefix_are_refused():
    with pytest.raises(CheckpointFormatError, match="two expert layers"):
        expert_layers([record(), record()], file="f")


@pytest.mark.parametrize(
    ("maps", "match"),
    [
        ({"version": 2, "params": {}}, "version 2"),
        ({"version": 1}, "none for this parameter"),
        ({"version": 1, "params": {"m.experts.w2": {}}}, "none for this parameter"),
    ],
)
def test_maps_beside_the_placement_must_be_readable(maps, match):
    layer = expert_layers([record(affine_maps=maps)], file="f")["m.experts.w1"]
    with pytest.raises(CheckpointFormatError, match=match):
        expert_map(layer, "m.experts.w1", (2,))


def test_a_map_that_disagrees_with_the_placement_is_refused():
    other = expert_layers([record(expert_placement=placement((0, 2), (1, 3)))], file="f")["m.experts.w1"]
    told = expert_map(other, "m.experts.w1", (2,)).to_dict()
    layer = expert_layers([record(affine_maps={"version": 1, "params": {"m.experts.w1": told}})], file="f")
    with pytest.raises(InvalidMapError, match="disagrees"):
        expert_map(layer["m.experts.w1"], "m.experts.w1", (2,))


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_expert_ranks_and_their_data_ranks_are_a_grid(ep_size, edp, data_first):
    places = [zero12_expert_rank(rank, ep_size * edp, ep_size, data_first) for rank in range(ep_size * edp)]
    assert sorted(places) == [(ep, dp) for ep in range(ep_size) for dp in range(edp)]
    if not data_first:
        assert [ep for ep, _ in places[:ep_size]] == list(range(ep_size))


def test_a_data_degree_that_does_not_divide_is_refused():
    with pytest.raises(CheckpointFormatError, match="not divisible"):
        zero12_expert_rank(0, 5, 2, False)


def test_recorded_and_folded_ranks():
    layer = expert_layers([record()], file="f")["m.experts.w1"]
    assert recorded_expert_rank(record(), layer, file="f") == (1, 3)
    folding = {"ep_rank": 1, "param_families": {"m.experts.w1": {"zero_partition_rank": 2}}}
    assert folded_expert_rank(folding, "m.experts.w1", layer, file="f") == (1, 2)
    for bad in (None, 2, {}, {"ep_rank": 2, "param_families": folding["param_families"]}, {"ep_rank": 1}):
        with pytest.raises(CheckpointFormatError):
            folded_expert_rank(bad, "m.experts.w1", layer, file="f")
    with pytest.raises(CheckpointFormatError, match="rank 2"):
        recorded_expert_rank(record(ep_rank=2), layer, file="f")
    with pytest.raises(CheckpointFormatError):
        recorded_expert_rank({}, layer, file="f")


STEM = "l.deepspeed_moe.experts.deepspeed_experts."


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_native_experts_get_global_names_once_each(ep_size, local, edp):
    count = ep_size * local
    native = NativeExperts.from_names([f"{STEM}{n}.w" for n in range(count)], [f"{STEM}{n}.w" for n in range(local)])
    placed = [
        native.place(f"{STEM}{n}.w", rank, ep_size * edp, False) for rank in range(ep_size * edp) for n in range(local)
    ]
    assert sorted(placed) == sorted((f"{STEM}{n}.w", rank) for n in range(count) for rank in range(edp))
    assert native.place("dense.w", 0, ep_size * edp, False) is None
    shapes = {f"{STEM}{n}.w": ((2,),) for n in range(local)}
    assert set(native.globalised({**shapes, "dense": ((1,),)})) == {"dense", *(f"{STEM}{n}.w" for n in range(count))}


@pytest.mark.parametrize(("files", "local"), [(4, 3), (4, 0), (3, 2)])
def test_native_experts_that_do_not_divide_are_refused(files, local):
    with pytest.raises(CheckpointFormatError, match="expert file is missing"):
        NativeExperts.from_names([f"{STEM}{n}.w" for n in range(files)], [f"{STEM}{n}.w" for n in range(local)])


def test_native_experts_without_a_single_expert_file_are_refused_by_layer():
    local = ["moe.deepspeed_moe.experts.deepspeed_experts.1.w", "gate"]
    with pytest.raises(CheckpointFormatError, match="holds 2 of its experts") as caught:
        NativeExperts.from_names([], local)
    assert caught.value.param == "moe.deepspeed_moe.experts.deepspeed_experts."


def test_a_stored_map_that_is_malformed_is_refused_by_parameter():
    layer = ExpertLayer("m.experts", 0, 2, ((0,), (1,)), {"version": 1, "params": {"m.experts.w1": {"ranks": {}}}})
    with pytest.raises(AffineError, match=r"m\.experts\.w1") as caught:
        expert_map(layer, "m.experts.w1", (2,))
    assert caught.value.param == "m.experts.w1"


@pytest.mark.parametrize("changes", [{"dest": [0, [0, 1]]}, {"shape": [1]}, {"source": [9, [2, 1]]}])
def test_a_stored_map_that_contradicts_itself_is_refused_by_parameter(changes):
    layer = ExpertLayer("m.experts", 0, 2, ((0,), (1,)))
    entry = expert_map(layer, "m.experts.w1", (2,)).to_dict()
    entry["ranks"][0]["pieces"][0].update(changes)
    spoiled = ExpertLayer("m.experts", 0, 2, ((0,), (1,)), {"version": 1, "params": {"m.experts.w1": entry}})
    with pytest.raises(AffineError, match=r"m\.experts\.w1") as caught:
        expert_map(spoiled, "m.experts.w1", (2,))
    assert caught.value.param == "m.experts.w1"
