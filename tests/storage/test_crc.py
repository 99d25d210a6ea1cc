"""CRC arithmetic against zlib."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.storage.crc import crc32_combine, crc32_of_zeros


@given(st.binary(max_size=5000), st.binary(max_size=5000))
def test_combining_equals_summing_the_whole(first, second):
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_large_parts():
    part = bytes(range(256)) * 40_000
    assert crc32_combine(zlib.crc32(part), zlib.crc32(part), len(part)) == zlib.crc32(part * 2)


@pytest.mark.parametrize("length", [0, 1, 7, 4096, 1_000_003])
def test_zeros(length):
    assert crc32_of_zeros(length) == zlib.crc32(bytes(length))


def test_zeros_beyond_memory_combine_consistently():
    assert crc32_combine(crc32_of_zeros(1 << 40), crc32_of_zeros(1 << 41), 1 << 41) == crc32_of_zeros(3 << 40)


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="-1"):
        crc32_combine(0, 0, -1)
