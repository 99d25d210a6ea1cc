"""A command whose work several processes share: started together, agreed on what to do, ended together."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed_affine.commands.guarded import guarded
from deepspeed_affine.commands.interrupts import interruptible
from deepspeed_affine.errors import PolicyError
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.execute.launched import open_group
from deepspeed_affine.execute.link import BEAT_SECONDS
from deepspeed_affine.plan.conversion import ConversionPlan
from deepspeed_affine.storage.anywhere import Output, join_output, open_output
from deepspeed_affine.storage.durable import is_no_space
from deepspeed_affine.storage.manifest import identity_differences
from deepspeed_affine.storage.targets import UNIVERSAL, OutputKind, in_one_line

__all__ = ["RANK_TIMEOUT", "agree", "in_job", "job_of", "plan_digest", "seconds", "shared_output"]

RANK_TIMEOUT = "DEEPSPEED_AFFINE_RANK_TIMEOUT"
"""The environment variable with the default of ``--rank-timeout``."""

LEAST_SECONDS = 3 * BEAT_SECONDS

OWN_OPTIONS = frozenset(
    {
        "debug",
        "input_folder",
        "json",
        "num_extract_workers",
        "num_merge_workers",
        "output_folder",
        "rank_timeout",
        "workers",
    }
)
"""The options that every process may have its own way. Folders may be mounted elsewhere; what is in them may not
differ."""


def in_job(program: str, args: argparse.Namespace, run: Callable[[argparse.Namespace, Group], int]) -> int:
    """What ``run`` returns, in every process of the job this one was started in, or in this one alone.

    In a job errors are printed here, before the others are told that this process is done: a launcher ends all as soon
    as one has ended.
    """
    with interruptible(), open_group(args.rank_timeout) as group:
        if group.size == 1:
            return run(args, group)
        if group.rank:
            args = argparse.Namespace(**{**vars(args), "json": False})

        def work(args: argparse.Namespace) -> int:
            with group.failing():
                return run(args, group)

        return guarded(program, work, args)


def agree(group: Group, what: Mapping[str, Any]) -> None:
    """All processes of the job have the same ``what`` (plain data); else each raises PolicyError saying who differs."""
    if len(set(group.gather(hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()))) == 1:
        return
    expected = group.first(lambda: what)
    found = group.gather(identity_differences(expected, what))
    rank = next(rank for rank, lines in enumerate(found) if lines)
    raise PolicyError(
        f"{group.names[rank]}: would do another job than {group.names[0]}. Compared with that, "
        f"{in_one_line(found[rank])}. Start all processes with the same command, on the same files and software.",
        rank=rank,
    )


def job_of(args: argparse.Namespace, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What all processes must have been started to do."""
    options = {name: value for name, value in vars(args).items() if name not in OWN_OPTIONS}
    return {**identity, "options": {**identity["options"], **options}}


def plan_digest(plan: ConversionPlan) -> str:
    """The same for plans that read and write the same, wherever the source is mounted."""
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(repr(values).encode("utf-8", "surrogatepass"))

    for storage in (*plan.storages, *plan.checked_storages):
        add(os.path.basename(storage.file), storage.key, storage.dtype, storage.byte_offset, storage.nbytes)
    for task in plan.gathered:
        add(task.path, task.dtype, task.shape, task.map_shape, task.fill, task.pieces)
        for replica in task.replicas:
            add(replica.primary, replica.pieces)
    for file in plan.objects:
        add(file.path, file.nbytes)
    for copied in plan.copies:
        add(copied.path, os.path.basename(copied.source), copied.nbytes)
    return digest.hexdigest()


@contextmanager
def shared_output(
    args: argparse.Namespace,
    source: str,
    target: str,
    identity: Mapping[str, Any],
    group: Group,
    kind: OutputKind = UNIVERSAL,
) -> Iterator[Output]:
    """The output, opened by the first process and joined by the others. What an unsuccessful run keeps is said."""
    output: Output | None = None
    try:
        if group.rank:
            job = group.first(str)
            output = join_output(target, group.rank, identity, job=job, patience=args.rank_timeout)
        else:
            output = open_output(
                target,
                identity,
                overwrite=args.overwrite,
                resume=not args.no_resume,
                keep=args.keep_temp_folder,
                protect=(source,),
                kind=kind,
            )
        with output as opened, group.failing():
            if group.rank == 0:
                group.first(lambda: opened.job)
            yield opened
    except BaseException as error:
        if output is not None and output.kept is not None:
            print(output.kept, file=sys.stderr)
        elif output is not None and isinstance(error, OSError) and is_no_space(error):
            error.strerror = f"{error.strerror}; what was written is removed (--keep_temp_folder keeps it)"
        raise


def seconds(text: str) -> float:
    """A number of seconds in which a process can have given some signs of life, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not LEAST_SECONDS <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least {LEAST_SECONDS:g}")
    return number
