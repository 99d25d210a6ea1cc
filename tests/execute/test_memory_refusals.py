"""Tensors that extract and rebuild cannot take byte for byte: one clear error each, never the end of the process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_affine.errors import AffineError, IntegrityError, UnsupportedLayoutError
from deepspeed_affine.execute.memory import extract
from deepspeed_affine.ir import contiguous_split_map, replicated_map

ROWS = contiguous_split_map((4, 6), [2, 2], 0)
FULL = torch.arange(24.0).view(4, 6)


def quantized(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(FULL, 0.1, 0, dtype)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(4, 6)


STRANGE = {
    "quantized": lambda: quantized(torch.qint8),
    "quantized to 32 bits": lambda: quantized(torch.qint32),
    "bytes viewed as quantized": lambda: torch.zeros(4, 6, dtype=torch.uint8).view(torch.quint8),
    "sparse": lambda: FULL.to_sparse(),
    "compressed": lambda: FULL.to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([FULL[:2], FULL[2:]]),
    "fake": fake,
    "an array": lambda: np.zeros((4, 6)),
    "nothing": lambda: None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_plain_dense_tensor_is_refused(kind: str) -> None:
    given = STRANGE[kind]()
    with pytest.raises(UnsupportedLayoutError, match="expected a"):
        ROWS.extract(given, 0)
    with pytest.raises(AffineError, match=r"expected a|elements"):
        ROWS.rebuild({0: FULL[:2], 1: given})


SMALL_NAMES = ("int1", "int4", "uint3", "uint7", "float4_e2m1fn_x2")
SMALL = [getattr(torch, name) for name in SMALL_NAMES if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_dtypes_without_a_copy_kernel_travel_as_bytes(dtype: torch.dtype) -> None:
    columns = contiguous_split_map((4, 6), [2, 4], 1)
    stored = torch.randint(0, 128, (6, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    full = stored.view(dtype).t()
    shards = {rank: columns.extract(full, rank) for rank in columns.ranks}
    assert torch.equal(shards[1].view(torch.uint8), stored.t()[:, 2:])
    assert torch.equal(columns.rebuild(shards).view(torch.uint8), stored.t())


def test_shards_without_bytes_rebuild_nothing() -> None:
    with pytest.raises(UnsupportedLayoutError, match="meta"):
        replicated_map((4, 6), 2).rebuild({0: FULL.to("meta"), 1: FULL.to("meta")})


def test_shards_are_given_by_rank() -> None:
    with pytest.raises(IntegrityError, match="mapping from rank"):
        ROWS.rebuild([FULL[:2], FULL[2:]])  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [[0], "0", None, True, 9])
def test_a_rank_of_another_kind_is_refused(rank: object) -> None:
    with pytest.raises(AffineError, match="rank"):
        ROWS.extract(FULL, rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("divisor", [3, 5, 6, 7, 12, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_scaled_element_is_rounded_once(divisor: int, dtype: torch.dtype) -> None:
    layout = replicated_map((20_000,), 2, scale=1 / divisor)
    full = torch.randn(20_000, generator=torch.Generator().manual_seed(divisor)).to(dtype)
    shard = layout.extract(full, 0)
    assert torch.equal(shard, (full.double() / divisor).to(dtype))
    assert torch.equal(layout.rebuild({0: shard, 1: shard}), (shard.double() * divisor).to(dtype))


@pytest.mark.parametrize("power", [5000, -5000])
def test_a_power_beyond_a_double_is_refused(power: int) -> None:
    with pytest.raises(UnsupportedLayoutError, match=r"beyond|rounds to zero"):
        extract(replicated_map((4,), 2, scale=0.5), torch.ones(4), 0, power, scaled_states="power")


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
def test_a_packed_float_cannot_be_scaled() -> None:
    full = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(UnsupportedLayoutError, match="cannot carry"):
        replicated_map((4,), 2, scale=0.5).extract(full, 0)
