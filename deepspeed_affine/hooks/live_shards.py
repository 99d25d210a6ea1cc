"""Where a live engine's weights lie in its job, and this process's own: what a live transfer is planned from.

Under ZeRO-3 a parameter lies in flat parts over data-parallel ranks. Those parts are read where they are; nothing is
gathered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_affine.errors import AffineError, Faults, IntegrityError, PolicyError, UnsupportedLayoutError
from deepspeed_affine.execute.live import TIMEOUT_SECONDS
from deepspeed_affine.execute.live_sides import faults_of_all
from deepspeed_affine.execute.wire import Wire
from deepspeed_affine.hooks.given import ENGINE, require_info
from deepspeed_affine.hooks.layouts import LiveParam, live_params
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, compose_maps
from deepspeed_affine.ir.ints import product
from deepspeed_affine.plan.partition import reserved_numel
from deepspeed_affine.plan.placement import Placement

__all__ = ["LiveShards", "live_shards"]


@dataclass(frozen=True, slots=True)
class LiveShards:
    """One side of a transfer: every parameter's placement in ranks of the group, and this process's own shards.

    ``placements`` are equal on all processes. ``shards`` are the parameters' own memory.
    """

    placements: Mapping[str, Placement]
    shards: Mapping[str, torch.Tensor]


def live_shards(
    engine: Any,
    group: Any = None,
    *,
    filled: bool = False,
    info: Mapping[str, Any] | None = None,
    mpu: Any = None,
) -> LiveShards:
    """The weights of ``engine``, an engine or a model, as one side of a ``transfer`` over ``group`` (or the world).

    Call it on every process of the group, with None where there is no such engine. ``info`` and ``mpu`` are as in
    ``attach``. Say ``filled`` of the side that is to be written: under ZeRO-3 that is refused, because what is gathered
    and the optimizer's own weights would keep the old values; under other stages the module's weights are filled, and
    an optimizer that steps afterwards writes its own over them. Parameters go by their names in a universal folder.

    One error on all processes lists what any of them cannot describe, in what they differ, and parts nobody holds.
    """
    wire = Wire(group, TIMEOUT_SECONDS)
    faults = Faults()
    found: dict[str, _Held] = {}
    try:
        if engine is not None:
            found = _of_engine(engine, filled, info, mpu)
    except AffineError as fault:
        faults.add(fault)
    except Exception as error:
        # The others wait for what this process has to say.
        faults.add(AffineError(f"{type(error).__name__}: {error}"))
    rows = [json.loads(row) for row in wire.gather(_told(found, faults).encode())]
    return LiveShards(_placements(rows), {name: held.shard for name, held in found.items() if held.shard is not None})


@dataclass(frozen=True, slots=True)
class _Held:
    """A parameter's map over whoever shares it, this process's location there, None for none, and its shard."""

    layout: ParamAffineMap
    location: int | None
    itemsize: int
    shard: torch.Tensor | None


def _of_engine(engine: Any, filled: bool, info: Mapping[str, Any] | None, mpu: Any) -> dict[str, _Held]:
    require_info(info, "live_shards")
    is_engine = all(hasattr(engine, name) for name in ENGINE)
    model = engine.module if is_engine else engine
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(
            f"was given a {type(engine).__name__}; expected the engine that deepspeed.initialize returns, "
            "a model, or None where this process has neither."
        )
    params = dict(model.named_parameters())
    cuts: dict[tuple[int, int], ParamAffineMap] = {}
    found: dict[str, _Held] = {}
    for name, live in live_params(model, info=info, mpu=mpu).items():
        param = params[name]
        if not hasattr(param, "ds_tensor"):
            found[live.universal] = _Held(live.layout, live.rank, param.element_size(), param.detach())
        elif filled:
            raise UnsupportedLayoutError(
                f"parameter {name!r}: lies in parts under ZeRO-3, and filling those would leave gathered copies and "
                "the optimizer's own weights as they were. Fill such an engine with deepspeed_affine.load_checkpoint; "
                "it can be the source of a transfer.",
                param=name,
            )
        else:
            found[live.universal] = _part(name, live, param, cuts)
    return found


def _part(name: str, live: LiveParam, param: Any, cuts: dict[tuple[int, int], ParamAffineMap]) -> _Held:
    """The flat part this process holds of a parameter under ZeRO-3; equal layouts are cut once."""
    dist = torch.distributed
    size, rank = dist.get_world_size(param.ds_process_group), dist.get_rank(param.ds_process_group)
    key = (id(live.layout), size)
    if key not in cuts:
        cuts[key] = _cut(live.layout, size)
    numel = product(live.layout.shard_shapes[live.rank])
    part = reserved_numel(numel, size)
    held = max(0, min(part, numel - rank * part))
    stored = param.ds_tensor
    if stored.numel() < held:
        raise UnsupportedLayoutError(
            f"parameter {name!r}: this process holds {stored.numel()} elements of it in memory, and its part under "
            f"ZeRO-3 over {size} ranks has {held}. Parameters offloaded to NVMe cannot be sent from there: save, and "
            "load with deepspeed_affine.load_checkpoint.",
            param=name,
        )
    layout = cuts[key]
    if not held:
        return _Held(layout, None, param.element_size(), None)
    return _Held(layout, live.rank * size + rank, stored.element_size(), stored.detach().view(-1)[:held])


def _cut(layout: ParamAffineMap, size: int) -> ParamAffineMap:
    """The map whose location ``shard * size + r`` is the part rank ``r`` holds of that shard, laid out flat."""
    inner = {}
    for shard in layout.ranks:
        numel = layout.shard_numel(shard)
        part = reserved_numel(numel, size)
        spans = {
            shard * size + rank: (rank * part, min(part, numel - rank * part))
            for rank in range(size)
            if rank * part < numel
        }
        inner[shard] = ParamAffineMap(
            layout.shard_shapes[shard],
            {place: (held,) for place, (_, held) in spans.items()},
            {place: [AffinePiece((held,), start, (1,), 0, (1,), [place])] for place, (start, held) in spans.items()},
        )
    return compose_maps(layout, inner)


def _told(found: Mapping[str, _Held], faults: Faults) -> str:
    numbers: dict[int, int] = {}
    layouts: list[str] = []
    for held in found.values():
        if id(held.layout) not in numbers:
            numbers[id(held.layout)] = len(layouts)
            layouts.append(json.dumps(held.layout.to_dict(), sort_keys=True, separators=(",", ":")))
    return json.dumps(
        {
            "layouts": layouts,
            "params": {name: [numbers[id(held.layout)], held.location, held.itemsize] for name, held in found.items()},
            "faults": [fault.to_dict() for fault in faults],
        },
        separators=(",", ":"),
    )


def _placements(rows: list[dict[str, Any]]) -> dict[str, Placement]:
    """Every parameter's placement, from what all processes say of it; raises alike on all."""
    faults = Faults()
    read: dict[str, ParamAffineMap] = {}
    known: dict[str, tuple[str, int, int]] = {}
    holders: dict[str, dict[int, list[int]]] = {}
    faults.extend(faults_of_all(rows, "live_shards: "))
    for rank, row in enumerate(rows):
        for name, (number, location, itemsize) in row["params"].items():
            text = row["layouts"][number]
            described, width, first = known.setdefault(name, (text, itemsize, rank))
            if (described, width) != (text, itemsize):
                faults.add(
                    IntegrityError(
                        f"parameter {name!r}: ranks {first} and {rank} describe it differently (as {width} and "
                        f"{itemsize} bytes an element, or cut in other ways); expected one engine of one model. Pass "
                        "None where a process is not part of it.",
                        param=name,
                        rank=rank,
                    )
                )
            if location is not None:
                holders.setdefault(name, {}).setdefault(location, []).append(rank)
    faults.raise_if_any()
    found = {}
    for name, (text, itemsize, _) in sorted(known.items()):
        if text not in read:
            read[text] = ParamAffineMap.from_dict(json.loads(text))
        layout, held = read[text], holders.get(name, {})
        missing = [location for location in layout.ranks if location not in held]
        if missing:
            faults.add(
                IntegrityError(
                    f"parameter {name!r}: no process of the group holds part {missing[0]} of {len(layout.ranks)}; "
                    "expected the engine on all its processes. Call live_shards on each of them, with a group that has "
                    "all.",
                    param=name,
                )
            )
        else:
            found[name] = Placement(layout, {location: tuple(held[location]) for location in layout.ranks}, itemsize)
    faults.raise_if_any()
    return found
