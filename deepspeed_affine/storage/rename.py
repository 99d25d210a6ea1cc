"""Two names exchanged in one step, where the system and the file system can."""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["exchange"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV})


def exchange(first: str, second: str) -> bool:
    """What is at either path is now at the other, and no moment was between; False, and nothing done, where that
    cannot be had.

    Raises OSError as ``os.rename`` does.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), first, None, second)
