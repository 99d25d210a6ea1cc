"""The affine description of how a parameter is sharded: pure integers, exact, immutable."""

from deepspeed_affine.ir.algebra import compose, compose_maps, inverse, meet, overlapping
from deepspeed_affine.ir.builders import (
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from deepspeed_affine.ir.canonical import canonical_pieces, maximal_runs
from deepspeed_affine.ir.document import (
    AffineDocument,
    DocumentEntry,
    exact_name,
    pattern_of,
    read_document,
    write_document,
)
from deepspeed_affine.ir.map import AFFINE_MAP_FORMAT_VERSION, SCALE_POWER_BY_STATE, ParamAffineMap
from deepspeed_affine.ir.piece import AffinePiece
from deepspeed_affine.ir.regions import Region, relocate

__all__ = [
    "AFFINE_MAP_FORMAT_VERSION",
    "SCALE_POWER_BY_STATE",
    "AffineDocument",
    "AffinePiece",
    "DocumentEntry",
    "ParamAffineMap",
    "Region",
    "block_gather_map",
    "canonical_pieces",
    "compose",
    "compose_maps",
    "contiguous_split_map",
    "exact_name",
    "inverse",
    "maximal_runs",
    "meet",
    "overlapping",
    "pattern_of",
    "read_document",
    "relocate",
    "replicated_map",
    "segmented_map",
    "sub_param_map",
    "write_document",
]
