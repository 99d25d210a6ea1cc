"""What a plan for a whole model comes to: who sends how much to whom, in plain values and in lines for a person."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_affine.commands.text import align, counted, size
from deepspeed_affine.plan.model import ModelPlan

__all__ = ["described", "listed", "told"]

SHOWN_PAIRS = 12
SHOWN_NAMES = 5


def described(plan: ModelPlan) -> dict[str, Any]:
    """The plan's totals as plain values, for JSON; described in docs/commands.md."""
    balance = plan.balance
    return {
        "parameters": len(plan.plans),
        "segments": plan.segments,
        "moved_bytes": plan.moved_bytes,
        "local_bytes": plan.local_bytes,
        "unfilled_elements": _unfilled(plan),
        "largest_target": _heaviest(_held(plan)),
        "heaviest_sender": _heaviest(plan.sent),
        "heaviest_receiver": _heaviest(plan.received),
        "balance": None
        if balance is None
        else {"heaviest_bytes": balance.heaviest, "bound_bytes": balance.bound, "ratio": round(balance.ratio, 4)},
        "inexact_scales": [{"parameter": name, "scale": scale} for name, scale in plan.inexact()],
        "traffic": [
            {"source": source, "target": target, "bytes": nbytes, "local": plan.is_local(source, target)}
            for (source, target), nbytes in plan.traffic.items()
        ],
    }


def _unfilled(plan: ModelPlan) -> int:
    return sum([region.numel for each in plan.plans.values() for rows in each.unfilled.values() for region in rows])


def _held(plan: ModelPlan) -> dict[int, int]:
    """Bytes that every target process has when all is done, what is not filled included."""
    found: dict[int, int] = defaultdict(int)
    for (_, target), nbytes in plan.traffic.items():
        found[target] += nbytes
    for name, each in plan.plans.items():
        for rank, regions in each.unfilled.items():
            found[rank] += sum([region.numel for region in regions]) * plan.itemsizes[name]
    return found


def _heaviest(by_rank: Mapping[int, int]) -> dict[str, int] | None:
    if not by_rank:
        return None
    rank = min(by_rank, key=lambda each: (-by_rank[each], each))
    return {"rank": rank, "bytes": by_rank[rank]}


def listed(names: Sequence[str], rest: str = "") -> str:
    """The first names, how many more there are, and then where the ``rest`` are to be seen."""
    more = f" and {len(names) - SHOWN_NAMES:,} more{rest}" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def told(plan: ModelPlan, *, everything: bool = False) -> list[str]:
    """The same as lines, the heaviest pairs of processes first."""
    rows = [
        ["moved between processes", size(plan.moved_bytes)],
        ["copied within a process", size(plan.local_bytes)],
        ["segments", f"{plan.segments:,} of {counted(len(plan.plans), 'parameter')}"],
    ]
    for what, by_rank in (("heaviest sender", plan.sent), ("heaviest receiver", plan.received)):
        found = _heaviest(by_rank)
        if found is not None:
            average = sum(by_rank.values()) / len(by_rank)
            rows.append(
                [
                    what,
                    f"rank {found['rank']}, {size(found['bytes'])} ({found['bytes'] / average:.2f} times the average "
                    f"of {counted(len(by_rank), 'rank')})",
                ]
            )
    largest = _heaviest(_held(plan))
    if largest is not None:
        rows.append(
            ["memory", f"{size(largest['bytes'])} on rank {largest['rank']}, the most that a target rank holds"]
        )
    if plan.balance is not None and plan.balance.bound:
        rows.append(["balance", f"{plan.balance.ratio:.3f} times the least possible ({size(plan.balance.bound)})"])
    padding = _unfilled(plan)
    if padding:
        rows.append(["left to the target", f"{padding:,} elements of padding, which have no source"])
    inexact = list(plan.inexact())
    if inexact:
        rows.append(["scales that round", listed([f"{name} (times {scale:g})" for name, scale in inexact])])
    lines = align(rows)
    pairs = sorted([(pair, nbytes) for pair, nbytes in plan.traffic.items()], key=lambda item: (-item[1], item[0]))
    shown = pairs if everything else pairs[:SHOWN_PAIRS]
    if shown:
        table = [["from", "to", "bytes", ""]]
        for (source, target), nbytes in shown:
            local = "local" if plan.is_local(source, target) else ""
            table.append([str(source), str(target), size(nbytes), local])
        lines += align(table, right=(0, 1, 2))
    if len(pairs) > len(shown):
        lines.append(f"  and {counted(len(pairs) - len(shown), 'pair')} more (--all)")
    return lines
