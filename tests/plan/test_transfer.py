"""Transfer plans: laws against the brute-force maps, and every way to ask for one that must be refused."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ir_worlds import random_map, recut

from deepspeed_affine.errors import BudgetExceededError, InvalidMapError, PolicyError, UnsupportedLayoutError
from deepspeed_affine.execute.transfer import run_plan
from deepspeed_affine.ir import (
    AffinePiece,
    ParamAffineMap,
    compose_maps,
    contiguous_split_map,
    replicated_map,
)
from deepspeed_affine.plan.model import plan_model
from deepspeed_affine.plan.placement import Placement
from deepspeed_affine.plan.segments import TransferSegment
from deepspeed_affine.plan.transfer import PlanBudget, plan_transfer
from deepspeed_affine.plan.transfer_plan import TransferPlan

SEEDS = st.integers(0, 2**32)
POLICIES = ("lowest", "balanced")


def worlds(seed, count, *, whole=True):
    """``count`` valid maps of one parameter, cut in unrelated ways, and a source of chance for the test itself."""
    rng = random.Random(seed)
    first = random_map(rng, whole=whole)
    found = [first]
    while len(found) < count:
        other = random_map(rng, whole=whole)
        if other.logical_shape == first.logical_shape:
            found.append(other)
    return rng, found


def full(layout):
    return torch.arange(1, layout.numel + 1, dtype=torch.float64).view(layout.logical_shape)


def shards(layout, tensor):
    return {rank: layout.extract(tensor, rank) for rank in layout.ranks}


def carried_out(plan, source_shards, target):
    """The target's shards, NaN where the plan wrote nothing."""
    out = {rank: torch.full(target.shard_shapes[rank], float("nan"), dtype=torch.float64) for rank in target.ranks}
    run_plan(plan, source_shards, out)
    return out


def addresses(segment):
    """``(source, target)`` address of every element, straight from the definition."""
    for index in itertools.product(*map(range, segment.shape)):
        yield (
            segment.source_offset + sum(i * s for i, s in zip(index, segment.source_strides, strict=True)),
            segment.target_offset + sum(i * s for i, s in zip(index, segment.target_strides, strict=True)),
        )


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[rank], right[rank]) for rank in left)


@given(SEEDS, st.sampled_from(POLICIES), st.booleans())
def test_a_plan_carried_out_is_extract_of_rebuild(seed, policy, same_ranks):
    _, (source, target) = worlds(seed, 2)
    plan = plan_transfer(target, source, policy=policy, same_ranks=same_ranks)
    given_shards = shards(source, full(source))
    assert same(carried_out(plan, given_shards, target), shards(target, source.rebuild(given_shards)))


@given(SEEDS)
def test_a_plan_after_a_plan_is_the_direct_plan(seed):
    _, (a, b, c) = worlds(seed, 3)
    start = shards(a, full(a))
    middle = carried_out(plan_transfer(b, a), start, b)
    assert same(
        carried_out(plan_transfer(c, b), middle, c),
        carried_out(plan_transfer(c, a), start, c),
    )


@given(SEEDS, st.sampled_from(POLICIES))
def test_every_target_element_is_written_exactly_once_and_read_where_it_is_held(seed, policy):
    _, (source, target) = worlds(seed, 2)
    plan = plan_transfer(target, source, policy=policy)
    held = {
        (rank, dest): at
        for rank, piece in source.pieces()
        for at, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True)
    }
    wanted = {
        (rank, dest): at
        for rank, piece in target.pieces()
        for at, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True)
    }
    written = {}
    for segment in plan.segments:
        for read, dest in addresses(segment):
            assert (segment.target_rank, dest) not in written
            written[segment.target_rank, dest] = held[segment.source_rank, read]
    assert written == wanted
    assert plan.moved_elements == len(wanted)
    assert all(min((*s.source_strides, *s.target_strides), default=1) > 0 for s in plan.segments)


