"""All parameters of a model at once: who sends what to whom, when every shard lies on many processes.

A map's locations are shards; a placement says which processes hold each of them (the data-parallel copies of one
tensor-parallel rank, say). Geometry is worked out once for each pair of layouts, and replicas are chosen over the
whole model, because a choice made parameter by parameter sends everything from the same few ranks.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.plan.balance import SMALL_BYTES, Demand, Shares, assign, lower_bound
from deepspeed_affine.plan.checks import about, check_flags, check_hosts
from deepspeed_affine.plan.collector import collector_paused
from deepspeed_affine.plan.geometry import Geometry, geometry_of
from deepspeed_affine.plan.placement import Placement, as_itemsize, check_sides
from deepspeed_affine.plan.replicas import Policy, check_policy, copied, divided, ratio
from deepspeed_affine.plan.segments import TransferSegment
from deepspeed_affine.plan.transfer import (
    PlanBudget,
    as_budget,
    check_bytes,
    check_segments,
    folded,
)
from deepspeed_affine.plan.transfer_plan import TransferPlan

__all__ = ["FORMAT", "Balance", "ModelPlan", "plan_model"]

FORMAT = 1
"""Version of a stored plan."""


@dataclass(frozen=True, slots=True)
class Balance:
    """Bytes the heaviest sender sends, and the least that any choice of replicas could have made of it."""

    heaviest: int
    bound: int

    @property
    def ratio(self) -> float:
        return self.heaviest / self.bound if self.bound else 1.0


@dataclass(frozen=True)
class ModelPlan:
    """A transfer plan for every parameter, whose ranks are processes.

    ``itemsizes`` are bytes of an element. ``same_ranks`` says that process r is one process on both sides.
    """

    plans: Mapping[str, TransferPlan]
    itemsizes: Mapping[str, int]
    same_ranks: bool = True
    balance: Balance | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        return hash((self.same_ranks, frozenset(self.plans.items())))

    @cached_property
    def traffic(self) -> Mapping[tuple[int, int], int]:
        """Bytes by ``(source, target)`` process, what stays within a process included."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for name, plan in self.plans.items():
            itemsize = self.itemsizes[name]
            for segment in plan.segments:
                found[segment.source_rank, segment.target_rank] += segment.numel * itemsize
        return dict(sorted(found.items()))

    def is_local(self, source: int, target: int) -> bool:
        return self.same_ranks and source == target

    @cached_property
    def sent(self) -> Mapping[int, int]:
        """Bytes every process sends to others."""
        found: dict[int, int] = defaultdict(int)
        for (source, target), nbytes in self.traffic.items():
            if not self.is_local(source, target):
                found[source] += nbytes
        return dict(sorted(found.items()))

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Bytes every process receives from others."""
        found: dict[int, int] = defaultdict(int)
        for (source, target), nbytes in self.traffic.items():
            if not self.is_local(source, target):
                found[target] += nbytes
        return dict(sorted(found.items()))

    @property
    def local_bytes(self) -> int:
        """Bytes copied within their process."""
        return sum([nbytes for pair, nbytes in self.traffic.items() if self.is_local(*pair)])

    @property
    def moved_bytes(self) -> int:
        """Bytes sent from one process to another."""
        return sum(self.sent.values())

    @property
    def segments(self) -> int:
        return sum([len(plan.segments) for plan in self.plans.values()])

    def inexact(self) -> Iterator[tuple[str, float]]:
        """Every parameter and scale whose multiplication rounds."""
        for name, plan in self.plans.items():
            for scale in sorted({segment.scale for segment in plan.segments if not segment.exact}):
                yield name, scale

    def to_dict(self) -> dict[str, Any]:
        """Plain scalars; each parameter in the form of ``TransferPlan.to_dict``."""
        return {
            "format": FORMAT,
            "same_ranks": self.same_ranks,
            "params": {name: {"itemsize": self.itemsizes[name], **plan.to_dict()} for name, plan in self.plans.items()},
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> ModelPlan:
        """Read what ``to_dict`` wrote, also by way of JSON; anything else, or newer, is an ``InvalidMapError``."""
        if not isinstance(entry, Mapping) or not isinstance(entry.get("params"), Mapping):
            raise InvalidMapError(f"A model's plan is {shown(entry)}; expected a mapping with params.")
        if type(entry.get("format")) is not int or entry["format"] != FORMAT:
            raise InvalidMapError(
                f"The plan has format {shown(entry.get('format'))}; this version reads {FORMAT}. Plan again, or use "
                "the version of deepspeed_affine that wrote it."
            )
        unknown = set(map(str, entry)) - {"format", "same_ranks", "params"}
        if unknown:
            raise InvalidMapError(f"A model's plan has members {sorted(unknown)}, which this version does not know.")
        if not isinstance(entry.get("same_ranks"), bool):
            raise InvalidMapError(f"The plan's same_ranks is {shown(entry.get('same_ranks'))}; expected true or false.")
        plans: dict[str, TransferPlan] = {}
        sizes: dict[str, int] = {}
        for name, row in entry["params"].items():
            if not isinstance(name, str) or not isinstance(row, Mapping):
                raise InvalidMapError(f"The plan of {shown(name)} is {shown(row)}; expected a mapping under a name.")
            plans[name] = TransferPlan.from_dict({key: value for key, value in row.items() if key != "itemsize"})
            sizes[name] = as_itemsize(row.get("itemsize"), f"The itemsize of {name}")
        return cls(plans, sizes, entry["same_ranks"])

    def plan_id(self) -> str:
        """A sha256 of all that makes plans equal: one value for equal plans, in any process, read from JSON or made."""
        rows = [(name, self.itemsizes[name], self.plans[name].plan_id()) for name in sorted(self.plans)]
        return hashlib.sha256(repr((self.same_ranks, rows)).encode()).hexdigest()


@collector_paused()
def plan_model(
    target: Mapping[str, Placement],
    source: Mapping[str, Placement],
    *,
    policy: Policy = "balanced",
    same_ranks: bool = True,
    hosts: Mapping[int, int] | None = None,
    valid_rows: Mapping[str, int] | None = None,
    partial: bool = False,
    limits: PlanBudget | None = None,
    bound: bool = False,
) -> ModelPlan:
    """Return the copies that move every parameter of ``target`` from where ``source`` has it; deterministic, whatever
    the order of parameters, locations and holders.

    ``hosts`` (process to machine) makes a process of the target's own machine be preferred. ``valid_rows`` has the real
    height of vocabularies whose padding differs. Small regions that one target needs from the same holders are
    balanced as one. ``bound`` also computes the least possible load of the heaviest sender, by maximum flow.
    ``limits`` are each parameter's. Raises InvalidMapError listing parameters the source lacks, and what
    ``plan_transfer`` raises. Geometry is cached by pairs of layouts; the rest is near-linear in the regions times their
    holders.
    """
    budget = as_budget(limits)
    check_policy(policy)
    check_flags(same_ranks=same_ranks, partial=partial)
    check_hosts(hosts)
    check_sides(target, source, {} if valid_rows is None else valid_rows)
    # Ties between senders go by the order of parameters, which is to be the same in every process.
    target = {name: target[name] for name in sorted(target)}
    known: dict[tuple[ParamAffineMap, ParamAffineMap, int | None], Geometry] = {}
    geometry: dict[str, Geometry] = {}
    for name, placement in target.items():
        rows = (valid_rows or {}).get(name)
        key = (placement.layout, source[name].layout, rows)
        if key not in known:
            with about(f"parameter {name!r}", name):
                known[key] = geometry_of(*key, partial=partial, budget=budget)
        geometry[name] = known[key]
    wanted = _wanted(target, source, geometry)
    shares, least = _shared(wanted, policy, same_ranks, hosts, bound)
    itemsizes = {name: placement.itemsize for name, placement in target.items()}
    plan = ModelPlan(_plans(target, geometry, wanted, shares, budget), itemsizes, same_ranks)
    if least is not None:
        # A region that two share is cut between rows, so that only the plan says what each of them sends.
        object.__setattr__(plan, "balance", Balance(max(plan.sent.values(), default=0), least))
    return plan


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One need of one target process, with every process that could serve it and the location it would do so from."""

    param: str
    number: int
    target: int
    nbytes: int
    holders: tuple[int, ...]
    locations: Mapping[int, int]


