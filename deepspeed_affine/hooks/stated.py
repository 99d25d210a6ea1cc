"""A ``universal_checkpoint_info`` that came with a live model, asked parameter by parameter.

It may hold a map of every parameter, as what DeepSpeed or this package collected before does. Only the maps that are
asked for are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.ir import ParamAffineMap, exact_name, pattern_of, read_document
from deepspeed_affine.lowering import UcInfo, keys
from deepspeed_affine.lowering.patterns import PatternList

__all__ = ["StatedInfo"]


class StatedInfo:
    """The lists of the info, checked at once, and its maps, each checked when its parameter asks."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.lists = UcInfo.parse({**info, keys.AFFINE_MAP: None})
        document = info.get(keys.AFFINE_MAP) or {}
        if not isinstance(document, Mapping):
            raise CheckpointFormatError(
                f"{keys.AFFINE_MAP} is a {type(document).__name__}; expected the document of the parameters' maps."
            )
        self._head = {"version": document["version"]} if "version" in document else {}
        under = document.get("params")
        rows = under if isinstance(under, Mapping) else {key: row for key, row in document.items() if key != "version"}
        if document:
            # What is wrong with the document as a whole is found without its rows: a newer version, two spellings.
            read_document({**document, "params": {}} if rows is under else self._head or document)
        if under is not None and rows is not under:
            read_document(document)
        self._rows: Mapping[str, Any] = rows
        self._patterns = [key for key in self._rows if not isinstance(key, str) or exact_name(key) is None]

    def says(self, name: str) -> bool:
        """Whether a list names the parameter, or a map does."""
        return bool(self._keys(name)) or bool(self.lists.category_patterns_of(name))

    def of(self, name: str) -> UcInfo:
        """The info as far as it concerns ``name``."""
        wanted = self._keys(name)
        if not wanted:
            return self.lists
        document = read_document({**self._head, "params": {key: self._rows[key] for key in wanted}})
        maps = {entry.key: entry.layout for entry in document}
        return replace(self.lists, maps=maps, map_keys=PatternList(keys.AFFINE_MAP, maps))

    def map_of(self, name: str) -> ParamAffineMap | None:
        """The map the info holds of ``name``, or None."""
        found = self.of(name).affine_map(name)
        return None if found is None else found[1]

    def _keys(self, name: str) -> list[str]:
        exact = pattern_of(name)
        return [*([exact] if exact in self._rows else ()), *self._patterns]
