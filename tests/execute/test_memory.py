"""Extract and rebuild on torch tensors: every dtype, every kind of view, and bytes that must agree."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_affine.errors import IntegrityError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.execute.memory import dense, extract, rebuild, strided_view
from deepspeed_affine.ir import (
    AffinePiece,
    ParamAffineMap,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "ir"))

import ir_worlds

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
]

LAYOUTS = {
    "rows": contiguous_split_map((7, 6), [2, 5], 0),
    "columns": contiguous_split_map((7, 6), [2, 0, 4], 1),
    "fused": sub_param_map((4, 10, 2), [6, 4], [[2, 4], [1, 3]], 1),
    "bigcode": segmented_map((48, 8), [(32, False), (16, True)], 0, 4, [[8] * 4]),
    "replicated": replicated_map((3, 5), 3),
    "scalar": replicated_map((), 2),
    "empty": contiguous_split_map((0, 4), [0, 0], 0),
    "transposed": ParamAffineMap((4, 6), {0: (6, 4)}, {0: [AffinePiece((4, 6), 0, (6, 1), 0, (1, 4), [0])]}),
    "interleaved": ParamAffineMap((12,), {0: (12,)}, {0: [AffinePiece((2, 6), 0, (1, 2), 0, (1, 2), [0])]}),
}


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes of the dtype (a legal bool aside), NaNs and infinities among them."""
    numel = 1
    for extent in shape:
        numel *= extent
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        data %= 2
    return data.view(dtype).view(shape)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bytes(dense(a).view(torch.uint8).numpy()) == bytes(dense(b).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rebuild_inverts_extract_for_every_dtype(name: str, dtype: torch.dtype) -> None:
    layout = LAYOUTS[name]
    full = random_tensor(layout.logical_shape, dtype)
    shards = {rank: layout.extract(full, rank) for rank in layout.ranks}
    assert all(shards[rank].shape == layout.shard_shapes[rank] for rank in layout.ranks)
    back = layout.rebuild(shards)
    assert same_bytes(back, full)


@pytest.mark.parametrize("seed", range(150))
def test_any_valid_map_moves_the_elements_its_pieces_name(seed: int) -> None:
    layout = ir_worlds.random_map(random.Random(seed))
    layout = ParamAffineMap(
        layout.logical_shape,
        layout.shard_shapes,
        {
            rank: [
                AffinePiece(p.shape, p.source_offset, p.source_strides, p.dest_offset, p.dest_strides, p.locations)
                for p in row
            ]
            for rank, row in layout.pieces_by_rank.items()
        },
    )
    full = torch.arange(layout.numel).view(layout.logical_shape)
    shards = {rank: layout.extract(full, rank) for rank in layout.ranks}
    for rank, piece in layout.pieces():
        flat = shards[rank].reshape(-1)
        for source, dest in zip(piece.source_offsets(), piece.dest_offsets(), strict=True):
            assert flat[dest] == source
    assert torch.equal(layout.rebuild(shards), full)


def as_slice(t: torch.Tensor) -> torch.Tensor:
    """A view that begins in the middle of a larger storage."""
    store = torch.zeros(t.numel() + 11, dtype=t.dtype)
    view = store[5 : 5 + t.numel()].view(t.shape)
    view.copy_(t)
    return view


def as_every_other(t: torch.Tensor) -> torch.Tensor:
    """A view with stride 2, which reshape(-1) would hand over unchanged."""
    store = torch.zeros(2 * t.numel(), dtype=t.dtype)
    store[::2] = t.reshape(-1)
    return store[::2].unflatten(0, t.shape) if t.dim() else store[0]


def as_transposed(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t() if t.dim() == 2 else t


@pytest.mark.parametrize("view", [as_slice, as_every_other, as_transposed])
@pytest.mark.parametrize("name", ["rows", "columns", "bigcode", "scalar"])
def test_views_into_other_storage_are_read_by_their_elements(name: str, view) -> None:
    layout = LAYOUTS[name]
    full = torch.randn(layout.logical_shape)
    shards = {rank: layout.extract(full, rank) for rank in layout.ranks}
    moved = {rank: view(layout.extract(view(full), rank)) for rank in layout.ranks}
    assert all(torch.equal(moved[rank], shards[rank]) for rank in layout.ranks)
    assert torch.equal(layout.rebuild(moved), full)


def test_negated_and_conjugated_views_are_resolved() -> None:
    layout = LAYOUTS["rows"]
    full = torch.randn((7, 6), dtype=torch.complex64)
    shards = {rank: layout.extract(full.conj(), rank) for rank in layout.ranks}
    assert torch.equal(layout.rebuild(shards), full.conj().resolve_conj())
    imag = full.conj().imag
    assert torch.equal(layout.rebuild({r: layout.extract(imag, r) for r in layout.ranks}), -full.imag)


def test_parameters_that_require_grad_are_read_without_a_graph() -> None:
    layout = LAYOUTS["columns"]
    full = torch.nn.Parameter(torch.randn(7, 6))
    shards = {rank: layout.extract(full, rank) for rank in layout.ranks}
    assert not any(shard.requires_grad for shard in shards.values())
    assert torch.equal(layout.rebuild(shards), full.detach())


def test_piece_views_share_memory_and_count_from_the_first_element() -> None:
    piece = AffinePiece((2, 2), 1, (3, 1), 0, (2, 1), [0])
    store = torch.arange(10.0)
    view = piece.source_view(store[4:])
    assert view.tolist() == [[5.0, 6.0], [8.0, 9.0]]
    view.zero_()
    assert store[5] == 0
    with pytest.raises(UnsupportedLayoutError, match="not dense"):
        piece.source_view(store[::2])
    with pytest.raises(InvalidMapError, match="reaches element 5 of a tensor of 4"):
        strided_view(store[:4], piece.shape, piece.source_offset, piece.source_strides)


def test_one_bit_between_replicas_is_refused_with_its_place() -> None:
    """DeepSpeed compares a replica only where it starts at an offset already written."""
    layout = LAYOUTS["bigcode"]
    full = torch.randn(48, 8)
    shards = {rank: layout.extract(full, rank) for rank in layout.ranks}
    shards[2].view(torch.int32)[13, 3] ^= 1
    with pytest.raises(IntegrityError, match=r"Ranks 0 and 2 hold different bytes for element \(37, 3\)") as caught:
        layout.rebuild(shards)
    assert caught.value.rank == 2


def test_minus_zero_is_not_zero_between_replicas() -> None:
    layout = replicated_map((2,), 2)
    with pytest.raises(IntegrityError, match=r"element \(1,\)"):
        layout.rebuild({0: torch.tensor([1.0, 0.0]), 1: torch.tensor([1.0, -0.0])})


def test_nan_replicas_that_agree_byte_for_byte_are_accepted() -> None:
    """DeepSpeed compares values, and a NaN differs from itself."""
    layout = replicated_map((4,), 2)
    full = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    assert same_bytes(layout.rebuild({0: full, 1: full.clone()}), full)


def test_replicas_cut_differently_are_compared_everywhere() -> None:
    """DeepSpeed keys what it wrote by start offset, so a second cutting was never compared and the last writer won."""
    cut = {
        0: [AffinePiece((4,), 0, (1,), 0, (1,), [0, 1])],
        1: [AffinePiece((2,), 0, (1,), 0, (1,), [0, 1]), AffinePiece((2,), 2, (1,), 2, (1,), [0, 1])],
    }
    layout = ParamAffineMap((4,), {0: (4,), 1: (4,)}, cut)
    assert layout.rebuild({0: torch.arange(4), 1: torch.arange(4)}).tolist() == [0, 1, 2, 3]
    with pytest.raises(IntegrityError, match=r"Ranks 0 and 1 .* element \(2,\).*2 compared elements"):
        layout.rebuild({0: torch.tensor([1, 2, 3, 4]), 1: torch.tensor([1, 2, 9, 9])})


def test_two_copies_on_one_rank_are_compared_too() -> None:
    rows = [AffinePiece((4,), 0, (1,), 0, (1,), [0]), AffinePiece((2,), 1, (1,), 4, (1,), [0])]
    layout = ParamAffineMap((4,), {0: (6,)}, {0: rows})
    assert layout.rebuild({0: torch.tensor([0, 1, 2, 3, 1, 2])}).tolist() == [0, 1, 2, 3]
    with pytest.raises(IntegrityError, match=r"Rank 0 holds, at two shard addresses, .* element \(2,\)"):
        layout.rebuild({0: torch.tensor([0, 1, 2, 3, 1, 9])})


def test_an_uncovered_map_is_never_rebuilt_from_uninitialised_memory() -> None:
    """DeepSpeed returns whatever torch.empty held."""
    layout = ParamAffineMap((4,), {0: (2,)}, {0: [AffinePiece((2,), 0, (1,), 0, (1,), [0])]})
    with pytest.raises(InvalidMapError, match=r"No rank holds element \(2,\).*\[2:4\]"):
        layout.rebuild({0: torch.tensor([2, 2])})
    with pytest.raises(InvalidMapError, match="No rank holds"):
        layout.extract(torch.arange(4), 0)


def test_strided_pieces_on_one_shard_address_are_refused() -> None:
    """DeepSpeed checks dense pieces only, and rebuilt [0, 2, 0, 2] from this one."""
    rows = [AffinePiece((2,), 0, (2,), 0, (2,), [0]), AffinePiece((2,), 1, (2,), 0, (2,), [0])]
    layout = ParamAffineMap((4,), {0: (2, 2)}, {0: rows})
    for call in (layout.validate, layout.validate_coverage, lambda: layout.rebuild({0: torch.arange(4)})):
        with pytest.raises(InvalidMapError, match=r"writes address \(0, 0\) .* 2 times"):
            call()


def test_a_map_that_lies_about_holders_is_called_that() -> None:
    """DeepSpeed blamed the data of such a map."""
    rows = {0: [AffinePiece((4,), 0, (1,), 0, (1,), [0])], 1: [AffinePiece((2,), 0, (1,), 0, (1,), [0, 1])]}
    layout = ParamAffineMap((4,), {0: (4,), 1: (2,)}, rows)
    with pytest.raises(InvalidMapError, match=r"locations are \[0\], but element \(0,\).*ranks \[0, 1\]"):
        layout.rebuild({0: torch.arange(4), 1: torch.arange(2)})


def test_faults_survive_optimised_python() -> None:
    """DeepSpeed states coverage by assert, which -O removes."""
    import subprocess

    code = (
        "from deepspeed_affine.ir import *\n"
        "m = ParamAffineMap((4,), {0: (2,)}, {0: [AffinePiece((2,), 0, (1,), 0, (1,), [0])]})\n"
        "try:\n    m.validate_coverage()\nexcept ValueError as fault:\n    print(type(fault).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "InvalidMapError"


def test_large_maps_validate_without_a_piece_budget() -> None:
    """DeepSpeed's planner stops at 512 frames and its coverage check walks every element."""
    layout = contiguous_split_map((2048, 2**20), [1] * 2048, 0)
    layout.validate_coverage()
    assert len(layout.ranks) == 2048


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ({0: torch.zeros(2, 6)}, r"No shard was given for rank 1"),
        ({0: torch.zeros(2, 6), 1: torch.zeros(5, 6), 2: torch.zeros(1)}, "rank 2, which the map does not have"),
        ({0: torch.zeros(2, 6), 1: torch.zeros(4, 6)}, "Rank 1 gave a shard of 24 elements, but the map describes 30"),
        ({0: torch.zeros(2, 6), 1: torch.zeros(5, 6, dtype=torch.float64)}, "dtype torch.float64"),
        ({0: torch.zeros(2, 6), 1: torch.zeros(5, 6, device="meta")}, "device meta"),
    ],
)
def test_shards_that_do_not_fit_the_map_are_refused(shards: dict, text: str) -> None:
    with pytest.raises(IntegrityError, match=text):
        LAYOUTS["rows"].rebuild(shards)


def test_extract_refuses_another_parameter_and_another_rank() -> None:
    with pytest.raises(InvalidMapError, match="has 40 elements"):
        LAYOUTS["rows"].extract(torch.zeros(40), 0)
    with pytest.raises(InvalidMapError, match="Rank 5 is not a rank"):
        LAYOUTS["rows"].extract(torch.zeros(42), 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_power_of_two_scales_round_trip_exactly(degree: int, dtype: torch.dtype) -> None:
    layout = replicated_map((64,), degree, 1 / degree)
    full = torch.randn(64).to(dtype)
    shards = {rank: layout.extract(full, rank) for rank in layout.ranks}
    assert torch.equal(shards[0], full / degree)
    assert same_bytes(layout.rebuild(shards), full)


def test_the_parts_of_a_complex_number_are_scaled_one_by_one() -> None:
    inf, nan = float("inf"), float("nan")
    full = torch.tensor([complex(inf, 1), complex(1, nan), complex(-0.0, 3)], dtype=torch.complex128)
    shard = replicated_map((3,), 1, 0.5).extract(full, 0)
    expected = torch.tensor([[inf, 0.5], [0.5, nan], [-0.0, 1.5]], dtype=torch.float64)
    assert torch.equal(torch.view_as_real(shard).view(torch.int64), expected.view(torch.int64))


def test_fp8_is_scaled_through_a_wider_type() -> None:
    layout = replicated_map((4,), 2, 0.5)
    full = torch.tensor([1.0, -2.0, 4.0, 8.0]).to(torch.float8_e4m3fn)
    shards = {rank: layout.extract(full, rank) for rank in layout.ranks}
    assert shards[1].float().tolist() == [0.5, -1.0, 2.0, 4.0]
    assert same_bytes(layout.rebuild(shards), full)


def test_a_scaled_block_named_twice_is_divided_once() -> None:
    rows = [AffinePiece((4,), 0, (1,), 0, (1,), [0], 0.5), AffinePiece((2,), 1, (1,), 4, (1,), [0], 0.5)]
    layout = ParamAffineMap((4,), {0: (6,)}, {0: rows})
    full = torch.arange(4.0)
    assert torch.equal(layout.rebuild({0: layout.extract(full, 0)}), full)


def test_moments_through_a_scaled_piece_are_refused_unless_asked_for() -> None:
    layout = replicated_map((8,), 4, 0.25)
    full = torch.randn(8)
    for power in (-1, -2):
        with pytest.raises(UnsupportedLayoutError, match="lr and eps"):
            layout.extract(full, 0, scale_power=power)
        with pytest.raises(UnsupportedLayoutError, match="scaled_states='power'"):
            layout.rebuild(dict.fromkeys(range(4), full), scale_power=power)
        shard = extract(layout, full, 0, power, scaled_states="power")
        assert torch.equal(shard, full * 0.25**power)
        assert torch.equal(rebuild(layout, dict.fromkeys(range(4), shard), power, scaled_states="power"), full)
    plain = replicated_map((8,), 4)
    assert torch.equal(plain.extract(full, 0, scale_power=-2), full)


def test_an_inexact_factor_is_rounded_once() -> None:
    layout = replicated_map((1000,), 3, 3.0)
    full = torch.randn(1000, dtype=torch.float64)
    shard = extract(layout, full, 0, -1, scaled_states="power")
    assert torch.equal(shard, full / 3.0)
    back = replicated_map((1000,), 3, 3.0).rebuild(dict.fromkeys(range(3), full))
    assert torch.equal(back, full / 3.0)


def test_integers_cannot_carry_a_scale() -> None:
    layout = replicated_map((4,), 2, 0.5)
    with pytest.raises(UnsupportedLayoutError, match="int32 cannot carry"):
        layout.extract(torch.arange(4, dtype=torch.int32), 0)
