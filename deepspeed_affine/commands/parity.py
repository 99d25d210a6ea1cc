"""``ds_affine parity``: DeepSpeed's converter and ours on the same folder, compared file by file."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_affine.commands.arguments import positive
from deepspeed_affine.commands.folders import require_path
from deepspeed_affine.errors import AffineError, CheckpointFormatError, PolicyError
from deepspeed_affine.parity import FrozenSlices, ParityReport, ParityRow, Verdict, compare_universal

__all__ = ["ParityOptions", "ParityRun", "add_arguments", "format_table", "run", "run_parity"]

EQUAL, DIFFERENT, COULD_NOT = 0, 1, 2
OURS, STOCK, INPUT = "affine", "deepspeed", "input"


@dataclass(frozen=True, slots=True)
class ParityOptions:
    """How both converters are run. ``extra`` goes to ours alone, for choices DeepSpeed does not offer."""

    strict: bool = True
    inject_missing_state: bool = False
    workers: int = 1
    extra: tuple[str, ...] = ()
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise PolicyError(f"workers: {self.workers}; expected at least 1.")


@dataclass(frozen=True, slots=True)
class ParityRun:
    """Both converters' ends, and the comparison if both reached theirs."""

    report: ParityReport | None
    version: str
    stock_error: str = ""
    our_error: str = ""
    stock_seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        if self.report is None:
            return COULD_NOT
        return EQUAL if self.report.equal else DIFFERENT

    def to_dict(self) -> dict[str, Any]:
        """The run as plain values, for JSON."""
        return {
            "deepspeed": self.version,
            "deepspeed_error": self.stock_error,
            "affine_error": self.our_error,
            "deepspeed_seconds": round(self.stock_seconds, 3),
            "exit_code": self.exit_code,
            "report": None if self.report is None else self.report.to_dict(),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ds_affine parity``."""
    parser.add_argument("--input_folder", required=True, help="DeepSpeed checkpoint folder, the one with the .pt files")
    parser.add_argument("--workdir", help="new folder for both outputs, which are kept; default: a temporary one")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="as in ds_to_universal, for both")
    parser.add_argument("--inject_missing_state", action="store_true", help="as in ds_to_universal, for both")
    parser.add_argument("--workers", type=positive, default=1, help="workers of each converter (default: 1)")
    parser.add_argument("--all", action="store_true", help="list the equal files too")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")


def run(args: argparse.Namespace) -> int:
    """Compare and print; returns 0 when equal, 1 when different, 2 when one of the converters failed."""
    require_path("--input_folder", args.input_folder)
    if args.workdir is not None:
        require_path("--workdir", args.workdir)
    options = ParityOptions(args.strict, args.inject_missing_state, args.workers)
    if args.workdir is None:
        from deepspeed_affine.hooks.stock import plain_workdir

        workdir = Path(plain_workdir())
        try:
            result = run_parity(args.input_folder, workdir, options)
        finally:
            shutil.rmtree(workdir, ignore_errors=True)
    else:
        workdir = Path(os.path.abspath(args.workdir))
        if workdir.exists() and any(workdir.iterdir()):
            raise PolicyError(f"{workdir}: exists and is not empty; --workdir wants a new folder.")
        result = run_parity(args.input_folder, workdir, options)
    print(json.dumps(result.to_dict(), indent=1) if args.json else format_table(result, every=args.all))
    return result.exit_code


def run_parity(
    input_folder: str | os.PathLike[str], workdir: str | os.PathLike[str], options: ParityOptions | None = None
) -> ParityRun:
    """Both converters have run on ``input_folder``, and every file they wrote has been compared.

    Their outputs are ``workdir/affine/universal`` and ``workdir/deepspeed/universal``. A converter that fails is
    reported in the result and not raised.
    """
    from deepspeed_affine.hooks import stock

    chosen = options or ParityOptions()
    source, work = os.path.abspath(input_folder), Path(workdir)
    if not os.path.isdir(source):
        raise CheckpointFormatError(f"{source}: is not a folder; expected a DeepSpeed checkpoint folder.", file=source)
    work.mkdir(parents=True, exist_ok=True)
    plain = Path(tempfile.mkdtemp(prefix="input_", dir=work)) / INPUT
    nested = stock.plain_folder(source, plain)
    frozen = FrozenSlices.of(plain)
    theirs, ours = work / STOCK / "universal", work / OURS / "universal"
    for folder in (theirs, ours):
        folder.parent.mkdir(parents=True, exist_ok=True)
    ran = _stock(plain, theirs, chosen)
    rows = [_nested(source, name) for name in nested if any(Path(source, name).rglob("*.pt"))]
    if not ran.ok and frozen.shapes and chosen.strict:
        # A frozen parameter uses none of its patterns, and strict stops at the first pattern unused.
        aborted = ran.message
        shutil.rmtree(theirs, ignore_errors=True)
        ran = _stock(plain, theirs, replace(chosen, strict=False))
        detail = f"DeepSpeed stops unless --no_strict: {aborted}"
        rows.append(ParityRow("(conversion)", Verdict.EXPECTED, detail, "frozen_under_autotp"))
    shutil.rmtree(plain.parent)
    our_error = _ours(source, ours, chosen)
    version = stock.installed_version()
    stock_error = "" if ran.ok else ran.message
    if stock_error or our_error:
        return ParityRun(None, version, stock_error, our_error, ran.seconds)
    report = compare_universal(ours, theirs, frozen=frozen).with_rows(*rows)
    return ParityRun(report, version, stock_seconds=ran.seconds)


def _stock(source: Path, target: Path, options: ParityOptions) -> Any:
    from deepspeed_affine.hooks import stock

    return stock.convert(
        source,
        target,
        strict=options.strict,
        inject_missing_state=options.inject_missing_state,
        workers=options.workers,
        timeout=options.timeout,
    )


def _ours(source: str, target: Path, options: ParityOptions) -> str:
    from deepspeed_affine.commands import convert

    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    arguments = [
        "--affine",
        "--input_folder",
        source,
        "--output_folder",
        str(target),
        "--workers",
        str(options.workers),
    ]
    arguments += [] if options.strict else ["--no_strict"]
    arguments += ["--inject_missing_state"] if options.inject_missing_state else []
    args = parser.parse_args([*arguments, *options.extra])
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = convert.run(args)
    except AffineError as error:
        return error.message
    return "" if code == 0 else f"the conversion ended with exit code {code}"


def _nested(source: str, name: str) -> ParityRow:
    return ParityRow(f"{name}/", Verdict.EXPECTED, f"a folder inside {source}, left out", "nested_files")


def format_table(result: ParityRun, *, every: bool = False) -> str:
    """The comparison as text: files counted by kind, then each that is not equal."""
    head = f"parity with DeepSpeed {result.version}"
    if result.report is None:
        stock, ours = (f"failed: {e}" if e else "done" for e in (result.stock_error, result.our_error))
        return f"{head}: could not compare\n  DeepSpeed's converter {stock}\n  our converter {ours}"
    report = result.report
    groups: dict[str, list[ParityRow]] = {}
    for row in report.rows:
        groups.setdefault(_kind(row.path), []).append(row)
    lines = [["files", "count", "bytes", "equal", "expected", "different"]]
    lines += [[kind, *_counts(rows)] for kind, rows in sorted(groups.items())]
    lines.append(["all", *_counts(report.rows)])
    text = [head, *_align(lines)]
    shown = [row for row in report.rows if every or row.verdict is not Verdict.EQUAL]
    for row in shown:
        rule = f" [{row.rule}]" if row.rule else ""
        text.append(f"  {row.verdict.value}{rule}: {row.path}{': ' if row.detail else ''}{row.detail}")
    text.append("equal" if report.equal else f"{len(report.different)} files differ")
    return "\n".join(text)


def _kind(path: str) -> str:
    if not path.startswith("zero/"):
        return "the run" if not path.endswith(".pt") else "model states"
    name = path.rsplit("/", 1)[1]
    return "zero/" + name if path.count("/") == 1 else f"zero/*/{name}"


def _counts(rows: Sequence[ParityRow]) -> list[str]:
    tally = [sum(row.verdict is verdict for row in rows) for verdict in Verdict]
    return [str(len(rows)), str(sum(row.nbytes for row in rows)), *map(str, tally)]


def _align(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for name, *numbers in table:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  " + "  ".join([name.ljust(widths[0]), *cells]))
    return lines