@given(SEEDS, st.sampled_from(POLICIES))
def test_a_plan_does_not_depend_on_how_the_maps_are_cut_or_ordered(seed, policy):
    rng, (source, target) = worlds(seed, 2)
    plan = plan_transfer(target, source, policy=policy)
    again = plan_transfer(recut(rng, target), recut(rng, source), policy=policy)
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.plan_id() == plan.plan_id()


@given(SEEDS)
def test_a_selector_is_offered_every_holders_own_addresses(seed):
    rng, (source, target) = worlds(seed, 2)
    given_shards = shards(source, full(source))
    offered = []

    def choose(request):
        offered.append(request)
        return rng.choice(request.candidates).source_rank

    plan = plan_transfer(target, source, replica_selector=choose)
    assert same(carried_out(plan, given_shards, target), shards(target, full(source)))
    values = {rank: shard.reshape(-1).tolist() for rank, shard in given_shards.items()}
    for request in offered:
        assert len(request.candidates) > 1
        read = set()
        for candidate in request.candidates:
            segment = TransferSegment(
                candidate.source_rank,
                candidate.source_offset,
                candidate.source_strides,
                request.target_rank,
                request.target_offset,
                request.target_strides,
                request.shape,
            )
            read.add(tuple(values[candidate.source_rank][at] for at, _ in addresses(segment)))
        # Every holder has the same numbers there: those of F at the block's own place.
        assert len(read) == 1


@given(SEEDS, st.sampled_from(POLICIES))
def test_a_plan_is_data(seed, policy):
    _, (source, target) = worlds(seed, 2)
    plan = plan_transfer(target, source, policy=policy)
    read = TransferPlan.from_dict(json.loads(plan.to_json()))
    assert read == plan
    assert hash(read) == hash(plan)
    assert read.plan_id() == plan.plan_id()
    assert plan.statistics.segments == len(plan.segments)
    assert plan.statistics.plan_bytes == len(plan.to_json())


@given(SEEDS)
def test_target_ranks_alone_get_what_they_get_in_the_whole_plan(seed):
    rng, (source, target) = worlds(seed, 2)
    some = rng.sample(target.ranks, rng.randint(0, len(target.ranks)))
    plan = plan_transfer(target, source, policy="lowest", target_ranks=some)
    whole = plan_transfer(target, source, policy="lowest")
    assert plan.segments == tuple(s for s in whole.segments if s.target_rank in some)


@given(SEEDS)
def test_with_same_ranks_nothing_held_is_fetched(seed):
    _, (source, target) = worlds(seed, 2)
    plan = plan_transfer(target, source, same_ranks=True)
    held = {rank: {at for p in row for at in p.source_offsets()} for rank, row in source.pieces_by_rank.items()}
    address = {
        rank: {d: s for p in row for s, d in zip(p.source_offsets(), p.dest_offsets(), strict=True)}
        for rank, row in target.pieces_by_rank.items()
    }
    for segment in plan.segments:
        if segment.source_rank != segment.target_rank and segment.target_rank in held:
            wanted = {address[segment.target_rank][at] for _, at in addresses(segment)}
            assert not wanted & held[segment.target_rank]


@given(SEEDS)
def test_through_zero_fragments_with_padding(seed):
    """The composed map of a source (shards cut flat over storages with gaps) plans like the source itself."""
    rng, (source, target) = worlds(seed, 2)
    inner = {}
    for rank in source.ranks:
        numel = source.shard_numel(rank)
        cut = rng.randint(0, numel)
        storages = {2 * rank: (cut + 3,), 2 * rank + 1: (numel - cut + 2,)}
        inner[rank] = ParamAffineMap(
            source.shard_shapes[rank],
            storages,
            {
                2 * rank: [AffinePiece((cut,), 0, (1,), 3, (1,), [2 * rank])] if cut else [],
                2 * rank + 1: [AffinePiece((numel - cut,), cut, (1,), 0, (1,), [2 * rank + 1])] if numel > cut else [],
            },
        )
    composed = compose_maps(source, inner)
    stored = {r: torch.full((composed.shard_numel(r),), float("nan"), dtype=torch.float64) for r in composed.ranks}
    for rank, piece in composed.pieces():
        piece.dest_view(stored[rank]).copy_(piece.source_view(full(source).reshape(-1)) * piece.scale)
    out = carried_out(plan_transfer(target, composed), stored, target)
    assert same(out, shards(target, full(source)))


