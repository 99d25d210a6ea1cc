"""Values of options, as every command takes them, and how a wrong one is said."""

from __future__ import annotations

import argparse
from typing import NoReturn

from deepspeed_affine.commands.text import complain

__all__ = ["LineParser", "partitioning_stage", "positive"]


class LineParser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, as every command does; its sub-parsers do too."""

    def error(self, message: str) -> NoReturn:
        """The message is on stderr, and the command ends with exit code 2."""
        complain(f"{self.prog}: error: {' '.join(message.splitlines())}. See {self.prog} --help.")
        raise SystemExit(2)


def positive(text: str) -> int:
    """A number of threads or processes, as argparse takes a type."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return number


def partitioning_stage(text: str) -> int:
    """A ZeRO stage of a checkpoint that is cut into partitions, as argparse takes a type."""
    if text not in ("1", "2", "3"):
        why = "; a checkpoint without ZeRO has no partitions" if text == "0" else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a stage that can be written{why}; expected 1, 2 or 3")
    return int(text)
