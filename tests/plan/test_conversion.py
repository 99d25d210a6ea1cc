"""Plans are data: one source for every element, every further holder to compare, and all of it stated beforehand."""

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.errors import AffineError, CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, contiguous_split_map, replicated_map
from deepspeed_affine.plan.conversion import (
    ConversionPlan,
    CopiedFile,
    ObjectFile,
    ShardPieces,
    SourceStorage,
    TensorFile,
    overlapping_pairs,
    plan_sources,
)
from deepspeed_affine.plan.paths import check_paths, state_path


def run(start, numel, address, where):
    return AffinePiece((numel,), start, (1,), address, (1,), (where,))


def cut_into(numel, cuts, storage, gap=1):
    """A shard stored in runs, in order, with a gap after each."""
    edges = sorted({0, numel, *cuts})
    pieces, address = [], 0
    for start, stop in pairwise(edges):
        pieces.append(run(start, stop - start, address, storage))
        address += stop - start + gap
    return tuple(pieces)


def addresses(pieces):
    """Element of F -> (storage, address), by brute force."""
    found = {}
    for piece in pieces:
        (storage,) = piece.locations
        for source, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True):
            assert source not in found
            found[source] = (storage, dest)
    return found


@st.composite
def layouts(draw):
    ranks = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["replicated", "rows", "columns"]))
    if kind == "replicated":
        shape = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
        return replicated_map(shape, ranks)
    sizes = [draw(st.integers(0, 3)) for _ in range(ranks)]
    sizes[0] += 1
    other = draw(st.integers(1, 4))
    shape = (sum(sizes), other) if kind == "rows" else (other, sum(sizes))
    return contiguous_split_map(shape, sizes, 0 if kind == "rows" else 1)


@given(layouts(), st.data())
def test_every_element_has_one_source_and_every_other_holder_a_replica(layout, data):
    shards, truth = {}, {}
    for rank, shape in layout.shard_shapes.items():
        numel = shape[0] * shape[1]
        copies = []
        for copy in range(data.draw(st.integers(1, 2))):
            cuts = data.draw(st.lists(st.integers(0, numel), max_size=4))
            storage = 10 * rank + copy
            copies.append(ShardPieces(cut_into(numel, cuts, storage), f"tp {rank}"))
        shards[rank] = tuple(copies)
        for piece in layout.pieces_by_rank[rank]:
            for source, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True):
                for copy in copies:
                    truth.setdefault(source, set()).add(addresses(copy.pieces)[dest])
    pieces, replicas = plan_sources(layout, shards, param="w", state="fp32")
    chosen = addresses(pieces)
    assert chosen.keys() == truth.keys() == set(range(layout.numel))
    held = {element: {place} for element, place in chosen.items()}
    for replica in replicas:
        first, other = addresses(replica.primary), addresses(replica.pieces)
        assert first.keys() == other.keys()
        for element, place in first.items():
            assert chosen[element] == place
            held[element].add(other[element])
    assert held == truth
    # The lowest rank's first copy is read, so that few files are open.
    for element, (storage, _) in chosen.items():
        assert storage == min(place[0] for place in truth[element])


def test_a_rank_without_a_stored_shard_is_named():
    with pytest.raises(CheckpointFormatError, match="rank 1 holds 3 elements") as raised:
        plan_sources(replicated_map((3,), 2), {0: (ShardPieces((run(0, 3, 0, 0),), "tp 0"),)}, param="w", state="m")
    assert raised.value.param == "w"
    assert raised.value.rank == 1


def test_a_shard_stored_in_part_is_refused():
    shards = {0: (ShardPieces((run(0, 2, 0, 0),), "tp 0"),)}
    with pytest.raises(InvalidMapError, match="2 of the 3"):
        plan_sources(replicated_map((3,), 1), shards, param="w", state="m")


def test_the_work_grows_with_the_pieces_and_not_with_their_product():
    def pieces_of(count):
        layout = contiguous_split_map((count, 4), [1] * count, 0)
        shards = {rank: (ShardPieces(cut_into(4, (), rank), f"tp {rank}"),) for rank in range(count)}
        return len(plan_sources(layout, shards, param="w", state="m")[0])

    assert [pieces_of(count) for count in (10, 1000)] == [10, 1000]


