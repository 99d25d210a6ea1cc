"""Running the converter in a test, and comparing what it wrote with the truth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from synthetic import FP32, Made

from deepspeed_affine.cli import ds_to_universal
from deepspeed_affine.execute.checkpoint import read_checkpoint
from deepspeed_affine.execute.conversion import ConversionOptions, build_plan
from deepspeed_affine.execute.convert import ExecutionOptions, write_files
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.prove import find_drift
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.plan.conversion import ConversionPlan
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.sink import LocalSink


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str], *options: str) -> int:
    arguments = ["--affine", "--no-fsync", "--input_folder", os.fspath(source), "--output_folder", os.fspath(target)]
    return ds_to_universal([*arguments, *options])


def execute_plan(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, chunk_bytes: int, workers: int = 2
) -> ConversionPlan:
    """Convert without the command around it, in chunks of any size; returns the plan."""
    checkpoint = read_checkpoint(os.fspath(source))
    plan, _ = build_plan(checkpoint, ConversionOptions(StockRules.for_version("0.19.8")))
    options = ExecutionOptions(workers=workers, fsync=False, chunk_bytes=chunk_bytes)
    with ByteReader() as reader:
        assert find_drift(plan, PieceReader(plan.storages, reader), workers) == []
        write_files(plan, reader, LocalSink(os.fspath(target), durable=False), options)
    return plan


def listing(folder: str | os.PathLike[str]) -> set[str]:
    """Every file and folder below ``folder``, relative."""
    found = set()
    for root, folders, names in os.walk(folder):
        found.update(os.path.relpath(os.path.join(root, name), folder) for name in [*folders, *names])
    return found


def leftovers(target: str | os.PathLike[str]) -> list[str]:
    """What a refused conversion to ``target`` left: the target itself, or the private folder beside it."""
    parent, name = os.path.split(os.path.abspath(target))
    private = (f".{name}.", f"{name}.")
    found = os.listdir(parent) if os.path.isdir(parent) else []
    return sorted(
        entry for entry in found if entry == name or (entry.startswith(private) and entry.endswith(".partial"))
    )


def stored(folder: str | os.PathLike[str], param: str, state: str) -> torch.Tensor:
    value = torch.load(os.path.join(folder, "zero", param, f"{state}.pt"), weights_only=False)
    return value["param"] if isinstance(value, dict) else value


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def wrong(made: Made, folder: str | os.PathLike[str], *, flat: bool = False, skip: Sequence[str] = ()) -> list[str]:
    """The parameters and states whose file is missing or differs from the full tensor it was cut from."""
    faults = []
    for (param, state), full in made.truth.items():
        if param in skip:
            continue
        try:
            found = stored(folder, param, state)
        except FileNotFoundError:
            faults.append(f"{param}/{state} is missing")
            continue
        if not same(found, full.reshape(-1) if flat else full):
            faults.append(f"{param}/{state} differs")
    return faults


def scalar(folder: str | os.PathLike[str], param: str, state: str) -> Any:
    return torch.load(os.path.join(folder, "zero", param, f"{state}.pt"), weights_only=False)


def is_flat(made: Made) -> bool:
    return made.world.stage == 3 and made.world.tp == 1


def assert_converts(made: Made, base: Path, *options: str) -> Path:
    """``made`` is saved, converted and compared with the truth; returns the output folder."""
    source = made.save(base / "ckpt")
    target = base / "out"
    assert convert(source, target, *options) == 0
    assert wrong(made, target, flat=is_flat(made)) == []
    assert (base / "latest_universal").read_text() == "out"
    return target


def assert_refuses(source: str | os.PathLike[str], base: Path, capsys: Any, *options: str) -> str:
    """Converting ends with exit code 2, one line per fault and no trace on the disk; returns what was said."""
    before = listing(base)
    capsys.readouterr()
    assert convert(source, base / "out", *options) == 2
    said = capsys.readouterr().err
    assert listing(base) == before
    assert "Traceback" not in said
    assert "internal error" not in said
    assert said.strip()
    assert all(line.startswith("ds_to_universal: error: ") for line in said.strip().splitlines())
    return said


__all__ = [
    "FP32",
    "assert_converts",
    "assert_refuses",
    "bits",
    "convert",
    "execute_plan",
    "is_flat",
    "leftovers",
    "listing",
    "same",
    "scalar",
    "stored",
    "wrong",
]
