"""A probed map reproduces its function; what is no view is refused with its kind; differences are located."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering_reference import extract, same_bytes

from deepspeed_affine.errors import BudgetExceededError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import contiguous_split_map, replicated_map, segmented_map
from deepspeed_affine.lowering import PartitionError, assert_partition, probe
from deepspeed_affine.lowering.compress import HOLE, compress

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def check(fn, shape, world, **options):
    """Probe, then compare with the function on data the probe never saw."""
    found = probe(fn, shape, world, **options)
    dtype = options.get("dtype", torch.float32)
    full = (torch.rand(shape, generator=torch.Generator().manual_seed(99)) * 200 - 50).to(dtype)
    for rank in range(world):
        shard = fn(full.clone(), rank)
        if dtype.is_floating_point and dtype.itemsize > 1:
            assert same_bytes(extract(found, full, rank), shard.detach().contiguous())
        assert found.shard_shapes[rank] == tuple(shard.shape)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 3), (7,), (4, 3, 2, 5)])
def test_a_split_is_found_in_every_dtype(dtype, shape):
    sizes = (shape[0] - 2, 2)
    found = check(lambda full, rank: full.split(sizes)[rank], shape, 2, dtype=dtype)
    assert found == contiguous_split_map(shape, sizes, 0).canonical()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scalar_is_found_in_every_dtype(dtype):
    assert probe(lambda full, rank: full, (), 3, dtype=dtype) == replicated_map((), 3).canonical()


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda full, rank: full.chunk(2, 1)[rank], (5, 8)),
        (lambda full, rank: full.view(-1)[rank::2], (3, 4)),
        (lambda full, rank: full.t()[rank * 3 : rank * 3 + 3].contiguous(), (4, 6)),
        (lambda full, rank: full.chunk(2, 1)[rank].transpose(-1, -2).contiguous(), (4, 6, 3, 2)),
        (lambda full, rank: full.reshape(3, 2, 4)[:, rank], (6, 4)),
        (lambda full, rank: full.permute(2, 0, 1)[rank], (3, 4, 2)),
        (lambda full, rank: torch.cat((full[4:], full[:4]))[rank * 4 : rank * 4 + 4], (8, 3)),
        (lambda full, rank: full.flatten()[rank * 6 : rank * 6 + 6], (3, 4)),
        (lambda full, rank: full.flip(0)[rank * 2 : rank * 2 + 2], (4, 3)),
        (lambda full, rank: full[torch.tensor([[0, 5, 2], [1, 3, 4]])[rank]], (6, 2)),
        (lambda full, rank: full.repeat(2, 1), (4, 3)),
        (lambda full, rank: full[rank * 4 : rank * 4 + 4], (4, 3)),
        (lambda full, rank: full, (0, 3)),
    ],
)
def test_every_kind_of_view_is_found(fn, shape):
    check(fn, shape, 2)


def test_holder_sets_are_exact_where_replicated_rows_touch_private_ones():
    def bigcode(full, rank):
        return torch.cat((full[:32].chunk(4)[rank], full[32:]))

    found = check(bigcode, (48, 8), 4)
    assert found == segmented_map((48, 8), [(32, False), (16, True)], 0, 4, [[8] * 4]).canonical()


@pytest.mark.parametrize(("world", "scale"), [(2, 1 / 2), (3, 1 / 3), (6, 1 / 6), (8, 1 / 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_constant_factor_becomes_the_scale_itself_and_not_its_rounding(world, scale, dtype):
    found = probe(lambda full, rank: full / world, (5,), world, dtype=dtype)
    assert found == replicated_map((5,), world, scale).canonical()


def test_a_factor_on_part_of_a_shard_is_its_pieces_scale():
    def fn(full, rank):
        return torch.cat((full[:4].chunk(2)[rank], full[4:] / 2))

    found = check(fn, (6, 2), 2)
    assert {piece.scale for _, piece in found.pieces()} == {1.0, 0.5}
    assert all(len(found.pieces_by_rank[rank]) == 2 for rank in range(2))


def test_a_negative_factor_is_a_factor():
    assert {piece.scale for _, piece in check(lambda full, rank: -full, (3,), 1).pieces()} == {-1.0}


def test_what_the_function_returns_may_be_a_parameter_a_tuple_or_nothing():
    def fn(full, rank):
        return (torch.nn.Parameter(full.chunk(2)[rank]), None) if rank < 2 else None

    found = probe(fn, (4, 3), 3)
    assert found.shard_shapes == {0: (2, 3), 1: (2, 3), 2: (0,)}
    assert found.pieces_by_rank[2] == ()


def test_a_function_may_write_into_its_argument_or_view_it_otherwise():
    def writes(full, rank):
        full.mul_(0.5)
        return full.view(3, 4)[rank]

    assert {piece.scale for _, piece in check(writes, (2, 6), 3).pieces()} == {0.5}


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda full, rank: full.sort(0).values, "data-dependent"),
        (lambda full, rank: full[full > 0], "data-dependent: the shard's shape"),
        (lambda full, rank: full.clamp(max=2), "data-dependent"),
        (lambda full, rank: full.abs(), "data-dependent"),
        (lambda full, rank: full * full, "data-dependent"),
        (lambda full, rank: full.softmax(0), "data-dependent"),
        (lambda full, rank: full / full.sum(), "data-dependent"),
        (lambda full, rank: torch.where(full > 100, full.flip(0), full), "data-dependent"),
        (lambda full, rank: full.mean(0), "mixing"),
        (lambda full, rank: full.sum(1), "mixing"),
        (lambda full, rank: full.cumsum(0), "mixing"),
        (lambda full, rank: full[:4] + full[4:], "mixing"),
        (lambda full, rank: full - full.mean(), "mixing"),
        (lambda full, rank: full + 1, "adding"),
        (lambda full, rank: torch.nn.functional.dropout(full), "not deterministic"),
        (lambda full, rank: full.half(), "turns torch.float32 into torch.float16"),
        (lambda full, rank: [1.0], "returned a float"),
    ],
)
def test_what_is_no_view_is_refused_with_its_kind(fn, kind):
    with pytest.raises(UnsupportedLayoutError, match=kind) as caught:
        probe(fn, (8, 3), 2)
    assert caught.value.rank == 0


def test_padding_is_refused_unless_a_partial_map_is_asked_for():
    def padded(full, rank):
        return torch.cat((full, torch.zeros(2, 3)))[rank * 3 : rank * 3 + 3]

    with pytest.raises(UnsupportedLayoutError, match=r"rank 1: shard element \(1, 0\) and 5 more .*padding"):
        probe(padded, (4, 3), 2)
    found = probe(padded, (4, 3), 2, partial=True)
    assert sum(piece.numel for piece in found.pieces_by_rank[1]) == 3


def test_elements_that_no_rank_holds_are_named():
    with pytest.raises(InvalidMapError, match=r"\(2, 0\)"):
        probe(lambda full, rank: full[rank : rank + 1], (4, 3), 2)


def test_the_functions_own_exception_passes_through():
    def fn(full, rank):
        raise LookupError("no such layer")

    with pytest.raises(LookupError, match="no such layer"):
        probe(fn, (4, 3), 2)


def test_a_permutation_of_single_elements_exceeds_the_budget():
    order = torch.randperm(1 << 19, generator=torch.Generator().manual_seed(0))
    with pytest.raises(BudgetExceededError, match="permutation of single elements"):
        probe(lambda full, rank: full.flatten()[order], (1 << 9, 1 << 10), 1)


def test_a_big_matrix_is_probed_whole():
    found = probe(lambda full, rank: full.chunk(8, 1)[rank], (4096, 1024), 8)
    assert found == contiguous_split_map((4096, 1024), (128,) * 8, 1).canonical()


def test_coordinates_beyond_one_markers_range_are_found():
    """More coordinates than one marker of the dtype keeps apart: they are encoded in several."""
    found = probe(lambda full, rank: full.split((1 << 21, 3))[rank], ((1 << 21) + 3,), 2)
    assert found == contiguous_split_map(((1 << 21) + 3,), (1 << 21, 3), 0).canonical()
    found = probe(lambda full, rank: full[rank::2], (70000, 2), 2, dtype=torch.bfloat16)
    assert [len(found.pieces_by_rank[rank]) for rank in range(2)] == [1, 1]


class TestAssertPartition:
    @staticmethod
    def column(full, rank):
        return full.chunk(2, 1)[rank]

    def test_a_view_passes_and_gives_its_map(self):
        assert assert_partition(self.column, (4, 6), 2) == contiguous_split_map((4, 6), (3, 3), 1).canonical()

    def test_a_matching_map_passes_in_any_cut_and_as_a_document_entry(self):
        stated = contiguous_split_map((4, 6), (3, 3), 1)
        assert_partition(self.column, (4, 6), 2, stated)
        assert_partition(self.column, (4, 6), 2, stated.to_dict())

    @pytest.mark.parametrize(
        ("stated", "message"),
        [
            (contiguous_split_map((4, 8), (4, 4), 1), r"shape \(4, 8\); the function was run on \(4, 6\)"),
            (contiguous_split_map((4, 6), (2, 2, 2), 1), r"ranks \[0, 1, 2\]"),
            (contiguous_split_map((4, 6), (4, 2), 1), r"Rank 0: the function gives a shard of shape \(4, 3\)"),
            (contiguous_split_map((4, 6), (2, 2), 0), r"shape \(4, 3\), the map says \(2, 6\)"),
        ],
    )
    def test_a_map_of_another_shape_fails(self, stated, message):
        with pytest.raises(AssertionError, match=message):
            assert_partition(self.column, (4, 6), 2, stated)

    def test_the_first_wrong_element_is_named(self):
        wrong = contiguous_split_map((4, 6), (3, 3), 1).to_dict()
        for rank, offset in ((0, 3), (1, 0)):
            wrong["ranks"][rank]["pieces"][0]["source"][0] = offset
        with pytest.raises(PartitionError, match=r"Rank 0, shard element \(0, 0\): the function takes .*\(0, 0\)"):
            assert_partition(self.column, (4, 6), 2, wrong)

    def test_wrong_holders_or_scales_are_named(self):
        with pytest.raises(PartitionError, match=r"gives it to ranks \[0, 1\] times 0.5, .* \[0, 1\] times 1.0"):
            assert_partition(lambda full, rank: full / 2, (4,), 2, replicated_map((4,), 2))

    def test_no_partition_at_all_fails_as_an_assertion(self):
        with pytest.raises(AssertionError, match="mixing") as caught:
            assert_partition(lambda full, rank: full.mean(0), (4, 2), 2)
        assert isinstance(caught.value, ValueError)


def _spread(blocks, count):
    table = np.full(count, -1, dtype=np.int64)
    labels = np.full(count, HOLE, dtype=np.int64)
    for block in blocks:
        source, dest = np.full((), block.source), np.full((), block.dest)
        for extent, step, stride in zip(block.shape, block.source_strides, block.dest_strides, strict=True):
            assert extent == 1 or step > 0
            source = source[..., None] + np.arange(extent) * step
            dest = dest[..., None] + np.arange(extent) * stride
        assert (labels[dest] == HOLE).all()
        table[dest], labels[dest] = source, block.label
    return table, labels


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_compression_loses_nothing_of_any_table(data):
    shape = data.draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    count = int(np.prod(shape))
    table = np.array(data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count)), dtype=np.int64)
    if data.draw(st.booleans()):
        table = np.sort(table)
    labels = np.array(data.draw(st.lists(st.integers(-1, 1), min_size=count, max_size=count)), dtype=np.int64)
    found, found_labels = _spread(compress(table.reshape(shape), labels.reshape(shape)), count)
    assert (found_labels == labels).all()
    assert (found[labels != HOLE] == table[labels != HOLE]).all()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda full, rank: full.to_sparse(), "layout torch.sparse_coo"),
        (lambda full, rank: full.to("meta"), "on meta"),
        (lambda full, rank: torch.nested.nested_tensor([full]), "expected a dense one"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_answer_without_elements_at_strides_is_refused(answer, text):
    with pytest.raises(UnsupportedLayoutError, match=text):
        probe(answer, (4, 6), 2)


@pytest.mark.parametrize("name", ["complex64", "qint8", "int4", "float4_e2m1fn_x2", "bits8"])
def test_a_dtype_that_holds_no_markers_is_refused(name):
    dtype = getattr(torch, name, name)
    with pytest.raises(UnsupportedLayoutError, match="Probing with dtype"):
        probe(lambda full, rank: full.chunk(2)[rank], (4, 6), 2, dtype=dtype)


@pytest.mark.parametrize("factor", [2, -1])
def test_multiplied_integers_are_refused(factor):
    with pytest.raises(UnsupportedLayoutError, match=r"multiplies torch\.int32"):
        probe(lambda full, rank: full.chunk(2)[rank] * factor, (4, 6), 2, dtype=torch.int32)


def test_an_eight_bit_float_function_may_scale():
    def scaled(full, rank):
        return (full.chunk(2)[rank].float() * 0.5).to(full.dtype)

    found = probe(scaled, (4, 6), 2, dtype=torch.float8_e5m2)
    assert {piece.scale for _, piece in found.pieces()} == {0.5}


@pytest.mark.parametrize(
    ("shape", "ranks"), [(8, 2), (None, 2), ((-8, 2), 2), ((8, 2), "2"), ((8, 2), 0), ((8, 2), True)]
)
def test_a_shape_or_world_size_of_another_kind_is_refused(shape, ranks):
    with pytest.raises(InvalidMapError, match="expected"):
        probe(lambda full, rank: full, shape, ranks)
