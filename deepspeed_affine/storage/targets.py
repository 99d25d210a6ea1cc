"""What is at the place an output is to get, and whether it may go there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed_affine.errors import SHOWN_FAULTS, CheckpointFormatError, PolicyError
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, identity_differences

__all__ = [
    "LATEST",
    "ORDINARY",
    "UNIVERSAL",
    "OutputKind",
    "OutputState",
    "counted",
    "examine",
    "in_one_line",
    "is_taken",
    "refuse_existing",
    "require_replaceable",
    "require_space",
    "require_target",
]

LATEST = "latest_universal"
"""The file beside an output that names it, which is where DeepSpeed's loader looks."""


@dataclass(frozen=True, slots=True)
class OutputKind:
    """What an output is to DeepSpeed: ``latest`` is the file beside it that names the newest, ``noun`` what it is."""

    latest: str
    noun: str


UNIVERSAL = OutputKind(LATEST, "universal checkpoint")
ORDINARY = OutputKind("latest", "resharded checkpoint")


@dataclass(frozen=True, slots=True)
class OutputState:
    """What is at an output's path: nothing, an empty folder, the output of this very job, or anything else.

    ``differences`` says, a line each, why it is not the output of this job; ``manifest`` is the one found there.
    """

    target: str
    kind: Literal["absent", "empty", "complete", "foreign"]
    differences: tuple[str, ...] = ()
    manifest: Manifest | None = None

    def refusal(self, kind: OutputKind = UNIVERSAL) -> PolicyError:
        """The error for a command that may not overwrite it."""
        return _exists(self.target, f", and {in_one_line(self.differences)}" if self.differences else "", kind)


def examine(target: str, identity: Mapping[str, Any]) -> OutputState:
    """What is at ``target``, by its manifest and the names and sizes of its files; their bytes are not read.

    ``complete`` is an output whose manifest has exactly this identity and whose files are all there.
    """
    if not os.path.lexists(target):
        return OutputState(target, "absent")
    if not stat.S_ISDIR(os.lstat(target).st_mode):
        return OutputState(target, "foreign", ("is a link" if os.path.islink(target) else "is no folder",))
    if not is_taken(target):
        return OutputState(target, "empty")
    if not os.path.lexists(os.path.join(target, MANIFEST_NAME)):
        return OutputState(target, "foreign", (f"it has no {MANIFEST_NAME}, so what it was made from is not known",))
    try:
        manifest = Manifest.read(target)
    except CheckpointFormatError as error:
        return OutputState(target, "foreign", (error.message.removesuffix("."),))
    differences = identity_differences(manifest.identity, identity)
    if not differences:
        differences = [*manifest.missing(target), *(f"file {path} is not one of its own" for path in _strays(target))]
    return OutputState(target, "foreign" if differences else "complete", tuple(differences), manifest)


