"""``ds_affine diff``: two folders compared, layouts by layout id and contents by bytes; nothing is written."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed_affine.commands.arguments import positive
from deepspeed_affine.commands.folders import require_path
from deepspeed_affine.commands.text import align, counted, say, size
from deepspeed_affine.errors import PolicyError

if TYPE_CHECKING:
    from deepspeed_affine.commands.diff_layouts import Layouts
    from deepspeed_affine.commands.diff_rows import Contents, Row
    from deepspeed_affine.commands.sides import Side

__all__ = ["Comparison", "add_arguments", "compare_folders", "format_comparison", "run"]

EQUAL, DIFFERENT = 0, 1
FORMAT = 1
SHOWN = 10
SHORT_ID = 12
KINDS = ("tensor", "holders", "value")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two folders compared. A part that was not asked for, or that the folders do not have, is None."""

    a: Side
    b: Side
    layouts: Layouts | None
    contents: Contents | None

    @property
    def equal(self) -> bool:
        return all(part is None or part.equal for part in (self.layouts, self.contents))

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values, for JSON; described in docs/commands.md."""
        return {
            "format": FORMAT,
            "equal": self.equal,
            "a": _side_dict(self.a),
            "b": _side_dict(self.b),
            "layouts": None if self.layouts is None else _layouts_dict(self.layouts),
            "contents": None if self.contents is None else _contents_dict(self.contents),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ds_affine diff``."""
    parser.add_argument("a", metavar="A", help="DeepSpeed checkpoint folder, or universal folder")
    parser.add_argument("b", metavar="B", help="the folder to compare it with, of either kind")
    parser.add_argument("--layouts", action="store_true", help="compare layouts only; no tensor is read")
    parser.add_argument("--contents", action="store_true", help="compare contents only")
    parser.add_argument(
        "--workers", type=positive, default=min(4, os.cpu_count() or 1), help="threads (default: %(default)s)"
    )
    parser.add_argument("--all", action="store_true", help=f"show all that differs, not the first {SHOWN} of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    """Compare and print; returns 0 when equal, 1 when different."""
    for name in ("a", "b"):
        require_path(name.upper(), getattr(args, name))
    if args.layouts and args.contents:
        raise PolicyError("--layouts and --contents: each leaves the other part out; give one, or neither for both.")
    found = compare_folders(
        args.a,
        args.b,
        layouts=not args.contents,
        contents=not args.layouts,
        workers=args.workers,
        progress=sys.stderr.isatty() and not args.json,
    )
    say(json.dumps(found.to_dict(), indent=1) if args.json else "\n".join(format_comparison(found, every=args.all)))
    return EQUAL if found.equal else DIFFERENT


def compare_folders(
    a: str, b: str, *, layouts: bool = True, contents: bool = True, workers: int = 2, progress: bool = False
) -> Comparison:
    """The folders compared: layouts by layout id, contents by bytes.

    With both asked for, layouts are compared between two checkpoints only: a universal folder is not laid out over
    ranks. Raises the errors of reading a folder that is incomplete or damaged.
    """
    # numpy is imported with these, and neither --help nor another verb waits for it.
    from deepspeed_affine.commands.diff_contents import compare_by_file, compare_by_parameter, compare_universal
    from deepspeed_affine.commands.diff_layouts import compare_layouts
    from deepspeed_affine.commands.diff_rows import Settings
    from deepspeed_affine.commands.sides import CheckpointSide, UniversalSide, open_side

    one, other = open_side(a), open_side(b)
    checkpoints = isinstance(one, CheckpointSide) and isinstance(other, CheckpointSide)
    laid_out = compare_layouts(one, other) if layouts and (checkpoints or not contents) else None
    if not contents:
        return Comparison(one, other, laid_out, None)
    settings = Settings(workers, progress)
    if isinstance(one, UniversalSide) and isinstance(other, UniversalSide):
        return Comparison(one, other, laid_out, compare_universal(one, other, settings))
    if isinstance(one, CheckpointSide) and isinstance(other, CheckpointSide):
        found = laid_out if laid_out is not None else compare_layouts(one, other)
        names = [{file.name for file in side.checkpoint.folder.files} for side in (one, other)]
        if not found.topology and names[0] == names[1] and not any(each.what == "layout" for each in found.different):
            return Comparison(one, other, laid_out, compare_by_file(one, other, settings))
    return Comparison(one, other, laid_out, compare_by_parameter(one, other, settings))


def format_comparison(found: Comparison, *, every: bool = False) -> list[str]:
    """The comparison as lines: what was compared, then every part with what differs in it."""
    most = None if every else SHOWN
    lines = align([["A", found.a.path, _kind(found.a)], ["B", found.b.path, _kind(found.b)]], indent="")
    if found.layouts is not None:
        lines += _layout_lines(found.layouts, most)
    if found.contents is not None:
        lines += _content_lines(found.contents, most)
    parts = (("layouts", found.layouts), ("contents", found.contents))
    different = [name for name, part in parts if part is not None and not part.equal]
    return [*lines, f"DIFFERENT: {' and '.join(different)}" if different else "equal"]


def _kind(side: Side) -> str:
    from deepspeed_affine.commands.diff_layouts import topology

    degrees = topology(side)
    if not degrees:
        return "universal"
    return ", ".join(f"ZeRO-{n}" if key == "zero_stage" else f"{key.upper()} {n}" for key, n in degrees.items())


def _layout_lines(layouts: Layouts, most: int | None) -> list[str]:
    if layouts.equal:
        return [f"layouts are equal: {counted(layouts.equal_params, 'parameter')}"]
    lines = [f"layouts differ; {counted(layouts.equal_params, 'parameter')} equal"]
    rows = [["topology", f"{key}: {a} against {b}"] for key, a, b in layouts.topology]
    rows += [
        ["different", f"{each.param}: {each.what} {_short(each.what, each.a)} against {_short(each.what, each.b)}"]
        for each in layouts.different[:most]
    ]
    rows += _more(len(layouts.different), most)
    rows += _only_rows(layouts.only_a, layouts.only_b, most)
    return lines + align(rows)


def _short(what: str, text: str) -> str:
    return text[:SHORT_ID] if what == "layout" and len(text) == 64 else text


def _content_lines(contents: Contents, most: int | None) -> list[str]:
    compared = (
        f"{counted(contents.equal_tensors, 'tensor')} and {counted(contents.equal_values, 'value')} equal, "
        f"{size(contents.nbytes)} a side compared {'file by file' if contents.method == 'files' else 'by parameter'}"
    )
    lines = [f"contents {'are equal' if contents.equal else 'differ'}: {compared}"]
    rows: list[list[str]] = []
    for kind in KINDS:
        found = [row for row in contents.rows if row.kind == kind]
        rows += [[kind, _row_text(row)] for row in found[:most]]
        rows += _more(len(found), most)
    rows += _only_rows(contents.only_a, contents.only_b, most)
    rows += [["note", note] for note in contents.notes]
    return lines + align(rows)


def _more(count: int, most: int | None) -> list[list[str]]:
    return [["", f"and {count - most} more; --all shows them"]] if most is not None and count > most else []


def _only_rows(only_a: Sequence[str], only_b: Sequence[str], most: int | None) -> list[list[str]]:
    rows = []
    for label, names in (("only in A", only_a), ("only in B", only_b)):
        rows += [[label, name] for name in names[:most]]
        if most is not None and len(names) > most:
            rows.append([label, f"and {len(names) - most} more; --all shows them"])
    return rows


def _row_text(row: Row) -> str:
    where = " ".join(part for part in (row.param, row.state) if part)
    if row.holder:
        where += f" ({row.holder})"
    place = " ".join(part for part in (row.file, row.place) if part)
    subject = f"{where}{' in ' if where and place else ''}{place}"
    note = f"; {row.note}" if row.note else ""
    if row.difference is not None:
        return f"{subject}: {row.difference.describe(row.shape, row.total)}{note}"
    if row.kind == "holders":
        return str(row.note)
    if row.a is None or row.b is None:
        return f"{subject}: only in {'A' if row.b is None else 'B'}, {row.a or row.b}"
    return f"{subject}: {row.a} against {row.b}"


def _side_dict(side: Side) -> dict[str, Any]:
    from deepspeed_affine.commands.diff_layouts import topology

    return {"folder": side.path, "kind": side.kind, "topology": topology(side) or None}


def _layouts_dict(layouts: Layouts) -> dict[str, Any]:
    return {
        "equal": layouts.equal,
        "topology": [{"key": key, "a": a, "b": b} for key, a, b in layouts.topology],
        "only_a": layouts.only_a,
        "only_b": layouts.only_b,
        "different": [{"param": each.param, "what": each.what, "a": each.a, "b": each.b} for each in layouts.different],
        "equal_parameters": layouts.equal_params,
    }


def _contents_dict(contents: Contents) -> dict[str, Any]:
    return {
        "equal": contents.equal,
        "method": contents.method,
        "only_a": contents.only_a,
        "only_b": contents.only_b,
        "different": [_row_dict(row) for row in contents.rows],
        "equal_tensors": contents.equal_tensors,
        "equal_values": contents.equal_values,
        "bytes": contents.nbytes,
        "notes": contents.notes,
    }


def _row_dict(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": row.kind,
        "param": row.param,
        "state": row.state,
        "holder": row.holder,
        "file": row.file,
        "place": row.place,
        "a": row.a,
        "b": row.b,
        "note": row.note,
    }
    difference = row.difference
    if difference is not None:
        far = difference.max_abs
        found |= {
            "shape": list(row.shape),
            "first": list(difference.coordinates(row.shape)),
            "differing": difference.differing,
            "compared": row.total,
            # JSON has no spelling for these two.
            "max_abs": far if math.isfinite(far) else str(far),
            "max_ulp": difference.max_ulp,
            "a": difference.values[0],
            "b": difference.values[1],
        }
    return found
