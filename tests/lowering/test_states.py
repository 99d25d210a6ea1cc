"""Optimizer dictionaries as fragments of named parameters: every state under its own name, nothing dropped."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.errors import CheckpointFormatError, UnsupportedLayoutError
from deepspeed_affine.lowering.reading import as_count, as_mapping, as_names, as_shape, as_stored
from deepspeed_affine.lowering.states import Place, ShardKey, StateTable, read_zero3, read_zero12, shape_numel

SHARD = ShardKey(0, 0)


@dataclass(frozen=True)
class Flat:
    """What a stored tensor looks like to lowering."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    offset: int = 0

    @property
    def strides(self):
        return (1,) * len(self.shape)


def place(name, rank=0):
    return Place(name, SHARD, rank)


def zero12(mapping, states, *, length=None, paddings=None, shapes=None, table=None):
    slices = {name: SimpleNamespace(start=start, numel=numel) for name, (start, numel) in mapping.items()}
    end = max((start + numel for start, numel in mapping.values()), default=0)
    optimizer = {
        "param_slice_mappings": [slices],
        "single_partition_of_fp32_groups": [Flat((end if length is None else length,))],
        "base_optimizer_state": {"state": {0: states} if states is not None else {}},
        "group_paddings": paddings,
    }
    table = StateTable() if table is None else table
    read_zero12(table, optimizer, place, shapes or {name: (numel,) for name, (_, numel) in mapping.items()}, file="f")
    return table


@st.composite
def flat_groups(draw):
    mapping, position = {}, 0
    for index in range(draw(st.integers(1, 5))):
        position += draw(st.integers(0, 3))
        numel = draw(st.integers(1, 6))
        mapping[f"p{index}"] = (position, numel)
        position += numel
    return mapping, position + draw(st.integers(0, 3))


@given(flat_groups(), st.sets(st.sampled_from(["exp_avg", "sum", "momentum", "ünï"])))
def test_every_state_of_every_slice_is_a_fragment(group, states):
    mapping, length = group
    table = zero12(mapping, {state: Flat((length,)) for state in states}, length=length)
    assert set(table) == set(mapping)
    for name, (start, numel) in mapping.items():
        found = table[name].tensors
        assert set(found) == {"fp32", *states}
        for fragments in found.values():
            ((fragment,),) = fragments.values()
            assert (fragment.start, fragment.numel) == (start, numel)


@given(flat_groups(), st.data())
def test_slices_that_overlap_are_refused(group, data):
    mapping, length = group
    name = data.draw(st.sampled_from(sorted(mapping)))
    start, numel = mapping[name]
    mapping["intruder"] = (data.draw(st.integers(start, start + numel - 1)), 1)
    with pytest.raises(CheckpointFormatError, match="overlap"):
        zero12(mapping, {}, length=length)


def test_numbers_tensors_and_nothing_are_told_apart():
    states = {"step": 3, "beta": Flat(()), "flag": True, "flat": Flat((4,)), "absent": None}
    table = zero12({"w": (0, 4)}, states)
    assert set(table["w"].scalars) == {"step", "beta", "flag"}
    assert set(table["w"].tensors) == {"fp32", "flat"}
    assert table.empty_states == {"absent"}
    (stored,) = table["w"].scalars["step"]
    assert (stored.shard, stored.rank, stored.value, stored.file) == (SHARD, 0, 3, "f")


@pytest.mark.parametrize("value", [Flat((2, 2)), "text", [1], {"a": 1}, (Flat((4,)),), object()])
def test_states_of_another_form_are_refused_by_name(value):
    with pytest.raises(UnsupportedLayoutError, match="'rows'") as raised:
        zero12({"w": (0, 4)}, {"rows": value})
    assert raised.value.param == "w"


def test_a_state_may_not_take_the_weights_name():
    with pytest.raises(UnsupportedLayoutError, match="'fp32'"):
        zero12({"w": (0, 4)}, {"fp32": Flat((4,))})


@pytest.mark.parametrize("states", [None, {}])
def test_groups_before_the_first_step_are_noted(states):
    assert zero12({"w": (0, 4)}, states).stateless_groups == {0}


def test_whole_parameter_momentum_is_told_by_its_length():
    shapes = {"a": (2, 5), "b": (3, 4)}
    table = zero12({"a": (0, 4), "b": (4, 12)}, {"momentum_buffer": Flat((22,))}, length=16, shapes=shapes)
    for name, start in (("a", 0), ("b", 10)):
        ((fragment,),) = table[name].whole["momentum_buffer"].values()
        assert (fragment.start, fragment.numel) == (start, shape_numel(shapes[name]))
    flat = zero12({"a": (0, 4), "b": (4, 12)}, {"momentum_buffer": Flat((16,))}, length=16, shapes=shapes)
    assert not flat["a"].whole


def test_whole_parameters_of_the_partitions_length_cannot_be_told():
    with pytest.raises(UnsupportedLayoutError, match="cannot be told"):
        zero12({"a": (6, 4)}, {"momentum_buffer": Flat((10,))}, length=10, shapes={"a": (10,)})


