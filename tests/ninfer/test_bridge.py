"""Bindings as maps and back: the same elements at the same places, and a reason where there is no binding."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from counting import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_affine import ninfer
from deepspeed_affine.errors import InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import (
    AffinePiece,
    ParamAffineMap,
    contiguous_split_map,
    replicated_map,
    sub_param_map,
)
from deepspeed_affine.ir.ints import product
from deepspeed_affine.ninfer.bridge import bindings_to_map, map_to_bindings

SHAPES = {"a": (4, 6), "b": (10,), "c": (2, 3, 2)}


def directory(bindings, shapes=SHAPES):
    objects, offset = [], 0
    for name, shape in shapes.items():
        objects.append(ninfer.TensorObject(name, shape, "fp32", "contiguous_le_v1", offset, 4 * product(shape)))
        offset += -(-4 * product(shape) // 256) * 256
    files = [ninfer.FileRecord(None, offset)]
    return ninfer.Directory({"text": ninfer.Component({})}, objects, bindings, [], files)


parts = st.lists(
    st.sampled_from(list(SHAPES)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.lists(st.integers(0, product(SHAPES[name])), min_size=2, max_size=2, unique=True).map(sorted),
        )
    ),
    min_size=1,
    max_size=6,
)


def elements(binding):
    """The address of every element, by the definition."""
    found = []
    for part in binding.parts:
        found += [(part.object, at) for at in range(part.begin, part.end)]
    return found


def most_often(given_):
    """For each object, how many times the element of it that is given most often is given."""
    times = Counter((part.object, at) for part in given_ for at in range(part.begin, part.end))
    return {name: max(n for (owner, _), n in times.items() if owner == name) for name, _ in times}


def continued(given_):
    """The parts, those that continue each other as one."""
    found = []
    for part in given_:
        if found and (found[-1].object, found[-1].end) == (part.object, part.begin):
            part = ninfer.Part(part.object, found.pop().begin, part.end)
        found.append(part)
    return tuple(found)


def mapped(bound):
    """The address of every element of F, by the map."""
    found = {}
    for rank, piece in bound.map.pieces():
        assert piece.locations == {rank}
        for source, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True):
            assert source not in found
            found[source] = (bound.objects[rank], dest)
    return [found[source] for source in range(bound.map.numel)]


@given(parts)
def test_a_binding_is_its_map_and_its_map_is_the_binding(drawn):
    binding = ninfer.Binding(parts=tuple(ninfer.Part(name, *bounds) for name, bounds in drawn))
    bound = bindings_to_map(directory({"p": binding}), "p")
    bound.map.validate(partial=True, whole_parameter=True)
    assert mapped(bound) == elements(binding)
    assert {rank: bound.map.shard_shapes[rank] for rank in bound.map.ranks} == {
        rank: SHAPES[name] for rank, name in enumerate(bound.objects)
    }
    assert Counter(bound.objects) == most_often(binding.parts)
    assert list(bound.map.ranks) == sorted(
        bound.map.ranks, key=lambda rank: bound.map.pieces_by_rank[rank][0].source_offset
    )
    again = map_to_bindings(bound.map, bound.objects)
    if again.object is None:
        assert again.parts == continued(binding.parts)
    else:
        assert elements(binding) == [(again.object, at) for at in range(product(SHAPES[again.object]))]


def test_a_whole_object_is_a_whole_object():
    there = directory({"p": ninfer.Binding("a")})
    bound = bindings_to_map(there, "p")
    assert bound.map.logical_shape == (4, 6)
    assert map_to_bindings(bound.map, bound.objects) == ninfer.Binding("a")
    with pytest.raises(ninfer.BindingError):
        bindings_to_map(there, "p", (24,))
    with pytest.raises(ninfer.BindingError):
        bindings_to_map(there, "q")


def test_a_repeated_range_has_a_location_a_time():
    binding = ninfer.Binding(parts=tuple(ninfer.Part("b", *bounds) for bounds in ((0, 4), (2, 6), (6, 8), (0, 4))))
    bound = bindings_to_map(directory({"p": binding}), "p", (7, 2))
    assert bound.objects == ("b", "b", "b")
    assert mapped(bound) == elements(binding)
    with pytest.raises(ninfer.BindingError):
        bindings_to_map(directory({"p": binding}), "p", (15,))


LAYOUTS = {
    "rows": contiguous_split_map((8, 6), [4, 4], 0),
    "columns": contiguous_split_map((8, 6), [2, 4], 1),
    "uneven": contiguous_split_map((7, 3, 2), [3, 4], 0),
    "middle": contiguous_split_map((3, 8, 2), [5, 3], 1),
    "replicated": replicated_map((4, 4), 2),
    "one column each": contiguous_split_map((5, 2), [1, 1], 1),
    "fused": sub_param_map((12, 4), [8, 4], [[4, 4], [2, 2]], 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_with_parts_give_f(name):
    import torch

    layout = LAYOUTS[name]
    full = torch.arange(product(layout.logical_shape), dtype=torch.float32).reshape(layout.logical_shape)
    shards = {rank: layout.extract(full, rank).numpy().reshape(-1) for rank in layout.ranks}
    names = {rank: f"shard {rank}" for rank in layout.ranks}
    binding = map_to_bindings(layout, names)
    if binding.object is not None:
        values = shards[int(binding.object[-1])]
    else:
        values = np.concatenate([shards[int(part.object[-1])][part.begin : part.end] for part in binding.parts])
    assert np.array_equal(values, full.numpy().reshape(-1))
    shapes = {names[rank]: layout.shard_shapes[rank] for rank in layout.ranks}
    bound = bindings_to_map(directory({"p": binding}, shapes), "p", layout.logical_shape)
    assert map_to_bindings(bound.map, bound.objects) == binding


def test_what_is_no_run_is_named():
    transposed = ParamAffineMap((2, 3), {0: (3, 2)}, {0: [AffinePiece((2, 3), 0, (3, 1), 0, (1, 2), (0,))]})
    with pytest.raises(UnsupportedLayoutError, match="neighbours"):
        map_to_bindings(transposed, ["a"])
    scaled = ParamAffineMap((4,), {0: (4,)}, {0: [AffinePiece((4,), 0, (1,), 0, (1,), (0,), 0.5)]})
    with pytest.raises(UnsupportedLayoutError, match="scaled"):
        map_to_bindings(scaled, ["a"])
    holed = ParamAffineMap((4,), {0: (3,)}, {0: [AffinePiece((3,), 0, (1,), 0, (1,), (0,))]})
    with pytest.raises(InvalidMapError, match="uncovered"):
        map_to_bindings(holed, ["a"])
    with pytest.raises(ninfer.BindingError):
        map_to_bindings(LAYOUTS["rows"], ["only one"])
    many = contiguous_split_map((2**21, 2), [1, 1], 1)
    with pytest.raises(UnsupportedLayoutError):
        map_to_bindings(many, ["a", "b"])


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 4), st.integers(1, 3))
def test_any_cutting_into_blocks(seed, rows, columns, width):
    rng = np.random.default_rng(seed)
    order = rng.permutation(2 * rows)
    blocks = [sorted(order[:rows].tolist()), sorted(order[rows:].tolist())]
    shape = (2 * rows * width, columns)
    pieces, shapes = {}, {}
    for rank, held in enumerate(blocks):
        shapes[rank] = (rows * width, columns)
        pieces[rank] = [
            AffinePiece((width, columns), b * width * columns, (columns, 1), n * width * columns, (columns, 1), (rank,))
            for n, b in enumerate(held)
        ]
    layout = ParamAffineMap(shape, shapes, pieces)
    binding = map_to_bindings(layout, ["x", "y"])
    flat = [None] * product(shape)
    for rank, piece in layout.pieces():
        for source, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True):
            flat[source] = ("xy"[rank], dest)
    assert elements(binding) == flat
    assert map_to_bindings(layout.canonical(), ["x", "y"]) == binding


def test_an_element_a_rank_holds_twice_is_taken_once():
    pieces = [
        AffinePiece((4,), 0, (1,), 0, (1,), (0,)),
        AffinePiece((2,), 1, (1,), 4, (1,), (0,)),
        AffinePiece((3,), 3, (1,), 6, (1,), (0,)),
    ]
    layout = ParamAffineMap((6,), {0: (9,)}, {0: pieces})
    assert map_to_bindings(layout, ["a"]).parts == (ninfer.Part("a", 0, 4), ninfer.Part("a", 7, 9))
    with pytest.raises(UnsupportedLayoutError, match="no elements"):
        map_to_bindings(ParamAffineMap((0,), {0: (0,)}, {0: []}), ["a"])


def windows(count):
    """Ranges of which neighbours overlap, in an order of no use to anybody."""
    begins = np.random.default_rng(count).permutation(count).tolist()
    return [(begin, begin + count // 2) for begin in begins]


MANY = {
    "one range many times": lambda count: [(2, 5), (0, 1)] * (count // 2),
    "windows": windows,
    "nested": lambda count: [(n, 2 * count - n) for n in range(count)],
    "stairs": lambda count: [(n, n + 2) for n in range(count)],
    "in order": lambda count: [(3 * n, 3 * n + 2) for n in range(count)],
    "in reverse": lambda count: [(n, n + 1) for n in reversed(range(count))],
    "random": lambda count: [
        (min(a, b), max(a, b) + 1) for a, b in np.random.default_rng(count).integers(0, count, (count, 2)).tolist()
    ],
}


@pytest.mark.parametrize("name", MANY)
def test_many_ranges_of_one_object(name):
    """However they overlap: each element has a location for each time it is given, and twice as many ranges take about
    twice as many steps, there and back."""
    there, back = [], []
    for count in (200, 400):
        given_ = [ninfer.Part("b", *bounds) for bounds in MANY[name](count)]
        held = directory({"p": ninfer.Binding(parts=tuple(given_))}, {"b": (3 * count,)})
        lines, bound = lines_run(lambda held=held: bindings_to_map(held, "p"))
        there.append(lines)
        assert len(bound.objects) == most_often(given_)["b"]
        bound.map.validate(partial=True, whole_parameter=True)
        lines, again = lines_run(lambda bound=bound: map_to_bindings(bound.map, bound.objects))
        back.append(lines)
        assert again.parts == continued(given_)
    for steps in (there, back):
        assert steps[1] < 2.3 * steps[0]
