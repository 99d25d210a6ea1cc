"""From JSON values to records: member sets and types, each fault with the place it is at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from deepspeed_affine.errors import AffineError
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.directory import Directory
from deepspeed_affine.ninfer.errors import SchemaError
from deepspeed_affine.ninfer.records import (
    Binding,
    Component,
    FileRecord,
    ObjectRecord,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
    policy_of,
)

__all__ = ["binding_of", "component_of", "directory_of", "use_of"]

Made = TypeVar("Made")
_ROOT = ("components", "objects", "bindings", "uses", "files")


def directory_of(value: object, entry_name: str | None = None) -> Directory:
    """The directory a JSON value spells, checked by itself and in all its references.

    ``entry_name`` is the file name of the entry, which no continuation may have.
    """
    root = _members(value, "the directory", _ROOT, ("metadata", "provenance"))
    _present(root, "the directory", "metadata")
    _present(root, "the directory", "provenance")
    components = _mapping(root["components"], "components", component_of)
    objects = _array(root["objects"], "objects", _object)
    bindings = _mapping(root["bindings"], "bindings", binding_of)
    uses = _array(root["uses"], "uses", use_of)
    files = _array(root["files"], "files", _file)
    return Directory(
        components,
        objects,
        bindings,
        uses,
        files,
        root.get("metadata", {}),
        root.get("provenance", {}),
        entry_name=entry_name,
    )


def component_of(value: object, where: str) -> Component:
    found = _members(value, where, ("config",), ("target", "resources", "proposal"))
    _present(found, where, "target")
    proposal = None
    if "proposal" in found:
        stated = _members(found["proposal"], f"{where}: its proposal", ("domain",), ("rows",))
        _present(stated, f"{where}: its proposal", "rows")
        proposal = Proposal(stated["domain"], stated.get("rows"))
    return Component(found["config"], found.get("target"), found.get("resources", {}), proposal)


def binding_of(value: object, where: str) -> Binding:
    found = _members(value, where, (), ("object", "parts"))
    _present(found, where, "object")
    if "parts" not in found:
        return Binding(found.get("object"))
    if not isinstance(found["parts"], list):
        raise SchemaError(f"{where}: its parts are {shown(found['parts'])}; expected an array.")
    return Binding(found.get("object"), _parts(found["parts"], f"{where}: part"))


def use_of(value: object, where: str) -> Use:
    found = _members(value, where, ("parameter", "input"), ("activation_policy", "auxiliaries"))
    policy = policy_of(found["activation_policy"]) if "activation_policy" in found else None
    auxiliaries = _mapping(found.get("auxiliaries", {}), f"{where}: auxiliary", binding_of)
    return Use(found["parameter"], found["input"], policy, auxiliaries)


def _object(value: object, where: str) -> ObjectRecord:
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "tensor":
        required = ("id", "kind", "shape", "format", "layout", "offset", "bytes")
        found = _members(value, where, required, ("divisors",))
        return TensorObject(
            found["id"],
            found["shape"],
            found["format"],
            found["layout"],
            found["offset"],
            found["bytes"],
            found.get("divisors", 1),
        )
    if kind == "resource":
        found = _members(value, where, ("id", "kind", "encoding", "offset", "bytes"), ())
        return ResourceObject(found["id"], found["encoding"], found["offset"], found["bytes"])
    raise SchemaError(f"its kind is {shown(kind)}; expected 'tensor' or 'resource'.")


def _parts(value: list[object], where: str) -> tuple[Part, ...]:
    # There may be hundreds of thousands, and where one is needs saying only where it is wrong.
    try:
        return tuple([_part(item, where) for item in value])
    except AffineError:
        return tuple(_array(value, where, _part))


def _part(value: object, where: str) -> Part:
    found = _members(value, where, ("object", "range"), ())
    bounds = found["range"]
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise SchemaError(f"{where}: its range is {shown(bounds)}; expected [begin, end].")
    return Part(found["object"], bounds[0], bounds[1])


def _file(value: object, where: str) -> FileRecord:
    found = _members(value, where, ("path", "payload_bytes"), ())
    return FileRecord(found["path"], found["payload_bytes"])


def _members(value: object, where: str, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaError(f"{where} is {shown(value)}; expected an object.")
    for name in required:
        if name not in value:
            raise SchemaError(f"{where} has no member {name!r}; expected {', '.join(required)}.")
    for name in value:
        if name not in required and name not in optional:
            known = ", ".join((*required, *optional))
            raise SchemaError(f"{where} has the unknown member {shown(name)}; expected only {known}.")
    return value


def _present(found: Mapping[str, Any], where: str, name: str) -> None:
    # None stands for an absent member in a record, and JSON's null is no spelling of that.
    if name in found and found[name] is None:
        raise SchemaError(f"{where} has null for {name!r}; expected a value, or no such member.")


def _mapping(value: object, where: str, make: Callable[[object, str], Made]) -> dict[str, Made]:
    if not isinstance(value, dict):
        raise SchemaError(f"{where} is {shown(value)}; expected an object.")
    return {key: _made(make, item, f"{where} {shown(key)}") for key, item in value.items()}


def _array(value: object, where: str, make: Callable[[object, str], Made]) -> list[Made]:
    if not isinstance(value, list):
        raise SchemaError(f"{where} is {shown(value)}; expected an array.")
    return [_made(make, item, f"{where} {number}") for number, item in enumerate(value)]


def _made(make: Callable[[object, str], Made], value: object, where: str) -> Made:
    """What ``make`` makes of ``value``; its faults begin with where they are."""
    try:
        return make(value, where)
    except AffineError as fault:
        if fault.message.startswith(where):
            raise
        raise type(fault)(f"{where}: {fault.message[:1].lower()}{fault.message[1:]}") from None
