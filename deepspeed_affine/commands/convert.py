"""``ds_to_universal --affine``: metadata, a plan, proof, one pass over the bytes, and one rename to publish."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deepspeed_affine.commands.arguments import positive
from deepspeed_affine.commands.existing import complete_output, preview, settle_target
from deepspeed_affine.commands.identity import conversion_identity
from deepspeed_affine.commands.job import agree, in_job, job_of, plan_digest, shared_output
from deepspeed_affine.commands.policies import averaged, settle_drift, settle_identical
from deepspeed_affine.commands.summary import Summary, headline, print_complete, print_summary, summarise
from deepspeed_affine.commands.text import complain, say
from deepspeed_affine.commands.writing import space_needed, write_output
from deepspeed_affine.commands.writing_options import add_choices, add_safety
from deepspeed_affine.errors import PolicyError
from deepspeed_affine.execute.checkpoint import read_checkpoint
from deepspeed_affine.execute.conversion import ConversionOptions, build_plan
from deepspeed_affine.execute.convert import ExecutionOptions
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.execute.shared import CheckedReader, all_drift
from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift, ScaledStates
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.plan.conversion import ConversionPlan
from deepspeed_affine.storage.anywhere import Output
from deepspeed_affine.storage.checkpoint_file import load_checkpoint_file
from deepspeed_affine.storage.files import ByteReader, absolute
from deepspeed_affine.storage.journal import Finished
from deepspeed_affine.storage.manifest import Manifest, ManifestFile, ManifestParameter
from deepspeed_affine.storage.pt_reader import Loaded

__all__ = ["add_arguments", "run"]

NEWEST_KNOWN = "0.19.8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of DeepSpeed's command, and our own after them."""
    stock = parser.add_argument_group("options of DeepSpeed's command")
    stock.add_argument("--input_folder", required=True, help="DeepSpeed checkpoint folder, the one with the .pt files")
    stock.add_argument("--output_folder", required=True, help="universal checkpoint folder to make")
    stock.add_argument("--num_extract_workers", type=positive, default=4, help="parallel workers (default: 4)")
    stock.add_argument("--num_merge_workers", type=positive, default=2, help="parallel workers (default: 2)")
    stock.add_argument(
        "--keep_temp_folder",
        action="store_true",
        help="keep the private folder of an unsuccessful conversion in any case (there are no slice files to keep)",
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
    ours.add_argument("--workers", type=positive, default=None, help="threads; default: the larger of the two above")
    ours.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    ours.add_argument(
        "--on-drift",
        choices=[choice.value for choice in OnDrift],
        default=OnDrift.ERROR.value,
        help="what to do where ranks that must agree do not: refuse, take their average, take the first "
        "rank's (default: %(default)s)",
    )
    add_choices(ours)
    ours.add_argument(
        "--overwrite", action="store_true", help="replace an existing universal checkpoint, at the very end"
    )
    ours.add_argument(
        "--no-resume", action="store_true", help="start over, do not reuse what an interrupted run has finished"
    )
    add_safety(ours)
    ours.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(args: argparse.Namespace) -> int:
    """Convert, or with ``--dry-run`` print the plan; returns the exit code.

    Started by ``torchrun`` or alike, the processes of the job share the work; each calls this.
    """
    return in_job("ds_to_universal", args, _run)


def _run(args: argparse.Namespace, group: Group) -> int:
    for option, given in (("--input_folder", args.input_folder), ("--output_folder", args.output_folder)):
        if not given:
            raise PolicyError(f"{option}: is empty; expected a path. Is a shell variable not set?")
    source, target = absolute(args.input_folder), absolute(args.output_folder)
    if source == target:
        raise PolicyError(f"{target}: is both input and output folder; give the output a folder of its own.")
    deepspeed = _deepspeed_version()
    options = ConversionOptions(
        rules=StockRules.for_version(deepspeed),
        strict=args.strict,
        inject_missing_state=args.inject_missing_state,
        on_drift=OnDrift(args.on_drift),
        scaled_states=ScaledStates(args.scaled_states),
    )
    speaks = group.rank == 0
    execution = ExecutionOptions(
        workers=args.workers or max(args.num_extract_workers, args.num_merge_workers),
        source_crc=not args.no_source_crc,
        fsync=not args.no_fsync,
        progress=speaks and sys.stderr.isatty() and not args.json,
    )
    group.first(lambda: settle_target(target, overwrite=args.overwrite, dry_run=args.dry_run))

    def load(path: str) -> Loaded:
        group.check()
        return load_checkpoint_file(path)

    checkpoint = read_checkpoint(source, load)
    identity = conversion_identity(checkpoint.folder, _changing_options(args), deepspeed=deepspeed)
    agree(group, job_of(args, identity))
    with CheckedReader(group.check) as reader:
        forced = args.overwrite and args.no_resume
        if not args.dry_run and not forced:
            manifest = complete_output(target, identity, reader, execution, group, overwrite=args.overwrite)
            if manifest is not None:
                if speaks:
                    print_complete(target, manifest, as_json=args.json)
                return 0
        plan, suspects = build_plan(checkpoint, options)
        agree(group, {"plan": plan_digest(plan) if group.size > 1 else ""})
        policy = IdenticalShards(args.identical_shards)
        plan = settle_identical(checkpoint, options, plan, suspects, policy, reader, group)
        may_average = options.on_drift is OnDrift.AVERAGE
        summary = summarise(checkpoint, plan, execution, target, group, may_average=may_average)
        if args.dry_run:
            needed = space_needed(plan)
            remarks = group.first(lambda: preview(target, identity, needed, len(plan.paths), overwrite=args.overwrite))
            if speaks:
                print_summary(summary, as_json=args.json, remarks=remarks)
            return 0
        if speaks and not args.json:
            say(headline(summary))
        with shared_output(args, source, target, identity, group) as output:
            remarks = _convert(args, plan, options, execution, reader, output, identity, summary, group)
    if speaks:
        try:
            print_summary(summary, as_json=args.json, remarks=remarks)
        except OSError as error:
            complain(f"{target}: is complete; the summary could not be printed ({error.strerror})")
    return 0


def _convert(
    args: argparse.Namespace,
    plan: ConversionPlan,
    options: ConversionOptions,
    execution: ExecutionOptions,
    reader: ByteReader,
    output: Output,
    identity: dict[str, Any],
    summary: Summary,
    group: Group,
) -> list[str]:
    """The output is published; ``summary`` says what was done. Returns remarks for the user."""
    drifts = all_drift(plan, reader, execution.workers, group)
    plan = settle_drift(plan, drifts, options.on_drift, reader, group, check=execution.source_crc)
    summary["drift"] = [drift.describe() for drift in drifts]
    summary["averaged"] = averaged(plan)

    def manifest(files: Mapping[str, Finished]) -> Manifest:
        return _manifest(plan, files, identity, execution.source_crc)

    return write_output(args, plan, execution, reader, output, summary, group, manifest)


def _manifest(
    plan: ConversionPlan, written: Mapping[str, Finished], identity: dict[str, Any], source_checked: bool
) -> Manifest:
    ids: dict[ParamAffineMap, str] = {}
    parameters: dict[str, ManifestParameter] = {}
    for task in plan.tensors:
        layout = plan.layouts[task.param]
        if layout not in ids:
            ids[layout] = layout.layout_id()
        parameters.setdefault(task.param, ManifestParameter(ids[layout], task.shape))
    holds: dict[str, tuple[str | None, str | None]] = {task.path: (task.param, task.state) for task in plan.tensors}
    holds.update((file.path, (file.param, file.state)) for file in plan.objects if file.param in parameters)
    files = {
        path: ManifestFile(entry.nbytes, entry.crc32, *holds.get(path, (None, None))) for path, entry in written.items()
    }
    return Manifest(identity, files, parameters, source_checked)


def _changing_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that change what is written, and no others."""
    return {
        "inject_missing_state": args.inject_missing_state,
        "on_drift": args.on_drift,
        "scaled_states": args.scaled_states,
        "identical_shards": args.identical_shards,
    }


def _deepspeed_version() -> str:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return NEWEST_KNOWN
