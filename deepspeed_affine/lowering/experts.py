"""Experts: where every expert of a mixture lives, as a map over expert-parallel ranks.

AutoEP stacks a layer's experts along axis 0 of one parameter; a rank holds some of them, packed in its own
order. A versioned placement descriptor names them, older checkpoints hold the uniform one by implication.
Locations of these maps are expert-parallel ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, InvalidMapError
from deepspeed_affine.ir import AFFINE_MAP_FORMAT_VERSION, AffinePiece, ParamAffineMap
from deepspeed_affine.ir.ints import row_major_strides
from deepspeed_affine.lowering.reading import as_count, as_mapping, naming, refuse

__all__ = [
    "EXPERT_WEIGHTS",
    "ExpertLayer",
    "NativeExperts",
    "as_expert",
    "expert_layers",
    "expert_map",
    "folded_expert_rank",
    "recorded_expert_rank",
    "zero12_expert_rank",
]

EXPERT_WEIGHTS = ("w1", "w2", "w3")
PLACEMENT_VERSION = 1
Shapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One mixture layer: ``placement[r]`` lists the global experts of expert-parallel rank ``r`` in packed order."""

    prefix: str
    moe_layer_id: int
    num_experts: int
    placement: tuple[tuple[int, ...], ...]
    stored_maps: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        held = {expert for experts in self.placement for expert in experts}
        missing = list(islice((e for e in range(self.num_experts) if e not in held), 10))
        if missing:
            raise InvalidMapError(
                f"expert layer {self.prefix!r}: no rank holds experts {missing} of {self.num_experts}; every "
                "expert must be placed. The placement record belongs to another model.",
                param=self.prefix,
            )

    @property
    def ep_size(self) -> int:
        return len(self.placement)

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{weight}" for weight in EXPERT_WEIGHTS)


def expert_layers(metadata: Any, *, file: str) -> dict[str, ExpertLayer]:
    """The layers recorded under ``ds_autoep_layers``, by parameter name; empty when there are none."""
    if metadata is None:
        return {}
    if not isinstance(metadata, list) or not all(isinstance(entry, Mapping) for entry in metadata):
        raise CheckpointFormatError(
            f"{file}: 'ds_autoep_layers' is not a list of dictionaries. The file is damaged: use another checkpoint.",
            file=file,
        )
    by_param: dict[str, ExpertLayer] = {}
    for entry in metadata:
        layer = _layer(entry, file)
        for name in layer.params:
            if name in by_param:
                raise CheckpointFormatError(
                    f"{file}: two expert layers claim parameter {name!r}; each prefix may appear once.",
                    param=name,
                    file=file,
                )
            by_param[name] = layer
    return by_param


