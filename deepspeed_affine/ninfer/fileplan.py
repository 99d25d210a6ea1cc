"""What an artifact's files will be, before the first is made: offsets, the split, and room for the directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.directory import Directory
from deepspeed_affine.ninfer.errors import WriterError
from deepspeed_affine.ninfer.formats import RAW_BYTES
from deepspeed_affine.ninfer.framing import HEADER_BYTES, PAGE, PART_START, entry_start
from deepspeed_affine.ninfer.integers import align_up, identifier, positive, shape_of
from deepspeed_affine.ninfer.json_text import write_json
from deepspeed_affine.ninfer.layouts import OBJECT_ALIGNMENT, plan_geometry
from deepspeed_affine.ninfer.records import FileRecord, ObjectRecord, ResourceObject, TensorObject

__all__ = ["FilePlan", "ResourceSpec", "TensorSpec", "part_name", "plan_files", "plan_objects", "split_payload"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written; the layout is the format's, and its place follows from the order of the objects."""

    id: str
    shape: tuple[int, ...]
    format: str
    divisors: int = 1

    def __post_init__(self) -> None:
        identifier(self.id, "An object's id")
        object.__setattr__(self, "shape", shape_of(self.shape, f"Object {shown(self.id)}: its shape"))
        positive(self.divisors, f"Object {shown(self.id)}: its divisors")
        plan_geometry(self.format, None, self.shape, self.divisors, subject=f"Object {shown(self.id)}")


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """A file to be stored, of ``nbytes`` bytes."""

    id: str
    nbytes: int

    def __post_init__(self) -> None:
        identifier(self.id, "An object's id")
        positive(self.nbytes, f"Object {shown(self.id)}: its bytes")


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The files of an artifact: the final directory, its text with the spaces that reserve its room, and the start of
    the entry's payload in bytes."""

    directory: Directory
    text: bytes
    start: int

    def file_bytes(self, number: int) -> int:
        """The exact size of file ``number``."""
        return (PART_START if number else self.start) + self.directory.files[number].payload_bytes


def plan_objects(specs: Iterable[TensorSpec | ResourceSpec]) -> list[ObjectRecord]:
    """The objects in the given order with their offsets: tensors at multiples of 256 bytes, resources right behind."""
    found: list[ObjectRecord] = []
    cursor = 0
    for spec in specs:
        if isinstance(spec, ResourceSpec):
            found.append(ResourceObject(spec.id, RAW_BYTES, cursor, spec.nbytes))
        else:
            cursor = align_up(cursor, OBJECT_ALIGNMENT)
            geometry = plan_geometry(spec.format, None, spec.shape, spec.divisors)
            found.append(
                TensorObject(
                    spec.id, spec.shape, spec.format, geometry.layout, cursor, geometry.total, divisors=spec.divisors
                )
            )
        cursor = align_up(cursor + found[-1].nbytes, 1)
    return found


def split_payload(payload_bytes: int, start: int, limit: int | None) -> list[int]:
    """The bytes of payload in each file, so that none is larger than ``limit``; without one, all are in the entry.

    ``start`` is where the entry's payload begins. Every file but the last is filled in pages of 4096 bytes.
    """
    if limit is None or start + payload_bytes <= limit:
        return [payload_bytes]
    entry, part = (limit - start) // PAGE * PAGE, (limit - PART_START) // PAGE * PAGE
    if entry <= 0 or part <= 0:
        raise WriterError(
            f"Files of at most {limit} bytes have no room for a page of payload: the entry's begins at byte {start}. "
            f"Expected a limit of at least {start + PAGE} bytes, or none."
        )
    rest = payload_bytes - entry
    full, last = divmod(rest, part)
    return [entry, *[part] * full, *([last] if last else [])]


def part_name(entry_name: str, number: int) -> str:
    """The customary name of a continuation."""
    return f"{entry_name}.part-{number:04d}"


def plan_files(
    make: Callable[[Sequence[FileRecord]], Directory],
    payload_bytes: int,
    entry_name: str,
    limit: int | None = None,
    reserve: int = 0,
) -> FilePlan:
    """The files, the directory ``make`` gives for their table, and its text, which fills the room kept for it.

    The longer the table the more room it needs and the less the entry holds, so both are planned until they agree;
    ``reserve`` is the least room for the text, in bytes.
    """
    if limit is not None:
        positive(limit, "The limit of a file's size", WriterError)
    room = 0
    wanted = reserve
    while True:
        room = max(room, align_up(HEADER_BYTES + max(wanted, 1), PAGE) - HEADER_BYTES)
        sizes = split_payload(payload_bytes, entry_start(room), limit)
        files = [FileRecord(part_name(entry_name, n) if n else None, size) for n, size in enumerate(sizes)]
        directory = make(files)
        text = write_json(directory.to_json(), "The directory")
        if len(text) <= room:
            return FilePlan(directory, text.ljust(room), entry_start(room))
        wanted = len(text)
