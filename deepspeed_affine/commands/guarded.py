"""How every command ends: with its exit code, or with one line per fault and exit code 2."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from contextlib import suppress

from deepspeed_affine.commands.text import say, say_faults
from deepspeed_affine.errors import SHOWN_FAULTS, AffineError
from deepspeed_affine.storage.urls import is_url

__all__ = ["COULD_NOT", "guarded"]

COULD_NOT = 2


def guarded(program: str, run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """What ``run`` returns; an error becomes a line per fault, an object under ``--json``, and exit code 2."""
    caught: BaseException
    try:
        return run(args)
    except AffineError as error:
        caught = error
        faults = [fault.to_dict() for fault in error.faults]
        lines = error.message.splitlines()
        if len(error.faults) > SHOWN_FAULTS and hasattr(args, "all"):
            every = [line for fault in error.faults for line in fault.message.splitlines()]
            lines = every if args.all else [*lines[:-1], f"{lines[-1]} (--all)"]
    except OSError as error:
        caught = error
        lines = [_os_error(error) + _outcome(program, args)]
        faults = [{"kind": "OSError", "message": lines[0], "file": error.filename}]
    except KeyboardInterrupt as error:
        caught = error
        lines = ["interrupted" + _outcome(program, args)]
        faults = [{"kind": "KeyboardInterrupt", "message": lines[0]}]
    except Exception as error:  # Whatever else it is, it is a fault of this package and not of the user.
        caught = error
        lines = [f"internal error, {type(error).__name__}: {error}. Please report it with the output of --debug."]
        faults = [{"kind": type(error).__name__, "message": lines[0]}]
    if args.debug:
        traceback.print_exception(caught)
    if getattr(args, "json", False):
        with suppress(OSError):
            say(json.dumps({"errors": faults}, indent=2))
    say_faults(program, lines)
    return COULD_NOT


def _outcome(program: str, args: argparse.Namespace) -> str:
    """What became of the output, where the command makes one; it notes in ``published`` that it has."""
    if program != "ds_to_universal" and not hasattr(args, "published"):
        return ""
    if getattr(args, "published", False):
        return "; the new output is complete and has its name, run the same command again to tidy up"
    return "; nothing was published"


def _os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    who = "it could not be reached" if is_url(str(error.filename or "")) else "the operating system refused"
    return f"{where}{error.strerror or error}; {who}"
