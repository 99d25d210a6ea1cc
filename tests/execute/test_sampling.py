"""Samples: the stated probabilities are those of the choice, counted over every seed or over many."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.execute.sampling import LEAST_BYTES, Sample, group_evenly, new_seed

MB = 1 << 20


def within(count, tries, probability):
    """Whether so many of ``tries`` is no surprise: five standard deviations, and one for small numbers."""
    return abs(count - tries * probability) <= 5 * math.sqrt(tries * probability * (1 - probability)) + 1


@pytest.mark.parametrize(("units", "chosen"), [(100, 1), (100, 20), (37, 36), (1000, 10), (5, 5)])
def test_every_unit_is_found_as_often_as_stated(units, chosen):
    tries = 4000
    counts = [0] * units
    for seed in range(tries):
        picked = Sample(units, chosen, seed).pick()
        assert len(picked) == chosen
        for unit in picked:
            counts[unit] += 1
    assert all(within(count, tries, Sample(units, chosen, 0).found) for count in counts)


@pytest.mark.parametrize(("units", "chosen", "damaged"), [(100, 20, 3), (60, 5, 10), (40, 4, 20), (10, 3, 8)])
def test_damage_is_missed_as_often_as_stated(units, chosen, damaged):
    tries = 4000
    hurt = set(range(3, 3 + damaged)) if damaged < units - 3 else set(range(damaged))
    missed = sum(hurt.isdisjoint(Sample(units, chosen, seed).pick()) for seed in range(tries))
    assert within(missed, tries, Sample(units, chosen, 0).missed(damaged))


@pytest.mark.parametrize(("units", "chosen"), [(6, 2), (7, 3), (5, 0), (5, 5)])
def test_probabilities_are_exact(units, chosen):
    sample = Sample(units, chosen, 0)
    samples = list(combinations(range(units), chosen))
    for damaged in range(units + 1):
        hurt = set(range(damaged))
        missed = sum(hurt.isdisjoint(picked) for picked in samples) / len(samples)
        assert sample.missed(damaged) == pytest.approx(missed, abs=1e-12)
    assert sample.missed(1) == pytest.approx(1 - sample.found)


def test_a_seed_repeats_its_choice_and_others_choose_otherwise():
    assert Sample(1000, 10, 7).pick() == Sample(1000, 10, 7).pick()
    assert len({Sample(1000, 10, seed).pick() for seed in range(50)}) == 50
    assert len({new_seed() for _ in range(50)}) == 50


@pytest.mark.parametrize(
    ("units", "nbytes", "chosen"),
    [
        (0, 0, 0),
        (10, 0, 10),
        (10, 5 * MB, 10),
        (100, LEAST_BYTES, 100),
        (1000, 10 * LEAST_BYTES, 100),
        (1000, 1000 * LEAST_BYTES, 10),
        (3, 10_000 * LEAST_BYTES, 1),
    ],
)
def test_a_hundredth_at_least_64_mb_or_everything(units, nbytes, chosen):
    assert Sample.of(units, nbytes).chosen == chosen


@given(st.integers(1, 3000), st.integers(1, 1 << 45))
def test_expected_bytes_are_enough(units, nbytes):
    sample = Sample.of(units, nbytes)
    assert sample.found * nbytes >= min(nbytes, LEAST_BYTES, nbytes) * (1 - 1e-12)
    assert sample.found >= 0.01
    assert 0 <= sample.missed(units // 10) <= 1


@pytest.mark.parametrize(("units", "chosen"), [(3, 4), (3, -1)])
def test_impossible_samples(units, chosen):
    with pytest.raises(ValueError, match="of 3 units"):
        Sample(units, chosen, 0)


def sums(groups, sizes):
    return [sum(sizes[unit] for unit in group) for group in groups]


@given(
    st.lists(st.one_of(st.integers(0, 50), st.integers(0, 10**6)), max_size=60),
    st.integers(0, 10**6),
    st.integers(0, 2**32 - 1),
)
def test_whichever_groups_are_chosen_enough_is_read(sizes, least, seed):
    groups, sample = group_evenly(sizes, seed=seed, least=least)
    assert sorted(unit for group in groups for unit in group) == list(range(len(sizes)))
    assert (sample.units, sample.seed) == (len(groups), seed)
    loads, total = sums(groups, sizes), sum(sizes)
    fewest = sum(sorted(loads)[: sample.chosen])
    assert fewest >= min(least, total)
    assert fewest * 100 >= total
    assert group_evenly(sizes, seed=seed + 1, least=least)[0] == groups


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ([1000] * 97 + [17 * MB] * 97, 0.05),
        ([MB] * 2000, 0.033),
        ([MB] * 100_000, 0.0101),
        ([1000 * MB] * 10, 0.1),
        ([5] * 10, 1.0),
        ([4_000 * MB, *[MB] * 3000], 0.024),
    ],
)
def test_not_much_more_is_read_than_asked_for(sizes, most):
    groups, sample = group_evenly(sizes, seed=1)
    assert sample.found <= most
    assert sum(sum(sizes[unit] for unit in groups[at]) for at in sample.pick()) >= min(sum(sizes), LEAST_BYTES)


def test_every_unit_of_a_group_is_found_as_often_as_stated():
    sizes = [1] * 30 + [1000] * 20 + [9000]
    tries, counts = 3000, [0] * len(sizes)
    for seed in range(tries):
        groups, sample = group_evenly(sizes, seed=seed, least=3000)
        for at in sample.pick():
            for unit in groups[at]:
                counts[unit] += 1
    assert 0.05 < sample.found < 0.9
    assert all(within(count, tries, sample.found) for count in counts)
