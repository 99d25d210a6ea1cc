"""A rank's part of a stored full tensor, read into memory: only the bytes it needs, and F is never built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from deepspeed_affine.execute.compare import stored_storage
from deepspeed_affine.execute.gather import PieceReader, Words, piece_view, word_of
from deepspeed_affine.execute.typed import as_tensor, convert_dtype
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, meet
from deepspeed_affine.lowering.zero import whole_pieces
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.refs import TensorRef

if TYPE_CHECKING:
    import torch

__all__ = ["ShardPart", "shard_parts", "wanted_pieces"]


class ShardPart:
    """Elements ``[start, start + numel)`` of rank ``rank``'s flattened shard, as pieces of the stored F.

    ``covered`` of them have a source; the others are rows F does not have (vocabulary padding of the target). The cost
    is near-linear in pieces, whatever the number of elements. Where F is stored in several tensors of one dtype,
    ``stored`` lists them and ``pieces`` lead from F to their storages, the location saying to which.
    """

    def __init__(
        self,
        stored: TensorRef | Sequence[TensorRef],
        layout: ParamAffineMap,
        rank: int,
        start: int,
        numel: int,
        pieces: Sequence[AffinePiece] | None = None,
    ) -> None:
        self.tensors = (stored,) if isinstance(stored, TensorRef) else tuple(stored)
        self.numel = numel
        held = whole_pieces(self.stored, 0) if pieces is None else pieces
        self.parts = shard_parts(layout.pieces_by_rank[rank], held, start, numel)
        self.covered = sum(target.numel for _, target, _ in self.parts)

    @property
    def stored(self) -> TensorRef:
        """The stored tensor, the first of several."""
        return self.tensors[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored tensor's."""
        return self.stored.shape

    @property
    def path(self) -> str:
        """The file it is stored in."""
        return self.stored.storage.path

    @property
    def nbytes(self) -> int:
        """How many bytes of F it needs."""
        return self.covered * item_size(self.stored.dtype)

    def fill(self, out: torch.Tensor, reader: ByteReader, *, power: int = 1) -> None:
        """``out`` (flat, contiguous, ``numel`` elements, any device and dtype) holds the elements, times the
        ``power``-th power of each piece's scale; those without a source are zero."""
        import torch

        if self.covered < self.numel:
            out.zero_()
        if not self.covered:
            return
        name = str(out.dtype).removeprefix("torch.")
        if out.device.type != "cpu" or not out.is_contiguous():
            staged = torch.zeros(self.numel, dtype=out.dtype)
            self.fill(staged, reader, power=power)
            out.copy_(staged)
            return
        word, _ = word_of(item_size(name))
        memory: Words = out.detach().view(torch.uint8).numpy().view(word)
        pieces = PieceReader(tuple(stored_storage(tensor.storage) for tensor in self.tensors), reader)
        for source, target, scale in self.parts:
            view = piece_view(memory, target, item_size(name))
            if name == self.stored.dtype:
                pieces.fill(source, view)
            else:
                convert_dtype(pieces.take(source), self.stored.dtype, name, view)
            if scale != 1.0 and power:
                as_tensor(view, name).mul_(scale**power)


def shard_parts(
    layout: Sequence[AffinePiece], storage: Sequence[AffinePiece], start: int, numel: int
) -> list[tuple[AffinePiece, AffinePiece, float]]:
    """``(source, target, scale)``: where elements of a shard's interval lie in storage (the first's dest side) and
    where in the interval they belong (the second's dest side), of one shape.

    ``layout`` leads from F to the shard, ``storage`` from F to where F is stored.
    """
    return [
        (source, target, target.scale)
        for wanted in wanted_pieces(layout, start, numel)
        for where in storage
        for source, target in meet(where, wanted)
    ]


def wanted_pieces(layout: Sequence[AffinePiece], start: int, numel: int) -> Iterator[AffinePiece]:
    """What of F lies in an interval of a flattened shard, and where in the interval it goes, with the shard's scale.

    ``layout`` leads from F to the shard.
    """
    window = AffinePiece((numel,), start, (1,), 0, (1,), (0,))
    for piece in layout:
        if not piece.numel or piece.dest_end <= start or start + numel <= piece.dest_offset:
            continue
        for held, placed in meet(piece, window, on=("dest", "source")):
            yield AffinePiece(
                held.shape,
                held.source_offset,
                held.source_strides,
                placed.dest_offset,
                placed.dest_strides,
                (0,),
                piece.scale,
            )
