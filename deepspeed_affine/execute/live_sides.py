"""What a process holds of either side of a live transfer, and whether all processes' sides fit one plan.

Every process looks at its own tensors, all tell each other what they found, and each judges the same rows: so either
all go on or all raise the same error, before a byte is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_affine import errors
from deepspeed_affine.errors import (
    AffineError,
    Faults,
    IntegrityError,
    PolicyError,
    UnsupportedLayoutError,
)
from deepspeed_affine.execute.live_schedule import Needs, needs_of
from deepspeed_affine.execute.memory import dense
from deepspeed_affine.execute.shard_memory import multiplies, overfilled, sharing, unfit, unsound, unusable
from deepspeed_affine.execute.wire import Wire
from deepspeed_affine.plan.model import ModelPlan

__all__ = ["ONE", "Sides", "agreed", "faults_of_all"]

ONE = "the parameter"
"""The name of the only parameter of a ``TransferPlan``."""


@dataclass(frozen=True, slots=True)
class Sides:
    """This process's shards that the plan names, flat in place, and what all processes agree on.

    ``itemsizes`` are bytes of an element of every parameter that some process holds.
    """

    source: Mapping[str, torch.Tensor]
    target: Mapping[str, torch.Tensor]
    itemsizes: Mapping[str, int]
    device: torch.device
    needs: Needs


def agreed(
    wire: Wire, plan: ModelPlan, source: Any, target: Any, options: Mapping[str, str | int], faults: Faults
) -> Sides:
    """The process's sides, after all processes have found theirs to fit; a collective.

    ``faults`` are what this process has found wrong so far. Raises one and the same error on all processes where any of
    them found a fault, or where their plans or ``options`` differ.
    """
    sides: dict[str, dict[str, torch.Tensor]] = {"source": {}, "target": {}}
    device = torch.device("cpu")
    try:
        needs = needs_of(plan, wire.rank, lambda: _digest(plan))
        faults.extend(_misnumbered(plan, needs, wire))
        faults.extend([unsound(_named(name), param=name) for name in sorted(needs.unsound)])
        for what, given in (("source", source), ("target", target)):
            found, wrong = _side(what, given, needs, plan, wire.rank)
            sides[what] = found
            faults.extend(wrong)
        faults.extend(_of_one_dtype(sides, plan))
        faults.extend(_of_one_kind(sides, needs, wire, options))
        device = next((flat.device for held in sides.values() for flat in held.values()), device)
        told = _told(sides, plan, options, needs.digest, faults, device)
    except Exception as error:
        # The others wait for what this process has to say.
        faults.add(error if isinstance(error, AffineError) else AffineError(f"{type(error).__name__}: {error}"))
        plan, needs = ModelPlan({}, {}), Needs("", {}, {}, frozenset(), frozenset(), frozenset(), (), 0, -1)
        told = _told({}, plan, {}, "", faults, device)
    rows = [json.loads(row) for row in wire.gather(told.encode())]
    dtypes = _judged(rows, sorted(plan.plans))
    itemsizes = {**plan.itemsizes, **{name: _dtype(text).itemsize for name, text in dtypes.items()}}
    return Sides(sides["source"], sides["target"], itemsizes, device, needs)


def _digest(plan: ModelPlan) -> str:
    """What tells two plans apart; the plan of one parameter may say no width."""
    return plan.plan_id() if plan.itemsizes.keys() == plan.plans.keys() else plan.plans[ONE].plan_id()


def _misnumbered(plan: ModelPlan, needs: Needs, wire: Wire) -> Iterator[AffineError]:
    if not plan.same_ranks:
        yield PolicyError(
            "The plan numbers the processes of its two sides apart (same_ranks is false), and a transfer is between "
            "processes of one group; plan with same_ranks=True and placements in ranks of that group."
        )
    elif needs.first < 0 or needs.last >= wire.size:
        yield PolicyError(
            f"The plan names process {needs.first or needs.last}, but the group has {wire.size}; expected ranks of the "
            "group. Give the placements that were planned in ranks of this group."
        )


def _side(
    what: str, given: Any, needs: Needs, plan: ModelPlan, rank: int
) -> tuple[dict[str, torch.Tensor], list[AffineError]]:
    """The flat shards of this side that the plan names, and what is wrong with it."""
    if isinstance(given, torch.Tensor) and list(plan.plans) == [ONE]:
        given = {ONE: given}
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        expected = "a mapping from parameter name to shard"
        if list(plan.plans) == [ONE]:
            expected += ", or a tensor for the plan of one parameter"
        return {}, [PolicyError(f"{what} is a {type(given).__name__}; expected {expected}.")]
    found: dict[str, torch.Tensor] = {}
    wrong: list[AffineError] = []
    for name, numel in (needs.source if what == "source" else needs.target).items():
        shard = given.get(name)
        where = f"{what} shard of {name!r}" if name != ONE else f"{what} shard"
        if shard is None:
            wrong.append(
                IntegrityError(
                    f"{where}: none is given, but the plan {'reads' if what == 'source' else 'fills'} {numel} elements "
                    f"of it here. Give the tensor that this process holds.",
                    param=name,
                    rank=rank,
                )
            )
            continue
        fault = unusable(shard, where, what == "target")
        if fault is None:
            fault = unfit(shard.numel(), where, numel, what)
        if fault is None and what == "target" and name in needs.misfilled:
            fault = overfilled(where, param=name)
        if fault is not None:
            wrong.append(fault)
        else:
            found[name] = dense(shard)
    return found, wrong


def _of_one_kind(
    sides: Mapping[str, Mapping[str, torch.Tensor]], needs: Needs, wire: Wire, options: Mapping[str, str | int]
) -> Iterator[AffineError]:
    """Faults of this process's own shards among each other."""
    flats = [(what, name, flat) for what, held in sides.items() for name, flat in held.items()]
    devices = sorted({str(flat.device) for _, _, flat in flats})
    if len(devices) > 1:
        yield IntegrityError(f"The shards lie on {', '.join(devices)}; expected one device of a process.")
    if wire.backend == "gloo" and any(flat.device.type != "cpu" for _, _, flat in flats):
        yield UnsupportedLayoutError(
            f"The shards lie on {devices[0]}, and gloo moves tensors in memory. Pass a group with the device's own "
            "backend, nccl for GPUs."
        )
    for name in sorted(needs.scaled & ({name for _, name, _ in flats})):
        flat = sides["target"].get(name, sides["source"].get(name))
        if flat is None:
            continue
        power = options.get("scale_power", 1)
        if power != 1 and options.get("scaled_states") != "power":
            yield UnsupportedLayoutError(
                f"{_named(name)}: is scaled, and this is an optimizer state (power {power}). It "
                "moves, but lr and eps of its optimizer would stay in the old coordinate. Pass scaled_states='power' "
                "to move it knowingly, or leave it out of the plan and start the state anew.",
                param=name,
            )
        if power and not multiplies(flat.dtype):
            yield UnsupportedLayoutError(
                f"{_named(name)}: is scaled, which {flat.dtype} cannot carry; expected a floating dtype of eight "
                "bits or more.",
                param=name,
            )
    yield from sharing([(what, _named(name), flat) for what, name, flat in flats])


