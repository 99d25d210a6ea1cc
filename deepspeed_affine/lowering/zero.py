"""ZeRO as a second map: a shard, flattened, is cut over the data-parallel ranks into stored runs.

ZeRO knows nothing of a parameter's meaning. A rank's tensor-parallel shard is laid out flat, beside other
parameters and with alignment padding between and after them, and every data-parallel rank stores an interval
of that flat buffer. The image of one parameter's shard is therefore a one-dimensional map from shard
addresses to addresses of storages, partial over the storages because padding and neighbours lie there too.

Composed with the tensor-parallel map it leads from file bytes straight to the full tensor (design, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Protocol

from deepspeed_affine.errors import CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.ir.ints import row_major_strides

__all__ = ["Fragment", "StoredTensor", "check_consecutive", "fragment_pieces", "whole_pieces", "zero3_interval"]


MOST_REPETITIONS = 1024
"""A module's masks and positions are expanded a few times; a tensor repeated more often was not meant to be stored."""


class StoredTensor(Protocol):
    """What lowering needs to know of a tensor in a file: geometry in elements of its storage."""

    @property
    def offset(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Fragment:
    """``numel`` elements of a stored flat tensor, from element ``start`` on: one run of a shard.

    ``tensor`` is one-dimensional; ``rank`` is the data-parallel rank that stored it, which orders fragments.
    """

    tensor: StoredTensor
    start: int
    numel: int
    rank: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.numel < 0:
            raise CheckpointFormatError(
                f"a stored fragment starts at element {self.start} with {self.numel} elements; both must be at "
                "least 0. The optimizer file's slice table is damaged: save the checkpoint again.",
                rank=self.rank,
            )


def fragment_pieces(
    fragments: Iterable[tuple[Fragment, int]], shard_numel: int, *, param: str, rank: int, state: str = "fp32"
) -> tuple[AffinePiece, ...]:
    """The fragments, in data-parallel order, tile the flat shard; the pieces say where each run is stored.

    ``fragments`` pairs each fragment with the id of the storage it lies in, which becomes the piece's location.
    Source side: shard address. Destination side: storage address. Both in elements.

    Raises CheckpointFormatError when the fragments do not add up to the shard, or one leaves its tensor.
    """
    pieces: list[AffinePiece] = []
    address = 0
    for fragment, storage in fragments:
        tensor = fragment.tensor
        stored = _flat_numel(tensor, param, rank)
        if fragment.start + fragment.numel > stored:
            raise CheckpointFormatError(
                f"parameter {param!r}, state {state!r}: tensor-parallel rank {rank}, data-parallel rank "
                f"{fragment.rank} records "
                f"elements [{fragment.start}, {fragment.start + fragment.numel}) of a stored partition of "
                f"{stored} elements. The optimizer file is damaged, or its optimizer keeps no element-wise state: use "
                "another checkpoint, or another optimizer.",
                param=param,
                rank=rank,
            )
        if fragment.numel == 0:
            continue
        stride = tensor.strides[0]
        if stride == 0 and fragment.numel > 1:
            raise CheckpointFormatError(
                f"parameter {param!r}, state {state!r}: the partition stored by data-parallel rank {fragment.rank} "
                f"repeats one element {stored} times; a partition with elements of its own is expected. The optimizer "
                "file is damaged: use another checkpoint.",
                param=param,
                rank=rank,
            )
        pieces.append(
            AffinePiece(
                shape=(fragment.numel,),
                source_offset=address,
                source_strides=(1,),
                dest_offset=tensor.offset + fragment.start * stride,
                dest_strides=(stride,),
                locations=(storage,),
            )
        )
        address += fragment.numel
    if address != shard_numel:
        raise CheckpointFormatError(
            f"parameter {param!r}, state {state!r}: the fragments of tensor-parallel rank {rank} hold {address} "
            f"elements, its recorded shape has {shard_numel}. A rank's optimizer file is missing or belongs to another "
            "save: check that every file of the folder comes from the same step.",
            param=param,
            rank=rank,
        )
    return tuple(pieces)


def check_consecutive(fragments: Sequence[Fragment], *, param: str, label: str) -> None:
    """The fragments of one ZeRO-1 or ZeRO-2 shard, in data-parallel order, are one run cut at partition ends.

    Files that stand in each other's place have fragments that fit together in number and not in place: a shard that
    goes on in the next partition must reach the end of its own, and begin at the next one's first element.
    """
    held = [fragment for fragment in fragments if fragment.numel]
    for before, after in pairwise(held):
        reached, size = before.start + before.numel, _flat_numel(before.tensor, param, before.rank)
        if after.rank == before.rank + 1 and reached == size and not after.start:
            continue
        raise CheckpointFormatError(
            f"parameter {param!r}: {label} holds it up to element {reached} of {size} in data-parallel rank "
            f"{before.rank}'s partition and from element {after.start} on in rank {after.rank}'s; a slice that goes on "
            "reaches the end of one partition and begins the next. Optimizer files of two ranks were exchanged or "
            "doubled, or come from different saves: copy each under its own name.",
            param=param,
            rank=after.rank,
        )


def whole_pieces(tensor: StoredTensor, storage: int, *, param: str = "") -> tuple[AffinePiece, ...]:
    """Pieces that lead from a shard's C-order addresses to the stored tensor: one, whatever its strides.

    Where it was expanded, so that one stored element stands for several, one for every repetition.
    Raises UnsupportedLayoutError where that would be too many.
    """
    strides = row_major_strides(tensor.shape)
    repeated = [axis for axis, extent in enumerate(tensor.shape) if extent > 1 and tensor.strides[axis] == 0]
    count = prod(tensor.shape[axis] for axis in repeated)
    if count > MOST_REPETITIONS:
        raise UnsupportedLayoutError(
            f"parameter {param!r}: its tensor of shape {tensor.shape} was saved expanded, each stored element for "
            f"{count}; at most {MOST_REPETITIONS} are expected. Store it as it is: tensor.contiguous() before saving.",
            param=param or None,
        )
    shape = tuple(1 if axis in repeated else extent for axis, extent in enumerate(tensor.shape))
    starts = (range(tensor.shape[axis]) if axis in repeated else (0,) for axis in range(len(tensor.shape)))
    return tuple(
        AffinePiece(
            shape=shape,
            source_offset=sum(index * stride for index, stride in zip(start, strides, strict=True)),
            source_strides=strides,
            dest_offset=tensor.offset,
            dest_strides=tensor.strides,
            locations=(storage,),
        )
        for start in product(*starts)
    )


def zero3_interval(numel: int, partition_count: int, partition_rank: int) -> tuple[int, int]:
    """``(held, reserved)`` elements of one ZeRO-3 partition of a parameter.

    Every rank reserves ``ceil(numel / partition_count)`` elements; the last ones hold fewer, the rest is padding.
    """
    if partition_count < 1 or not 0 <= partition_rank < partition_count:
        raise InvalidMapError(
            f"ZeRO-3 partition rank {partition_rank} of {partition_count}: expected a rank in "
            f"[0, {partition_count}). The optimizer file's partition table is damaged."
        )
    reserved = -(-numel // partition_count)
    held = max(0, min(reserved, numel - partition_rank * reserved))
    return held, reserved


def _flat_numel(tensor: StoredTensor, param: str, rank: int) -> int:
    if len(tensor.shape) != 1:
        raise CheckpointFormatError(
            f"parameter {param!r}: the partition stored by rank {rank} has shape {tuple(tensor.shape)}; a flat "
            "one-dimensional partition is expected. This optimizer keeps its state in another form: see "
            "docs/optimizers.md.",
            param=param,
            rank=rank,
        )
    return tensor.shape[0]
