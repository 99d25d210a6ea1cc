"""Two object graphs side by side: equal or not, and exactly where."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Deep, Foreign, FragmentAddress, ZeroStage, ZeroStageByName, save

from deepspeed_affine.commands.graphs import GraphWalk, TensorPair, ValueDifference, is_in
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.refs import Global, StandIn, StorageRef, TensorRef, TorchSize

KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 3), st.tuples(st.integers(0, 2), st.text(max_size=2)))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(),
    st.frozensets(st.integers(0, 5), max_size=3),
    st.builds(Global, st.just("m"), st.sampled_from(["A", "B"])),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def walk(a, b):
    found = GraphWalk(a, b)
    return list(found), found.equal


def leaves(value, place=""):
    """Every leaf inside lists and dictionaries, with where it is and how to replace it."""
    if isinstance(value, dict):
        for key in list(value):
            yield from (
                leaves(value[key], f"{place}[{key!r}]")
                if isinstance(value[key], (dict, list))
                else [(f"{place}[{key!r}]", value, key)]
            )
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from (
                leaves(item, f"{place}[{at}]") if isinstance(item, (dict, list)) else [(f"{place}[{at}]", value, at)]
            )


@given(VALUES)
def test_a_copy_is_equal(value):
    assert walk(value, copy.deepcopy(value))[0] == []


@given(VALUES, st.data())
def test_one_changed_leaf_is_one_difference(value, data):
    other = copy.deepcopy(value)
    found = list(leaves(other))
    if not found:
        return
    place, holder, key = data.draw(st.sampled_from(found))
    holder[key] = object()
    (difference,), _ = walk(value, other)
    assert is_in(difference.place) == place
    assert difference.a is not None
    assert difference.b is not None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (math.nan, -math.nan),
        ("1", b"1"),
        ([1], (1,)),
        ((1,), TorchSize((1,))),
        ({1}, frozenset({1})),
        (complex(0, 0.0), complex(0, -0.0)),
        (None, 0),
        ([], None),
        (Global("m", "A"), Global("m", "B")),
    ],
)
def test_values_that_only_seem_equal(a, b):
    assert len(walk(a, b)[0]) == 1
    assert len(walk([a], [b])[0]) == 1


def test_what_is_no_difference():
    assert walk({"a": 1, "b": 2}, OrderedDict([("b", 2), ("a", 1)])) == ([], 2)
    assert walk(math.nan, math.nan) == ([], 1)
    storage = StorageRef("f", "0", "float32", 4, 0, None, "cpu")
    one, other = TensorRef(storage, 0, (2, 2), (2, 1), True), TensorRef(storage, 0, (2, 2), (1, 2), False, True)
    (pair,), _ = walk(one, other)
    assert pair == TensorPair((), one, other)
    numbered = replace(one, state={"ds_id": "0_35"})
    assert walk(numbered, one) == ([TensorPair((), numbered, one)], 0)
    named = replace(one, state={"ds_id": "0_35", "name": 1})
    assert [type(each) for each in walk(named, numbered)[0]] == [TensorPair, ValueDifference]


def test_keys_and_lengths():
    found, equal = walk({"a": 1, "b": {"x": 1}}, {"a": 1, "c": [1]})
    assert [(is_in(one.place), one.a, one.b) for one in found] == [
        ("['b']", "a dict of 1 items", None),
        ("['c']", None, "a list of 1 items"),
    ]
    assert equal == 1
    found, equal = walk([1, 2, 3], [1, 5])
    assert [(is_in(one.place), one.a, one.b) for one in found] == [
        ("the file", "3 items", "2 items"),
        ("[1]", "2", "5"),
    ]


def test_graphs_within_themselves_and_shared_parts():
    a: dict = {"list": [1]}
    a["self"], a["again"] = a, a["list"]
    b = copy.deepcopy(a)
    assert walk(a, b)[0] == []
    b["list"].append(2)
    assert [is_in(one.place) for one in walk(a, b)[0]] == ["['list']"]
    # Shared in one file, two objects in the other: both places are looked at.
    b = {"list": [1], "again": [7]}
    b["self"] = b
    assert [is_in(one.place) for one in walk(a, b)[0]] == ["['again'][0]"]


def test_objects_of_unknown_classes(tmp_path):
    def read(name, value):
        save(value, tmp_path / name)
        return load_pickle(tmp_path / name).root

    one = read("a.pt", [Foreign(x=1, y={"z": [torch.ones(2)]}), FragmentAddress(numel=3, start=0)])
    same = read("b.pt", [Foreign(x=1, y={"z": [torch.ones(2)]}), FragmentAddress(numel=3, start=0)])
    found, equal = walk(one, same)
    assert [is_in(pair.place) for pair in found] == ["[0]['y']['z'][0]"]
    assert equal >= 3
    other = read("c.pt", [Foreign(x=2, y={"z": [torch.ones(3)]}), FragmentAddress(numel=3, start=1)])
    assert [is_in(one.place) for one in walk(one, other)[0]] == ["[0]['x']", "[0]['y']['z'][0]", "[1]['start']"]
    stages = [read(f"{kind.__name__}.pt", [kind(1), kind(2)]) for kind in (ZeroStage, ZeroStageByName)]
    assert walk(*stages) == ([], 2)
    assert len(walk(stages[0], stages[1][::-1])[0]) == 2
    found, _ = walk(one, read("d.pt", [FragmentAddress(numel=3, start=0), Foreign(x=1)]))
    assert [is_in(one.place) for one in found] == ["[0]", "[1]"]


def test_stand_ins_by_how_they_were_built():
    cls, other = Global("m", "A"), Global("m", "B")
    assert walk(StandIn(cls, (1,)), StandIn(cls, (1,)))[0] == []
    assert len(walk(StandIn(cls, (1,)), StandIn(other, (1,)))[0]) == 1
    assert len(walk(StandIn(cls, (1,)), StandIn(cls, (1,), "newobj"))[0]) == 1
    assert [is_in(one.place) for one in walk(StandIn(cls, (1,)), StandIn(cls, (2,)))[0]] == [".args[0]"]
    nested = [StandIn(StandIn(cls, (n,)), ()) for n in (1, 1, 2)]
    assert walk(nested[0], nested[1])[0] == []
    assert [is_in(one.place) for one in walk(nested[0], nested[2])[0]] == [".class.args[0]"]


@pytest.mark.parametrize(
    ("a", "b"), [(0.0, -0.0), (1, True), (1, 1.0), ((1, 0.0), (1, -0.0)), (1.0, 1 + 0j), ("1", b"1")]
)
def test_keys_that_only_seem_equal(a, b):
    found, equal = walk({a: 1, "x": 2}, {b: 1, "x": 2})
    assert [(one.a, one.b) for one in found] == [("1", None), (None, "1")]
    assert equal == 1
    assert walk({a: 1, "x": 2}, {"x": 2, a: 1}) == ([], 2)


def test_any_depth(tmp_path):
    for name in ("a", "b"):
        save(Deep(20_000), tmp_path / name)
    assert walk(load_pickle(tmp_path / "a").root, load_pickle(tmp_path / "b").root)[0] == []


def test_tensors_of_other_dtype_shape_or_without_values():
    storage = StorageRef("f", "0", "float32", 4, 0, None, "cpu")
    other = StorageRef("f", "0", "int32", 4, 0, None, "cpu")
    meta = StorageRef("", "", "float32", 0, 0, None, "meta")
    one = TensorRef(storage, 0, (4,), (1,))
    for twin in (
        TensorRef(other, 0, (4,), (1,)),
        TensorRef(storage, 0, (2, 2), (2, 1)),
        TensorRef(meta, 0, (4,), (1,)),
        None,
        1.0,
    ):
        (difference,), _ = walk(one, twin)
        assert "a tensor of float32, shape [4]" in difference.a
    assert walk(TensorRef(meta, 0, (4,), (1,)), TensorRef(meta, 0, (4,), (1,)))[0] == []
    with_state = TensorRef(storage, 0, (4,), (1,), state={"note": 1})
    found, _ = walk(with_state, TensorRef(storage, 0, (4,), (1,), state={"note": 2}))
    assert [is_in(one.place) for one in found] == ["the file", ".__dict__['note']"]
