"""Which parameters the differing bytes of two corresponding files belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from deepspeed_affine.commands.diff_rows import FoundTensor, Row, tensor_row
from deepspeed_affine.commands.sides import CheckpointSide
from deepspeed_affine.errors import AffineError
from deepspeed_affine.execute.compare import Difference, compare_pieces, merged
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.lowering.states import shape_numel
from deepspeed_affine.plan.conversion import AGAIN, ConversionPlan, TensorFile
from deepspeed_affine.storage.files import ByteReader, name_of

__all__ = ["PieceNames"]


class PieceNames:
    """Says which parameters the differing elements of flat partitions belong to."""

    def __init__(self, a: CheckpointSide, b: CheckpointSide, reader: ByteReader) -> None:
        self.plans: tuple[ConversionPlan, ConversionPlan] | None
        try:
            self.plans = (a.plan, b.plan)
        except AffineError:
            # What cannot be converted can still be compared; its rows name files.
            self.plans = None
            return
        self.left, self.right = (PieceReader(plan.storages, reader) for plan in self.plans)
        self.shapes = {key: task.map_shape for key, task in a.tensors.files.items()}
        self.by_storage: dict[tuple[str, str], list[tuple[TensorFile, str, list[tuple[AffinePiece, AffinePiece]]]]]
        self.by_storage = defaultdict(list)
        others = {(task.param, task.state): task for task in self.plans[1].tensors}
        for task in self.plans[0].tensors:
            other = others.get((task.param, task.state))
            if other is not None:
                self._index(task, other)

    def _index(self, task: TensorFile, other: TensorFile) -> None:
        """Pieces that correspond, by the storage they lie in. Where slices lie elsewhere nothing corresponds."""
        held = [("", task.pieces, other.pieces)]
        if len(task.replicas) == len(other.replicas):
            pairs = zip(task.replicas, other.replicas, strict=True)
            # A copy within one shard is among the pieces of that shard already.
            held += [(one.label, one.pieces, two.pieces) for one, two in pairs if not one.label.endswith(AGAIN)]
        for label, ours, theirs in held:
            if list(map(_geometry, ours)) != list(map(_geometry, theirs)):
                continue
            for piece, twin in zip(ours, theirs, strict=True):
                (index,) = piece.locations
                storage = self.left.storage(index)
                entries = self.by_storage[storage.file, storage.key]
                if not entries or entries[-1][0] is not task or entries[-1][1] != label:
                    entries.append((task, label, []))
                entries[-1][2].append((piece, twin))

    def rows(self, found: Sequence[tuple[FoundTensor, Difference]]) -> list[Row]:
        if self.plans is None:
            return [tensor_row(one, difference) for one, difference in found]
        named: dict[tuple[str, str, str], list[Difference]] = defaultdict(list)
        totals: dict[tuple[str, str, str], int] = {}
        files: dict[tuple[str, str, str], str] = {}
        rest: list[Row] = []
        explained: dict[tuple[str, str], int] = {}
        for one, difference in found:
            place = (one.pair.a.storage.path, one.pair.a.storage.key)
            if place not in explained:
                explained[place] = 0
                for task, label, pairs in self.by_storage.get(place, ()):
                    inside = compare_pieces(pairs, self.left, self.right)
                    if inside is not None:
                        explained[place] += inside.differing
                        named[task.param, task.state, label].append(inside)
                        totals[task.param, task.state, label] = shape_numel(task.map_shape)
                        files.setdefault((task.param, task.state, label), name_of(place[0]))
            unnamed = difference.differing - explained[place]
            if unnamed > 0:
                rest.append(tensor_row(one, difference, unnamed if explained[place] else 0))
        rows = [
            Row(
                "tensor",
                *key[:2],
                holder=key[2] or None,
                file=files[key],
                difference=merged(parts),
                shape=self.shapes[key[:2]],
                total=totals[key],
            )
            for key, parts in named.items()
        ]
        return rows + rest


def _geometry(piece: AffinePiece) -> tuple[Any, ...]:
    return piece.shape, piece.source_offset, piece.source_strides, piece.dest_offset, piece.dest_strides
