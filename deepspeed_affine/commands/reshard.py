"""``ds_affine reshard``: an ordinary DeepSpeed checkpoint of another topology, written from one that exists."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deepspeed_affine.commands.arguments import partitioning_stage, positive
from deepspeed_affine.commands.existing import complete_output, preview, settle_target
from deepspeed_affine.commands.identity import conversion_identity
from deepspeed_affine.commands.job import agree, in_job, plan_digest, shared_output
from deepspeed_affine.commands.layout_file import read_layout
from deepspeed_affine.commands.layout_of import layout_of
from deepspeed_affine.commands.policies import settle_drift, settle_identical
from deepspeed_affine.commands.reshard_plan import (
    TargetOptions,
    is_same_cut,
    require_same_model,
    reshard_plan,
    target_of,
)
from deepspeed_affine.commands.reshard_source import ReshardSource
from deepspeed_affine.commands.summary import print_complete
from deepspeed_affine.commands.text import complain, counted, say, size
from deepspeed_affine.commands.writing import space_needed, write_output
from deepspeed_affine.commands.writing_options import add_choices, add_safety
from deepspeed_affine.errors import PolicyError, UnsupportedLayoutError
from deepspeed_affine.execute.bounds import memory_bound
from deepspeed_affine.execute.checkpoint import Checkpoint, read_checkpoint
from deepspeed_affine.execute.conversion import ConversionOptions, build_plan
from deepspeed_affine.execute.convert import ExecutionOptions
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.execute.shared import CheckedReader, all_drift
from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift, ScaledStates
from deepspeed_affine.lowering.stock_rules import NEWEST_KNOWN, StockRules
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout
from deepspeed_affine.plan.conversion import ConversionPlan
from deepspeed_affine.plan.layout_document import layout_digest
from deepspeed_affine.storage.anywhere import memory_elsewhere
from deepspeed_affine.storage.checkpoint_file import load_checkpoint_file
from deepspeed_affine.storage.files import ByteReader, absolute, is_url, join, name_of, parent_of, read_small
from deepspeed_affine.storage.journal import Finished
from deepspeed_affine.storage.manifest import Manifest, ManifestFile, ManifestParameter
from deepspeed_affine.storage.pt_reader import Loaded
from deepspeed_affine.storage.targets import ORDINARY

__all__ = ["add_arguments", "run", "source_options"]

FORMAT = 1
"""Of the JSON document; a key keeps its name and meaning as long as this is the same."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input_folder", required=True, help="DeepSpeed checkpoint folder, the one with the .pt files")
    parser.add_argument("--output_folder", required=True, help="checkpoint folder to make; its name is the tag")
    wanted = parser.add_argument_group("what to make")
    wanted.add_argument("--dp", type=positive, default=None, help="data-parallel degree of the new checkpoint")
    wanted.add_argument(
        "--zero-stage",
        type=partitioning_stage,
        default=None,
        metavar="{1,2,3}",
        help="ZeRO stage of the new checkpoint",
    )
    wanted.add_argument(
        "--sub-group-size",
        type=positive,
        default=None,
        metavar="N",
        help="sub_group_size of the run that will load a ZeRO-3 checkpoint (default: as configured, else DeepSpeed's)",
    )
    layout = wanted.add_mutually_exclusive_group()
    layout.add_argument(
        "--like", metavar="CHECKPOINT", help="checkpoint of the same model whose topology and order to take"
    )
    layout.add_argument("--layout", metavar="FILE", help="the same from a file that ds_affine layout or describe wrote")
    policy = parser.add_argument_group("where the checkpoint leaves a choice")
    policy.add_argument(
        "--on-drift",
        choices=[OnDrift.ERROR.value, OnDrift.FIRST.value],
        default=OnDrift.ERROR.value,
        help="what to do where ranks that must agree do not: refuse, or take the first rank's (default: %(default)s)",
    )
    add_choices(policy)
    how = parser.add_argument_group("how")
    how.add_argument("--workers", type=positive, default=4, help="threads (default: %(default)s)")
    how.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    how.add_argument(
        "--overwrite", action="store_true", help="replace a checkpoint that this command has made, at the very end"
    )
    how.add_argument(
        "--no-resume", action="store_true", help="start over, do not reuse what an interrupted run has finished"
    )
    how.add_argument(
        "--keep_temp_folder", action="store_true", help="keep the private folder of an unsuccessful run in any case"
    )
    how.add_argument("--all", action="store_true", help="show all that is wrong, not the first 10")
    add_safety(how)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, or with ``--dry-run`` print the plan; returns the exit code."""
    args.published = False
    return in_job("ds_affine", args, _run)


def source_options(**changes: Any) -> ConversionOptions:
    """How a checkpoint is understood that is to be written anew: nothing of it depends on the installed DeepSpeed."""
    options = ConversionOptions(StockRules.for_version(NEWEST_KNOWN), strict=False, inject_missing_state=True)
    return replace(options, **changes)


def _run(args: argparse.Namespace, group: Group) -> int:
    source, target = _folders(args)
    speaks = group.rank == 0
    execution = ExecutionOptions(
        workers=args.workers,
        source_crc=not args.no_source_crc,
        fsync=not args.no_fsync,
        progress=speaks and sys.stderr.isatty() and not args.json,
        what="resharding",
    )
    group.first(lambda: settle_target(target, overwrite=args.overwrite, dry_run=args.dry_run, kind=ORDINARY))

    def load(path: str) -> Loaded:
        group.check()
        return load_checkpoint_file(path)

    given = _given(args, load)
    checkpoint = read_checkpoint(source, load)
    identity = conversion_identity(checkpoint.folder, _changing_options(args, given), deepspeed=NEWEST_KNOWN)
    agree(group, {**identity, "dry_run": args.dry_run, "overwrite": args.overwrite, "no_resume": args.no_resume})
    with CheckedReader(group.check) as reader:
        if not args.dry_run and not (args.overwrite and args.no_resume):
            found = complete_output(target, identity, reader, execution, group, overwrite=args.overwrite, kind=ORDINARY)
            if found is not None:
                if speaks:
                    print_complete(target, found, as_json=args.json)
                return 0
        settled, plan = _planned(args, checkpoint, given, execution, reader, group)
        agree(group, {"plan": plan_digest(plan) if group.size > 1 else ""})
        summary = _summary(checkpoint, settled, plan, execution, target, group)
        if args.dry_run:
            remarks = group.first(
                lambda: preview(
                    target, identity, space_needed(plan), len(plan.paths), overwrite=args.overwrite, kind=ORDINARY
                )
            )
            if speaks:
                _print(summary, as_json=args.json, remarks=remarks)
            return 0
        if speaks and not args.json:
            say(_headline(summary))

        def manifest(files: Mapping[str, Finished]) -> Manifest:
            return _manifest(settled, files, identity, execution.source_crc)

        before = group.first(lambda: _latest(target))
        with shared_output(args, source, target, identity, group, kind=ORDINARY) as output:
            remarks = write_output(args, plan, execution, reader, output, summary, group, manifest)
        if before not in (None, name_of(target)):
            remarks.append(f"{join(parent_of(target), ORDINARY.latest)} named {before} and names {name_of(target)} now")
    if speaks:
        try:
            _print(summary, as_json=args.json, remarks=remarks)
        except OSError as error:
            complain(f"{target}: is complete; the summary could not be printed ({error.strerror})")
    return 0


def _folders(args: argparse.Namespace) -> tuple[str, str]:
    for option, given in (("--input_folder", args.input_folder), ("--output_folder", args.output_folder)):
        if not given:
            raise PolicyError(f"{option}: is empty; expected a path. Is a shell variable not set?")
    source, target = absolute(args.input_folder), absolute(args.output_folder)
    if source == target:
        raise PolicyError(f"{target}: is both input and output folder; give the output a folder of its own.")
    if f"{target}/".startswith(f"{source.rstrip('/')}/"):
        raise PolicyError(
            f"{target}: lies in the input folder, where 'latest' would be written among its files; give the output a "
            "folder apart from it."
        )
    if is_url(target):
        raise UnsupportedLayoutError(
            f"{target}: is a URL; DeepSpeed loads an ordinary checkpoint from a local folder. Give a local path."
        )
    if args.layout is None and args.like is None and args.dp is None and args.zero_stage is None:
        # Asked again of the layouts; said here, before a large checkpoint is read for nothing.
        raise PolicyError(
            "nothing says what to make of the checkpoint: give --dp, --zero-stage or both, or a layout with --like or "
            "--layout."
        )
    return source, target


def _latest(target: str) -> str | None:
    """What ``latest`` beside the output names: in the folder of a run, a checkpoint of its own."""
    try:
        return read_small(join(parent_of(target), ORDINARY.latest), 4096).decode("utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _given(args: argparse.Namespace, load: Any) -> CheckpointLayout | None:
    """The layout of ``--like`` or ``--layout``."""
    if args.layout is not None:
        return read_layout(args.layout)
    if args.like is None:
        return None
    like = read_checkpoint(absolute(args.like), load)
    return layout_of(like, build_plan(like, source_options())[0])


def _changing_options(args: argparse.Namespace, given: CheckpointLayout | None) -> dict[str, str | int | None]:
    """The options that change what is written, and no others."""
    return {
        "command": "reshard",
        "dp": args.dp,
        "zero_stage": args.zero_stage,
        "sub_group_size": args.sub_group_size,
        "layout": None if given is None else layout_digest(given),
        "on_drift": args.on_drift,
        "scaled_states": args.scaled_states,
        "identical_shards": args.identical_shards,
    }


def _planned(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    given: CheckpointLayout | None,
    execution: ExecutionOptions,
    reader: ByteReader,
    group: Group,
) -> tuple[CheckpointLayout, ConversionPlan]:
    """The layout that is written, and the plan of its files; the source's copies have been compared."""
    wanted = TargetOptions(args.dp, args.zero_stage, args.sub_group_size)
    drift = OnDrift(args.on_drift)
    # Cut the same way, what is held scaled stays so: the powers cancel.
    options = source_options(on_drift=drift, scaled_states=ScaledStates.POWER)
    plan, suspects = build_plan(checkpoint, options)
    layout = layout_of(checkpoint, plan)
    target = target_of(layout, given, wanted)
    same_cut = is_same_cut(layout, target)
    if not same_cut:
        options = replace(options, scaled_states=ScaledStates(args.scaled_states))
        plan, suspects = build_plan(checkpoint, options)
        policy = IdenticalShards(args.identical_shards)
        plan = settle_identical(checkpoint, options, plan, suspects, policy, reader, group)
        layout = layout_of(checkpoint, plan)
    drifts = all_drift(plan, reader, execution.workers, group)
    plan = settle_drift(plan, drifts, drift, reader, group, check=execution.source_crc)
    source = ReshardSource(checkpoint, plan, layout, options, padded=same_cut)
    if given is not None:
        require_same_model(source, target, args.like or args.layout)
    made = reshard_plan(source, target, ScaledStates(args.scaled_states), same_cut=same_cut)
    notes = [*source.notes, *(drifted.describe() for drifted in drifts)]
    return target, replace(made, notes=(*made.notes, *notes))