@pytest.mark.parametrize("source_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("target_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("vocabulary", [13, 32, 100, 50257])
def test_two_paddings_of_one_vocabulary(source_tp, target_tp, vocabulary):
    def padded(tp):
        height = -(-vocabulary // tp) * tp
        return contiguous_split_map((height, 2), (height // tp,) * tp, 0)

    source, target = padded(source_tp), padded(target_tp)
    rows = torch.randn(vocabulary, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    poisoned = torch.full(source.logical_shape, float("nan"), dtype=torch.float64)
    poisoned[:vocabulary] = rows
    plan = plan_transfer(target, source, valid_rows=vocabulary)
    out = carried_out(plan, shards(source, poisoned), target)
    joined = torch.cat([out[rank] for rank in target.ranks])
    assert torch.equal(joined[:vocabulary], rows)
    assert joined[vocabulary:].isnan().all()
    assert len(plan.segments) <= source_tp + target_tp
    padding = {
        (rank, at // 2) for rank, regions in plan.unfilled.items() for region in regions for at in region.offsets()
    }
    height = target.shard_shapes[0][0]
    assert padding == {divmod(row, height) for row in range(vocabulary, target.logical_shape[0])}


def test_the_vocabulary_example_of_the_draft():
    plan = plan_transfer(
        contiguous_split_map((14, 1), (7, 7), 0), contiguous_split_map((16, 1), (4,) * 4, 0), valid_rows=13
    )
    moved = [(s.source_rank, s.source_offset, s.target_rank, s.target_offset, s.numel) for s in plan.segments]
    assert moved == [(0, 0, 0, 0, 4), (1, 0, 0, 4, 3), (1, 3, 1, 0, 1), (2, 0, 1, 1, 4), (3, 0, 1, 5, 1)]
    assert {rank: [tuple(r.offsets()) for r in regions] for rank, regions in plan.unfilled.items()} == {1: [(6,)]}


def test_a_scaled_bias_is_moved_in_one_multiplication():
    source, target = replicated_map((6,), 4, 1 / 4), replicated_map((6,), 2, 1 / 2)
    plan = plan_transfer(target, source)
    assert {segment.scale for segment in plan.segments} == {2.0}
    assert plan.exact
    third = plan_transfer(replicated_map((6,), 3, 1 / 3), source)
    assert not third.exact
    value = torch.tensor([1.0, 1e-45, -0.0, float("inf"), 3.0, 1e30])
    out = {rank: torch.empty(6) for rank in range(2)}
    run_plan(plan, shards(source, value), out)
    assert torch.equal(out[0], (value / 4) * 2)
    moment = {rank: torch.empty(6) for rank in range(2)}
    run_plan(plan, {rank: torch.full((6,), 8.0) for rank in range(4)}, moment, scale_power=-2)
    assert torch.equal(moment[1], torch.full((6,), 2.0))
    assert TransferPlan.from_dict(json.loads(third.to_json())) == third


def test_scalars_and_empty_parameters():
    scalar = plan_transfer(replicated_map((), 2), replicated_map((), 3))
    assert [(s.source_rank, s.target_rank, s.shape) for s in scalar.segments] == [(0, 0, ()), (0, 1, ())]
    assert plan_transfer(contiguous_split_map((0, 4), (0, 0), 0), replicated_map((0, 4), 2)).segments == ()


def test_a_large_region_is_shared_out_and_a_small_one_is_not():
    target, source = contiguous_split_map((4096, 4096), (4096,), 0), replicated_map((4096, 4096), 2)
    shared = plan_transfer(target, source)
    assert [(s.source_rank, s.numel) for s in shared.segments] == [(0, 2**23), (1, 2**23)]
    assert len(plan_transfer(target, source, policy="lowest").segments) == 1
    small = plan_transfer(contiguous_split_map((64, 64), (64,), 0), replicated_map((64, 64), 2))
    assert [s.source_rank for s in small.segments] == [0]


def test_a_region_whose_rows_are_large_is_cut_within_a_row():
    wide = 3 << 21
    plan = plan_transfer(replicated_map((2, wide), 1), replicated_map((2, wide), 4))
    loads = {}
    for segment in plan.segments:
        loads[segment.source_rank] = loads.get(segment.source_rank, 0) + segment.numel
    assert sum(loads.values()) == 2 * wide
    assert max(loads.values()) <= wide


def test_partial_targets_on_request():
    source = contiguous_split_map((8, 2), (4, 4), 0)
    target = contiguous_split_map((8, 2), (8,), 0).restrict_rows(2, 6)
    with pytest.raises(InvalidMapError, match="unwritten"):
        plan_transfer(target, source)
    plan = plan_transfer(target, source, partial=True)
    assert plan.moved_elements == 8
    assert sorted(at for region in plan.unfilled[0] for at in region.offsets()) == [0, 1, 2, 3, 12, 13, 14, 15]
    half = source.restrict_rows(0, 4)
    with pytest.raises(InvalidMapError, match="No rank holds"):
        plan_transfer(contiguous_split_map((8, 2), (8,), 0), half)
    with pytest.raises(InvalidMapError, match=r"needs 8 elements, of which the source holds 4.*\(4, 0\)") as caught:
        plan_transfer(target, half, partial=True)
    assert caught.value.rank == 0


def test_an_element_held_twice_does_not_stand_for_one_that_is_missing():
    def holding(offsets):
        pieces = [AffinePiece((), offset, (), at, (), [0]) for at, offset in enumerate(offsets)]
        return ParamAffineMap((3,), {0: (len(offsets),)}, {0: pieces})

    with pytest.raises(InvalidMapError, match=r"needs 3 elements, of which the source holds 2.*\(1,\)"):
        plan_transfer(replicated_map((3,), 1), holding([0, 0, 2]), partial=True)
    with pytest.raises(InvalidMapError, match="holds 2"):
        plan_model(
            {"w": Placement.own(replicated_map((3,), 1), 4)}, {"w": Placement.own(holding([0, 0, 2]), 4)}, partial=True
        )
    # Two rows of three, of which one is held twice.
    plan = plan_transfer(replicated_map((3,), 1), holding([0, 0, 1, 2]), valid_rows=2)
    read = [pair for segment in plan.segments for pair in addresses(segment)]
    assert read in ([(0, 0), (2, 1)], [(1, 0), (2, 1)])


@given(SEEDS)
def test_a_source_that_lacks_elements_is_refused_where_they_are_wanted(seed):
    _, (source, target) = worlds(seed, 2, whole=False)
    held, wanted = ({at for _, p in each.pieces() for at in p.source_offsets()} for each in (source, target))
    if wanted <= held:
        plan = plan_transfer(target, source, partial=True)
        assert plan.moved_elements == sum(p.numel for _, p in target.pieces())
    else:
        with pytest.raises(InvalidMapError, match="of which the source holds"):
            plan_transfer(target, source, partial=True)


def test_different_parameters_are_refused():
    with pytest.raises(InvalidMapError, match="valid_rows"):
        plan_transfer(replicated_map((8, 2), 1), replicated_map((9, 2), 1))
    for rows, shape in ((9, (8, 2)), (4, (8, 3)), (4, (8,)), (4, ())):
        with pytest.raises(InvalidMapError, match=f"valid_rows is {rows}"):
            plan_transfer(replicated_map(shape, 1), replicated_map((9, 2), 1), valid_rows=rows)
    with pytest.raises(InvalidMapError, match="Rank 5"):
        plan_transfer(replicated_map((8, 2), 1), replicated_map((8, 2), 1), target_ranks=[5])


@pytest.mark.parametrize("answer", [7, None, "0", True, 1.0])
def test_a_wrong_selector_or_policy_is_the_callers_fault(answer):
    with pytest.raises(PolicyError, match="candidates"):
        plan_transfer(replicated_map((4,), 1), replicated_map((4,), 2), replica_selector=lambda request: answer)
    with pytest.raises(PolicyError, match="policy"):
        plan_transfer(replicated_map((4,), 1), replicated_map((4,), 2), policy="fastest")


def test_a_ratio_of_scales_that_is_nothing_or_endless_is_refused():
    for ours, theirs in ((1e-300, 1e300), (1e300, 1e-300), (1e-308, 2.0)):
        target, source = replicated_map((4,), 1, ours), replicated_map((4,), 2, theirs)
        with pytest.raises(UnsupportedLayoutError, match="ratio"):
            plan_transfer(target, source)
        with pytest.raises(UnsupportedLayoutError, match="ratio"):
            plan_transfer(target, source, replica_selector=lambda request: 1)
        with pytest.raises(UnsupportedLayoutError, match="ratio"):
            plan_model({"w": Placement.own(target, 4)}, {"w": Placement.own(source, 4)})


@pytest.mark.parametrize("itemsize", [0, -4, None, "4", 2.0])
def test_what_is_no_map_or_width_is_refused(itemsize):
    layout = replicated_map((4,), 2)
    with pytest.raises(InvalidMapError, match="itemsize"):
        plan_transfer(layout, layout, itemsize=itemsize)
    with pytest.raises(InvalidMapError, match="ParamAffineMap"):
        plan_transfer(layout.to_dict(), layout)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("max_ndim", 1), ("max_pieces_per_map", 7), ("max_pair_checks", 7), ("max_segments", 7), ("max_plan_bytes", 99)],
)
def test_every_budget_fails_closed(limit, value):
    source = contiguous_split_map((16, 4), (2,) * 8, 0)
    target = contiguous_split_map((16, 4), (8, 8), 0)
    whole = plan_transfer(target, source)
    assert (len(whole.segments), whole.statistics.pair_checks, whole.statistics.source_pieces) == (8, 8, 8)
    with pytest.raises(BudgetExceededError, match=limit):
        plan_transfer(target, source, replace(PlanBudget(), **{limit: value}))
    with pytest.raises(BudgetExceededError, match=f"parameter 'w'.*{limit}"):
        plan_model(
            {"w": Placement.own(target, 4)},
            {"w": Placement.own(source, 4)},
            limits=replace(PlanBudget(), **{limit: value}),
        )
    exact = replace(PlanBudget(), max_plan_bytes=whole.statistics.plan_bytes)
    assert plan_transfer(target, source, exact) == whole


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"same_ranks": "no"}, PolicyError),
        ({"partial": 1}, PolicyError),
        ({"limits": 5}, PolicyError),
        ({"target_ranks": 3}, PolicyError),
        ({"replica_selector": 5}, PolicyError),
        ({"itemsize": 2.5}, InvalidMapError),
        ({"valid_rows": True}, InvalidMapError),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(option, expected):
    layout = replicated_map((4, 4), 2)
    with pytest.raises(expected, match=f"^The {next(iter(option))} is|^{next(iter(option))} is"):
        plan_transfer(layout, layout, **option)
    with pytest.raises(InvalidMapError, match="max_segments is 'many'"):
        PlanBudget(max_segments="many")


def test_pieces_held_twice_are_counted_before_they_are_compared():
    """Shuffled single elements fold into wide blocks, each of which may share elements with every other."""
    order = random.Random(1).sample(range(400), 400)
    pieces = [AffinePiece((), at, (), 2 * number + copy, (), [0]) for number, at in enumerate(order) for copy in (0, 1)]
    source, target = ParamAffineMap((400,), {0: (800,)}, {0: pieces}), replicated_map((400,), 1)
    plan = plan_transfer(target, source)
    assert sorted(at for segment in plan.segments for _, at in addresses(segment)) == list(range(400))
    assert plan.statistics.pair_checks > 2000
    with pytest.raises(BudgetExceededError, match="2000 comparisons"):
        plan_transfer(target, source, PlanBudget(max_pair_checks=2000))
    sides = {"w": Placement.own(target, 4)}, {"w": Placement.own(source, 4)}
    with pytest.raises(BudgetExceededError, match="2000 comparisons"):
        plan_model(*sides, limits=PlanBudget(max_pair_checks=2000))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2]},
        {"source": [0, 0]},
        {"source": [-1, 0, [1]]},
        {"target": "everything"},
        {"scale": 0},
        {"scale": float("nan")},
        {"scale": True},
        {"scale": 10**400},
        {"power": 2},
        # Another place in the target: overlapping, beyond its end, the same address twice, of another rank.
        {"target": [0, 2, [4, 1]]},
        {"target": [0, 12, [4, 1]]},
        {"target": [0, 0, [0, 1]]},
        {"target": [0, 0, [8, 1]]},
        {"target": [5, 0, [4, 1]]},
        {"shape": [3, 2]},
        {"shape": [2**62, 2**62]},
    ],
)
def test_a_damaged_plan_is_refused(change):
    entry = plan_transfer(replicated_map((4, 4), 1), contiguous_split_map((4, 4), (2, 2), 1)).to_dict()
    entry["segments"][0].update(change)
    with pytest.raises(InvalidMapError, match="segment"):
        TransferPlan.from_dict(entry)


