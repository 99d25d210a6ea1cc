"""Laws over hypothesis-drawn worlds; a failing example shrinks and prints how to repeat it."""

from __future__ import annotations

import random

import ir_oracle
import ir_worlds
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, canonical_pieces, contiguous_split_map, meet

SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@given(st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_validation_decides_what_brute_force_decides(rng: random.Random) -> None:
    layout = ir_worlds.random_map(rng, whole=rng.random() < 0.5)
    change = ir_worlds.mutated(rng, layout)
    if change is not None and rng.random() < 0.7:
        try:
            layout = ParamAffineMap(layout.logical_shape, layout.shard_shapes, change[1])
        except InvalidMapError:
            return
    for partial in (False, True):
        if ir_oracle.is_valid(layout, whole_shards=not partial, whole_parameter=not partial):
            layout.validate(partial=partial)
        else:
            with pytest.raises(InvalidMapError):
                layout.validate(partial=partial)


@given(st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_the_form_is_a_function_of_the_relation(rng: random.Random) -> None:
    one = ir_worlds.random_map(rng)
    other = ir_worlds.recut(rng, one) if rng.random() < 0.5 else ir_worlds.random_map(rng)
    alike = (one.logical_shape, one.shard_shapes, ir_oracle.relation(one)) == (
        other.logical_shape,
        other.shard_shapes,
        ir_oracle.relation(other),
    )
    assert (one.canonical() == other.canonical()) == alike
    assert (one.layout_id() == other.layout_id()) == alike


@given(SHAPES, st.integers(0, 2), st.integers(1, 4), st.data())
@settings(max_examples=200)
def test_two_splits_of_one_parameter_meet_in_every_element_once(
    shape: tuple[int, ...], axis: int, degree: int, data: st.DataObject
) -> None:
    axes = [axis % len(shape), data.draw(st.integers(0, len(shape) - 1))]
    layouts = []
    for each in axes:
        cuts = sorted(data.draw(st.lists(st.integers(0, shape[each]), min_size=degree - 1, max_size=degree - 1)))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, shape[each]], strict=True)]
        layouts.append(contiguous_split_map(shape, sizes, each))
    found = [
        offset
        for _, a in layouts[0].pieces()
        for _, b in layouts[1].pieces()
        for part, _ in meet(a, b)
        for offset in part.source_offsets()
    ]
    assert sorted(found) == list(range(layouts[0].numel))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30), st.integers(1, 30)), max_size=3), st.integers(0, 9))
@settings(max_examples=200)
def test_one_piece_of_any_strides_keeps_its_elements(digits: list[tuple[int, int, int]], offset: int) -> None:
    piece = AffinePiece([d[0] for d in digits], offset, [d[1] for d in digits], 3, [d[2] for d in digits], [0])
    pairs = ir_oracle.pairs(piece)
    if len({dest for _, dest in pairs}) < len(pairs):
        with pytest.raises(InvalidMapError):
            canonical_pieces([piece])
        return
    form = canonical_pieces([piece])
    assert sorted(p for each in form for p in ir_oracle.pairs(each)) == sorted(pairs)
    assert canonical_pieces([AffinePiece((), s, (), d, (), [0]) for s, d in pairs]) == form
