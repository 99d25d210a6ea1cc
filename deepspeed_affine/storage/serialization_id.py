"""The fingerprint torch.save stores as ``.data/serialization_id``, from record names and checksums.

torch folds the hashes of the record names in the order in which libstdc++ iterates an unordered_set, so this module
repeats that order. Nothing depends on the value; equal files are simply easier to trust than equivalent ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = ["serialization_id"]

_MASK = (1 << 64) - 1
_MURMUR_MULTIPLIER = 0xC6A4A7935BD1E995
_MURMUR_SEED = 0xC70F6907
_HEAD, _END = -1, -2
_FEW = 16
_BUCKETS = (13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061, 712697, 1447153)


def serialization_id(names: Sequence[str], crcs: Iterable[int]) -> str:
    """Return torch's 40 digits for records of these names (without the archive's folder), in order of writing.

    ``crcs`` are those of the records that are not empty.
    """
    by_name = _of_few(tuple(names)) if len(names) <= _FEW else _of_names(names)
    by_data = 0
    for crc in crcs:
        by_data = _combine(by_data, crc)
    return f"{by_name:020d}{by_data:020d}"


def _of_names(names: Sequence[str]) -> int:
    by_name = 0
    for value in _set_order([_hash_bytes(name.encode()) for name in names]):
        by_name = _combine(by_name, value)
    return by_name


# Nearly every file of a conversion holds one tensor, and so has the same few names.
_of_few = lru_cache(maxsize=64)(_of_names)


def _combine(seed: int, value: int) -> int:
    return (seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2))) & _MASK


def _hash_bytes(data: bytes) -> int:
    """Return libstdc++'s std::hash of a string: 64-bit MurmurHash2."""
    value = (_MURMUR_SEED ^ (len(data) * _MURMUR_MULTIPLIER)) & _MASK
    whole = len(data) & ~7
    for at in range(0, whole, 8):
        word = int.from_bytes(data[at : at + 8], "little") * _MURMUR_MULTIPLIER & _MASK
        value = (value ^ ((word ^ (word >> 47)) * _MURMUR_MULTIPLIER & _MASK)) * _MURMUR_MULTIPLIER & _MASK
    if whole != len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MURMUR_MULTIPLIER & _MASK
    value = (value ^ (value >> 47)) * _MURMUR_MULTIPLIER & _MASK
    return value ^ (value >> 47)


def _set_order(hashes: Sequence[int]) -> list[int]:
    """Return the hashes in the iteration order of an unordered_set they were inserted into one by one."""
    ordered: list[int] = []
    done = 0
    for buckets in _BUCKETS:
        ordered = _insert_all([*ordered, *hashes[done:buckets]], buckets)
        done = buckets
        if done >= len(hashes):
            return ordered
    # Millions of records: any order makes a fingerprint, if no longer torch's.
    return [*ordered, *hashes[done:]]


def _insert_all(values: Sequence[int], buckets: int) -> list[int]:
    """Return ``values`` as one singly linked list threaded through hash buckets ends up after these insertions.

    A value goes to the front of its bucket, and the first of a bucket to the front of the whole list.
    """
    following: dict[int, int] = {_HEAD: _END}
    before_bucket: dict[int, int] = {}
    for node, value in enumerate(values):
        bucket = value % buckets
        previous = before_bucket.get(bucket)
        if previous is None:
            first = following[node] = following[_HEAD]
            following[_HEAD] = node
            if first != _END:
                before_bucket[values[first] % buckets] = node
            before_bucket[bucket] = _HEAD
        else:
            following[node] = following[previous]
            following[previous] = node
    ordered = []
    node = following[_HEAD]
    while node != _END:
        ordered.append(values[node])
        node = following[node]
    return ordered
