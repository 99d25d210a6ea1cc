"""A protocol-2 pickler that writes, opcode for opcode, what CPython's own writes for the objects as they were.

The standard pickler imports every class it names, to check it. This one takes a class's name for what it is, so
stand-ins go back to the opcodes of the objects they stand for.
"""

from __future__ import annotations

import _compat_pickle
import codecs
import copyreg
import io
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.storage.numpy_values import current_numpy_name, numpy_value
from deepspeed_affine.storage.refs import NO_STATE, Global, StandIn, TorchSize

__all__ = ["StandInPickler", "attribute_names", "encode_int"]

_BATCH = 1000
_PUTS = [pickle.BINPUT + bytes((index,)) for index in range(256)]
_GETS = [pickle.BINGET + bytes((index,)) for index in range(256)]
_TUPLE_CODES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
_NAMESPACE = Global("argparse", "Namespace")
_END = object()


class StandInPickler:
    """Pickles plain data, stand-ins and whatever reduces itself, to the bytes CPython's C pickler would write.

    Protocol 2, torch.save's. A subclass adds types to ``savers``.
    """

    savers: ClassVar[dict[type, Callable[[Any, Any], None]]] = {}

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._write = self._file.write
        # The object is kept beside its index: an id is only unique while its object lives.
        self._memo: dict[int, tuple[int, object]] = {}
        self._globals: dict[Global, int] = {}
        self._count = 0
        self._numpy: dict[int, tuple[Any, StandIn]] = {}

    def dumps(self, obj: Any) -> bytes:
        """Return the complete pickle of ``obj``; a pickler makes one."""
        self._write(pickle.PROTO + b"\x02")
        try:
            self.save(obj)
        except RecursionError:
            raise UnsupportedLayoutError(
                "an object graph nested deeper than Python's recursion limit; expected the depth of a checkpoint. "
                "Flatten what the client state holds."
            ) from None
        self._write(pickle.STOP)
        return self._file.getvalue()

    def save(self, obj: Any) -> None:
        """Write one object: its value, or the memo entry it already has."""
        atom = _ATOMS.get(type(obj))
        if atom is not None:
            self._write(atom(obj))
            return
        known = self._memo.get(id(obj))
        if known is not None:
            self._get(known[0])
            return
        saver = self.savers.get(type(obj))
        if saver is not None:
            saver(self, obj)
        elif isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
            self._save_live_global(obj, None)
        else:
            _refuse_live_tensor(obj)
            registered = copyreg.dispatch_table.get(type(obj))
            reduced = registered(obj) if registered is not None else obj.__reduce_ex__(2)
            if isinstance(reduced, str):
                self._save_live_global(obj, reduced)
            else:
                self.save_reduce(*reduced, obj=obj)

    def save_reduce(
        self,
        func: Any,
        args: tuple[Any, ...],
        state: Any = None,
        listitems: Iterable[Any] | None = None,
        dictitems: Iterable[tuple[Any, Any]] | None = None,
        *,
        obj: Any,
    ) -> None:
        """Write ``obj`` as the call that rebuilds it, in the order the standard pickler uses."""
        if getattr(func, "__name__", "") == "__newobj__":
            self.save(args[0])
            self.save(args[1:])
            self._write(pickle.NEWOBJ)
        else:
            self.save(func)
            self.save(args)
            self._write(pickle.REDUCE)
        self._finish(obj, state, state is not None, listitems, dictitems)

    def _finish(
        self,
        obj: Any,
        state: Any,
        has_state: bool,
        listitems: Iterable[Any] | None,
        dictitems: Iterable[tuple[Any, Any]] | None,
    ) -> None:
        known = self._memo.get(id(obj))
        if known is not None:
            # Its own arguments led back to it and have built it already.
            self._write(pickle.POP)
            self._get(known[0])
        else:
            self._memoize(obj)
        if listitems is not None:
            self._batch_appends(iter(listitems))
        if dictitems is not None:
            self._batch_setitems(iter(dictitems))
        if has_state:
            self.save(state)
            self._write(pickle.BUILD)

    def _memoize(self, obj: Any) -> None:
        self._memo[id(obj)] = (self._count, obj)
        self._put()

    def _put(self) -> int:
        """Give what was just written the next memo entry, as the C pickler does also where nothing reads it back."""
        index = self._count
        self._count = index + 1
        self._write(_PUTS[index] if index < 256 else pickle.LONG_BINPUT + struct.pack("<I", index))
        return index

    def _get(self, index: int) -> None:
        self._write(_GETS[index] if index < 256 else pickle.LONG_BINGET + struct.pack("<I", index))

    def _save_live_global(self, obj: Any, name: str | None) -> None:
        name = name or getattr(obj, "__qualname__", None) or obj.__name__
        module = getattr(obj, "__module__", None) or "builtins"
        parent, _, last = name.rpartition(".")
        if "<locals>" in name:
            raise UnsupportedLayoutError(f"{module}.{name}: a local object cannot be written to a checkpoint")
        if parent:
            self.save_reduce(getattr, (Global(module, parent), last), obj=obj)
        else:
            self.save_global(Global(module, name))

    def save_global(self, named: Global) -> None:
        """Write a name; one memo entry per name, as one per class object is what the standard pickler has."""
        known = self._globals.get(named)
        if known is not None:
            self._get(known)
            return
        current = Global(*current_numpy_name(named.module, named.qualname))
        if current != named:
            self.save_global(current)
            return
        parent, _, last = named.qualname.rpartition(".")
        if parent:
            self.save(getattr)
            self.save((Global(named.module, parent), last))
            self._write(pickle.REDUCE)
        else:
            self._write(_global_opcode(named))
        self._globals[named] = self._put()

    def save_str(self, obj: str) -> None:
        encoded = obj.encode("utf-8", "surrogatepass")
        self._write(pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded)
        self._memoize(obj)

    def save_bytes(self, obj: bytes) -> None:
        if obj:
            self.save_reduce(codecs.encode, (str(obj, "latin1"), "latin1"), obj=obj)
        else:
            self.save_reduce(bytes, (), obj=obj)

    def save_bytearray(self, obj: bytearray) -> None:
        self.save_reduce(bytearray, (bytes(obj),) if obj else (), obj=obj)

    def save_set(self, obj: set[Any] | frozenset[Any]) -> None:
        self.save_reduce(type(obj), (list(obj),), obj=obj)

    def save_tuple(self, obj: tuple[Any, ...]) -> None:
        count = len(obj)
        if count == 0:
            self._write(pickle.EMPTY_TUPLE)
            return
        if count > 3:
            self._write(pickle.MARK)
        for item in obj:
            self.save(item)
        known = self._memo.get(id(obj))
        if known is not None:
            self._write(pickle.POP * count if count <= 3 else pickle.POP_MARK)
            self._get(known[0])
            return
        self._write(_TUPLE_CODES[count] if count <= 3 else pickle.TUPLE)
        self._memoize(obj)

    def save_list(self, obj: list[Any]) -> None:
        self._write(pickle.EMPTY_LIST)
        self._memoize(obj)
        if len(obj) == 1:
            self.save(obj[0])
            self._write(pickle.APPEND)
        elif obj:
            items = iter(obj)
            for _ in range(0, len(obj), _BATCH):
                self._write(pickle.MARK)
                for item in islice(items, _BATCH):
                    self.save(item)
                self._write(pickle.APPENDS)

    def save_dict(self, obj: dict[Any, Any]) -> None:
        self._write(pickle.EMPTY_DICT)
        self._memoize(obj)
        if len(obj) == 1:
            for key, value in obj.items():
                self.save(key)
                self.save(value)
            self._write(pickle.SETITEM)
        elif obj:
            items = iter(obj.items())
            # A full last batch is followed by an empty one, because CPython's does so.
            for _ in range(len(obj) // _BATCH + 1):
                self._write(pickle.MARK)
                for key, value in islice(items, _BATCH):
                    self.save(key)
                    self.save(value)
                self._write(pickle.SETITEMS)

    def save_ordered_dict(self, obj: OrderedDict[Any, Any]) -> None:
        attributes = attribute_names(vars(obj))
        self.save_reduce(OrderedDict, (), attributes or None, None, obj.items(), obj=obj)

    def save_torch_size(self, obj: TorchSize) -> None:
        self.save_reduce(Global("torch", "Size"), (tuple(obj),), obj=obj)

    def save_stand_in(self, obj: StandIn) -> None:
        if id(obj) not in self._numpy:
            self._numpy[id(obj)] = (numpy_value(obj, self._numpy), obj)
        value = self._numpy[id(obj)][0]
        if value is not None:
            self.save(value)
            return
        if obj.stand_in_op == "newobj_ex":
            raise UnsupportedLayoutError(
                f"an object of {obj.stand_in_class} built with keyword arguments cannot be written in pickle "
                "protocol 2; save the checkpoint with torch.save's own protocol."
            )
        self.save(obj.stand_in_class)
        self.save(obj.stand_in_args)
        self._write(pickle.NEWOBJ if obj.stand_in_op == "newobj" else pickle.REDUCE)
        self._finish(
            obj,
            _instance_state(obj),
            obj.stand_in_state is not NO_STATE,
            obj.stand_in_list or None,
            obj.stand_in_dict or None,
        )

    def _batch_appends(self, items: Iterator[Any]) -> None:
        for batch in _batches(items):
            if len(batch) == 1:
                self.save(batch[0])
                self._write(pickle.APPEND)
            else:
                self._write(pickle.MARK)
                for item in batch:
                    self.save(item)
                self._write(pickle.APPENDS)

    def _batch_setitems(self, items: Iterator[tuple[Any, Any]]) -> None:
        for batch in _batches(items):
            if len(batch) > 1:
                self._write(pickle.MARK)
            for key, value in batch:
                self.save(key)
                self.save(value)
            self._write(pickle.SETITEMS if len(batch) > 1 else pickle.SETITEM)


def _refuse_live_tensor(obj: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and (isinstance(obj, (torch.Tensor, torch.storage.TypedStorage)) or torch.is_storage(obj)):
        raise UnsupportedLayoutError(
            f"a live {type(obj).__name__} in what is to be written; expected a reference to a stored tensor or a new "
            "one. Save the tensor first and pass what was read from its file."
        )


def _batches(items: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(items, _BATCH)):
        yield batch


@lru_cache(maxsize=256)
def _global_opcode(named: Global) -> bytes:
    module, name = named.module, named.qualname
    if (module, name) in _compat_pickle.REVERSE_NAME_MAPPING:
        module, name = _compat_pickle.REVERSE_NAME_MAPPING[(module, name)]
    else:
        module = _compat_pickle.REVERSE_IMPORT_MAPPING.get(module, module)
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _instance_state(obj: StandIn) -> Any:
    """Return the state with its attribute names as the interpreter would hold them after setting them."""
    state, as_is = obj.stand_in_state, obj.stand_in_class == _NAMESPACE
    if type(state) is dict:
        return attribute_names(state, intern_as_is=as_is)
    if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
        first = attribute_names(state[0], intern_as_is=as_is) if type(state[0]) is dict else state[0]
        return (first, attribute_names(state[1], intern_as_is=as_is))
    return state


def attribute_names(attributes: dict[Any, Any], *, intern_as_is: bool = False) -> dict[Any, Any]:
    """Return a copy whose names are the interned strings a live object would have.

    The names of a class's attributes are interned with its code, before any pickle is read, so they are other
    objects than equal strings elsewhere in the pickle, and are written a second time. Names that come from data (the
    Namespace of a command line) become the interned ones themselves unless the process already has them.
    """
    made: dict[Any, Any] = {}
    for name, value in attributes.items():
        if type(name) is str:
            copy = name if intern_as_is else str(name.encode("utf-8", "surrogatepass"), "utf-8", "surrogatepass")
            made[sys.intern(copy)] = value
        else:
            made[name] = value
    return made


def encode_int(value: int) -> bytes:
    """Return the opcode for ``value``."""
    if 0 <= value <= 0xFF:
        return pickle.BININT1 + bytes((value,))
    if 0 <= value <= 0xFFFF:
        return pickle.BININT2 + struct.pack("<H", value)
    if -0x80000000 <= value <= 0x7FFFFFFF:
        return pickle.BININT + struct.pack("<i", value)
    size = (value if value >= 0 else ~value).bit_length() // 8 + 1
    raw = value.to_bytes(size, "little", signed=True)
    if size < 256:
        return pickle.LONG1 + bytes((size,)) + raw
    return pickle.LONG4 + struct.pack("<i", size) + raw


_ATOMS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: pickle.NONE,
    bool: lambda value: pickle.NEWTRUE if value else pickle.NEWFALSE,
    int: encode_int,
    float: lambda value: pickle.BINFLOAT + struct.pack(">d", value),
}

StandInPickler.savers.update(
    {
        str: StandInPickler.save_str,
        bytes: StandInPickler.save_bytes,
        bytearray: StandInPickler.save_bytearray,
        tuple: StandInPickler.save_tuple,
        list: StandInPickler.save_list,
        dict: StandInPickler.save_dict,
        set: StandInPickler.save_set,
        frozenset: StandInPickler.save_set,
        OrderedDict: StandInPickler.save_ordered_dict,
        TorchSize: StandInPickler.save_torch_size,
        StandIn: StandInPickler.save_stand_in,
        Global: StandInPickler.save_global,
    }
)
