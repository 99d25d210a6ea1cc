"""Elements compared: where the first one differs, by how much, where it comes from, and whose fault that can be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from deepspeed_affine.commands.verify_findings import Finding, Sampled
from deepspeed_affine.commands.verify_manifest import Settings
from deepspeed_affine.commands.verify_structure import Pair, Pairs, name_of_planned
from deepspeed_affine.errors import IntegrityError
from deepspeed_affine.execute.claims import SourceSums
from deepspeed_affine.execute.compare import CHUNK_BYTES, Difference, IntervalComparer, compare_pieces, merged
from deepspeed_affine.execute.convert import ExecutionOptions, close_gaps
from deepspeed_affine.execute.fill import chunk_bounds
from deepspeed_affine.execute.progress import Progress
from deepspeed_affine.execute.pulling import run_jobs
from deepspeed_affine.execute.sampling import Sample
from deepspeed_affine.ir import AffinePiece, meet
from deepspeed_affine.plan.conversion import ConversionPlan, SourceStorage, TensorFile, overlapping_pairs
from deepspeed_affine.storage.files import ByteReader, name_of
from deepspeed_affine.storage.folder import parse_name

__all__ = ["BLOCK_BYTES", "Elements", "damaged_storages"]

BLOCK_BYTES = 1 << 20
"""What is chosen or left out together by a sample."""

GAP_BYTES = 64 << 20

Damaged = Collection[tuple[str, str]]
"""Files and keys of storages of the source."""


def damaged_storages(
    sums: SourceSums, reader: ByteReader, execution: ExecutionOptions
) -> list[tuple[SourceStorage, IntegrityError]]:
    """The storages that are not as they were saved; what of them nobody has read is read now."""
    while gaps := sums.gaps():
        parts = [
            (storage, at, min(at + GAP_BYTES, stop))
            for storage, start, stop in gaps
            for at in range(start, stop, GAP_BYTES)
        ]
        sums.add(close_gaps(parts, reader, execution))
    return sums.damaged()


class Elements:
    """The comparison of paired tensors of one output, chunk by chunk; nothing is held but a chunk of either side."""

    def __init__(self, plan: ConversionPlan, pairs: Pairs, reader: ByteReader, settings: Settings) -> None:
        self.plan = plan
        self.pairs: Sequence[Pair] = pairs.pairs
        self.settings = settings
        self._planned, self._carried, self._found = pairs.readers(plan, reader)
        self.unlike: list[tuple[Pair, Difference]] = []

    def compare_all(self) -> None:
        """``unlike`` has every pair that differs, and how."""
        total = sum(pair.left.nbytes for pair in self.pairs)
        self._compare(self._intervals(CHUNK_BYTES), total)

    def compare_some(self) -> Sampled:
        """As ``compare_all`` for blocks chosen at random; differences are those seen in them."""
        units = total = 0
        for size in self._sizes():
            units, total = units + 1, total + size
        settings = self.settings
        sample = Sample.of(units, total, seed=settings.seed, least=settings.least)
        picked = sample.pick()
        nbytes = sum(size for at, size in enumerate(self._sizes()) if at in picked)
        self._compare((each for at, each in enumerate(self._intervals(BLOCK_BYTES)) if at in picked), nbytes)
        return Sampled(sample, "block", nbytes, total)

    def _intervals(self, most_bytes: int) -> Iterator[tuple[Pair, int, int]]:
        for pair in self.pairs:
            width = pair.left.itemsize
            for start, stop in chunk_bounds(pair.left, max(1, most_bytes // width)):
                yield pair, start, stop

    def _sizes(self) -> Iterator[int]:
        return ((stop - start) * pair.left.itemsize for pair, start, stop in self._intervals(BLOCK_BYTES))

    def _compare(self, intervals: Iterator[tuple[Pair, int, int]], total: int) -> None:
        comparers: dict[int, IntervalComparer] = {}
        seen: dict[int, list[Difference]] = {}
        position = {id(pair): at for at, pair in enumerate(self.pairs)}

        def compare(comparer: IntervalComparer, pair: Pair, start: int, stop: int) -> None:
            found = comparer.compare(start, stop)
            progress.advance((stop - start) * pair.left.itemsize)
            if found is not None:
                seen.setdefault(position[id(pair)], []).append(found)

        def jobs() -> Iterator[Callable[[], None]]:
            for pair, start, stop in intervals:
                at = position[id(pair)]
                if at not in comparers:
                    comparers.clear()
                    left = self._planned if pair.carried is None else self._carried
                    comparers[at] = IntervalComparer(pair.left, left, pair.right, self._found)
                yield lambda made=comparers[at], pair=pair, start=start, stop=stop: compare(  # type: ignore[misc]
                    made, pair, start, stop
                )

        with Progress(total, len(self.pairs), shown=self.settings.progress, what="comparing") as progress:
            run_jobs(jobs(), self.settings.workers)
        found = {at: merged(parts) for at, parts in sorted(seen.items())}
        self.unlike = [(self.pairs[at], one) for at, one in found.items() if one is not None]

    def suspects(self) -> list[SourceStorage]:
        """The source's storages, whole, that the differing tensors should have come from."""
        touched = {place for pair, _ in self.unlike for place in self._origins(pair)}
        return [storage for storage in self.plan.checked_storages if (storage.file, storage.key) in touched]

    def findings(self, damaged: Damaged) -> list[Finding]:
        """What differs, for a person; where only elements of ``damaged`` storages do, nothing is decided."""
        return [self._finding(pair, difference, damaged) for pair, difference in self.unlike]

    def _finding(self, pair: Pair, difference: Difference, damaged: Damaged) -> Finding:
        name = name_of_planned(pair.planned)
        decided = True
        if any(place in damaged for place in self._origins(pair)):
            rest = self._outside(pair, damaged)
            decided, difference = rest is not None, rest or difference
        subject = f"parameter {name[0]!r}, state {name[1]!r}: " if name[0] is not None else f"{pair.place}: "
        return Finding(
            "elements",
            pair.planned.path,
            subject,
            *name,
            place=pair.place,
            difference=difference,
            shape=pair.left.shape,
            total=pair.left.numel,
            source=self._source(pair, difference.first),
            decided=decided,
        )

    def _origins(self, pair: Pair) -> set[tuple[str, str]]:
        if pair.carried is not None:
            return {(pair.carried.path, pair.carried.key)}
        task = pair.left
        if task.fill == "zero":
            return set()
        groups = [task.pieces, *(replica.pieces for replica in task.replicas if task.fill == "average")]
        used = {index for pieces in groups for piece in pieces for index in piece.locations}
        return {(self.plan.storages[index].file, self.plan.storages[index].key) for index in used}

    def _outside(self, pair: Pair, damaged: Damaged) -> Difference | None:
        """The difference in what is read from sound storages alone; None where there is none, or no telling."""
        task = pair.left
        if pair.carried is not None or task.fill != "copy":
            return None
        sound = []
        for piece in task.pieces:
            (index,) = piece.locations
            storage = self.plan.storages[index]
            if storage.dtype != task.dtype or piece.scale != 1.0:
                return None
            if (storage.file, storage.key) not in damaged:
                sound.append(piece)
        return compare_pieces(overlapping_pairs(sound, pair.right.pieces), self._planned, self._found)

    def _source(self, pair: Pair, address: int) -> str:
        """The source file, rank and element that the element of F at ``address`` should have come from."""
        if pair.carried is not None:
            return f"{_file(pair.carried.path)}, storage {pair.carried.key!r}"
        task = pair.left
        if task.fill == "zero":
            return "no file: the state was reset to zeros"
        stored = _stored_at(task, address)
        if stored is None:
            return "no file"
        storage = self._planned.storage(stored[0])
        averaged = ", averaged with its copies" if task.fill == "average" else ""
        return f"{_file(storage.file)}, storage {storage.key!r}, element {stored[1]}{averaged}"


def _stored_at(task: TensorFile, address: int) -> tuple[int, int] | None:
    element = AffinePiece((1,), address, (1,), 0, (1,), (0,))
    for piece in task.pieces:
        if piece.numel and piece.source_offset <= address < piece.source_end:
            for stored, _ in meet(piece, element):
                return next(iter(stored.locations)), stored.dest_offset
    return None


def _file(path: str) -> str:
    name = name_of(path)
    parsed = parse_name(name)
    ranks = (
        []
        if parsed is None
        else [f"{axis} {rank}" for axis, rank in (("dp", parsed.dp), ("mp", parsed.mp)) if rank is not None]
    )
    return f"{name} ({', '.join(ranks)})" if ranks else name
