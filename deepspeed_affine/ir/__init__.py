"""The affine description of how a parameter is sharded: pure integers, exact, immutable."""

from deepspeed_affine.ir.algebra import compose, compose_maps, meet
from deepspeed_affine.ir.builders import (
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from deepspeed_affine.ir.map import AFFINE_MAP_FORMAT_VERSION, SCALE_POWER_BY_STATE, ParamAffineMap
from deepspeed_affine.ir.piece import AffinePiece

__all__ = [
    "AFFINE_MAP_FORMAT_VERSION",
    "SCALE_POWER_BY_STATE",
    "AffinePiece",
    "ParamAffineMap",
    "block_gather_map",
    "compose",
    "compose_maps",
    "contiguous_split_map",
    "meet",
    "replicated_map",
    "segmented_map",
    "sub_param_map",
]
