"""Values that exist are right: construction, immutability, builders, holders and gaps."""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ir_oracle
import ir_worlds
import pytest

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir import (
    SCALE_POWER_BY_STATE,
    AffinePiece,
    ParamAffineMap,
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)


def piece(**changes: object) -> AffinePiece:
    fields: dict[str, object] = {
        "shape": (2, 3),
        "source_offset": 0,
        "source_strides": (3, 1),
        "dest_offset": 0,
        "dest_strides": (3, 1),
        "locations": [0],
    }
    return AffinePiece(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": (True, 3)}, "not a bool"),
        ({"shape": (2.0, 3)}, "type float"),
        ({"shape": (-2, 3)}, "zero or more"),
        ({"shape": "23"}, "sequence of integers"),
        ({"source_offset": -1}, "source offset is -1"),
        ({"source_offset": False}, "not a bool"),
        ({"dest_offset": 2**63}, "64 signed bits"),
        ({"source_strides": (-3, 1)}, "source stride is -3"),
        ({"source_strides": (3,)}, "1 source strides"),
        ({"dest_strides": (3, 1, 1)}, "3 dest strides"),
        ({"source_strides": (0, 1)}, "names one source address 2 times"),
        ({"dest_strides": (3, 0)}, "names one dest address 3 times"),
        ({"source_offset": 2**63 - 2}, "reaches offset"),
        ({"locations": []}, "name no rank"),
        ({"locations": [-1]}, "location is -1"),
        ({"locations": 0}, "set of ranks"),
        ({"scale": 0.0}, "zero"),
        ({"scale": float("nan")}, "nan"),
        ({"scale": float("-inf")}, "-inf"),
        ({"scale": True}, "type bool"),
        ({"scale": "1"}, "type str"),
        ({"scale": 10**400}, "finite"),
    ],
)
def test_a_piece_that_cannot_be_applied_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidMapError, match=text):
        piece(**changes)


def test_a_piece_is_a_value() -> None:
    one = piece(shape=[2, 3], locations={0})
    assert one == piece()
    assert hash(one) == hash(piece())
    assert pickle.loads(pickle.dumps(one)) == one
    assert not hasattr(one, "__dict__")
    with pytest.raises(AttributeError):
        one.scale = 2.0  # type: ignore[misc]
    assert piece(shape=(0, 8), source_strides=(0, 0)).numel == 0
    assert list(piece(shape=(0, 8)).source_offsets()) == []
    assert list(AffinePiece((), 5, (), 7, (), [0]).source_offsets()) == [5]


@pytest.mark.parametrize("seed", range(60))
def test_offsets_are_those_of_the_definition(seed: int) -> None:
    for _, each in ir_worlds.random_map(random.Random(seed)).pieces():
        assert list(zip(each.source_offsets(), each.dest_offsets(), strict=True)) == ir_oracle.pairs(each)


