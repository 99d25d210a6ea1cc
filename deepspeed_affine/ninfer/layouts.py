"""The byte geometry of one encoded object: exact size, planes, and the spans that hold a range of its rows.

Everything here is integers. A geometry that exists is one its layout allows; what it does not allow is an
``EncodingError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.errors import EncodingError, ReferenceError_
from deepspeed_affine.ninfer.formats import (
    BLOCK_SCALE,
    CONTIGUOUS,
    DIRECT,
    GROUPED,
    NVFP4,
    RAW_BYTES,
    ROW_SCALE,
    ROW_SPLIT,
    layout_of_format,
)
from deepspeed_affine.ninfer.integers import MAX_RANK, align_up, elements, whole
from deepspeed_affine.ninfer.records import ObjectRecord, TensorObject

__all__ = ["OBJECT_ALIGNMENT", "Geometry", "Plane", "check_resource", "encoded_bytes", "geometry_of", "plan_geometry"]

OBJECT_ALIGNMENT = 256
"""Tensors begin at a multiple of this many bytes of the payload, planes of the object; resources begin anywhere."""
_K_UNIT = 128
_LAYOUTS = (CONTIGUOUS, ROW_SPLIT, BLOCK_SCALE, ROW_SCALE)
TILE_ROWS = 128
"""Rows whose block scales are stored together."""
_TILE_BYTES = 512
_BLOCK = 16
"""Columns that share one block scale."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of an encoded object: ``offset`` and ``nbytes`` in bytes of the object; ``row_bytes`` a row.

    For block scales a row of the plane is a tile of 128 rows of the matrix; ``divisors`` have no rows.
    """

    name: str
    offset: int
    nbytes: int
    row_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where everything of one encoded tensor lies. ``total`` is its exact size in bytes.

    ``rows`` and ``columns`` are those of a matrix; of another tensor, its first axis and the elements of all others.
    ``groups`` is the number of scales a row has in its plane, padding groups included.
    """

    format: str
    layout: str
    shape: tuple[int, ...]
    divisors: int
    rows: int
    columns: int
    groups: int
    planes: tuple[Plane, ...]
    total: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def plane(self, name: str) -> Plane:
        """The plane of that name: ``words``, ``codes``, ``base``, ``high``, ``scales`` or ``divisors``."""
        return next(plane for plane in self.planes if plane.name == name)

    @property
    def row_unit(self) -> int:
        """Rows are addressed in steps of so many: 128 where scales are stored in tiles."""
        return TILE_ROWS if self.layout == BLOCK_SCALE else 1

    def row_spans(self, first: int, stop: int) -> tuple[Plane, ...]:
        """Where rows ``[first, stop)`` lie in each plane; their codes need no repacking to stand alone.

        Both ends are multiples of ``row_unit``. For stacked matrices the divisors are all named.
        """
        unit = self.row_unit
        if not 0 <= first < stop <= self.rows or first % unit or stop % unit:
            raise ReferenceError_(
                f"Rows [{first}, {stop}) of a {self.format} tensor of shape {self.shape}; expected a nonempty range of "
                f"its {self.rows} rows in steps of {unit}."
            )
        found = []
        for plane in self.planes:
            if plane.name == "divisors":
                found.append(plane)
                continue
            step = unit if plane.name == "scales" else 1
            begin, count = first // step, (stop - first) // step
            offset = plane.offset + begin * plane.row_bytes
            found.append(Plane(plane.name, offset, count * plane.row_bytes, plane.row_bytes))
        return tuple(found)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The byte ranges between planes; they hold zeros and nothing."""
        found, end = [], 0
        for plane in self.planes:
            if plane.offset > end:
                found.append((end, plane.offset))
            end = plane.end
        return tuple(found)

    def rows_alone(self, first: int, stop: int) -> Geometry:
        """The geometry of those rows as an object of their own, of one matrix's rows if several are stacked."""
        self.row_spans(first, stop)
        divisors = self.divisors
        if divisors > 1:
            matrix = self.rows // divisors
            if first // matrix != (stop - 1) // matrix and (first % matrix or stop % matrix):
                raise EncodingError(
                    f"Rows [{first}, {stop}) cut through matrices of {matrix} stacked rows; expected rows of one "
                    "matrix, or whole matrices."
                )
            divisors = max(1, (stop - first) // matrix)
        shape = (stop - first, *self.shape[1:]) if self.shape else ()
        return plan_geometry(self.format, self.layout, shape, divisors)


def plan_geometry(
    format_name: str, layout: str | None, shape: Sequence[int], divisors: int = 1, *, subject: str = "a tensor"
) -> Geometry:
    """The geometry of a tensor of that format, layout and shape; without a layout, the one its format has."""
    home = layout_of_format(format_name, subject)
    layout = home if layout is None else layout
    if layout not in _LAYOUTS:
        raise EncodingError(f"{subject}: layout {shown(layout)} is not known; expected one of {', '.join(_LAYOUTS)}.")
    if layout != home:
        raise EncodingError(f"{subject}: layout {layout} cannot hold format {format_name}; expected {home}.")
    divisors = whole(divisors, f"{subject}: its divisors", EncodingError)
    if divisors < 1:
        raise EncodingError(f"{subject}: has {divisors} divisors; expected one or more.")
    if divisors != 1 and format_name != NVFP4:
        raise EncodingError(f"{subject}: has {divisors} divisors in format {format_name}; only nvfp4 may have several.")
    shape = tuple(whole(extent, f"{subject}: an extent", EncodingError) for extent in shape)
    if min(shape, default=1) < 1:
        raise EncodingError(f"{subject}: has shape {shape}; expected one element or more.")
    if len(shape) > MAX_RANK:
        raise EncodingError(f"{subject}: has {len(shape)} axes; expected at most {MAX_RANK}.")
    count = elements(shape, f"{subject}: its shape")
    if layout == CONTIGUOUS:
        size = align_up(count * DIRECT[format_name], 1)
        rows = shape[0] if shape else 1
        words = Plane("words", 0, size, size // rows)
        return Geometry(format_name, layout, shape, 1, rows, count // rows, 0, (words,), size)
    if len(shape) != 2:
        raise EncodingError(f"{subject}: has shape {shape} in layout {layout}; expected a matrix.")
    if layout == ROW_SPLIT:
        return _row_split(format_name, shape)
    if layout == ROW_SCALE:
        return _row_scale(format_name, shape)
    return _block_scale(shape, divisors, subject)


def geometry_of(record: TensorObject) -> Geometry:
    """The geometry of a stored tensor, whose record must agree with it in size and alignment."""
    subject = f"Object {shown(record.id)}"
    found = plan_geometry(record.format, record.layout, record.shape, record.divisors, subject=subject)
    if record.nbytes != found.total:
        raise EncodingError(
            f"{subject}: has {record.nbytes} bytes; a {record.format} tensor of shape {record.shape} takes exactly "
            f"{found.total}. The record is damaged or of another version of the layout."
        )
    if record.offset % OBJECT_ALIGNMENT:
        raise EncodingError(
            f"{subject}: begins at byte {record.offset} of the payload; expected a multiple of {OBJECT_ALIGNMENT}."
        )
    return found


def check_resource(record: ObjectRecord) -> None:
    """Return if the resource's bytes are its value; another encoding is an ``EncodingError``."""
    encoding = getattr(record, "encoding", None)
    if encoding != RAW_BYTES:
        raise EncodingError(
            f"Object {shown(record.id)}: encoding {shown(encoding)} is not known; expected {RAW_BYTES}."
        )


def encoded_bytes(format_name: str, shape: Sequence[int], divisors: int = 1) -> int:
    """The exact size in bytes of a tensor encoded in that format."""
    return plan_geometry(format_name, None, shape, divisors).total


def _row_split(name: str, shape: tuple[int, ...]) -> Geometry:
    form = GROUPED[name]
    rows, columns = shape
    groups = align_up(columns, _K_UNIT) // form.group
    base = Plane("base", 0, rows * groups * form.base_bytes, groups * form.base_bytes)
    at = align_up(base.end, OBJECT_ALIGNMENT)
    planes = [base]
    if form.high_bytes:
        high = Plane("high", at, rows * groups * form.high_bytes, groups * form.high_bytes)
        planes.append(high)
        at = align_up(high.end, OBJECT_ALIGNMENT)
    scales = Plane("scales", at, 2 * rows * groups, 2 * groups)
    total = align_up(scales.end, 1)
    return Geometry(name, ROW_SPLIT, shape, 1, rows, columns, groups, (*planes, scales), total)


def _row_scale(name: str, shape: tuple[int, ...]) -> Geometry:
    rows, columns = shape
    codes = Plane("codes", 0, rows * columns, columns)
    scales = Plane("scales", align_up(codes.end, OBJECT_ALIGNMENT), 2 * rows, 2)
    total = align_up(scales.end, 1)
    return Geometry(name, ROW_SCALE, shape, 1, rows, columns, 1, (codes, scales), total)


def _block_scale(shape: tuple[int, ...], divisors: int, subject: str) -> Geometry:
    rows, columns = shape
    if rows % TILE_ROWS or columns % 64:
        raise EncodingError(
            f"{subject}: has shape {shape} in layout {BLOCK_SCALE}; expected rows in multiples of {TILE_ROWS} and "
            "columns in multiples of 64."
        )
    if rows % divisors or (divisors > 1 and rows // divisors % TILE_ROWS):
        raise EncodingError(
            f"{subject}: stacks {divisors} matrices in {rows} rows; expected each to have the same multiple of "
            f"{TILE_ROWS} rows."
        )
    codes = Plane("codes", 0, rows * columns // 2, columns // 2)
    scales = Plane(
        "scales", align_up(codes.end, OBJECT_ALIGNMENT), rows * columns // _BLOCK, columns // 64 * _TILE_BYTES
    )
    stack = Plane("divisors", scales.end, 4 * divisors, 0)
    total = align_up(stack.end, 1)
    return Geometry(
        NVFP4, BLOCK_SCALE, shape, divisors, rows, columns, columns // _BLOCK, (codes, scales, stack), total
    )
