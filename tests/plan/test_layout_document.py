"""A checkpoint layout is a document that says it all, and a damaged document is an error that says where."""

import copy
import json

import pytest

from deepspeed_affine.errors import AffineError, CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import contiguous_split_map, replicated_map
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout, LayoutParam, LayoutRank
from deepspeed_affine.plan.layout_document import LAYOUT_FORMAT, layout_digest, layout_document, read_layout_document


def layout(**changes):
    params = {
        "w": LayoutParam(contiguous_split_map((8, 3), (4, 4), 0).canonical(), "bfloat16"),
        "v": LayoutParam(contiguous_split_map((8, 3), (4, 4), 0).canonical(), "bfloat16"),
        "norm": LayoutParam(replicated_map((3,), 2).canonical(), "float32", "frozen"),
        "mean": LayoutParam(replicated_map((), 2).canonical(), "int64", "buffer"),
    }
    rank = LayoutRank(("w", "v", "tied", "norm", "mean"), (("w",), ("v",)), {"tied": "w"}, ((0, 1), (1, 1)))
    fields = {
        "tp": 2,
        "pp": 1,
        "dp": 3,
        "stage": 3,
        "params": params,
        "ranks": (rank, rank),
        "hyperparameters": (("betas", "lr"), ("lr",)),
        "states": ("exp_avg",),
        "config": {"zero_optimization": {"stage": 3}},
        "version": "0.19.8",
    }
    return CheckpointLayout(**{**fields, **changes})


def test_a_layout_comes_back_from_its_text():
    for made in (layout(), layout(states=None, hyperparameters=None, config=None, info={"a": [1, None]})):
        text = json.dumps(layout_document(made))
        found = read_layout_document(json.loads(text))
        assert found == made
        assert layout_digest(found) == layout_digest(made)


def experts(dp=6, first=False, stage=1):
    names = [f"moe.{number}.w" for number in range(6)]
    params = {name: LayoutParam(replicated_map((4,), 1), "float32") for name in ("gate", *names)}
    rank = LayoutRank(("gate",), (("gate",), ("moe.0.w", "moe.1.w")), {}, ((0, 1), (1, 2)))
    return CheckpointLayout(
        tp=1, pp=1, dp=dp, stage=stage, params=params, ranks=(rank,), experts={"moe.": (6, 2)}, data_before_expert=first
    )


@pytest.mark.parametrize(
    ("first", "held"),
    [
        (False, [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]),
        (True, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
    ],
)
def test_experts_are_numbered_and_lie_as_their_ranks_do(first, held):
    made = experts(first=first)
    assert read_layout_document(json.loads(json.dumps(layout_document(made)))) == made
    assert made.ep == 3
    for dp, (rank, place) in enumerate(held):
        names = (f"moe.{2 * rank}.w", f"moe.{2 * rank + 1}.w")
        assert made.held_by(made.ranks[0].groups[1], dp) == (names, place, 2)
        assert made.held_by(made.ranks[0].groups[0], dp) == (("gate",), dp, 6)
    assert (made.flat_group(0, 0).dp, made.flat_group(0, 1).dp) == (6, 2)


def test_experts_that_cannot_lie_so_are_refused():
    with pytest.raises(UnsupportedLayoutError, match="3 expert-parallel ranks, and 4 data-parallel"):
        experts(dp=4)
    with pytest.raises(UnsupportedLayoutError, match="ZeRO-3 with a mixture of experts"):
        experts(stage=3)


def test_equal_maps_are_stored_once_and_every_difference_changes_the_digest():
    assert len(layout_document(layout())["maps"]) == 3
    others = [layout(dp=4), layout(prefix="bf16_"), layout(states=None), layout(version="0.19.7"), layout(info={})]
    assert len({layout_digest(made) for made in (layout(), *others)}) == 6


def test_a_newer_document_is_refused():
    document = {**layout_document(layout()), "format": LAYOUT_FORMAT + 1}
    with pytest.raises(CheckpointFormatError, match=r"file: has format 2, newer than 1.*Update"):
        read_layout_document(document, "file")


def paths(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from paths(part, (*path, key))


DOCUMENT = layout_document(layout())
OF_DEEPSPEED = ("ds_config", "universal_checkpoint_info")


@pytest.mark.parametrize("replacement", [None, -1, "x", [], {}, True, 10**30, [[1]]], ids=repr)
def test_any_value_in_any_place_is_an_error_by_class_or_a_layout(replacement):
    for path in paths(DOCUMENT):
        if path and path[0] in OF_DEEPSPEED:
            continue
        document = copy.deepcopy(DOCUMENT)
        if path:
            at = document
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = replacement
        else:
            document = replacement
        faults = ()
        try:
            assert isinstance(read_layout_document(document, "file"), CheckpointLayout)
        except AffineError as error:
            faults = error.faults
        assert [str(fault) for fault in faults if not str(fault).startswith("file: ")] == [], path


def test_what_contradicts_itself_is_refused():
    rank = layout().ranks[0]
    short = LayoutRank(rank.names, (("w",), ("v",)), rank.aliases, ((0, 1),))
    twice = LayoutRank(rank.names, (("w",), ("w",)), rank.aliases, ((0, 1), (1, 1)))
    unknown = LayoutRank(rank.names, (("w",), ("x",)), rank.aliases, ((0, 1), (1, 1)))
    far = LayoutRank(rank.names, (("w",), ("v",)), rank.aliases, ((0, 1), (1, 1), (2, 1)))
    for wrong, said in ((short, "add up"), (twice, "in two groups"), (unknown, "'x'"), (far, "add up")):
        with pytest.raises(InvalidMapError, match=said):
            layout(ranks=(rank, wrong))
    lacking = LayoutRank(rank.names, (("w",), ()), rank.aliases, ((0, 1),))
    unnamed = LayoutRank(rank.names[:3], rank.groups, rank.aliases, rank.sub_groups)
    frozen = LayoutRank(rank.names, (("w",), ("v", "norm")), rank.aliases, ((0, 1), (1, 2)))
    for wrong, said in (
        (lacking, "'v' is optimized, and no parameter group"),
        (frozen, "'norm' is frozen, and a parameter group"),
        (unnamed, "'norm': no rank lists it"),
    ):
        with pytest.raises(InvalidMapError, match=said):
            layout(ranks=(wrong, wrong))
        with pytest.raises(InvalidMapError, match="rank 1 lists other tensors"):
            layout(ranks=(rank, wrong))
    with pytest.raises(InvalidMapError, match=r"list \[1, 2\] parameter groups"):
        layout(hyperparameters=(("lr",),))
    with pytest.raises(InvalidMapError, match="lists 1 ranks; 2 are expected"):
        layout(ranks=(rank,))
    with pytest.raises(InvalidMapError, match="dp is 0"):
        layout(dp=0)
    with pytest.raises(UnsupportedLayoutError, match="ZeRO-3 with 2 pipeline stages"):
        layout(pp=2, ranks=(rank,) * 4)
    with pytest.raises(UnsupportedLayoutError, match="ZeRO stage 0"):
        layout(stage=0)
