"""The directory's records as values: one that exists has the types and domains the format defines.

Members are named as in the file, except ``nbytes`` for ``bytes``. ``config``, ``metadata`` and ``provenance`` are plain
JSON values and nobody's here to interpret or to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.errors import DirectoryError, ReferenceError_, SchemaError
from deepspeed_affine.ninfer.integers import checked_sum, elements, identifier, name_fault, positive, shape_of, u64

__all__ = [
    "ActivationPolicy",
    "Binding",
    "Component",
    "FileRecord",
    "ObjectRecord",
    "Part",
    "Proposal",
    "ResourceObject",
    "TensorObject",
    "Use",
]


class ActivationPolicy(Enum):
    """How narrow a consumer may make the activations it multiplies."""

    A16_ONLY = "A16Only"
    ALLOW_A8 = "AllowA8"
    ALLOW_A4 = "AllowA4"

    @property
    def widths(self) -> frozenset[str]:
        """What is allowed, as the format names it."""
        return _WIDTHS[self]


_WIDTHS = {
    ActivationPolicy.A16_ONLY: frozenset({"A16"}),
    ActivationPolicy.ALLOW_A8: frozenset({"A16", "A8"}),
    ActivationPolicy.ALLOW_A4: frozenset({"A16", "A8", "A4"}),
}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the set: the bytes of payload it holds and its name beside the entry, None for the entry itself."""

    path: str | None
    payload_bytes: int

    def __post_init__(self) -> None:
        positive(self.payload_bytes, "A file's payload_bytes")
        if self.path is None:
            return
        if type(self.path) is not str:
            raise SchemaError(f"A file's path is {shown(self.path)}; expected a file name.")
        if name_fault(self.path) or "/" in self.path or "\\" in self.path or self.path in (".", ".."):
            raise DirectoryError(
                f"A file's path is {shown(self.path)}; expected the name of a file beside the entry: nonempty, without "
                "slash, backslash or U+0000, and neither '.' nor '..'."
            )

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "payload_bytes": self.payload_bytes}


@dataclass(frozen=True, slots=True)
class Proposal:
    """The optional proposal head of the text component: over the full vocabulary, or over ``rows`` indexed rows."""

    domain: str
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.domain not in ("full", "indexed"):
            raise SchemaError(f"A proposal's domain is {shown(self.domain)}; expected 'full' or 'indexed'.")
        if self.domain == "full" and self.rows is not None:
            raise SchemaError("A proposal of domain 'full' has rows; expected them with 'indexed' only.")
        if self.domain == "indexed":
            positive(self.rows, "An indexed proposal's rows")

    def to_json(self) -> dict[str, Any]:
        return {"domain": self.domain} if self.rows is None else {"domain": self.domain, "rows": self.rows}


@dataclass(frozen=True, slots=True)
class Component:
    """One model component: its own configuration, the component it belongs to, and its resources by role."""

    config: Mapping[str, Any]
    target: str | None = None
    resources: Mapping[str, str] = field(default_factory=dict)
    proposal: Proposal | None = None

    def __post_init__(self) -> None:
        _open_object(self.config, "A component's config")
        if self.target is not None:
            identifier(self.target, "A component's target")
        object.__setattr__(self, "resources", _names(self.resources, "A component's resources"))
        if self.proposal is not None and not isinstance(self.proposal, Proposal):
            raise SchemaError(f"A component's proposal is {shown(self.proposal)}; expected a Proposal.")

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"config": dict(self.config)}
        if self.target is not None:
            found["target"] = self.target
        if self.resources:
            found["resources"] = dict(self.resources)
        if self.proposal is not None:
            found["proposal"] = self.proposal.to_json()
        return found


@dataclass(frozen=True, slots=True)
class TensorObject:
    """A stored tensor: its logical shape, how its values are encoded and laid out, and where its bytes are.

    ``offset`` and ``nbytes`` are in bytes of the logical payload; ``divisors`` is how many source matrices, each with
    an NVFP4 divisor of its own, are stacked in it.
    """

    id: str
    shape: tuple[int, ...]
    format: str
    layout: str
    offset: int
    nbytes: int
    divisors: int = 1

    def __post_init__(self) -> None:
        identifier(self.id, "An object's id")
        what = f"Object {shown(self.id)}: its"
        object.__setattr__(self, "shape", shape_of(self.shape, f"{what} shape"))
        identifier(self.format, f"{what} format")
        identifier(self.layout, f"{what} layout")
        u64(self.offset, f"{what} offset")
        positive(self.nbytes, f"{what} bytes")
        positive(self.divisors, f"{what} divisors")

    @property
    def elements(self) -> int:
        return elements(self.shape)

    def to_json(self) -> dict[str, Any]:
        found = {
            "id": self.id,
            "kind": "tensor",
            "shape": list(self.shape),
            "format": self.format,
            "layout": self.layout,
            "offset": self.offset,
            "bytes": self.nbytes,
        }
        return found if self.divisors == 1 else {**found, "divisors": self.divisors}


