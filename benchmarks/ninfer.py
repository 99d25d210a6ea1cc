"""How fast the container's formats are decoded and encoded, beside a plain copy and beside torch.

    python benchmarks/ninfer.py [--rows 4096] [--columns 4096] [--rounds 15]

One thread, by the time it has on a processor, so that a busy machine changes little. GB/s are of values, float32 or
int32, the best of the rounds, in which all take turns. "copy" is numpy's of the same values: beside decoding into
memory that was touched before, beside encoding into new memory, as either is. "torch" is the same arithmetic where
torch has it, also into touched memory and into new: bfloat16 and float8 widened, int8 codes times their scale, float32
rounded to bfloat16.

"share" is the time of the copy by the time taken. A copy reads and writes the values, a codec reads or writes fewer
bytes on one side; "moved" is the share of the copy's speed in bytes read and written. In the last rows the values are
bfloat16 already, as torch has them, and float32 that has to be rounded, which an encoder leaves to ``round_to_bf16``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deepspeed_affine import ninfer
from deepspeed_affine.ninfer.decode import decode_range
from deepspeed_affine.ninfer.pack import pack_grouped

FORMATS = (
    "fp32",
    "int32",
    "bf16",
    "q2_g64_fp16",
    "t2_g128_fp16",
    "q4_g64_fp16",
    "q5_g64_fp16",
    "q6_g64_fp16",
    "q8_g32_fp16",
    "fp8_e4m3fn_row_bf16",
    "nvfp4",
)


def best(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The shortest time of each; they take turns, so that a busy memory is unfair to none."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            times[name].append(time.thread_time() - start)
    return {name: min(found) for name, found in times.items()}


def source(name: str, values: np.ndarray) -> np.ndarray:
    """Values the format can take: exact ones where it rounds nothing."""
    if name == "int32":
        return (values * 1000).astype(np.int32)
    if name == "bf16":
        return ninfer.bf16_to_float32(ninfer.round_to_bf16(values))
    if name == "t2_g128_fp16":
        return np.sign(values)
    return values


def torch_encode(name: str, values: np.ndarray) -> Callable[[], Any] | None:
    given = torch.from_numpy(values)
    if name in ("fp32", "int32"):
        return given.clone
    return (lambda: given.to(torch.bfloat16)) if name == "bf16" else None


def encoded_object(name: str, values: np.ndarray) -> np.ndarray:
    if name != "q2_g64_fp16":
        return ninfer.encode(name, source(name, values))
    rng = np.random.default_rng(1)
    scales = np.full((values.shape[0], -(-values.shape[1] // 64)), 0x3C00, np.uint16)
    return pack_grouped(name, rng.integers(-1, 3, values.shape), scales)


def torch_decode(name: str, encoded: np.ndarray, shape: tuple[int, int], out: torch.Tensor) -> Callable[[], Any] | None:
    rows, columns = shape
    data = torch.from_numpy(encoded)
    if name in ("fp32", "int32"):
        words = data.view(torch.int32)
        return lambda: out.view(torch.int32).view(-1).copy_(words)
    if name == "bf16":
        words = data.view(torch.bfloat16)
        return lambda: out.view(-1).copy_(words)
    if name == "fp8_e4m3fn_row_bf16":
        codes = data[: rows * columns].view(torch.float8_e4m3fn).view(rows, columns)
        scales = data[rows * columns :].clone().view(torch.bfloat16).view(rows, 1)
        return lambda: out.copy_(codes).mul_(scales)
    if name == "q8_g32_fp16":
        codes = data[: rows * columns].view(torch.int8).view(-1, 32)
        scales = data[rows * columns :].clone().view(torch.float16).view(-1, 1)
        return lambda: out.view(-1, 32).copy_(codes).mul_(scales)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = (args.rows, args.columns)
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    out = np.zeros(shape, np.float32)
    print(f"{args.rows} x {args.columns}, {values.nbytes / 1e6:.0f} MB of values, one thread")
    side = ("copy", "{}", "share", "moved", "torch")
    heads = [head.format(action) for action in ("decode", "encode") for head in side]
    print(f"{'GB/s':<24}" + "".join(f"{head:>8}" for head in heads))
    for name in FORMATS:
        given = source(name, values)
        encoded = encoded_object(name, values)
        geometry = ninfer.plan_geometry(name, None, shape)
        flat = (out.view(np.int32) if name == "int32" else out).reshape(-1)

        def fetch(offset: int, count: int, encoded: np.ndarray = encoded) -> np.ndarray:
            return encoded[offset : offset + count]

        calls: dict[str, Callable[[], Any] | None] = {
            "copy": lambda given=given: np.copyto(out.view(given.dtype), given),
            "decode": lambda g=geometry, f=flat, get=fetch: decode_range(g, get, 0, g.elements, f),
            "torch": torch_decode(name, encoded, shape, torch.from_numpy(out)),
        }
        if name != "q2_g64_fp16":
            calls["new copy"] = given.copy
            calls["encode"] = lambda n=name, v=given: ninfer.encode(n, v)
            calls["new torch"] = torch_encode(name, given)
        times = best({each: call for each, call in calls.items() if call}, args.rounds)
        cells = row(times, ("copy", "decode", "torch"), given.nbytes, encoded.nbytes)
        print(
            line(name, cells + row(times, ("new copy", "encode", "new torch"), given.nbytes, encoded.nbytes)),
            flush=True,
        )
    words = torch.from_numpy(values).to(torch.bfloat16)
    for name, given, encode, theirs in (
        ("bf16 of bfloat16", words.view(torch.int16).numpy(), lambda: ninfer.encode("bf16", words), words.clone),
        (
            "bf16 of float32 rounded",
            values,
            lambda: ninfer.round_to_bf16(values),
            torch_encode("bf16", values),
        ),
    ):
        times = best({"copy": given.copy, "encode": encode, "torch": theirs}, args.rounds)
        cells = row(times, ("copy", "encode", "torch"), given.nbytes, words.nbytes)
        print(line(name, [None] * len(side) + cells), flush=True)


def row(times: dict[str, float], names: tuple[str, str, str], given: int, encoded: int) -> list[float | None]:
    """GB/s of the copy and of ours, our share of the copy by time and by bytes moved, and GB/s of torch."""
    copy, ours, theirs = (times.get(name) for name in names)
    if not copy or not ours:
        return [None] * 5
    share = copy / ours
    return [
        given / 1e9 / copy,
        given / 1e9 / ours,
        share,
        share * (given + encoded) / (2 * given),
        given / 1e9 / theirs if theirs else None,
    ]


def line(name: str, cells: list[float | None]) -> str:
    return f"{name:<24}" + "".join(f"{cell:>8.2f}" if cell else f"{'-':>8}" for cell in cells)


if __name__ == "__main__":
    main()
