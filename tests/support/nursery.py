"""Starts processes that have torch imported already, by forking; see ``ranks.py``. One job's start costs no seconds.

Reads a JSON object a line: {"id", "env", "argv", "out", "err"}. Writes {"id", "pid"} when the process is there and
{"id", "code"} when it has ended. The processes run ``rank.py`` and end as any Python process does.
"""

from __future__ import annotations

import json
import os
import runpy
import selectors
import sys

import torch.distributed  # noqa: F401 (imported for the children)

import deepspeed_affine.commands.convert  # noqa: F401 (as above)

RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank.py")


def tell(**members: object) -> None:
    os.write(1, json.dumps(members).encode() + b"\n")


def serve() -> dict[str, object] | None:
    """Returns in every child, with what it is to do, and None in the parent when there is no more to read."""
    children: dict[int, object] = {}
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    buffer = b""
    while True:
        if waiting.select(0.02):
            data = os.read(0, 1 << 16)
            if not data:
                return None
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                wanted: dict[str, object] = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    return wanted
                children[pid] = wanted["id"]
                tell(id=wanted["id"], pid=pid)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            tell(id=children.pop(pid), code=os.waitstatus_to_exitcode(status))


wanted = serve()
if wanted is not None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(str(wanted[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.close(0)
    os.environ.clear()
    os.environ.update(wanted["env"])  # type: ignore[arg-type]
    sys.argv = [RANK, *wanted["argv"]]  # type: ignore[misc]
    runpy.run_path(RANK, run_name="__main__")
