"""The layer's own partition function, run on tensors that are not the layer's: by rank, and never on its parameters.

The layer is stood in for by a shallow copy of itself whose parameters are the tensors under examination, so whatever
the class does (per-sub-parameter splits, permutations, blocks held twice, a bias divided by the world size) is what is
run. No collective is entered and no live tensor is touched.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_affine.hooks.topology import is_partitioned_conv, is_partitioned_layer

__all__ = ["ConvPartition", "LayerPartition", "Partition", "partition_of"]

LAYERS = "deepspeed.module_inject.layers"

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape | None]


class Partition(ABC):
    """A layer's cut: ``run`` gives what a rank holds of ``weight`` and ``bias`` when both are as given."""

    degree: int
    rank: int
    """This process's own."""
    shapes_known: dict[str, Shape | None]
    """The shapes of F that the layer remembers, by attribute; missing ones are to be found from the shards."""

    @abstractmethod
    def run(self, rank: int, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        """What ``rank`` holds of either, by attribute."""

    @abstractmethod
    def key(self) -> object:
        """What the cut depends on besides the shapes: layers with equal keys are cut alike."""

    def function(self, attribute: str, shapes: Shapes) -> Callable[[torch.Tensor, int], Any]:
        """``(full, rank) -> shard`` of one of the two, the other being zeros."""
        other = "bias" if attribute == "weight" else "weight"

        def partition(full: torch.Tensor, rank: int) -> torch.Tensor | None:
            shape = shapes.get(other)
            filled = None if shape is None else torch.zeros((), dtype=full.dtype, device=full.device).expand(shape)
            given = {attribute: full, other: filled}
            weight = given["weight"]
            if weight is None:
                return None
            return self.run(rank, weight, given["bias"])[attribute]

        return partition


class LayerPartition(Partition):
    """The cut of an AutoTP layer, by its ``_tp_partition``."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.degree = int(layer.tp_world_size)
        self.rank = int(layer.tp_index)
        bias = getattr(layer, "bias", None)
        weight_shape = getattr(layer, "_orig_weight_shape", None)
        self.shapes_known = {}
        if weight_shape is not None:
            self.shapes_known["weight"] = tuple(weight_shape)
        if bias is None:
            self.shapes_known["bias"] = None
        elif getattr(layer, "_orig_bias_shape", None) is not None:
            self.shapes_known["bias"] = tuple(layer._orig_bias_shape)
        fused = getattr(layer, "fused_module", None)
        self._fused = None if fused is None else _FusedModule(fused.module)

    def run(self, rank: int, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        clone = _blank(self.layer)
        clone.__dict__.update(self.layer.__dict__)
        own: dict[str, Any] = {"tp_index": rank, "rank": rank, "_parameters": {}, "weight": weight, "bias": bias}
        if self._fused is not None:
            own["fused_module"] = SimpleNamespace(module=self._fused)
        clone.__dict__.update(own)
        given = [weight, bias]
        with torch.no_grad():
            clone._tp_partition(given)
        return {"weight": given[0], "bias": given[1]}

    def key(self) -> object:
        layer = self.layer
        names = ["tp_meta", "shape", "partition_dim", "_partition_sizes", "_subparam_sizes", "_subparam_shard_widths"]
        # To DeepSpeed's own functions a name decides the extents of the shards, which the caller's key has anyway.
        if type(layer)._tp_partition.__module__ != LAYERS:
            names.append("name")
        told = tuple(repr(getattr(layer, name, None)) for name in names)
        return (type(layer), self.degree, told, None if self._fused is None else str(self._fused))


class ConvPartition(Partition):
    """The cut of a two-dimensional convolution, by its ``shard_weights``: output channels, or input channels with the
    bias divided by the number of ranks."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.degree = int(layer.world_size)
        self.rank = int(layer.rank)
        self.shapes_known = {} if layer.conv.bias is not None else {"bias": None}

    def run(self, rank: int, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        clone = _blank(self.layer)
        torch.nn.Module.__init__(clone)
        clone.rank, clone.world_size, clone.shard_by_oc = rank, self.degree, self.layer.shard_by_oc
        live = self.layer.conv
        names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
        conv = SimpleNamespace(weight=weight, bias=bias, **{name: getattr(live, name) for name in names})
        # The function builds a convolution to put the shard into; on the meta device that draws no random numbers.
        with torch.no_grad(), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clone.shard_weights(conv)
        found = clone.conv
        return {"weight": found.weight.detach(), "bias": None if bias is None else found.bias.detach()}

    def key(self) -> object:
        return (type(self.layer), self.degree, bool(self.layer.shard_by_oc), self.layer.conv.groups)


def partition_of(module: Any) -> Partition | None:
    """The partition that cut ``module``'s own parameters, or None where nothing did."""
    if is_partitioned_conv(module):
        return ConvPartition(module)
    return LayerPartition(module) if is_partitioned_layer(module) else None


def _blank(layer: Any) -> Any:
    """An instance of the layer's class on which no constructor has run."""
    kind: Any = type(layer)
    return kind.__new__(kind)


class _FusedModule:
    """What a fused partition asks its block: its printed form, which decides the kind of fusion, and its attributes.

    QWen's partition of older versions writes the width of a shard into the block's attention when it runs first; it
    writes into a copy here.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._text = str(module)
        self._ds_fusedqkv_entered = True

    def __str__(self) -> str:
        return self._text

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return SimpleNamespace(**vars(found)) if isinstance(found, torch.nn.Module) else found
