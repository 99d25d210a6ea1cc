"""Two descriptions of one tensor, compared over intervals of F; neither is ever built.

A description is what a plan has: pieces from F to storages, and a reader of those storages. Compared are bytes and not
numbers, so NaN equals NaN and 0.0 does not equal -0.0. A thread holds two chunks and its readers' buffers, whatever
the size of the tensor. torch is imported only for dtypes numpy has none for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.execute.fill import IntervalFiller, chunk_bounds
from deepspeed_affine.execute.gather import PieceReader, Words
from deepspeed_affine.execute.typed import as_numbers
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.ir.ints import coordinates
from deepspeed_affine.lowering.zero import whole_pieces
from deepspeed_affine.plan.conversion import SourceStorage, TensorFile
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.refs import StorageRef, TensorRef

__all__ = [
    "Difference",
    "IntervalComparer",
    "compare_pieces",
    "compare_tensors",
    "merged",
    "pieces_equal",
    "stored_storage",
    "stored_tensor",
]

CHUNK_BYTES = 4 << 20
BLOCK_ELEMENTS = 1 << 17
"""How many elements of two pieces are compared at a time, so that memory stays bounded."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Difference:
    """Elements of F whose bytes differ between two descriptions, measured.

    ``first`` is the lowest address of one in F, and ``values`` are the two that stand there, as text. ``max_ulp``
    counts representable values between the two most distant ones; it is None where a dtype has no such order.
    ``max_abs`` is NaN where a dtype has no distance.
    """

    first: int
    differing: int
    max_abs: float
    max_ulp: int | None
    values: tuple[str, str]

    def coordinates(self, shape: Sequence[int]) -> tuple[int, ...]:
        """``first`` as an index into a tensor of ``shape``."""
        return coordinates(self.first, shape)

    def describe(self, shape: Sequence[int], total: int) -> str:
        """The difference in words, ``total`` being the number of elements compared."""
        ulp = "" if self.max_ulp is None else f", {self.max_ulp} ulp"
        left, right = self.values
        return (
            f"first at element {self.coordinates(shape)}: {left} against {right}; {self.differing} of {total} elements "
            f"differ, by at most {self.max_abs:g}{ulp}"
        )


def merged(found: Iterable[Difference | None]) -> Difference | None:
    """What differences of disjoint parts of one tensor are together; None where there is none."""
    parts = [part for part in found if part is not None]
    if not parts:
        return None
    first = min(parts, key=lambda part: part.first)
    ulps = [part.max_ulp for part in parts]
    return Difference(
        first.first,
        sum(part.differing for part in parts),
        float(np.max([part.max_abs for part in parts])),
        None if None in ulps else max(ulp for ulp in ulps if ulp is not None),
        first.values,
    )


class IntervalComparer:
    """Compares intervals of one tensor described twice; cheap to make, shared between threads.

    Both descriptions have one dtype and one number of elements, and their pieces cover every interval that is asked.
    """

    def __init__(
        self, left: TensorFile, left_reader: PieceReader, right: TensorFile, right_reader: PieceReader
    ) -> None:
        if left.dtype != right.dtype or left.numel != right.numel:
            raise PolicyError(
                f"parameter {left.param!r}, state {left.state!r}: {left.numel} elements of {left.dtype} cannot be "
                f"compared with {right.numel} of {right.dtype}; both must be the same."
            )
        self.task = left
        self._left = IntervalFiller(left, left_reader)
        self._right = IntervalFiller(right, right_reader)

    def compare(self, start: int, stop: int) -> Difference | None:
        """The difference within F's addresses ``[start, stop)``, None where all bytes are equal."""
        sides = []
        for side, filler in enumerate((self._left, self._right)):
            words = filler.words(_buffer(side, (stop - start) * self.task.itemsize), stop - start)
            filler.fill(start, stop, words)
            sides.append(words)
        left, right = sides
        if np.array_equal(_widest(left), _widest(right)):
            return None
        per = len(left) // (stop - start)
        left, right = (words if per == 1 else words.reshape(-1, per) for words in sides)
        return _measured(left, right, self.task.dtype, lambda unequal: start + np.flatnonzero(unequal))


