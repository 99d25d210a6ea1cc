"""An artifact read whole: every file, every encoding, every code and scale."""

from __future__ import annotations

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.artifact import Artifact
from deepspeed_affine.ninfer.formats import DIRECT
from deepspeed_affine.ninfer.layouts import check_resource, geometry_of
from deepspeed_affine.ninfer.records import TensorObject
from deepspeed_affine.ninfer.validate import check_values

__all__ = ["check_artifact"]

_BLOCK_BYTES = 1 << 20


def check_artifact(artifact: Artifact) -> None:
    """Return if every file is there and every object's encoding, codes, scales and padding are what its format allows.

    Raises the first fault: FileSetError, EncodingError, ValueDomainError, or BindingError for a parameter or a helper
    whose parts are numbers of different kinds.
    """
    for number in range(len(artifact.files)):
        artifact.file_set.touch(number)
    for record in artifact.objects.values():
        read = artifact.fetcher(record)
        if isinstance(record, TensorObject):
            check_values(geometry_of(record), read, f"{artifact.path}: object {shown(record.id)}")
            if record.format not in DIRECT:
                continue
        else:
            check_resource(record)
        # Any bytes are fine here, and have to be readable.
        for offset in range(0, record.nbytes, _BLOCK_BYTES):
            read(offset, min(_BLOCK_BYTES, record.nbytes - offset))
    for name, binding in artifact.bindings.items():
        artifact.value_dtype_of(name, binding)
    for use in artifact.uses:
        for role, binding in use.auxiliaries.items():
            artifact.value_dtype_of(role, binding)
