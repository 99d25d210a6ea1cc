"""What a conversion will do, or has done, as data and as lines for a person."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deepspeed_affine.commands.policies import averaged
from deepspeed_affine.commands.text import counted, listed, say, size
from deepspeed_affine.execute.bounds import memory_bound
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.execute.convert import ExecutionOptions
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.plan.conversion import ConversionPlan
from deepspeed_affine.storage.anywhere import memory_elsewhere
from deepspeed_affine.storage.manifest import Manifest

__all__ = ["headline", "print_complete", "print_summary", "summarise"]

Summary = dict[str, Any]

FORMAT = 1
"""Of the JSON document; a key keeps its name and meaning as long as this is the same."""


def summarise(
    checkpoint: Checkpoint,
    plan: ConversionPlan,
    execution: ExecutionOptions,
    target: str,
    group: Group,
    *,
    may_average: bool = False,
) -> Summary:
    """What the plan does, as plain data; what is done is added to it by and by."""
    sizes = [task.nbytes for task in plan.tensors] + [file.nbytes for file in plan.objects]
    largest = max([*sizes, *(file.nbytes for file in plan.copies)], default=0)
    memory = memory_bound(plan, execution, may_average=may_average)
    memory += memory_elsewhere(checkpoint.folder.path, target, execution.workers, largest)
    states = {task.state for task in plan.tensors} | {file.state for file in plan.objects if file.state is not None}
    return {
        "format": FORMAT,
        "complete": False,
        "input_folder": checkpoint.folder.path,
        "output_folder": target,
        "zero_stage": checkpoint.stage,
        "degrees": {"tp": checkpoint.tp_degree, "pp": checkpoint.pp_degree, "dp": checkpoint.dp_degree},
        "parameters": len(plan.params),
        "files": len(plan.paths),
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "memory_bound_bytes": memory,
        "processes": group.size,
        "workers": execution.workers,
        "states": sorted(states),
        "source_checked": execution.source_crc,
        "injected": checkpoint.uc_info is None,
        "truncated": sorted({task.param for task in plan.tensors if task.shape != task.map_shape}),
        "averaged": averaged(plan),
        "reset": sorted({f"{task.param}/{task.state}" for task in plan.tensors if task.fill == "zero"}),
        "skipped": list(checkpoint.folder.other_names),
        "storages_without_crc": sum(storage.crc32 is None for storage in plan.checked_storages),
        "notes": list(plan.notes),
        "drift": [],
    }


def headline(summary: Summary) -> str:
    """One line: what is converted, how much of it, and the memory it takes."""
    degrees = ", ".join(f"{axis.upper()} {degree}" for axis, degree in summary["degrees"].items())
    processes = summary["processes"]
    each = f" in each of {processes} processes" if processes > 1 else ""
    return (
        f"{summary['input_folder']}: ZeRO-{summary['zero_stage']}, {degrees}; "
        f"{counted(summary['parameters'], 'parameter')}, {counted(summary['files'], 'file')}, "
        f"{size(summary['bytes_in'])} in, {size(summary['bytes_out'])} out, "
        f"at most {size(summary['memory_bound_bytes'])} of memory{each}"
    )


def print_summary(summary: Summary, *, as_json: bool, remarks: Sequence[str] = ()) -> None:
    """The plan, or with ``bytes_written`` in it the result, is on stdout."""
    if as_json:
        say(json.dumps({**summary, "remarks": list(remarks)}, indent=2))
        return
    written = summary.get("bytes_written")
    lines = []
    if written is None:
        lines += [headline(summary), f"states: {', '.join(summary['states']) or 'none'}"]
    if summary["injected"]:
        lines.append("no universal_checkpoint_info in the files: converted as a model without tensor parallelism")
    for key, words in (
        ("truncated", "vocabulary padding cut off"),
        ("averaged", "replicas averaged"),
        ("reset", "reset to zeros"),
        ("skipped", "not part of a checkpoint, left out"),
    ):
        if summary[key]:
            lines.append(f"{words}: {listed(summary[key], None if key == 'averaged' else 20)}")
    lines += [f"note: {line}" for line in [*summary["notes"], *summary["drift"], *remarks]]
    if not summary["source_checked"]:
        lines.append("note: the source was NOT compared with the checksums its files record (--no-source-crc)")
    elif summary["storages_without_crc"]:
        lines.append(
            f"note: {summary['storages_without_crc']} source storages carry no usable CRC and were not checked"
        )
    if written is not None:
        reused = summary["reused_files"]
        kept = f", {counted(reused, 'file')} ({size(summary['reused_bytes'])}) reused" if reused else ""
        lines.append(f"{summary['output_folder']}: {size(written)} written{kept}")
    say("\n".join(lines))


def print_complete(target: str, manifest: Manifest, *, as_json: bool) -> None:
    """That there was nothing to do is on stdout."""
    if not as_json:
        say(f"{target}: is complete already, every file is as it was written; nothing to do")
        return
    said = {
        "format": FORMAT,
        "complete": True,
        "output_folder": target,
        "parameters": len(manifest.parameters),
        "files": len(manifest.files),
        "bytes_written": 0,
        "reused_files": len(manifest.files),
        "reused_bytes": manifest.nbytes,
        "source_checked": manifest.source_checked,
    }
    say(json.dumps(said, indent=2))