def compare_tensors(
    pairs: Sequence[tuple[TensorFile, TensorFile]],
    left: PieceReader,
    right: PieceReader,
    *,
    workers: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> list[Difference | None]:
    """For every pair its difference, in order; each pair's pieces name storages of ``left`` and of ``right``.

    ``advance`` is told the bytes compared, from any thread.
    """
    comparers = [IntervalComparer(one, left, other, right) for one, other in pairs]

    def intervals() -> Iterator[tuple[int, int, int]]:
        for index, (task, _) in enumerate(pairs):
            for start, stop in chunk_bounds(task, max(1, chunk_bytes // max(1, task.itemsize))):
                yield index, start, stop

    def compare(interval: tuple[int, int, int]) -> tuple[int, Difference | None]:
        index, start, stop = interval
        found = comparers[index].compare(start, stop)
        advance((stop - start) * comparers[index].task.itemsize)
        return index, found

    parts: dict[int, list[Difference]] = {}
    with ThreadPoolExecutor(workers) as pool:
        for index, found in pool.map(compare, intervals()):
            if found is not None:
                parts.setdefault(index, []).append(found)
    return [merged(parts.get(index, ())) for index in range(len(pairs))]


def compare_pieces(
    pairs: Iterable[tuple[AffinePiece, AffinePiece]], left: PieceReader, right: PieceReader
) -> Difference | None:
    """The difference over pairs of pieces of equal shape whose k-th elements are the same element of F.

    Stored elements are compared as they are, whatever their scale. Addresses in F are those of the left pieces.
    """
    return merged(_blocks_differ(pair, left, right) for pair in pairs)


def pieces_equal(pairs: Iterable[tuple[AffinePiece, AffinePiece]], left: PieceReader, right: PieceReader) -> bool:
    """Whether all bytes are equal over pairs of pieces of equal shape; stops at the first difference."""
    return all(np.array_equal(left.take(block), right.take(other)) for pair in pairs for block, other in _blocks(*pair))


def stored_tensor(ref: TensorRef, index: int, *, param: str = "", state: str = "") -> TensorFile:
    """A tensor that lies in a file as it is, described as the plan of a file would be; ``index`` is its storage's.

    An expanded axis repeats one stored element and counts once.
    """
    shape = tuple(
        1 if stride == 0 and extent else extent for extent, stride in zip(ref.shape, ref.strides, strict=True)
    )
    once = TensorRef(ref.storage, ref.offset, shape, ref.strides)
    return TensorFile(
        path=ref.storage.path,
        param=param,
        state=state,
        dtype=ref.dtype,
        itemsize=item_size(ref.dtype),
        shape=shape,
        map_shape=shape,
        entries=None,
        tensor_key="",
        pieces=whole_pieces(once, index),
    )


def stored_storage(ref: StorageRef) -> SourceStorage:
    """``ref`` as a reader of pieces lists it."""
    return SourceStorage(ref.path, ref.key, ref.dtype, ref.numel, ref.byte_offset, ref.nbytes, ref.crc32)


def _blocks_differ(pair: tuple[AffinePiece, AffinePiece], left: PieceReader, right: PieceReader) -> Difference | None:
    (index,) = pair[0].locations
    dtype = left.storage(index).dtype
    return merged(
        _measured(left.take(block), right.take(other), dtype, partial(_addresses, block))
        for block, other in _blocks(*pair)
    )


def _blocks(left: AffinePiece, right: AffinePiece) -> Iterator[tuple[AffinePiece, AffinePiece]]:
    """The pair cut along its first axes into blocks of bounded size, in order."""
    if left.numel <= BLOCK_ELEMENTS:
        yield left, right
        return
    rows = max(1, BLOCK_ELEMENTS * left.shape[0] // left.numel)
    for start in range(0, left.shape[0], rows):
        count = min(rows, left.shape[0] - start)
        block, other = _rows(left, start, count), _rows(right, start, count)
        if count == 1:
            yield from _blocks(block, other)
        else:
            yield block, other


def _rows(piece: AffinePiece, start: int, rows: int) -> AffinePiece:
    """``rows`` of the first axis from ``start`` on; a single one loses the axis."""
    kept = 0 if rows > 1 else 1
    return AffinePiece(
        shape=(rows, *piece.shape[1:])[kept:],
        source_offset=piece.source_offset + start * piece.source_strides[0],
        source_strides=piece.source_strides[kept:],
        dest_offset=piece.dest_offset + start * piece.dest_strides[0],
        dest_strides=piece.dest_strides[kept:],
        locations=piece.locations,
        scale=piece.scale,
    )


def _addresses(piece: AffinePiece, unequal: Mask) -> npt.NDArray[np.int64]:
    """The addresses in F of the elements that are marked, in the order in which a mask picks them."""
    if not piece.shape:
        return np.array([piece.source_offset], dtype=np.int64)
    places: npt.NDArray[np.int64] = np.argwhere(unequal.reshape(piece.shape)) @ np.array(
        piece.source_strides, dtype=np.int64
    )
    return places + piece.source_offset


_local = threading.local()


def _buffer(side: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """This thread's buffer for one side, kept for the next interval."""
    kept: dict[int, npt.NDArray[np.uint8]] = _local.__dict__.setdefault("buffers", {})
    if side not in kept or len(kept[side]) < nbytes:
        kept[side] = np.empty(nbytes, np.uint8)
    return kept[side]


def _widest(words: Words) -> Words:
    return words.view(np.uint64) if words.nbytes % 8 == 0 else words


def _measured(
    left: Words, right: Words, dtype: str, addresses: Callable[[Mask], npt.NDArray[np.int64]]
) -> Difference | None:
    unequal: Mask = np.asarray(np.not_equal(left, right))
    if item_size(dtype) > left.itemsize:
        # An element wider than a word differs where any of its words does.
        unequal = np.asarray(unequal.any(axis=-1))
    if not unequal.any():
        return None
    ours, theirs = left[unequal], right[unequal]
    found = addresses(unequal)
    lowest = int(np.argmin(found))
    max_abs, max_ulp = _distances(ours, theirs, dtype)
    return Difference(
        int(found[lowest]),
        len(found),
        max_abs,
        max_ulp,
        (_shown(ours[lowest : lowest + 1], dtype), _shown(theirs[lowest : lowest + 1], dtype)),
    )


def _distances(left: Words, right: Words, dtype: str) -> tuple[float, int | None]:
    try:
        a, b = as_numbers(left, dtype), as_numbers(right, dtype)
    except (RuntimeError, TypeError, AttributeError):
        # A dtype that this torch stores and cannot compute with, or does not know.
        return float("nan"), None
    if a.dtype.kind in "cb":
        return float("nan"), None
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    distance[np.isnan(distance)] = np.inf
    return float(distance.max()), _max_ulp(left, right) if dtype.startswith(("float", "bfloat")) else None


def _max_ulp(left: Words, right: Words) -> int | None:
    if left.itemsize not in (2, 4):
        return None
    low = -(1 << (8 * left.itemsize - 1))

    def ordered(words: Words) -> npt.NDArray[np.int64]:
        bits = words.view(f"<i{words.itemsize}").astype(np.int64)
        return np.where(bits < 0, low - bits, bits)

    return int(np.abs(ordered(left) - ordered(right)).max())


def _shown(word: Words, dtype: str) -> str:
    try:
        value: Any = as_numbers(word, dtype).item()
    except (RuntimeError, TypeError, AttributeError):
        return f"0x{word.tobytes()[::-1].hex()}"
    # Digits enough to tell any two values of the dtype apart, and no more.
    digits = {4: 9, 2: 5, 1: 3}.get(item_size(dtype))
    return f"{value:.{digits}g}" if isinstance(value, float) and digits else repr(value)
