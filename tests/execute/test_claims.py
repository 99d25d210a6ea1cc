"""What was read is what was saved: every run counts, however runs overlap, and nothing good is blamed."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.errors import IntegrityError
from deepspeed_affine.execute.claims import SourceSums, joined
from deepspeed_affine.plan.conversion import SourceStorage
from deepspeed_affine.storage.journal import Read


def storage(data, key="0"):
    return SourceStorage("/ckpt/a.pt", key, "uint8", len(data), 0, len(data), zlib.crc32(data))


def read(data, start, stop, key="0"):
    return Read("a.pt", key, start, stop, zlib.crc32(data[start:stop]))


class Present:
    """A reader of one file with one storage at its beginning."""

    def __init__(self, data):
        self.data = data

    def read_into(self, path, offset, out):
        out[:] = self.data[offset : offset + len(out)]


def settled(sums, present, rounds=50):
    asked = 0
    while gaps := sums.gaps():
        rounds -= 1
        assert rounds
        asked += sum(stop - start for _, start, stop in gaps)
        sums.add(read(present, start, stop, item.key) for item, start, stop in gaps)
    return asked


DATA = bytes(range(200))
RUNS = st.lists(
    st.tuples(st.integers(0, 199), st.integers(1, 200)).map(sorted).filter(lambda r: r[0] < r[1]), max_size=12
)


@given(RUNS)
def test_any_runs_of_good_bytes_are_fine(runs):
    sums = SourceSums([storage(DATA)])
    sums.add(read(DATA, start, stop) for start, stop in runs)
    settled(sums, DATA)
    sums.check(Present(DATA))


@given(RUNS.filter(bool), st.data())
def test_a_run_of_other_bytes_is_found_whatever_it_overlaps_with(runs, data):
    bad = data.draw(st.integers(0, len(runs) - 1))
    start, stop = runs[bad]
    place = data.draw(st.integers(start, stop - 1))
    other = bytearray(DATA)
    other[place] ^= 1 << data.draw(st.integers(0, 7))
    sums = SourceSums([storage(DATA)])
    sums.add(read(other if at == bad else DATA, low, high) for at, (low, high) in enumerate(runs))
    settled(sums, DATA)
    with pytest.raises(IntegrityError, match="is as it was saved, but other bytes were read"):
        sums.check(Present(DATA))


@given(RUNS, st.integers(0, 199))
def test_a_damaged_storage_is_named(runs, place):
    now = bytearray(DATA)
    now[place] ^= 4
    sums = SourceSums([storage(DATA)])
    sums.add(read(now, start, stop) for start, stop in runs)
    settled(sums, now)
    with pytest.raises(IntegrityError, match=r"a\.pt: storage '0' has CRC .* was damaged after it was saved"):
        sums.check(Present(now))


def test_nothing_is_read_again_where_runs_tile():
    sums = SourceSums([storage(DATA)])
    sums.add([read(DATA, 0, 50), read(DATA, 50, 200), read(DATA, 0, 200), read(DATA, 0, 50)])
    assert sums.gaps() == []
    sums.check(Present(DATA))


def test_only_what_nobody_read_and_what_must_be_cut_is_asked_for():
    sums = SourceSums([storage(DATA), storage(b"", "empty")])
    sums.add([read(DATA, 0, 100), read(DATA, 90, 150), read(DATA, 10, 20, "unknown")])
    assert [(start, stop) for _, start, stop in sums.gaps()] == [(0, 90), (90, 100), (100, 150), (150, 200)]
    assert settled(sums, DATA) == 200
    sums.check(Present(DATA))


def test_runs_that_touch_are_joined_and_others_are_kept():
    runs = [read(DATA, 10, 20), read(DATA, 0, 10), read(DATA, 5, 15), read(DATA, 0, 10), read(DATA, 0, 4, "1")]
    assert joined(runs) == (
        read(DATA, 0, 10),
        read(DATA, 5, 15),
        read(DATA, 10, 20),
        read(DATA, 0, 4, "1"),
    )
