"""The schedule of a live transfer: bounded messages, each element once, fewest rounds, and nobody waits for ever."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.plan.grid import Tensor, Topology, state_placements, weight_placements
from deepspeed_affine.plan.messages import ALIGNMENT, LEAST_BYTES, cut, is_run, messages, segments_by_pair
from deepspeed_affine.plan.model import plan_model
from deepspeed_affine.plan.rounds import rounds
from deepspeed_affine.plan.segments import TransferSegment

MODEL = [
    Tensor("embed", (131, 24), 0, 0, 0.0),
    Tensor("q", (24, 100), 0, 6, 0.2),
    Tensor("o", (100, 24), 1, 6, 0.4),
    Tensor("norm", (5,), None, 0, 0.6),
    Tensor("scalar", (), None, 0, 0.9),
    Tensor("head", (131, 24), 0, 0, 1.0),
]
COUNTS = st.dictionaries(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]), st.integers(0, 12)
)
TOPOLOGIES = st.builds(Topology, *[st.integers(1, 3)] * 3, st.integers(0, 3))


@given(COUNTS, st.randoms(use_true_random=False))
def test_every_message_has_a_round_and_no_process_two_in_one(counts, rng):
    found = rounds(counts)
    assert {pair: len(numbers) for pair, numbers in found.items()} == counts
    for end in (0, 1):
        taken = Counter((pair[end], number) for pair, numbers in found.items() for number in numbers)
        assert set(taken.values()) <= {1}
    # As few as the busiest process has messages one way, and none of them empty.
    loads = Counter()
    for (source, target), count in counts.items():
        loads["send", source] += count
        loads["receive", target] += count
    used = {number for numbers in found.values() for number in numbers}
    assert used == set(range(max(loads.values(), default=0)))
    shuffled = list(counts.items())
    rng.shuffle(shuffled)
    assert rounds(dict(shuffled)) == found


@pytest.mark.parametrize("each", [1, 3])
def test_everybody_to_everybody_is_a_round_robin(each):
    """No two messages ask for one place, so that nothing is looked for: 160,000 of them take half a second."""
    size = 400 if each == 1 else 20
    found = rounds({(a, b): each for a in range(size) for b in range(size) if a != b})
    assert all(
        numbers == tuple((b - a) % size - 1 + k * (size - 1) for k in range(each)) for (a, b), numbers in found.items()
    )


def test_a_hundred_thousand_messages_in_as_few_rounds_as_may_be():
    rng = random.Random(5)
    counts = {(a, b): rng.randint(1, 700) for a in range(32) for b in rng.sample(range(32), 10) if a != b}
    found = rounds(counts)
    assert {pair: len(set(numbers)) for pair, numbers in found.items()} == counts
    loads = Counter()
    for end in (0, 1):
        taken = Counter((pair[end], number) for pair, numbers in found.items() for number in numbers)
        assert set(taken.values()) == {1}
        loads.update((end, process) for process, _ in taken)
    assert {number for numbers in found.values() for number in numbers} == set(range(max(loads.values())))


def run(turns, rng):
    """Processes that wait as in a rendezvous: how many messages arrive before nobody can go on.

    ``turns`` has for every process its steps in order, each a set of ``(source, target, number)`` that it starts
    together and ends when all of them have been started at both ends.
    """
    at = dict.fromkeys(turns, 0)
    started, arrived = Counter(), set()
    fresh = set(turns)
    while True:
        for process in fresh:
            if at[process] < len(turns[process]):
                started.update(turns[process][at[process]])
        ready = [
            process
            for process, step in at.items()
            if step < len(turns[process]) and all(started[message] == 2 for message in turns[process][step])
        ]
        if not ready:
            return len(arrived)
        process = rng.choice(ready)
        arrived |= turns[process][at[process]]
        at[process] += 1
        fresh = {process}


def steps(found):
    """Every process's rounds, as ``run`` takes them."""
    by_round = {}
    for (source, target), numbers in found.items():
        for number in numbers:
            for process in (source, target):
                by_round.setdefault(process, {}).setdefault(number, set()).add((source, target, number))
    return {process: [rows[number] for number in sorted(rows)] for process, rows in by_round.items()}


