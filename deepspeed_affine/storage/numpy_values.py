"""Numpy scalars, arrays and dtypes out of a pickle, rebuilt from checked ingredients and nothing else."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

from deepspeed_affine.storage.refs import NO_STATE, Global, StandIn

__all__ = ["current_numpy_name", "numpy_value"]

_SIMPLE_KINDS = "biufc"
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


def current_numpy_name(module: str, qualname: str) -> tuple[str, str]:
    """Return the name under which the installed numpy pickles what another numpy called ``module.qualname``."""
    if not module.startswith(("numpy.core.", "numpy._core.")):
        return module, qualname
    import numpy as np

    tail = module.split(".", 2)[2]
    return ("numpy._core." if int(np.__version__.split(".")[0]) >= 2 else "numpy.core.") + tail, qualname


def numpy_value(stand_in: StandIn, cache: MutableMapping[int, tuple[Any, StandIn]] | None = None) -> Any:
    """Return the numpy dtype, scalar or array a stand-in records, or None where it is none of a plain kind.

    Plain kinds are booleans, integers, floats and complex numbers. ``cache`` maps ids of stand-ins to values made
    before, so that two arrays go on sharing one dtype object.
    """
    cls = stand_in.stand_in_class
    if not isinstance(cls, Global) or not cls.module.startswith("numpy"):
        return None
    if cls == Global("numpy", "dtype"):
        return _dtype(stand_in)
    if cls.module in _MODULES and cls.qualname == "scalar":
        return _scalar(stand_in, {} if cache is None else cache)
    if cls.module in _MODULES and cls.qualname == "_reconstruct":
        return _array(stand_in, {} if cache is None else cache)
    return None


def _dtype(stand_in: StandIn) -> Any:
    import numpy as np

    args, state = stand_in.stand_in_args, stand_in.stand_in_state
    code = args[0] if len(args) == 3 else None
    if type(code) is not str or code[:1] not in _SIMPLE_KINDS or not code[1:].isdecimal() or len(code) > 3:
        return None
    if any(type(flag) not in (bool, int) for flag in args[1:]):
        return None
    if type(state) is not tuple or len(state) != 8 or state[0] != 3 or state[1] not in ("<", ">", "|", "="):
        return None
    if state[2:5] != (None, None, None) or any(type(number) is not int for number in state[5:]):
        return None
    if state[5:7] != (-1, -1) or state[7] != 0:
        return None
    try:
        made: Any = np.dtype(code, bool(args[1]), bool(args[2]))
        made.__setstate__(state)
    except (TypeError, ValueError):
        return None
    return made


def _known_dtype(value: Any, cache: MutableMapping[int, tuple[Any, StandIn]]) -> Any:
    if not isinstance(value, StandIn) or value.stand_in_class != Global("numpy", "dtype"):
        return None
    if id(value) not in cache:
        cache[id(value)] = (_dtype(value), value)
    return cache[id(value)][0]


def _scalar(stand_in: StandIn, cache: MutableMapping[int, tuple[Any, StandIn]]) -> Any:
    import numpy as np

    args = stand_in.stand_in_args
    dtype = _known_dtype(args[0], cache) if len(args) == 2 else None
    if dtype is None or type(args[1]) is not bytes or len(args[1]) != dtype.itemsize:
        return None
    return np.frombuffer(args[1], dtype=dtype)[0]


def _array(stand_in: StandIn, cache: MutableMapping[int, tuple[Any, StandIn]]) -> Any:
    import numpy as np

    args, state = stand_in.stand_in_args, stand_in.stand_in_state
    if args != (Global("numpy", "ndarray"), (0,), b"b") or state is NO_STATE:
        return None
    if type(state) is not tuple or len(state) != 5 or state[0] != 1:
        return None
    shape, dtype, fortran, raw = state[1], _known_dtype(state[2], cache), state[3], state[4]
    if dtype is None or type(raw) is not bytes or type(fortran) not in (bool, int) or type(shape) is not tuple:
        return None
    if any(type(extent) is not int or extent < 0 for extent in shape):
        return None
    if math.prod(shape) * dtype.itemsize != len(raw):
        return None
    made: Any = np.empty((0,), dtype=np.int8)
    made.__setstate__((1, shape, dtype, fortran, raw))
    return made
