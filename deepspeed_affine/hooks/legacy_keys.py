"""The pattern lists of a ``universal_checkpoint_info``, made to say of every parameter what its map says, or nothing.

Converters that read no map read these lists. Where the lists alone give another layout than the map, they are changed
so that such a converter stops at the parameter: merging it in the wrong order would not be noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed_affine.errors import AffineError
from deepspeed_affine.hooks.layouts import LiveParam
from deepspeed_affine.ir import ParamAffineMap, exact_name, pattern_of
from deepspeed_affine.lowering import UcInfo, keys, lower_param
from deepspeed_affine.lowering.sub_params import resolve_sub_params

__all__ = ["LegacyKeys"]

LISTS = (keys.ROW_PARALLEL, keys.TP_REPLICATED, keys.VOCABULARY, keys.TO_AVERAGE, keys.TWO_SUB_PARAMS)
SCALED = (
    "every rank holds the same multiple of it, which only an affine_map says; a converter that reads no map would take "
    "that for the parameter"
)


class LegacyKeys:
    """One info's pattern lists while they are being completed; ``entries`` is the info itself, changed in place."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries
        self._lists_reasons = keys.UNSUPPORTED in entries
        self._reasons: dict[str, str] = {}
        for key in (keys.ROW_PARALLEL, keys.TP_REPLICATED, keys.VOCABULARY):
            entries[key] = list(entries.get(key) or [])
        entries[keys.SUB_PARAMS] = list(entries.get(keys.SUB_PARAMS) or [])

    def forget_aliases(self, aliases: Iterable[str]) -> None:
        """No list names a tied parameter by a name that no file stores."""
        for name in aliases:
            self.remove(name)

    def add(self, key: str, names: Iterable[str]) -> None:
        """Every one of ``names`` is listed under ``key``."""
        self.entries[key] = sorted({*self.entries[key], *map(pattern_of, names)})

    def remove(self, name: str) -> None:
        """No list names ``name`` by its exact pattern; patterns that match other names too stay."""

        def names_it(pattern: object) -> bool:
            return isinstance(pattern, str) and exact_name(pattern) == name

        for key in LISTS:
            if self.entries.get(key):
                self.entries[key] = [pattern for pattern in self.entries[key] if not names_it(pattern)]
        kept = []
        for rule in self.entries[keys.SUB_PARAMS]:
            patterns = rule.get("patterns") if isinstance(rule, Mapping) else None
            if isinstance(patterns, list | tuple) and any(names_it(pattern) for pattern in patterns):
                left = [pattern for pattern in patterns if not names_it(pattern)]
                if not left:
                    continue
                rule = {**rule, "patterns": left}
            kept.append(rule)
        self.entries[keys.SUB_PARAMS] = kept
        widths = self.entries.get(keys.SHARD_WIDTHS)
        if isinstance(widths, Mapping):
            self.entries[keys.SHARD_WIDTHS] = {key: value for key, value in widths.items() if not names_it(key)}

    def agree_with(self, params: Iterable[LiveParam]) -> None:
        """Every parameter is described as its map describes it, or in a way no converter can merge it by."""
        info = UcInfo.parse({**self.entries, keys.UNSUPPORTED: {}})
        for param in params:
            if not _says(info, param):
                self.remove(param.universal)
                key = _list_for(param)
                if key is None:
                    self._only_a_map(param)
                elif key:
                    self.add(key, [param.universal])

    def write_widths(self, params: Iterable[LiveParam]) -> None:
        """Sub-parameter rules that name one parameter state physical widths, and its ranks' widths stand beside them.

        Versions before 0.19.6 publish the number of sub-parameters instead, and cut only evenly.
        """
        info = UcInfo.parse({**self.entries, keys.UNSUPPORTED: {}})
        widths = dict(self.entries.get(keys.SHARD_WIDTHS) or {})
        for param in params:
            found = info.sub_param_rule(param.universal)
            if found is None or found[0].stored_patterns != [pattern_of(param.universal)]:
                continue
            rule, pattern = found
            if pattern in widths and isinstance(rule.shape[rule.partition_dim], tuple):
                continue
            try:
                layout = resolve_sub_params(info, rule, pattern, param.universal, _shapes(param.layout))
            except AffineError:
                continue
            shape = list(rule.stored_shape)
            shape[rule.partition_dim] = layout.sizes
            widths[pattern] = [list(row) for row in layout.widths]
            self.entries[keys.SUB_PARAMS] = [
                {**one, "shape": shape} if isinstance(one, Mapping) and one.get("patterns") == [pattern] else one
                for one in self.entries[keys.SUB_PARAMS]
            ]
        if widths:
            self.entries[keys.SHARD_WIDTHS] = widths

    def list_unsupported(self, refused: Mapping[str, AffineError]) -> None:
        """What cannot be described is listed with the reason, and nowhere else; what now is described is not listed."""
        for name, fault in refused.items():
            self.remove(name)
            self._reasons[pattern_of(name)] = fault.message
        if self._reasons or self._lists_reasons:
            self.entries[keys.UNSUPPORTED] = dict(sorted(self._reasons.items()))

    def widths_are_written(self) -> bool:
        """Whether every sub-parameter rule states physical widths and every one of its patterns has per-rank widths,
        as metadata of 0.4 and later must."""
        widths = self.entries.get(keys.SHARD_WIDTHS) or {}
        for rule in self.entries[keys.SUB_PARAMS]:
            if not isinstance(rule, Mapping):
                return False
            shape, axis = rule.get("shape"), rule.get("partition_dim")
            if not isinstance(shape, list | tuple) or type(axis) is not int or not -len(shape) <= axis < len(shape):
                return False
            if not isinstance(shape[axis], list | tuple) or any(one not in widths for one in rule.get("patterns", ())):
                return False
        return True

    def measure_vocabulary(self, params: Iterable[LiveParam]) -> None:
        """The vocabulary has the rows F really has: AutoTP pads nothing, and older versions guess from one shard.

        A parameter that is listed for its name alone and has another height is no vocabulary: its rows would be lost.
        """
        listed = self._vocabulary(params)
        if not listed:
            return
        rows = listed[0].layout.logical_shape[0]
        self.entries[keys.ORIGINAL_VOCAB] = rows
        for param in listed:
            if param.layout.logical_shape[0] != rows:
                pattern = pattern_of(param.universal)
                self.entries[keys.VOCABULARY] = [each for each in self.entries[keys.VOCABULARY] if each != pattern]

    def record_padding(self, params: Iterable[LiveParam]) -> None:
        """Beside a user's ``original_vocab_size`` stands the height the vocabulary is padded to, where there is one."""
        heights = {param.layout.logical_shape[0] for param in self._vocabulary(params)}
        if len(heights) == 1:
            self.entries.setdefault(keys.PADDED_VOCAB, heights.pop())

    def _vocabulary(self, params: Iterable[LiveParam]) -> list[LiveParam]:
        patterns = UcInfo.parse({keys.VOCABULARY: self.entries[keys.VOCABULARY]}).vocabulary
        return [param for param in params if param.layout.logical_shape and patterns.matches(param.universal)]

    def _only_a_map(self, param: LiveParam) -> None:
        layout = param.layout
        if not _is_multiple(layout):
            self.add(keys.TP_REPLICATED, [param.universal])
        elif len(layout.shard_shapes[layout.ranks[0]]) == 1:
            # Equal shards would pass an old converter's comparison; a vector cannot be joined along axis 1.
            self.add(keys.ROW_PARALLEL, [param.universal])
        else:
            self._reasons[pattern_of(param.universal)] = SCALED


def _list_for(param: LiveParam) -> str | None:
    """The one list that describes the parameter as its map does: its key, "" where being in none does, None if none."""
    for key in ("", keys.TP_REPLICATED, keys.ROW_PARALLEL):
        if _says(UcInfo.parse({key: [pattern_of(param.universal)]} if key else {}), param):
            return key
    return None


def _says(info: UcInfo, param: LiveParam) -> bool:
    """Whether the lists alone put the same elements of F at the same addresses of each shard as the map does."""
    layout = param.layout
    try:
        found = lower_param(info, param.universal, _shapes(layout)).map
    except AffineError:
        return False
    return found.numel == layout.numel and dict(found.pieces_by_rank) == dict(layout.pieces_by_rank)


def _shapes(layout: ParamAffineMap) -> list[tuple[int, ...]]:
    return [layout.shard_shapes[rank] for rank in layout.ranks]


def _is_multiple(layout: ParamAffineMap) -> bool:
    """Whether every rank holds the same bytes, and they are not F's own."""
    rows = list(layout.pieces_by_rank.values())
    return all(row == rows[0] for row in rows[1:]) and len(set(layout.shard_shapes.values())) == 1
