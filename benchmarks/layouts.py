"""Print, for every layout DeepSpeed's layers produce, the map found by running the partitioning code itself.

    python benchmarks/layouts.py

Each row is probed and proved on random data when it is printed. Rows marked "intended" describe what a layer's
code means to do where DeepSpeed 0.19.8 raises instead; the exceptions are listed below the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.module_inject import layers
from deepspeed.module_inject.fusedqkv_utils import prepare_tp_fused_qkvw, shard_value_with_share_qk
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.lowering import probe

Partition = Callable[[torch.Tensor, int], Any]


@dataclass(frozen=True)
class Layout:
    """One partition rule at one shape: what to run, and where it comes from."""

    name: str
    shape: tuple[int, ...]
    world: int
    partition: Partition
    intended: bool = False


def fused(block: str, world: int, **meta: int) -> Partition:
    """The real fused-QKV rule; DeepSpeed picks the layout by finding the block's name in ``str(module)``."""
    return lambda full, rank: prepare_tp_fused_qkvw(f"{block}()", full, world, rank, AutoTPMeta(**meta))


def yuan(world: int, heads: int, *, value: bool) -> Partition:
    return lambda full, rank: shard_value_with_share_qk(full, None, rank, world, value, AutoTPMeta(num_kv_heads=heads))


def layer(kind: type, full: torch.Tensor, rank: int, world: int, *, bias: bool = False, **attributes: Any) -> Any:
    """What ``kind``'s own ``_tp_partition`` leaves of ``full``, run on an instance that was told its rank."""
    instance = kind.__new__(kind)
    torch.nn.Module.__init__(instance)
    for key, value in {
        "tp_world_size": world,
        "tp_index": rank,
        "tp_meta": AutoTPMeta(),
        "name": None,
        **attributes,
    }.items():
        setattr(instance, key, value)
    if hasattr(instance, "_subparam_layout_spec"):
        instance._freeze_partition_sizes(full.shape[0])
    parameters = [torch.nn.Parameter(full.clone())]
    if bias:
        parameters.append(torch.nn.Parameter(torch.arange(float(full.shape[0]))))
    instance._tp_partition(parameters)
    return tuple(parameter.data for parameter in parameters)


def gate_up(world: int) -> Partition:
    def partition(full: torch.Tensor, rank: int) -> Any:
        half = full.shape[0] // 2
        spec = ((half, half), "mlp")
        return layer(layers.GateUpPack_LinearLayer, full, rank, world, _subparam_layout_spec=spec)

    return partition


def conv2d(world: int, *, output_channels: bool, bias: bool) -> Partition:
    """The convolution wrapper of the inference path; with ``bias`` the parameter under examination is the bias."""

    def partition(full: torch.Tensor, rank: int) -> torch.Tensor:
        weight = torch.zeros(len(full), 4, 1, 1) if bias else full
        conv = torch.nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2], bias=bias)
        conv.weight = torch.nn.Parameter(weight)
        if bias:
            conv.bias = torch.nn.Parameter(full)
        sharded = layers.TensorParallelConv2d(conv, rank, world, output_channels).conv
        return sharded.bias if bias else sharded.weight

    return partition


def widths(size: int, world: int) -> list[int]:
    return list(get_shard_size_list(size, world, AutoTPMeta()))


def intended_conv_column(world: int) -> Partition:
    """``conv_LinearLayer`` means to cut a Conv1D weight (in, out) along its outputs."""
    return lambda full, rank: full.split(widths(full.shape[1], world), dim=1)[rank]


def intended_conv_row(world: int) -> Partition:
    """``Conv_LinearALlreduce`` means to transpose (in, out) and to cut the inputs, then axis 1."""
    return lambda full, rank: full.t().contiguous().split(widths(full.shape[0], world), dim=1)[rank]


def predivided(world: int) -> Partition:
    """A bias added before a sum over the ranks: every rank holds it whole, divided by their number."""
    return lambda full, rank: full / float(world)


def codegen(hidden: int, world: int = 2) -> Layout:
    return Layout(
        f"codegen (hidden {hidden})", (3 * hidden, hidden), world, fused("CodeGenBlock", world, num_kv_heads=8)
    )


def bigcode(world: int) -> Layout:
    return Layout("bigcode", (48, 8), world, fused("GPTBigCodeBlock", world, n_embd=32))