def counted(number: int, what: str) -> str:
    """The number and the noun, in the plural where that is due."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def in_one_line(differences: Iterable[str]) -> str:
    """The first ten, and how many more there are."""
    found = list(differences)
    hidden = len(found) - SHOWN_FAULTS
    more = f"; and {counted(hidden, 'more difference')}" if hidden > 0 else ""
    return "; ".join(found[:SHOWN_FAULTS]) + more


def require_target(target: str | os.PathLike[str], kind: OutputKind = UNIVERSAL) -> str:
    """The absolute path of an output; PolicyError for one that no folder could be renamed to."""
    path = os.path.abspath(os.fspath(target))
    if not os.path.basename(path):
        raise PolicyError(f"{path}: cannot be an output folder; expected a path to create. Choose another.")
    if os.path.basename(path) == kind.latest:
        raise PolicyError(
            f"{path}: is the file that names the newest output beside it; an output needs another name. Choose one."
        )
    above = os.path.dirname(path)
    while above != os.path.dirname(above):
        if os.path.lexists(os.path.join(above, MANIFEST_NAME)):
            raise PolicyError(
                f"{path}: lies in {above}, which is an output itself and would be damaged; expected a path of its own. "
                "Choose a folder beside it.",
                file=path,
            )
        above = os.path.dirname(above)
    if os.path.ismount(path):
        raise PolicyError(
            f"{path}: is a mount point, so a finished output cannot be renamed to it; expected a path to create. "
            f"Choose a folder in it, such as {os.path.join(path, 'universal')}.",
            file=path,
        )
    return path


def is_taken(target: str) -> bool:
    """Whether anything but an empty folder is at ``target``."""
    try:
        if os.path.islink(target):
            return True
        with os.scandir(target) as found:
            return any(True for _ in found)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return os.path.lexists(target)


def refuse_existing(target: str, kind: OutputKind = UNIVERSAL) -> None:
    """Nothing is at ``target``, or an empty folder; anything else raises PolicyError."""
    if is_taken(target):
        raise _exists(target, "", kind)


def _exists(target: str, why: str, kind: OutputKind) -> PolicyError:
    choices = "Choose another output folder, or move or remove this one"
    try:
        require_replaceable(target, kind=kind)
        choices = "Choose another output folder, move or remove this one, or replace it with --overwrite"
    except PolicyError as error:
        why = why or error.message.partition(": exists already")[2].partition(";")[0]
    except OSError:
        pass
    return PolicyError(f"{target}: exists already{why}; expected a path to create. {choices}.", file=target)


def require_replaceable(target: str, protect: Iterable[str] = (), kind: OutputKind = UNIVERSAL) -> None:
    """What is at ``target`` is an output of this kind, and none of ``protect`` lies in it; else PolicyError.

    So a mistyped path costs nobody a home directory, and no training run its checkpoint.
    """
    if not stat.S_ISDIR(os.lstat(target).st_mode):
        what = "a link" if os.path.islink(target) else "no folder"
        raise PolicyError(
            f"{target}: exists already and is {what}; --overwrite replaces {kind.noun} folders only. Pass the "
            "path of the folder itself, or choose another output folder.",
            file=target,
        )
    names = set(os.listdir(target))
    (_require_universal if kind is UNIVERSAL else _require_resharded)(target, names)
    stray = next(_strays(target), None)
    if stray is not None:
        raise PolicyError(
            f"{target}: exists already and holds {stray}, which is no part of a {kind.noun}; --overwrite "
            "would remove it. Move it away, or choose another output folder.",
            file=target,
        )
    real = os.path.realpath(target)
    for path in protect:
        if os.path.commonpath([real, os.path.realpath(path)]) == real:
            raise PolicyError(
                f"{target}: holds {path}, which is read; --overwrite would remove it. Choose another output folder.",
                file=target,
            )


def _require_universal(target: str, names: set[str]) -> None:
    if MANIFEST_NAME not in names and not os.path.isdir(os.path.join(target, "zero")):
        raise PolicyError(
            f"{target}: exists already and is no universal checkpoint (it has neither {MANIFEST_NAME} nor a folder "
            "'zero'); --overwrite replaces only those. Choose another output folder, or move or remove this one.",
            file=target,
        )
    sharded = sorted(name for name in names if name.endswith("optim_states.pt"))
    if sharded:
        raise PolicyError(
            f"{target}: exists already and holds {sharded[0]}, part of a checkpoint to convert from (are the two "
            "folders swapped?); --overwrite would remove it. Choose another output folder.",
            file=target,
        )


def _require_resharded(target: str, names: set[str]) -> None:
    """A checkpoint of a training run looks the same and has no manifest; a universal folder holds no optimizer file."""
    if MANIFEST_NAME not in names or not any(name.endswith("optim_states.pt") for name in names):
        raise PolicyError(
            f"{target}: exists already and is no checkpoint that ds_affine reshard made (those have {MANIFEST_NAME} "
            "beside their optimizer files); --overwrite replaces only those. Choose another output folder, or move or "
            "remove this one.",
            file=target,
        )


def _strays(folder: str) -> Iterator[str]:
    """Every file below the folder that the manifest does not list, or where there is none, that no converter writes."""
    try:
        known = Manifest.read(folder).files
    except CheckpointFormatError:
        known = None
    for inside, folders, names in os.walk(folder):
        relative = os.path.relpath(inside, folder).replace(os.sep, "/")
        start = "" if relative == "." else f"{relative}/"
        links = [name for name in folders if os.path.islink(os.path.join(inside, name))]
        for name in sorted([*names, *links]):
            path = start + name
            # NFS keeps a removed file under such a name for as long as it is open.
            if path == MANIFEST_NAME or name.startswith(".nfs"):
                continue
            if not (path in known if known is not None else _is_usual(path)):
                yield path


def _is_usual(path: str) -> bool:
    top, _, below = path.partition("/")
    return path.endswith(".pt") and (top in ("zero", "tmp") if below else path.endswith("model_states.pt"))


def require_space(folder: str, needed_bytes: int, *, files: int = 0) -> None:
    """The file system of ``folder`` (or of what is to hold it) has room for that many bytes and files.

    Raises PolicyError with both figures. File systems that do not tell are believed to have room; quotas show only
    when they are reached.
    """
    place = os.path.abspath(folder)
    while not os.path.isdir(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    try:
        found = os.statvfs(place)
    except OSError:
        return
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and needed_bytes > free:
        raise PolicyError(
            f"{folder}: the output needs {needed_bytes} bytes and {free} are free on its file system. Free at least "
            f"{needed_bytes - free} bytes, or choose an output folder elsewhere.",
            file=folder,
        )
    if found.f_files and files > found.f_favail:
        raise PolicyError(
            f"{folder}: the output has {files} files and its file system takes {found.f_favail} more. Remove files, or "
            "choose an output folder elsewhere.",
            file=folder,
        )
