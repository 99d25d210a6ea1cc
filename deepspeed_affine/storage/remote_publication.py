"""Publishing an output elsewhere, where nothing can be renamed at once: the manifest is what makes it complete.

A new output's files have their final names from the start, and its manifest comes last. An output that is replaced
stays as it is until every new file has been uploaded and checked, aside; then its manifest goes, the new files take
their places, files of the old output alone go, and the new manifest comes. Whatever the moment, there is the old
manifest with the old files, or none and all that is needed to go on, or the new one with the new files.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from deepspeed_affine.errors import CheckpointFormatError, IntegrityError, PolicyError
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, ManifestFile, identity_differences
from deepspeed_affine.storage.remote import Entry, Place, place_of
from deepspeed_affine.storage.remote_journal import HEADER, JOURNAL, JOURNEYS_AT_ONCE, Header
from deepspeed_affine.storage.remote_target import (
    belongs,
    delete_all,
    differing,
    point_at,
    private_place,
    require_files,
    require_name,
)

__all__ = ["FILES", "UPLOADS", "clear_private", "publish_direct", "publish_staged", "recover", "require_ours"]

FILES = "files"
UPLOADS = "uploads"
_PARTS = frozenset({MANIFEST_NAME, HEADER, f"{HEADER}.part", "manifest.part", "pointer.part"})


def require_ours(private: Place) -> None:
    """Nothing is in the private folder but what this module and its neighbours write; else PolicyError."""
    for path in private.walk():
        start, slash, _ = path.partition("/")
        if (start not in (FILES, UPLOADS, JOURNAL)) if slash else (path not in _PARTS):
            raise PolicyError(
                f"{private.below(path).url}: is in a folder for an unfinished output and nothing of one; expected "
                f"nothing else below {private.url}. Move it away.",
                file=private.below(path).url,
            )


def publish_direct(target: Place, private: Place, manifest: Manifest, tags: Mapping[str, str]) -> None:
    """The files are complete where they are, with ``manifest`` among them, and ``latest_universal`` names them."""
    found = target.walk()
    _require_listed(target, found, manifest.files)
    require_files(target, found, manifest.files, tags)
    _put_manifest(target, private, manifest.to_bytes())
    point_at(target.url)
    clear_private(private)


def publish_staged(target: Place, private: Place, header: Header, manifest: Manifest, tags: Mapping[str, str]) -> None:
    """The files that wait aside are at ``target`` in place of the old output, which is gone."""
    staged = private.below(FILES)
    found = staged.walk()
    require_files(staged, found, manifest.files, tags)
    private.below(MANIFEST_NAME).put(manifest.to_bytes(), private.below("manifest.part"))
    publishing = replace(header, phase="publishing", replaced=tuple(_of_old(target)))
    publishing.write(private)
    _exchange(target, private, publishing, manifest)


def _of_old(target: Place) -> list[str]:
    """The files of the output that is replaced, and nothing else that somebody keeps there."""
    found = target.walk()
    try:
        listed = set(Manifest.read(target.url).files) if MANIFEST_NAME in found else None
    except CheckpointFormatError:
        listed = None
    return sorted(path for path in found if (belongs(path) if listed is None else path in listed))


def _exchange(target: Place, private: Place, header: Header, manifest: Manifest) -> None:
    staged = private.below(FILES)
    waiting, found = staged.walk(), target.walk()
    if set(manifest.files) <= set(waiting) or not _is_there(target, found, manifest):
        target.below(MANIFEST_NAME).delete()
        _put_in_place(target, staged, waiting, found, manifest)
        delete_all(target.below(path) for path in header.replaced if path not in manifest.files)
        target.remove_empty_folders()
        _put_manifest(target, private, manifest.to_bytes())
    point_at(target.url)
    clear_private(private)


def _is_there(target: Place, found: Mapping[str, Entry], manifest: Manifest) -> bool:
    """Whether the new output is complete: then files no longer wait because they are being tidied away."""
    if MANIFEST_NAME not in found or any(differing(found, manifest.files)):
        return False
    return target.below(MANIFEST_NAME).read_all() == manifest.to_bytes()


def _put_in_place(
    target: Place, staged: Place, waiting: Mapping[str, Entry], found: Mapping[str, Entry], manifest: Manifest
) -> None:
    there = {path: entry for path, entry in found.items() if path not in waiting}
    for line in differing(there, {path: file for path, file in manifest.files.items() if path not in waiting}):
        raise IntegrityError(
            f"{target.url}: replacing it was interrupted, and {line}, neither there nor in {staged.url}; expected "
            f"every file in one of the two. Something else removes files there: find it, remove everything below "
            f"{staged.url.removesuffix('/' + FILES)}, then convert again with --overwrite.",
            file=target.url,
        )

    def take(path: str) -> None:
        source, place = staged.below(path), target.below(path)
        source.move_to(place) if source.renames else source.copy_to(place)

    with ThreadPoolExecutor(JOURNEYS_AT_ONCE) as pool:
        list(pool.map(take, sorted(set(waiting) & set(manifest.files))))
    for line in differing(target.walk(), manifest.files):
        raise IntegrityError(
            f"{target.url}: after its new files were put in place, {line}. They are all still in {staged.url}: run the "
            "same command again to put them in place once more.",
            file=target.url,
        )


def _require_listed(target: Place, found: Mapping[str, Entry], files: Mapping[str, ManifestFile]) -> None:
    for path in found:
        if path not in files and path != MANIFEST_NAME:
            raise IntegrityError(
                f"{path}: is in {target.url} and not of this conversion; expected only its own files. Nothing was "
                "published: move it away, then run again.",
                file=path,
            )


def _put_manifest(target: Place, private: Place, data: bytes) -> None:
    place = target.below(MANIFEST_NAME)
    place.put(data, private.below("manifest.part"))
    if place.read_all() != data:
        place.delete()
        raise IntegrityError(
            f"{place.url}: reads back otherwise than it was written; expected the same. Nothing was published: the "
            "store is at fault, run again.",
            file=place.url,
        )


def clear_private(private: Place) -> None:
    """After this nothing is kept of the unfinished output; what says that there is one goes last."""
    delete_all(private.below(path) for path in private.walk() if path != HEADER)
    private.below(HEADER).delete()
    private.remove_empty_folders()


def recover(target: str) -> str:
    """No publication of the output at ``target`` is half-way any more; says what was found, empty for nothing."""
    url = require_name(target)
    private, place = private_place(url), place_of(url)
    header = Header.read(private)
    if header is None:
        return ""
    if header.phase == "publishing":
        kept = private.below(MANIFEST_NAME)
        try:
            manifest = Manifest.from_bytes(kept.read_all(), kept.url)
        except FileNotFoundError:
            # It goes when all is in place, so what is left is to tidy up.
            manifest = Manifest.read(url)
        _exchange(place, private, header, manifest)
        return f"{url}: replacing it, which was interrupted, is finished"
    if header.way == "direct" and MANIFEST_NAME in place.walk():
        if differences := identity_differences(Manifest.read(url).identity, header.identity):
            raise PolicyError(
                f"{url}: was published by another conversion while this one was interrupted ({differences[0]}). Remove "
                f"everything below {private.url} to keep that output.",
                file=url,
            )
        point_at(url)
        clear_private(private)
        return f"{url}: publishing it, which was interrupted, is finished"
    return ""