def _of_one_dtype(sides: Mapping[str, Mapping[str, torch.Tensor]], plan: ModelPlan) -> Iterator[AffineError]:
    for name in sorted(plan.plans):
        dtypes = {held[name].dtype for held in sides.values() if name in held}
        if len(dtypes) > 1:
            yield IntegrityError(
                f"{_named(name)}: this process holds {' and '.join(sorted(map(str, dtypes)))}; expected one dtype. "
                "Convert one side first.",
                param=name,
            )
        for dtype in dtypes:
            if dtype.itemsize != plan.itemsizes.get(name, dtype.itemsize):
                yield IntegrityError(
                    f"{_named(name)}: this process holds {dtype}, and the plan is for elements of "
                    f"{plan.itemsizes[name]} bytes. Convert the shard, or plan for its dtype.",
                    param=name,
                )


def _told(
    sides: Mapping[str, Mapping[str, torch.Tensor]],
    plan: ModelPlan,
    options: Mapping[str, str | int],
    digest: str,
    faults: Faults,
    device: torch.device,
) -> str:
    """This process's row: dtypes as one number for each name of the plan, in order, 0 where it holds none of it."""
    kinds: dict[str, int] = {}
    numbers = []
    for name in sorted(plan.plans):
        text = next((str(held[name].dtype) for held in sides.values() if name in held), "")
        numbers.append(kinds.setdefault(text, len(kinds) + 1) if text else 0)
    return json.dumps(
        {
            "digest": digest,
            "options": dict(sorted(options.items())),
            "kinds": list(kinds),
            "dtypes": numbers,
            "device": device.type if any(sides.values()) else None,
            "faults": [fault.to_dict() for fault in faults],
        },
        separators=(",", ":"),
    )


def _judged(rows: list[dict[str, Any]], names: list[str]) -> dict[str, str]:
    """The dtype of every parameter that anybody holds; raises what is wrong with anybody, alike for all."""
    faults = Faults()
    faults.extend(faults_of_all(rows, "transfer: "))
    for key, what in (("digest", "plans"), ("options", "options")):
        holders: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            holders.setdefault(json.dumps(row[key]), []).append(rank)
        if len(holders) > 1:
            held = "; ".join(f"ranks {_few(who)}: {text[:100]}" for text, who in list(holders.items())[:3])
            faults.add(
                PolicyError(
                    f"transfer: the processes have different {what} ({held}); expected the same on all. Plan from the "
                    "same placements everywhere, or send the plan as JSON, and give all the same options."
                )
            )
    devices = {row["device"] for row in rows} - {None}
    if len(devices) > 1:
        faults.add(IntegrityError(f"transfer: the processes hold shards on {sorted(devices)}; expected one kind."))
    found: dict[str, tuple[str, int]] = {}
    if len({row["digest"] for row in rows}) == 1:
        for rank, row in enumerate(rows):
            for name, number in zip(names, row["dtypes"], strict=True):
                text = row["kinds"][number - 1] if number else None
                if text is None:
                    continue
                known, first = found.setdefault(name, (text, rank))
                if known != text:
                    faults.add(
                        IntegrityError(
                            f"transfer: rank {rank}: {_named(name)}: holds {text}, and rank {first} holds {known}; "
                            "expected one dtype. Convert one side first.",
                            param=name,
                            rank=rank,
                        )
                    )
    faults.raise_if_any()
    return {name: text for name, (text, _) in found.items()}


def faults_of_all(rows: Iterable[Mapping[str, Any]], about: str) -> Iterator[AffineError]:
    """The faults of every process's row, those that several have in the same words once, with who has them."""
    alike: dict[tuple[str, str, str | None], list[int]] = {}
    for rank, row in enumerate(rows):
        for each in row["faults"]:
            alike.setdefault((each["kind"], each["message"], each["param"]), []).append(rank)
    for (kind, message, param), ranks in alike.items():
        error = getattr(errors, kind, AffineError)
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        yield error(f"{about}rank {ranks[0]}{more}: {message}", param=param, rank=ranks[0])


def _few(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


def _named(name: str) -> str:
    return ONE if name == ONE else f"parameter {name!r}"


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise UnsupportedLayoutError(f"transfer: {text} is no dtype of this torch.")
    return found
