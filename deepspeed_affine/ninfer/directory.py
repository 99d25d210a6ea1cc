"""The directory as a whole: unique names, ordered ranges, and references that lead somewhere.

What only a consumer can judge (formats, layouts, encoded sizes, values) is not looked at here, so that an artifact with
encodings of tomorrow opens and its other objects stay readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ninfer.errors import DirectoryError, RangeError, ReferenceError_, SchemaError
from deepspeed_affine.ninfer.integers import checked_sum, identifier
from deepspeed_affine.ninfer.records import (
    Binding,
    Component,
    FileRecord,
    ObjectRecord,
    ResourceObject,
    TensorObject,
    Use,
)

__all__ = ["TEXT", "Directory"]

TEXT = "text"
"""The component that alone may have a proposal."""


class Directory:
    """All records of an artifact, immutable; one that exists contradicts itself nowhere a reader can see.

    ``objects`` are by id in order of their offsets; ``payload_bytes`` is the length of the logical payload.
    """

    __slots__ = ("bindings", "components", "files", "metadata", "objects", "payload_bytes", "provenance", "uses")

    components: Mapping[str, Component]
    objects: Mapping[str, ObjectRecord]
    bindings: Mapping[str, Binding]
    uses: tuple[Use, ...]
    files: tuple[FileRecord, ...]
    metadata: Mapping[str, Any]
    provenance: Mapping[str, Any]
    payload_bytes: int

    def __init__(
        self,
        components: Mapping[str, Component],
        objects: Iterable[ObjectRecord],
        bindings: Mapping[str, Binding],
        uses: Iterable[Use],
        files: Iterable[FileRecord],
        metadata: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        *,
        entry_name: str | None = None,
    ) -> None:
        put = object.__setattr__
        listed = tuple(objects)
        put(self, "components", MappingProxyType(dict(components)))
        put(self, "bindings", MappingProxyType(dict(bindings)))
        put(self, "uses", tuple(uses))
        put(self, "files", tuple(files))
        put(self, "metadata", _open({} if metadata is None else metadata, "metadata"))
        put(self, "provenance", _open({} if provenance is None else provenance, "provenance"))
        self._check_members(listed)
        self._check_files(entry_name)
        put(self, "payload_bytes", checked_sum((f.payload_bytes for f in self.files), "The files' payload_bytes"))
        put(self, "objects", MappingProxyType(self._by_id(listed)))
        self._check_ranges(listed)
        self._check_references()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A Directory is immutable; {name} cannot be set.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"A Directory is immutable; {name} cannot be deleted.")

    def __repr__(self) -> str:
        return (
            f"Directory(components={list(self.components)}, objects={len(self.objects)}, "
            f"bindings={len(self.bindings)}, uses={len(self.uses)}, files={len(self.files)})"
        )

    def tensor(self, object_id: str) -> TensorObject:
        """The tensor of that id; another kind, or none, is a ``ReferenceError_``."""
        found = self.object(object_id)
        if not isinstance(found, TensorObject):
            raise ReferenceError_(f"Object {shown(object_id)} is a resource; expected a tensor.")
        return found

    def resource(self, object_id: str) -> ResourceObject:
        """The resource of that id; another kind, or none, is a ``ReferenceError_``."""
        found = self.object(object_id)
        if not isinstance(found, ResourceObject):
            raise ReferenceError_(f"Object {shown(object_id)} is a tensor; expected a resource.")
        return found

    def object(self, object_id: str) -> ObjectRecord:
        """The object of that id; none is a ``ReferenceError_``."""
        found = self.objects.get(object_id)
        if found is None:
            raise ReferenceError_(f"Object {shown(object_id)} is not in the directory; expected one that is.")
        return found

    def elements_of(self, binding: Binding) -> int:
        """How many elements a parameter of this binding has."""
        if binding.object is not None:
            return self.tensor(binding.object).elements
        return sum(part.elements for part in binding.parts)

    def ranges_of(self, binding: Binding, begin: int, end: int) -> Iterator[tuple[TensorObject, int, int]]:
        """The ranges of stored tensors that elements ``[begin, end)`` of what the binding gives are, in order."""
        if binding.object is not None:
            yield self.tensor(binding.object), begin, end
            return
        at = 0
        for part in binding.parts:
            low, high = max(begin, at), min(end, at + part.elements)
            if low < high:
                yield self.tensor(part.object), part.begin + low - at, part.begin + high - at
            at += part.elements

    def to_json(self) -> dict[str, Any]:
        """The root record as plain values; optional members that say nothing are left out."""
        found: dict[str, Any] = {
            "components": {name: component.to_json() for name, component in self.components.items()},
            "objects": [record.to_json() for record in self.objects.values()],
            "bindings": {name: binding.to_json() for name, binding in self.bindings.items()},
            "uses": [use.to_json() for use in self.uses],
            "files": [record.to_json() for record in self.files],
        }
        if self.metadata:
            found["metadata"] = dict(self.metadata)
        if self.provenance:
            found["provenance"] = dict(self.provenance)
        return found

    def _check_members(self, listed: tuple[ObjectRecord, ...]) -> None:
        for what, empty in (
            ("components", not self.components),
            ("objects", not listed),
            ("files", not self.files),
        ):
            if empty:
                raise SchemaError(f"{what} is empty; expected one or more.")
        for name, component in self.components.items():
            identifier(name, "A component's name")
            if component.proposal is not None and name != TEXT:
                raise SchemaError(f"components {shown(name)}: has a proposal; expected one in {TEXT!r} only.")
        for name in self.bindings:
            identifier(name, "A parameter's name")
        if "name" in self.metadata:
            identifier(self.metadata["name"], "metadata: its name")
        if self.files[0].path is not None:
            raise SchemaError(f"files 0: its path is {shown(self.files[0].path)}; expected null, for the entry itself.")
        for number, record in enumerate(self.files[1:], 1):
            if record.path is None:
                raise SchemaError(f"files {number}: its path is null; expected the name of a file beside the entry.")

    def _check_files(self, entry_name: str | None) -> None:
        seen = {entry_name}
        for number, record in enumerate(self.files[1:], 1):
            if record.path in seen:
                what = "the entry's own name" if record.path == entry_name else "another file's too"
                raise DirectoryError(
                    f"files {number}: its path {shown(record.path)} is {what}; expected one of its own."
                )
            seen.add(record.path)

    def _by_id(self, listed: tuple[ObjectRecord, ...]) -> dict[str, ObjectRecord]:
        found: dict[str, ObjectRecord] = {}
        for record in listed:
            if record.id in found:
                raise DirectoryError(f"objects: the id {shown(record.id)} is used twice; expected every id once.")
            found[record.id] = record
        used: set[tuple[str, str]] = set()
        for use in self.uses:
            if (use.parameter, use.input) in used:
                raise DirectoryError(
                    f"uses: parameter {shown(use.parameter)} is used twice with input {shown(use.input)}; expected "
                    "every pair once."
                )
            used.add((use.parameter, use.input))
        return found

    def _check_ranges(self, listed: tuple[ObjectRecord, ...]) -> None:
        end, before = 0, ""
        for record in listed:
            if record.offset < end:
                raise RangeError(
                    f"Object {shown(record.id)} begins at byte {record.offset}, before {before} ends at {end}; "
                    "expected objects in order of their offsets, none over another."
                )
            end, before = record.offset + record.nbytes, f"object {shown(record.id)}"
            if end > self.payload_bytes:
                raise RangeError(
                    f"Object {shown(record.id)} ends at byte {end} of a payload of {self.payload_bytes}; expected it "
                    "inside. The files table or the object's record is damaged."
                )

    def _check_references(self) -> None:
        for name, component in self.components.items():
            where = f"components {shown(name)}"
            if component.target is not None and component.target not in self.components:
                raise ReferenceError_(
                    f"{where}: its target {shown(component.target)} is no component of this artifact."
                )
            for role, object_id in component.resources.items():
                if not isinstance(self.objects.get(object_id), ResourceObject):
                    raise ReferenceError_(
                        f"{where}: resource {shown(role)} is object {shown(object_id)}, which is no resource of this "
                        "artifact."
                    )
        for name, binding in self.bindings.items():
            self._check_binding(binding, f"bindings {shown(name)}")
        for number, use in enumerate(self.uses):
            if use.parameter not in self.bindings:
                raise ReferenceError_(f"uses {number}: parameter {shown(use.parameter)} has no binding; expected one.")
            for role, binding in use.auxiliaries.items():
                self._check_binding(binding, f"uses {number}: auxiliary {shown(role)}")

    def _check_binding(self, binding: Binding, where: str) -> None:
        counts: dict[str, int] = {}
        for object_id in binding.objects:
            record = self.objects.get(object_id)
            if not isinstance(record, TensorObject):
                raise ReferenceError_(f"{where}: object {shown(object_id)} is no tensor of this artifact.")
            counts[object_id] = record.elements
        for part in binding.parts:
            if part.end > counts[part.object]:
                raise ReferenceError_(
                    f"{where}: its part [{part.begin}, {part.end}) ends past object {shown(part.object)}, which has "
                    f"{counts[part.object]} elements."
                )


def _open(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(type(key) is str for key in value):
        raise SchemaError(f"{what} is {shown(value)}; expected an object.")
    return MappingProxyType(dict(value))
