"""An output that exists already: that of this very command, to be checked and pointed at, or somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_affine.errors import Faults, IntegrityError
from deepspeed_affine.execute.convert import ExecutionOptions
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.execute.shared import all_reusable
from deepspeed_affine.storage.anywhere import examine, point_at, recover
from deepspeed_affine.storage.files import ByteReader, is_folder, join, parent_of, read_small
from deepspeed_affine.storage.journal import Finished
from deepspeed_affine.storage.manifest import Manifest
from deepspeed_affine.storage.publication import LATEST

__all__ = ["is_complete", "settle_target"]


def settle_target(target: str, *, overwrite: bool, dry_run: bool) -> None:
    """What a killed run left half-way is finished, and nothing is at ``target`` that this package has not made, unless
    it may be replaced; else PolicyError.

    Asked before anything is read, so that a mistyped path costs nobody a minute, and a lost source no old output. A dry
    run changes nothing.
    """
    if not dry_run:
        recover(target)
    state = examine(target, {})
    if state.kind == "foreign" and state.manifest is None and not overwrite:
        raise state.refusal()


def is_complete(
    target: str,
    identity: Mapping[str, Any],
    reader: ByteReader,
    execution: ExecutionOptions,
    group: Group,
    *,
    overwrite: bool,
) -> bool:
    """Whether the output of this very job is at ``target`` already: then every byte of it was checked just now, and
    there is a ``latest_universal``, naming this output or a later one.

    Raises PolicyError where another job's output is there and may not be replaced, and IntegrityError naming the files
    that are not as they were written; with ``overwrite`` neither, and the output is to be made again.
    """
    if not group.first(lambda: _is_there(target, identity, overwrite=overwrite)):
        return False
    recorded = {path: Finished(path, file.nbytes, file.crc32) for path, file in Manifest.read(target).files.items()}
    damaged = sorted(set(recorded) - set(all_reusable(recorded, target, reader, execution, group)))
    if damaged and overwrite:
        return False
    faults = Faults()
    if damaged:
        more = f" and {len(damaged) - 1} more files" if len(damaged) > 1 else ""
        faults.add(
            IntegrityError(
                f"{target}: is the output of this command, but {damaged[0]}{more} are not as they were written. "
                "Convert again with --overwrite.",
                file=target,
            )
        )
    group.raise_together(faults)
    group.last(lambda: None if _points_somewhere(target) else point_at(target))
    return True


def _is_there(target: str, identity: Mapping[str, Any], *, overwrite: bool) -> bool:
    state = examine(target, identity)
    if state.kind == "foreign" and not overwrite:
        raise state.refusal()
    return state.kind == "complete" and state.manifest is not None


def _points_somewhere(target: str) -> bool:
    """Whether ``latest_universal`` beside the output names a folder there: it may be a later output's."""
    folder = parent_of(target)
    try:
        name = read_small(join(folder, LATEST), 4096).decode("utf-8").strip()
    except (OSError, ValueError):
        return False
    return bool(name) and is_folder(join(folder, name))