def _manifest(
    target: CheckpointLayout, written: Mapping[str, Finished], identity: dict[str, Any], source_checked: bool
) -> Manifest:
    ids: dict[ParamAffineMap, str] = {}
    parameters = {}
    for name, param in target.params.items():
        if param.layout not in ids:
            ids[param.layout] = param.layout.layout_id()
        parameters[name] = ManifestParameter(ids[param.layout], param.layout.logical_shape)
    files = {path: ManifestFile(entry.nbytes, entry.crc32, None, None) for path, entry in written.items()}
    return Manifest(identity, files, parameters, source_checked)


def _summary(
    checkpoint: Checkpoint,
    target: CheckpointLayout,
    plan: ConversionPlan,
    execution: ExecutionOptions,
    folder: str,
    group: Group,
) -> dict[str, Any]:
    memory = memory_bound(plan, execution) + memory_elsewhere(checkpoint.folder.path, folder, execution.workers, 0)
    return {
        "format": FORMAT,
        "complete": False,
        "input_folder": checkpoint.folder.path,
        "output_folder": folder,
        "from": {
            "zero_stage": checkpoint.stage,
            **{"tp": checkpoint.tp_degree, "pp": checkpoint.pp_degree, "dp": checkpoint.dp_degree},
        },
        "to": {"zero_stage": target.stage, "tp": target.tp, "pp": target.pp, "dp": target.dp},
        "bf16_optimizer": target.bf16_optimizer,
        "parameters": sum(param.kind == "optimized" for param in target.params.values()),
        "files": len(plan.paths),
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "memory_bound_bytes": memory,
        "processes": group.size,
        "workers": execution.workers,
        "states": sorted({task.state for task in plan.gathered}),
        "source_checked": execution.source_crc,
        "skipped": list(checkpoint.folder.other_names),
        "storages_without_crc": sum(storage.crc32 is None for storage in plan.checked_storages),
        "notes": list(plan.notes),
    }


