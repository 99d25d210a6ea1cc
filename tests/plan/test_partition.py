"""Flat groups and sub-groups against element lists that are written out."""

import math
import random

import pytest

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.plan.partition import FlatGroup, aligned_elements, sub_group_counts, zero3_runs


def written_out(numels, dp, alignment):
    """The group's elements in order as (shard, element), None for padding, cut into equal parts."""
    flat = []
    for index, numel in enumerate(numels):
        flat += [(index, at) for at in range(numel)]
        if index < len(numels) - 1:
            while len(flat) % alignment:
                flat.append(None)
    used = len(flat)
    while len(flat) % (2 * dp):
        flat.append(None)
    size = len(flat) // dp
    parts = [flat[rank * size : (rank + 1) * size] for rank in range(dp)]
    return parts, [min(size, max(0, (rank + 1) * size - used)) for rank in range(dp)]


def placed(runs, length):
    part = [None] * length
    for run in runs:
        for step in range(run.numel):
            assert part[run.offset + step] is None
            part[run.offset + step] = (run.index, run.start + step)
    return part


@pytest.mark.parametrize("seed", range(60))
def test_a_flat_group_is_what_is_written_out(seed):
    rng = random.Random(seed)
    numels = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 7)))
    dp, alignment = rng.randint(1, 7), rng.choice([1, 4, 8])
    parts, paddings = written_out(numels, dp, alignment)
    group = FlatGroup(numels, dp, alignment)
    assert group.partition_size == len(parts[0])
    for rank in range(dp):
        runs = list(group.runs_of(rank))
        assert placed(runs, group.partition_size) == parts[rank]
        assert group.padding_of(rank) == paddings[rank]
        assert all(run.numel for run in runs)
    assert len(group.paddings) == len(numels)


class Counted(tuple):
    """A tuple that counts how often one of its elements is read."""

    reads = 0

    def __getitem__(self, at):
        type(self).reads += 1
        return super().__getitem__(at)


def test_what_each_of_many_ranks_holds_costs_what_it_holds():
    group = FlatGroup((30,) * 20_000, 4096)
    for field in ("numels", "begins"):
        object.__setattr__(group, field, Counted(getattr(group, field)))
    found = [(rank, run) for rank in range(group.dp) for run in group.runs_of(rank)]
    assert 0 < Counted.reads < 2 * (group.dp * math.ceil(math.log2(20_000)) + len(found) + group.dp)
    assert found == list(group.runs())


@pytest.mark.parametrize("seed", range(40))
def test_a_zero3_sub_group_is_what_is_written_out(seed):
    rng = random.Random(seed)
    numels = [rng.randint(0, 9) for _ in range(rng.randint(1, 6))]
    dp = rng.randint(1, 5)
    parts = [[] for _ in range(dp)]
    for index, numel in enumerate(numels):
        size = math.ceil(numel / dp)
        elements = [(index, at) for at in range(numel)] + [None] * (size * dp - numel)
        for rank in range(dp):
            parts[rank] += elements[rank * size : (rank + 1) * size]
    for rank in range(dp):
        runs, length = zero3_runs(numels, dp, rank)
        assert placed(runs, length) == parts[rank]


@pytest.mark.parametrize(
    ("numels", "dp", "size", "expected"),
    [
        ([3, 3, 3], 1, 10**9, (3,)),
        ([3, 3, 3], 1, 9, (3,)),
        ([3, 3, 3], 1, 6, (2, 1)),
        ([3, 3, 3], 2, 4, (2, 1)),
        ([3, 3, 3], 1, 1, (1, 1, 1)),
        ([50, 1], 1, 10, (1, 1)),
        ([], 2, 10, ()),
    ],
)
def test_sub_groups_close_with_the_parameter_that_fills_them(numels, dp, size, expected):
    assert sub_group_counts(numels, dp, size) == expected


def test_alignment_is_sixteen_bytes():
    assert [aligned_elements(width) for width in (1, 2, 4, 8, 16)] == [16, 8, 4, 2, 1]


def test_nonsense_is_refused():
    for numels, dp, alignment in (((1,), 0, 1), ((-1,), 1, 1), ((1,), 1, 0)):
        with pytest.raises(InvalidMapError):
            FlatGroup(numels, dp, alignment)