def test_a_plan_with_a_segment_too_many_or_too_few_is_refused():
    entry = plan_transfer(replicated_map((4, 4), 1), contiguous_split_map((4, 4), (2, 2), 1)).to_dict()
    for segments in (entry["segments"][:1], entry["segments"] * 2):
        with pytest.raises(InvalidMapError, match="target rank 0"):
            TransferPlan.from_dict({**entry, "segments": segments})


@given(SEEDS)
def test_a_plan_whose_target_addresses_are_changed_is_refused(seed):
    rng, (source, target) = worlds(seed, 2)
    entry = plan_transfer(target, source).to_dict()
    filled = [each for each in entry["segments"] if 0 not in each["shape"]]
    if not filled:
        return
    changed = rng.choice(filled)
    before = sorted(at for each in filled for _, at in addresses(TransferSegment.from_dict(each)) if each is changed)
    changed["target"][1] = max(0, changed["target"][1] + rng.choice([-2, -1, 1, 2]))
    if changed["shape"] and rng.random() < 0.5:
        changed["target"][2][rng.randrange(len(changed["shape"]))] += rng.choice([1, 3])
    after = sorted(at for _, at in addresses(TransferSegment.from_dict(changed)))
    if before == after:
        TransferPlan.from_dict(entry)
    else:
        with pytest.raises(InvalidMapError, match="target rank"):
            TransferPlan.from_dict(entry)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"segments": 3},
        {"segments": [], "logical_shape": [1], "unfilled": {0: 1}},
        {"segments": [], "logical_shape": [1], "unfilled": {0: [[0, [1], [1]]], "0": [[0, [1], [1]]]}},
        {"segments": [], "logical_shape": [1], "unfilled": {"9" * 5000: []}},
        {"segments": [], "logical_shape": [1], "statistics": {}},
    ],
)
def test_what_is_no_plan_is_refused(entry):
    with pytest.raises(InvalidMapError):
        TransferPlan.from_dict(entry)