def all_layouts() -> list[Layout]:
    square = {
        "conv_LinearLayer, square": layers.conv_LinearLayer,
        "Conv_LinearALlreduce, square": layers.Conv_LinearALlreduce,
    }
    return [
        bigcode(4),
        *(codegen(hidden) for hidden in (8, 16, 32, 64, 128, 256)),
        Layout("Yuan value", (32, 8), 2, yuan(2, 8, value=True)),
        Layout("Yuan o_proj", (8, 32), 2, yuan(2, 8, value=False)),
        Layout("Yuan o_proj bias", (8,), 2, predivided(2), intended=True),
        Layout("bloom", (24, 8), 2, fused("BloomBlock", 2, num_kv_heads=4)),
        Layout("bloom, uneven heads", (24, 8), 2, fused("BloomBlock", 2, num_kv_heads=3)),
        Layout("GLM", (24, 8), 2, fused("GLMBlock", 2, num_kv_heads=4)),
        Layout("chatglm (2 kv heads)", (48, 8), 2, fused("GLMBlock", 2, num_kv_heads=2, n_embd=32)),
        Layout("QWen", (24, 8), 2, fused("QWenBlock", 2, num_kv_heads=4)),
        Layout("phi3", (32, 16), 2, fused("Phi3DecoderLayer", 2, num_kv_heads=4, num_attention_heads=8)),
        Layout("gate-up", (24, 8), 3, gate_up(3)),
        *(
            Layout(name, (6, 6), 2, lambda full, rank, kind=kind: layer(kind, full, rank, 2))
            for name, kind in square.items()
        ),
        Layout("conv_LinearLayer", (8, 12), 3, intended_conv_column(3), intended=True),
        Layout("Conv_LinearALlreduce", (12, 8), 3, intended_conv_row(3), intended=True),
        Layout("Conv2d, output channels", (6, 4, 3, 3), 3, conv2d(3, output_channels=True, bias=False)),
        Layout("Conv2d, output channels, bias", (6,), 3, conv2d(3, output_channels=True, bias=True)),
        Layout("Conv2d, input channels", (6, 4, 3, 3), 2, conv2d(2, output_channels=False, bias=False)),
        Layout("Conv2d, input channels, bias", (6,), 4, conv2d(4, output_channels=False, bias=True)),
    ]


def refusals() -> dict[str, Callable[[], Any]]:
    """Calls of DeepSpeed's own code that raise in 0.19.8; a test records them, so that a repair is noticed."""
    weight = torch.arange(96.0).reshape(8, 12)
    square = torch.arange(36.0).reshape(6, 6)
    meta = AutoTPMeta(num_kv_heads=4)
    return {
        "Yuan o_proj bias": lambda: shard_value_with_share_qk(weight, torch.zeros(8), 0, 2, False, meta),
        "conv_LinearLayer, not square": lambda: layer(layers.conv_LinearLayer, weight, 0, 2),
        "conv_LinearLayer, bias": lambda: layer(layers.conv_LinearLayer, square, 0, 2, bias=True),
        "Conv_LinearALlreduce, not square": lambda: layer(layers.Conv_LinearALlreduce, weight, 0, 2),
        "Conv_LinearALlreduce, bias": lambda: layer(layers.Conv_LinearALlreduce, square, 0, 2, bias=True),
    }


def run_counts(found: ParamAffineMap) -> list[int]:
    """The number of maximal one-dimensional runs of every rank, the measure of the specification's table."""
    return [len(found.maximal_runs(rank)) for rank in found.ranks]


def piece_counts(found: ParamAffineMap) -> list[int]:
    return [len(found.pieces_by_rank[rank]) for rank in found.ranks]


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as fault:
        return f"{type(fault).__name__}: {str(fault).splitlines()[0]}"
    return "no exception"


def main() -> None:
    print(f"{'layout':<32}{'F':<16}{'tp':>3}  {'1-D runs':<14}{'N-D pieces':<14}{'scale':<8}strides of rank 0's runs")
    for row in all_layouts():
        found = probe(row.partition, row.shape, row.world)
        scales = sorted({piece.scale for _, piece in found.pieces()})
        strides = sorted({run.source_strides for run in found.maximal_runs(0)})
        print(
            f"{row.name + (' (intended)' if row.intended else ''):<32}{'x'.join(map(str, row.shape)):<16}"
            f"{row.world:>3}  {_compact(run_counts(found)):<14}{_compact(piece_counts(found)):<14}"
            f"{'/'.join(f'{scale:.4g}' for scale in scales):<8}{' '.join(map(str, strides))}"
        )
    print("\nDeepSpeed's own code raises for:")
    for name, call in refusals().items():
        print(f"  {name:<36}{raised(call)}")


def _compact(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else ",".join(map(str, counts))


if __name__ == "__main__":
    main()
