"""The comparing sink: equal or not, where, and no more read than needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.execute.comparing import ComparingSink, same_bytes
from deepspeed_affine.storage.files import ByteReader


class Counting(ByteReader):
    def __init__(self):
        super().__init__()
        self.count = 0

    def read_into(self, path, offset, out):
        self.count += 1
        super().read_into(path, offset, out)


def compare(tmp_path, data, expected, parts):
    (tmp_path / "f").write_bytes(data)
    with Counting() as reader:
        sink = ComparingSink(str(tmp_path), {"f": len(data)}, reader)
        file = sink.create("f", len(expected))
        for start, stop in parts:
            file.write_at(start, expected[start:stop])
        file.finish()
    return sink.unlike, reader.count


def test_equal_whatever_the_order(tmp_path):
    data = bytes(range(200))
    assert compare(tmp_path, data, data, [(100, 200), (0, 3), (3, 100)]) == ({}, 3)


@pytest.mark.parametrize("at", [0, 1, 7, 8, 63, 64, 99, 100, 198, 199])
def test_any_one_byte_is_seen_with_its_place(tmp_path, at):
    data = bytearray(range(200))
    data[at] ^= 4
    unlike, _ = compare(tmp_path, bytes(data), bytes(range(200)), [(0, 100), (100, 200)])
    assert unlike == {"f": at}


def test_after_a_difference_no_more_is_read(tmp_path):
    data = b"x" + bytes(99)
    unlike, count = compare(tmp_path, data, bytes(100), [(0, 10), (10, 20), (20, 100)])
    assert unlike == {"f": 0}
    assert count == 1


@pytest.mark.parametrize(("data", "at"), [(bytes(50), 50), (bytes(150), 100), (b"", 0)])
def test_another_size_is_unlike_and_not_read(tmp_path, data, at):
    assert compare(tmp_path, data, bytes(100), [(0, 100)]) == ({"f": at}, 0)


def test_a_file_that_became_shorter_or_went_is_unlike(tmp_path):
    (tmp_path / "f").write_bytes(bytes(50))
    with ByteReader() as reader:
        sink = ComparingSink(str(tmp_path), {"f": 100, "g": 10}, reader)
        sink.create("f", 100).write_at(0, bytes(100))
        sink.create("g", 10).write_at(4, memoryview(bytes(6)))
    assert sink.unlike == {"f": 0, "g": 4}


@given(st.binary(max_size=40), st.integers(0, 39), st.integers(0, 255))
def test_same_bytes(data, at, value):
    left = np.frombuffer(data, np.uint8)
    changed = bytearray(data)
    if at < len(changed):
        changed[at] = value
    assert same_bytes(left, np.frombuffer(bytes(changed), np.uint8)) == (data == bytes(changed))
    assert same_bytes(left, left.copy())
