"""Placements of checkpoint layouts, against shards laid end to end, padded and cut in plain lists."""

import itertools

import pytest

from deepspeed_affine.ir import ParamAffineMap, contiguous_split_map, replicated_map
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout, LayoutParam, LayoutRank
from deepspeed_affine.plan.partition import sub_group_counts
from deepspeed_affine.plan.placing import checkpoint_placements


def model(tp):
    def split(rows, axis=0):
        extent = rows if axis == 0 else 4
        widths = [extent // tp + (rank < extent % tp) for rank in range(tp)]
        return contiguous_split_map((rows, 4), widths, axis)

    return {
        "a": LayoutParam(split(7), "float32"),
        "b": LayoutParam(split(6, 1), "float32"),
        "norm": LayoutParam(replicated_map((5,), tp), "float32"),
        "frozen": LayoutParam(split(4), "float32", "frozen"),
        "last": LayoutParam(split(8), "float32"),
    }


def layout_of(tp, pp, dp, stage, alignment=1):
    params = model(tp)
    groups = [(("a", "b"), ("norm",)), (("last", "a"), ())] if pp == 2 else [(("a", "b", "last"), ("norm",))]
    ranks = []
    for stage_groups, t in itertools.product(groups, range(tp)):
        counts = [
            sub_group_counts([params[name].shard_numel(t) for name in group], dp, 9) if group else ()
            for group in stage_groups
        ]
        ranks.append(
            LayoutRank(
                (*itertools.chain(*stage_groups), "frozen", "alias"),
                stage_groups,
                {"alias": stage_groups[0][0]},
                tuple((at, n) for at, row in enumerate(counts) for n in row) if stage == 3 else (),
            )
        )
    return CheckpointLayout(tp, pp, dp, stage, params, tuple(ranks), param_alignment=alignment)


def offsets(layout, rank):
    """The offset in F of every address of a shard."""
    found = [None] * layout.shard_numel(rank)
    for piece in layout.pieces_by_rank[rank]:
        for source, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True):
            found[dest] = source
    return found


def expected_states(layout):
    """``(name, offset in F)`` of everything each process keeps, by concatenating and cutting."""
    kept = {}
    for mp, rank in enumerate(layout.ranks):
        pp, tp = divmod(mp, layout.tp)
        for group in rank.groups:
            shards = [(name, [(name, at) for at in offsets(layout.params[name].layout, tp)]) for name in group]
            for dp in range(layout.dp):
                process = (pp * layout.dp + dp) * layout.tp + tp
                mine = kept.setdefault(process, [])
                if layout.stage == 3:
                    for _, shard in shards:
                        part = -(-len(shard) // layout.dp)
                        mine += shard[dp * part : (dp + 1) * part]
                    continue
                flat = []
                for number, (_, shard) in enumerate(shards):
                    flat += shard
                    if number < len(shards) - 1:
                        flat += [None] * (-len(flat) % layout.param_alignment)
                part = -(-len(flat) // (2 * layout.dp)) * 2
                mine += [each for each in flat[dp * part : (dp + 1) * part] if each is not None]
    return {process: sorted(mine) for process, mine in kept.items() if mine}


def placed(placements):
    found = {}
    for name, place in placements.items():
        place.layout.validate(partial=True, whole_parameter=True)
        for location, ranks in place.holders.items():
            for rank in ranks:
                found.setdefault(rank, []).extend(
                    (name, at) for at in offsets(place.layout, location) if at is not None
                )
    return {rank: sorted(mine) for rank, mine in found.items() if mine}


CASES = [
    (tp, pp, dp, stage, alignment)
    for tp, pp, dp, stage, alignment in itertools.product((1, 2, 3), (1, 2), (1, 2, 5), (1, 2, 3), (1, 4))
    if (pp == 1 or stage == 1) and (alignment == 1 or stage < 3)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_lie_where_cutting_puts_them(case):
    layout = layout_of(*case)
    sizes = dict.fromkeys(layout.params, 12)
    assert placed(checkpoint_placements(layout, "states", sizes)) == expected_states(layout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_lie_on_every_copy_or_are_cut(case):
    layout = layout_of(*case)
    found = checkpoint_placements(layout, "weights", dict.fromkeys(layout.params, 2))
    assert set(found) == {"a", "b", "norm", "frozen", "last"}
    if layout.stage == 3:
        cut = {name: place for name, place in found.items() if name != "frozen"}
        assert placed(cut) == expected_states(layout)
        # ZeRO-3 cuts what is frozen as well.
        for location, ranks in found["frozen"].holders.items():
            assert len(ranks) == 1
            part = -(-layout.params["frozen"].shard_numel(ranks[0] % layout.tp) // layout.dp)
            assert 0 < found["frozen"].layout.shard_numel(location) <= part
        assert {at for mine in placed({"frozen": found["frozen"]}).values() for _, at in mine} == set(range(16))
        return
    wanted = {}
    for mp, rank in enumerate(layout.ranks):
        pp, tp = divmod(mp, layout.tp)
        for dp in range(layout.dp):
            names = {name for name in rank.names if name != "alias"}
            wanted[(pp * layout.dp + dp) * layout.tp + tp] = sorted(
                (name, at) for name in names for at in offsets(layout.params[name].layout, tp)
            )
    assert placed(found) == wanted


def test_a_tied_parameter_of_two_stages_has_the_processes_of_both():
    place = checkpoint_placements(layout_of(2, 2, 2, 1), "weights", dict.fromkeys(model(2), 2))["a"]
    assert place.holders == {0: (0, 2, 4, 6), 1: (1, 3, 5, 7)}
    assert isinstance(place.layout, ParamAffineMap)


@pytest.mark.parametrize("data_before_expert", [False, True])
def test_experts_lie_on_the_processes_that_have_them(data_before_expert):
    """Four experts on two expert-parallel ranks of four processes: every process has two of them, and all the rest."""
    shapes = {"dense": (5,), **{f"moe.{number}.w": (3, 3) for number in range(4)}}
    params = {name: LayoutParam(replicated_map(shape, 1), "float32") for name, shape in shapes.items()}
    rank = LayoutRank(("dense",), (("dense",), ("moe.0.w", "moe.1.w")))
    layout = CheckpointLayout(
        1, 1, 4, 1, params, (rank,), experts={"moe.": (4, 2)}, data_before_expert=data_before_expert
    )
    first, second = ((0, 1), (2, 3)) if data_before_expert else ((0, 2), (1, 3))
    weights = checkpoint_placements(layout, "weights", dict.fromkeys(params, 4))
    assert {name: place.holders[0] for name, place in weights.items()} == {
        **{"dense": (0, 1, 2, 3), "moe.0.w": first, "moe.1.w": first},
        **{"moe.2.w": second, "moe.3.w": second},
    }
    # Two processes share each pair of experts: 18 elements end to end, cut into 10 (an even number) and 8.
    found = placed(checkpoint_placements(layout, "states", dict.fromkeys(params, 12)))
    for (one, other), (a, b) in ((first, ("moe.0.w", "moe.1.w")), (second, ("moe.2.w", "moe.3.w"))):
        flat = [(a, at) for at in range(9)] + [(b, at) for at in range(9)]
        assert [each for each in found[one] if each[0] != "dense"] == flat[:10]
        assert [each for each in found[other] if each[0] != "dense"] == flat[10:]
    assert sorted(each for mine in found.values() for each in mine if each[0] == "dense") == [
        ("dense", at) for at in range(5)
    ]