def _topology(degrees: Mapping[str, int]) -> str:
    axes = ", ".join(f"{axis.upper()} {degrees[axis]}" for axis in ("tp", "pp", "dp"))
    return f"ZeRO-{degrees['zero_stage']}, {axes}"


def _headline(summary: Mapping[str, Any]) -> str:
    processes = summary["processes"]
    each = f" in each of {processes} processes" if processes > 1 else ""
    return (
        f"{summary['input_folder']}: {_topology(summary['from'])} to {_topology(summary['to'])}; "
        f"{counted(summary['parameters'], 'parameter')}, {counted(summary['files'], 'file')}, "
        f"{size(summary['bytes_in'])} in, {size(summary['bytes_out'])} out, "
        f"at most {size(summary['memory_bound_bytes'])} of memory{each}"
    )


def _print(summary: Mapping[str, Any], *, as_json: bool, remarks: list[str]) -> None:
    if as_json:
        say(json.dumps({**summary, "remarks": list(remarks)}, indent=2))
        return
    written = summary.get("bytes_written")
    lines = []
    if written is None:
        lines += [_headline(summary), f"states: {', '.join(summary['states']) or 'none'}"]
    lines += [*summary["notes"], *remarks]
    if summary["source_checked"] and summary["storages_without_crc"]:
        lines.append(f"{summary['storages_without_crc']} source storages carry no usable CRC and were not checked")
    if written is not None:
        reused = summary["reused_files"]
        kept = f", {counted(reused, 'file')} ({size(summary['reused_bytes'])}) reused" if reused else ""
        lines.append(f"{summary['output_folder']}: {size(written)} written{kept}")
    say("\n".join(lines))
