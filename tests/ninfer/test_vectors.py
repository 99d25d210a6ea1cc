"""The worked vectors of the format's description: sizes, bytes, scales and digests."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from deepspeed_affine.ninfer.decode import decode
from deepspeed_affine.ninfer.encode import divisor_of, encode, nvfp4_divisor
from deepspeed_affine.ninfer.errors import EncodingError, ValueDomainError
from deepspeed_affine.ninfer.floats import e2m1_words, e4m3fn_words, round_to_bf16
from deepspeed_affine.ninfer.formats import GROUPED
from deepspeed_affine.ninfer.grouped import codes_of, encode_absmax
from deepspeed_affine.ninfer.layouts import encoded_bytes, plan_geometry
from deepspeed_affine.ninfer.pack import pack_grouped


def matrix(rows, columns, seed):
    r, c = np.mgrid[:rows, :columns]
    values = ((37 * r + 17 * c + 29 * seed) % 211 - 105) / 64
    return np.where((r + c) % 2, -values, values).astype(np.float32)


def sha(data):
    return hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()


def test_the_source_matrix_is_the_one_of_the_vectors():
    values = matrix(2, 130, 1)
    assert values[0, :8].tolist() == [-1.1875, 0.921875, -0.65625, 0.390625, -0.125, -0.140625, 0.40625, -0.671875]
    assert values[1, -2:].tolist() == [-0.421875, 0.6875]


GROUPED_VECTORS = {
    "q4_g64_fp16": (
        (4, 272, 256, 256), [-5, 4, -3, 2, -1, -1, 2, -3], [0, 1, -4, 7, 0, 0], "4b2dffd2b4764a2d", "",
        "6e338033b7250000 6e338033492e0000", "7c000000",
        "ea664d154f9b897c0c0921266c00cd5e1b1f65507427e7564287c670d9837296",
        "9d4e4dff7e321d265778fd51f7dc0398b89659429f04327b8dcab25e54832145",
    ),
    "q5_g64_fp16": (
        (4, 528, 256, 512), [-11, 9, -6, 4, -1, -1, 4, -6], [1, 1, -9, 15, 0, 0], "954affa459eea459",
        "b552a9955aa9954a", "ef2e002f55210000 ef2e002fde290000", "f7000000",
        "8dcda5365478e1d3ab1d1117f047c70ba477a46432a7f5f5e7478253320c805a",
        "84073f9d66cc1257071416b6364d5b8a2b2cd3a6a6dcde6726f491c4cbc8430f",
    ),
    "q6_g64_fp16": (
        (4, 528, 256, 512), [-23, 18, -13, 7, -2, -3, 8, -13], [2, 3, -19, 31, 0, 0], "2973de3892ec47a1",
        "36cf5936cf9926c3", "b62ac62a291d0000 b62ac62aad250000", "fd000000",
        "99896aac53a627c22163ca0f1ff7deb6d6c7f75a04c8c9b790b34b60225bbbcd",
        "33a803c6991c2b834703e4dd59370219e23278b2f7ebc0680d9db5f1c6e1e18b",
    ),
    "q8_g32_fp16": (
        (8, 544, 512, 512), [-93, 72, -51, 31, -10, -11, 32, -53], [9, 12, -78, 127, 0, 0], "a348cd1ff6f520cb", "",
        "8d228d227d229d220a15000000000000 8d227d229d226d228b1d000000000000", None,
        "178c1affecb333224c7535810814ee572eb6962ae0ca85fca18862dd4c0aa055",
        "3af2c59944387a8c755545045578ce7126c2d2c8d6bcadcb72fb624c0a4862c5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPED_VECTORS)
def test_grouped_encoding_is_byte_for_byte_the_vector(name):
    (groups, total, base_end, scale_off), row0, row1, base8, high8, scales, group2, encoded_sha, values_sha = (
        GROUPED_VECTORS[name]
    )
    encoded = encode(name, matrix(2, 130, 1))
    geometry = plan_geometry(name, None, (2, 130))
    assert (geometry.groups, geometry.total, geometry.plane("base").end) == (groups, total, base_end)
    assert geometry.plane("scales").offset == scale_off
    base, high = geometry.plane("base"), None
    assert encoded[:8].tobytes().hex() == base8
    if high8:
        high = geometry.plane("high")
        assert encoded[high.offset : high.offset + 8].tobytes().hex() == high8
    form = GROUPED[name]
    codes = codes_of(form, encoded[: base.end], None if high is None else encoded[high.offset : high.end])
    codes = codes.reshape(2, -1)
    assert codes[0, :8].tolist() == row0
    assert codes[1, 126:132].tolist() == row1
    assert encoded[scale_off:].tobytes().hex() == scales.replace(" ", "")
    if group2:
        at = (groups + 2) * form.base_bytes
        assert encoded[at : at + 4].tobytes().hex() == group2
    assert sha(encoded) == encoded_sha
    assert sha(decode(geometry, encoded).astype("<f4")) == values_sha


HAND_PACKED = [
    ("q4_g64_fp16", 65, [-8, -7, -1, 0, 1, 7], "980f71", None),
    ("q5_g64_fp16", 130, [-16, -15, -1, 0, 1, 15], "100ff1", "07"),
    ("q6_g64_fp16", 65, [-32, -31, -17, -16, -1, 0, 15, 31], "100f0fff", "ea43"),
    ("q8_g32_fp16", 33, [-127, -1, 0, 1, 127], "81ff00017f", None),
    ("t2_g128_fp16", 130, [-1, 0, 1, 1, -1, 0, 0, 1], "5343", None),
    ("q2_g64_fp16", 4, [-1, 0, 1, 2], "e4", None),
]


@pytest.mark.parametrize(("name", "columns", "first", "base", "high"), HAND_PACKED)
def test_first_lanes_are_in_the_first_bytes(name, columns, first, base, high):
    codes = np.zeros((1, columns), np.int8)
    codes[0, : len(first)] = first
    used = -(-columns // GROUPED[name].group)
    scales = np.array([[0x3E00, 0x3400, 0x3400, 0x3400, 0x3400][:used]], np.uint16)
    packed = pack_grouped(name, codes, scales)
    assert packed[: len(base) // 2].tobytes().hex() == base
    if high:
        at = plan_geometry(name, None, (1, columns)).plane("high").offset
        assert packed[at : at + len(high) // 2].tobytes().hex() == high


def test_ternary_vector():
    codes = np.zeros((1, 130), np.int8)
    codes[0, :8] = [-1, 0, 1, 1, -1, 0, 0, 1]
    codes[0, 128:] = [1, -1]
    packed = pack_grouped("t2_g128_fp16", codes, np.array([[0x3E00, 0x3400]], np.uint16))
    assert len(packed) == 260
    assert packed[:4].tobytes().hex() == "53430000"
    assert packed[32:36].tobytes().hex() == "0d000000"
    assert sha(packed) == "018c101bb643329f0119dab8ffb251243be927a1ad10dfaec67482b6c475f667"
    values = decode(plan_geometry("t2_g128_fp16", None, (1, 130)), packed)
    assert encode("t2_g128_fp16", values).tobytes() == packed.tobytes()


def test_two_bit_vectors():
    codes = np.zeros((1, 66), np.int8)
    codes[0, :4], codes[0, 64:] = [-1, 0, 1, 2], [2, -1]
    packed = pack_grouped("q2_g64_fp16", codes, np.array([[0xBC00, 0x3800]], np.uint16))
    assert packed[:4].tobytes().hex() == "e4555555"
    assert packed[16:20].tobytes().hex() == "53555555"
    assert packed[256:].tobytes().hex() == "00bc0038"
    assert sha(packed) == "91d3252720a27d57c733b640c9e2edd868c748c65693ee58f98ad27204b6aa80"
    values = decode(plan_geometry("q2_g64_fp16", None, (1, 66)), packed)[0]
    assert [str(v) for v in values[:5]] == ["1.0", "-0.0", "-1.0", "-2.0", "-0.0"]
    assert values[64:].tolist() == [1.0, -0.5]
    codes = np.tile(np.array([-1, 0, 1, 2], np.int8), (2, 32))
    packed = pack_grouped("q2_g64_fp16", codes, np.array([[0x3800, 0xBC00], [1, 0x8000]], np.uint16))
    assert packed[:64].tobytes() == b"\xe4" * 64
    assert not packed[64:256].any()
    assert packed[256:].tobytes().hex() == "003800bc01000080"
    assert len(packed) == 264


def test_fp8_vectors():
    rows = np.array(
        [[0, -0.0, 0, -0.0, 0], [448, 1.0625, 1.1875, -1.0625, -1.1875], [1, -0.0, 0.5, -1, -0.5]], np.float32
    )
    encoded = encode("fp8_e4m3fn_row_bf16", rows)
    assert encoded[:15].tobytes().hex() == "00000000007e383ab8ba7e8076fef6"
    assert encoded[256:].tobytes().hex() == "0000803f123b"
    assert sha(encoded) == "a3b8bebedc9f0b99ab7b0569274fb087885ed98aef5ff9b00fee3d3a79ea831e"
    rows = np.array([[448, 1.0625, -1.1875, 0], [0, 0, 0, 0], [2, -2, 1, -1]], np.float32)
    encoded = encode("fp8_e4m3fn_row_bf16", rows)
    assert encoded[:12].tobytes().hex() == "7e38ba00000000007efe76f6"
    assert encoded[256:].tobytes().hex() == "803f0000923b"
    encoded = encode("fp8_e4m3fn_row_bf16", matrix(3, 70, 4))
    assert encoded[256:].tobytes().hex() == "703b" * 3
    assert encoded[:8].tobytes().hex() == "64ef74f87bfdfd7b"
    assert len(encoded) == 262
    assert sha(encoded) == "164f3554278b6e758028a7077859083532dabb6a8e103ca09d57e3e88e13fa3b"


def test_nvfp4_vector():
    values = matrix(128, 64, 5)
    values[0, :16] = 0
    assert np.abs(values).max() == 1.640625
    assert np.float32(nvfp4_divisor(values)).tobytes().hex() == "cdcccc44"
    encoded = encode("nvfp4", values)
    assert encoded[:12].tobytes().hex() == "0000000000000000776e3d99"
    assert encoded[32:40].tobytes().hex() == "7ee7d6a4285c6eff"
    assert encoded[4096:4124].tobytes().hex() == "007d7e7d7d7e7e7d7e7e7d7e7e7d7e7d7e7d7e7d7d7e7d7e7d7d7e7e"
    assert len(encoded) == 4612
    assert sha(encoded) == "eddec5b5ef6c0e9d6461b9b7d359cdf13e0d5bf23af629e0ed7a34318c17fc31"
    decoded = decode(plan_geometry("nvfp4", None, (128, 64)), encoded)
    assert sha(decoded.astype("<f4")) == "043226de356c219dcb073f156d07bd7ef853b4cb434712cdfc6da2a5bb71f309"


def one_group(name, values):
    form = GROUPED[name]
    group = np.zeros((1, form.group), np.float32)
    group[0, : len(values)] = values
    codes, scales = encode_absmax(form, group, "a group")
    return int(scales[0]), codes[0, : len(values)].tolist()


def words(*bits):
    return np.array(bits, np.uint32).view(np.float32).tolist()


TINY = 2.0**-24


@pytest.mark.parametrize(
    ("values", "scale", "codes"),
    [
        ([7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], 0x3C00, [7, 0, 2, 2, 0, -2, -2]),
        (words(0x41A0B334, 0x417C7BFF), 0x41BD, [7, 6]),
        (words(0x36360000) * 64, 0x0006, None),
        ([2.0**-126], 0x0001, [0]),
        ([-8, 1], 0x3C92, [-7, 1]),
        ([-10.43 * TINY, 3 * TINY], 0x0001, [-8, 3]),
        ([10.43 * TINY, 3 * TINY], 0x0001, [7, 3]),
        ([458639.9], 0x7BFF, None),
    ],
)
def test_the_absmax_rounding_cases(values, scale, codes):
    found_scale, found = one_group("q4_g64_fp16", values)
    assert found_scale == scale
    if codes is not None:
        assert found == codes


def test_the_largest_scale_and_the_eight_bit_case():
    with pytest.raises(ValueDomainError, match="458640"):
        one_group("q4_g64_fp16", [458640.0])
    assert one_group("q8_g32_fp16", [-1, 1]) == (0x2008, [-127, 127])


def test_nvfp4_ties_and_divisor():
    assert divisor_of(0.5) == 5376.0
    assert divisor_of(0.0) == 1.0
    codes = e2m1_words(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7], np.float32))
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7]
    with pytest.raises(ValueDomainError):
        divisor_of(1e-40)


SIZES = [
    ("q4_g64_fp16", (7168, 5120), 1, 19_496_960), ("q5_g64_fp16", (7168, 5120), 1, 24_084_480),
    ("q5_g64_fp16", (2, 130), 1, 528), ("q4_g64_fp16", (256, 128), 1, 17_408), ("q5_g64_fp16", (256, 128), 1, 21_504),
    ("q6_g64_fp16", (2, 130), 1, 528), ("q8_g32_fp16", (2, 130), 1, 544), ("t2_g128_fp16", (1, 130), 1, 260),
    ("q2_g64_fp16", (1, 66), 1, 260), ("q2_g64_fp16", (2, 128), 1, 264), ("q2_g64_fp16", (2, 130), 1, 272),
    ("nvfp4", (14336, 5120), 1, 41_287_684), ("nvfp4", (128, 64), 1, 4612), ("nvfp4", (256, 128), 2, 18_440),
    ("fp8_e4m3fn_row_bf16", (14336, 5120), 1, 73_428_992), ("fp8_e4m3fn_row_bf16", (3, 5), 1, 262),
    ("fp8_e4m3fn_row_bf16", (3, 70), 1, 262), ("fp8_e4m3fn_row_bf16", (2, 160), 1, 516),
    ("bf16", (), 1, 2), ("int32", (3, 5), 1, 60),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "divisors", "size"), SIZES)
def test_exact_sizes(name, shape, divisors, size):
    assert encoded_bytes(name, shape, divisors) == size


def test_where_block_scales_lie():
    from deepspeed_affine.ninfer.encode import swizzled

    natural = np.arange(256 * 8, dtype=np.uint16).reshape(256, 8)
    stored = swizzled(natural).tolist()
    for (row, group), place in {
        (0, 0): 0,
        (0, 4): 512,
        (1, 0): 16,
        (32, 0): 4,
        (127, 3): 511,
        (128, 0): 1024,
        (255, 7): 2047,
    }.items():
        assert stored[place] == natural[row, group]


@pytest.mark.parametrize(
    ("name", "layout", "shape", "divisors"),
    [
        ("bf16", "row_split_k128_v1", (2, 2), 1), ("q4_g64_fp16", "contiguous_le_v1", (2, 2), 1),
        ("q4_g64_fp16", None, (2, 2, 2), 1), ("q4_g64_fp16", None, (), 1), ("nvfp4", None, (127, 64), 1),
        ("nvfp4", None, (128, 32), 1), ("nvfp4", None, (256, 64), 3), ("nvfp4", None, (128, 64), 2),
        ("fp8_e4m3fn_row_bf16", None, (4,), 1), ("bf16", None, (2, 2), 2), ("q3", None, (2, 2), 1),
        ("bf16", "v2", (2, 2), 1), ("fp32", None, (2, 0), 1),
    ],
)  # fmt: skip
def test_what_no_layout_holds_is_refused(name, layout, shape, divisors):
    with pytest.raises(EncodingError):
        plan_geometry(name, layout, shape, divisors)


def test_e4m3_rounding_is_torchs():
    import torch

    values = np.concatenate([np.linspace(-448, 448, 20_011), np.linspace(-0.05, 0.05, 20_011)]).astype(np.float32)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(e4m3fn_words(values), theirs)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(round_to_bf16(values), theirs)
