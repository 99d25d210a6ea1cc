"""The NInfer v3 container: ``open`` reads one, ``Writer`` makes one, and bindings are maps and back.

``open`` reads the directory only; values come when asked for. See docs/ninfer.md.
"""

from deepspeed_affine.ninfer.artifact import Artifact
from deepspeed_affine.ninfer.artifact import open_artifact as open
from deepspeed_affine.ninfer.auxiliaries import (
    activation_input_divisor,
    hadamard_signs,
    hadamard_transform,
    input_columns,
)
from deepspeed_affine.ninfer.binder import Bound, BoundParameter, bind, common_policy
from deepspeed_affine.ninfer.bridge import BoundMap, bindings_to_map, map_to_bindings
from deepspeed_affine.ninfer.decode import decode
from deepspeed_affine.ninfer.directory import Directory
from deepspeed_affine.ninfer.encode import encode
from deepspeed_affine.ninfer.errors import (
    BindingError,
    DirectoryError,
    EncodingError,
    FileSetError,
    FramingError,
    JsonError,
    OutputExistsError,
    RangeError,
    ReferenceError_,
    SchemaError,
    ValueDomainError,
    WriterError,
)
from deepspeed_affine.ninfer.fileplan import ResourceSpec, TensorSpec
from deepspeed_affine.ninfer.floats import bf16_to_float32, round_to_bf16
from deepspeed_affine.ninfer.layouts import Geometry, encoded_bytes, plan_geometry
from deepspeed_affine.ninfer.pack import pack_fp8, pack_grouped, pack_nvfp4
from deepspeed_affine.ninfer.records import (
    ActivationPolicy,
    Binding,
    Component,
    FileRecord,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
)
from deepspeed_affine.ninfer.rows import slice_rows
from deepspeed_affine.ninfer.writer import Writer, reshard_files

__all__ = [
    "ActivationPolicy",
    "Artifact",
    "Binding",
    "BindingError",
    "Bound",
    "BoundMap",
    "BoundParameter",
    "Component",
    "Directory",
    "DirectoryError",
    "EncodingError",
    "FileRecord",
    "FileSetError",
    "FramingError",
    "Geometry",
    "JsonError",
    "OutputExistsError",
    "Part",
    "Proposal",
    "RangeError",
    "ReferenceError_",
    "ResourceObject",
    "ResourceSpec",
    "SchemaError",
    "TensorObject",
    "TensorSpec",
    "Use",
    "ValueDomainError",
    "Writer",
    "WriterError",
    "activation_input_divisor",
    "bf16_to_float32",
    "bind",
    "bindings_to_map",
    "common_policy",
    "decode",
    "encode",
    "encoded_bytes",
    "hadamard_signs",
    "hadamard_transform",
    "input_columns",
    "map_to_bindings",
    "open",
    "pack_fp8",
    "pack_grouped",
    "pack_nvfp4",
    "plan_geometry",
    "reshard_files",
    "round_to_bf16",
    "slice_rows",
]
