"""An output elsewhere from its first object to its manifest: resumable, and complete only when all of it is there.

It has the surface of ``output.OutputFolder``, for URLs. There are no locks among object stores: two runs of one job at
once write the same objects twice, and only the one that began last may publish.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from deepspeed_affine.errors import AffineError, PolicyError
from deepspeed_affine.storage.durable import is_no_space
from deepspeed_affine.storage.journal import Finished
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, identity_differences
from deepspeed_affine.storage.output import Kept
from deepspeed_affine.storage.remote import Place, place_of
from deepspeed_affine.storage.remote_journal import Header, Journalled, RemoteJournal, Vouched, read_journals
from deepspeed_affine.storage.remote_publication import (
    FILES,
    UPLOADS,
    clear_private,
    publish_direct,
    publish_staged,
    recover,
    require_ours,
)
from deepspeed_affine.storage.remote_sink import RemoteSink
from deepspeed_affine.storage.remote_target import delete_all, private_place, require_name, require_replaceable
from deepspeed_affine.storage.targets import in_one_line

__all__ = ["RemoteOutput"]

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0


class RemoteOutput:
    """An output that is being made at a URL; see ``output.OutputFolder``, which this stands in for.

    ``files_path`` is where its files go: the target itself or, where an output is replaced, a place aside. Of
    ``finished``, ``vouched`` are those whose objects have the tag they had when they were uploaded and checked, so that
    nobody has written them since; the others have to be read again. ``sink`` writes further ones.
    """

    def __init__(self, target: str, header: Header, index: int, entries: Mapping[str, Vouched]) -> None:
        self.target = target
        self.job = header.jobs[-1]
        self.remarks: list[str] = []
        self.kept: Kept | None = None
        self._place = place_of(target)
        self._private = private_place(target)
        self._header = header
        self._index = index
        self._keep = False
        self._publishing = False
        self._open = True
        self._files = self._place if header.way == "direct" else self._private.below(FILES)
        self.files_path = self._files.url
        self.sink = RemoteSink(
            self._files, self._private.below(UPLOADS), begin=lambda path: self.journal.expect((path,))
        )
        self.journal = RemoteJournal(self._private, self.job, index, self.sink.uploaded)
        present = self._files.walk() if entries else {}
        self.finished: dict[str, Finished] = {}
        self.vouched: set[str] = set()
        for path, item in entries.items():
            found = present.get(path)
            if found is None or found.size != item.entry.nbytes or (item.tag and found.tag != item.tag):
                continue
            self.finished[path] = item.entry
            if item.tag:
                self.vouched.add(path)

    @classmethod
    def open(
        cls,
        target: str,
        identity: Mapping[str, Any],
        *,
        overwrite: bool = False,
        resume: bool = True,
        keep: bool = False,
        protect: Iterable[str] = (),
    ) -> RemoteOutput:
        """The output of the job ``identity`` at ``target``, begun anew or where an interrupted run has stopped.

        Raises PolicyError as ``OutputFolder.open`` does, and for a place that holds anything but an output.
        """
        url = require_name(target)
        said = recover(url)
        private, place = private_place(url), place_of(url)
        require_ours(private)
        found = place.walk()
        header = Header.read(private)
        journalled = Journalled() if header is None else read_journals(private, header.jobs)
        unfinished = header is not None and header.way == "direct"
        if unfinished:
            _require_only_ours(place, found, journalled.begun)
        elif found:
            if not overwrite:
                raise PolicyError(
                    f"{url}: exists already; expected a place without objects. Choose another output folder, move or "
                    "remove this one, or replace it with --overwrite.",
                    file=url,
                )
            require_replaceable(place, found, protect)
        entries = _resumable(private, header, journalled.finished, identity, url) if header and resume else {}
        if header is None or not entries:
            # A run that has finished nothing has left nothing to go on with.
            if unfinished:
                delete_all(place.below(path) for path in found)
            clear_private(private)
            header = Header(identity, (), "staged" if found and not unfinished else "direct")
        header = replace(header, jobs=(*header.jobs, secrets.token_hex(8)))
        header.write(private)
        output = cls(url, header, 0, entries)
        output.remarks = [said] if said else []
        if journalled.damaged:
            output.remarks.append(
                f"{private.url}: {journalled.damaged} objects of its journal are damaged; their files are written anew"
            )
        output._keep = keep
        return output

    @classmethod
    def join(
        cls, target: str, index: int, identity: Mapping[str, Any], *, job: str, patience: float = 60.0
    ) -> RemoteOutput:
        """The output that another process of the same job has opened, for writer ``index`` (1 or more).

        ``job`` is the other's ``job``. Raises PolicyError where that job is not found, or this process would do
        another one.
        """
        if index < 1:
            raise ValueError(f"writer {index} of an output; the first, 0, opens it")
        url = require_name(target)
        header = _await_job(url, job, patience)
        differences = identity_differences(header.identity, identity)
        if differences:
            raise PolicyError(
                f"{url}: writer {index} would do another job than the first: {in_one_line(differences)}. Start all of "
                "them with the same command, source and software."
            )
        return cls(url, header, index, read_journals(private_place(url), header.jobs).finished)

    def __enter__(self) -> RemoteOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def path_of(self, path: str) -> str:
        """Where the output's file ``path`` is while it is not published."""
        return self._files.below(path).url

    def forget(self, path: str) -> None:
        """After this ``path`` does not count as finished, and no object is there: it can be written again."""
        self.finished.pop(path, None)
        self.vouched.discard(path)
        self._files.below(path).delete()

    def collect(self, writers: int | None = None) -> dict[str, Finished]:
        """Every finished file, of all writers and of interrupted runs, as the journals have it now.

        With ``writers`` each of that many, but for the first, must have closed its journal; without, what is seen
        counts.
        """
        self.journal.flush()
        return {path: item.entry for path, item in self._journalled(writers).finished.items()}

    def publish(self, manifest: Manifest, *, durable: bool = True) -> tuple[str, ...]:
        """After this the output is complete, with ``manifest`` in it, and ``latest_universal`` names it.

        Every file was compared with what was sent when it was uploaded; here all are seen to be there still before
        anything old is touched. ``durable`` is accepted for the sake of the other kind: a store keeps what it has
        taken. Raises IntegrityError where objects and manifest disagree, PolicyError where another run has begun since,
        and then publishes nothing.
        """
        if not self._open or self._index:
            raise PolicyError(f"{self.target}: is published once, by the first process of its job.")
        self._publishing = True
        self.journal.flush()
        now = Header.read(self._private)
        if now is None or now.jobs != self._header.jobs:
            raise PolicyError(
                f"{self.target}: another conversion to it has begun since this one has; expected one at a time. "
                "Nothing was published: let the other finish, or run this one again."
            )
        tags = {path: item.tag for path, item in self._journalled().finished.items()}
        if self._header.way == "direct":
            publish_direct(self._place, self._private, manifest, tags)
        else:
            publish_staged(self._place, self._private, self._header, manifest, tags)
        self._open = False
        return ()

    def close(self, error: BaseException | None = None) -> None:
        """Ends an output that was not published, as leaving the ``with`` block with ``error`` does."""
        if not self._open:
            return
        self._open = False
        if self._index:
            self.journal.close()
            return
        try:
            self._end(error)
        except (AffineError, OSError) as problem:
            # What has failed already is what the user has to know first.
            self.remarks.append(f"{self._private.url}: could not be brought in order ({problem})")

    def _end(self, error: BaseException | None) -> None:
        self.journal.flush()
        header = Header.read(self._private)
        if header is None or header.jobs != self._header.jobs or header.phase == "publishing":
            # Somebody else's by now, or for the next run to finish.
            return
        journalled = self._journalled()
        done = journalled.finished
        if self._keep or (done and self._may_go_on(error)):
            nbytes = sum(item.entry.nbytes for item in done.values())
            self.kept = Kept(self.files_path, len(done), nbytes)
            return
        if self._header.way == "direct" and MANIFEST_NAME not in (found := self._place.walk()):
            delete_all(self._place.below(path) for path in found if path in journalled.begun)
            self._place.remove_empty_folders()
        clear_private(self._private)

    def _may_go_on(self, error: BaseException | None) -> bool:
        """Whether a run that ended so may succeed the next time with what it has finished."""
        if error is None or is_no_space(error):
            return False
        return self._publishing or not isinstance(error, AffineError) or isinstance(error, PolicyError)

    def _journalled(self, writers: int | None = None) -> Journalled:
        return read_journals(self._private, self._header.jobs, writers)