@st.composite
def covers(draw, storage):
    numel = 24
    if draw(st.booleans()):
        return cut_into(numel, draw(st.lists(st.integers(0, numel), max_size=6)), storage)
    rows = draw(st.sampled_from([2, 3, 4, 6]))
    columns = numel // rows
    cut = draw(st.integers(1, columns))
    parts = [(0, cut), (cut, columns)]
    return tuple(
        AffinePiece((rows, b - a), a, (columns, 1), a * rows, (b - a, 1), (storage,)) for a, b in parts if b > a
    )


@given(covers(0), covers(1))
def test_overlapping_pairs_meet_in_every_element_once(left, right):
    ours, theirs = addresses(left), addresses(right)
    met = Counter()
    for a, b in overlapping_pairs(left, right):
        assert a.numel == b.numel
        for x, y in zip(a.source_offsets(), b.source_offsets(), strict=True):
            assert x == y
        for element, place, other in zip(a.source_offsets(), a.dest_offsets(), b.dest_offsets(), strict=True):
            assert ours[element] == (0, place)
            assert theirs[element] == (1, other)
            met[element] += 1
    assert met == Counter(range(24))


def storage(index, numel=10, file="f", key="0", crc=1):
    return SourceStorage(file, key, "float32", numel, 64, 4 * numel, crc)


def test_bytes_are_stated_from_pieces():
    task = TensorFile("zero/w/fp32.pt", "w", "fp32", "float32", 4, (2, 3), (3, 3), None, "param", (run(0, 9, 0, 0),))
    plan = ConversionPlan((storage(0),), (task,), (ObjectFile("zero/o.pt", {}, 7),), (CopiedFile("m.pt", "s", 11),))
    assert plan.bytes_in == 36 + 18
    assert plan.bytes_out == 24 + 18
    assert plan.params == ("w",)
    assert plan.paths == ("zero/w/fp32.pt", "zero/o.pt", "m.pt")


def test_checked_storages_are_listed_once_and_whole():
    small, whole, other = storage(0, 2, crc=None), storage(0, 10), storage(0, 10, key="1")
    copied = CopiedFile("m.pt", "s", 11, (whole, other))
    plan = ConversionPlan((small, other), (), (ObjectFile("o", {}, 1, (whole,)),), (copied,))
    assert plan.checked_storages == (whole, other)
    assert storage(0, 0).itemsize == 0
    assert whole.itemsize == 4


@pytest.mark.parametrize("name", ["w", "a/b", "ü β", "a+b(c)", "..x", "x..", "...", " ", "-", "~"])
def test_ordinary_names_become_paths_unchanged(name):
    assert state_path(name, "fp32") == f"zero/{name}/fp32.pt"
    assert state_path("w", name) == f"zero/w/{name}.pt"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "x/..", "x//y", "/x", "x/", "x\0y", "\udc80"])
def test_names_that_are_no_paths_are_refused(name):
    with pytest.raises(UnsupportedLayoutError, match="parameter"):
        state_path(name, "fp32")
    with pytest.raises(UnsupportedLayoutError, match="optimizer state"):
        state_path("w", name)


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("/".join), max_size=6))
def test_paths_clash_when_one_is_the_other_or_its_folder(paths):
    clash = any(i != j and (a == b or b.startswith(f"{a}/")) for i, a in enumerate(paths) for j, b in enumerate(paths))
    if clash:
        with pytest.raises(AffineError, match="output file"):
            check_paths(paths)
    else:
        check_paths(paths)


def test_planning_needs_neither_torch_nor_deepspeed():
    code = (
        "import sys, json; import deepspeed_affine.plan.conversion, deepspeed_affine.plan.paths; "
        "print(json.dumps([n for n in ('torch', 'numpy', 'deepspeed') if n in sys.modules]))"
    )
    run_ = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run_.stdout) == []


def test_elements_one_rank_holds_twice_are_compared_with_themselves():
    pieces = [AffinePiece((4,), 0, (1,), 0, (1,), (0,)), AffinePiece((3,), 1, (1,), 4, (1,), (0,))]
    layout = ParamAffineMap((4,), {0: (7,)}, {0: pieces})
    layout.validate()
    stored = {0: (ShardPieces((run(0, 7, 10, 5),), "tp 0"),)}
    read, replicas = plan_sources(layout, stored, param="w", state="fp32")
    (replica,) = replicas
    assert (replica.primary_label, replica.label) == ("tp 0", "tp 0 (again)")
    one, other = addresses(replica.primary), addresses(replica.pieces)
    assert {place: {one[place][1], other[place][1]} for place in one} == {1: {11, 14}, 2: {12, 15}, 3: {13, 16}}
    assert {address for piece in read for address in piece.dest_offsets()} == set(range(10, 17))
