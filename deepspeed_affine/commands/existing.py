"""An output that exists already: that of this very command, to be checked and pointed at, or somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_affine.errors import Faults, IntegrityError
from deepspeed_affine.execute.convert import ExecutionOptions
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.execute.shared import all_reusable
from deepspeed_affine.storage.anywhere import examine, point_at, recover
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.journal import Finished
from deepspeed_affine.storage.manifest import Manifest

__all__ = ["is_complete", "refuse_foreign"]


def refuse_foreign(target: str, *, overwrite: bool) -> None:
    """Nothing is at ``target`` that this package has not made, unless it may be replaced; else PolicyError.

    Asked before anything is read, so that a mistyped path costs nobody a minute.
    """
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
    ``latest_universal`` names it.

    Raises PolicyError where another job's output is there and may not be replaced, and IntegrityError naming the files
    that are not as they were written.
    """
    if not group.first(lambda: _is_there(target, identity, overwrite=overwrite)):
        return False
    recorded = {path: Finished(path, file.nbytes, file.crc32) for path, file in Manifest.read(target).files.items()}
    damaged = sorted(set(recorded) - set(all_reusable(recorded, target, reader, execution, group)))
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
    group.last(lambda: point_at(target))
    return True


def _is_there(target: str, identity: Mapping[str, Any], *, overwrite: bool) -> bool:
    recover(target)
    state = examine(target, identity)
    if state.kind == "foreign" and not overwrite:
        raise state.refusal()
    return state.kind == "complete" and state.manifest is not None and not overwrite
