"""Whether a universal folder is all there, as far as its manifest says what it had."""

from __future__ import annotations

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest
from deepspeed_affine.storage.universal import UniversalFolder

__all__ = ["check_whole"]

SHOWN = 3


def check_whole(folder: UniversalFolder) -> None:
    """No file that the manifest lists is missing or cut short; CheckpointFormatError otherwise.

    What a copy left out would else be taken for states that were never saved. Names and sizes alone are looked at;
    ``ds_affine verify`` reads the bytes. A folder without a manifest, as other converters write, says nothing.
    """
    if folder.manifest is None:
        return
    listed = Manifest.read(folder.path).files
    short = [name for name, file in listed.items() if folder.sizes.get(name, -1) < file.nbytes]
    if short:
        more = ", ..." if len(short) > SHOWN else ""
        raise CheckpointFormatError(
            f"{folder.path}: {len(short)} of the {len(listed)} files its manifest lists are missing or cut short "
            f"({', '.join(short[:SHOWN])}{more}); expected all of them. Copy the folder again, whole. If they were "
            f"changed on purpose, remove {MANIFEST_NAME}.",
            file=folder.path,
        )
