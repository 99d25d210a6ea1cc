"""Vectorised codecs against the oracle that sets and reads single bits."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ninfer_oracle import (
    GROUPED,
    absmax_group,
    code_at,
    decode_fp8,
    decode_grouped,
    decode_nvfp4,
    e4m3_nearest,
    encode_nvfp4,
    nearest_f32,
    pack_row_split,
)

from deepspeed_affine.errors import AffineError
from deepspeed_affine.ninfer.decode import decode, decode_range
from deepspeed_affine.ninfer.encode import encode, encode_rows, join, nvfp4_divisor
from deepspeed_affine.ninfer.errors import EncodingError, RangeError, ReferenceError_, ValueDomainError
from deepspeed_affine.ninfer.floats import bf16_to_float32, e4m3fn_words, round_to_bf16
from deepspeed_affine.ninfer.layouts import plan_geometry
from deepspeed_affine.ninfer.pack import pack_fp8, pack_grouped, pack_nvfp4
from deepspeed_affine.ninfer.rows import slice_rows
from deepspeed_affine.ninfer.validate import check_values

ABSMAX = ("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16")
few = settings(max_examples=20)
somewhat = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def same_bits(found, expected):
    found, expected = found.reshape(-1), np.array(expected, np.float32)
    both_nan = np.isnan(found) & np.isnan(expected)
    return bool(np.all((found.view(np.uint32) == expected.view(np.uint32)) | both_nan))


def random_bytes(seed, count):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def fetch_of(data):
    return lambda offset, count: data[offset : offset + count]


@pytest.mark.parametrize("name", GROUPED)
@few
@given(seed=seeds, rows=st.integers(1, 3), columns=st.integers(1, 200))
def test_any_bytes_decode_as_the_bits_say(name, seed, rows, columns):
    geometry = plan_geometry(name, None, (rows, columns))
    data = random_bytes(seed, geometry.total)
    assert same_bits(decode(geometry, data), decode_grouped(name, data.tobytes(), rows, columns))


@few
@given(seed=seeds, rows=st.integers(1, 4), columns=st.integers(1, 70))
def test_any_bytes_decode_fp8(seed, rows, columns):
    geometry = plan_geometry("fp8_e4m3fn_row_bf16", None, (rows, columns))
    data = random_bytes(seed, geometry.total)
    assert same_bits(decode(geometry, data), decode_fp8(data.tobytes(), rows, columns))


@pytest.mark.parametrize("divisors", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_nvfp4_decodes_as_the_bits_say(seed, divisors):
    rng = np.random.default_rng(seed)
    geometry = plan_geometry("nvfp4", None, (256, 64), divisors)
    data = rng.integers(0, 256, geometry.total, dtype=np.uint8)
    scales = geometry.plane("scales")
    data[scales.offset : scales.end] = rng.integers(0, 0x7F, scales.nbytes)
    stack = np.array([1638.4, 1e-41][:divisors], "<f4")
    data[geometry.plane("divisors").offset :] = stack.view(np.uint8)
    check_values(geometry, fetch_of(data))
    assert same_bits(decode(geometry, data), decode_nvfp4(data.tobytes(), 256, 64, divisors))


scale_words = st.one_of(
    st.sampled_from([0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00]), st.integers(1, 0x7BFF)
)


@pytest.mark.parametrize("name", GROUPED)
@few
@given(data=st.data())
def test_packing_is_the_oracles_and_decodes_to_itself(name, data):
    _, group, _, _, smallest, largest = GROUPED[name]
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 150))
    rng = np.random.default_rng(data.draw(seeds))
    codes = rng.integers(smallest, largest + 1, (rows, columns))
    used = -(-columns // group)
    scales = [[data.draw(scale_words) for _ in range(used)] for _ in range(rows)]
    packed = pack_grouped(name, codes, np.array(scales, np.uint16))
    assert packed.tobytes() == pack_row_split(name, codes.tolist(), scales)
    assert [code_at(name, packed.tobytes(), rows, columns, 0, k) for k in range(columns)] == codes[0].tolist()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**17), max_value=2.0**17)


@pytest.mark.parametrize("name", ABSMAX)
@few
@given(rows=st.lists(st.lists(finite, min_size=1, max_size=70), min_size=1, max_size=2))
def test_absmax_is_the_oracles(name, rows):
    _, group, _, _, smallest, largest = GROUPED[name]
    columns = max(len(row) for row in rows)
    wide = [row + [0.0] * (columns - len(row)) for row in rows]
    codes, scales = [], []
    for row in wide:
        made = [absmax_group(row[at : at + group], smallest, largest) for at in range(0, columns, group)]
        codes.append([code for part, _ in made for code in part])
        scales.append([word for _, word in made])
    assert encode(name, np.array(wide, np.float32)).tobytes() == pack_row_split(name, codes, scales)


@pytest.mark.parametrize("name", ABSMAX)
@few
@given(seed=seeds, rows=st.integers(1, 3), columns=st.integers(1, 140))
def test_what_was_decoded_encodes_to_the_same_values(name, seed, rows, columns):
    values = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    geometry = plan_geometry(name, None, values.shape)
    encoded = encode(name, values)
    check_values(geometry, fetch_of(encoded))
    once = decode(geometry, encoded)
    # A step is at most half a unit of the scale, and the largest code is not lost.
    assert np.abs(once - values).max() <= np.abs(values).max()


@somewhat
@given(seed=seeds, columns=st.integers(1, 300))
def test_ternary_values_come_back(seed, columns):
    rng = np.random.default_rng(seed)
    used = -(-columns // 128)
    scales = rng.integers(1, 0x7C00, (1, used)).astype(np.uint16)
    codes = rng.integers(-1, 2, (1, columns))
    for group in range(used):
        part = codes[0, group * 128 : (group + 1) * 128]
        if not part.any():
            part[0] = 1
    packed = pack_grouped("t2_g128_fp16", codes, scales)
    values = decode(plan_geometry("t2_g128_fp16", None, (1, columns)), packed)
    assert encode("t2_g128_fp16", values).tobytes() == packed.tobytes()


def test_what_is_not_ternary_is_refused():
    for row in ([1.0, 0.5], [1.0, -1.0000001], [1e-30], [70000.0, 0.0], [2.0**-25]):
        with pytest.raises(ValueDomainError, match="group 0"):
            encode("t2_g128_fp16", np.array([row], np.float32))
    with pytest.raises(ValueDomainError, match="codes and scales"):
        encode("q2_g64_fp16", np.ones((1, 4), np.float32))


@somewhat
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-448, max_value=448), min_size=1))
def test_e4m3_is_the_nearest(values):
    array = np.array(values, np.float32)
    assert e4m3fn_words(array).tolist() == [e4m3_nearest(float(value)) for value in array]


@somewhat
@given(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=4))
def test_fp8_rows_follow_the_rule(rows):
    values = np.array(rows, np.float32)
    stored = bf16_to_float32(round_to_bf16(values))
    largest = [float(size) for size in np.abs(stored).max(axis=1)]
    raw = np.array([nearest_f32(Fraction(a) / 448) for a in largest], np.float32)
    words = [int(word) or int(a > 0) for word, a in zip(round_to_bf16(raw), largest, strict=True)]
    scales = bf16_to_float32(np.array(words, np.uint16)).tolist()
    inverses = [nearest_f32(1 / Fraction(scale)) if scale else 0.0 for scale in scales]
    if np.isinf(inverses).any():
        with pytest.raises(ValueDomainError, match="no scale"):
            encode("fp8_e4m3fn_row_bf16", values)
        return
    encoded = encode("fp8_e4m3fn_row_bf16", values)
    assert encoded[256:].view("<u2").tolist() == words
    for r, row in enumerate(stored):
        codes = encoded[3 * r : 3 * r + 3].tolist()
        if not words[r]:
            assert codes == [0, 0, 0]
            continue
        scaled = [nearest_f32(Fraction(float(x)) * Fraction(inverses[r])) for x in row]
        signed = [
            min(max(y, -448.0), 448.0) or (-0.0 if np.signbit(x) else 0.0) for x, y in zip(row, scaled, strict=True)
        ]
        assert codes == [e4m3_nearest(y) for y in signed]


@few
@given(data=st.data())
def test_nvfp4_of_any_divisor_and_scales_decodes_as_the_bits_say(data):
    rng = np.random.default_rng(data.draw(seeds))
    stack = [data.draw(st.floats(width=32, min_value=0, exclude_min=True, allow_infinity=False)) for _ in range(2)]
    scales = data.draw(st.lists(st.integers(0, 0x7E), min_size=1, max_size=8))
    geometry = plan_geometry("nvfp4", None, (256, 64), 2)
    encoded = rng.integers(0, 256, geometry.total, dtype=np.uint8)
    plane = geometry.plane("scales")
    encoded[plane.offset : plane.end] = rng.choice(scales, plane.nbytes)
    encoded[geometry.plane("divisors").offset :] = np.array(stack, "<f4").view(np.uint8)
    check_values(geometry, fetch_of(encoded))
    assert same_bits(decode(geometry, encoded), decode_nvfp4(encoded.tobytes(), 256, 64, 2))


# With 2688 the largest, the divisor is 1 and these lie halfway between two codes.
halfway = st.sampled_from([sign * 448 * tie for sign in (1, -1) for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)])
sources = st.lists(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100), min_size=1, max_size=12)


@few
@given(
    pool=st.one_of(sources, st.lists(halfway, min_size=1, max_size=12).map(lambda ties: [*ties, 2688.0])),
    shrink=st.integers(0, 40),
    seed=seeds,
)
def test_nvfp4_is_the_oracles(pool, shrink, seed):
    """Few different values, so that the oracle is quick; blocks of them grow smaller down to where scales end."""
    rng = np.random.default_rng(seed)
    values = rng.choice(np.array([*pool, 0.0, -0.0], np.float32), (128, 64))
    with np.errstate(under="ignore"):
        values *= np.float32(2.0) ** -rng.choice([0, shrink // 2, shrink], (128, 4)).astype(np.float32).repeat(16, 1)
    try:
        expected = encode_nvfp4(values.tolist())
    except OverflowError:
        with pytest.raises(ValueDomainError, match="divisor"):
            encode("nvfp4", values)
    else:
        assert encode("nvfp4", values).tobytes() == expected


@few
@given(seed=seeds, spread=st.sampled_from([1.0, 1e-6, 1e6]))
def test_nvfp4_encodes_what_it_decodes(seed, spread):
    values = (np.random.default_rng(seed).normal(size=(128, 64)) * spread).astype(np.float32)
    values[3, :16] = 0
    geometry = plan_geometry("nvfp4", None, values.shape)
    encoded = encode("nvfp4", values)
    check_values(geometry, fetch_of(encoded))
    decoded = decode(geometry, encoded)
    assert np.abs(decoded - values).max() <= np.abs(values).max() / 4
    assert not decoded[3, :16].any()


def test_stacked_nvfp4_is_the_planes_of_its_matrices():
    rng = np.random.default_rng(5)
    parts = [rng.normal(size=(128, 128)).astype(np.float32) * 3**n for n in range(3)]
    stacked = encode("nvfp4", np.concatenate(parts), divisors=3)
    singles = [encode("nvfp4", part) for part in parts]
    codes, scales = 128 * 64, 128 * 8
    joined = [s[:codes] for s in singles] + [s[codes : codes + scales] for s in singles] + [s[-4:] for s in singles]
    assert np.array_equal(stacked, np.concatenate(joined))
    values = decode(plan_geometry("nvfp4", None, (384, 128), 3), stacked)
    one = plan_geometry("nvfp4", None, (128, 128))
    assert np.array_equal(values, np.concatenate([decode(one, single) for single in singles]))


@few
@given(seed=seeds)
def test_imported_words_are_unchanged(seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (128, 32), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (128, 4), dtype=np.uint8)
    packed = pack_nvfp4(codes, scales, np.array([3.0], np.float32))
    assert packed[:4096].tobytes() == codes.tobytes()
    from deepspeed_affine.ninfer.decode import natural_scales

    assert np.array_equal(natural_scales(packed[4096:4608], 128, 64), scales)
    rows = rng.integers(0, 0x7F, (3, 7), dtype=np.uint8)
    packed = pack_fp8(rows, np.array([1, 0x3F80, 0x7F7F], np.uint16))
    assert packed[:21].tobytes() == rows.tobytes()
    assert packed[256:].view("<u2").tolist() == [1, 0x3F80, 0x7F7F]


@few
@given(seed=seeds, shape=st.sampled_from([(), (1,), (7,), (2, 1, 3), (40, 33)]))
def test_direct_words_keep_every_bit(seed, shape):
    rng = np.random.default_rng(seed)
    for name, kind, word in (("bf16", np.uint16, "<u2"), ("fp32", np.float32, "<u4"), ("int32", np.int32, "<u4")):
        bits = rng.integers(0, 2 ** (8 * np.dtype(word).itemsize), shape, dtype=np.dtype(word))
        bits = np.asarray(bits)
        values = bits.view(kind)
        geometry = plan_geometry(name, None, shape)
        encoded = encode(name, values)
        assert encoded.tobytes() == bits.tobytes()
        decoded = decode(geometry, encoded)
        assert decode(geometry, encoded.tobytes()).tobytes() == decoded.tobytes()
        expected = bits.astype(np.uint32) << 16 if name == "bf16" else bits
        assert np.array_equal(decoded.view(np.uint32), expected)
        assert encode(name, decoded).tobytes() == encoded.tobytes()


def test_direct_formats_round_nothing():
    for name, values in (("bf16", np.float32(1.00001)), ("fp32", np.float64(1)), ("int32", np.int64(1))):
        with pytest.raises(ValueDomainError):
            encode(name, np.array([values]))


def test_every_bfloat16_and_what_lies_between_is_rounded_to_the_nearest():
    high = np.arange(1 << 16, dtype=np.uint32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (high << 16 | low).view(np.float32)
        with np.errstate(all="raise"):
            found = round_to_bf16(values)
        nan = np.isnan(values)
        assert np.array_equal(np.isnan(bf16_to_float32(found)), nan)
        assert np.array_equal(found >> 15, high >> 15)
        up = (low > 0x8000) | ((low == 0x8000) & (high & 1 == 1))
        assert np.array_equal(found[~nan], (high + up)[~nan])
        # More than are worked on at once, in no order of memory, in a shape of its own, and one alone.
        wide = np.repeat(values, 3).reshape(3, -1).T
        assert np.array_equal(round_to_bf16(wide), np.repeat(found, 3).reshape(3, -1).T)
    assert round_to_bf16(np.float32(1.5)).shape == ()
    assert round_to_bf16(np.empty((0, 3), np.float32)).shape == (0, 3)


def test_every_bfloat16_is_kept_and_any_bit_below_is_found():
    words = np.tile(np.arange(1 << 16, dtype=np.uint16), 3)[:-5].reshape(-1, 1)
    values = bf16_to_float32(words)
    assert np.array_equal(values.view(np.uint32), words.astype(np.uint32) << 16)
    assert encode("bf16", values).tobytes() == encode("bf16", words).tobytes() == words.tobytes()
    for other in (words[::-3], words.astype(">u2"), words.view(np.int16), words[7, 0]):
        found = bf16_to_float32(other)
        assert found.shape == np.shape(other)
        assert np.array_equal(found.view(np.uint32), other.astype(np.uint16).astype(np.uint32) << 16)
    for place in (0, 65_535, 65_536, len(words) - 1):
        for bit in (0, 15):
            spoiled = values.copy()
            spoiled.view(np.uint32)[place] |= 1 << bit
            with pytest.raises(ValueDomainError, match="no bfloat16"):
                encode("bf16", spoiled)


@pytest.mark.parametrize("name", [*GROUPED, "fp8_e4m3fn_row_bf16", "nvfp4", "bf16", "int32"])
@few
@given(data=st.data())
def test_a_range_is_that_part_of_the_whole(name, data):
    shape, divisors = ((256, 128), data.draw(st.sampled_from([1, 2]))) if name == "nvfp4" else ((5, 150), 1)
    geometry = plan_geometry(name, None, shape, divisors)
    encoded = random_bytes(7, geometry.total)
    whole = decode(geometry, encoded).reshape(-1)
    begin = data.draw(st.integers(0, geometry.elements))
    end = data.draw(st.integers(begin, geometry.elements))
    out = np.empty(end - begin, whole.dtype)
    decode_range(geometry, fetch_of(encoded), begin, end, out)
    assert np.array_equal(out.view(np.uint32), whole[begin:end].view(np.uint32))


@pytest.mark.parametrize("name", [*ABSMAX, "fp8_e4m3fn_row_bf16", "nvfp4"])
def test_blocks_of_rows_make_the_same_object_and_stand_alone(name):
    values = np.random.default_rng(3).normal(size=(384, 192)).astype(np.float32)
    geometry = plan_geometry(name, None, values.shape)
    whole = encode(name, values)
    divisor = nvfp4_divisor(values) if name == "nvfp4" else None
    regions = [r for row in (256, 0, 128) for r in encode_rows(geometry, row, values[row : row + 128], divisor)]
    assert np.array_equal(join(geometry, iter(regions)), whole)
    covered = sorted((offset, offset + data.nbytes) for offset, data in regions)
    assert covered[0][0] == 0
    assert covered[-1][1] == geometry.total
    assert all(a[1] == b[0] for a, b in pairwise(covered))
    alone, cut = slice_rows(geometry, fetch_of(whole), 128, 384)
    assert alone == plan_geometry(name, None, (256, 192))
    assert np.array_equal(decode(alone, cut), decode(geometry, whole)[128:])
    check_values(alone, fetch_of(cut))


@pytest.mark.parametrize("name", ["bf16", "fp32", "int32"])
@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 2, 3), (6, 1, 2, 3)])
def test_rows_of_words_stand_alone(name, shape):
    values = np.arange(np.prod(shape)).reshape(shape).astype(np.int32 if name == "int32" else np.float32)
    geometry, whole = plan_geometry(name, None, shape), encode(name, values)
    for first, stop in ((0, 6), (2, 3), (1, 6)):
        alone, cut = slice_rows(geometry, fetch_of(whole), first, stop)
        assert np.array_equal(decode(alone, cut), values[first:stop])
    with pytest.raises(ReferenceError_):
        slice_rows(geometry, fetch_of(whole), 5, 7)
    scalar = plan_geometry(name, None, ())
    assert slice_rows(scalar, fetch_of(whole), 0, 1)[0] == scalar


def test_rows_of_stacked_matrices_take_their_divisors():
    parts = [np.random.default_rng(n).normal(size=(256, 64)).astype(np.float32) * 5**n for n in range(3)]
    whole = encode("nvfp4", np.concatenate(parts), divisors=3)
    geometry = plan_geometry("nvfp4", None, (768, 64), 3)
    values = decode(geometry, whole)
    for first, stop, divisors in ((0, 256, 1), (256, 768, 2), (384, 512, 1), (512, 640, 1), (0, 768, 3)):
        alone, cut = slice_rows(geometry, fetch_of(whole), first, stop)
        assert alone.divisors == divisors
        assert np.array_equal(decode(alone, cut), values[first:stop])
    with pytest.raises(EncodingError):
        slice_rows(geometry, fetch_of(whole), 128, 384)


@pytest.mark.parametrize("name", ["bf16", "q4_g64_fp16", "fp8_e4m3fn_row_bf16", "nvfp4", "fp32"])
def test_torch_tensors_are_encoded_as_their_values(name):
    import torch

    for kind in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).to(kind).requires_grad_()
        values = tensor.detach().to(torch.float32).numpy()
        if name in ("bf16", "fp32") and kind not in ({"bf16": torch.bfloat16, "fp32": torch.float32}[name],):
            continue
        assert encode(name, tensor).tobytes() == encode(name, values).tobytes()


def test_ranges_outside_are_refused():
    geometry = plan_geometry("bf16", None, (4,))
    with pytest.raises(RangeError):
        decode_range(geometry, fetch_of(np.zeros(8, np.uint8)), 2, 5, np.empty(3, np.float32))
    with pytest.raises(RangeError):
        decode(geometry, np.zeros(7, np.uint8))
    with pytest.raises(ReferenceError_):
        plan_geometry("nvfp4", None, (256, 64)).row_spans(0, 100)


def spoil(name, shape, change, divisors=1):
    geometry = plan_geometry(name, None, shape, divisors)
    rng = np.random.default_rng(1)
    values = rng.normal(size=shape).astype(np.float32)
    if name == "q2_g64_fp16":
        encoded = pack_grouped(
            name, rng.integers(-1, 3, shape), rng.integers(0, 9, (shape[0], -(-shape[1] // 64)), dtype=np.uint16)
        )
    elif name == "t2_g128_fp16":
        encoded = encode(name, np.sign(values))
    else:
        encoded = encode(name, values, divisors)
    check_values(geometry, fetch_of(encoded))
    change(geometry, encoded)
    return geometry, encoded


def scale(word, at=0):
    def change(geometry, encoded):
        offset = geometry.plane("scales").offset + 2 * at
        encoded[offset : offset + 2] = np.array([word], "<u2").view(np.uint8)

    return change


def byte(plane, at, value):
    def change(geometry, encoded):
        encoded[geometry.plane(plane).offset + at] = value

    return change


def divisor(value):
    def change(geometry, encoded):
        encoded[-4:] = np.array([value], "<f4").view(np.uint8)

    return change


INVALID = [
    ("q4_g64_fp16", (2, 130), scale(0x7C00)), ("q4_g64_fp16", (2, 130), scale(0x8000)),
    ("q4_g64_fp16", (2, 130), scale(0x0000)), ("q4_g64_fp16", (2, 130), scale(0x3C00, at=3)),
    ("q4_g64_fp16", (2, 130), byte("base", 32 * 3, 1)), ("q5_g64_fp16", (2, 130), byte("high", 3 * 8, 1)),
    ("q5_g64_fp16", (2, 130), byte("high", 33 + 31, 1)), ("q6_g64_fp16", (2, 130), scale(0xFE00)),
    ("q8_g32_fp16", (2, 130), byte("base", 5, 0x80)), ("t2_g128_fp16", (2, 130), byte("base", 0, 0x02)),
    ("q2_g64_fp16", (2, 130), byte("base", 33, 0)), ("q2_g64_fp16", (2, 130), scale(0x7C00)),
    ("fp8_e4m3fn_row_bf16", (2, 130), byte("codes", 3, 0x7F)),
    ("fp8_e4m3fn_row_bf16", (2, 130), byte("codes", 3, 0xFF)), ("fp8_e4m3fn_row_bf16", (2, 130), scale(0)),
    ("fp8_e4m3fn_row_bf16", (2, 130), scale(0x8000)), ("fp8_e4m3fn_row_bf16", (2, 130), scale(0x7F80)),
    ("fp8_e4m3fn_row_bf16", (2, 5), byte("codes", 11, 1)), ("nvfp4", (128, 64), byte("scales", 9, 0x7F)),
    ("nvfp4", (128, 64), byte("scales", 9, 0x80)), ("nvfp4", (128, 64), divisor(0)),
    ("nvfp4", (128, 64), divisor(-1)), ("nvfp4", (128, 64), divisor(np.inf)), ("nvfp4", (128, 64), divisor(np.nan)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "change"), INVALID)
def test_what_a_format_does_not_have_is_found(name, shape, change):
    geometry, encoded = spoil(name, shape, change)
    with pytest.raises(ValueDomainError):
        check_values(geometry, fetch_of(encoded))


@pytest.mark.parametrize(
    ("name", "shape", "change"),
    [
        ("q2_g64_fp16", (2, 130), scale(0x8000)), ("q2_g64_fp16", (2, 130), scale(0)),
        ("q4_g64_fp16", (2, 130), scale(0xBC00)), ("nvfp4", (128, 64), divisor(1e-45)),
        ("nvfp4", (128, 64), byte("codes", 0, 0x88)), ("fp8_e4m3fn_row_bf16", (2, 130), scale(1)),
    ],
)  # fmt: skip
def test_what_a_format_has_is_left_alone(name, shape, change):
    geometry, encoded = spoil(name, shape, change)
    check_values(geometry, fetch_of(encoded))


@pytest.mark.parametrize("name", ["q4_g64_fp16", "q8_g32_fp16", "fp8_e4m3fn_row_bf16", "nvfp4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_finite_values_are_encoded(name, bad):
    values = np.ones((128, 64), np.float32)
    values[100, 3] = bad
    with pytest.raises(ValueDomainError):
        encode(name, values)


def test_fp8_rows_too_small_for_any_scale_are_refused():
    with pytest.raises(ValueDomainError, match="no scale"):
        encode("fp8_e4m3fn_row_bf16", np.array([[1e-38, 0]], np.float32))


@pytest.mark.parametrize("name", ABSMAX)
@somewhat
@given(seed=seeds, columns=st.integers(1, 140), exponent=st.integers(-8, 8))
def test_groups_that_reach_the_largest_code_encode_to_themselves(name, seed, columns, exponent):
    _, group, _, _, _, largest = GROUPED[name]
    rng = np.random.default_rng(seed)
    codes = rng.integers(-largest, largest + 1, (2, columns))
    codes[:, ::group] = rng.choice([-largest, largest], (2, -(-columns // group)))
    scales = (rng.uniform(1, 2, (2, -(-columns // group))) * 2.0**exponent).astype(np.float16)
    packed = pack_grouped(name, codes, scales)
    values = decode(plan_geometry(name, None, (2, columns)), packed)
    assert encode(name, values).tobytes() == packed.tobytes()


@somewhat
@given(seed=seeds, columns=st.integers(1, 70))
def test_fp8_rows_that_reach_448_encode_to_themselves(seed, columns):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7F, (3, columns), dtype=np.uint8) | rng.choice([0, 0x80], (3, columns)).astype(np.uint8)
    codes[:, 0] = 0x7E
    packed = pack_fp8(codes, rng.integers(0x3000, 0x4000, 3).astype(np.uint16))
    values = decode(plan_geometry("fp8_e4m3fn_row_bf16", None, (3, columns)), packed)
    # A product with more bits than bfloat16 has is rounded first, and may then be nearer to a neighbour.
    again = decode(plan_geometry("fp8_e4m3fn_row_bf16", None, (3, columns)), encode("fp8_e4m3fn_row_bf16", values))
    assert np.abs(again - values).max() <= np.abs(values).max() / 16
    exact = pack_fp8(codes, np.array([0x3F80, 0x4000, 0x3000], np.uint16))
    values = decode(plan_geometry("fp8_e4m3fn_row_bf16", None, (3, columns)), exact)
    assert encode("fp8_e4m3fn_row_bf16", values).tobytes() == exact.tobytes()


@pytest.mark.parametrize("kind", ["<u2", "<f4", "<u8"])
def test_encoded_bytes_may_be_an_array_of_any_type_and_shape(kind):
    values = np.arange(16, dtype=np.float32).reshape(2, 8)
    geometry, data = plan_geometry("bf16", None, (2, 8)), encode("bf16", values)
    assert np.array_equal(decode(geometry, data.view(kind)), values)
    assert np.array_equal(decode(geometry, data.reshape(4, 8)), values)


@pytest.mark.parametrize(
    ("form", "shape", "divisors"),
    [
        ("fp32", (2.5, 2), 1),
        ("fp32", (True, 2), 1),
        ("fp32", ("2", 2), 1),
        ("fp32", (1,) * 17, 1),
        ("fp32", (-2, -2), 1),
        ("nvfp4", (128, 64), 0),
        ("nvfp4", (128, 64), -1),
        ("nvfp4", (128, 64), 1.0),
    ],
)
def test_a_geometry_of_what_is_no_shape(form, shape, divisors):
    with pytest.raises(EncodingError):
        plan_geometry(form, None, shape, divisors)


def test_a_geometry_never_wraps_around():
    assert plan_geometry("bf16", None, (np.int32(70000), np.int32(70000))).total == 9_800_000_000
    with pytest.raises(RangeError):
        plan_geometry("fp32", None, (np.int64(2**62), np.int64(4)))


@pytest.mark.parametrize(
    "values",
    [[[1.0], [1.0, 2.0]], torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(2, 3, device="meta"), None, "text"],
    ids=["ragged", "float8", "meta", "none", "text"],
)
def test_what_is_no_array_of_numbers_is_refused(values):
    for form in ("fp32", "bf16", "q8_g32_fp16"):
        with pytest.raises(AffineError):
            encode(form, values)


@pytest.mark.parametrize("form", ["q4_g64_fp16", "q8_g32_fp16", "fp8_e4m3fn_row_bf16"])
def test_numpy_settings_of_the_caller_do_not_matter(form):
    def result(values):
        try:
            data = encode(form, values)
        except ValueDomainError as refused:
            return str(refused)
        return data.tobytes() + decode(plan_geometry(form, None, values.shape), data).tobytes()

    for size in (1e-45, 1e-40, 1e-30, 1, 1e4):
        values = np.array([[size, -size / 3, 0, -0.0]], np.float32)
        expected = result(values)
        with np.errstate(all="raise"):
            assert result(values) == expected


IMPORTS = {
    "a code beyond": lambda: pack_grouped("q4_g64_fp16", np.array([[8]]), np.array([[0x3C00]], np.uint16)),
    "a code below": lambda: pack_grouped("q8_g32_fp16", np.array([[-128]]), np.array([[0x3C00]], np.uint16)),
    "codes that are no integers": lambda: pack_grouped("q4_g64_fp16", np.ones((1, 1)), np.array([[1]], np.uint16)),
    "scales of another type": lambda: pack_grouped("q4_g64_fp16", np.ones((1, 1), int), np.ones((1, 1), np.float32)),
    "scales of another shape": lambda: pack_grouped("q4_g64_fp16", np.ones((1, 1), int), np.ones((1, 2), np.uint16)),
    "an infinite scale": lambda: pack_grouped("q2_g64_fp16", np.ones((1, 1), int), np.array([[0x7C00]], np.uint16)),
    "a code that is no number": lambda: pack_fp8(np.array([[0x7F]], np.uint8), np.array([1], np.uint16)),
    "a scale a row": lambda: pack_fp8(np.ones((2, 3), np.uint8), np.array([1], np.uint16)),
    "a negative row scale": lambda: pack_fp8(np.ones((1, 3), np.uint8), np.array([0x8001], np.uint16)),
    "a block scale that is none": lambda: pack_nvfp4(
        np.zeros((128, 32), np.uint8), np.full((128, 4), 0x7F, np.uint8), np.ones(1, np.float32)
    ),
    "a divisor of zero": lambda: pack_nvfp4(
        np.zeros((128, 32), np.uint8), np.zeros((128, 4), np.uint8), np.zeros(1, np.float32)
    ),
    "integers encoded": lambda: encode("q4_g64_fp16", np.ones((1, 4), np.int64)),
    "a value beyond bfloat16": lambda: encode("fp8_e4m3fn_row_bf16", np.array([[3.4e38, 1]], np.float32)),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_words_and_values_no_format_has_are_not_packed(name):
    with pytest.raises(ValueDomainError):
        IMPORTS[name]()


def test_what_a_format_has_no_place_for_is_not_packed():
    for call in (
        lambda: pack_grouped("bf16", np.ones((1, 1), int), np.ones((1, 1), np.uint16)),
        lambda: pack_grouped("q4_g64_fp16", np.ones((0, 4), int), np.ones((0, 1), np.uint16)),
        lambda: encode_rows(plan_geometry("nvfp4", None, (128, 64)), 0, np.ones((128, 64), np.float32)),
        lambda: encode_rows(plan_geometry("q4_g64_fp16", None, (2, 64)), 0, np.ones((1, 65), np.float32)),
    ):
        with pytest.raises(EncodingError):
            call()
