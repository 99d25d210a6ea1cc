"""What the ranks of ``live_ranks.py`` move, and what the tests ask of it; no process is started here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_affine.execute.memory import extract
from deepspeed_affine.ir import block_gather_map, contiguous_split_map, replicated_map
from deepspeed_affine.plan.grid import Tensor, Topology, state_placements, weight_placements
from deepspeed_affine.plan.model import ModelPlan, plan_model
from deepspeed_affine.plan.placement import Placement

WORLD = 4
FILLER = 0x5A
"""The byte that target shards are full of beforehand."""


@dataclass(frozen=True, slots=True)
class Move:
    """Where the parameters lie before and after, in ranks of a group of ``members`` of the world."""

    source: Mapping[str, Placement]
    target: Mapping[str, Placement]
    dtypes: Mapping[str, torch.dtype]
    members: tuple[int, ...] = tuple(range(WORLD))
    valid_rows: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self) -> ModelPlan:
        return plan_model(self.target, self.source, valid_rows=self.valid_rows)

    def full(self, name: str, side: Mapping[str, Placement]) -> torch.Tensor:
        """F as that side has it: equal up to the valid rows, and other bytes in the padding."""
        shape, dtype = side[name].layout.logical_shape, self.dtypes[name]
        whole = filled(shape, dtype, seed=sum(name.encode()))
        rows = self.valid_rows.get(name)
        if rows is not None and side is self.source:
            whole[rows:] = float("nan")
        return whole

    def shard(self, name: str, side: Mapping[str, Placement], rank: int) -> torch.Tensor | None:
        """What rank ``rank`` holds of F on that side."""
        for location, ranks in side[name].holders.items():
            if rank in ranks:
                power = self.options.get("scale_power", 1)
                layout = side[name].layout
                return extract(layout, self.full(name, side), location, power, scaled_states="power")
        return None

    def blank(self, name: str, rank: int) -> torch.Tensor | None:
        """A target shard before it is filled."""
        shard = self.shard(name, self.target, rank)
        if shard is None:
            return None
        raw = torch.full((shard.numel() * shard.element_size(),), FILLER, dtype=torch.uint8)
        return raw.view(shard.dtype).view(shard.shape)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    if numel > 1 << 20:
        return torch.arange(numel, dtype=dtype).view(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=rng).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=rng, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def on(layout: Any, ranks: Mapping[int, tuple[int, ...]], itemsize: int) -> Placement:
    return Placement(layout, ranks, itemsize)


def each(*ranks: int) -> dict[int, tuple[int, ...]]:
    return {location: (rank,) for location, rank in enumerate(ranks)}


def split(shape: tuple[int, ...], sizes: tuple[int, ...], axis: int = 0) -> Any:
    return contiguous_split_map(shape, sizes, axis)


def one(source: Placement, target: Placement, dtype: torch.dtype = torch.float32, **more: Any) -> Move:
    return Move({"w": source}, {"w": target}, {"w": dtype}, **more)


SHAPE = (64, 48)
HALVES, QUARTERS = (32, 32), (16,) * 4


def tp2_to_two_singles() -> Move:
    """Each of the two ends with the whole."""
    return one(on(split(SHAPE, HALVES), each(0, 1), 4), on(replicated_map(SHAPE, 1), {0: (0, 1)}, 4), members=(0, 1))


def tp2_to_two_other_processes() -> Move:
    """A trainer on two, evaluators on two others, each with the whole; columns, so nothing is one run."""
    columns = split(SHAPE, (24, 24), 1)
    return one(on(columns, each(0, 1), 4), on(replicated_map(SHAPE, 1), {0: (2, 3)}, 4))


def tp4_to_tp2() -> Move:
    return one(on(split(SHAPE, QUARTERS), each(0, 1, 2, 3), 4), on(split(SHAPE, HALVES), each(0, 1), 4))


def tp4_to_tp2_twice() -> Move:
    two = on(split(SHAPE, (24, 24), 1), {0: (0, 2), 1: (3, 1)}, 2)
    return one(on(split(SHAPE, (12,) * 4, 1), each(3, 1, 2, 0), 2), two, torch.bfloat16)


def replicated_to_sharded() -> Move:
    """The third process sends nothing and gets nothing of it."""
    return one(on(replicated_map(SHAPE, 1), {0: (0, 3)}, 8), on(split(SHAPE, HALVES), each(1, 3), 8), torch.float64)


def uneven_heads() -> Move:
    heads = block_gather_map((7 * 4, 10), {0: [0, 2, 5], 1: [1, 6], 2: [3, 4]}, 4, 0)
    return one(on(heads, each(2, 0, 3), 4), on(split((28, 10), (16, 12)), each(1, 3), 4))


def padded_vocabulary() -> Move:
    source = on(split((16, 12), (8, 8)), each(0, 1), 4)
    return one(source, on(split((15, 12), (5, 5, 5)), each(1, 2, 3), 4), valid_rows={"w": 13})


def scaled_bias(power: int) -> Move:
    """Held times 1/2 by two ranks, then times 1/4 by three; and a parameter that is not scaled."""
    b, w = (1031,), (40, 6)
    options = {"scale_power": power, "scaled_states": "power"} if power != 1 else {}
    return Move(
        {"b": on(replicated_map(b, 2, 0.5), each(0, 1), 2), "w": on(split(w, (20, 20)), each(0, 1), 2)},
        {"b": on(replicated_map(b, 3, 0.25), each(1, 2, 3), 2), "w": on(split(w, (10, 14, 16)), each(1, 2, 3), 2)},
        dict.fromkeys("bw", torch.bfloat16),
        options=options,
    )


def every_dtype() -> Move:
    names = ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "uint8", "int64", "complex128"]
    dtypes = {name: getattr(torch, name) for name in [*names, "complex64", "int16"]}
    source, target = split((30, 7), (11, 19)), split((30, 7), (3, 1, 3), 1)
    return Move(
        {name: on(source, each(0, 2), dtype.itemsize) for name, dtype in dtypes.items()},
        {name: on(target, each(1, 2, 3), dtype.itemsize) for name, dtype in dtypes.items()},
        dtypes,
    )


def within_a_part_of_the_job() -> Move:
    """Ranks are those of the group, whose first member is process 3 of the world."""
    return one(on(split(SHAPE, HALVES), each(0, 1), 4), on(split(SHAPE, (48,), 1), each(1), 4), members=(1, 3))


def nothing_to_send() -> Move:
    place = on(split(SHAPE, QUARTERS), each(0, 1, 2, 3), 4)
    return one(place, place)


CASES: dict[str, Callable[[], Move]] = {
    make.__name__: make
    for make in (
        *(tp2_to_two_singles, tp2_to_two_other_processes, tp4_to_tp2, tp4_to_tp2_twice, replicated_to_sharded),
        *(uneven_heads, padded_vocabulary, every_dtype, within_a_part_of_the_job, nothing_to_send),
    )
}
CASES |= {
    "scaled_bias": lambda: scaled_bias(1),
    "scaled_first_moment": lambda: scaled_bias(-1),
    "scaled_second_moment": lambda: scaled_bias(-2),
}

MODEL = [
    Tensor("embed", (131, 24), 0, 0, 0.0),
    Tensor("q", (24, 300), 0, 6, 0.2),
    Tensor("o", (300, 24), 1, 6, 0.4),
    Tensor("norm", (5,), None, 0, 0.6),
    Tensor("scalar", (), None, 0, 0.9),
    Tensor("head", (131, 24), 0, 0, 1.0),
]
TOPOLOGIES = [Topology(4), Topology(2, 1, 2, 0), Topology(1, 2, 2, 1), Topology(1, 1, 4, 3), Topology(3)]


def between(before: Topology, after: Topology) -> Move:
    place = state_placements if after.zero else weight_placements
    dtypes = {tensor.name: torch.float32 for tensor in MODEL}
    return Move(weight_placements(MODEL, before, 4), place(MODEL, after, 4), dtypes)


for _before, _after in itertools.permutations(TOPOLOGIES, 2):
    CASES[f"{_before} to {_after}"] = lambda before=_before, after=_after: between(before, after)

WIDE = (2048, 12800)
"""Of four bytes each: 100 MiB."""

LARGE_STAGING = 8 << 20


def columns_to_rows() -> Move:
    """So that no block is one run where it comes from, and every one is packed."""
    columns, rows = split(WIDE, (6400, 6400), 1), split(WIDE, (1024, 1024))
    return one(on(columns, each(0, 1), 4), on(rows, each(1, 0), 4), members=(0, 1))


def columns_to_other_columns() -> Move:
    """So that every block is packed, and taken apart where it arrives."""
    columns = split(WIDE, (6400, 6400), 1)
    others = block_gather_map(WIDE, {0: [0, 2], 1: [1, 3]}, 3200, 1)
    return one(on(columns, each(0, 1), 4), on(others, each(0, 1), 4), members=(0, 1))


def scaled_and_large() -> Move:
    """Multiplied where it arrives, which is done in double precision."""
    halves = {0: (0,), 1: (1,)}
    return one(
        on(replicated_map(WIDE, 1, 0.5), {0: (0,)}, 4), on(replicated_map(WIDE, 2, 0.25), halves, 4), members=(0, 1)
    )


LARGE: dict[str, Callable[[], Move]] = {
    make.__name__: make for make in (columns_to_rows, columns_to_other_columns, scaled_and_large)
}

FAULTS = {
    "other plan": r"different plans \(ranks 0, 1, 3: .*; ranks 2: ",
    "other options": r"different options \(.*32768.*65536",
    "wrong dtype": r"rank 2: parameter 'w': this process holds torch.bfloat16, and the plan is for elements of 4 bytes",
    "other dtype": r"rank 2: parameter 'w': holds torch.int32, and rank 0 holds torch.float32",
    "too short": r"rank 2: source shard of 'w': has 767 elements; the plan reads 768",
    "target too long": r"rank 1: target shard of 'w': has 1537 elements; the plan is for 1536",
    "missing": r"rank 3: source shard of 'w': none is given",
    "not dense": r"rank 1: target shard of 'w': its elements do not lie one after another",
    "meta": r"rank 2: source shard of 'w': is a meta tensor",
    "shared memory": r"rank 0: parameter 'w': its .* share memory",
    "no plan": r"rank 1: The plan is None",
    "bad staging": r"rank 0: staging_bytes is 5",
    "endless staging": r"rank 2: staging_bytes is ",
    "endless power": r"rank 1: scale_power is ",
    "overlapping plan": r"rank 0: target shard of 'w': the plan fills some of its addresses twice",
    "offset below zero": r"rank 0: parameter 'w': a segment of its plan has numbers below zero",
    "process below zero": r"rank 0 and 3 more: The plan names process -1, but the group has 4",
    "no scale": r"rank 0 and 3 more: parameter 'w': a segment of its plan has .* a scale that is no finite number",
    "bad progress": r"rank 2: progress is 5",
    "bad timeout": r"rank 3: timeout is 'soon'",
    "two sides": r"rank 3: The plan numbers the processes of its two sides apart",
    "raises": r"rank 2: ZeroDivisionError: on purpose",
}
ENDINGS = ("SIGKILL", "SIGSTOP", "SIGKILL in the last round", "SIGSTOP of one that has nothing to send")
