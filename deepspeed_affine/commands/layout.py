"""``ds_affine layout``: the topology, maps and order of a checkpoint as a file that ``reshard --layout`` takes."""

from __future__ import annotations

import argparse
import json
import os

from deepspeed_affine.commands.folders import require_path
from deepspeed_affine.commands.layout_file import write_layout
from deepspeed_affine.commands.layout_of import layout_of
from deepspeed_affine.commands.reshard import source_options
from deepspeed_affine.commands.text import counted, say, size
from deepspeed_affine.execute.checkpoint import read_checkpoint
from deepspeed_affine.execute.conversion import build_plan
from deepspeed_affine.plan.layout_document import layout_document
from deepspeed_affine.storage.files import absolute

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="DeepSpeed checkpoint folder, the one with the .pt files")
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write; without it the document is printed")
    parser.add_argument("--json", action="store_true", help="print the document, also where it is written to a file")


def run(args: argparse.Namespace) -> int:
    """Write or print the layout; no tensor is read."""
    require_path("CHECKPOINT", args.checkpoint)
    if args.output is not None:
        require_path("--output", args.output)
    checkpoint = read_checkpoint(absolute(args.checkpoint))
    layout = layout_of(checkpoint, build_plan(checkpoint, source_options())[0])
    if args.output is not None:
        write_layout(layout, args.output)
    if args.json or args.output is None:
        say(json.dumps(layout_document(layout), indent=1))
        return 0
    say(
        f"{args.output}: ZeRO-{layout.stage}, TP {layout.tp}, PP {layout.pp}, DP {layout.dp}; "
        f"{counted(len(layout.params), 'tensor')}, {size(os.stat(args.output).st_size)}"
    )
    return 0
