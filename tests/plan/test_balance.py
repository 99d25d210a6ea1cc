"""Replicas are chosen so that no sender has much more to send than it must; the bound is exact."""

import itertools
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.plan import balance
from deepspeed_affine.plan.balance import (
    SMALL_BYTES,
    SPLIT_BYTES,
    Demand,
    assign,
    heaviest,
    lower_bound,
)


def instance(seed):
    """8 senders, 60 regions, 1 to 4 holders each, 4 KiB to 256 MiB log-uniform."""
    rng = random.Random(seed)
    return [
        Demand(100 + number, tuple(sorted(rng.sample(range(8), rng.randint(1, 4)))), int(2 ** rng.uniform(12, 28)))
        for number in range(60)
    ]


DEMANDS = st.lists(
    st.builds(
        lambda target, holders, nbytes: Demand(target, tuple(sorted(holders)), nbytes),
        st.integers(0, 7),
        st.sets(st.integers(0, 5), min_size=1),
        st.integers(0, 1 << 26) | st.integers(0, 1 << 17),
    ),
    max_size=12,
)


def test_the_heaviest_sender_is_near_the_bound_on_three_hundred_instances():
    ratios, plain = [], []
    for seed in range(300):
        demands = instance(seed)
        shares = assign(demands)
        ratios.append(heaviest(demands, shares) / lower_bound(demands))
        plain.append(heaviest(demands, [((min(d.holders), d.nbytes),) for d in demands]) / lower_bound(demands))
        for demand, shared in zip(demands, shares, strict=True):
            if demand.nbytes < SMALL_BYTES:
                assert shared == ((min(demand.holders), demand.nbytes),)
    assert min(ratios) >= 1
    assert sum(ratios) / 300 <= 1.2
    assert sum(plain) / 300 > 2


@given(DEMANDS, st.sampled_from([None, SPLIT_BYTES, 1000]))
def test_every_demand_is_met_by_its_holders(demands, split_bytes):
    shares = assign(demands, split_bytes=split_bytes)
    senders = {rank for demand in demands for rank in demand.holders}
    split = 0
    for demand, shared in zip(demands, shares, strict=True):
        assert sum(nbytes for _, nbytes in shared) == demand.nbytes
        assert {rank for rank, _ in shared} <= set(demand.holders)
        if demand.target in demand.holders:
            assert shared == ((demand.target, demand.nbytes),)
        split += len(shared) - 1
        if len(shared) > 1:
            assert split_bytes is not None
            assert min(nbytes for _, nbytes in shared) >= split_bytes
    assert split <= max(len(senders) - 1, 0)
    assert heaviest(demands, shares) >= lower_bound(demands)
    assert shares == assign(demands, split_bytes=split_bytes)


@given(DEMANDS)
def test_the_bound_is_the_worst_set_of_senders(demands):
    senders = sorted({rank for demand in demands for rank in demand.holders})
    worst = 0
    for size in range(1, len(senders) + 1):
        for chosen in itertools.combinations(senders, size):
            inside = sum(d.nbytes for d in demands if d.target not in d.holders and set(d.holders) <= set(chosen))
            worst = max(worst, -(-inside // size))
    assert lower_bound(demands) == worst


def test_a_sender_that_sends_to_the_target_anyway_is_taken_where_it_costs_nothing():
    demands = [Demand(9, (0,), 10 << 20), Demand(8, (1,), 40 << 20), Demand(9, (0, 1, 2), 1 << 20)]
    assert assign(demands)[2] == ((0, 1 << 20),)


def test_holders_on_the_targets_machine_come_first():
    demands = [Demand(9, (0, 1, 2, 3), 100 << 20)] * 3
    hosts = {0: 0, 1: 0, 2: 1, 3: 1, 9: 1}
    assert {rank for shared in assign(demands, hosts=hosts) for rank, _ in shared} == {2, 3}
    assert {rank for shared in assign(demands, hosts={**hosts, 9: 7}) for rank, _ in shared} == {0, 1, 2, 3}


def test_what_nobody_holds_is_refused():
    with pytest.raises(InvalidMapError, match="nobody holds"):
        Demand(3, (), 10)


@given(DEMANDS)
def test_no_move_of_a_region_relieves_the_heaviest_sender(demands):
    shares = assign(demands, small_bytes=1, split_bytes=None)
    senders = [shared[0][0] for shared in shares]
    sent = [(at, each) for at, each in zip(senders, demands, strict=True) if at != each.target]
    loads = {rank: sum(each.nbytes for at, each in sent if at == rank) for rank in range(8)}
    heavy = min(loads, key=lambda rank: (-loads[rank], rank))
    for at, each in sent:
        for rank in each.holders if at == heavy and each.nbytes else ():
            assert rank == heavy or loads[rank] + each.nbytes >= loads[heavy]


def lines_of(module, most, call):
    """What ``call`` returns, having executed at most so many lines of the module."""
    lines = 0

    def local(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        if lines > most:
            raise AssertionError(f"more than {most} lines")
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename == module.__file__ else None)
    try:
        return call()
    finally:
        sys.settrace(before)


def test_thousands_of_moves_do_not_each_look_at_every_region():
    demands = [Demand(-1 - i % 64, (i % 8, 8 + i % 8), (1 << 20) + i) for i in range(16000)]
    demands += [Demand(-1 - i % 64, tuple(range(8)), (1 << 20) + i) for i in range(16000)]
    # Where every move looks at all, hundreds of millions.
    shares = lines_of(balance, 100 * len(demands), lambda: assign(demands))
    assert heaviest(demands, shares) <= 1.01 * lower_bound(demands)
