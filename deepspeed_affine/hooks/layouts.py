"""How every parameter of a live model is cut: the target's own maps, M_t, by DeepSpeed's names.

A layer's frozen partition comes first, as its metadata states it or as its partition function shows it; then the
patterns a user supplies; what nothing has cut is held whole by every tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_affine.errors import AffineError, Faults, InvalidMapError
from deepspeed_affine.hooks.expert_layouts import native_expert_names, placed_experts
from deepspeed_affine.hooks.partitions import ConvPartition, LayerPartition, Partition, partition_of
from deepspeed_affine.hooks.probed import Prober
from deepspeed_affine.hooks.stated import StatedInfo
from deepspeed_affine.hooks.topology import TensorParallel, gather_shapes, held_shape, tensor_parallel_of
from deepspeed_affine.hooks.versions import describes_itself, layer_metadata
from deepspeed_affine.ir import ParamAffineMap, replicated_map
from deepspeed_affine.lowering import keys, lower_layer_meta, lower_param

__all__ = ["LiveParam", "described", "live_params"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LiveParam:
    """One parameter of a live model and how it is cut.

    ``name`` is DeepSpeed's own name of it and ``universal`` the one it has in a universal folder: they differ for
    native experts, which a rank numbers from 0. ``layout`` is its canonical map over the tensor-parallel group (for
    AutoEP experts the expert-parallel group), and ``rank`` this process's location there. ``source`` says where the
    map comes from: "metadata", "probe", "patterns", "experts" or "untouched".
    """

    name: str
    universal: str
    layout: ParamAffineMap
    rank: int
    source: str


def live_params(
    model: torch.nn.Module, *, info: Mapping[str, Any] | None = None, mpu: Any = None
) -> dict[str, LiveParam]:
    """Every parameter of ``model`` by DeepSpeed's name, each with its canonical map; all ranks get equal maps.

    ``info`` is the ``universal_checkpoint_info`` of a user who cut the layers by hand, ``mpu`` the unit that knows the
    tensor-parallel group where no layer does. Call it on every rank of that group: shapes that no layer remembers are
    exchanged. One error lists every parameter that cannot be described.
    """
    found, refused = described(model, info=info, mpu=mpu)
    faults = Faults()
    faults.extend(refused.values())
    faults.raise_if_any()
    return found


def described(
    model: torch.nn.Module, *, info: Mapping[str, Any] | None = None, mpu: Any = None
) -> tuple[dict[str, LiveParam], dict[str, AffineError]]:
    """The parameters that can be described, and the error of each that cannot."""
    return _Describing(model, info, mpu).all()


@dataclass(frozen=True, slots=True)
class _Owner:
    """The partition that cut a parameter, the names of the parameters it cut with it, and which of them this is."""

    layer: torch.nn.Module
    partition: Partition
    attribute: str
    names: Mapping[str, str]


class _Describing:
    """One pass over a model."""

    def __init__(self, model: torch.nn.Module, info: Mapping[str, Any] | None, mpu: Any) -> None:
        self.model = model
        self.params = dict(model.named_parameters())
        self.held = {name: held_shape(param) for name, param in self.params.items()}
        self.uncut: set[str] = set()
        self.owners = self._owners()
        self.tp = tensor_parallel_of(model, mpu)
        self.experts = placed_experts(model)
        self.native = native_expert_names(model)
        self.info = StatedInfo(info) if info else None
        self.prober = Prober()
        self.by_layers = any(isinstance(owner.partition, LayerPartition) for owner in self.owners.values())
        self.wholes: dict[Shape, ParamAffineMap] = {}
        self.lowered: dict[object, ParamAffineMap] = {}

    def all(self) -> tuple[dict[str, LiveParam], dict[str, AffineError]]:
        found: dict[str, LiveParam] = {}
        refused: dict[str, AffineError] = {}
        self.shards = self._shards()
        for name in self.params:
            try:
                found[name] = self._checked(self._one(name))
            except AffineError as fault:
                by_hand = self._by_hand(name)
                if by_hand is None:
                    refused[name] = fault
                else:
                    found[name] = by_hand
        return found, refused

    def _one(self, name: str) -> LiveParam:
        universal = self.native.get(name, name)
        placed = self.experts.get(name)
        if placed is not None:
            return LiveParam(name, universal, placed.layout, placed.rank, "experts")
        owner = self.owners.get(name)
        stated = self._stated(name, owner)
        if stated is not None:
            return LiveParam(name, universal, stated, self._rank_of(owner), "metadata")
        if owner is not None:
            shards = {attribute: self.shards[of] for attribute, of in owner.names.items()}
            layout = self.prober.map_of(owner.partition, shards, owner.attribute, name)
            return LiveParam(name, universal, layout, self._rank_of(owner), "probe")
        if self.info is not None and (not self.by_layers or self.info.says(universal)):
            lowered = lower_param(self.info.of(universal), universal, self.shards[name], self.tp.degree)
            return LiveParam(name, universal, lowered.map, self.tp.rank, "patterns")
        source = "experts" if name in self.native else "untouched"
        return LiveParam(name, universal, self._whole(self.held[name]), self.tp.rank, source)

    def _by_hand(self, name: str) -> LiveParam | None:
        """The parameter by the user's own map of it, where its layer cannot be described; None if there is none.

        What DeepSpeed says of a layer it does not describe rightly is no such map.
        """
        universal = self.native.get(name, name)
        layout = None if self.info is None else self.info.map_of(universal)
        if layout is None:
            return None
        meta = layer_metadata(self.params[name]) or {}
        inherited = (meta.get("conversion") or {}).get(keys.AFFINE_MAP)
        layout.validate()
        if inherited is not None and ParamAffineMap.from_dict(inherited).canonical() == layout.canonical():
            return None
        return self._checked(LiveParam(name, universal, layout.canonical(), self.tp.rank, "patterns"))

    def _stated(self, name: str, owner: _Owner | None) -> ParamAffineMap | None:
        """The map of the parameter's restore metadata, where that is complete and belongs to how the layer was cut."""
        if name in self.uncut or (owner is not None and not describes_itself(owner.layer)):
            return None
        meta = layer_metadata(self.params[name])
        if meta is None or not _is_complete(meta):
            return None
        conversion = meta.get("conversion") or {}
        degree = owner.partition.degree if owner is not None else self.tp.degree
        key = (repr({field: meta.get(field) for field in _GEOMETRY}), repr(conversion.get(keys.AFFINE_MAP)), degree)
        found = self.lowered.get(key)
        if found is None:
            shape = meta.get("logical_shape") or meta.get("original_shape") or self.held[name]
            found = lower_layer_meta(meta, degree, tuple(shape), param=name)
            if found is None:
                return None
            self.lowered[key] = found
        return found

    def _checked(self, described: LiveParam) -> LiveParam:
        """``described``, its map agreeing with the shard this process really holds."""
        held = self.held[described.name]
        expected = described.layout.shard_shapes.get(described.rank)
        if expected is None or math.prod(held) != math.prod(expected):
            raise InvalidMapError(
                f"Parameter {described.name}: rank {described.rank} of its group holds {held} "
                f"({math.prod(held)} elements), but its layout ({described.source}) says {expected}. The layer was not "
                "partitioned as its class does it: describe it in universal_checkpoint_info by hand, with an "
                "affine_map of its own.",
                param=described.name,
                rank=described.rank,
            )
        return described

    def _rank_of(self, owner: _Owner | None) -> int:
        if owner is None:
            return self.tp.rank
        return owner.partition.rank

    def _whole(self, shape: Shape) -> ParamAffineMap:
        if shape not in self.wholes:
            self.wholes[shape] = replicated_map(shape, self.tp.degree).canonical()
        return self.wholes[shape]

    def _owners(self) -> dict[str, _Owner]:
        """By canonical name, the layer that cut a parameter; of a tied one, the layer and not its plain partner."""
        canonical = {id(param): name for name, param in self.params.items()}
        owners: dict[str, _Owner] = {}
        for module in self.model.modules():
            partition = partition_of(module)
            if partition is None:
                if hasattr(module, "_tp_partition"):
                    self.uncut.update(canonical[id(param)] for param in module.parameters(recurse=False))
                continue
            holder = module.conv if isinstance(partition, ConvPartition) else module
            names = {
                attribute: canonical[id(param)]
                for attribute, param in holder.named_parameters(recurse=False)  # type: ignore[union-attr]
                if attribute in ("weight", "bias")
            }
            for attribute, name in names.items():
                owners.setdefault(name, _Owner(module, partition, attribute, names))
        self.uncut -= set(owners)
        return owners

    def _shards(self) -> dict[str, tuple[Shape, ...]]:
        """The ranks' shapes of the parameters whose description needs them, exchanged in one collective."""
        wanted: dict[str, Shape] = {}
        for name, owner in self.owners.items():
            if self._stated_or_none(name, owner) is None:
                wanted.update({of: self.held[of] for of in owner.names.values()})
        if self.info is not None:
            wanted.update({name: shape for name, shape in self.held.items() if name not in self.owners})
        remembered = {name: (shape,) * self.tp.degree for name, shape in self.held.items()}
        if all(self._remembers(name) for name in wanted):
            return remembered
        return {**remembered, **gather_shapes(wanted, self._group())}

    def _stated_or_none(self, name: str, owner: _Owner) -> ParamAffineMap | None:
        try:
            return self._stated(name, owner)
        except AffineError:
            return None

    def _remembers(self, name: str) -> bool:
        owner = self.owners.get(name)
        if owner is None:
            return False
        return all(attribute in owner.partition.shapes_known for attribute in owner.names)

    def _group(self) -> TensorParallel:
        return self.tp


_GEOMETRY = (
    *("replicated", "partition_dim", "logical_shape", "original_shape", "sub_param_sizes", "sub_param_shape"),
    *("partition_sizes", keys.SHARD_WIDTHS, keys.VERSION),
)


def _is_complete(meta: Mapping[str, Any]) -> bool:
    """Whether the metadata says where each rank was cut, and does not leave it to an even division."""
    conversion = meta.get("conversion") or {}
    if conversion.get("unsupported_reason"):
        return False
    if conversion.get(keys.AFFINE_MAP) is not None or meta.get("replicated"):
        return True
    return meta.get("partition_sizes") is not None or meta.get(keys.SHARD_WIDTHS) is not None
