"""A pickle machine that builds data and names things, and never imports or calls what a pickle names.

The standard unpickler, even with ``find_class`` overridden, calls whatever it was handed and sets attributes on it.
This one interprets the opcodes itself. REDUCE and its relatives go to ``calls.build``, which knows a short list
of harmless constructors and records everything else in a stand-in. Identities are kept as the standard unpickler
keeps them (one object per memo entry), because a file written again must share what the original shared.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.machine import MARK, Machine, MalformedError
from deepspeed_affine.storage.safe_calls import build, check_hashable, record

__all__ = ["MAX_PICKLE_BYTES", "load_inert"]

MAX_PICKLE_BYTES = 1 << 30
"""Metadata larger than this is refused: objects take many times the bytes of their pickle."""

_Handler = Callable[[Machine], None]
_HANDLERS: dict[int, _Handler] = {}


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
    machine = Machine(data, persistent_load)
    try:
        return _run(machine)
    except CheckpointFormatError:
        raise
    except (
        MalformedError,
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


def _run(m: Machine) -> Any:
    data, handlers, stop = m.data, _HANDLERS, pickle.STOP[0]
    while True:
        if m.at >= len(data):
            raise MalformedError("no STOP opcode")
        opcode = data[m.at]
        m.at += 1
        if opcode == stop:
            break
        handler = handlers.get(opcode)
        if handler is None:
            raise MalformedError(f"unknown opcode 0x{opcode:02x}")
        handler(m)
    if len(m.stack) != 1 or m.stack[0] is MARK:
        raise MalformedError(f"{len(m.stack)} objects left on the stack")
    return m.stack[0]


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


def _push_read(opcode: bytes, read: Callable[[Machine], Any]) -> None:
    _HANDLERS[opcode[0]] = lambda m: m.stack.append(read(m))


def _text(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _quoted(m: Machine) -> str:
    raw = m.line()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        raise MalformedError("a STRING opcode without quotes")
    # Protocol-0 strings of Python 2 are bytes; torch reads them as UTF-8 text.
    return raw[1:-1].decode("unicode_escape").encode("latin-1").decode("utf-8")


def _integer_line(m: Machine) -> Any:
    raw = m.line()
    if raw == b"00":
        return False
    if raw == b"01":
        return True
    return int(raw.rstrip(b"L"))


def _long(m: Machine, size: int) -> int:
    if size < 0:
        raise MalformedError("negative length")
    return int.from_bytes(m.take(size), "little", signed=True)


def _counted(code: str, convert: Callable[[bytes], Any]) -> Callable[[Machine], Any]:
    def read(m: Machine) -> Any:
        size = m.number(code)
        if size < 0:
            raise MalformedError("negative length")
        return convert(m.take(size))

    return read


_push_constant(pickle.MARK, MARK)
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
def _proto(m: Machine) -> None:
    m.protocol = m.number("B")
    if m.protocol > pickle.HIGHEST_PROTOCOL:
        raise MalformedError(f"pickle protocol {m.protocol}")


@_on(pickle.FRAME)
def _frame(m: Machine) -> None:
    if m.number("Q") > len(m.data) - m.at:
        raise MalformedError("a frame longer than the data")


@_on(pickle.TUPLE1)
def _tuple1(m: Machine) -> None:
    m.stack.append((m.pop(),))


@_on(pickle.TUPLE2)
def _tuple2(m: Machine) -> None:
    second, first = m.pop(), m.pop()
    m.stack.append((first, second))


@_on(pickle.TUPLE3)
def _tuple3(m: Machine) -> None:
    third, second, first = m.pop(), m.pop(), m.pop()
    m.stack.append((first, second, third))


@_on(pickle.DICT)
def _dict(m: Machine) -> None:
    items = m.pop_to_mark()
    made: dict[Any, Any] = {}
    m.set_items(made, items)
    m.stack.append(made)


@_on(pickle.FROZENSET)
def _frozenset(m: Machine) -> None:
    items = m.pop_to_mark()
    for item in items:
        check_hashable(item)
    m.stack.append(frozenset(items))


@_on(pickle.ADDITEMS)
def _additems(m: Machine) -> None:
    items = m.pop_to_mark()
    target = m.top()
    if type(target) is not set:
        m.add_items(target, items)
        return
    for item in items:
        check_hashable(item)
    target.update(items)


@_on(pickle.APPEND)
def _append(m: Machine) -> None:
    item = m.pop()
    m.add_items(m.top(), [item])


@_on(pickle.APPENDS)
def _appends(m: Machine) -> None:
    items = m.pop_to_mark()
    m.add_items(m.top(), items)


@_on(pickle.SETITEM)
def _setitem(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.top(), [key, value])


@_on(pickle.SETITEMS)
def _setitems(m: Machine) -> None:
    items = m.pop_to_mark()
    m.set_items(m.top(), items)


@_on(pickle.POP)
def _pop(m: Machine) -> None:
    m.stack.pop()


@_on(pickle.POP_MARK)
def _pop_mark(m: Machine) -> None:
    m.pop_to_mark()


@_on(pickle.DUP)
def _dup(m: Machine) -> None:
    m.stack.append(m.top())


@_on(pickle.GET)
def _get(m: Machine) -> None:
    m.memo_get(int(m.line()))


@_on(pickle.BINGET)
def _binget(m: Machine) -> None:
    m.memo_get(m.number("B"))


@_on(pickle.LONG_BINGET)
def _long_binget(m: Machine) -> None:
    m.memo_get(m.number("I"))


@_on(pickle.PUT)
def _put(m: Machine) -> None:
    m.memo_put(int(m.line()))


@_on(pickle.BINPUT)
def _binput(m: Machine) -> None:
    m.memo_put(m.number("B"))


@_on(pickle.LONG_BINPUT)
def _long_binput(m: Machine) -> None:
    m.memo_put(m.number("I"))


@_on(pickle.MEMOIZE)
def _memoize(m: Machine) -> None:
    m.memo_put(len(m.memo))


@_on(pickle.GLOBAL)
def _global(m: Machine) -> None:
    module, name = _text(m.line()), _text(m.line())
    m.stack.append(m.find_global(module, name))


@_on(pickle.STACK_GLOBAL)
def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise MalformedError("a global whose name is not text")
    m.stack.append(m.find_global(module, name))


@_on(pickle.REDUCE)
def _reduce(m: Machine) -> None:
    args, callee = m.pop(), m.pop()
    if type(args) is not tuple:
        raise MalformedError("a call whose arguments are not a tuple")
    m.stack.append(build(callee, args))


@_on(pickle.NEWOBJ)
def _newobj(m: Machine) -> None:
    args, cls = m.pop(), m.pop()
    if type(args) is not tuple:
        raise MalformedError("an object whose arguments are not a tuple")
    m.stack.append(record(cls, args, "newobj"))


@_on(pickle.NEWOBJ_EX)
def _newobj_ex(m: Machine) -> None:
    kwargs, args, cls = m.pop(), m.pop(), m.pop()
    if type(args) is not tuple or type(kwargs) is not dict:
        raise MalformedError("an object whose arguments are not a tuple and a dict")
    m.stack.append(record(cls, args, "newobj_ex", kwargs))


@_on(pickle.INST)
def _inst(m: Machine) -> None:
    module, name = _text(m.line()), _text(m.line())
    m.stack.append(record(m.find_global(module, name), tuple(m.pop_to_mark())))


@_on(pickle.OBJ)
def _obj(m: Machine) -> None:
    items = m.pop_to_mark()
    if not items:
        raise MalformedError("an object without its class")
    m.stack.append(record(items[0], tuple(items[1:])))


@_on(pickle.BUILD)
def _build(m: Machine) -> None:
    state = m.pop()
    m.set_state(m.top(), state)


@_on(pickle.BINPERSID)
def _binpersid(m: Machine) -> None:
    m.stack.append(m.persistent_load(m.pop()))


@_on(pickle.PERSID)
def _persid(m: Machine) -> None:
    raise MalformedError("a persistent id of protocol 0")


@_on(pickle.EXT1, pickle.EXT2, pickle.EXT4)
def _extension(m: Machine) -> None:
    raise MalformedError("an extension code, which names a class only its writer's process knows")


@_on(pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
def _buffer(m: Machine) -> None:
    raise MalformedError("an out-of-band buffer")
