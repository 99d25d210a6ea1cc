"""A command as one process of a job, made to misbehave in the middle of its work; see ``ranks.py``.

It is ``ds_affine reshard`` where the arguments begin so, else ``ds_to_universal``.

RANK_DOES is ``RANK:WHAT:MOMENT``: when that rank (or every, ``all``) has finished its MOMENT-th file, or ``0.5s`` after
it began, it does WHAT. RANK_SLOW is how many seconds every file takes at least, so that there is a middle. RANK_OPTIONS
is JSON, options of single ranks.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time

from deepspeed_affine.cli import ds_affine, ds_to_universal
from deepspeed_affine.storage.journal import Journal

RANK = os.environ.get("RANK", "")
WHO, WHAT, MOMENT = os.environ.get("RANK_DOES", "none:nothing:0").split(":")
SLOW = float(os.environ.get("RANK_SLOW", "0"))
LOCK = threading.Lock()
REAL_RECORD = Journal.record
done = 0


def misbehave() -> None:
    if WHAT in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT"):
        os.kill(os.getpid(), getattr(signal, WHAT))
    elif WHAT == "EIO":
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/the/disk")
    elif WHAT == "ENOSPC":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/the/disk")
    elif WHAT == "bug":
        raise ZeroDivisionError("on purpose")


def record(self, entry) -> None:
    global done
    if SLOW:
        with LOCK:
            time.sleep(SLOW)
    REAL_RECORD(self, entry)
    with LOCK:
        done += 1
        mine = str(done) == MOMENT
    if mine and WHO in (RANK, "all"):
        misbehave()


Journal.record = record
if MOMENT.endswith("s") and WHO in (RANK, "all"):
    timer = threading.Timer(float(MOMENT[:-1]), misbehave)
    timer.daemon = True
    timer.start()
options = json.loads(os.environ.get("RANK_OPTIONS", "{}")).get(RANK, [])
command = ds_affine if sys.argv[1] == "reshard" else ds_to_universal
sys.exit(command([*sys.argv[1:], *options]))
