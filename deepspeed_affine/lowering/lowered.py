"""What lowering knows of one parameter, and the entries a universal file carries beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.ir import ParamAffineMap, replicated_map
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.lowering.uc_info import SubParamRule

__all__ = ["Category", "LoweredParam", "Rule", "SubParamEntry"]


class Rule(str, Enum):
    """What decided a parameter's layout; the value is the metadata key, or what stands in for one."""

    AFFINE_MAP = keys.AFFINE_MAP
    TP_REPLICATED = keys.TP_REPLICATED
    AVERAGE = keys.TO_AVERAGE
    TWO_SUB_PARAMS = keys.TWO_SUB_PARAMS
    SUB_PARAMS = keys.SUB_PARAMS
    ROW_PARALLEL = keys.ROW_PARALLEL
    COLUMN_PARALLEL = "the default branch"
    IDENTICAL_SHARDS = "identical shards taken as replicas"


@dataclass(frozen=True, slots=True)
class Category:
    """The branch of DeepSpeed's own chain a parameter takes, whether or not a map supersedes it.

    ``used`` lists the patterns this decision consulted with success, in DeepSpeed's sense of "used".
    ``contradicted_by`` names other entries that list the parameter by its exact name and say something else.
    """

    rule: Rule
    pattern: str | None
    sub_params: SubParamRule | None
    vocabulary: str | None
    used: frozenset[str]
    contradicted_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SubParamEntry:
    """The constructor arguments of the ``SubparamShape`` object that DeepSpeed stores, containers as stored."""

    patterns: object
    shape: object
    partition_dim: int


@dataclass(frozen=True, slots=True)
class LoweredParam:
    """One parameter's layout, decided.

    ``map`` describes F with its vocabulary padding; ``truncate_rows`` is applied to F after the map, and is None
    for every other parameter. ``rule`` and ``pattern`` say what decided. ``notes`` are sentences for the plan.
    """

    name: str
    map: ParamAffineMap
    rule: Rule
    pattern: str | None
    category: Category
    truncate_rows: int | None
    stored_sub_param_shape: object | None
    map_seen_by_stock: bool
    notes: tuple[str, ...] = ()

    @property
    def average(self) -> bool:
        """Whether DeepSpeed averages the ranks' copies. They lower to replicas, whose bytes must be equal; what
        happens to copies that have drifted is the planner's decision (``OnDrift``)."""
        return self.rule is Rule.AVERAGE

    @property
    def says_split(self) -> bool:
        """Whether the metadata says that the ranks hold different parts, so that identical shards are suspicious."""
        everyone = frozenset(rank for rank, shape in self.map.shard_shapes.items() if math.prod(shape))
        return len(everyone) > 1 and any(
            piece.locations != everyone for pieces in self.map.pieces_by_rank.values() for piece in pieces
        )

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of ``param`` in the universal file."""
        shape = self.map.logical_shape
        if self.truncate_rows is None:
            return shape
        return (min(shape[0], self.truncate_rows), *shape[1:])

    def as_replicated(self) -> LoweredParam:
        """This parameter with its (identical) shards taken as copies of one F."""
        shapes = set(self.map.shard_shapes.values())
        if len(shapes) != 1:
            raise InvalidMapError(
                f"Parameter {self.name}: shards of shapes {sorted(shapes)} cannot be copies of one tensor.",
                param=self.name,
            )
        taken = replicated_map(shapes.pop(), len(self.map.ranks)).canonical()
        category = replace(self.category, rule=Rule.TP_REPLICATED)
        return replace(
            self,
            map=taken,
            rule=Rule.IDENTICAL_SHARDS,
            category=category,
            stored_sub_param_shape=None,
            map_seen_by_stock=False,
        )

    def entries(self, rules: StockRules) -> tuple[tuple[str, object], ...]:
        """What stands beside ``param`` in the universal file, in the order DeepSpeed writes it; ``param`` is last.

        A ``SubParamEntry`` is to be stored as DeepSpeed's own ``SubparamShape``.
        """
        entries: list[tuple[str, object]] = []
        if not (self.map_seen_by_stock and rules.reads_affine_map):
            entries += self._category_entries(rules)
        if self.category.vocabulary is not None:
            entries.append((keys.VOCAB_TENSOR, True))
        return tuple(entries)

    def _category_entries(self, rules: StockRules) -> list[tuple[str, object]]:
        rule = self.category.rule
        if rule is Rule.TWO_SUB_PARAMS:
            return [(keys.CAT_DIM, 0), (keys.N_SUB_PARAMS, 2)]
        if rule is Rule.ROW_PARALLEL:
            return [(keys.CAT_DIM, 1)]
        if rule is Rule.COLUMN_PARALLEL:
            return [(keys.CAT_DIM, 0)]
        stored = self.category.sub_params
        if rule is Rule.SUB_PARAMS and stored is not None:
            shape = stored.stored_shape
            if rules.normalises_sub_param_shape and self.stored_sub_param_shape is not None:
                shape = self.stored_sub_param_shape
            return [(keys.SUB_PARAM_SHAPE, SubParamEntry(stored.stored_patterns, shape, stored.stored_dim))]
        return []
