"""The ``affine_map`` document: how the maps of a checkpoint's parameters are stored, in both spellings in use.

The draft puts parameter patterns directly beside ``version``; DeepSpeed 0.19.7 and later read them under ``params``.
The presence of ``params`` decides, and a mixture is refused because either reader would silently miss half of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, InvalidMapError
from deepspeed_affine.ir.codec import map_from_dict
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.ir.map import AFFINE_MAP_FORMAT_VERSION, ParamAffineMap

__all__ = ["AffineDocument", "DocumentEntry", "Spelling", "exact_name", "pattern_of", "read_document", "write_document"]

Spelling = Literal["params", "draft"]

_SPECIAL = frozenset(".^$*+?{}[]\\|()")


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """One stored map with its key; ``name`` is the parameter it names exactly, None for a legacy pattern."""

    key: str
    name: str | None
    layout: ParamAffineMap

    def matches(self, name: str) -> bool:
        """An exact key matches its name; any other key is matched from the start of the name, as DeepSpeed does."""
        if self.name is not None:
            return name == self.name
        return re.match(self.key, name) is not None


@dataclass(frozen=True, slots=True)
class AffineDocument:
    """A document that has been read: its maps, each checked on its own; ``find`` looks one up."""

    spelling: Spelling
    entries: tuple[DocumentEntry, ...]

    def __iter__(self) -> Iterator[DocumentEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, name: str) -> ParamAffineMap | None:
        """Return the map of the parameter, or None; several keys that match it with different layouts are refused."""
        matching = [entry for entry in self.entries if entry.matches(name)]
        if not matching:
            return None
        first = matching[0]
        for other in matching[1:]:
            if first.layout != other.layout and first.layout.canonical() != other.layout.canonical():
                keys = ", ".join(repr(entry.key) for entry in matching)
                raise CheckpointFormatError(
                    f"The affine map of {name} is ambiguous: keys {keys} match it and describe different layouts. "
                    "Expected one.",
                    param=name,
                )
        return first.layout


def pattern_of(name: str) -> str:
    """The key under which a parameter's map is stored: a pattern that matches this name and no other."""
    return f"^{re.escape(name)}$"


def exact_name(key: str) -> str | None:
    """The name of which ``key`` is the escaped exact pattern, or None when the key is any other pattern.

    Pythons differ in which characters they escape, so an escaped punctuation mark counts as itself, and so does a plain
    character that has no meaning in a pattern.
    """
    if len(key) < 2 or key[0] != "^" or key[-1] != "$":
        return None
    name: list[str] = []
    rest = iter(key[1:-1])
    for char in rest:
        if char == "\\":
            char = next(rest, "")
            if not char or char.isalnum():
                return None
        elif char in _SPECIAL:
            return None
        name.append(char)
    return "".join(name)


def read_document(document: object) -> AffineDocument:
    """Return the maps of an ``affine_map`` value, or raise one error that lists everything wrong with it."""
    if not isinstance(document, Mapping):
        raise CheckpointFormatError(f"The affine map document is a {type(document).__name__}; expected a mapping.")
    if "version" not in document:
        raise CheckpointFormatError("The affine map document has no version; expected version 1.")
    _check_version(document["version"])
    spelling: Spelling = "params" if "params" in document else "draft"
    rest = {key: value for key, value in document.items() if key not in ("version", "params")}
    rows: Mapping[object, object] = rest
    if spelling == "params":
        if rest:
            raise CheckpointFormatError(
                f"The affine map document has both params and keys beside it, such as {shown(next(iter(rest)))}. "
                "Expected all parameters in one place."
            )
        rows = document["params"]
        if not isinstance(rows, Mapping):
            raise CheckpointFormatError(
                f"The affine map document's params are a {type(rows).__name__}; expected a mapping."
            )
    faults = Faults()
    entries: list[DocumentEntry] = []
    names: dict[str, str] = {}
    for key, value in rows.items():
        try:
            entry = _entry(key, value)
            if entry.name is not None and names.setdefault(entry.name, entry.key) != entry.key:
                raise CheckpointFormatError(
                    f"The affine map document names {entry.name} twice, as {names[entry.name]!r} and {entry.key!r}.",
                    param=entry.name,
                )
            entries.append(entry)
        except AffineError as fault:
            faults.add(fault)
    faults.raise_if_any()
    return AffineDocument(spelling, tuple(entries))


def _check_version(version: object) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise CheckpointFormatError(
            f"The affine map document has version {shown(version)}; expected an integer from 1."
        )
    if version > AFFINE_MAP_FORMAT_VERSION:
        raise CheckpointFormatError(
            f"The affine map document has version {shown(version)}, newer than {AFFINE_MAP_FORMAT_VERSION}, the newest "
            "this package reads. Use a newer deepspeed_affine."
        )


def _entry(key: object, value: object) -> DocumentEntry:
    if not isinstance(key, str):
        raise CheckpointFormatError(
            f"The affine map document has key {shown(key)}; expected a parameter pattern as text."
        )
    name = exact_name(key)
    if name is None:
        try:
            re.compile(key)
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointFormatError(
                f"The affine map document has key {shown(key)}, which is no pattern: {error}."
            ) from None
    return DocumentEntry(key, name, map_from_dict(value, name if name is not None else key))


def write_document(
    maps: Mapping[str, ParamAffineMap], spelling: Spelling = "params", *, rank_keys: Literal["int", "str"] = "int"
) -> dict[str, Any]:
    """Return the document of these parameters' maps, plain scalars only, every map in canonical form.

    Rank keys are integers for a .pt file and text for JSON. The result depends on the layouts alone, parameters in name
    order.
    """
    if spelling not in ("params", "draft"):
        raise InvalidMapError(f"The spelling is {spelling!r}; expected 'params' or 'draft'.")
    if rank_keys not in ("int", "str"):
        raise InvalidMapError(f"rank_keys is {rank_keys!r}; expected 'int' or 'str'.")
    rows: dict[str, Any] = {}
    # A model's layers repeat, and so do their maps.
    forms = {layout: layout.canonical() for layout in maps.values()}
    for name in sorted(maps):
        entry = forms[maps[name]].to_dict()
        if rank_keys == "str":
            entry["ranks"] = {str(rank): shard for rank, shard in entry["ranks"].items()}
        rows[pattern_of(name)] = entry
    head: dict[str, Any] = {"version": AFFINE_MAP_FORMAT_VERSION}
    return {**head, "params": rows} if spelling == "params" else {**head, **rows}