def zero3(shapes, states, *, dp=2, rank=0, length=None, partitions=None, masters=1):
    numel = sum(-(-shape_numel(shape) // dp) for shape in shapes.values())
    optimizer = {
        "fp32_flat_groups": [Flat((numel if length is None else length,))] * masters,
        "optimizer_state_dict": {"state": {0: states}},
    }
    if partitions is not None:
        optimizer["ds_zero_partition_groups"] = partitions
    table = StateTable()
    read_zero3(table, optimizer, [shapes], lambda name: place(name, rank), dp, file="f", model_file="m")
    return table


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_zero3_parts_follow_each_other(shapes, dp):
    named = {f"p{index}": shape for index, shape in enumerate(shapes)}
    for rank in range(dp):
        numel = sum(-(-shape_numel(shape) // dp) for shape in shapes)
        table = zero3(named, {"exp_avg": Flat((numel,))}, dp=dp, rank=rank)
        start = 0
        for name, shape in named.items():
            reserved = -(-shape_numel(shape) // dp)
            ((fragment,),) = table[name].tensors["exp_avg"].values()
            assert fragment.start == start
            assert fragment.numel == max(0, min(reserved, shape_numel(shape) - rank * reserved))
            start += reserved


@pytest.mark.parametrize("length", [0, 3, 5, 8])
def test_zero3_sub_groups_must_be_as_long_as_their_shapes_say(length):
    with pytest.raises(CheckpointFormatError, match="different saves"):
        zero3({"w": (4, 2)}, {}, length=length)


def test_zero3_recorded_parts_win_over_the_grid():
    table = zero3({"w": (8,)}, {}, dp=4, length=4, partitions=[{"partition_count": 2, "partition_rank": 1}])
    ((fragment,),) = table["w"].tensors["fp32"].values()
    assert (fragment.numel, fragment.rank) == (4, 1)


@pytest.mark.parametrize(
    "partitions", [3, [3], [{"partition_count": 0}], [{"partition_count": "2"}], [{"partition_rank": -1}], ["x"]]
)
def test_zero3_malformed_parts_are_refused(partitions):
    with pytest.raises(CheckpointFormatError):
        zero3({"w": (8,)}, {}, partitions=partitions)


def test_zero3_groups_of_another_number_name_both_files():
    with pytest.raises(CheckpointFormatError, match="f: 2 fp32 sub-groups are stored but m lists 1"):
        zero3({"w": (8,)}, {}, masters=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("param_slice_mappings", None),
        ("param_slice_mappings", {}),
        ("param_slice_mappings", [None]),
        ("param_slice_mappings", [{3: 4}]),
        ("param_slice_mappings", [{"w": None}]),
        ("param_slice_mappings", [{"w": SimpleNamespace(start=True, numel=1)}]),
        ("param_slice_mappings", [{}, {}]),
        ("single_partition_of_fp32_groups", [None]),
        ("single_partition_of_fp32_groups", [Flat((2, 2))]),
        ("single_partition_of_fp32_groups", []),
        ("base_optimizer_state", None),
        ("base_optimizer_state", {"state": []}),
        ("base_optimizer_state", {"state": {0: 3}}),
        ("base_optimizer_state", {"state": {0: {3: 4}}}),
        ("group_paddings", 3),
        ("group_paddings", ["x"]),
        ("group_paddings", [-1]),
    ],
)
def test_malformed_entries_are_refused(key, value):
    optimizer = {
        "param_slice_mappings": [{"w": SimpleNamespace(start=0, numel=4)}],
        "single_partition_of_fp32_groups": [Flat((4,))],
        "base_optimizer_state": {"state": {}},
        "group_paddings": [0],
    }
    optimizer[key] = value
    with pytest.raises(CheckpointFormatError, match="f: "):
        read_zero12(StateTable(), optimizer, place, {"w": (4,)}, file="f")


def test_elastic_checkpoints_are_refused():
    optimizer = {"param_slice_mappings": [], "single_partition_of_fp32_groups": [], "base_optimizer_state": []}
    with pytest.raises(UnsupportedLayoutError, match="elastic_checkpoint"):
        read_zero12(StateTable(), optimizer, place, {}, file="f")


READERS = {
    "mapping": (lambda value: as_mapping(value, "it", "f"), [{}, {"a": 1}], [None, [], {3: 1}, "x", 4]),
    "shape": (lambda value: as_shape(value, "it", "f"), [(), (2, 0), [3]], [None, 3, (-1,), (1.0,), (True,), "ab"]),
    "count": (lambda value: as_count(value, "it", "f", least=1), [1, 2**70], [None, 0, -1, True, 1.0, "1"]),
    "names": (lambda value: as_names(value, "it", "f"), [None, [], ["a"], ("b",), {"c"}], [3, "ab", [3], [None]]),
    "stored": (lambda value: as_stored(value, "it", "f"), [Flat(()), Flat((2, 3))], [None, 3, [1.0], object()]),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_take_what_they_promise_and_refuse_the_rest_in_a_sentence(reader):
    read, good, bad = READERS[reader]
    for value in good:
        read(value)
    for value in bad:
        with pytest.raises(CheckpointFormatError, match=r"^f: .*it is .*; a.* is expected\.") as raised:
            read(value)
        assert raised.value.file == "f"
        assert len(raised.value.message) < 300


def test_long_and_foreign_values_are_named_by_their_kind():
    for value in ("x" * 1000, list(range(1000)), SimpleNamespace(a=1)):
        with pytest.raises(CheckpointFormatError, match=type(value).__name__):
            as_count(value, "it", "f")
