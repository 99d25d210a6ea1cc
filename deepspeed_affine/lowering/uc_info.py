"""``universal_checkpoint_info`` read once, checked, and turned into typed patterns and rules.

The dictionary is what some training script stored: any entry may be missing, and classes may be inert
stand-ins. Everything wrong with it is said here, by key, so that later steps meet only well-formed facts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.ir import ParamAffineMap, read_document
from deepspeed_affine.ir.ints import INT64_MAX, shown
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.patterns import PatternList

__all__ = ["SubParamRule", "UcInfo", "metadata_version"]

Dim = int | tuple[int, ...] | None

_CATEGORIES = (keys.TP_REPLICATED, keys.TO_AVERAGE, keys.ROW_PARALLEL, keys.VOCABULARY, keys.TWO_SUB_PARAMS)


@dataclass(frozen=True, slots=True)
class SubParamRule:
    """One entry of ``parameter_with_sub_params``: a view of F whose partition axis is several sub-parameters.

    ``shape`` is the view with one element per axis: an extent, a placeholder (negative or None) or, at
    ``partition_dim``, the sub-parameters' widths as a tuple or (before 0.4) their count as a number.
    ``stored_patterns``, ``stored_shape`` and ``stored_dim`` are kept as they were read, lists as lists, because
    DeepSpeed writes them into the universal file unchanged.
    """

    patterns: PatternList
    shape: tuple[Dim, ...]
    partition_dim: int
    stored_patterns: Any
    stored_shape: Any
    stored_dim: int


@dataclass(frozen=True, slots=True)
class UcInfo:
    """What a checkpoint says about the layout of its parameters."""

    version: float
    replicated: PatternList
    average: PatternList
    row: PatternList
    vocabulary: PatternList
    two_sub_params: PatternList
    sub_params: tuple[SubParamRule, ...]
    shard_widths: Mapping[str, tuple[tuple[int, ...], ...]]
    pipeline_replicated: PatternList
    unsupported: PatternList
    unsupported_reasons: Mapping[str, str]
    expert: PatternList
    original_vocab_size: int | None
    padded_vocab_size: int | None
    maps: Mapping[str, ParamAffineMap]
    map_keys: PatternList
    maps_under_params: bool
    """Whether the map document uses DeepSpeed's spelling, the only one its own reader sees."""

    @classmethod
    def parse(cls, info: Mapping[str, Any]) -> UcInfo:
        """Every entry of ``info`` checked and typed; a malformed one raises, naming its key."""
        if not isinstance(info, Mapping):
            raise CheckpointFormatError(
                f"universal_checkpoint_info is a {type(info).__name__}; expected a dictionary of patterns."
            )
        document = read_document(info[keys.AFFINE_MAP]) if info.get(keys.AFFINE_MAP) else None
        maps = {entry.key: entry.layout for entry in document or ()}
        reasons = _reasons(info.get(keys.UNSUPPORTED))
        return cls(
            version=metadata_version(info.get(keys.VERSION)),
            replicated=_patterns(info, keys.TP_REPLICATED),
            average=_patterns(info, keys.TO_AVERAGE),
            row=_patterns(info, keys.ROW_PARALLEL),
            vocabulary=_patterns(info, keys.VOCABULARY),
            two_sub_params=_patterns(info, keys.TWO_SUB_PARAMS),
            sub_params=_sub_params(info.get(keys.SUB_PARAMS)),
            shard_widths=_shard_widths(info.get(keys.SHARD_WIDTHS)),
            pipeline_replicated=_patterns(info, keys.PIPELINE_REPLICATED),
            unsupported=PatternList(keys.UNSUPPORTED, reasons),
            unsupported_reasons=reasons,
            expert=_patterns(info, keys.EXPERT),
            original_vocab_size=_size(info, keys.ORIGINAL_VOCAB),
            padded_vocab_size=_size(info, keys.PADDED_VOCAB),
            maps=maps,
            map_keys=PatternList(keys.AFFINE_MAP, maps),
            maps_under_params=document is not None and document.spelling == "params",
        )

    def affine_map(self, name: str) -> tuple[str, ParamAffineMap] | None:
        """The stored map of ``name`` with its key, or None: its exact key's, else several may match if they agree."""
        exact = self.map_keys.exact(name)
        found = self.map_keys.matches(name) if exact is None else (exact,)
        if not found:
            return None
        first = self.maps[found[0]]
        if any(self.maps[other].canonical() != first.canonical() for other in found[1:]):
            raise CheckpointFormatError(
                f"Parameter {name} is matched by {len(found)} keys of {keys.AFFINE_MAP} with different layouts: "
                f"{', '.join(map(repr, found))}; expected one layout.",
                param=name,
            )
        return found[0], first

    def sub_param_rule(self, name: str) -> tuple[SubParamRule, str] | None:
        """The first rule that matches ``name`` with the key that did; later rules are not looked at."""
        for rule in self.sub_params:
            found = rule.patterns.matches(name)
            if found:
                return rule, rule.patterns.exact(name) or found[0]
        return None

    def unsupported_reason(self, name: str) -> str | None:
        """Why the writer could not describe ``name``, or None."""
        found = self.unsupported.matches(name)
        return self.unsupported_reasons[found[0]] if found else None

    def skipped_on_stage(self, name: str, pp_rank: int) -> bool:
        """Whether the copy of ``name`` on pipeline stage ``pp_rank`` repeats the one on stage 0."""
        return pp_rank > 0 and bool(self.pipeline_replicated.matches(name))

    def is_expert(self, name: str) -> bool:
        """Whether ``name`` is an expert parameter; DeepSpeed writes these patterns to be searched, not matched."""
        return bool(self.expert.searches(name))

    def category_patterns(self) -> frozenset[str]:
        """Every pattern DeepSpeed expects to be used by at least one parameter."""
        return frozenset(key for patterns in self._categories() for key in patterns.keys)

    def category_patterns_of(self, name: str) -> frozenset[str]:
        """Those of them that match ``name``."""
        return frozenset(key for patterns in self._categories() for key in patterns.matches(name))

    def _categories(self) -> Iterable[PatternList]:
        return (
            self.replicated,
            self.average,
            self.row,
            self.vocabulary,
            self.two_sub_params,
            *(rule.patterns for rule in self.sub_params),
        )


