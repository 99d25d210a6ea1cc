"""An output folder from its first file to its name: written privately, resumed, and published whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from deepspeed_affine.errors import AffineError, CheckpointFormatError, PolicyError
from deepspeed_affine.storage.durable import fsync_folders, is_no_space, replace_file, sync_file
from deepspeed_affine.storage.journal import Finished, Journal, read_journal
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, identity_differences
from deepspeed_affine.storage.private import FileLock, PrivateFolder, private_path
from deepspeed_affine.storage.publication import finish_publication, point_at, publish
from deepspeed_affine.storage.resume import await_job, resumable
from deepspeed_affine.storage.targets import (
    UNIVERSAL,
    OutputKind,
    OutputState,
    counted,
    examine,
    in_one_line,
    is_taken,
    refuse_existing,
    require_replaceable,
    require_space,
    require_target,
)
from deepspeed_affine.storage.trees import is_present, make_folders, prune, remove_empty, require_files

__all__ = [
    "Kept",
    "OutputFolder",
    "OutputState",
    "examine",
    "point_at",
    "recover",
    "refuse_existing",
    "require_replaceable",
    "require_space",
    "require_target",
]


@dataclass(frozen=True, slots=True)
class Kept:
    """What an unsuccessful run leaves for the next."""

    path: str
    files: int
    nbytes: int

    def __str__(self) -> str:
        kept = "is" if self.files == 1 else "are"
        return (
            f"{counted(self.files, 'finished file')} ({self.nbytes} bytes) {kept} kept in {self.path}; the same "
            "command resumes, with --no-resume it starts over"
        )


def recover(target: str | os.PathLike[str]) -> str:
    """No publication of the output at ``target`` is half-way any more; says what was found, empty for nothing.

    Needs neither the source nor the command of the interrupted run. PolicyError while another process is at work on
    the output, and where the private folder is not of our making.
    """
    path = require_target(target)
    private = PrivateFolder.take_existing(path)
    if private is None:
        return ""
    try:
        found = finish_publication(private, path)
        if not found.gone and private.is_bare():
            private.remove()
        return found.said
    finally:
        private.release()


class OutputFolder:
    """An output that is being made: files are written under ``files_path`` and get their name together.

    ``finished`` are the files that an interrupted run of the same job has completed, by their paths inside the output;
    they are there with the right size, and whoever reuses one compares its bytes first. ``journal`` takes each further
    file when it is complete. Leaving the ``with`` block without ``publish`` removes everything, or keeps it for the
    next run where that may go on: after an interrupt or a failure of the system, not after bad input or for lack of
    space. ``kept`` says so afterwards. ``remarks`` are what the user should know before it goes on.
    """

    def __init__(
        self,
        private: PrivateFolder,
        index: int,
        lock: FileLock,
        journal: Journal,
        identity: Mapping[str, Any],
        job: str,
        finished: Mapping[str, Finished],
    ) -> None:
        self.target = private.target
        self.files_path = private.files
        self.journal = journal
        self.job = job
        self.finished = dict(finished)
        self.kept: Kept | None = None
        self.remarks: list[str] = []
        self._private = private
        self._index = index
        self._lock = lock
        self._identity = identity
        self._resumed = tuple(finished)
        self._overwrite = False
        self._keep = False
        self._protect: tuple[str, ...] = ()
        self._kind = UNIVERSAL
        self._made_parents: list[str] = []
        self._publishing = False
        self._open = True

    @classmethod
    def open(
        cls,
        target: str | os.PathLike[str],
        identity: Mapping[str, Any],
        *,
        overwrite: bool = False,
        resume: bool = True,
        keep: bool = False,
        protect: Iterable[str | os.PathLike[str]] = (),
        kind: OutputKind = UNIVERSAL,
    ) -> OutputFolder:
        """The output of the job ``identity`` at ``target``, begun anew or where an interrupted run has stopped.

        An existing output is refused, unless ``overwrite`` says to replace it at the end and it is an output of
        this ``kind`` that holds nothing of ``protect``. What an interrupted run of another job has left is refused with
        what differs, unless ``resume`` is False, which starts over. ``keep`` leaves it in any case. Raises
        PolicyError while another process is making this output.
        """
        path = require_target(target, kind)
        protected = tuple(os.path.abspath(os.fspath(item)) for item in protect)
        said = recover(path)
        if is_taken(path):
            if not overwrite:
                refuse_existing(path, kind)
            require_replaceable(path, protected, kind)
        made = make_folders(os.path.dirname(path))
        try:
            private = _take(path)
        except BaseException:
            remove_empty(made)
            raise
        try:
            output = cls._begin(private, identity, resume)
        except BaseException:
            if private.is_bare():
                private.remove()
                remove_empty(made)
            private.release()
            raise
        output.remarks[:0] = [said] if said else []
        output._overwrite, output._keep = overwrite, keep
        output._protect, output._made_parents, output._kind = protected, made, kind
        return output

    @classmethod
    def _begin(cls, private: PrivateFolder, identity: Mapping[str, Any], resume: bool) -> OutputFolder:
        private.require_no_writers()
        finished, remarks = resumable(private, identity) if resume else ({}, [])
        if not private.lock.held:
            remarks.append(
                f"{private.path}: its file system has no locks, so nothing keeps a second conversion of this output "
                "out; start only one"
            )
        if not finished:
            private.clear()
        private.sweep()
        if not os.path.isdir(private.files):
            os.mkdir(private.files)
        job = secrets.token_hex(8)
        journals = private.journals()
        journal = Journal.create(private.journal(0), identity, finished.values(), job=job)
        try:
            for path in journals:
                if path != journal.path:
                    os.unlink(path)
            prune(private.files, finished)
            output = cls(private, 0, private.lock, journal, identity, job, finished)
            output.remarks = remarks
            return output
        except BaseException:
            journal.close()
            raise

    @classmethod
    def join(
        cls,
        target: str | os.PathLike[str],
        index: int,
        identity: Mapping[str, Any],
        *,
        job: str,
        patience: float = 60.0,
    ) -> OutputFolder:
        """The output that another process of the same job has opened, for writer ``index`` (1 or more).

        ``job`` is the other's ``job``. Network file systems show new files late, so it is looked for during
        ``patience`` seconds. Raises PolicyError where that job is not found, or this process would do another one.
        """
        if index < 1:
            raise ValueError(f"writer {index} of an output; the first, 0, opens it")
        path = require_target(target)
        folder = private_path(path)
        content = await_job(os.path.join(folder, "journal-0.jsonl"), path, job, patience)
        differences = identity_differences(content.identity or {}, identity)
        if differences:
            raise PolicyError(
                f"{path}: writer {index} would do another job than the first: {in_one_line(differences)}. Start all "
                "of them with the same command, source and software."
            )
        lock = FileLock.take(os.path.join(folder, f"lock-{index}"))
        if lock is None:
            raise PolicyError(f"{path}: another process is writer {index} of this job; every process needs its own.")
        try:
            lock.sign()
            private = PrivateFolder(folder, path, lock)
            journal = Journal.create(private.journal(index), identity, job=job)
        except BaseException:
            lock.release()
            raise
        return cls(private, index, lock, journal, identity, job, content.finished)

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def path_of(self, path: str) -> str:
        """Where the output's file ``path`` ("/" between folders) is while it is private."""
        return os.path.join(self.files_path, *path.split("/"))

    def forget(self, path: str) -> None:
        """After this ``path`` does not count as finished, and no file is there: it can be written again."""
        self.finished.pop(path, None)
        try:
            os.unlink(self.path_of(path))
        except FileNotFoundError:
            return

    def collect(self, writers: int | None = None) -> dict[str, Finished]:
        """Every finished file, of all writers and of the interrupted run, as the journals have it now.

        With ``writers`` the journal of each of that many is required; without, those that are seen count.
        """
        if writers is None:
            paths = self._private.journals()
        else:
            # Not listed: a network file system may show an old list of names.
            paths = [self._private.journal(index) for index in range(writers)]
        found: dict[str, Finished] = {}
        for path in paths:
            try:
                content = read_journal(path)
            except OSError as error:
                raise CheckpointFormatError(
                    f"{path}: cannot be read ({error.strerror}); expected the journal of one of this job's processes. "
                    "Check that all machines share this file system.",
                    file=path,
                ) from error
            if content.job == self.job:
                found.update(content.finished)
        return found

    def publish(self, manifest: Manifest, *, durable: bool = True) -> tuple[str, ...]:
        """After this the output has its name, whole, with ``manifest`` in it, and ``latest_universal`` names it.

        Its files are those of the manifest, each closed by its writer (and synced, where ``durable``); this adds the
        manifest and syncs the folders. Returns remarks for the user. Raises IntegrityError where files and manifest
        disagree, PolicyError where something has come to ``target`` in the meantime, and then publishes nothing.
        """
        if not self._open or self._index:
            raise PolicyError(f"{self.target}: is published once, by the first process of its job.")
        self._publishing = True
        require_files(self.files_path, manifest.files)
        replace_file(
            os.path.join(self.files_path, MANIFEST_NAME), manifest.to_bytes(), self._private.pointer, durable=durable
        )
        if durable:
            # The run that wrote them may have been told not to wait for the disk.
            for path in self._resumed:
                sync_file(self.path_of(path))
            fsync_folders(self.files_path)
        remarks = publish(
            self._private,
            self.target,
            overwrite=self._overwrite,
            durable=durable,
            protect=self._protect,
            kind=self._kind,
        )
        self._open = False
        self.journal.close()
        return remarks

    def close(self, error: BaseException | None = None) -> None:
        """Ends an output that was not published, as leaving the ``with`` block with ``error`` does."""
        if not self._open:
            return
        self._open = False
        if self._index:
            self.journal.close()
            self._lock.release()
            return
        try:
            found = self.collect()
        except (AffineError, OSError):
            found = self.finished
        done = {path: entry for path, entry in found.items() if is_present(self.files_path, entry)}
        self.journal.close()
        if os.path.lexists(self._private.marker) or os.path.lexists(self._private.old):
            # Publication has begun, and the next run ends it.
            self._private.release()
        elif self._keep or (done and self._may_go_on(error)):
            self.kept = Kept(self._private.path, len(done), sum(entry.nbytes for entry in done.values()))
            self._private.release()
        else:
            self._private.remove()
            remove_empty(self._made_parents)

    def _may_go_on(self, error: BaseException | None) -> bool:
        """Whether a run that ended so may succeed the next time with what it has finished."""
        if error is None or is_no_space(error):
            return False
        return self._publishing or not isinstance(error, AffineError) or isinstance(error, PolicyError)


def _take(target: str) -> PrivateFolder:
    """The private folder of ``target``, with no publication half-way in it."""
    private = PrivateFolder.take(target)
    if os.path.lexists(private.marker) or os.path.lexists(private.old):
        private.release()
        raise PolicyError(
            f"{private.path}: holds what an earlier run has replaced, and could not be removed. Remove it, then run "
            "again.",
            file=private.path,
        )
    return private
