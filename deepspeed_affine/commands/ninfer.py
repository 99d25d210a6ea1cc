"""``ds_affine ninfer``: containers described, checked, taken apart and split into other files."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from deepspeed_affine.commands.arguments import positive
from deepspeed_affine.commands.guarded import COULD_NOT
from deepspeed_affine.commands.text import complain, counted, say, size
from deepspeed_affine.errors import AffineError, PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-verbs of ``ds_affine ninfer`` and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.add_argument("file", metavar="FILE", help="the entry of the artifact")
        sub.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        return sub

    inspect = action("inspect", "describe an artifact from its directory; nothing else is read")
    inspect.add_argument("--json", action="store_true", help="print every record as one JSON document")
    inspect.add_argument("--digests", action="store_true", help="read everything and add SHA-256 of bytes and values")
    validate = action("validate", "read all files of an artifact and check every encoding, code, scale and reference")
    validate.add_argument("--json", action="store_true", help="print the result as JSON")
    extract = action("extract", "write parameters as .npy files and resources as files into a new folder")
    extract.add_argument("--output", required=True, metavar="FOLDER", help="the folder to make")
    extract.add_argument("--parameter", action="append", metavar="NAME", help="a parameter (default: everything)")
    extract.add_argument("--object", action="append", metavar="ID", help="a stored object by its id")
    extract.add_argument(
        "--encoded", action="store_true", help="write the objects named as they are stored, not their values"
    )
    split = action("split", "copy an artifact into files of another size, byte for byte, decoding nothing")
    split.add_argument("--output", required=True, metavar="FILE", help="the entry to make; nothing is overwritten")
    split.add_argument(
        "--max-file-bytes", type=positive, default=None, metavar="N", help="largest size of a file (default: one file)"
    )


def run(args: argparse.Namespace) -> int:
    """One action; returns 0, and for ``validate`` 2 where something is wrong with the artifact."""
    if getattr(args, "output", None) == "":
        raise PolicyError("--output: is empty; expected a path. Is a shell variable not set?")
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "inspect": _inspect,
        "validate": _validate,
        "extract": _extract,
        "split": _split,
    }
    return actions[args.action](args)


def _inspect(args: argparse.Namespace) -> int:
    # numpy is imported with these, and neither --help nor another verb waits for it.
    from deepspeed_affine.commands.ninfer_inspect import describe, lines
    from deepspeed_affine.ninfer.artifact import open_artifact

    with open_artifact(args.file) as artifact:
        found = describe(artifact, digests=args.digests)
    say(json.dumps(found, indent=1) if args.json else "\n".join(lines(found)))
    return 0


def _validate(args: argparse.Namespace) -> int:
    from deepspeed_affine.ninfer.artifact import open_artifact

    try:
        with open_artifact(args.file) as artifact:
            artifact.validate()
    except (AffineError, OSError) as error:
        if args.debug:
            raise
        # The class says at which stage it was found, and scripts look for it first.
        message = error.message if isinstance(error, AffineError) else f"{args.file}: {error.strerror or error}"
        if args.json:
            fault = {"kind": type(error).__name__, "message": message, "file": getattr(error, "file", args.file)}
            say(json.dumps({"valid": False, "errors": [fault]}, indent=1))
        complain(f"{type(error).__name__}: {message}")
        return COULD_NOT
    if args.json:
        say(json.dumps({"valid": True, "errors": []}, indent=1))
    else:
        say(
            f"{args.file}: valid: {counted(len(artifact.objects), 'object')}, "
            f"{counted(len(artifact.bindings), 'parameter')}, {size(artifact.payload_bytes)} in "
            f"{counted(len(artifact.files), 'file')}"
        )
    return 0


def _extract(args: argparse.Namespace) -> int:
    from deepspeed_affine.commands.ninfer_extract import extract
    from deepspeed_affine.ninfer.artifact import open_artifact

    if args.encoded and not args.object:
        raise PolicyError("--encoded: writes objects as they are stored; name them with --object.")
    with open_artifact(args.file) as artifact:
        names = extract(artifact, args.output, args.parameter, args.object, encoded=args.encoded)
    say(f"{args.output}: {counted(len(names), 'file')}")
    return 0


def _split(args: argparse.Namespace) -> int:
    from deepspeed_affine.ninfer.writer import reshard_files

    directory = reshard_files(args.file, args.output, args.max_file_bytes)
    say(f"{args.output}: {size(directory.payload_bytes)} of payload in {counted(len(directory.files), 'file')}")
    return 0
