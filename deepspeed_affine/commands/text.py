"""How commands speak to a person: sizes, counts, tables, and lines that survive any terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TextIO

__all__ = ["align", "complain", "counted", "listed", "say", "say_faults", "size"]


def say(text: str) -> None:
    """``text`` is printed; a reader that has gone away does not turn a good command into a failed one.

    Raises OSError where it cannot be printed otherwise; nothing more is then printed on stdout.
    """
    try:
        print(_printable(text, sys.stdout), flush=True)
    except OSError as error:
        # What is still in its buffer would be tried again at the end of the process, and fail it.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "standard output") from error


def complain(text: str) -> None:
    """``text`` is on stderr, if that takes it."""
    with suppress(OSError):
        print(_printable(text, sys.stderr), file=sys.stderr, flush=True)


def say_faults(program: str, messages: Iterable[str], most: int | None = None) -> None:
    """One line a fault on stderr, as every command ends; those beyond ``most`` are counted."""
    lines = [line for message in messages for line in message.splitlines()]
    shown = lines if most is None else lines[:most]
    if len(lines) > len(shown):
        shown = [*shown, f"and {len(lines) - len(shown):,} more (--all)"]
    for line in shown:
        complain(f"{program}: error: {line}")


def _printable(text: str, stream: TextIO) -> str:
    # Names may hold what the terminal's encoding, or any encoding, cannot.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def size(count: int) -> str:
    """Bytes in the unit that gives at most three digits before the point."""
    number = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def counted(count: int, thing: str, plural: str | None = None) -> str:
    """``1 file``, ``2 files``, ``12,345 files``."""
    return f"{count:,} {thing if count == 1 else plural or thing + 's'}"


def listed(names: Sequence[str], most: int | None = 5) -> str:
    """The names with commas, those beyond ``most`` counted."""
    shown = list(names) if most is None else list(names[:most])
    hidden = len(names) - len(shown)
    return ", ".join(shown) + (f" and {hidden:,} more" if hidden else "")


def align(rows: Sequence[Sequence[str]], indent: str = "  ", right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with columns under each other; those in ``right`` are aligned to the right."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(widths[at]) if at in right else cell.ljust(widths[at]) if at < len(row) - 1 else cell
            for at, cell in enumerate(row)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
