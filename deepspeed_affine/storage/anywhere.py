"""Outputs at local paths and at URLs alike; what is for URLs alone is imported when there is one."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol

from deepspeed_affine.storage import output as local
from deepspeed_affine.storage.journal import Finished
from deepspeed_affine.storage.manifest import Manifest
from deepspeed_affine.storage.output import Kept, OutputFolder, OutputState
from deepspeed_affine.storage.sink import LocalSink, Sink
from deepspeed_affine.storage.targets import UNIVERSAL, OutputKind
from deepspeed_affine.storage.urls import absolute, is_url

__all__ = [
    "Output",
    "examine",
    "is_within",
    "join_output",
    "memory_elsewhere",
    "open_output",
    "point_at",
    "recover",
    "require_space",
    "sink_of",
    "vouched",
]


class Recorder(Protocol):
    """The journal of one process of a job."""

    def record(self, entry: Finished) -> None:
        """After this, or a little later elsewhere, a later run finds ``entry``."""

    def close(self) -> None:
        """After this a later run finds everything that was recorded."""


class Output(Protocol):
    """What ``OutputFolder`` and ``RemoteOutput`` have in common; the first says what it means."""

    @property
    def target(self) -> str: ...
    @property
    def files_path(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def finished(self) -> Mapping[str, Finished]: ...
    @property
    def journal(self) -> Recorder: ...
    @property
    def kept(self) -> Kept | None: ...
    @property
    def remarks(self) -> list[str]: ...
    def __enter__(self) -> Output: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def path_of(self, path: str) -> str: ...
    def forget(self, path: str) -> None: ...
    def collect(self, writers: int | None = None) -> dict[str, Finished]: ...
    def publish(self, manifest: Manifest, *, durable: bool = True) -> tuple[str, ...]: ...
    def close(self, error: BaseException | None = None) -> None: ...


def open_output(
    target: str,
    identity: Mapping[str, Any],
    *,
    overwrite: bool = False,
    resume: bool = True,
    keep: bool = False,
    protect: Iterable[str] = (),
    kind: OutputKind = UNIVERSAL,
) -> Output:
    """See ``OutputFolder.open``; at a URL every output is a universal checkpoint."""
    if not is_url(target):
        inside = [found for found in map(_local, protect) if found]
        return OutputFolder.open(
            target, identity, overwrite=overwrite, resume=resume, keep=keep, protect=inside, kind=kind
        )
    from deepspeed_affine.storage.remote_output import RemoteOutput

    return RemoteOutput.open(target, identity, overwrite=overwrite, resume=resume, keep=keep, protect=protect)


def join_output(target: str, index: int, identity: Mapping[str, Any], *, job: str, patience: float = 60.0) -> Output:
    """See ``OutputFolder.join``."""
    if not is_url(target):
        return OutputFolder.join(target, index, identity, job=job, patience=patience)
    from deepspeed_affine.storage.remote_output import RemoteOutput

    return RemoteOutput.join(target, index, identity, job=job, patience=patience)


def sink_of(output: Output, paths: Iterable[str], *, durable: bool = True) -> Sink:
    """Where the output's files are written; ``paths`` are all that this process will write."""
    if not is_url(output.target):
        return LocalSink(output.files_path, durable=durable)
    from deepspeed_affine.storage.remote_output import RemoteOutput

    if not isinstance(output, RemoteOutput):
        raise TypeError(f"{output.target}: an output at a URL that is a {type(output).__name__}")
    output.journal.expect(paths)
    return output.sink


def vouched(output: Output) -> Collection[str]:
    """Those of ``output.finished`` that need not be read again to be trusted."""
    found: Collection[str] = getattr(output, "vouched", ())
    return found


def examine(target: str, identity: Mapping[str, Any]) -> OutputState:
    """What is at ``target``, by its manifest and the names and sizes of its files; their bytes are not read."""
    if not is_url(target):
        return local.examine(target, identity)
    from deepspeed_affine.storage.remote_target import examine

    return examine(target, identity)


def recover(target: str) -> str:
    """No publication of the output at ``target`` is half-way any more; says what was found, empty for nothing."""
    if not is_url(target):
        return local.recover(target)
    from deepspeed_affine.storage.remote_publication import recover

    return recover(target)


def point_at(target: str, kind: OutputKind = UNIVERSAL) -> None:
    """``latest_universal``, or the file of this kind, beside the output names it: DeepSpeed's loader looks there."""
    if not is_url(target):
        local.point_at(target, kind=kind)
        return
    from deepspeed_affine.storage.remote_target import point_at

    point_at(target)


def require_space(folder: str, needed_bytes: int, *, files: int = 0) -> None:
    """There is room for that many bytes and files, as far as the place tells; object stores do not."""
    if not is_url(folder):
        local.require_space(folder, needed_bytes, files=files)


def memory_elsewhere(source: str, target: str, workers: int, largest: int) -> int:
    """The most memory, in bytes, that reading and writing URLs takes beside what local files take.

    ``largest`` is the size of the largest output file: the parts that it is sent in grow with it.
    """
    needed = 0
    if is_url(source):
        from deepspeed_affine.storage import remote_read

        needed += remote_read.BLOCKS_KEPT * remote_read.BLOCK_BYTES + workers * 2 * remote_read.BLOCK_BYTES
    if is_url(target):
        from deepspeed_affine.storage import remote_sink

        needed += workers * remote_sink.memory_of(largest)
    return needed


def is_within(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or lies in it, however the two are spelled."""
    if is_url(folder):
        from deepspeed_affine.storage.remote import place_of
        from deepspeed_affine.storage.remote_target import is_inside

        return is_inside(place_of(absolute(folder)), path)
    inside, real = _local(path), os.path.realpath(folder)
    return bool(inside) and os.path.commonpath([real, os.path.realpath(inside)]) == real


def _local(path: str) -> str:
    """The local path of what is here, empty for what is elsewhere."""
    if not is_url(path):
        return path
    from deepspeed_affine.storage.remote import place_of

    place = place_of(absolute(path))
    return place.path if "file" in place.protocols else ""
