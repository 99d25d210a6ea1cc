"""From a plan that is settled to an output that has its name: what is reused, written, checked and published."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from deepspeed_affine.commands.existing import is_published
from deepspeed_affine.commands.summary import Summary
from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.execute.convert import ExecutionOptions, Written, write_files
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.execute.shared import all_reusable, check_all_sources
from deepspeed_affine.plan.conversion import ConversionPlan
from deepspeed_affine.plan.sharing import share_files
from deepspeed_affine.storage.anywhere import Output, require_space, sink_of, vouched
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.journal import Finished
from deepspeed_affine.storage.manifest import Manifest

__all__ = ["space_needed", "write_output"]

BYTES_PER_FILE = 4096
"""What a file takes on a disk beside its tensor: its own structure, and the rest of its last block."""


def space_needed(plan: ConversionPlan) -> int:
    """How many bytes of a disk the output takes."""
    return plan.bytes_out + BYTES_PER_FILE * len(plan.paths)


def write_output(
    args: argparse.Namespace,
    plan: ConversionPlan,
    execution: ExecutionOptions,
    reader: ByteReader,
    output: Output,
    summary: Summary,
    group: Group,
    manifest_of: Callable[[Mapping[str, Finished]], Manifest],
) -> list[str]:
    """The output is published with the manifest of its files; ``summary`` says what was done.

    Returns remarks for the user. ``args.published`` is set where the output has its name and something failed after.
    """
    reused = _reused(plan, output, reader, execution, group)
    mine = share_files(plan, group.size, reused)[group.rank]
    sink = sink_of(output, mine, durable=execution.fsync)
    written = write_files(plan, reader, sink, execution, reused=reused, record=output.journal.record, wanted=mine)
    files = _all_written(plan, written, output, group)
    if execution.source_crc:
        check_all_sources(plan, files, reader, execution, group)
    summary.update(
        bytes_written=sum(group.gather(written.bytes_written)),
        reused_files=len(reused),
        reused_bytes=sum(entry.nbytes for entry in reused.values()),
    )

    def publish() -> tuple[str, ...]:
        manifest = manifest_of(files)
        try:
            return tuple(output.publish(manifest, durable=execution.fsync))
        except BaseException:
            args.published = is_published(output.target, manifest)
            raise

    return [*output.remarks, *group.last(publish)]


def _reused(
    plan: ConversionPlan, output: Output, reader: ByteReader, execution: ExecutionOptions, group: Group
) -> dict[str, Finished]:
    """What an interrupted run has finished and is whole; there is nothing else in the output, and room for the rest."""
    trusted = {path: output.finished[path] for path in vouched(output)}
    unsure = {path: entry for path, entry in output.finished.items() if path not in trusted}
    reused = {**trusted, **all_reusable(unsure, output.files_path, reader, execution, group)}
    # A journal vouches for bytes, and not for their being asked for.
    planned = set(plan.paths)
    reused = {path: entry for path, entry in reused.items() if path in planned}

    def make_room() -> None:
        for path in set(output.finished) - set(reused):
            output.forget(path)
        held = sum(entry.nbytes for entry in reused.values())
        needed = space_needed(plan) - held
        require_space(output.files_path, needed, files=len(plan.paths))

    group.first(make_room)
    return reused


def _all_written(plan: ConversionPlan, written: Written, output: Output, group: Group) -> dict[str, Finished]:
    """Every file of the output, as its writer has recorded it; in the first process, the others get none."""
    if group.size == 1:
        return written.files
    if group.rank:
        # What it has recorded is seen on other machines when its journal is closed.
        output.close()
    group.gather(None)
    found = {} if group.rank else output.collect(group.size)
    absent = [path for path in plan.paths if path not in found]
    if absent and group.rank == 0:
        raise CheckpointFormatError(
            f"{output.path_of(absent[0])}: no journal of the job names it, nor {len(absent) - 1} others; expected all "
            "files of the plan. Check that all machines share this file system, then run the same command again.",
            file=output.files_path,
        )
    return {path: found[path] for path in plan.paths if path in found}
