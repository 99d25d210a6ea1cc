"""``ds_affine simulate``: a move between two topologies planned from shapes alone, at any size."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from deepspeed_affine.commands.limits import require_shards
from deepspeed_affine.commands.text import counted, say
from deepspeed_affine.errors import PolicyError

__all__ = ["add_arguments", "run"]

FORMAT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        help="llama-7b, llama-13b, llama-70b, llama3-8b, llama3-405b, or a file: a config.json of the Llama kind, or "
        "a list of tensors",
    )
    parser.add_argument(
        "--source", required=True, metavar="tp8,pp4,dp16,zero1", help="topology to move from; without zeroS, no ZeRO"
    )
    parser.add_argument(
        "--target",
        required=True,
        metavar="tp4,pp8,dp32",
        help="topology to move to; without zeroS, the ZeRO stage of the source",
    )
    parser.add_argument(
        "--what",
        choices=("weights", "states"),
        default="weights",
        help="the module's weights, or master weights with optimizer states (default: %(default)s)",
    )
    parser.add_argument("--weight-bytes", type=int, default=2, help="bytes of a weight (default: %(default)s)")
    parser.add_argument(
        "--state-bytes", type=int, default=12, help="bytes of states of one weight (default: %(default)s)"
    )
    parser.add_argument(
        "--policy",
        choices=("balanced", "lowest"),
        default="balanced",
        help="which holder of a replica sends it (default: %(default)s)",
    )
    parser.add_argument("--apart", action="store_true", help="source and target are different processes")
    parser.add_argument(
        "--host-ranks", type=int, default=0, metavar="N", help="N ranks a machine: take from one's own machine first"
    )
    parser.add_argument("--all", action="store_true", help="show every pair of ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    """Plan and print; returns 0."""
    from deepspeed_affine.commands.explaining import described, told
    from deepspeed_affine.plan.grid import Topology, state_placements, weight_placements
    from deepspeed_affine.plan.model import plan_model

    for option in ("weight_bytes", "state_bytes"):
        if not 1 <= getattr(args, option) <= 1024:
            raise PolicyError(f"--{option.replace('_', '-')} {getattr(args, option)}: expected 1 to 1024.")
    if args.host_ranks < 0:
        raise PolicyError(f"--host-ranks {args.host_ranks}: expected 1 or more, or 0 for no machines.")
    source = Topology.parse(args.source)
    target = Topology.parse(args.target, source.zero)
    tensors = _tensors(args.model)
    for option, topology in (("--source", source), ("--target", target)):
        require_shards(f"{option} {topology}", len(tensors), topology.tp, topology.dp, topology.pp)
    place, width = (
        (state_placements, args.state_bytes) if args.what == "states" else (weight_placements, args.weight_bytes)
    )
    began = time.perf_counter()
    placed = [place(tensors, topology, width) for topology in (source, target)]
    described_in = time.perf_counter()
    hosts = None
    if args.host_ranks:
        hosts = {rank: rank // args.host_ranks for rank in range(max(source.world, target.world))}
    plan = plan_model(placed[1], placed[0], policy=args.policy, same_ranks=not args.apart, hosts=hosts, bound=True)
    planned = time.perf_counter()
    seconds = {"describe": round(described_in - began, 3), "plan": round(planned - described_in, 3)}
    if args.json:
        document: dict[str, Any] = {
            "format": FORMAT,
            "model": args.model,
            "what": args.what,
            "source": {"topology": str(source), "ranks": source.world},
            "target": {"topology": str(target), "ranks": target.world},
            "seconds": seconds,
            **described(plan),
        }
        say(json.dumps(document, indent=1))
        return 0
    say(
        f"{args.model}, {args.what}: {source} ({counted(source.world, 'rank')}) to {target} "
        f"({counted(target.world, 'rank')})"
    )
    say(f"  described in {seconds['describe']:.1f} s, planned in {seconds['plan']:.1f} s")
    for line in told(plan, everything=args.all):
        say(line)
    return 0


def _tensors(model: str) -> list[Any]:
    from deepspeed_affine.plan.shapes import MODELS, llama_tensors, model_tensors

    if model in MODELS:
        return list(llama_tensors(MODELS[model]))
    try:
        with open(model, encoding="utf-8") as file:
            description = json.load(file)
    except FileNotFoundError:
        raise PolicyError(
            f"--model {model}: is no file and no model known here; known are {', '.join(MODELS)}."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"--model {model}: cannot be read as JSON ({error}).") from error
    return list(model_tensors(description))
