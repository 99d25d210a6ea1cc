"""The names DeepSpeed gives to the entries of ``universal_checkpoint_info`` and of a universal file.

Kept as plain strings so that reading a checkpoint's metadata needs no DeepSpeed.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = "universal_checkpoint_version"
TP_REPLICATED: Final = "tp_replicated_parameter_patterns"
TO_AVERAGE: Final = "parameter_to_average_patterns"
ROW_PARALLEL: Final = "parameter_with_row_parallelism_patterns"
VOCABULARY: Final = "vocabulary_parameter_patterns"
TWO_SUB_PARAMS: Final = "parameter_with_2_sub_params_cat_dim_0"
SUB_PARAMS: Final = "parameter_with_sub_params"
SHARD_WIDTHS: Final = "sub_param_shard_widths"
PIPELINE_REPLICATED: Final = "pipeline_replicated_parameter_patterns"
UNSUPPORTED: Final = "autotp_unsupported_parameter_patterns"
EXPERT: Final = "expert_parameter_patterns"
ORIGINAL_VOCAB: Final = "original_vocab_size"
PADDED_VOCAB: Final = "padded_vocab_size"
AFFINE_MAP: Final = "affine_map"

# Entries of one universal file.
PARAM: Final = "param"
CAT_DIM: Final = "cat_dim"
N_SUB_PARAMS: Final = "param_n_sub_params"
SUB_PARAM_SHAPE: Final = "sub_param_shape"
VOCAB_TENSOR: Final = "vocab_tensor"

WIDTHS_VERSION: Final = 0.4
"""From this metadata version on, ``sub_param_shape`` states physical widths and the shard widths are recorded."""
