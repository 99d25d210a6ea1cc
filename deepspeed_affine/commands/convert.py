"""``ds_to_universal --affine``: metadata, a plan, proof, one pass over the bytes, and one rename to publish."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deepspeed_affine.commands.conversion import ConversionOptions, Suspect, build_plan
from deepspeed_affine.errors import Faults, IntegrityError, PolicyError
from deepspeed_affine.execute.bounds import memory_bound
from deepspeed_affine.execute.checkpoint import Checkpoint, read_checkpoint
from deepspeed_affine.execute.claims import SourceSums, check_storages
from deepspeed_affine.execute.convert import ExecutionOptions, Written, close_gaps, write_files
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.prove import Drift, drifted_storages, find_drift, shards_identical
from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift, ScaledStates
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.plan.conversion import ConversionPlan
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.output import StagedFolder, refuse_existing, replace_text
from deepspeed_affine.storage.sink import LocalSink

__all__ = ["add_arguments", "run"]

NEWEST_KNOWN = "0.19.8"
LATEST = "latest_universal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of DeepSpeed's command, and our own after them."""
    stock = parser.add_argument_group("options of DeepSpeed's command")
    stock.add_argument("--input_folder", required=True, help="DeepSpeed checkpoint folder, the one with the .pt files")
    stock.add_argument("--output_folder", required=True, help="universal checkpoint folder to make")
    stock.add_argument("--num_extract_workers", type=_positive, default=4, help="parallel workers (default: 4)")
    stock.add_argument("--num_merge_workers", type=_positive, default=2, help="parallel workers (default: 2)")
    stock.add_argument(
        "--keep_temp_folder",
        action="store_true",
        help="keep the private folder of an unsuccessful conversion (there are no slice files to keep)",
    )
    stock.add_argument(
        "--no_strict",
        dest="strict",
        action="store_false",
        help="report patterns that match no parameter, do not refuse",
    )
    stock.add_argument(
        "--inject_missing_state",
        action="store_true",
        help="convert a checkpoint without universal_checkpoint_info as one without tensor parallelism",
    )
    ours = parser.add_argument_group("options of the affine converter")
    ours.add_argument("--affine", action="store_true", help="convert with deepspeed_affine")
    ours.add_argument("--workers", type=_positive, default=None, help="threads; default: the larger of the two above")
    ours.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    ours.add_argument(
        "--on-drift",
        choices=[choice.value for choice in OnDrift],
        default=OnDrift.ERROR.value,
        help="what to do where ranks that must agree do not: refuse, take their average, take the first "
        "rank's (default: %(default)s)",
    )
    ours.add_argument(
        "--scaled-states",
        choices=[choice.value for choice in ScaledStates],
        default=ScaledStates.REFUSE.value,
        help="what to do with optimizer states of parameters that ranks hold scaled (default: %(default)s)",
    )
    ours.add_argument(
        "--identical-shards",
        choices=[choice.value for choice in IdenticalShards],
        default=IdenticalShards.REFUSE.value,
        help="what to do with a parameter said to be split whose shards are byte-identical on all ranks "
        "(default: %(default)s)",
    )
    ours.add_argument("--no-source-crc", action="store_true", help="do not check source storages against their CRC")
    ours.add_argument("--no-fsync", action="store_true", help="do not wait until the output is on the disk")
    ours.add_argument("--json", action="store_true", help="print the plan or the result as JSON")
    ours.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(args: argparse.Namespace) -> int:
    """Convert, or with ``--dry-run`` print the plan; returns the exit code."""
    for option, given in (("--input_folder", args.input_folder), ("--output_folder", args.output_folder)):
        if not given:
            raise PolicyError(f"{option}: is empty; expected a path. Is a shell variable not set?")
    source, target = os.path.abspath(args.input_folder), os.path.abspath(args.output_folder)
    if source == target:
        raise PolicyError(f"{target}: is both input and output folder; give the output a folder of its own.")
    refuse_existing(target)
    options = ConversionOptions(
        rules=StockRules.for_version(_deepspeed_version()),
        strict=args.strict,
        inject_missing_state=args.inject_missing_state,
        on_drift=OnDrift(args.on_drift),
        scaled_states=ScaledStates(args.scaled_states),
    )
    execution = ExecutionOptions(
        workers=args.workers or max(args.num_extract_workers, args.num_merge_workers),
        source_crc=not args.no_source_crc,
        fsync=not args.no_fsync,
        progress=sys.stderr.isatty() and not args.json,
    )
    checkpoint = read_checkpoint(source)
    plan, suspects = build_plan(checkpoint, options)
    with ByteReader() as reader:
        identical = _identical(plan, suspects, reader)
        if identical:
            plan = _resolve_identical(checkpoint, options, plan, identical, IdenticalShards(args.identical_shards))
        summary = _summary(checkpoint, plan, execution, target)
        if args.dry_run:
            _print(summary, args.json)
            return 0
        if not args.json:
            _say(_headline(summary))
        with StagedFolder(target) as staged:
            try:
                drifts = find_drift(plan, PieceReader(plan.storages, reader), execution.workers)
                if drifts and execution.source_crc:
                    # Damage on the disk looks like drift; it must not be averaged away.
                    check_storages(drifted_storages(plan, drifts), reader)
                _judge_drift(drifts, options.on_drift)
                summary["drift"] = [drift.describe() for drift in drifts]
                if options.on_drift is OnDrift.AVERAGE:
                    plan = _averaging(plan, drifts)
                    summary["averaged"] = _averaged(plan)
                written = write_files(plan, reader, LocalSink(staged.path, durable=execution.fsync), execution)
                if execution.source_crc:
                    _check_sources(plan, written, reader, execution)
                summary["bytes_written"] = written.bytes_written
                staged.publish(durable=execution.fsync, files_synced=True)
            except BaseException:
                if args.keep_temp_folder:
                    staged.keep()
                    print(f"unfinished output kept: {staged.path}", file=sys.stderr)
                raise
    _point_at(target)
    _print(summary, args.json)
    return 0


