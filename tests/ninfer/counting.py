"""How much work a call is, counted and not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], Any]) -> tuple[int, Any]:
    """How many lines of Python the call runs in this thread, whatever the machine does beside it, and its result."""
    count, before = 0, sys.gettrace()

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return traced

    sys.settrace(traced)
    try:
        found = call()
    finally:
        sys.settrace(before)
    return count, found
