"""A pickle machine that builds data and names things, and never imports or calls what a pickle names.

The standard unpickler, even with ``find_class`` overridden, calls whatever it was handed and sets attributes on it.
This one interprets the opcodes itself. REDUCE and its relatives go to ``calls.build``, which knows a short list
of harmless constructors and records everything else in a stand-in. Identities are kept as the standard unpickler
keeps them (one object per memo entry), because a file written again must share what the original shared.
"""

from __future__ import annotations

import _compat_pickle
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.refs import NO_STATE, Global, StandIn
from deepspeed_affine.storage.safe_calls import build, check_hashable

__all__ = ["MAX_PICKLE_BYTES", "load_inert"]

MAX_PICKLE_BYTES = 1 << 30
"""Metadata larger than this is refused: objects take many times the bytes of their pickle."""

_MARK = object()
_Handler = Callable[["_Machine"], None]
_HANDLERS: dict[int, _Handler] = {}


class _MalformedError(Exception):
    """The opcode stream breaks the pickle format; the caller adds the file's name."""


def load_inert(data: bytes, persistent_load: Callable[[Any], Any], path: str) -> Any:
    """Return the object graph of ``data`` with inert stand-ins for all that is not plain data.

    Nothing named in the pickle is imported or called. Raises CheckpointFormatError naming ``path`` when the stream
    is malformed, too large, or uses what torch.save never writes (extension codes, out-of-band buffers).
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointFormatError(
            f"{path}: its pickled metadata has {len(data)} bytes; at most {MAX_PICKLE_BYTES} are read. Move bulk data "
            "of the client state into tensors and save again.",
            file=path,
        )
    machine = _Machine(data, persistent_load)
    try:
        return machine.run()
    except CheckpointFormatError:
        raise
    except (
        _MalformedError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        OverflowError,
        AttributeError,
        struct.error,
    ) as exc:
        raise CheckpointFormatError(
            f"{path}: its pickled metadata breaks off at byte {machine.at} of {len(data)} ({exc}); expected what "
            "torch.save writes. The file is damaged: copy it again from where it was saved.",
            file=path,
        ) from exc


class _Machine:
    def __init__(self, data: bytes, persistent_load: Callable[[Any], Any]) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.persistent_load = persistent_load
        self.protocol = 0

    def run(self) -> Any:
        data, handlers, stop = self.data, _HANDLERS, pickle.STOP[0]
        while True:
            if self.at >= len(data):
                raise _MalformedError("no STOP opcode")
            opcode = data[self.at]
            self.at += 1
            if opcode == stop:
                break
            handler = handlers.get(opcode)
            if handler is None:
                raise _MalformedError(f"unknown opcode 0x{opcode:02x}")
            handler(self)
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise _MalformedError(f"{len(self.stack)} objects left on the stack")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        chunk = self.data[self.at : self.at + count]
        if len(chunk) != count:
            raise _MalformedError(f"{count} bytes announced, {len(chunk)} present")
        self.at += count
        return chunk

    def number(self, code: str) -> int:
        packed = struct.Struct("<" + code)
        value: int = packed.unpack(self.take(packed.size))[0]
        return value

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise _MalformedError("a line without its end")
        text = self.data[self.at : end]
        self.at = end + 1
        return text

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise _MalformedError("a mark where an object is expected")
        return value

    def top(self) -> Any:
        value = self.stack[-1]
        if value is _MARK:
            raise _MalformedError("a mark where an object is expected")
        return value

    def pop_to_mark(self) -> list[Any]:
        stack = self.stack
        at = len(stack) - 1
        while at >= 0 and stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise _MalformedError("no mark on the stack")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def find_global(self, module: str, qualname: str) -> Global:
        # Python 2 spellings are what protocol 2 stores; the same table the standard unpickler applies.
        if self.protocol < 3:
            if (module, qualname) in _compat_pickle.NAME_MAPPING:
                module, qualname = _compat_pickle.NAME_MAPPING[(module, qualname)]
            elif module in _compat_pickle.IMPORT_MAPPING:
                module = _compat_pickle.IMPORT_MAPPING[module]
        found = self.globals.get((module, qualname))
        if found is None:
            found = self.globals[(module, qualname)] = Global(module, qualname)
        return found

    def set_state(self, target: Any, state: Any) -> None:
        if isinstance(target, StandIn):
            if target.stand_in_state is not NO_STATE:
                raise _MalformedError(f"two states for one object of {target.stand_in_class}")
            target.stand_in_state = state
        elif type(target) is OrderedDict and isinstance(state, dict):
            for name, value in state.items():
                if not isinstance(name, str) or hasattr(OrderedDict, name):
                    raise _MalformedError(f"attribute {name!r} of an OrderedDict")
                setattr(target, name, value)
        else:
            raise _MalformedError(f"a state for {type(target).__name__}")

    def add_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, StandIn):
            target.stand_in_list.extend(items)
        else:
            raise _MalformedError(f"items appended to {type(target).__name__}")

    def set_items(self, target: Any, flat: list[Any]) -> None:
        if len(flat) % 2:
            raise _MalformedError("a key without its value")
        if type(target) in (dict, OrderedDict):
            for at in range(0, len(flat), 2):
                key = flat[at]
                if type(key) is not str:
                    check_hashable(key)
                target[key] = flat[at + 1]
        elif isinstance(target, StandIn):
            target.stand_in_dict.extend(zip(flat[0::2], flat[1::2], strict=True))
        else:
            raise _MalformedError(f"items set on {type(target).__name__}")

    def memo_get(self, index: int) -> None:
        if index not in self.memo:
            raise _MalformedError(f"memo entry {index} is not set")
        self.stack.append(self.memo[index])

    def memo_put(self, index: int) -> None:
        if index < 0:
            raise _MalformedError("negative memo entry")
        self.memo[index] = self.top()


def _on(*opcodes: bytes) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        for opcode in opcodes:
            _HANDLERS[opcode[0]] = handler
        return handler

    return register


def _push_constant(opcode: bytes, value: Any) -> None:
    _HANDLERS[opcode[0]] = lambda m: m.stack.append(value)


def _push_new(opcode: bytes, make: Callable[[], Any]) -> None:
    _HANDLERS[opcode[0]] = lambda m: m.stack.append(make())


def _push_read(opcode: bytes, read: Callable[[_Machine], Any]) -> None:
    _HANDLERS[opcode[0]] = lambda m: m.stack.append(read(m))


def _text(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _quoted(m: _Machine) -> str:
    raw = m.line()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        raise _MalformedError("a STRING opcode without quotes")
    # Protocol-0 strings of Python 2 are bytes; torch reads them as UTF-8 text.
    return raw[1:-1].decode("unicode_escape").encode("latin-1").decode("utf-8")


def _integer_line(m: _Machine) -> Any:
    raw = m.line()
    if raw == b"00":
        return False
    if raw == b"01":
        return True
    return int(raw.rstrip(b"L"))


def _long(m: _Machine, size: int) -> int:
    if size < 0:
        raise _MalformedError("negative length")
    return int.from_bytes(m.take(size), "little", signed=True)


def _counted(code: str, convert: Callable[[bytes], Any]) -> Callable[[_Machine], Any]:
    def read(m: _Machine) -> Any:
        size = m.number(code)
        if size < 0:
            raise _MalformedError("negative length")
        return convert(m.take(size))

    return read


_push_constant(pickle.MARK, _MARK)
_push_constant(pickle.NONE, None)
_push_constant(pickle.NEWTRUE, True)
_push_constant(pickle.NEWFALSE, False)
_push_constant(pickle.EMPTY_TUPLE, ())
_push_new(pickle.EMPTY_LIST, list)
_push_new(pickle.EMPTY_DICT, dict)
_push_new(pickle.EMPTY_SET, set)
_push_read(pickle.INT, _integer_line)
_push_read(pickle.LONG, _integer_line)
_push_read(pickle.BININT, lambda m: m.number("i"))
_push_read(pickle.BININT1, lambda m: m.number("B"))
_push_read(pickle.BININT2, lambda m: m.number("H"))
_push_read(pickle.LONG1, lambda m: _long(m, m.number("B")))
_push_read(pickle.LONG4, lambda m: _long(m, m.number("i")))
_push_read(pickle.FLOAT, lambda m: float(m.line()))
_push_read(pickle.BINFLOAT, lambda m: struct.unpack(">d", m.take(8))[0])
_push_read(pickle.STRING, _quoted)
_push_read(pickle.BINSTRING, _counted("i", _text))
_push_read(pickle.SHORT_BINSTRING, _counted("B", _text))
_push_read(pickle.UNICODE, lambda m: str(m.line(), "raw-unicode-escape"))
_push_read(pickle.BINUNICODE, _counted("I", _text))
_push_read(pickle.SHORT_BINUNICODE, _counted("B", _text))
_push_read(pickle.BINUNICODE8, _counted("Q", _text))
_push_read(pickle.BINBYTES, _counted("I", bytes))
_push_read(pickle.SHORT_BINBYTES, _counted("B", bytes))
_push_read(pickle.BINBYTES8, _counted("Q", bytes))
_push_read(pickle.BYTEARRAY8, _counted("Q", bytearray))
_push_read(pickle.TUPLE, lambda m: tuple(m.pop_to_mark()))
_push_read(pickle.LIST, lambda m: m.pop_to_mark())


@_on(pickle.PROTO)
def _proto(m: _Machine) -> None:
    m.protocol = m.number("B")
    if m.protocol > pickle.HIGHEST_PROTOCOL:
        raise _MalformedError(f"pickle protocol {m.protocol}")


@_on(pickle.FRAME)
def _frame(m: _Machine) -> None:
    if m.number("Q") > len(m.data) - m.at:
        raise _MalformedError("a frame longer than the data")


@_on(pickle.TUPLE1)
def _tuple1(m: _Machine) -> None:
    m.stack.append((m.pop(),))


@_on(pickle.TUPLE2)
def _tuple2(m: _Machine) -> None:
    second, first = m.pop(), m.pop()
    m.stack.append((first, second))


@_on(pickle.TUPLE3)
def _tuple3(m: _Machine) -> None:
    third, second, first = m.pop(), m.pop(), m.pop()
    m.stack.append((first, second, third))


@_on(pickle.DICT)
def _dict(m: _Machine) -> None:
    items = m.pop_to_mark()
    made: dict[Any, Any] = {}
    m.set_items(made, items)
    m.stack.append(made)


@_on(pickle.FROZENSET)
def _frozenset(m: _Machine) -> None:
    items = m.pop_to_mark()
    for item in items:
        check_hashable(item)
    m.stack.append(frozenset(items))


@_on(pickle.ADDITEMS)
def _additems(m: _Machine) -> None:
    items = m.pop_to_mark()
    target = m.top()
    if type(target) is not set:
        m.add_items(target, items)
        return
    for item in items:
        check_hashable(item)
    target.update(items)


@_on(pickle.APPEND)
def _append(m: _Machine) -> None:
    item = m.pop()
    m.add_items(m.top(), [item])


@_on(pickle.APPENDS)
def _appends(m: _Machine) -> None:
    items = m.pop_to_mark()
    m.add_items(m.top(), items)


@_on(pickle.SETITEM)
def _setitem(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.top(), [key, value])


@_on(pickle.SETITEMS)
def _setitems(m: _Machine) -> None:
    items = m.pop_to_mark()
    m.set_items(m.top(), items)


@_on(pickle.POP)
def _pop(m: _Machine) -> None:
    m.stack.pop()


@_on(pickle.POP_MARK)
def _pop_mark(m: _Machine) -> None:
    m.pop_to_mark()


@_on(pickle.DUP)
def _dup(m: _Machine) -> None:
    m.stack.append(m.top())


@_on(pickle.GET)
def _get(m: _Machine) -> None:
    m.memo_get(int(m.line()))


@_on(pickle.BINGET)
def _binget(m: _Machine) -> None:
    m.memo_get(m.number("B"))


@_on(pickle.LONG_BINGET)
def _long_binget(m: _Machine) -> None:
    m.memo_get(m.number("I"))


@_on(pickle.PUT)
def _put(m: _Machine) -> None:
    m.memo_put(int(m.line()))


@_on(pickle.BINPUT)
def _binput(m: _Machine) -> None:
    m.memo_put(m.number("B"))


@_on(pickle.LONG_BINPUT)
def _long_binput(m: _Machine) -> None:
    m.memo_put(m.number("I"))


@_on(pickle.MEMOIZE)
def _memoize(m: _Machine) -> None:
    m.memo_put(len(m.memo))


@_on(pickle.GLOBAL)
def _global(m: _Machine) -> None:
    module, name = _text(m.line()), _text(m.line())
    m.stack.append(m.find_global(module, name))


@_on(pickle.STACK_GLOBAL)
def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise _MalformedError("a global whose name is not text")
    m.stack.append(m.find_global(module, name))


@_on(pickle.REDUCE)
def _reduce(m: _Machine) -> None:
    args, callee = m.pop(), m.pop()
    if type(args) is not tuple:
        raise _MalformedError("a call whose arguments are not a tuple")
    m.stack.append(build(callee, args))


@_on(pickle.NEWOBJ)
def _newobj(m: _Machine) -> None:
    args, cls = m.pop(), m.pop()
    if type(args) is not tuple:
        raise _MalformedError("an object whose arguments are not a tuple")
    m.stack.append(StandIn(cls, args, "newobj"))


@_on(pickle.NEWOBJ_EX)
def _newobj_ex(m: _Machine) -> None:
    kwargs, args, cls = m.pop(), m.pop(), m.pop()
    if type(args) is not tuple or type(kwargs) is not dict:
        raise _MalformedError("an object whose arguments are not a tuple and a dict")
    m.stack.append(StandIn(cls, args, "newobj_ex", kwargs))


@_on(pickle.INST)
def _inst(m: _Machine) -> None:
    module, name = _text(m.line()), _text(m.line())
    m.stack.append(StandIn(m.find_global(module, name), tuple(m.pop_to_mark())))


@_on(pickle.OBJ)
def _obj(m: _Machine) -> None:
    items = m.pop_to_mark()
    if not items:
        raise _MalformedError("an object without its class")
    m.stack.append(StandIn(items[0], tuple(items[1:])))


@_on(pickle.BUILD)
def _build(m: _Machine) -> None:
    state = m.pop()
    m.set_state(m.top(), state)


@_on(pickle.BINPERSID)
def _binpersid(m: _Machine) -> None:
    m.stack.append(m.persistent_load(m.pop()))


@_on(pickle.PERSID)
def _persid(m: _Machine) -> None:
    raise _MalformedError("a persistent id of protocol 0")


@_on(pickle.EXT1, pickle.EXT2, pickle.EXT4)
def _extension(m: _Machine) -> None:
    raise _MalformedError("an extension code, which names a class only its writer's process knows")


@_on(pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
def _buffer(m: _Machine) -> None:
    raise _MalformedError("an out-of-band buffer")
