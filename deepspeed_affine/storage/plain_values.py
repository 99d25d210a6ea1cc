"""What a checkpoint's pickle holds beside tensors, as plain JSON values, and back."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, UnsupportedLayoutError
from deepspeed_affine.storage.refs import Global, StandIn, TorchSize, new_instance

__all__ = ["decode_value", "encode_value"]

MOST_LEVELS = 100
_MARK = "$"


def encode_value(value: Any, subject: str, level: int = 0) -> Any:
    """``value`` in JSON's own types; what they do not have is an object with one key that begins with "$".

    Dictionaries, lists, tuples, sets, torch sizes, numbers, text, names of classes, and objects built from their
    attributes are known. Raises UnsupportedLayoutError naming ``subject`` for anything else.
    """
    if level > MOST_LEVELS:
        raise UnsupportedLayoutError(f"{subject}: is nested deeper than {MOST_LEVELS} levels and cannot be recorded.")

    def each(values: Any) -> list[Any]:
        return [encode_value(inner, subject, level + 1) for inner in values]

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, TorchSize):
        return {"$size": each(value)}
    if isinstance(value, tuple):
        return {"$tuple": each(value)}
    if isinstance(value, list):
        return each(value)
    if isinstance(value, (set, frozenset)):
        return {"$set": sorted(each(value), key=repr)}
    if isinstance(value, OrderedDict):
        return {"$ordered": [each(item) for item in value.items()]}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return {key: encode_value(inner, subject, level + 1) for key, inner in value.items()}
        return {"$dict": [each(item) for item in value.items()]}
    if isinstance(value, Global):
        return {"$global": [value.module, value.qualname]}
    if isinstance(value, StandIn) and isinstance(value.stand_in_class, Global):
        attributes = dict(value.stand_in_attributes())
        simple = value.stand_in_op == "newobj" and not value.stand_in_args and isinstance(value.stand_in_state, dict)
        if simple and not value.stand_in_list and not value.stand_in_dict:
            named = value.stand_in_class
            return {"$object": [named.module, named.qualname, encode_value(attributes, subject, level + 1)]}
    raise UnsupportedLayoutError(
        f"{subject}: holds {value!r}, which a layout cannot record; expected plain values. Pass the checkpoint itself "
        "with --like."
    )


def decode_value(value: Any, subject: str, level: int = 0) -> Any:
    """What ``encode_value`` was given; raises CheckpointFormatError naming ``subject`` for what it does not write."""
    if level > MOST_LEVELS:
        raise CheckpointFormatError(f"{subject}: is nested deeper than {MOST_LEVELS} levels; it is damaged.")
    if isinstance(value, list):
        return [decode_value(inner, subject, level + 1) for inner in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith(_MARK)]
    if not marks:
        return {key: decode_value(inner, subject, level + 1) for key, inner in value.items()}
    try:
        ((mark, held),) = value.items()
        if mark == "$float":
            return float(held)
        inner = decode_value(held, subject, level + 1)
        if mark == "$object":
            module, qualname, attributes = inner
            return new_instance(str(module), str(qualname), dict(attributes))
        if mark == "$global":
            module, qualname = inner
            return Global(str(module), str(qualname))
        makers = {"$size": TorchSize, "$tuple": tuple, "$set": set, "$ordered": OrderedDict, "$dict": dict}
        return makers[mark](inner)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointFormatError(
            f"{subject}: holds {value!r}, which this package does not write ({error!r}). It was edited or is damaged."
        ) from error