def _check_sources(plan: ConversionPlan, written: Written, reader: ByteReader, execution: ExecutionOptions) -> None:
    sums = SourceSums(plan.checked_storages)
    for entry in written.files.values():
        sums.add(entry.reads)
    sums.add(close_gaps(sums.gaps(), reader, execution))
    sums.check()


def _point_at(target: str) -> None:
    """``latest_universal`` beside the output names it, which is where DeepSpeed's loader looks."""
    pointer = os.path.join(os.path.dirname(target), LATEST)
    try:
        replace_text(pointer, os.path.basename(target))
    except OSError as error:
        raise PolicyError(
            f"{pointer}: could not be written ({error.strerror}), while {target} was converted and is complete. Write "
            f"{os.path.basename(target)!r} into that file, or load with an explicit tag.",
            file=pointer,
        ) from error


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return number


def _deepspeed_version() -> str:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return NEWEST_KNOWN


def _identical(plan: ConversionPlan, suspects: tuple[Suspect, ...], reader: ByteReader) -> list[str]:
    pieces = PieceReader(plan.storages, reader)
    return [suspect.param for suspect in suspects if all(shards_identical(shards, pieces) for shards in suspect.states)]


def _resolve_identical(
    checkpoint: Checkpoint,
    options: ConversionOptions,
    plan: ConversionPlan,
    names: list[str],
    policy: IdenticalShards,
) -> ConversionPlan:
    if policy is IdenticalShards.SPLIT:
        return plan
    if policy is IdenticalShards.REPLICATED:
        return build_plan(checkpoint, replace(options, replicated=frozenset(names)))[0]
    faults = Faults()
    for name in names:
        faults.add(
            IntegrityError(
                f"parameter {name!r}: its shards are byte-identical on all {checkpoint.tp_degree} tensor-parallel "
                "ranks, in every state, while its metadata says they are parts; DeepSpeed would write it "
                f"{checkpoint.tp_degree} times over. Choose --identical-shards replicated (one copy; right for norms "
                "and biases that DeepSpeed 0.18.9 forgot to list) or split (concatenate).",
                param=name,
            )
        )
    faults.raise_if_any()
    return plan


