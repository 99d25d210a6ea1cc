"""An output that exists already: that of this very command, to be checked and pointed at, or somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_affine.errors import AffineError, Faults, IntegrityError, PolicyError
from deepspeed_affine.execute.convert import ExecutionOptions
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.execute.shared import all_reusable
from deepspeed_affine.storage.anywhere import examine, point_at, recover, require_space
from deepspeed_affine.storage.files import ByteReader, is_folder, join, parent_of, read_small
from deepspeed_affine.storage.journal import Finished
from deepspeed_affine.storage.manifest import Manifest
from deepspeed_affine.storage.private import private_path
from deepspeed_affine.storage.targets import UNIVERSAL, OutputKind
from deepspeed_affine.storage.urls import is_url

__all__ = ["complete_output", "is_published", "preview", "settle_target"]


def settle_target(target: str, *, overwrite: bool, dry_run: bool, kind: OutputKind = UNIVERSAL) -> None:
    """What a killed run left half-way is finished, and nothing is at ``target`` that this package has not made, unless
    it may be replaced; else PolicyError.

    Asked before anything is read, so that a mistyped path costs nobody a minute, and a lost source no old output. A dry
    run changes nothing.
    """
    if not dry_run:
        recover(target)
    state = examine(target, {})
    if state.kind == "foreign" and state.manifest is None and not overwrite:
        raise state.refusal(kind)


def preview(
    target: str,
    identity: Mapping[str, Any],
    needed: int,
    files: int,
    *,
    overwrite: bool,
    kind: OutputKind = UNIVERSAL,
) -> list[str]:
    """What the conversion will find at ``target``, for the user of a dry run; raises what it would be refused with."""
    state = examine(target, identity)
    if state.kind == "foreign" and not overwrite:
        raise state.refusal(kind)
    if state.kind == "complete":
        return [f"{target} is complete already; the command will check it and do nothing"]
    waiting = private_path(target)
    if not is_url(target) and is_folder(waiting):
        return [f"{waiting} holds what an interrupted run has finished; the same command resumes it"]
    require_space(parent_of(target), needed, files=files)
    return []


def complete_output(
    target: str,
    identity: Mapping[str, Any],
    reader: ByteReader,
    execution: ExecutionOptions,
    group: Group,
    *,
    overwrite: bool,
    kind: OutputKind = UNIVERSAL,
) -> Manifest | None:
    """The manifest of this very job's output where it is at ``target`` already: then every byte of it was checked just
    now, and there is a ``latest_universal``, naming this output or a later one. None where it is to be made.

    Raises PolicyError where another job's output is there and may not be replaced, or this job's was made without
    checking a source that is to be checked, and IntegrityError naming files that are not as they were written; with
    ``overwrite`` none of these, and the output is to be made again.
    """
    if not group.first(lambda: _is_there(target, identity, overwrite=overwrite, kind=kind)):
        return None
    manifest = Manifest.read(target)
    recorded = {path: Finished(path, file.nbytes, file.crc32) for path, file in manifest.files.items()}
    damaged = sorted(set(recorded) - set(all_reusable(recorded, target, reader, execution, group)))
    unchecked = execution.source_crc and not manifest.source_checked
    if overwrite and (damaged or unchecked):
        return None
    faults = Faults()
    if damaged:
        others = f" and {len(damaged) - 1} more files are" if len(damaged) > 1 else " is"
        faults.add(
            IntegrityError(
                f"{target}: is the output of this command, but {damaged[0]}{others} not as written. Convert again with "
                "--overwrite.",
                file=target,
            )
        )
    if unchecked:
        faults.add(
            PolicyError(
                f"{target}: is the output of this command with --no-source-crc, so damage of the source may be in it. "
                "Prove it with 'ds_affine verify --against', or convert again with --overwrite.",
                file=target,
            )
        )
    group.raise_together(faults)
    group.last(lambda: None if _points_somewhere(target, kind) else point_at(target, kind))
    return manifest


def _is_there(target: str, identity: Mapping[str, Any], *, overwrite: bool, kind: OutputKind) -> bool:
    state = examine(target, identity)
    if state.kind == "foreign" and not overwrite:
        raise state.refusal(kind)
    return state.kind == "complete" and state.manifest is not None


def is_published(target: str, manifest: Manifest) -> bool:
    """Whether the output with this manifest is at ``target``."""
    try:
        return Manifest.read(target).to_bytes() == manifest.to_bytes()
    except (AffineError, OSError):
        return False


def _points_somewhere(target: str, kind: OutputKind) -> bool:
    """Whether ``latest_universal``, or its kind's file, names a folder beside the output: it may be a later one."""
    folder = parent_of(target)
    try:
        name = read_small(join(folder, kind.latest), 4096).decode("utf-8").strip()
    except (OSError, ValueError):
        return False
    return bool(name) and is_folder(join(folder, name))
