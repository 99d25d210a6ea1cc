"""Which entry of the metadata decides about a parameter: DeepSpeed's own order, except that exact keys come first.

DeepSpeed asks its lists one after the other and takes the first that matches. A key that is exactly the
parameter's name says more than a pattern that happens to match its beginning, so it is asked before any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_affine.lowering.lowered import Category, Rule
from deepspeed_affine.lowering.patterns import PatternList
from deepspeed_affine.lowering.uc_info import UcInfo

__all__ = ["categorise"]

Found = list[tuple[Rule, str]]

_FUSED = (Rule.SUB_PARAMS, Rule.ROW_PARALLEL)
"""DeepSpeed's AutoTP may list a fused weight under both; the sub-parameters then say how its columns are cut."""


def categorise(info: UcInfo, name: str, *, superseded: bool) -> Category:
    """The branch of DeepSpeed's chain that ``name`` takes, with the patterns that found their parameter in it.

    With ``superseded`` a stored map decides the layout: every pattern that matches counts as used, and none is
    refused. Otherwise two patterns of one list, none of them exact, raise naming them.
    """
    sub_params = info.sub_param_rule(name)
    lists = (
        (Rule.TP_REPLICATED, info.replicated),
        (Rule.AVERAGE, info.average),
        (Rule.TWO_SUB_PARAMS, info.two_sub_params),
        (Rule.SUB_PARAMS, PatternList("") if sub_params is None else sub_params[0].patterns),
        (Rule.ROW_PARALLEL, info.row),
    )
    exact: Found = [(rule, key) for rule, patterns in lists if (key := patterns.exact(name)) is not None]
    used: set[str] = set()
    if superseded or exact:
        # What an exact key or a map overrules has found its parameter all the same.
        used.update(key for patterns in (info.vocabulary, *(p for _, p in lists)) for key in patterns.matches(name))
    if superseded:
        found: Found = exact or [(rule, key) for rule, patterns in lists for key in patterns.matches(name)]
        vocabulary = next(iter(info.vocabulary.matches(name)), None)
    else:
        found = exact or _first(lists, name)
        vocabulary = info.vocabulary.single(name)
        used.update(key for _, key in found)
    used.update(key for key in (sub_params and sub_params[1], vocabulary) if key is not None)
    rule, pattern = found[0] if found else (Rule.COLUMN_PARALLEL, None)
    fused = rule is Rule.SUB_PARAMS
    others = tuple(other.value for other, _ in exact if other is not rule and not (fused and other in _FUSED))
    return Category(
        rule,
        pattern,
        sub_params[0] if sub_params else None,
        vocabulary,
        frozenset(used),
        contradicted_by=() if superseded else others,
    )


def _first(lists: Sequence[tuple[Rule, PatternList]], name: str) -> Found:
    """The first list with a pattern for ``name``; of a sub-parameter rule its first pattern, as DeepSpeed does."""
    for rule, patterns in lists:
        key = next(iter(patterns.matches(name)), None) if rule is Rule.SUB_PARAMS else patterns.single(name)
        if key is not None:
            return [(rule, key)]
    return []