def _require_only_ours(place: Place, found: Iterable[str], begun: frozenset[str]) -> None:
    strange = sorted(set(found) - begun)
    if strange:
        url = place.below(strange[0]).url
        raise PolicyError(
            f"{url}: is in an unfinished output and not of it; expected only what it was to have. Move it away, then "
            "run again.",
            file=url,
        )


def _resumable(
    private: Place, header: Header, found: Mapping[str, Vouched], identity: Mapping[str, Any], target: str
) -> Mapping[str, Vouched]:
    """What interrupted runs of this job have finished; PolicyError if it was another job."""
    differences = identity_differences(header.identity, identity)
    if found and differences:
        raise PolicyError(
            f"{private.url}: tells of {len(found)} finished files of another conversion to {target}: "
            f"{in_one_line(differences)}. Run that command again to finish it, or start over with --no-resume.",
            file=private.url,
        )
    return {} if differences else found


def _await_job(target: str, job: str, patience: float) -> Header:
    end, wait = time.monotonic() + patience, _FIRST_WAIT
    while True:
        header = Header.read(private_place(target))
        if header is not None and header.jobs[-1:] == (job,):
            return header
        if time.monotonic() >= end:
            raise PolicyError(
                f"{target}: the first process of this job has opened it, and that is not seen from here. Give every "
                "process the same URL and the same credentials.",
                file=target,
            )
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
