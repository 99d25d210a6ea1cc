"""What a checkpoint's pickle turns into when nothing in it is executed.

Tensors become ``TensorRef`` (where the bytes are), names of classes and functions become ``Global``, and whatever
those would have built becomes a ``StandIn`` that records the ingredients. All of them pickle, so that spawned
workers can be handed any part of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deepspeed_affine.storage.dtypes import item_size

__all__ = [
    "META_LOCATION",
    "NO_STATE",
    "Global",
    "StandIn",
    "StorageRef",
    "TensorRef",
    "TorchSize",
    "is_instance_of",
    "new_instance",
]

META_LOCATION = "meta"


@dataclass(frozen=True, slots=True)
class StorageRef:
    """Metadata of one stored storage; ``byte_offset`` is absolute in the file at ``path``.

    ``crc32`` is what the writer recorded for the bytes, or None where it recorded nothing usable.
    """

    path: str
    key: str
    dtype: str
    numel: int
    byte_offset: int
    crc32: int | None
    location: str

    @property
    def nbytes(self) -> int:
        return self.numel * item_size(self.dtype)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of a stored storage; ``offset`` and ``strides`` count elements of the storage's dtype.

    ``parameter`` marks a torch.nn.Parameter. ``state`` holds the python attributes the tensor was saved with, if any.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False
    state: Any = field(default=None, compare=False, repr=False)

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * item_size(self.storage.dtype)

    @property
    def byte_offset(self) -> int:
        """Where element (0, ..., 0) lies, absolute in the file."""
        return self.storage.byte_offset + self.offset * item_size(self.storage.dtype)

    @property
    def is_meta(self) -> bool:
        """True for a tensor saved from the meta device: it has a shape and no bytes."""
        return self.storage.location == META_LOCATION

    @property
    def is_contiguous(self) -> bool:
        """True when the elements lie one after another in C order, as torch defines it."""
        if 0 in self.shape:
            return True
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1:
                if stride != expected:
                    return False
                expected *= extent
        return True


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function, never the thing itself."""

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


class TorchSize(tuple[int, ...]):
    """A torch.Size: a tuple of ints that pickles as torch.Size does."""

    __slots__ = ()


class _NoState:
    __slots__ = ()

    def __reduce__(self) -> str:
        return "NO_STATE"

    def __repr__(self) -> str:
        return "NO_STATE"


NO_STATE = _NoState()
"""The state of a stand-in that was pickled without one (None is a state of its own)."""


class StandIn:
    """An object of a class this process need not have: how it was to be built, and nothing that ran.

    ``stand_in_class`` is what would have been called with ``stand_in_args``; ``stand_in_op`` says how ("reduce",
    "newobj" or "newobj_ex"). Attributes of the object it stands for read as usual: they come from its state.
    """

    __slots__ = (
        "stand_in_args",
        "stand_in_class",
        "stand_in_dict",
        "stand_in_kwargs",
        "stand_in_list",
        "stand_in_op",
        "stand_in_state",
    )

    def __init__(self, cls: object, args: tuple[Any, ...], op: str = "reduce", kwargs: dict[str, Any] | None = None):
        self.stand_in_class = cls
        self.stand_in_args = args
        self.stand_in_op = op
        self.stand_in_kwargs = kwargs
        self.stand_in_state: Any = NO_STATE
        self.stand_in_list: list[Any] = []
        self.stand_in_dict: list[tuple[Any, Any]] = []

    def stand_in_attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes recorded in the state, as the default ``__setstate__`` would set them."""
        state = self.stand_in_state
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, dict):
                for name, value in part.items():
                    if isinstance(name, str):
                        yield name, value

    def __getattr__(self, name: str) -> Any:
        if not (name.startswith("__") or name.startswith("stand_in_")):
            found = dict(self.stand_in_attributes())
            if name in found:
                return found[name]
        raise AttributeError(f"the stand-in for {object.__getattribute__(self, 'stand_in_class')} has no {name!r}")

    def __repr__(self) -> str:
        return f"<stand-in for {self.stand_in_class if isinstance(self.stand_in_class, Global) else '...'}>"


def new_instance(module: str, qualname: str, attributes: dict[str, Any]) -> StandIn:
    """Return a stand-in for an ordinary object of that class with these attributes, as if it had been read."""
    made = StandIn(Global(module, qualname), (), "newobj")
    made.stand_in_state = dict(attributes)
    return made


def is_instance_of(value: object, qualname: str, module: str | None = None) -> bool:
    """Return whether ``value`` stands for an object built by the class or function of that name.

    ``module`` is left out where DeepSpeed moved the class between releases.
    """
    if not isinstance(value, StandIn) or not isinstance(value.stand_in_class, Global):
        return False
    named = value.stand_in_class
    return named.qualname == qualname and (module is None or named.module == module)
