"""Rows of an encoded matrix as an object of their own: spans are cut, and no code is repacked or decoded."""

from __future__ import annotations

from deepspeed_affine.ninfer.decode import Fetch
from deepspeed_affine.ninfer.encode import Region, join
from deepspeed_affine.ninfer.floats import U8
from deepspeed_affine.ninfer.layouts import Geometry

__all__ = ["slice_rows"]


def slice_rows(geometry: Geometry, fetch: Fetch, first: int, stop: int) -> tuple[Geometry, U8]:
    """The geometry and the bytes of rows ``[first, stop)`` alone; they decode to the same values.

    Rows are cut in steps of ``geometry.row_unit``, and of stacked matrices within one or as whole ones. Only their own
    spans are fetched.
    """
    alone = geometry.rows_alone(first, stop)
    regions: list[Region] = []
    for span in geometry.row_spans(first, stop):
        data = fetch(span.offset, span.nbytes)
        if span.name == "divisors":
            matrix = geometry.rows // geometry.divisors
            data = data[4 * (first // matrix) : 4 * (first // matrix + alone.divisors)]
        regions.append((alone.plane(span.name).offset, data))
    return alone, join(alone, iter(regions))