def _judge_drift(drifts: list[Drift], policy: OnDrift) -> None:
    if policy is not OnDrift.ERROR:
        return
    faults = Faults()
    for drift in drifts:
        faults.add(
            IntegrityError(
                f"{drift.describe()}. Copies of one value must agree; choose --on-drift average or first to convert "
                "knowingly.",
                param=drift.param,
            )
        )
    faults.raise_if_any()


def _averaging(plan: ConversionPlan, drifts: list[Drift]) -> ConversionPlan:
    """``plan`` with the drifted tensors averaged; where replicas agree the value itself is kept."""
    drifted = {(drift.param, drift.state) for drift in drifts}
    tensors = tuple(
        replace(task, fill="average") if (task.param, task.state) in drifted else task for task in plan.tensors
    )
    return replace(plan, tensors=tensors)


def _averaged(plan: ConversionPlan) -> list[str]:
    return sorted({task.param for task in plan.tensors if task.fill == "average"})


def _summary(checkpoint: Checkpoint, plan: ConversionPlan, execution: ExecutionOptions, target: str) -> dict[str, Any]:
    return {
        "input_folder": checkpoint.folder.path,
        "output_folder": target,
        "zero_stage": checkpoint.stage,
        "degrees": {"tp": checkpoint.tp_degree, "pp": checkpoint.pp_degree, "dp": checkpoint.dp_degree},
        "parameters": len(plan.params),
        "files": len(plan.tensors) + len(plan.objects) + len(plan.copies),
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "memory_bound_bytes": memory_bound(plan, execution),
        "workers": execution.workers,
        "states": sorted({task.state for task in plan.tensors}),
        "truncated": sorted({task.param for task in plan.tensors if task.shape != task.map_shape}),
        "averaged": _averaged(plan),
        "reset": sorted({f"{task.param}/{task.state}" for task in plan.tensors if task.fill == "zero"}),
        "storages_without_crc": sum(storage.crc32 is None for storage in plan.checked_storages),
        "notes": list(plan.notes),
        "drift": [],
    }


def _headline(summary: dict[str, Any]) -> str:
    degrees = ", ".join(f"{axis.upper()} {degree}" for axis, degree in summary["degrees"].items())
    return (
        f"{summary['input_folder']}: ZeRO-{summary['zero_stage']}, {degrees}; {summary['parameters']} parameters, "
        f"{summary['files']} files, {_size(summary['bytes_in'])} in, {_size(summary['bytes_out'])} out, "
        f"at most {_size(summary['memory_bound_bytes'])} of memory"
    )


def _print(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _say(json.dumps(summary, indent=2))
        return
    written = summary.get("bytes_written")
    lines = []
    if written is None:
        lines += [_headline(summary), f"states: {', '.join(summary['states']) or 'none'}"]
    for key, words in (
        ("truncated", "vocabulary padding cut off"),
        ("averaged", "replicas averaged"),
        ("reset", "reset to zeros"),
    ):
        if summary[key]:
            lines.append(f"{words}: {', '.join(summary[key])}")
    lines += [f"note: {line}" for line in [*summary["notes"], *summary["drift"]]]
    if summary["storages_without_crc"]:
        lines.append(
            f"note: {summary['storages_without_crc']} source storages carry no usable CRC and were not checked"
        )
    if written is not None:
        lines.append(f"{summary['output_folder']}: {_size(written)} written")
    _say("\n".join(lines))


def _say(text: str) -> None:
    """``text`` is printed; a reader that has gone away does not turn a good conversion into a failed one."""
    # Names may hold what the terminal's encoding, or any encoding, cannot.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
