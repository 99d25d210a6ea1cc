"""One form per layout: unique, idempotent, blind to cutting and order, and cheap."""

from __future__ import annotations

import itertools
import random

import ir_oracle
import ir_worlds
import pytest

from deepspeed_affine.errors import BudgetExceededError, InvalidMapError
from deepspeed_affine.ir import (
    AffinePiece,
    ParamAffineMap,
    block_gather_map,
    canonical,
    canonical_pieces,
    contiguous_split_map,
    maximal_runs,
    segmented_map,
    sub_param_map,
)


def codegen_map(rows: int, columns: int, degree: int) -> ParamAffineMap:
    """A codegen fused QKV weight: four groups of q, k, v thirds, dealt to the ranks as the model interleaves them."""
    block = rows // (12 * degree)
    chosen: dict[int, list[int]] = {rank: [] for rank in range(degree)}
    for rank, entry, third in itertools.product(range(degree), range(4), range(3)):
        group, within = divmod(rank * 4 + entry, degree)
        chosen[rank].append(group * 3 * degree + third * degree + within)
    return block_gather_map((rows, columns), chosen, block, 0)


@pytest.mark.parametrize("block", range(10))
def test_a_thousand_recuttings_and_orders_have_one_form(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(seed)
        layout = ir_worlds.random_map(rng, whole=rng.random() < 0.7)
        form = layout.canonical()
        assert ir_oracle.relation(form) == ir_oracle.relation(layout)
        assert form.canonical() == form
        for _ in range(4):
            again = ir_worlds.recut(rng, layout)
            assert again.canonical() == form
            assert again.layout_id() == form.layout_id()


def test_lattices_and_lists_give_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [ir_worlds.random_map(random.Random(seed)) for seed in range(300)]
    listed = [layout.canonical() for layout in layouts]
    monkeypatch.setattr(canonical, "_short", lambda keyed: False)
    assert [layout.canonical() for layout in layouts] == listed


def test_every_small_relation_has_its_own_form() -> None:
    """All injections of up to 4 shard addresses into F of 5: equal forms exactly for equal relations."""
    forms: dict[tuple[AffinePiece, ...], tuple[int, ...]] = {}
    for size in range(5):
        for image in itertools.product(range(5), repeat=size):
            points = [AffinePiece((), source, (), dest, (), (0,)) for dest, source in enumerate(image)]
            form = tuple(canonical_pieces(points))
            assert forms.setdefault(form, image) == image
            assert sorted(p for piece in form for p in ir_oracle.pairs(piece)) == sorted(
                (s, d) for d, s in enumerate(image)
            )
            shuffled = list(points)
            random.Random(len(forms)).shuffle(shuffled)
            assert tuple(canonical_pieces(shuffled)) == form


def test_no_two_canonical_pieces_join_along_a_digit() -> None:
    for seed in range(200):
        form = ir_worlds.random_map(random.Random(seed)).canonical()
        for rank in form.ranks:
            row = canonical_pieces(form.pieces_by_rank[rank])
            sets = [frozenset(ir_oracle.pairs(piece)) for piece in row]
            for (a, left), (b, right) in itertools.permutations(zip(row, sets, strict=True), 2):
                if (a.locations, a.scale) != (b.locations, b.scale):
                    continue
                for extent, s, d in zip(a.shape, a.source_strides, a.dest_strides, strict=True):
                    moved = {(x + extent * s, y + extent * d) for x, y in left}
                    assert not (a.shape == b.shape and moved == right), (a, b)


def test_seed_counts_of_maximal_runs() -> None:
    bigcode = segmented_map((48, 8), [(32, False), (16, True)], 0, 4, [[8] * 4])
    assert [len(bigcode.maximal_runs(rank)) for rank in bigcode.ranks] == [2, 2, 2, 2]
    for hidden in (8, 16, 32, 64, 128, 256):
        layout = codegen_map(3 * hidden, 8, 2)
        layout.validate()
        assert [len(layout.maximal_runs(rank)) for rank in layout.ranks] == [11, 11]
    value = block_gather_map((32, 8), {0: [0, 2], 1: [1, 3]}, 8, 0)
    assert [len(value.maximal_runs(rank)) for rank in value.ranks] == [2, 2]
    output = block_gather_map((8, 32), {0: [0, 2], 1: [1, 3]}, 8, 1)
    runs = output.maximal_runs(0)
    assert [(run.shape, run.source_offset, run.source_strides) for run in runs] == [
        ((8, 8), 0, (32, 1)),
        ((8, 8), 16, (32, 1)),
    ]


def test_seed_counts_of_canonical_pieces() -> None:
    bigcode = segmented_map((48, 8), [(32, False), (16, True)], 0, 4, [[8] * 4]).canonical()
    assert [len(row) for row in bigcode.pieces_by_rank.values()] == [2, 2, 2, 2]
    assert bigcode.pieces_by_rank[0][0].to_dict()["shape"] == [8, 8]
    counts = {
        hidden: [len(row) for row in codegen_map(3 * hidden, 8, 2).canonical().pieces_by_rank.values()]
        for hidden in (8, 16, 32, 64, 128, 256)
    }
    assert max(max(row) for row in counts.values()) <= 11
    assert len({tuple(row) for row in counts.values()}) == 1
    value = block_gather_map((32, 8), {0: [0, 2], 1: [1, 3]}, 8, 0).canonical()
    assert [len(row) for row in value.pieces_by_rank.values()] == [1, 1]
    (piece,) = block_gather_map((8, 32), {0: [0, 2], 1: [1, 3]}, 8, 1).canonical().pieces_by_rank[0]
    assert (piece.shape, piece.source_strides, piece.dest_strides) == ((8, 2, 8), (32, 16, 1), (16, 8, 1))


def test_merging_stops_at_a_change_of_locations_or_scale() -> None:
    left = AffinePiece((4,), 0, (1,), 0, (1,), [0])
    right = AffinePiece((4,), 4, (1,), 4, (1,), [0])
    assert len(canonical_pieces([left, right])) == 1
    assert len(canonical_pieces([left, AffinePiece((4,), 4, (1,), 4, (1,), [0, 1])])) == 2
    assert len(canonical_pieces([left, AffinePiece((4,), 4, (1,), 4, (1,), [0], 0.5)])) == 2


def test_pieces_are_counted_not_elements() -> None:
    """The form of a billion-element shard, cut into odd bands and strips, is found without listing any of it."""
    rng = random.Random(7)
    rows, columns = 500_257, 6144
    strips = [0, *sorted(rng.sample(range(1, columns), 12)), columns]
    pieces = []
    for left, right in itertools.pairwise(strips):
        bands = [0, *sorted(rng.sample(range(1, rows), 6)), rows]
        for top, bottom in itertools.pairwise(bands):
            pieces.append(
                AffinePiece(
                    (bottom - top, right - left),
                    top * 2 * columns + left,
                    (2 * columns, 1),
                    top * columns + left,
                    (columns, 1),
                    [0],
                )
            )
    rng.shuffle(pieces)
    assert canonical_pieces(pieces) == [
        AffinePiece((rows, columns), 0, (2 * columns, 1), 0, (columns, 1), [0]),
    ]
    halves = [AffinePiece((5 * 10**8,), start, (2,), start, (2,), [0]) for start in (1, 0)]
    assert canonical_pieces(halves) == [AffinePiece((10**9,), 0, (1,), 0, (1,), [0])]


def test_uneven_fused_columns_keep_one_piece_per_width() -> None:
    widths = [[512] * 8, [128] * 8, [128] * 8]
    layout = sub_param_map((50257, 6144), [4096, 1024, 1024], widths, 1).canonical()
    assert {len(row) for row in layout.pieces_by_rank.values()} == {2}
    for extent in (2, 12, 4096):
        assert len(contiguous_split_map((extent, 8), [3, 5], 1).canonical().pieces_by_rank[0]) == 1


def test_a_backward_shard_is_listed_or_refused_by_budget() -> None:
    backward = [AffinePiece((), 9 - i, (), i, (), [0]) for i in range(10)]
    assert canonical_pieces(backward[::-1]) == backward
    runs = [AffinePiece((2**21,), 2**21 * (1 - i), (1,), i * 2**21, (1,), [0]) for i in range(2)]
    assert canonical_pieces(runs) == runs


def test_what_has_no_form_within_budget_is_refused_by_name() -> None:
    wild = AffinePiece((10**9, 10**9), 0, (1, 10**9), 0, (10**9, 10**9 + 1), [0])
    with pytest.raises(BudgetExceededError, match="interleave"):
        canonical_pieces([wild])


def test_an_address_named_twice_has_no_canonical_form() -> None:
    piece = AffinePiece((4,), 0, (1,), 0, (1,), [0])
    other = AffinePiece((2,), 6, (1,), 3, (1,), [0])
    for call in (canonical_pieces, maximal_runs):
        with pytest.raises(InvalidMapError, match=r"address \(3,\).* 2 times"):
            call([piece, other])


def columns(order: list[int], rows: int) -> ParamAffineMap:
    """Column ``order[j]`` of F is column j of the only shard, each its own piece."""
    n = len(order)
    pieces = [AffinePiece((rows,), order[j], (n,), j, (n,), [0]) for j in range(n)]
    return ParamAffineMap((rows, n), {0: (rows, n)}, {0: pieces})


def test_a_transposed_matrix_given_column_by_column_is_one_piece() -> None:
    n = 16384
    pieces = [AffinePiece((64,), i * 64, (1,), i, (n,), [0]) for i in range(n)]
    form = ParamAffineMap((n, 64), {0: (64, n)}, {0: pieces}).canonical()
    whole = AffinePiece((n, 64), 0, (64, 1), 0, (1, n), [0])
    assert form == ParamAffineMap((n, 64), {0: (64, n)}, {0: [whole]}).canonical()
    assert len(form.pieces_by_rank[0]) == 1


@pytest.mark.parametrize("rows", [64, 100_000])
def test_permuted_columns_have_a_form_whose_size_follows_the_columns(rows: int) -> None:
    order = list(range(256))
    random.Random(3).shuffle(order)
    form = columns(order, rows).canonical()
    assert len(form.pieces_by_rank[0]) <= 256
    backwards = columns(list(range(2047, -1, -1)), rows).canonical()
    assert len(backwards.pieces_by_rank[0]) <= 2048


def test_permuted_columns_have_one_form_however_they_are_cut() -> None:
    order = list(range(24))
    random.Random(5).shuffle(order)
    layout = columns(order, 40)
    points = [
        AffinePiece((), source, (), dest, (), [0])
        for piece in layout.pieces_by_rank[0]
        for source, dest in ir_oracle.pairs(piece)
    ]
    listed = ParamAffineMap(layout.logical_shape, layout.shard_shapes, {0: points})
    assert listed.canonical() == layout.canonical()
