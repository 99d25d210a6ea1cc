"""Whether a universal folder is all there, as far as its manifest says what it had, and the same one to every rank."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.hooks.agreement import everyone
from deepspeed_affine.hooks.globals import COUNTERS
from deepspeed_affine.hooks.offered import Offered
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest
from deepspeed_affine.storage.universal import UniversalFolder

__all__ = ["check_agreed", "check_whole", "identity_of"]

SHOWN = 3


def check_whole(folder: UniversalFolder) -> Manifest | None:
    """No file that the manifest lists is missing or cut short; CheckpointFormatError otherwise. Returns the manifest.

    What a copy left out would else be taken for states that were never saved. Names and sizes alone are looked at;
    ``ds_affine verify`` reads the bytes. A folder without a manifest, as other converters write, says nothing.
    """
    if folder.manifest is None:
        return None
    manifest = Manifest.read(folder.path)
    listed = manifest.files
    short = [name for name, file in listed.items() if folder.sizes.get(name, -1) < file.nbytes]
    if short:
        more = ", ..." if len(short) > SHOWN else ""
        raise CheckpointFormatError(
            f"{folder.path}: {len(short)} of the {len(listed)} files its manifest lists are missing or cut short "
            f"({', '.join(short[:SHOWN])}{more}); expected all of them. Copy the folder again, whole. If they were "
            f"changed on purpose, remove {MANIFEST_NAME}.",
            file=folder.path,
        )
    return manifest


def identity_of(offered: Offered, manifest: Manifest | None) -> int:
    """What two copies of a checkpoint share, and two checkpoints of a run do not."""
    if manifest is not None:
        # It holds a checksum of every file.
        return zlib.crc32(manifest.to_bytes())
    counters = [offered.model.root.get(name) for name in COUNTERS]
    return zlib.crc32(repr((counters, sorted(offered.folder.sizes.items()))).encode())


def check_agreed(path: str, identity: int, options: Mapping[str, object]) -> None:
    """Every rank is to load the same checkpoint, or a copy of it, with the same ``options``; else all of them raise.

    A collective. ``latest_universal`` may change between two reads of it, and each machine may have its own.
    """
    rows = everyone((path, identity, dict(options)))
    for rank, (other, its, asked) in enumerate(rows):
        if its != rows[0][1]:
            raise CheckpointFormatError(
                f"{rows[0][0]}: is what rank 0 found, and rank {rank} found another checkpoint, {other}; expected one "
                "for all. Pass its tag; on machines with folders of their own copy the same checkpoint to each.",
                file=rows[0][0],
            )
        for name, value in asked.items():
            if value != rows[0][2][name]:
                raise PolicyError(
                    f"load_checkpoint: {name} is {rows[0][2][name]!r} on rank 0 and {value!r} on rank {rank}; expected "
                    "the same on all ranks. Call it alike on each."
                )
