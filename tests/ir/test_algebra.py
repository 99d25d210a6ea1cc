"""Meeting, composing and restricting against brute force, and the laws that tie them together."""

from __future__ import annotations

import random
from collections import Counter

import ir_oracle
import ir_worlds
import pytest

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir import (
    AffinePiece,
    ParamAffineMap,
    compose,
    compose_maps,
    contiguous_split_map,
    inverse,
    meet,
    overlapping,
    replicated_map,
)


def some_pieces(seed: int) -> list[AffinePiece]:
    layout = ir_worlds.random_map(random.Random(seed), max_ranks=2)
    return [piece for _, piece in layout.pieces()]


@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("on", [("source", "source"), ("dest", "source"), ("source", "dest"), ("dest", "dest")])
def test_meet_pairs_every_common_address_once(block: int, on: tuple[str, str]) -> None:
    for seed in range(block * 10, block * 10 + 10):
        for a in some_pieces(seed):
            for b in some_pieces(seed + 5000):
                got = []
                for left, right in meet(a, b, on=on):  # type: ignore[arg-type]
                    assert left.shape == right.shape
                    assert (left.locations, left.scale) == (a.locations, a.scale)
                    assert (right.locations, right.scale) == (b.locations, b.scale)
                    got += list(zip(ir_oracle.pairs(left), ir_oracle.pairs(right), strict=True))
                sides = [0 if side == "source" else 1 for side in on]
                want = [(p, q) for p in ir_oracle.pairs(a) for q in ir_oracle.pairs(b) if p[sides[0]] == q[sides[1]]]
                assert sorted(got) == sorted(want)


