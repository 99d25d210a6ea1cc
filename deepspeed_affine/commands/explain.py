"""``ds_affine explain``: what moving a checkpoint from one topology to another would copy from where to where."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspeed_affine.commands.limits import require_shards
from deepspeed_affine.commands.text import say
from deepspeed_affine.errors import InvalidMapError, PolicyError
from deepspeed_affine.lowering.state_table import STEP

if TYPE_CHECKING:
    from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout
    from deepspeed_affine.plan.model import ModelPlan
    from deepspeed_affine.plan.placement import Placement

__all__ = ["add_arguments", "run"]

FORMAT = 1
SCALAR_STATES = (STEP,)
"""One number for a parameter, and none of its shape."""

STATE_BYTES = 4
"""Of a state of one element, where only a layout file tells of it: most are kept in float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="DeepSpeed checkpoint folder, or layout file")
    parser.add_argument("target", metavar="TARGET", help="checkpoint folder or layout file of the topology to move to")
    parser.add_argument(
        "--what",
        choices=("weights", "states"),
        default="states",
        help="the module's weights, or master weights with all optimizer states (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        choices=("balanced", "lowest"),
        default="balanced",
        help="which holder of a replica sends it (default: %(default)s)",
    )
    parser.add_argument(
        "--apart", action="store_true", help="the two topologies are different processes: rank 0 is not rank 0"
    )
    parser.add_argument("--param", metavar="NAME", help="plan this parameter alone")
    parser.add_argument("--plot", metavar="FILE.png", help="draw who holds what of --param, on both sides")
    parser.add_argument("--all", action="store_true", help="show every pair of ranks")
    parser.add_argument("--segments", action="store_true", help="with --json: the whole plan, every segment")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    """Plan and print; no tensor is read and nothing written but the picture. Returns 0."""
    if args.plot is not None and args.param is None:
        raise PolicyError("--plot: draws one parameter; name it with --param.")
    if args.segments and not args.json:
        raise PolicyError("--segments: is for --json; give both.")
    (source, source_states), (target, target_states) = _layout(args.source), _layout(args.target)
    for path, layout in ((args.source, source), (args.target, target)):
        require_shards(path, len(layout.params), layout.tp, layout.dp, layout.pp)
    placed = _placed(args, source, target, source_states or (None if source.states else target_states))
    left = sorted(placed[0].keys() - placed[1].keys()) if args.param is None else []
    held = source.states if source.states is not None or source_states is None else ()
    new = [] if held is None or args.what != "states" else sorted(set(target.states or ()) - set(held))
    plan = _plan(args, source, target, placed)
    if args.plot is not None:
        from deepspeed_affine.commands.picture import draw_maps

        sides = [(each[args.param], _named(layout)) for each, layout in zip(placed, (source, target), strict=True)]
        draw_maps(args.plot, args.param, sides)
    if args.json:
        from deepspeed_affine.commands.explaining import described

        document: dict[str, Any] = {
            "format": FORMAT,
            "what": args.what,
            "source": {"path": args.source, **_topology(source)},
            "target": {"path": args.target, **_topology(target)},
            "source_only": left,
            "new_states": new,
            **described(plan),
        }
        if args.segments:
            document["plan"] = plan.to_dict()
        say(json.dumps(document, indent=1))
        return 0
    from deepspeed_affine.commands.explaining import listed, told

    say(f"{args.what}: {_named(source)} to {_named(target)}")
    for line in told(plan, everything=args.all):
        say(line)
    if left:
        say(f"  not moved: the target has no {args.what} of {listed(left, ' (--json)')}")
    if new:
        say(f"  not moved: the source has no {' and no '.join(new)}, which the target keeps")
    if args.plot is not None:
        say(f"{args.plot}: written")
    return 0


def _layout(path: str) -> tuple[CheckpointLayout, dict[str, int] | None]:
    """The layout, and where the files themselves tell it, how many bytes of states an element of a parameter has."""
    from deepspeed_affine.commands.folders import require_path
    from deepspeed_affine.commands.layout_file import read_layout
    from deepspeed_affine.commands.layout_of import layout_of
    from deepspeed_affine.commands.reshard import source_options
    from deepspeed_affine.execute.checkpoint import read_checkpoint
    from deepspeed_affine.execute.conversion import build_plan
    from deepspeed_affine.storage.files import absolute

    require_path("SOURCE or TARGET", path)
    if os.path.isfile(path):
        return read_layout(path), None
    checkpoint = read_checkpoint(absolute(path))
    plan = build_plan(checkpoint, source_options())[0]
    widths = {(task.param, task.state): task.itemsize for task in plan.gathered}
    found: dict[str, int] = defaultdict(int)
    for (name, _), itemsize in widths.items():
        found[name] += itemsize
    return layout_of(checkpoint, plan), dict(found)


def _topology(layout: CheckpointLayout) -> dict[str, int]:
    return {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "zero_stage": layout.stage}


def _named(layout: CheckpointLayout) -> str:
    return f"TP {layout.tp}, PP {layout.pp}, DP {layout.dp}, ZeRO-{layout.stage}"


def _placed(
    args: argparse.Namespace, source: CheckpointLayout, target: CheckpointLayout, known_states: Mapping[str, int] | None
) -> tuple[dict[str, Placement], dict[str, Placement]]:
    """Which process has what, on both sides."""
    from deepspeed_affine.plan.placing import checkpoint_placements
    from deepspeed_affine.storage.dtypes import item_size

    listed = source.states if source.states is not None else target.states or ()
    states = 1 + len([state for state in listed if state not in SCALAR_STATES])
    sizes = {name: item_size(param.dtype) for each in (target, source) for name, param in each.params.items()}
    if args.what == "states":
        sizes = {name: (known_states or {}).get(name, STATE_BYTES * states) for name in sizes}
    return checkpoint_placements(source, args.what, sizes), checkpoint_placements(target, args.what, sizes)


def _plan(
    args: argparse.Namespace,
    source: CheckpointLayout,
    target: CheckpointLayout,
    placed: tuple[Mapping[str, Placement], Mapping[str, Placement]],
) -> ModelPlan:
    from deepspeed_affine.plan.model import plan_model

    held, wanted = placed
    if args.param is not None:
        if args.param not in wanted:
            raise InvalidMapError(
                f"--param {args.param}: the target has no {args.what} of this name; ds_affine inspect --params lists "
                "what there is.",
                param=args.param,
            )
        wanted = {args.param: wanted[args.param]}
    rows = {name: _rows(name, source, target) for name in wanted if name in held}
    known = {name: count for name, count in rows.items() if count is not None}
    return plan_model(wanted, held, policy=args.policy, same_ranks=not args.apart, valid_rows=known, bound=True)


def _rows(name: str, source: CheckpointLayout, target: CheckpointLayout) -> int | None:
    """The rows that are no padding, where the two F differ by the height of a vocabulary and nothing else."""
    ours, theirs = (each.params[name].layout.logical_shape for each in (source, target))
    if ours == theirs or len(ours) != len(theirs) or ours[1:] != theirs[1:]:
        return None
    lowest = min(ours[0], theirs[0])
    for side in (source, target):
        recorded = side.info.get("original_vocab_size") if isinstance(side.info, dict) else None
        if type(recorded) is int and 0 < recorded <= lowest:
            return recorded
    return lowest
