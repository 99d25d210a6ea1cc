"""The calls a pickle may make, as data: a short table of constructors that cannot do harm.

Every other call becomes a stand-in. What the table accepts it accepts with exactly the arguments its own pickling
writes, so that nothing here can be asked for a large allocation or for a surprising type.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.dtypes import ITEM_SIZES
from deepspeed_affine.storage.refs import META_LOCATION, Global, StandIn, StorageRef, TensorRef, TorchSize

__all__ = ["build", "check_hashable", "record"]

_MAX_KEY_NODES = 4096
_NOT_SIMPLE = object()
_Maker = Callable[[tuple[Any, ...]], Any]


def build(callee: object, args: tuple[Any, ...]) -> Any:
    """Return the tensor reference or plain data the call describes, or a stand-in that records it."""
    if type(callee) is Global:
        make = _MAKERS.get((callee.module, callee.qualname))
        if make is not None:
            made = make(args)
            if made is not _NOT_SIMPLE:
                return made
    return record(callee, args)


def record(callee: object, args: tuple[Any, ...], op: str = "reduce", kwargs: dict[str, Any] | None = None) -> StandIn:
    """Return a stand-in for what ``callee``, a name or itself a stand-in, would have made."""
    if not isinstance(callee, (Global, StandIn)):
        raise TypeError(f"a call of a {type(callee).__name__}")
    return StandIn(callee, args, op, kwargs)


def check_hashable(key: Any) -> None:
    """Raise TypeError unless hashing ``key`` is safe: hashing nested tuples recurses without any limit in C."""
    pending, seen = [key], 0
    while pending:
        item = pending.pop()
        seen += 1
        if seen > _MAX_KEY_NODES:
            raise TypeError("a key made of too many parts")
        if isinstance(item, tuple):
            pending.extend(item)
        elif isinstance(item, (list, dict, set, bytearray)):
            raise TypeError(f"a {type(item).__name__} as a key")


def _is_int(value: object) -> bool:
    return type(value) is int


def _extents(value: object) -> tuple[int, ...] | None:
    if isinstance(value, tuple) and all(_is_int(extent) for extent in value):
        return tuple(value)
    return None


def _view(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any) -> Any:
    shape, strides = _extents(size), _extents(stride)
    if not isinstance(storage, StorageRef) or not _is_int(offset) or shape is None or strides is None:
        return _NOT_SIMPLE
    if len(shape) != len(strides) or offset < 0 or any(extent < 0 for extent in shape) or any(s < 0 for s in strides):
        raise CheckpointFormatError(
            f"{storage.path}: a tensor of storage {storage.key!r} has shape {shape}, strides {strides} and offset "
            f"{offset}; expected one non-negative stride per extent. The file is damaged: copy it again.",
            file=storage.path,
        )
    if storage.location != META_LOCATION and 0 not in shape:
        last = offset + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
        if last >= storage.numel:
            raise CheckpointFormatError(
                f"{storage.path}: a tensor of storage {storage.key!r} reads element {last}; the storage has "
                f"{storage.numel}. The file is damaged: copy it again.",
                file=storage.path,
            )
    return TensorRef(storage, offset, shape, strides, requires_grad is True)


def _tensor(args: tuple[Any, ...]) -> Any:
    return _view(*args, False) if len(args) == 4 else _NOT_SIMPLE


def _tensor_v2(args: tuple[Any, ...]) -> Any:
    # A seventh argument holds the lazy conjugate and negative bits: such bytes are not the tensor's values.
    if len(args) == 6 or (len(args) == 7 and not args[6]):
        return _view(*args[:5])
    return _NOT_SIMPLE


def _tensor_v3(args: tuple[Any, ...]) -> Any:
    if len(args) not in (7, 8) or (len(args) == 8 and args[7]):
        return _NOT_SIMPLE
    storage, dtype = args[0], args[6]
    if not isinstance(storage, StorageRef) or not isinstance(dtype, Global) or dtype.module != "torch":
        return _NOT_SIMPLE
    size = ITEM_SIZES.get(dtype.qualname)
    if size is None:
        return _NOT_SIMPLE
    typed = StorageRef(
        storage.path,
        storage.key,
        dtype.qualname,
        storage.nbytes // size,
        storage.byte_offset,
        storage.crc32,
        storage.location,
    )
    return _view(typed, *args[1:5])


def _meta_tensor(args: tuple[Any, ...]) -> Any:
    if len(args) != 4 or not isinstance(args[0], Global) or args[0].qualname not in ITEM_SIZES:
        return _NOT_SIMPLE
    storage = StorageRef("", "", args[0].qualname, 0, 0, None, META_LOCATION)
    return _view(storage, 0, args[1], args[2], args[3])


def _parameter(args: tuple[Any, ...]) -> Any:
    if len(args) not in (3, 4) or type(args[0]) is not TensorRef:
        return _NOT_SIMPLE
    data = args[0]
    state = args[3] if len(args) == 4 else None
    return TensorRef(data.storage, data.offset, data.shape, data.strides, args[1] is True, True, state)


def _with_attributes(args: tuple[Any, ...]) -> Any:
    # A tensor that carries python attributes, as ZeRO-3's flat groups do. A subclass may hold its data elsewhere.
    if len(args) != 4 or args[1] not in _PLAIN_TENSORS or type(args[2]) is not tuple:
        return _NOT_SIMPLE
    made = build(args[0], args[2])
    if type(made) is not TensorRef or made.parameter:
        return _NOT_SIMPLE
    return TensorRef(made.storage, made.offset, made.shape, made.strides, made.requires_grad, False, args[3])


def _ordered_dict(args: tuple[Any, ...]) -> Any:
    if not args:
        return OrderedDict()
    if len(args) == 1 and type(args[0]) is list and all(type(p) in (list, tuple) and len(p) == 2 for p in args[0]):
        made: OrderedDict[Any, Any] = OrderedDict()
        for key, value in args[0]:
            check_hashable(key)
            made[key] = value
        return made
    return _NOT_SIMPLE


def _size(args: tuple[Any, ...]) -> Any:
    extents = _extents(args[0]) if len(args) == 1 else None
    return _NOT_SIMPLE if extents is None else TorchSize(extents)


def _set_of(kind: type[set[Any]] | type[frozenset[Any]]) -> _Maker:
    def make(args: tuple[Any, ...]) -> Any:
        if len(args) != 1 or type(args[0]) not in (list, tuple):
            return _NOT_SIMPLE
        for item in args[0]:
            check_hashable(item)
        return kind(args[0])

    return make


def _encode(args: tuple[Any, ...]) -> Any:
    # How protocol 2 spells bytes. No other codec is honoured: some of them run code or decompress.
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    return _NOT_SIMPLE


def _bytes(args: tuple[Any, ...]) -> Any:
    return b"" if not args else _NOT_SIMPLE


def _bytearray(args: tuple[Any, ...]) -> Any:
    if not args:
        return bytearray()
    if len(args) == 1 and type(args[0]) is bytes:
        return bytearray(args[0])
    encoded = _encode(args)
    return encoded if encoded is _NOT_SIMPLE else bytearray(encoded)


def _complex(args: tuple[Any, ...]) -> Any:
    if len(args) == 2 and all(type(part) is float for part in args):
        return complex(*args)
    return _NOT_SIMPLE


_PLAIN_TENSORS = (Global("torch", "Tensor"), Global("torch._tensor", "Tensor"))
_MAKERS: dict[tuple[str, str], _Maker] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): _size,
    ("builtins", "set"): _set_of(set),
    ("builtins", "frozenset"): _set_of(frozenset),
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): _complex,
    ("_codecs", "encode"): _encode,
}
