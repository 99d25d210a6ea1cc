"""How fast the container's formats are decoded and encoded, beside a plain copy and beside torch.

    python benchmarks/ninfer.py [--rows 4096] [--columns 4096] [--rounds 15]

One thread. GB/s are of float32 values (int32 for int32), the best of the rounds, in which all take turns. "copy" is of
as many bytes to memory that was touched before, as decoding is; "fresh" to new memory, as encoding is. "torch" is the
same arithmetic where torch has it: bfloat16 and float8 widened, int8 codes times their scale. Shares of the copy are
beside decode and encode.
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
    """The shortest time of each; they take turns, so that a busy machine is unfair to none."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
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
    size = values.nbytes / 1e9
    print(f"{args.rows} x {args.columns}, {size * 1e3:.0f} MB of values, one thread")
    heads = ("copy", "decode", "share", "torch", "fresh", "encode", "share")
    print(f"{'GB/s':<22}" + "".join(f"{head:>9}" for head in heads))
    for name in FORMATS:
        encoded = encoded_object(name, values)
        geometry = ninfer.plan_geometry(name, None, shape)
        flat = (out.view(np.int32) if name == "int32" else out).reshape(-1)

        def fetch(offset: int, count: int, encoded: np.ndarray = encoded) -> np.ndarray:
            return encoded[offset : offset + count]

        calls: dict[str, Callable[[], Any]] = {
            "copy": lambda: np.copyto(out, values),
            "decode": lambda g=geometry, f=flat, get=fetch: decode_range(g, get, 0, g.elements, f),
        }
        theirs = torch_decode(name, encoded, shape, torch.from_numpy(out))
        if theirs:
            calls["torch"] = theirs
        if name != "q2_g64_fp16":
            given = source(name, values)
            calls["fresh"] = values.copy
            calls["encode"] = lambda n=name, v=given: ninfer.encode(n, v)
        found = {each: size / seconds for each, seconds in best(calls, args.rounds).items()}
        shares = [found["decode"] / found["copy"], found.get("encode", 0) / found.get("fresh", 1)]
        row = [found["copy"], found["decode"], shares[0], found.get("torch"), found.get("fresh"), found.get("encode")]
        cells = [*row, shares[1] if "encode" in found else None]
        print(f"{name:<22}" + "".join(f"{cell:>9.2f}" if cell else f"{'-':>9}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
