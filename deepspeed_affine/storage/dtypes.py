"""Element types by torch's own names, so that metadata can be read without importing torch."""

from __future__ import annotations

__all__ = ["ITEM_SIZES", "LEGACY_STORAGE_DTYPES", "item_size", "storage_class_name"]

ITEM_SIZES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
    "quint4x2": 1,
    "quint2x4": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}
"""Bytes of one element, for every dtype a torch file can name."""

LEGACY_STORAGE_DTYPES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
"""The storage class a file names, and the dtype of its elements. Newer dtypes travel in UntypedStorage."""

_STORAGE_NAMES = {dtype: name for name, dtype in LEGACY_STORAGE_DTYPES.items() if name != "UntypedStorage"}


def item_size(dtype: str) -> int:
    """Return the bytes of one element of ``dtype`` (a torch dtype's name without ``torch.``)."""
    return ITEM_SIZES[dtype]


def storage_class_name(dtype: str) -> str | None:
    """Return the typed storage class torch.save names for ``dtype``, or None where it names UntypedStorage."""
    return _STORAGE_NAMES.get(dtype)