@dataclass(frozen=True, slots=True)
class ResourceObject:
    """A stored file, for example a tokenizer; ``offset`` and ``nbytes`` are in bytes of the logical payload."""

    id: str
    encoding: str
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        identifier(self.id, "An object's id")
        what = f"Object {shown(self.id)}: its"
        identifier(self.encoding, f"{what} encoding")
        u64(self.offset, f"{what} offset")
        positive(self.nbytes, f"{what} bytes")

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": "resource",
            "encoding": self.encoding,
            "offset": self.offset,
            "bytes": self.nbytes,
        }


ObjectRecord = TensorObject | ResourceObject


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``[begin, end)`` of a stored tensor in C order; padding and scales are no elements."""

    object: str
    begin: int
    end: int

    def __post_init__(self) -> None:
        identifier(self.object, "A part's object")
        u64(self.begin, "A part's range")
        u64(self.end, "A part's range")
        if self.begin >= self.end:
            raise ReferenceError_(
                f"A part of object {shown(self.object)} has the range [{self.begin}, {self.end}); expected one element "
                "or more."
            )

    @property
    def elements(self) -> int:
        return self.end - self.begin

    def to_json(self) -> dict[str, Any]:
        return {"object": self.object, "range": [self.begin, self.end]}


@dataclass(frozen=True, slots=True)
class Binding:
    """What a parameter consists of: one whole object of its own shape, or parts whose elements follow each other."""

    object: str | None = None
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        parts = tuple(self.parts)
        if (self.object is None) == (not parts) or not all(isinstance(part, Part) for part in parts):
            raise SchemaError("A binding has to name one whole object, or one part or more; expected exactly one form.")
        if self.object is not None:
            identifier(self.object, "A binding's object")
        checked_sum((part.elements for part in parts), "The elements of a binding's parts")
        object_set_parts(self, parts)

    @property
    def objects(self) -> tuple[str, ...]:
        """The objects it takes from, each once, in order of first use."""
        if self.object is not None:
            return (self.object,)
        return tuple(dict.fromkeys(part.object for part in self.parts))

    def to_json(self) -> dict[str, Any]:
        if self.object is not None:
            return {"object": self.object}
        return {"parts": [part.to_json() for part in self.parts]}


def object_set_parts(binding: Binding, parts: tuple[Part, ...]) -> None:
    # Apart from the class, whose member ``object`` hides the builtin's name.
    object.__setattr__(binding, "parts", parts)


@dataclass(frozen=True, slots=True)
class Use:
    """One place where a parameter is used: what it is multiplied with, what is permitted there, and helper inputs."""

    parameter: str
    input: str
    activation_policy: ActivationPolicy | None = None
    auxiliaries: Mapping[str, Binding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        identifier(self.parameter, "A use's parameter")
        identifier(self.input, "A use's input")
        # The spelling of the file is taken too.
        policy: Any = self.activation_policy
        if policy is not None:
            object.__setattr__(self, "activation_policy", policy_of(getattr(policy, "value", policy)))
        if not isinstance(self.auxiliaries, Mapping):
            raise SchemaError(f"A use's auxiliaries are {shown(self.auxiliaries)}; expected an object.")
        for role, binding in self.auxiliaries.items():
            identifier(role, "An auxiliary's role")
            if not isinstance(binding, Binding):
                raise SchemaError(f"Auxiliary {shown(role)} is {shown(binding)}; expected a binding.")
        object.__setattr__(self, "auxiliaries", MappingProxyType(dict(self.auxiliaries)))

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"parameter": self.parameter, "input": self.input}
        if self.activation_policy is not None:
            found["activation_policy"] = self.activation_policy.value
        if self.auxiliaries:
            found["auxiliaries"] = {role: binding.to_json() for role, binding in self.auxiliaries.items()}
        return found


def policy_of(value: Any) -> ActivationPolicy:
    for policy in ActivationPolicy:
        if policy.value == value:
            return policy
    names = ", ".join(policy.value for policy in ActivationPolicy)
    raise SchemaError(f"A use's activation_policy is {shown(value)}; expected one of {names}.")


def _open_object(value: Any, what: str) -> None:
    if not isinstance(value, Mapping) or not all(type(key) is str for key in value):
        raise SchemaError(f"{what} is {shown(value)}; expected an object.")


def _names(value: object, what: str) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise SchemaError(f"{what} is {shown(value)}; expected an object of names.")
    return MappingProxyType({identifier(k, f"A role of {what}"): identifier(v, what) for k, v in value.items()})
