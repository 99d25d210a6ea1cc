"""What is at the place elsewhere that an output is to get, and whether it may go there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, IntegrityError, PolicyError
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, ManifestFile, identity_differences
from deepspeed_affine.storage.publication import LATEST
from deepspeed_affine.storage.remote import Entry, Place, place_of
from deepspeed_affine.storage.remote_journal import JOURNEYS_AT_ONCE, Header
from deepspeed_affine.storage.targets import OutputState
from deepspeed_affine.storage.urls import absolute, join, name_of, parent_of

__all__ = [
    "belongs",
    "delete_all",
    "differing",
    "examine",
    "point_at",
    "private_place",
    "require_files",
    "require_name",
    "require_replaceable",
]


def require_name(target: str) -> str:
    """The output's URL as it is used; PolicyError for one that names no folder inside another."""
    url = absolute(target)
    place = place_of(url)
    inside = place.path.strip("/")
    if not name_of(url) or parent_of(url) == url or (place.streams and "/" not in inside):
        raise PolicyError(
            f"{url}: cannot be an output folder; expected one with a name inside a bucket or folder, such as "
            f"{join(url, 'universal')}. Choose another.",
            file=url,
        )
    return url


def private_place(target: str) -> Place:
    """Where everything about the unfinished output at ``target`` is kept: always the same, so that a later run finds
    it."""
    return place_of(parent_of(target)).below(f".{name_of(target)}.partial")


def examine(target: str, identity: Mapping[str, Any]) -> OutputState:
    """What is at ``target``, by its manifest and the names and sizes of its objects; their bytes are not read.

    An output without a manifest that this package has begun counts as empty: it can be gone on with.
    """
    url = require_name(target)
    try:
        found = place_of(url).walk()
    except NotADirectoryError:
        return OutputState(url, "foreign", ("is no folder",))
    if not found:
        return OutputState(url, "absent")
    if MANIFEST_NAME not in found:
        header = Header.read(private_place(url))
        if header is not None and (header.way == "direct" or header.phase == "publishing"):
            return OutputState(url, "empty")
        return OutputState(url, "foreign", (f"it has no {MANIFEST_NAME}, so what it was made from is not known",))
    try:
        manifest = Manifest.read(url)
    except CheckpointFormatError as error:
        return OutputState(url, "foreign", (error.message.removesuffix("."),))
    differences = identity_differences(manifest.identity, identity)
    if not differences:
        differences = list(differing(found, manifest.files))
    return OutputState(url, "foreign" if differences else "complete", tuple(differences), manifest)


def differing(found: Mapping[str, Entry], files: Mapping[str, ManifestFile]) -> Iterable[str]:
    """A line for each file of a manifest that is not among the objects found, or has another size."""
    for path, file in files.items():
        size = found[path].size if path in found else None
        if size is None:
            yield f"file {path} cannot be found"
        elif size != file.nbytes:
            yield f"file {path} has {size} bytes and had {file.nbytes} when it was written"


def belongs(path: str) -> bool:
    """Whether a universal checkpoint has files of such a name."""
    return path.startswith("zero/") or path == MANIFEST_NAME or ("/" not in path and path.endswith("_states.pt"))


def require_replaceable(target: Place, found: Mapping[str, Entry], protect: Iterable[str]) -> None:
    """What is at ``target`` is a universal checkpoint, and none of ``protect`` lies in it; else PolicyError."""
    if MANIFEST_NAME not in found and not any(path.startswith("zero/") for path in found):
        raise PolicyError(
            f"{target.url}: exists already and is no universal checkpoint (it has neither {MANIFEST_NAME} nor a folder "
            "'zero'); --overwrite replaces only those. Choose another output folder, or move or remove this one.",
            file=target.url,
        )
    sharded = sorted(path for path in found if "/" not in path and path.endswith("optim_states.pt"))
    if sharded:
        raise PolicyError(
            f"{target.url}: exists already and holds {sharded[0]}, part of a checkpoint to convert from; --overwrite "
            "would remove it. Choose another output folder.",
            file=target.url,
        )
    for path in protect:
        if is_inside(target, path):
            raise PolicyError(
                f"{target.url}: holds {path}, which is read; --overwrite would remove it. Choose another output "
                "folder.",
                file=target.url,
            )


def is_inside(target: Place, path: str) -> bool:
    """Whether ``path`` is ``target`` or lies in it, as far as one file system can tell."""
    try:
        place = place_of(absolute(path))
    except (PolicyError, OSError):
        return False
    inner, outer = place.path.strip("/"), target.path.strip("/")
    return type(place.system) is type(target.system) and (inner == outer or inner.startswith(f"{outer}/"))


def require_files(
    folder: Place, found: Mapping[str, Entry], files: Mapping[str, ManifestFile], tags: Mapping[str, str]
) -> None:
    """The objects found are what the manifest lists, to the byte count and, where known, the tag of the upload."""
    for path, expected in files.items():
        entry = found.get(path)
        if entry is None or entry.size != expected.nbytes:
            fact = "cannot be found" if entry is None else f"has {entry.size} bytes"
            raise IntegrityError(
                f"{path}: was written to {folder.url} and {fact} there; expected {expected.nbytes} bytes. Nothing was "
                "published: run again.",
                file=path,
            )
        tag = tags.get(path, "")
        if tag and entry.tag and entry.tag != tag:
            raise IntegrityError(
                f"{path}: was written to {folder.url} and then again by somebody else (its tag was {tag} and is "
                f"{entry.tag}). Nothing was published: let one conversion at a time write there, and run again.",
                file=path,
            )


def point_at(target: str) -> None:
    """``latest_universal`` beside the output names it, which is where DeepSpeed's loader looks."""
    folder, name = place_of(parent_of(target)), name_of(target)
    pointer = folder.below(LATEST)
    private = private_place(target)
    try:
        pointer.put(name.encode("utf-8"), private.below("pointer.part"))
        private.remove_empty_folders()
    except OSError as error:
        raise PolicyError(
            f"{pointer.url}: could not be written ({error.strerror}), while {target} was converted and is complete. "
            f"Write {name!r} into that file, or load with an explicit tag.",
            file=pointer.url,
        ) from error


def delete_all(places: Iterable[Place]) -> None:
    """After this none of the objects is there."""
    with ThreadPoolExecutor(JOURNEYS_AT_ONCE) as pool:
        list(pool.map(Place.delete, places))
