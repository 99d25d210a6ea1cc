"""Tensors in a pickle, as torch.save describes them: stored ones that are written again, and ones yet to be filled."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.storage.dtypes import ITEM_SIZES, item_size, storage_class_name
from deepspeed_affine.storage.pickler import StandInPickler, attribute_names, encode_int
from deepspeed_affine.storage.refs import Global, StorageRef, TensorRef

__all__ = ["NewTensor", "TensorPickler"]

_DIFFERENTIABLE = {"float64", "float32", "float16", "bfloat16", "complex64", "complex128"}


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor to be written: contiguous, alone in its storage. Two equal ones are still two tensors."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise InvalidMapError(f"a new tensor has dtype {self.dtype!r}; expected a name such as 'float32'")
        if not all(type(extent) is int and extent >= 0 for extent in self.shape):
            raise InvalidMapError(f"a new tensor has shape {self.shape}; expected non-negative ints")
        if self.requires_grad and self.dtype not in _DIFFERENTIABLE:
            raise InvalidMapError(
                f"a new tensor of dtype {self.dtype!r} requires a gradient; torch.load reads the flag back for "
                f"{', '.join(sorted(_DIFFERENTIABLE))} only"
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * item_size(self.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements, as torch gives them to a new tensor: an extent of 0 counts as 1."""
        strides: list[int] = []
        step = 1
        for extent in reversed(self.shape):
            strides.append(step)
            step *= extent or 1
        return tuple(reversed(strides))


_TENSOR_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_TENSOR_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_META_TENSOR = Global("torch._utils", "_rebuild_meta_tensor_no_storage")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_PARAMETER_WITH_STATE = Global("torch._utils", "_rebuild_parameter_with_state")
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_TENSOR = Global("torch", "Tensor")
_ORDERED_DICT = Global("collections", "OrderedDict")
_UNTYPED = Global("torch.storage", "UntypedStorage")
_NEW_ORDERED_DICT = pickle.EMPTY_TUPLE + pickle.REDUCE
_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)

_TENSOR_GLOBALS = {dtype: Global("torch", dtype) for dtype in ITEM_SIZES}
_STORAGE_GLOBALS = {
    dtype: _UNTYPED if (name := storage_class_name(dtype)) is None else Global("torch", name) for dtype in ITEM_SIZES
}


@dataclass(slots=True, eq=False)
class _Storage:
    """One storage of the file being written. ``element`` is the dtype it is seen as: torch allows one."""

    key: str
    nbytes: int
    element: str