def _wanted(
    target: Mapping[str, Placement],
    source: Mapping[str, Placement],
    geometry: Mapping[str, Geometry],
) -> list[_Wanted]:
    found: list[_Wanted] = []
    by_class: dict[tuple[int, tuple[int, ...]], tuple[tuple[int, ...], dict[int, int]]] = {}
    for name, placement in target.items():
        held = source[name].holders
        for number, need in enumerate(geometry[name].needs):
            key = (id(held), need.source.holders)
            if key not in by_class:
                locations = {rank: location for location in need.source.holders for rank in held[location]}
                by_class[key] = (tuple(sorted(locations)), locations)
            holders, locations = by_class[key]
            nbytes = need.numel * placement.itemsize
            # Sorted like the sources, because the order of demands decides between holders that are equally loaded.
            for rank in sorted(placement.holders[need.target]):
                found.append(_Wanted(name, number, rank, nbytes, holders, locations))
    return found


def _shared(
    wanted: Sequence[_Wanted], policy: Policy, same_ranks: bool, hosts: Mapping[int, int] | None, bound: bool
) -> tuple[list[Shares], int | None]:
    """Who serves each need, and the bound if it is asked for. Crumbs that one target needs from the same holders are
    one demand."""
    targets = {want.target: want.target if same_ranks else -1 - want.target for want in wanted}
    bundles: list[list[int]] = []
    crumbs: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, want in enumerate(wanted):
        if want.nbytes < SMALL_BYTES:
            key = (want.target, want.holders)
            if key in crumbs:
                crumbs[key].append(number)
                continue
            bundles.append(crumbs.setdefault(key, [number]))
        else:
            bundles.append([number])
    demands = [
        Demand(targets[wanted[row[0]].target], wanted[row[0]].holders, sum([wanted[at].nbytes for at in row]))
        for row in bundles
    ]
    if policy == "lowest":
        taken: list[Shares] = [
            ((each.target if each.target in each.holders else min(each.holders), each.nbytes),) for each in demands
        ]
    else:
        machines = None if hosts is None else {**hosts, **{at: hosts[r] for r, at in targets.items() if r in hosts}}
        taken = assign(demands, hosts=machines)
    shares: list[Shares] = [()] * len(wanted)
    for row, shared in zip(bundles, taken, strict=True):
        if len(row) == 1:
            shares[row[0]] = shared
            continue
        left = list(reversed(shared))
        for at in row:
            # A shared bundle is dealt out need by need: none of them is worth cutting.
            rank, room = left.pop()
            shares[at] = ((rank, wanted[at].nbytes),)
            if room > wanted[at].nbytes or not left:
                left.append((rank, room - wanted[at].nbytes))
    return shares, lower_bound(demands) if bound else None