@given(COUNTS, st.randoms(use_true_random=False))
def test_nobody_waits_for_ever_even_if_every_send_needs_its_receiver(counts, rng):
    assert run(steps(rounds(counts)), rng) == sum(counts.values())


def test_the_simulation_sees_processes_that_wait_for_each_other():
    turns = steps(rounds({(0, 1): 1, (1, 2): 1, (2, 0): 1, (0, 2): 1, (2, 1): 1, (1, 0): 1}))
    assert run(turns, random.Random(0)) == 6
    turns[0].reverse()
    assert run(turns, random.Random(0)) < 6


@settings(max_examples=40)
@given(TOPOLOGIES, TOPOLOGIES, st.booleans(), st.sampled_from([LEAST_BYTES, 5_001, 1 << 20]))
def test_messages_are_bounded_and_carry_every_element_once(before, after, states, limit):
    place = state_placements if states else weight_placements
    plan = plan_model(place(MODEL, after, 2), place(MODEL, before, 2))
    for pair, segments in segments_by_pair(plan).items():
        written = Counter()
        for message in messages(segments, plan.itemsizes, limit):
            assert 0 < message.nbytes <= limit
            end = 0
            for part in message.parts:
                assert (part.block.source_rank, part.block.target_rank) == pair
                assert part.start % ALIGNMENT == 0
                assert end <= part.start
                end = part.start + part.nbytes
                written.update((part.param, *addresses) for addresses in elements(part.block))
            assert end == message.nbytes
        assert set(written.values()) == {1}
        assert set(written) == {(name, *found) for name, segment in segments for found in elements(segment)}
    assert sum(plan.traffic.values()) == sum(
        message.payload
        for segments in segments_by_pair(plan).values()
        for message in messages(segments, plan.itemsizes, limit)
    )


def elements(segment):
    """Where each element is read and written, in the block's order."""
    found = [(segment.source_offset, segment.target_offset)]
    for extent, ours, theirs in zip(segment.shape, segment.source_strides, segment.target_strides, strict=True):
        found = [(read + k * ours, write + k * theirs) for read, write in found for k in range(extent)]
    return found


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40), st.integers(0, 40)), max_size=4), st.integers(1, 60))
def test_a_segment_is_cut_along_its_outer_axes_in_order(axes, room):
    shape, ours, theirs = (tuple(axis[k] for axis in axes) for k in range(3))
    segment = TransferSegment(0, 7, ours, 1, 3, theirs, shape, 0.5)
    parts = list(cut(segment, room))
    assert [found for part in parts for found in elements(part)] == elements(segment)
    assert all(part.numel <= room and part.scale == 0.5 for part in parts)
    if segment.numel > room:
        assert 2 * parts[0].numel > room


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), True),
        ((4,), (1,), True),
        ((4,), (2,), False),
        ((1,), (9,), True),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 1, 3), (3, 77, 1), True),
        ((2, 3), (4, 1), False),
    ],
)
def test_what_lies_in_one_run_of_memory(shape, strides, expected):
    assert is_run(shape, strides) is expected


def test_large_runs_are_messages_of_their_own_and_small_blocks_share_one():
    source = weight_placements([Tensor("w", (4096, 64), 0), *MODEL], Topology(2), 2)
    target = weight_placements([Tensor("w", (4096, 64), 0), *MODEL], Topology(1), 2)
    plan = plan_model(target, source)
    (made,) = [
        list(messages(rows, plan.itemsizes, 1 << 20)) for pair, rows in segments_by_pair(plan).items() if pair == (1, 0)
    ]
    alone = [message for message in made if len(message.parts) == 1]
    assert [message.parts[0].param for message in alone] == ["w"]
    assert len(made) == 2
    with pytest.raises(PolicyError, match="expected 4096"):
        list(messages([], {}, LEAST_BYTES - 1))
