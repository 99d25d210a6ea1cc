"""What other runs and other processes of a job have written down, for one that goes on with it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.storage.journal import Finished, JournalContent, read_journal
from deepspeed_affine.storage.manifest import identity_differences
from deepspeed_affine.storage.private import PrivateFolder
from deepspeed_affine.storage.targets import counted, in_one_line
from deepspeed_affine.storage.trees import is_present

__all__ = ["await_job", "resumable"]

_FIRST_WAIT, _LONGEST_WAIT = 0.01, 1.0


def resumable(private: PrivateFolder, identity: Mapping[str, Any]) -> tuple[dict[str, Finished], list[str]]:
    """The files that interrupted runs of this job have finished and that are there, and remarks on them.

    Raises PolicyError if it was another job.
    """
    found: dict[str, Finished] = {}
    remarks = []
    recorded: Mapping[str, Any] | None = None
    for path in private.journals():
        content = read_journal(path)
        if content.damaged:
            remarks.append(f"{path}: is damaged, so files it names after that are written again")
        if content.identity is not None:
            recorded = content.identity
            found.update(content.finished)
    present = {path: entry for path, entry in found.items() if is_present(private.files, entry)}
    differences = identity_differences(recorded, identity) if recorded is not None else []
    if present and differences:
        raise PolicyError(
            f"{private.path}: holds {counted(len(present), 'finished file')} of another conversion to "
            f"{private.target}: {in_one_line(differences)}. Run that command again to finish it, or start over with "
            "--no-resume.",
            file=private.path,
        )
    return ({} if differences else present), remarks


def await_job(journal: str, target: str, job: str, patience: float) -> JournalContent:
    """The journal of the run ``job``, as soon as it is seen; PolicyError after ``patience`` seconds."""
    end, wait = time.monotonic() + patience, _FIRST_WAIT
    while True:
        try:
            content = read_journal(journal)
            if content.job == job:
                return content
        except OSError:
            pass
        if time.monotonic() >= end:
            raise PolicyError(
                f"{target}: the first process of this job has opened it, and its journal {journal} is not seen from "
                "here. Put the output on a file system that all machines share.",
                file=target,
            )
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