def metadata_version(value: Any) -> float:
    """``value`` as a number, zero where it is missing.

    Some scripts store it as text, which DeepSpeed does not notice until it compares the version.
    """
    if value is None:
        return 0.0
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise CheckpointFormatError(f"{keys.VERSION} is {shown(value)}; expected a number such as 0.4.")
    return number


def _patterns(info: Mapping[str, Any], key: str) -> PatternList:
    value = info.get(key)
    if value is None:
        return PatternList(key)
    if isinstance(value, str | bytes) or not isinstance(value, list | tuple | set | frozenset):
        raise CheckpointFormatError(f"{key} is {shown(value)}; expected a list of parameter name patterns.")
    return PatternList(key, value if isinstance(value, list | tuple) else sorted(value, key=str))


def _reasons(value: Any) -> dict[str, str]:
    if not value:
        return {}
    if isinstance(value, Mapping):
        return {_text(key): str(reason) for key, reason in value.items()}
    if isinstance(value, list | tuple):
        return {_text(key): "the writer gave no reason" for key in value}
    raise CheckpointFormatError(f"{keys.UNSUPPORTED} is {shown(value)}; expected a dictionary from pattern to reason.")


def _text(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise CheckpointFormatError(f"{keys.UNSUPPORTED} holds the key {shown(key)}; expected a pattern as a string.")


def _size(info: Mapping[str, Any], key: str) -> int | None:
    value = info.get(key)
    if value is None:
        return None
    size = _integer(value)
    if size is None or size < 0:
        raise CheckpointFormatError(f"{key} is {shown(value)}; expected a number of rows.")
    return size


def _integer(value: Any) -> int | None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    number = int(value)
    return number if abs(number) <= INT64_MAX else None


def _shard_widths(value: Any) -> dict[str, tuple[tuple[int, ...], ...]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointFormatError(
            f"{keys.SHARD_WIDTHS} is {shown(value)}; expected a dictionary from pattern to widths."
        )
    result: dict[str, tuple[tuple[int, ...], ...]] = {}
    for pattern, table in value.items():
        rows: list[tuple[int, ...]] = []
        for row in table if isinstance(table, list | tuple) else (None,):
            widths = [_integer(width) for width in row] if isinstance(row, list | tuple) else [None]
            if any(width is None or width < 0 for width in widths):
                raise CheckpointFormatError(
                    f"{keys.SHARD_WIDTHS} of {shown(pattern)} is {shown(table)}; expected one list of per-rank widths "
                    "for each sub-parameter."
                )
            rows.append(tuple(width for width in widths if width is not None))
        result[pattern] = tuple(rows)
    return result


def _sub_params(value: Any) -> tuple[SubParamRule, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise CheckpointFormatError(f"{keys.SUB_PARAMS} is {shown(value)}; expected a list of sub-parameter rules.")
    return tuple(_sub_param_rule(entry) for entry in value)


def _sub_param_rule(entry: Any) -> SubParamRule:
    fields = {}
    for name in ("patterns", "shape", "partition_dim"):
        # Training scripts store either the dictionary or the SubparamShape built from it, and the latter
        # arrives as a stand-in that keeps its fields as attributes.
        found = entry.get(name) if isinstance(entry, Mapping) else getattr(entry, name, None)
        if found is None:
            raise CheckpointFormatError(
                f"An entry of {keys.SUB_PARAMS} has no {name!r}: {shown(entry)}; expected patterns, shape and "
                "partition_dim."
            )
        fields[name] = found
    patterns, shape, stored_dim = fields["patterns"], fields["shape"], _integer(fields["partition_dim"])
    if isinstance(patterns, str) or not isinstance(patterns, list | tuple):
        raise CheckpointFormatError(f"{keys.SUB_PARAMS} has patterns {shown(patterns)}; expected a list of patterns.")
    if not isinstance(shape, list | tuple) or not shape:
        raise CheckpointFormatError(
            f"{keys.SUB_PARAMS} of {shown(patterns)} has shape {shown(shape)}; expected a view shape."
        )
    if stored_dim is None or not -len(shape) <= stored_dim < len(shape):
        raise CheckpointFormatError(
            f"{keys.SUB_PARAMS} of {shown(patterns)} has partition_dim {shown(fields['partition_dim'])}; expected an "
            f"axis of its shape {shown(shape)}."
        )
    partition_dim = stored_dim % len(shape)
    return SubParamRule(
        patterns=PatternList(keys.SUB_PARAMS, patterns),
        shape=tuple(_dim(dim, axis == partition_dim, patterns, shape) for axis, dim in enumerate(shape)),
        partition_dim=partition_dim,
        stored_patterns=patterns,
        stored_shape=shape,
        stored_dim=stored_dim,
    )


def _dim(dim: Any, partitioned: bool, patterns: Any, shape: Any) -> Dim:
    if dim is None:
        return None
    if isinstance(dim, list | tuple):
        widths = [_integer(width) for width in dim]
        # DeepSpeed sums a tuple on any axis. Only the partition axis can be cut, so elsewhere the sum is all
        # there is to keep.
        if widths and all(width is not None and width >= 0 for width in widths):
            sizes = tuple(width for width in widths if width is not None)
            return sizes if partitioned else sum(sizes)
    elif (number := _integer(dim)) is not None:
        return number if number >= 0 else None
    raise CheckpointFormatError(
        f"{keys.SUB_PARAMS} of {shown(patterns)} has shape {shown(shape)}, whose entry {shown(dim)} is no extent; "
        "expected numbers, with a tuple of widths at the partition axis."
    )
