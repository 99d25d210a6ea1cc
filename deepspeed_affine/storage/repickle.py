"""Writing an object graph again, byte for byte as torch.save would have with every class at hand."""

from __future__ import annotations

import os
from collections import OrderedDict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from deepspeed_affine.storage.pickler import StandInPickler, attribute_names
from deepspeed_affine.storage.refs import StorageRef, TensorRef
from deepspeed_affine.storage.tensors import FileMaps, open_storage

if TYPE_CHECKING:
    import torch

__all__ = ["save_objects"]


def save_objects(path: str | os.PathLike[str], obj: Any, *, maps: FileMaps | None = None) -> None:
    """Write to ``path`` the file ``torch.save`` would write of what ``obj`` stands for, equal byte for byte.

    ``obj`` may mix references, stand-ins, plain data and live tensors. Storages are streamed from the maps of their
    files and stay shared where they were shared; memory does not grow with them.
    """
    import torch

    own = FileMaps() if maps is None else maps
    source = _Sources(own)

    class Pickler(StandInPickler):
        def reduce_ref(self, ref: TensorRef) -> tuple[Any, ...]:
            return source.reduce(ref)

        def storage_of(self, ref: StorageRef) -> Any:
            return source.typed_storage(ref)

    module = SimpleNamespace(__name__=__name__, Pickler=Pickler)
    try:
        torch.save(obj, os.fspath(path), pickle_module=module)
    finally:
        if maps is None:
            own.close()


class _Sources:
    """One live storage object per stored storage, so that torch.save sees the sharing the file had."""

    def __init__(self, maps: FileMaps) -> None:
        self.maps = maps
        self.storages: dict[tuple[str, str], torch.UntypedStorage] = {}

    def storage(self, ref: StorageRef) -> torch.UntypedStorage:
        # torch.load, too, makes empty storages one by one, and so unshares them.
        if ref.nbytes == 0:
            return open_storage(ref, self.maps)
        key = (ref.path, ref.key)
        found = self.storages.get(key)
        if found is None:
            found = self.storages[key] = open_storage(ref, self.maps)
        return found

    def typed_storage(self, ref: StorageRef) -> Any:
        import torch

        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=self.storage(ref), dtype=getattr(torch, ref.dtype), _internal=True
        )

    def reduce(self, ref: TensorRef) -> tuple[Any, ...]:
        import torch

        dtype = getattr(torch, ref.dtype)
        if ref.is_meta:
            made = torch.empty_strided(ref.shape, ref.strides, dtype=dtype, device="meta")
        else:
            made = torch.empty((0,), dtype=dtype)
            made.set_(self.storage(ref.storage), ref.offset, ref.shape, ref.strides)
        if ref.parameter:
            # Spelled out, because setting the saved attributes on a live Parameter could run its setters.
            hooks: OrderedDict[Any, Any] = OrderedDict()
            args = (made, ref.requires_grad, hooks)
            if not ref.state:
                return torch._utils._rebuild_parameter, args
            return torch._utils._rebuild_parameter_with_state, (*args, _attributes(ref.state))
        if ref.requires_grad:
            made.requires_grad_(True)
        reduced: tuple[Any, ...] = made.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        if ref.state:
            return torch._tensor._rebuild_from_type_v2, (reduced[0], torch.Tensor, reduced[1], _attributes(ref.state))
        return reduced


def _attributes(state: Any) -> Any:
    """Return a tensor's saved attributes, a dict or a pair of dicts, named as live ones would be."""
    if type(state) is tuple:
        return tuple(_attributes(part) for part in state)
    return attribute_names(state) if type(state) is dict else state
