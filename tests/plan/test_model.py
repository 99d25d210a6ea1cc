"""Whole models on whole topologies: every process ends with its own shards, whoever sends them."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch

from deepspeed_affine.errors import AffineError, InvalidMapError, PolicyError
from deepspeed_affine.execute.transfer import run_plan
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, Region, contiguous_split_map, replicated_map
from deepspeed_affine.plan.grid import Tensor, Topology, state_placements, weight_placements
from deepspeed_affine.plan.model import ModelPlan, plan_model
from deepspeed_affine.plan.placement import Placement
from deepspeed_affine.plan.transfer import plan_transfer

MODEL = [
    Tensor("embed", (13, 4), 0, 0, 0.0),
    Tensor("q", (12, 4), 0, 6, 0.2),
    Tensor("k", (4, 4), 0, 2, 0.2),
    Tensor("o", (4, 12), 1, 6, 0.4),
    Tensor("norm", (5,), None, 0, 0.6),
    Tensor("gate", (10, 4), 0, 0, 0.7),
    Tensor("scalar", (), None, 0, 0.9),
    Tensor("head", (13, 4), 0, 0, 1.0),
]
TOPOLOGIES = [
    Topology(tp, pp, dp, zero)
    for tp, pp, dp, zero in [
        (1, 1, 1, 0),
        (2, 1, 1, 0),
        (4, 1, 2, 1),
        (3, 2, 2, 1),
        (2, 3, 1, 2),
        (1, 1, 5, 3),
        (2, 2, 3, 3),
        (6, 1, 2, 0),
    ]
]


def values(tensors, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {each.name: torch.randn(each.shape, generator=rng, dtype=torch.float64) for each in tensors}


def shards(placements, full):
    """What every process holds: name to process to shard."""
    return {
        name: {
            rank: place.layout.extract(full[name], location)
            for location, ranks in place.holders.items()
            for rank in ranks
        }
        for name, place in placements.items()
    }


def carried_out(plan, source, target):
    out = {
        name: {
            rank: torch.full(place.layout.shard_shapes[location], float("nan"), dtype=torch.float64)
            for location, ranks in place.holders.items()
            for rank in ranks
        }
        for name, place in target.items()
    }
    for name, each in plan.plans.items():
        run_plan(each, source[name], out[name])
    return out


def same(left, right):
    assert left.keys() == right.keys()
    for name, by_rank in left.items():
        assert by_rank.keys() == right[name].keys()
        assert all(torch.equal(shard, right[name][rank]) for rank, shard in by_rank.items()), name


@pytest.mark.parametrize(("before", "after"), list(itertools.product(TOPOLOGIES, TOPOLOGIES)), ids=str)
def test_every_process_ends_with_its_shards(before, after):
    full = values(MODEL)
    for place in (weight_placements, state_placements):
        source, target = place(MODEL, before, 8), place(MODEL, after, 8)
        for policy, same_ranks in (("balanced", True), ("balanced", False), ("lowest", True)):
            plan = plan_model(target, source, policy=policy, same_ranks=same_ranks, bound=True)
            same(carried_out(plan, shards(source, full), target), shards(target, full))
            assert plan.balance.heaviest == max(plan.sent.values(), default=0)
            assert plan.balance.bound <= plan.balance.heaviest
            assert plan.moved_bytes + plan.local_bytes == sum(
                8 * place.layout.shard_numel(location) * len(ranks)
                for place in target.values()
                for location, ranks in place.holders.items()
            )
            assert sum(plan.received.values()) == plan.moved_bytes


def test_nothing_a_process_holds_is_fetched():
    """From a topology to itself, and from every copy to one, nothing moves."""
    for topology in TOPOLOGIES:
        places = weight_placements(MODEL, topology, 2)
        assert plan_model(places, places).moved_bytes == 0
    wide, narrow = Topology(1, 1, 4, 0), Topology(1, 1, 2, 0)
    assert plan_model(weight_placements(MODEL, narrow, 2), weight_placements(MODEL, wide, 2)).moved_bytes == 0


def test_copies_share_the_sending():
    large = [Tensor("w", (4096, 1024), 0)]
    source = weight_placements(large, Topology(1, 1, 8, 0), 4)
    target = weight_placements(large, Topology(8, 1, 1, 0), 4)
    lowest = plan_model(target, source, policy="lowest", same_ranks=False)
    even = plan_model(target, source, same_ranks=False)
    assert max(lowest.sent.values()) == 4096 * 1024 * 4
    assert set(even.sent.values()) == {4096 * 1024 * 4 // 8}
    # The processes of one machine serve each other.
    hosts = {rank: rank // 4 for rank in range(8)}
    near = plan_model(target, source, same_ranks=False, hosts=hosts)
    assert all(hosts[a] == hosts[b] for a, b in near.traffic)


def test_crumbs_are_balanced_together():
    crumbs = [Tensor(f"norm{i}", (8192,), None, 0, 0.0) for i in range(64)]
    source = weight_placements(crumbs, Topology(1, 1, 4, 0), 2)
    target = weight_placements(crumbs, Topology(1, 1, 16, 0), 2)
    plan = plan_model(target, source)
    # Twelve processes lack a megabyte each; four have it.
    assert set(plan.sent.values()) == {3 * 64 * 8192 * 2}
    assert len(plan.traffic) == 16


def test_a_large_region_is_shared_by_its_holders_across_the_model():
    tensors = [Tensor("a", (3 << 20, 4), None, 0, 0.0), Tensor("b", (7,), None, 0, 0.0)]
    source = weight_placements(tensors, Topology(1, 1, 3, 0), 4)
    target = weight_placements(tensors, Topology(1, 1, 1, 0), 4)
    plan = plan_model(target, source, same_ranks=False)
    full = {each.name: torch.arange(float(torch.tensor(each.shape).prod())).view(each.shape) for each in tensors}
    out = {"a": {0: torch.zeros(tensors[0].shape)}, "b": {0: torch.zeros(tensors[1].shape)}}
    for name, each in plan.plans.items():
        run_plan(each, dict.fromkeys(range(3), full[name]), out[name])
        assert torch.equal(out[name][0], full[name])
    assert len(plan.sent) == 3
    assert max(plan.sent.values()) <= 1.05 * plan.moved_bytes / 3


def test_a_plan_is_data_and_deterministic():
    source, target = (state_placements(MODEL, each, 12) for each in (TOPOLOGIES[3], TOPOLOGIES[6]))
    plan = plan_model(target, source)
    shuffled = list(source.items())
    random.Random(3).shuffle(shuffled)
    again = plan_model(target, dict(shuffled))
    assert again == plan
    # Two equal regions and three equal holders: who sends which depends on the names alone.
    ties = [Tensor(name, (3 << 18, 4), None, 0, 0.0) for name in "abcde"]
    wide, narrow = (weight_placements(ties, Topology(1, 1, dp, 0), 4) for dp in (3, 2))
    straight = plan_model(narrow, wide, same_ranks=False)
    assert plan_model(dict(reversed(narrow.items())), wide, same_ranks=False) == straight
    assert again.plan_id() == plan.plan_id()
    read = ModelPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert read == plan
    assert read.traffic == plan.traffic
    assert hash(read) == hash(plan)
    assert {plan: "kept"}[read] == "kept"
    assert read.plan_id() == plan.plan_id()


def test_a_plan_does_not_depend_on_the_order_of_locations_and_holders():
    layout = contiguous_split_map((4 << 20, 2), (2 << 20, 2 << 20), 0)
    source = Placement(replicated_map((4 << 20, 2), 1), {0: (0, 1, 2)}, 2)
    plans = [
        plan_model({"w": Placement(layout, holders, 2)}, {"w": source})
        for holders in ({0: (3, 5), 1: (4, 6)}, {0: (5, 3), 1: (4, 6)}, {1: (6, 4), 0: (3, 5)})
    ]
    assert plans[0] == plans[1] == plans[2]
    assert len({plan.plan_id() for plan in plans}) == 1


def test_the_balance_is_that_of_the_plan_where_rows_do_not_come_out_even():
    """A region two holders share is cut between its rows, and not where their loads would be equal."""
    layout = replicated_map((3, 1000), 1)
    source, target = Placement(layout, {0: (0, 1)}, 8192), Placement(layout, {0: (2,)}, 8192)
    plan = plan_model({"w": target}, {"w": source}, bound=True)
    assert plan.sent == {0: 8192 * 1500, 1: 8192 * 1500}
    odd = replicated_map((3,), 1)
    source, target = Placement(odd, {0: (0, 1)}, 8 << 20), Placement(odd, {0: (2,)}, 8 << 20)
    plan = plan_model({"w": target}, {"w": source}, bound=True)
    assert sorted(plan.sent.values()) == [8 << 20, 16 << 20]
    assert (plan.balance.heaviest, plan.balance.bound) == (16 << 20, 12 << 20)


def test_what_is_wrong_with_a_map_is_said_of_its_parameter_and_side():
    whole = Placement.own(replicated_map((4, 2), 1), 4)
    first = ParamAffineMap((4, 2), {0: (2,)}, {0: [AffinePiece((2,), 0, (1,), 0, (1,), (0,))]})
    holed = Placement.own(first, 4)
    scaled = Placement.own(replicated_map((4, 2), 1, 1e-200), 4), Placement.own(replicated_map((4, 2), 1, 1e200), 4)
    for target, source, options, said in (
        (holed, whole, {}, "The target map"),
        (whole, holed, {}, "The source map"),
        (whole, holed, {"partial": True}, "Target rank 0 needs 8 elements"),
        (whole, whole, {"valid_rows": {"w": 5}}, "valid_rows is 5"),
        (*scaled, {}, ".*whose ratio"),
    ):
        with pytest.raises(AffineError, match=f"^parameter 'w': {said}") as raised:
            plan_model({"w": target}, {"w": source}, **options)
        assert raised.value.param == "w"


@pytest.mark.parametrize(
    "option",
    [
        {"valid_rows": {"embd": 13}},
        {"valid_rows": {0: 13}},
        {"valid_rows": 13},
        {"hosts": {"0": 1}},
        {"hosts": [0, 0]},
        {"same_ranks": "no"},
        {"partial": None},
        {"limits": 7},
    ],
)
def test_an_option_that_would_say_nothing_is_refused(option):
    """Rows of a vocabulary under a name that is misspelt would be moved with the padding."""
    places = weight_placements(MODEL[:1], Topology(2), 4)
    name = next(iter(option))
    with pytest.raises((InvalidMapError, PolicyError), match=f"{name} (is|names)"):
        plan_model(places, places, **option)
    assert plan_model(places, {**weight_placements(MODEL, Topology(2), 4)}, valid_rows={"head": 13}).segments


def weight_plan(itemsize):
    layout = replicated_map((4,), 2)
    return {**plan_transfer(layout, layout).to_dict(), "itemsize": itemsize}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"format": True},
        {"params": []},
        {"params": {"w": None}},
        {"params": {"w": {"segments": []}}},
        {"params": {3: weight_plan(4)}},
        {"params": {"w": weight_plan(0)}},
        {"params": {"w": weight_plan(None)}},
        {"same_ranks": 1},
        {"policy": "lowest"},
    ],
)
def test_a_damaged_plan_is_refused(change):
    places = weight_placements(MODEL[:1], Topology(2), 4)
    with pytest.raises(InvalidMapError):
        ModelPlan.from_dict({**plan_model(places, places).to_dict(), **change})


def test_one_location_per_process_is_the_transfer_of_one_parameter():
    source, target = replicated_map((64, 8), 3), contiguous_split_map((64, 8), (20, 44), 0)
    plan = plan_model({"w": Placement.own(target, 4)}, {"w": Placement.own(source, 4)}, same_ranks=False)
    assert plan.plans["w"] == plan_transfer(target, source)


def test_two_paddings_and_inexact_scales_are_told():
    source = {
        "v": Placement.own(contiguous_split_map((16, 2), (8, 8), 0), 4),
        "b": Placement.own(replicated_map((4,), 2, 0.5), 4),
    }
    target = {"v": Placement(contiguous_split_map((15, 2), (5,) * 3, 0), {0: (0, 3), 1: (1, 4), 2: (2, 5)}, 4)}
    target["b"] = Placement(replicated_map((4,), 3, 1 / 3), {0: (0, 3), 1: (1, 4), 2: (2, 5)}, 4)
    plan = plan_model(target, source, valid_rows={"v": 13})
    assert {rank: [list(r.offsets()) for r in regions] for rank, regions in plan.plans["v"].unfilled.items()} == {
        2: [[6, 7, 8, 9]],
        5: [[6, 7, 8, 9]],
    }
    assert [name for name, _ in plan.inexact()] == ["b"]


def test_what_does_not_fit_together_is_refused():
    places = weight_placements(MODEL, Topology(2), 4)
    less = {name: place for name, place in places.items() if name not in ("q", "head")}
    with pytest.raises(InvalidMapError, match=r"'q'.*\n.*'head'"):
        plan_model(places, less)
    plan_model(less, places)
    with pytest.raises(InvalidMapError, match="2 bytes in the source"):
        plan_model(places, weight_placements(MODEL, Topology(2), 2))
    layout = replicated_map((4,), 2)
    for holders in (
        *({0: (0,)}, {0: (0,), 1: ()}, {0: (0,), 1: (0,)}, {0: (0, 0), 1: (1,)}),
        *({0: (-1,), 1: (1,)}, {0: (True,), 1: (0,)}, {0: ("0",), 1: (1,)}, {0: 0, 1: 1}, None),
    ):
        with pytest.raises(InvalidMapError):
            Placement(layout, holders, 4)
    for itemsize in (0, -1, None, 2.0):
        with pytest.raises(InvalidMapError, match="itemsize"):
            Placement.own(layout, itemsize)
    for sides in (({"w": layout}, places), (places, [layout]), ({3: Placement.own(layout, 4)}, places)):
        with pytest.raises(InvalidMapError, match="parameter name to Placement"):
            plan_model(*sides)
    with pytest.raises(PolicyError, match="policy"):
        plan_model(places, places, policy="fastest")


@pytest.mark.parametrize(
    "text",
    ["", "tp", "tp0", "tp2,tp4", "zero4", "tp8;pp2", "ep2", "tp-1", "tp1234567", "tp\N{ARABIC-INDIC DIGIT THREE}"],
)
def test_a_topology_that_cannot_be_read(text):
    with pytest.raises(PolicyError, match="topology"):
        Topology.parse(text)


def test_topologies_are_read_in_any_order():
    assert Topology.parse("dp16, tp8,zero1") == Topology(8, 1, 16, 1)
    assert str(Topology.parse("pp4,tp8")) == "tp8,pp4,dp1,zero0"
    with pytest.raises(PolicyError, match="axis 2"):
        Tensor("w", (4, 4), 2)
    with pytest.raises(PolicyError, match="equal units"):
        Tensor("w", (5, 4), 0, 2)


def test_an_id_tells_every_member_of_a_plan():
    source, target = (state_placements(MODEL[:2], each, 12) for each in (TOPOLOGIES[3], TOPOLOGIES[6]))
    plan = plan_model(target, source)
    name = next(iter(plan.plans))
    one = plan.plans[name]
    segment = one.segments[-1]
    changed = [
        replace(segment, source_rank=segment.source_rank + 1),
        replace(segment, source_offset=segment.source_offset + 1),
        replace(segment, target_rank=segment.target_rank + 1),
        replace(segment, target_offset=segment.target_offset + 1),
        replace(segment, scale=2.0),
        replace(
            segment,
            shape=(*segment.shape, 1),
            source_strides=(*segment.source_strides, 1),
            target_strides=(*segment.target_strides, 1),
        ),
    ]
    others = [replace(one, segments=(*one.segments[:-1], each)) for each in changed]
    others += [replace(one, segments=one.segments[:-1]), replace(one, logical_shape=(1, *one.logical_shape))]
    others.append(replace(one, unfilled={0: (Region(0, (1,), (1,)),)}))
    plans = [replace(plan, plans={**plan.plans, name: other}) for other in others]
    plans += [
        replace(plan, same_ranks=False),
        replace(plan, itemsizes={**plan.itemsizes, name: 2}),
        replace(plan, plans={key: each for key, each in plan.plans.items() if key != name}),
    ]
    assert len({each.plan_id() for each in [plan, *plans]}) == 1 + len(plans)
