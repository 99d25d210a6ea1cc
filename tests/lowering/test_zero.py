"""ZeRO as a map: fragments tile the shard, padding lies in no piece, contradictions are refused."""

from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.errors import CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.lowering.zero import (
    Fragment,
    check_consecutive,
    fragment_pieces,
    row_major_strides,
    whole_pieces,
    zero3_interval,
)


@dataclass(frozen=True)
class Stored:
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def elements(pieces):
    """Shard address -> (storage, address), by brute force."""
    found = {}
    for piece in pieces:
        (storage,) = piece.locations
        for source, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True):
            assert source not in found
            found[source] = (storage, dest)
    return found


@st.composite
def partitions(draw):
    """Runs of one shard, each in a stored flat tensor of its own, some of them empty."""
    fragments, expected, address = [], {}, 0
    for rank in range(draw(st.integers(1, 6))):
        numel = draw(st.integers(0, 5))
        start, offset, stride = draw(st.integers(0, 4)), draw(st.integers(0, 9)), draw(st.integers(1, 3))
        length = start + numel + draw(st.integers(0, 3))
        fragments.append((Fragment(Stored(offset, (length,), (stride,)), start, numel, rank), rank))
        for element in range(numel):
            expected[address + element] = (rank, offset + (start + element) * stride)
        address += numel
    return fragments, expected, address


@given(partitions())
def test_fragments_in_order_tile_the_shard(world):
    fragments, expected, numel = world
    pieces = fragment_pieces(fragments, numel, param="w", rank=0)
    assert elements(pieces) == expected
    assert all(piece.numel for piece in pieces)


@given(partitions(), st.integers(-3, 3).filter(bool))
def test_a_shard_of_another_size_is_refused(world, off):
    fragments, _, numel = world
    with pytest.raises(CheckpointFormatError, match="'w', state 'm'") as raised:
        fragment_pieces(fragments, numel + off, param="w", rank=3, state="m")
    assert (raised.value.param, raised.value.rank) == ("w", 3)


@given(st.integers(0, 9), st.integers(1, 9))
def test_a_fragment_that_leaves_its_partition_is_refused(start, numel):
    stored = Stored(0, (start + numel - 1,), (1,))
    with pytest.raises(CheckpointFormatError, match="of a stored partition of"):
        fragment_pieces([(Fragment(stored, start, numel, 2), 0)], numel, param="w", rank=0)


@pytest.mark.parametrize(("start", "numel"), [(-1, 3), (0, -1), (-5, -5)])
def test_negative_fragments_are_refused(start, numel):
    with pytest.raises(CheckpointFormatError, match="at least 0"):
        Fragment(Stored(0, (9,), (1,)), start, numel, 0)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_partitions_that_are_not_flat_are_refused(shape):
    stored = Stored(0, shape, row_major_strides(shape))
    with pytest.raises(CheckpointFormatError, match="one-dimensional"):
        fragment_pieces([(Fragment(stored, 0, 1, 0), 0)], 1, param="w", rank=0)


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_zero3_parts_cover_the_parameter_and_reserve_alike(numel, count):
    parts = [zero3_interval(numel, count, rank) for rank in range(count)]
    assert sum(held for held, _ in parts) == numel
    assert len({reserved for _, reserved in parts}) == 1
    reserved = parts[0][1]
    assert numel <= reserved * count < numel + count
    assert all(held <= reserved for held, _ in parts)
    # Only the last parts are short: padding is at the end, never between.
    assert [held for held, _ in parts] == sorted((held for held, _ in parts), reverse=True)


@pytest.mark.parametrize(("count", "rank"), [(0, 0), (2, 2), (2, -1), (-1, 0)])
def test_zero3_ranks_outside_are_refused(count, rank):
    with pytest.raises(InvalidMapError, match="partition rank"):
        zero3_interval(5, count, rank)


@given(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 20), st.randoms())
def test_whole_tensors_lead_to_their_addresses_whatever_their_strides(extents, offset, random):
    shape = tuple(extents)
    order = list(range(len(shape)))
    random.shuffle(order)
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= max(shape[axis], 1)
    (piece,) = whole_pieces(Stored(offset, shape, tuple(strides)), 7)
    expected, address = {}, 0

    def walk(axis, place):
        nonlocal address
        if axis == len(shape):
            expected[address] = (7, place)
            address += 1
            return
        for index in range(shape[axis]):
            walk(axis + 1, place + index * strides[axis])

    walk(0, offset)
    assert elements([piece]) == expected


@given(st.lists(st.integers(0, 5), max_size=5))
def test_row_major_strides_step_through_every_element_in_order(extents):
    shape = tuple(extents)
    piece = AffinePiece(shape, 0, row_major_strides(shape), 0, row_major_strides(shape), (0,))
    assert list(piece.source_offsets()) == list(range(piece.numel))


class TestConsecutive:
    """Slices of one ZeRO-1 shard that do not continue each other come from exchanged files."""

    def parts(self, *found):
        return [Fragment(Stored(0, (10,), (1,)), start, numel, rank) for rank, start, numel in found]

    @pytest.mark.parametrize(
        "found",
        [
            [(0, 3, 4)],
            [(0, 3, 7), (1, 0, 2)],
            [(0, 3, 7), (1, 0, 10), (2, 0, 1)],
            [(0, 3, 7), (1, 0, 0), (1, 0, 2)],
            [],
        ],
    )
    def test_one_run_over_the_partitions(self, found):
        check_consecutive(self.parts(*found), param="w", label="tp 0")

    @pytest.mark.parametrize(
        "found",
        [[(0, 0, 2), (1, 3, 7)], [(0, 3, 6), (1, 0, 3)], [(0, 3, 7), (2, 0, 2)], [(0, 3, 7), (1, 1, 2)]],
    )
    def test_anything_else_is_refused(self, found):
        with pytest.raises(CheckpointFormatError, match=r"'w': tp 0 .* exchanged") as caught:
            check_consecutive(self.parts(*found), param="w", label="tp 0")
        assert caught.value.param == "w"


class TestExpanded:
    """A stored element that stands for several is read as often; a partition has elements of its own."""

    @pytest.mark.parametrize(
        ("shape", "strides"),
        [((3,), (0,)), ((2, 3), (0, 1)), ((2, 3), (1, 0)), ((2, 3, 2), (0, 1, 0)), ((2, 2), (0, 0))],
    )
    def test_every_repetition_is_a_piece(self, shape, strides):
        pieces = whole_pieces(Stored(5, shape, strides), 7)
        expected = {
            address: (7, 5 + sum(index * stride for index, stride in zip(place, strides, strict=True)))
            for address, place in enumerate(product(*map(range, shape)))
        }
        assert elements(pieces) == expected

    def test_more_than_anybody_means_is_refused(self):
        with pytest.raises(UnsupportedLayoutError, match=r"'mask'.*contiguous") as caught:
            whole_pieces(Stored(0, (1 << 30, 4), (0, 1)), 7, param="mask")
        assert caught.value.param == "mask"

    def test_a_partition_that_repeats_one_element_is_refused(self):
        fragment = Fragment(Stored(0, (6,), (0,)), 0, 6, 3)
        with pytest.raises(CheckpointFormatError, match=r"'w'.*rank 3 repeats one element 6 times"):
            fragment_pieces([(fragment, 0)], 6, param="w", rank=0)
