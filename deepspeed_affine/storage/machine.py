"""The stack, the memo and the names of one pickle being read; ``unpickle`` drives it opcode by opcode."""

from __future__ import annotations

import _compat_pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from deepspeed_affine.storage.refs import NO_STATE, Global, StandIn
from deepspeed_affine.storage.safe_calls import check_hashable

__all__ = ["MARK", "Machine", "MalformedError"]

MARK = object()
"""What the MARK opcode leaves on the stack."""


_NUMBERS = {code: struct.Struct("<" + code) for code in "BHIQi"}


class MalformedError(Exception):
    """The opcode stream breaks the pickle format; the caller adds the file's name."""


class Machine:
    """Reads fixed-size items, keeps the stack free of stray marks, and fills only containers of known types."""

    def __init__(self, data: bytes, persistent_load: Callable[[Any], Any]) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.persistent_load = persistent_load
        self.protocol = 0

    def take(self, count: int) -> bytes:
        chunk = self.data[self.at : self.at + count]
        if len(chunk) != count:
            raise MalformedError(f"{count} bytes announced, {len(chunk)} present")
        self.at += count
        return chunk

    def number(self, code: str) -> int:
        packed = _NUMBERS[code]
        if self.at + packed.size > len(self.data):
            raise MalformedError(f"{packed.size} bytes announced, {len(self.data) - self.at} present")
        value: int = packed.unpack_from(self.data, self.at)[0]
        self.at += packed.size
        return value

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise MalformedError("a line without its end")
        text = self.data[self.at : end]
        self.at = end + 1
        return text

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is MARK:
            raise MalformedError("a mark where an object is expected")
        return value

    def top(self) -> Any:
        value = self.stack[-1]
        if value is MARK:
            raise MalformedError("a mark where an object is expected")
        return value

    def pop_to_mark(self) -> list[Any]:
        stack = self.stack
        at = len(stack) - 1
        while at >= 0 and stack[at] is not MARK:
            at -= 1
        if at < 0:
            raise MalformedError("no mark on the stack")
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
                raise MalformedError(f"two states for one object of {target.stand_in_class}")
            target.stand_in_state = state
        elif type(target) is OrderedDict and isinstance(state, dict):
            for name, value in state.items():
                if not isinstance(name, str) or hasattr(OrderedDict, name):
                    raise MalformedError(f"attribute {name!r} of an OrderedDict")
                setattr(target, name, value)
        else:
            raise MalformedError(f"a state for {type(target).__name__}")

    def add_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, StandIn):
            target.stand_in_list.extend(items)
        else:
            raise MalformedError(f"items appended to {type(target).__name__}")

    def set_items(self, target: Any, flat: list[Any]) -> None:
        if len(flat) % 2:
            raise MalformedError("a key without its value")
        if type(target) in (dict, OrderedDict):
            for at in range(0, len(flat), 2):
                key = flat[at]
                if type(key) is not str:
                    check_hashable(key)
                target[key] = flat[at + 1]
        elif isinstance(target, StandIn):
            target.stand_in_dict.extend(zip(flat[0::2], flat[1::2], strict=True))
        else:
            raise MalformedError(f"items set on {type(target).__name__}")

    def memo_get(self, index: int) -> None:
        if index not in self.memo:
            raise MalformedError(f"memo entry {index} is not set")
        self.stack.append(self.memo[index])

    def memo_put(self, index: int) -> None:
        if index < 0:
            raise MalformedError("negative memo entry")
        self.memo[index] = self.top()
