"""What can be wrong with a container, by class: each says at which stage it was found."""

from __future__ import annotations

from deepspeed_affine.errors import AffineError, CheckpointFormatError, IntegrityError, InvalidMapError

__all__ = [
    "BindingError",
    "DirectoryError",
    "EncodingError",
    "FileSetError",
    "FramingError",
    "JsonError",
    "OutputExistsError",
    "RangeError",
    "ReferenceError_",
    "SchemaError",
    "ValueDomainError",
    "WriterError",
]


class FramingError(CheckpointFormatError):
    """The entry's header or its length is not that of a v3 container; found on opening."""


class JsonError(CheckpointFormatError):
    """The directory is no strict JSON; found on opening."""


class SchemaError(CheckpointFormatError):
    """A record has other members, or a member another type or domain, than the format defines; found on opening."""


class DirectoryError(CheckpointFormatError):
    """A name is used twice where it must be unique, or names no file beside the entry; found on opening."""


class RangeError(CheckpointFormatError):
    """A byte range overlaps another, leaves the payload or does not fit in 64 bits; found on opening or reading."""


class ReferenceError_(CheckpointFormatError):  # noqa: N801, N818 (the plain name is a builtin's)
    """A record names an object, component or element that is not there or of another kind; found on opening."""


class EncodingError(CheckpointFormatError):
    """An object cannot be interpreted: its format, layout, shape, size or alignment; found when it is first read."""


class FileSetError(CheckpointFormatError):
    """A continuation is missing, damaged or another artifact's; found by the first read that touches it."""


class BindingError(InvalidMapError):
    """A parameter's binding does not give what the caller asks for; found by the binder."""


class ValueDomainError(IntegrityError):
    """A code, scale or divisor is outside its format, or a value cannot be encoded in it."""


class WriterError(AffineError):
    """An artifact cannot be written as asked."""


class OutputExistsError(WriterError, FileExistsError):
    """A file of the artifact to be written exists already; nothing is ever overwritten."""
