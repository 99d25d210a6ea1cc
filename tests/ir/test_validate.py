"""P1, P5 and P6 against brute force, with witnesses."""

from __future__ import annotations

import random

import ir_oracle
import ir_worlds
import pytest

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, contiguous_split_map, replicated_map, segmented_map


@pytest.mark.parametrize("seed", range(400))
def test_a_valid_map_is_accepted(seed: int) -> None:
    layout = ir_worlds.random_map(random.Random(seed))
    assert ir_oracle.is_valid(layout)
    layout.validate()
    layout.validate(partial=True)


@pytest.mark.parametrize("seed", range(400))
def test_a_partial_map_is_accepted_as_partial_only(seed: int) -> None:
    layout = ir_worlds.random_map(random.Random(seed), whole=False)
    layout.validate(partial=True)
    for whole_parameter in (False, True):
        if ir_oracle.is_valid(layout, whole_shards=False, whole_parameter=whole_parameter):
            layout.validate(partial=True, whole_parameter=whole_parameter)
        else:
            with pytest.raises(InvalidMapError):
                layout.validate(partial=True, whole_parameter=whole_parameter)
    if not ir_oracle.is_valid(layout):
        with pytest.raises(InvalidMapError):
            layout.validate()


@pytest.mark.parametrize("block", range(20))
def test_one_mutated_piece_is_rejected_exactly_when_brute_force_rejects(block: int) -> None:
    rejected = 0
    for seed in range(block * 100, block * 100 + 100):
        rng = random.Random(seed)
        layout = ir_worlds.random_map(rng, whole=rng.random() < 0.7)
        change = ir_worlds.mutated(rng, layout)
        if change is None:
            continue
        _, rows = change
        try:
            mutant = ParamAffineMap(layout.logical_shape, layout.shard_shapes, rows)
        except InvalidMapError:
            rejected += 1
            continue
        for partial in (False, True):
            if ir_oracle.is_valid(mutant, whole_shards=not partial, whole_parameter=not partial):
                mutant.validate(partial=partial)
            else:
                rejected += 1
                with pytest.raises(InvalidMapError):
                    mutant.validate(partial=partial)
    assert rejected > 50


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        (contiguous_split_map((7, 3), [3, 4], 0), 5),
        (contiguous_split_map((4, 6), [1, 3, 2], 1), 5),
        (segmented_map((12, 2), [(8, False), (4, True)], 0, 2, [[3, 5]]), 6),
        (replicated_map((3, 2), 2), 6),
    ],
)
def test_every_effective_mutation_of_a_builders_map_is_rejected(layout: ParamAffineMap, kinds: int) -> None:
    seen = set()
    for seed in range(300):
        rng = random.Random(seed)
        change = ir_worlds.mutated(rng, layout)
        assert change is not None
        kind, rows = change
        if rows == {rank: list(row) for rank, row in layout.pieces_by_rank.items()}:
            continue
        changed = [p for rank, row in rows.items() for p in row if p not in layout.pieces_by_rank[rank]]
        if kind == "rescale" and all(len(piece.locations) == 1 for piece in changed):
            # A private block times another factor is another true map, the only mutation that is.
            ParamAffineMap(layout.logical_shape, layout.shard_shapes, rows).validate()
            continue
        seen.add(kind)
        with pytest.raises(InvalidMapError):
            ParamAffineMap(layout.logical_shape, layout.shard_shapes, rows).validate()
    assert len(seen) >= kinds


def test_the_first_uncovered_box_is_named() -> None:
    left = AffinePiece((2, 2), 0, (4, 1), 0, (2, 1), [0])
    right = AffinePiece((3, 2), 2, (4, 1), 0, (2, 1), [1])
    with pytest.raises(InvalidMapError, match=r"No rank holds element \(2, 0\).*block is \[2:3, 0:2\]"):
        ParamAffineMap((3, 4), {0: (2, 2), 1: (3, 2)}, {0: [left], 1: [right]}).validate()


def test_an_unwritten_shard_block_is_named_with_its_rank() -> None:
    piece = AffinePiece((2, 2), 0, (2, 1), 0, (4, 1), [0])
    with pytest.raises(InvalidMapError, match=r"Rank 0 leaves address \(0, 2\).*\[0:2, 2:4\]") as caught:
        ParamAffineMap((2, 2), {0: (2, 4)}, {0: [piece]}).validate()
    assert caught.value.rank == 0


def test_a_repeated_element_on_one_rank_is_legal() -> None:
    rows = [AffinePiece((4,), 0, (1,), 0, (1,), [0]), AffinePiece((2,), 1, (1,), 4, (1,), [0])]
    layout = ParamAffineMap((4,), {0: (6,)}, {0: rows})
    layout.validate()
    layout.validate(partial=True)


def test_holders_must_agree_in_scale() -> None:
    rows = {r: [AffinePiece((4,), 0, (1,), 0, (1,), [0, 1], scale)] for r, scale in enumerate((0.5, 0.25))}
    with pytest.raises(InvalidMapError, match=r"Ranks 0 and 1 hold element \(0,\).*0.5 and 0.25"):
        ParamAffineMap((4,), {0: (4,), 1: (4,)}, rows).validate()


def test_a_piece_across_a_holder_boundary_is_named() -> None:
    rows = {0: [AffinePiece((6,), 0, (1,), 0, (1,), [0])], 1: [AffinePiece((2,), 4, (1,), 0, (1,), [0, 1])]}
    with pytest.raises(InvalidMapError, match=r"Rank 0 lists .* element \(4,\).*held by ranks \[0, 1\]"):
        ParamAffineMap((6,), {0: (6,), 1: (2,)}, rows).validate()


def test_cost_does_not_know_how_many_elements_there_are() -> None:
    contiguous_split_map((2**31, 2**31), [2**30] * 2, 1).validate()
    contiguous_split_map((2**31, 2**31), [2**30, 2**30], 1).validate(partial=True)


def test_an_uncovered_block_named_beside_a_wrong_location_holds_nothing_held() -> None:
    # Ranks 0 and 1 both claim elements 1 to 3; only rank 1 has them, and element 0 nobody has.
    pieces = {
        0: [AffinePiece((1,), 3, (1,), 0, (1,), [0, 1])],
        1: [AffinePiece((3,), 1, (1,), 0, (1,), [0, 1])],
    }
    layout = ParamAffineMap((2, 2), {0: (1,), 1: (3,)}, pieces)
    with pytest.raises(InvalidMapError, match=r"element \(0, 0\) .* uncovered block is \[0:1, 0:1\]"):
        layout.validate()