@pytest.mark.parametrize("seed", range(150))
def test_composition_is_that_of_relations_and_associates(seed: int) -> None:
    chain = [some_pieces(seed + 1000 * step) for step in range(3)]

    def relation(pieces: list[AffinePiece]) -> list[tuple[int, int]]:
        return sorted(pair for piece in pieces for pair in ir_oracle.pairs(piece))

    def joined(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return sorted((s, u) for s, t in left for v, u in right if t == v)

    rows = [relation(pieces) for pieces in chain]
    first = compose(chain[0], chain[1])
    assert relation(first) == joined(rows[0], rows[1])
    left = compose(first, chain[2])
    right = compose(chain[0], compose(chain[1], chain[2]))
    assert relation(left) == relation(right) == joined(joined(rows[0], rows[1]), rows[2])


def test_composition_multiplies_scales_and_takes_the_inner_locations() -> None:
    outer = AffinePiece((4,), 8, (1,), 0, (1,), [0, 1], 0.5)
    inner = AffinePiece((2,), 1, (1,), 10, (1,), [7], 0.25)
    assert compose([outer], [inner]) == [AffinePiece((2,), 9, (1,), 10, (1,), [7], 0.125)]
    assert inverse(inverse(outer)) == outer


def test_a_flat_interval_of_a_matrix_is_at_most_three_boxes() -> None:
    matrix = AffinePiece((1000, 64), 32, (128, 1), 0, (64, 1), [0])
    for start, stop in [(0, 64_000), (10, 20), (10, 100), (70, 6400), (64, 6400), (70, 6401)]:
        fragment = AffinePiece((stop - start,), start, (1,), 0, (1,), [3])
        found = compose([matrix], [fragment])
        assert len(found) <= 3
        assert sum(piece.numel for piece in found) == stop - start


def test_a_column_split_of_eight_over_four_meets_in_exactly_eight_pieces() -> None:
    fine, coarse = (contiguous_split_map((4096, 4096), [4096 // n] * n, 1) for n in (8, 4))
    found = [pair for _, a in fine.pieces() for _, b in coarse.pieces() for pair in meet(a, b)]
    assert len(found) == 8
    assert sum(a.numel for a, _ in found) == 4096 * 4096


def zero_map(numel: int, degree: int, first: int) -> ParamAffineMap:
    """A flattened shard cut over storages ``first ...`` with alignment padding at the end of the last."""
    width = -(-numel // degree)
    rows = {}
    for part in range(degree):
        size = max(0, min(width, numel - part * width))
        rows[first + part] = [AffinePiece((size,), part * width if size else 0, (1,), 0, (1,), [first + part])]
    return ParamAffineMap((numel,), dict.fromkeys(rows, (width,)), rows)


def test_tensor_parallel_shards_compose_down_to_storages() -> None:
    outer = contiguous_split_map((5, 6), [2, 4], 1)
    whole = compose_maps(outer, {0: zero_map(10, 3, 0), 1: zero_map(20, 3, 3)})
    whole.validate(partial=True, whole_parameter=True)
    assert {location: sum(region.numel for region in whole.gaps(location)) for location in whole.ranks} == {
        0: 0,
        1: 0,
        2: 2,
        3: 0,
        4: 0,
        5: 1,
    }
    with pytest.raises(InvalidMapError, match="unwritten"):
        whole.validate()


def test_composed_replicas_name_every_storage_that_holds_them() -> None:
    outer = replicated_map((7,), 2)
    whole = compose_maps(outer, {0: zero_map(7, 2, 0), 1: zero_map(7, 3, 2)})
    whole.validate(partial=True, whole_parameter=True)
    assert ir_oracle.holders(whole) == {offset: frozenset({offset // 4, 2 + offset // 3}) for offset in range(7)}
    with pytest.raises(InvalidMapError, match="Rank 1 has no inner map"):
        compose_maps(outer, {0: zero_map(7, 2, 0)})
    with pytest.raises(InvalidMapError, match="Rank 1 holds a shard of 7 elements, but its inner map describes 8"):
        compose_maps(outer, {0: zero_map(7, 2, 0), 1: zero_map(8, 3, 2)})


@pytest.mark.parametrize("seed", range(120))
def test_row_restriction_keeps_exactly_the_rows(seed: int) -> None:
    rng = random.Random(seed)
    layout = ir_worlds.random_map(rng)
    if not layout.logical_shape:
        with pytest.raises(InvalidMapError, match="no rows"):
            layout.restrict_rows(0, 0)
        return
    rows = layout.logical_shape[0]
    start = rng.randint(0, rows)
    stop = rng.randint(start, rows)
    width = layout.numel // rows if rows else 1
    kept = layout.restrict_rows(start, stop)
    kept.validate(partial=True)
    want = ir_oracle.relation(layout)
    want = type(want)({row: n for row, n in want.items() if start * width <= row[1] < stop * width})
    assert ir_oracle.relation(kept) == want


def test_vocabularies_padded_differently_compose_over_their_real_rows() -> None:
    """Four source ranks pad 13 rows to 16, two target ranks pad them to 14; no padding row is ever read."""
    source = contiguous_split_map((16, 1), [4] * 4, 0).restrict_rows(0, 13)
    target = contiguous_split_map((14, 1), [7] * 2, 0).restrict_rows(0, 13)
    moves = [
        (r, a.dest_offset, t, b.dest_offset, a.numel)
        for t, piece in target.pieces()
        for r, other in source.pieces()
        for a, b in meet(other, piece)
    ]
    assert moves == [(0, 0, 0, 0, 4), (1, 0, 0, 4, 3), (1, 3, 1, 0, 1), (2, 0, 1, 1, 4), (3, 0, 1, 5, 1)]
    with pytest.raises(InvalidMapError, match="not a range"):
        source.restrict_rows(3, 17)


@pytest.mark.parametrize("seed", range(100))
def test_overlapping_hulls_are_found_exactly(seed: int) -> None:
    rng = random.Random(seed)
    sides = [[(a, a + rng.randint(0, 9)) for a in rng.choices(range(40), k=rng.randint(0, 20))] for _ in range(2)]
    want = [(i, j) for i, (a, b) in enumerate(sides[0]) for j, (c, d) in enumerate(sides[1]) if max(a, c) < min(b, d)]
    assert sorted(overlapping(*sides)) == want


def test_a_regular_inner_map_is_not_compared_with_every_outer_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_affine.ir import algebra

    calls = 0
    real = algebra.meet

    def counted(*args: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        return real(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(algebra, "meet", counted)
    outer = [AffinePiece((8,), 8 * i, (1,), 8 * i, (1,), [0]) for i in range(512)]
    inner = [AffinePiece((8,), 8 * i + 4, (1,), 0, (1,), [i]) for i in range(511)]
    assert len(compose(outer, inner)) == 1022
    assert calls == 1022


@pytest.mark.parametrize("block", range(10))
def test_composed_maps_state_every_element_with_exact_locations(block: int) -> None:
    """Random outer maps, repeated elements included, each shard scattered over one or two storages with padding."""
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(seed)
        outer = ir_worlds.random_map(rng)
        inner: dict[int, ParamAffineMap] = {}
        stated: Counter[tuple[int, int, int, float]] = Counter()
        owners: dict[int, set[int]] = {}
        for rank in outer.ranks:
            numel = outer.shard_numel(rank)
            size = numel + rng.randint(0, 4)
            storages = {2 * rank + i: [] for i in range(rng.randint(1, 2))}  # type: dict[int, list[tuple[int, int]]]
            for address, place in enumerate(sorted(rng.sample(range(size), numel))):
                storages[rng.choice(sorted(storages))].append((address, place))
            pieces = {i: ir_worlds.cut(rng, rows, frozenset([i]), 1.0) for i, rows in storages.items()}
            inner[rank] = ParamAffineMap((numel,), dict.fromkeys(storages, (size,)), pieces)
            place_of = {address: (i, place) for i, rows in storages.items() for address, place in rows}
            for holder, offset, address, _, scale in ir_oracle.relation(outer):
                if holder == rank:
                    storage, place = place_of[address]
                    stated[(storage, offset, place, scale)] += 1
                    owners.setdefault(offset, set()).add(storage)
        found = compose_maps(outer, inner)
        relation = ir_oracle.relation(found)
        assert Counter((i, s, d, scale) for i, s, d, _, scale in relation.elements()) == stated, seed
        assert all(locations == owners[offset] for _, offset, _, locations, _ in relation), seed
        found.validate(partial=True, whole_parameter=True)