class TensorPickler(StandInPickler):
    """Pickles tensors of both kinds; ``sources`` is then what the file's storages hold, by their keys 0, 1, ...

    The opcodes are written directly: there is one tensor in nearly every file, and it is most of the pickle.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[NewTensor | StorageRef] = []
        self._storages: dict[tuple[str, str], _Storage] = {}

    def save_new_tensor(self, obj: NewTensor) -> None:
        function = self._tensor_function(obj.dtype)
        self.save_global(function)
        self._save_view(self._add(obj, obj.dtype), obj.dtype, 0, obj.shape, obj.strides, obj.requires_grad)
        self._write(pickle.REDUCE)
        self._memoize(obj)

    def save_tensor_ref(self, obj: TensorRef) -> None:
        if obj.parameter:
            self._save_parameter(obj)
        elif obj.state:
            self.save_global(_FROM_TYPE)
            self._write(pickle.MARK)
            self.save_global(_META_TENSOR if obj.is_meta else self._tensor_function(obj.dtype))
            self.save_global(_TENSOR)
            self._save_tensor_arguments(obj, obj.requires_grad)
            self.save(_attributes(obj.state))
            self._write(pickle.TUPLE)
            self._put()
            self._write(pickle.REDUCE)
        else:
            self._save_plain(obj, obj.requires_grad)
        self._memoize(obj)

    def save_storage_ref(self, obj: StorageRef) -> None:
        # torch.load makes typed ones of all, of bytes where the file says untyped; so that is what is saved again.
        storage = self._share(obj, obj.dtype)
        self._save_storage(storage, _STORAGE_GLOBALS[obj.dtype], storage.nbytes // item_size(obj.dtype))

    @staticmethod
    def _tensor_function(dtype: str) -> Global:
        return _TENSOR_V3 if _STORAGE_GLOBALS[dtype] is _UNTYPED else _TENSOR_V2

    def _save_parameter(self, obj: TensorRef) -> None:
        self.save_global(_PARAMETER_WITH_STATE if obj.state else _PARAMETER)
        if obj.state:
            self._write(pickle.MARK)
        # A parameter's data is a tensor of its own that requires no gradient.
        self._save_plain(obj, False)
        self._put()
        self.save(obj.requires_grad)
        self._save_no_hooks()
        if obj.state:
            self.save(_attributes(obj.state))
        self._write(pickle.TUPLE if obj.state else pickle.TUPLE3)
        self._put()
        self._write(pickle.REDUCE)

    def _save_plain(self, obj: TensorRef, requires_grad: bool) -> None:
        self.save_global(_META_TENSOR if obj.is_meta else self._tensor_function(obj.dtype))
        self._save_tensor_arguments(obj, requires_grad)
        self._write(pickle.REDUCE)

    def _save_tensor_arguments(self, obj: TensorRef, requires_grad: bool) -> None:
        if obj.is_meta:
            self._write(pickle.MARK)
            self.save_global(_TENSOR_GLOBALS[obj.dtype])
            self._save_ints(obj.shape)
            self._save_ints(obj.strides)
            self.save(requires_grad)
            self._write(pickle.TUPLE)
            self._put()
            return
        element = "uint8" if _STORAGE_GLOBALS[obj.dtype] is _UNTYPED else obj.dtype
        storage = self._share(obj.storage, element)
        self._save_view(storage, obj.dtype, obj.offset, obj.shape, obj.strides, requires_grad)

    def _save_view(
        self,
        storage: _Storage,
        dtype: str,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        requires_grad: bool,
    ) -> None:
        write, cls = self._write, _STORAGE_GLOBALS[dtype]
        write(pickle.MARK)
        self._save_storage(storage, cls, storage.nbytes if cls is _UNTYPED else storage.nbytes // item_size(dtype))
        write(encode_int(offset))
        self._save_ints(shape)
        self._save_ints(strides)
        write(pickle.NEWTRUE if requires_grad else pickle.NEWFALSE)
        self._save_no_hooks()
        if cls is _UNTYPED:
            self.save_global(_TENSOR_GLOBALS[dtype])
        write(pickle.TUPLE)
        self._put()

    def _save_storage(self, storage: _Storage, cls: Global, numel: int) -> None:
        self._write(pickle.MARK)
        self.save("storage")
        self.save_global(cls)
        self.save(storage.key)
        self.save("cpu")
        self._write(encode_int(numel) + pickle.TUPLE)
        self._put()
        self._write(pickle.BINPERSID)

    def _save_ints(self, values: tuple[int, ...]) -> None:
        """Write a tuple nothing else refers to: torch makes a new one for every tensor."""
        count = len(values)
        if count > 3:
            self._write(pickle.MARK + b"".join(map(encode_int, values)) + pickle.TUPLE)
        else:
            self._write(b"".join(map(encode_int, values)) + _TUPLES[count])
        if count:
            self._put()

    def _save_no_hooks(self) -> None:
        self.save_global(_ORDERED_DICT)
        self._write(_NEW_ORDERED_DICT)
        self._put()

    def _add(self, source: NewTensor | StorageRef, element: str) -> _Storage:
        made = _Storage(str(len(self.sources)), source.nbytes, element)
        self.sources.append(source)
        return made

    def _share(self, ref: StorageRef, element: str) -> _Storage:
        """The storage of the new file that holds what ``ref`` does; one for all references to the same stored one."""
        # torch.load makes empty storages one by one, and so unshares them.
        if ref.nbytes == 0:
            return self._add(ref, element)
        found = self._storages.get((ref.path, ref.key))
        if found is None:
            found = self._storages[(ref.path, ref.key)] = self._add(ref, element)
        elif found.element != element or found.nbytes < ref.nbytes:
            raise UnsupportedLayoutError(
                f"{ref.path}: storage {ref.key!r} is seen as {found.nbytes} bytes of {found.element} and as "
                f"{ref.nbytes} of {element}; torch.save writes one view of a storage. Save a clone of one of them.",
                file=ref.path,
            )
        return found


TensorPickler.savers = {
    **StandInPickler.savers,
    NewTensor: TensorPickler.save_new_tensor,
    TensorRef: TensorPickler.save_tensor_ref,
    StorageRef: TensorPickler.save_storage_ref,
}


def _attributes(state: Any) -> Any:
    """Return a tensor's saved attributes, a dict or a pair of dicts, named as live ones would be."""
    if type(state) is tuple:
        return tuple(_attributes(part) for part in state)
    return attribute_names(state) if type(state) is dict else state