@pytest.mark.parametrize(
    ("shapes", "rows", "text"),
    [
        ({0: (6,)}, {0: [], 1: []}, "Rank 1 has pieces but no shard shape"),
        ({0: (6,)}, {0: [piece(source_offset=1)]}, "reaches element 6 of a parameter of 6"),
        ({0: (5,)}, {0: [piece()]}, "reaches address 5 of a shard of 5"),
        ({0: (6,), 1: (6,)}, {0: [piece(locations=[1])], 1: []}, "without rank 0 itself"),
        ({0: (6,)}, {0: [piece(locations=[0, 4])]}, r"\[4\], which are no ranks"),
        ({0: (6,)}, {0: ["x"]}, "expected an AffinePiece"),
        ({-1: (6,)}, {}, "A rank is -1"),
        ({True: (6,)}, {}, "not a bool"),
        ({0: (-6,)}, {}, "zero or more"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(shapes: dict, rows: dict, text: str) -> None:
    with pytest.raises(InvalidMapError, match=text):
        ParamAffineMap((2, 3), shapes, rows)


def test_a_map_is_a_value() -> None:
    one = contiguous_split_map((4, 6), [1, 3], 0)
    other = pickle.loads(pickle.dumps(one))
    assert one == other
    assert hash(one) == hash(other)
    assert ParamAffineMap.from_dict(one.to_dict()) == one
    with pytest.raises(AttributeError, match="immutable"):
        one.logical_shape = (1,)
    with pytest.raises(TypeError):
        one.shard_shapes[0] = (1,)  # type: ignore[index]
    assert one.pieces_by_rank[1][0].shape == (3, 6)
    assert one.ranks == (0, 1)


@pytest.mark.parametrize("seed", range(200))
def test_holders_gaps_and_uncovered_are_those_of_brute_force(seed: int) -> None:
    layout = ir_worlds.random_map(random.Random(seed), whole=False)
    want = ir_oracle.holders(layout)
    held = layout.holders()
    assert dict(held.items()) == want
    assert list(held) == sorted(want)
    assert len(held) == len(want)
    assert all(held[offset] == ranks for offset, ranks in want.items())
    regions = layout.holder_regions()
    assert sorted((o, ranks) for region, ranks in regions for o in region.offsets()) == sorted(want.items())
    missing = [offset for offset in range(layout.numel) if offset not in want]
    assert list(layout.uncovered_offsets()) == missing
    assert sorted(o for region in layout.uncovered_regions() for o in region.offsets()) == missing
    stated = ir_oracle.relation(layout)
    for rank in layout.ranks:
        written = {row[2] for row in stated if row[0] == rank}
        open_ = [a for a in range(layout.shard_numel(rank)) if a not in written]
        assert sorted(o for region in layout.gaps(rank) for o in region.offsets()) == open_


def test_uncovered_offsets_are_lazy_and_regions_few() -> None:
    columns = contiguous_split_map((10**6, 10**6), [10, 10**6 - 10], 1)
    hole = ParamAffineMap((10**6, 10**6), {0: (10**6, 10)}, {0: columns.pieces_by_rank[0]})
    assert list(itertools.islice(hole.uncovered_offsets(), 3)) == [10, 11, 12]
    assert len(hole.uncovered_regions()) <= 2
    assert len(hole.holder_regions()) == 1


SMALL_SHAPES = [shape for n in (1, 2, 3) for shape in itertools.product(range(4), repeat=n)]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_every_builder_on_every_small_shape_is_valid(degree: int) -> None:
    def widths(extent: int, seed: int) -> list[int]:
        rng = random.Random(seed)
        cuts = sorted(rng.randint(0, extent) for _ in range(degree - 1))
        return [b - a for a, b in itertools.pairwise([0, *cuts, extent])]

    for shape in SMALL_SHAPES:
        for axis, extent in enumerate(shape):
            split = contiguous_split_map(shape, widths(extent, len(shape)), axis)
            fused_shape = (*shape[:axis], 2 * extent + 1, *shape[axis + 1 :])
            fused = sub_param_map(fused_shape, [extent, extent + 1], [widths(extent, 1), widths(extent + 1, 2)], axis)
            mixed = segmented_map(fused_shape, [(extent, False), (extent + 1, True)], axis, degree, [widths(extent, 3)])
            for layout in (split, fused, mixed, replicated_map(shape, degree)):
                layout.validate()
                layout.validate_coverage()
                assert ir_oracle.is_valid(layout)
                assert layout.canonical().canonical() == layout.canonical()
                assert ir_oracle.relation(layout.canonical()) == ir_oracle.relation(layout)


def test_builders_refuse_what_does_not_add_up() -> None:
    for call, text in [
        (lambda: contiguous_split_map((4,), [1, 2], 0), "together 3; expected 4"),
        (lambda: contiguous_split_map((4,), [1, 3], 1), "no such axis"),
        (lambda: contiguous_split_map((4,), [1, 3], True), "expected an integer"),
        (lambda: sub_param_map((4,), [4], [[1, 2]], 0), "together 3; expected 4"),
        (lambda: sub_param_map((4,), [2, 2], [[1, 1]], 0), "1 lists of shard widths"),
        (lambda: segmented_map((4,), [(4, False)], 0, 2, []), "no widths are left"),
        (lambda: segmented_map((4,), [(4, False)], 0, 2, [[4]]), "one for each of 2 ranks"),
        (lambda: segmented_map((4,), [(4, True)], 0, 2, [[2, 2]]), "more lists of split widths"),
        (lambda: segmented_map((5,), [(4, True)], 0, 2, []), "expected 5"),
        (lambda: block_gather_map((4,), {0: [0, 2]}, 2, 0), "names block 2"),
    ]:
        with pytest.raises(InvalidMapError, match=text):
            call()


def test_a_block_gathered_by_two_ranks_is_held_by_both() -> None:
    layout = block_gather_map((6,), {0: [0, 1], 1: [1, 2]}, 2, 0)
    layout.validate()
    assert layout.holders()[2] == frozenset({0, 1})


def test_scalars_split_and_replicate() -> None:
    contiguous_split_map((), [1], 0).validate()
    contiguous_split_map((), [0, 1], 0).validate()
    replicated_map((), 3).validate()


def test_moments_carry_the_inverse_powers() -> None:
    assert dict(SCALE_POWER_BY_STATE) == {"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2}


def test_the_ir_needs_neither_torch_nor_numpy_nor_deepspeed() -> None:
    code = (
        "import sys\n"
        "import deepspeed_affine.ir as ir\n"
        "m = ir.segmented_map((48, 8), [(32, False), (16, True)], 0, 4, [[8] * 4])\n"
        "m.validate(); m.canonical().layout_id(); m.restrict_rows(0, 5); ir.write_document({'w': m})\n"
        "print(sorted({'torch', 'numpy', 'deepspeed'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "build",
    [
        lambda: ParamAffineMap((4,), [(4,)], {}),  # type: ignore[arg-type]
        lambda: ParamAffineMap((4,), {0: (4,)}, [[]]),  # type: ignore[arg-type]
        lambda: ParamAffineMap((4,), {0: (4,)}, {0: 5}),  # type: ignore[dict-item]
        lambda: ParamAffineMap((4,), {0: (4,), "1": (4,)}, {}),  # type: ignore[dict-item]
        lambda: sub_param_map((4,), [4], 4, 0),  # type: ignore[arg-type]
        lambda: segmented_map((4,), [4], 0, 1, [[4]]),  # type: ignore[list-item]
        lambda: segmented_map((4,), 4, 0, 1, [[4]]),  # type: ignore[arg-type]
        lambda: block_gather_map((4,), [[0, 1]], 2, 0),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(build: Callable[[], object]) -> None:
    with pytest.raises(InvalidMapError, match="expected"):
        build()


@pytest.mark.parametrize("question", ["gaps", "maximal_runs", "shard_numel"])
@pytest.mark.parametrize("rank", [7, None, [0], "0"])
def test_a_rank_the_map_does_not_have_is_refused(question: str, rank: Any) -> None:
    with pytest.raises(InvalidMapError, match="rank"):
        getattr(contiguous_split_map((4,), [2, 2], 0), question)(rank)