def expert_map(layer: ExpertLayer, name: str, expert_shape: Sequence[int]) -> ParamAffineMap:
    """The canonical map of one stacked expert parameter; a map stored beside the placement must agree with it.

    ``expert_shape`` is the shape of one expert. F has shape ``(num_experts, *expert_shape)``.
    """
    inner = tuple(expert_shape)
    logical = (layer.num_experts, *inner)
    holders: dict[int, set[int]] = defaultdict(set)
    for rank, experts in enumerate(layer.placement):
        for expert in experts:
            holders[expert].add(rank)
    strides = row_major_strides(logical)
    numel = 1
    for extent in inner:
        numel *= extent
    pieces: dict[int, list[AffinePiece]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for rank, experts in enumerate(layer.placement):
        shapes[rank] = (len(experts), *inner)
        pieces[rank] = [
            AffinePiece(
                shape=(1, *inner),
                source_offset=expert * numel,
                source_strides=strides,
                dest_offset=slot * numel,
                dest_strides=row_major_strides((1, *inner)),
                locations=sorted(holders[expert]),
            )
            for slot, expert in enumerate(experts)
        ]
    with naming(name):
        built = ParamAffineMap(logical, shapes, pieces)
        built.validate()
        placed = built.canonical()
        stored = _stored_map(layer, name)
        agrees = stored is None or stored.canonical() == placed
    if not agrees:
        raise InvalidMapError(
            f"parameter {name!r}: the stored affine map disagrees with the expert placement recorded beside it; "
            "they must describe the same layout. The checkpoint was edited or mixes two saves.",
            param=name,
        )
    return placed


NATIVE_EXPERT = re.compile(r"(?P<prefix>.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(?P<id>\d+)(?P<rest>\..*)")


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Experts of DeepSpeed's own MoE layers: every rank numbers its experts from 0, the expert files globally.

    ``layers`` gives, by the prefix a layer's expert parameters share, its experts in all and on one rank.
    """

    layers: Mapping[str, tuple[int, int]]

    @classmethod
    def from_names(cls, global_names: Iterable[str], local_names: Iterable[str]) -> NativeExperts:
        """The layers named by the expert files, ``local_names`` being those of one rank's parameters."""
        counts, local = _expert_counts(global_names), _expert_counts(local_names)
        for prefix in local:
            if prefix not in counts:
                raise CheckpointFormatError(
                    f"expert layer {prefix!r}: a rank's optimizer holds {local[prefix]} of its experts, and no expert "
                    "file says how many there are in all; expected files such as "
                    "layer_0_expert_0_mp_rank_00_model_states.pt. Copy them from where the checkpoint was saved.",
                    param=prefix,
                )
        for prefix, count in counts.items():
            if not local.get(prefix) or count % local[prefix]:
                raise CheckpointFormatError(
                    f"expert layer {prefix!r}: the expert files number {count} experts, a rank's optimizer holds "
                    f"{local.get(prefix, 0)}; the ranks must hold equal parts. An expert file is missing.",
                    param=prefix,
                )
        return cls({prefix: (count, local[prefix]) for prefix, count in counts.items()})

    def place(self, name: str, dp_rank: int, dp_degree: int, data_before_expert: bool) -> tuple[str, int] | None:
        """``(global name, rank among its data-parallel holders)`` of a rank's local expert parameter, or None."""
        match = NATIVE_EXPERT.fullmatch(name)
        if match is None or match["prefix"] not in self.layers:
            return None
        count, local = self.layers[match["prefix"]]
        ep_rank, rank = zero12_expert_rank(dp_rank, dp_degree, count // local, data_before_expert)
        return f"{match['prefix']}{ep_rank * local + int(match['id'])}{match['rest']}", rank

    def globalised(self, shapes: Mapping[str, Shapes]) -> dict[str, Shapes]:
        """``shapes`` with every local expert parameter listed once for each expert-parallel rank."""
        result: dict[str, Shapes] = {}
        for name, found in shapes.items():
            match = NATIVE_EXPERT.fullmatch(name)
            if match is None or match["prefix"] not in self.layers:
                result[name] = found
                continue
            count, local = self.layers[match["prefix"]]
            for expert in range(int(match["id"]), count, local):
                result[f"{match['prefix']}{expert}{match['rest']}"] = found
        return result


def as_expert(value: Any, expert: int | None, *, file: str) -> Mapping[str, Any]:
    """``value``, the weights an expert file holds: those of the expert that its name says, and nothing else."""
    weights = as_mapping(value, "the expert's weights", file)
    for name in weights:
        match = NATIVE_EXPERT.fullmatch(name)
        if match is None or int(match["id"]) != expert:
            raise CheckpointFormatError(
                f"{file}: holds {name!r}, which is no parameter of expert {expert}; only that expert's are expected. "
                "The file belongs to another checkpoint: copy it from where this one was saved.",
                param=name,
                file=file,
            )
    return weights


def _expert_counts(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        match = NATIVE_EXPERT.fullmatch(name)
        if match:
            counts[match["prefix"]] = max(counts.get(match["prefix"], 0), int(match["id"]) + 1)
    return counts


def zero12_expert_rank(dp_rank: int, dp_degree: int, ep_size: int, data_before_expert: bool) -> tuple[int, int]:
    """``(expert rank, rank within its expert-data-parallel group)`` of a data-parallel rank under ZeRO-1 and 2."""
    if dp_degree % ep_size:
        raise CheckpointFormatError(
            f"data-parallel degree {dp_degree} is not divisible by the expert-parallel degree {ep_size}; every "
            "expert rank must own as many data-parallel ranks. The files come from different runs."
        )
    if data_before_expert:
        return divmod(dp_rank, dp_degree // ep_size)
    return dp_rank % ep_size, dp_rank // ep_size


def recorded_expert_rank(record: Any, layer: ExpertLayer, *, file: str) -> tuple[int, int]:
    """``(expert rank, rank within its expert-data-parallel group)`` as a ZeRO-3 model-state file records it."""
    ep_rank = as_count(record.get("ep_rank"), f"'ep_rank' of expert layer {layer.prefix!r}", file)
    rank = record.get("expert_data_parallel_rank")
    return _known(ep_rank, layer, file), as_count(rank, "'expert_data_parallel_rank'", file)


def folded_expert_rank(folding: Any, name: str, layer: ExpertLayer, *, file: str) -> tuple[int, int]:
    """The same as an optimizer file's ``folding`` record gives it, where tensor and expert parallelism share ranks."""
    record = as_mapping(folding, "'folding'", file)
    families = as_mapping(record.get("param_families"), "'param_families' of 'folding'", file)
    family = as_mapping(families.get(name), f"the folding record of {name!r}", file)
    rank = as_count(family.get("zero_partition_rank"), f"'zero_partition_rank' of {name!r}", file)
    return _known(as_count(record.get("ep_rank"), "'ep_rank' of 'folding'", file), layer, file), rank


def _known(ep_rank: int, layer: ExpertLayer, file: str) -> int:
    if ep_rank >= layer.ep_size:
        raise CheckpointFormatError(
            f"{file}: is of expert-parallel rank {ep_rank}, but layer {layer.prefix!r} has {layer.ep_size} ranks. The "
            "files come from different runs.",
            file=file,
        )
    return ep_rank


def _layer(entry: Mapping[str, Any], file: str) -> ExpertLayer:
    prefix = entry.get("expert_key_prefix")
    if not isinstance(prefix, str):
        raise refuse(file, "'expert_key_prefix' of an expert layer", prefix, "a string")
    count, local, ep_size = (
        as_count(entry.get(key), f"{key!r} of expert layer {prefix!r}", file, least=1)
        for key in ("num_experts", "num_local_experts", "ep_size")
    )
    placement = entry.get("expert_placement")
    if placement is None:
        if local * ep_size != count:
            raise CheckpointFormatError(
                f"{file}: expert layer {prefix!r} has {count} experts but {ep_size} ranks with {local} each; without "
                "a placement record the two must agree.",
                param=prefix,
                file=file,
            )
        placed = tuple(tuple(range(rank * local, (rank + 1) * local)) for rank in range(ep_size))
    else:
        placed = _placement(placement, prefix, count, ep_size, file)
    maps = entry.get("affine_maps")
    if maps:
        as_mapping(maps, f"'affine_maps' of expert layer {prefix!r}", file)
        as_mapping(maps.get("params") or {}, f"'params' of the affine maps of expert layer {prefix!r}", file)
    layer_id = as_count(entry.get("moe_layer_id", 0), f"'moe_layer_id' of expert layer {prefix!r}", file)
    return ExpertLayer(prefix, layer_id, count, placed, maps or None)


def _placement(record: Any, prefix: str, count: int, ep_size: int, file: str) -> tuple[tuple[int, ...], ...]:
    def fault(fact: str) -> CheckpointFormatError:
        return CheckpointFormatError(
            f"{file}: the expert placement of {prefix!r} {fact}. Update this package, or save again.",
            param=prefix,
            file=file,
        )

    if not isinstance(record, Mapping):
        raise fault(f"is a {type(record).__name__}; a dictionary is expected")
    if record.get("version") != PLACEMENT_VERSION:
        raise fault(f"has version {record.get('version')!r}; this package reads {PLACEMENT_VERSION}")
    if record.get("num_experts") != count or record.get("ep_size") != ep_size:
        raise fault(
            f"covers {record.get('num_experts')!r} experts on {record.get('ep_size')!r} ranks; its layer has {count} "
            f"on {ep_size}"
        )
    entries = record.get("ranks")
    if not isinstance(entries, list) or len(entries) != ep_size:
        raise fault(f"does not list {ep_size} ranks")
    placed: dict[int, tuple[int, ...]] = {}
    for item in entries:
        rank, experts = (item.get("rank"), item.get("experts")) if isinstance(item, Mapping) else (None, None)
        if type(rank) is not int or not 0 <= rank < ep_size or rank in placed:
            raise fault(f"names rank {rank!r}; each of 0 to {ep_size - 1} is expected once")
        if not isinstance(experts, list) or any(type(e) is not int or not 0 <= e < count for e in experts):
            raise fault(f"gives rank {rank} the experts {experts!r}; numbers from 0 to {count - 1} are expected")
        if len(set(experts)) != len(experts):
            raise fault(f"gives rank {rank} an expert twice")
        placed[rank] = tuple(experts)
    return tuple(placed[rank] for rank in range(ep_size))


def _stored_map(layer: ExpertLayer, name: str) -> ParamAffineMap | None:
    if layer.stored_maps is None:
        return None
    version = layer.stored_maps.get("version")
    if version != AFFINE_MAP_FORMAT_VERSION:
        raise CheckpointFormatError(
            f"parameter {name!r}: its stored affine map has version {version!r}; this package reads "
            f"{AFFINE_MAP_FORMAT_VERSION}. Update this package.",
            param=name,
        )
    entry = (layer.stored_maps.get("params") or {}).get(name)
    if entry is None:
        raise CheckpointFormatError(
            f"parameter {name!r}: its expert layer stores affine maps, but none for this parameter.", param=name
        )
    return ParamAffineMap.from_dict(entry)
