"""The two console commands: arguments in, exit code out. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from deepspeed_affine._version import __version__
from deepspeed_affine.commands.arguments import LineParser
from deepspeed_affine.commands.guarded import COULD_NOT, guarded

__all__ = ["ds_affine", "ds_to_universal"]

VERBS = {
    "demo": "train a tiny model, convert its checkpoint and show that DeepSpeed's converter agrees",
    "diff": "compare two folders: layouts by layout id, contents by bytes, checkpoints and universal folders",
    "explain": "plan a move between two topologies: who sends what to whom, who holds what; nothing is moved",
    "export": "write a checkpoint's weights as an NInfer container or as safetensors, streamed",
    "inspect": "describe a checkpoint folder from its metadata: topology, files, parameters, what is missing",
    "layout": "write a checkpoint's topology, maps and order as a file that reshard --layout takes",
    "ninfer": "describe, check, take apart and split NInfer v3 containers",
    "parity": "run DeepSpeed's converter and ours on one checkpoint and compare every file",
    "reshard": "write an ordinary checkpoint of another data-parallel size, ZeRO stage or topology",
    "simulate": "plan a move between topologies of thousands of ranks from shapes alone",
    "verify": "read an output again: against its manifest, or every element against the checkpoint it was made from",
}
"""The verbs of ``ds_affine``; each is a module of ``commands`` with ``add_arguments`` and ``run``."""


def ds_to_universal(argv: Sequence[str] | None = None) -> int:
    """Convert with the affine converter when ``--affine`` is given, else hand over to DeepSpeed's own command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    convert = import_module("deepspeed_affine.commands.convert")
    parser = LineParser(
        prog="ds_to_universal",
        description="Convert a DeepSpeed checkpoint to a universal checkpoint. With --affine the conversion is "
        "done by deepspeed_affine: one pass, checked, published by one rename. Without it, DeepSpeed's own "
        "converter runs with the options it knows.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"deepspeed-affine {__version__}")
    convert.add_arguments(parser)
    asks_help = any(argument in ("-h", "--help", "--version") for argument in arguments)
    if arguments and "--affine" not in arguments and not asks_help:
        hand_over = import_module("deepspeed_affine.hooks.stock").hand_over
        try:
            return int(hand_over(arguments))
        except SystemExit as ended:
            if ended.code == COULD_NOT:
                print("This was DeepSpeed's own command; options it does not know need --affine.", file=sys.stderr)
            raise
    args = parser.parse_args(arguments)
    if not args.affine:
        parser.error("nothing to do: give --affine and the folders, or DeepSpeed's own options")
    return guarded("ds_to_universal", convert.run, args)


def ds_affine(argv: Sequence[str] | None = None) -> int:
    """Run one verb of the toolbox and return its exit code: 0 done, 1 compared and different, 2 could not."""
    parser = LineParser(
        prog="ds_affine", description="Tools around affine maps of DeepSpeed checkpoints.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"deepspeed-affine {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    parsers = {}
    for verb, summary in VERBS.items():
        sub = parsers[verb] = verbs.add_parser(verb, help=summary, description=summary[0].upper() + summary[1:] + ".")
        module = import_module(f"deepspeed_affine.commands.{verb}")
        module.add_arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if unknown:
        # As argparse says it, by the verb's name and not that of all.
        parsers[args.verb].error(f"unrecognized arguments: {' '.join(unknown)}")
    return guarded("ds_affine", args.run, args)