def _plans(
    target: Mapping[str, Placement],
    geometry: Mapping[str, Geometry],
    wanted: Sequence[_Wanted],
    shares: Sequence[Shares],
    budget: PlanBudget,
) -> dict[str, TransferPlan]:
    whole: dict[str, dict[tuple[int, int, int], list[int]]] = {name: {} for name in target}
    segments: dict[str, list[TransferSegment]] = {name: [] for name in target}
    for want, shared in zip(wanted, shares, strict=True):
        if len(shared) == 1:
            rank = shared[0][0]
            whole[want.param].setdefault((want.target, rank, want.locations[rank]), []).append(want.number)
            continue
        own = geometry[want.param]
        need = own.needs[want.number]
        for rank, pieces in divided(need, shared):
            location = want.locations[rank]
            parts = folded({(rank, want.target, ratio(need)): copied(need, location, own.shape, pieces)})
            segments[want.param] += parts
    plans = {}
    for name, placement in target.items():
        own = geometry[name]
        found = segments[name]
        for (ours, theirs, location), numbers in whole[name].items():
            found += [_between(each, theirs, ours) for each in own.between(tuple(numbers), location)]
        check_segments(name, found, budget)
        found.sort(key=lambda each: (each.target_rank, each.target_offset, each.source_rank, each.source_offset))
        unfilled = {rank: regions for location, regions in own.unfilled.items() for rank in placement.holders[location]}
        moved = sum([each.numel for each in found])
        plans[name] = TransferPlan(tuple(found), placement.layout.logical_shape, moved, dict(sorted(unfilled.items())))
        if plans[name].most_bytes > budget.max_plan_bytes:
            check_bytes(name, len(plans[name].to_json()), budget)
    return plans


def _between(segment: TransferSegment, source: int, target: int) -> TransferSegment:
    """The same copy between two processes that hold these locations."""
    return TransferSegment(
        source,
        segment.source_offset,
        segment.source_strides,
        target,
        segment.target_offset,
        segment.target_strides,
        segment.shape,
        segment.scale,
    )
