"""What a checkpoint's inert object graph becomes when a user is to have it: plain data and tensors, nothing else."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.numpy_values import numpy_value
from deepspeed_affine.storage.refs import NO_STATE, Global, StandIn, TensorRef, TorchSize

if TYPE_CHECKING:
    import torch

__all__ = ["live_value", "read_tensor"]

DEEPEST = 200
_FACTORIES: Mapping[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, dict, set, tuple)
}


def live_value(value: Any, reader: ByteReader, *, place: str) -> Any:
    """``value`` with tensors and numpy values in the place of their descriptions, in containers of its own.

    Raises UnsupportedLayoutError naming the class where it holds an object of one: nothing of the file is executed, so
    none is built.
    """
    return _Living(reader, place).of(value, 0)


def read_tensor(ref: TensorRef, reader: ByteReader) -> torch.Tensor:
    """The stored tensor in memory, on the CPU, with the bytes between its elements left out."""
    import torch

    kind = getattr(torch, ref.dtype)
    if ref.is_meta:
        return torch.empty(ref.shape, dtype=kind, device="meta")
    if not ref.numel:
        return torch.empty(ref.shape, dtype=kind)
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(ref.shape, ref.strides, strict=True))
    raw = torch.empty(span, dtype=kind)
    reader.read_into(ref.storage.path, ref.byte_offset, raw.view(torch.uint8).numpy().data)
    found = raw.as_strided(ref.shape, ref.strides)
    return found if ref.is_contiguous else found.contiguous()


class _Living:
    def __init__(self, reader: ByteReader, place: str) -> None:
        self.reader = reader
        self.place = place

    def of(self, value: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise UnsupportedLayoutError(
                f"{self.place}: is nested more than {DEEPEST} deep; expected plain data. Read it with torch.load, "
                "where you trust the file."
            )
        if isinstance(value, TensorRef):
            return read_tensor(value, self.reader)
        if isinstance(value, TorchSize):
            import torch

            return torch.Size(value)
        if isinstance(value, StandIn):
            made = numpy_value(value)
            if made is None:
                made = self._container(value, depth + 1)
            return self._refuse(value.stand_in_class) if made is None else made
        if isinstance(value, Global):
            return self._refuse(value)
        if isinstance(value, (dict, OrderedDict)):
            return type(value)((self.of(key, depth + 1), self.of(item, depth + 1)) for key, item in value.items())
        if isinstance(value, (list, tuple, set, frozenset)):
            return type(value)(self.of(item, depth + 1) for item in value)
        return value

    def _container(self, value: StandIn, depth: int) -> Any:
        """The counter (of which torch's MultiStepLR makes its milestones), queue or dictionary with defaults that
        ``value`` records as such a one is pickled, None where it is none."""
        named, args = value.stand_in_class, value.stand_in_args
        if not isinstance(named, Global) or named.module != "collections" or value.stand_in_op != "reduce":
            return None
        if value.stand_in_kwargs or value.stand_in_state is not NO_STATE:
            return None
        if named.qualname == "Counter" and len(args) == 1 and type(args[0]) is dict and not value.stand_in_dict:
            return Counter(self.of(args[0], depth))
        if named.qualname == "deque" and len(args) in (1, 2) and args[0] == ():
            length = args[1] if len(args) == 2 else None
            if length is None or (type(length) is int and length >= 0):
                return deque(self.of(value.stand_in_list, depth), length)
        if named.qualname == "defaultdict" and len(args) in (0, 1):
            factory = args[0] if args else None
            if factory is None:
                return defaultdict(None, self.of(dict(value.stand_in_dict), depth))
            if isinstance(factory, Global) and factory.module == "builtins" and factory.qualname in _FACTORIES:
                return defaultdict(_FACTORIES[factory.qualname], self.of(dict(value.stand_in_dict), depth))
        return None

    def _refuse(self, named: object) -> Any:
        raise UnsupportedLayoutError(
            f"{self.place}: holds an object of {named}, which is not built, because building it would execute what "
            "the file says; expected plain data, tensors or numpy values. Read it with torch.load(path, "
            "weights_only=False), where you trust the file."
        )
