"""``ds_affine export``: the weights of a checkpoint as an NInfer artifact or as safetensors, streamed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from deepspeed_affine.commands.arguments import positive
from deepspeed_affine.commands.text import counted, say, size
from deepspeed_affine.errors import PolicyError
from deepspeed_affine.storage.urls import is_url

__all__ = ["add_arguments", "run"]

DTYPES = ("float32", "float16", "bfloat16")
FIVE_GIGABYTES = 5 * 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ds_affine export``."""
    parser.add_argument("--to", required=True, choices=["ninfer", "safetensors"], help="what to write")
    parser.add_argument("--input_folder", required=True, help="DeepSpeed checkpoint folder, or universal folder")
    parser.add_argument(
        "--output", required=True, help="the artifact's entry, or the folder of safetensors files, to make"
    )
    parser.add_argument(
        "--format",
        help="ninfer: the format of weights that have a place in it, for example bf16 or q4_g64_fp16; safetensors: "
        f"{', '.join(DTYPES)} (default: as stored; float32)",
    )
    parser.add_argument("--recipe", metavar="FILE", help="ninfer: components, bindings, uses and resources, as JSON")
    parser.add_argument(
        "--objects",
        choices=["full", "shards"],
        default="full",
        help="ninfer: one object a parameter, or one a tensor-parallel shard with the parameter bound to their parts "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-file-bytes",
        type=positive,
        default=None,
        metavar="N",
        help="largest size of a file (default: one file; safetensors: 5 GB of tensors)",
    )
    parser.add_argument(
        "--on-drift",
        choices=["error", "average", "first"],
        default="error",
        help="what to do where ranks that must agree do not (default: %(default)s)",
    )
    parser.add_argument(
        "--identical-shards",
        choices=["refuse", "replicated", "split"],
        default="refuse",
        help="what to do with a parameter said to be split whose shards are byte-identical (default: %(default)s)",
    )
    parser.add_argument("--no-source-crc", action="store_true", help="do not check source storages against their CRC")
    parser.add_argument("--no-fsync", action="store_true", help="do not wait until the output is on the disk")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Export; returns 0."""
    for option, given in (("--input_folder", args.input_folder), ("--output", args.output)):
        if not given:
            raise PolicyError(f"{option}: is empty; expected a path. Is a shell variable not set?")
    if is_url(args.output):
        raise PolicyError(
            f"{args.output}: is a URL; exported files are written here. Give a local path, then copy them."
        )
    # numpy is imported with these, and neither --help nor another verb waits for it.
    from deepspeed_affine.commands.export_weights import open_weights
    from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift
    from deepspeed_affine.storage.files import ByteReader

    with ByteReader() as reader:
        weights = open_weights(
            args.input_folder,
            reader,
            on_drift=OnDrift(args.on_drift),
            identical=IdenticalShards(args.identical_shards),
            source_crc=not args.no_source_crc,
            workers=min(4, os.cpu_count() or 1),
        )
        found = _ninfer(args, weights) if args.to == "ninfer" else _safetensors(args, weights)
    if args.json:
        say(json.dumps(found, indent=1))
        return 0
    say(
        f"{args.output}: {counted(found['parameters'], 'parameter')}, {size(found['bytes'])} in "
        f"{counted(len(found['files']), 'file')}"
    )
    for note in found["notes"]:
        say(f"  {note}")
    return 0


def _ninfer(args: argparse.Namespace, weights: Any) -> dict[str, Any]:
    from deepspeed_affine.commands.export_ninfer import export_ninfer
    from deepspeed_affine.commands.export_recipe import Recipe, plan_export, read_recipe

    recipe = Recipe() if args.recipe is None else read_recipe(args.recipe)
    plan = plan_export(weights, recipe, format_name=args.format, shards=args.objects == "shards")
    total = sum(weight.numel for entry in plan.objects for weight in entry.weights)
    with _bar(args, total) as advance:
        directory = export_ninfer(
            weights,
            plan,
            args.output,
            max_file_bytes=args.max_file_bytes,
            durable=not args.no_fsync,
            progress=advance,
        )
    entry = os.path.basename(os.path.abspath(args.output))
    return {
        "output": args.output,
        "parameters": len(directory.bindings),
        "objects": len(directory.objects),
        "bytes": directory.payload_bytes,
        "files": [record.path or entry for record in directory.files],
        "notes": list(plan.notes),
    }


def _safetensors(args: argparse.Namespace, weights: Any) -> dict[str, Any]:
    from deepspeed_affine.commands.export_safetensors import export_safetensors

    dtype = args.format or "float32"
    if dtype not in DTYPES:
        raise PolicyError(f"--format {dtype}: is none for safetensors; expected one of {', '.join(DTYPES)}.")
    for option, given in (("--recipe", args.recipe), ("--objects shards", args.objects == "shards")):
        if given:
            raise PolicyError(f"{option}: has no meaning for safetensors; leave it off, or export --to ninfer.")
    with _bar(args, sum(weight.numel for weight in weights.weights.values())) as advance:
        names = export_safetensors(
            weights,
            args.output,
            dtype=dtype,
            max_file_bytes=args.max_file_bytes or FIVE_GIGABYTES,
            durable=not args.no_fsync,
            progress=advance,
        )
    written = sum(os.path.getsize(os.path.join(args.output, name)) for name in names)
    notes = [*weights.notes, *(f"{alias}: tied to {name}, written once" for alias, name in weights.aliases.items())]
    return {
        "output": args.output,
        "parameters": len(weights.weights),
        "bytes": written,
        "files": names,
        "notes": notes,
    }


class _bar:  # noqa: N801 (a context manager, used as a function)
    """A progress bar on a terminal, and nothing elsewhere."""

    def __init__(self, args: argparse.Namespace, total: int) -> None:
        self._shown = sys.stderr.isatty() and not args.json
        self._total = total
        self._bar: Any = None

    def __enter__(self) -> Any:
        if not self._shown:
            return lambda elements: None
        from tqdm import tqdm

        self._bar = tqdm(total=self._total, unit="el", unit_scale=True, desc="exporting")
        return self._bar.update

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
