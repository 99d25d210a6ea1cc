"""Every parameter group's own hyperparameters: which saved group a live one continues, and what it takes from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.hooks.report import Reporting
from deepspeed_affine.storage.refs import Global, StandIn, TensorRef

__all__ = ["GroupPlan", "foreign_options", "in_saved_order", "match_groups", "take_hyperparameters"]

STRUCTURE = frozenset({"params", "name", "moe", "use_muon", "step"})
"""What a group is, and what is restored elsewhere: no hyperparameters."""
OF_THIS_MACHINE = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""How a step is computed here, not what it computes."""
OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""What a scheduler adds to the groups of any optimizer."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The saved hyperparameters one live group takes, and why it takes no others."""

    values: Mapping[str, Any]
    kept: Mapping[str, str] = field(default_factory=dict)


def match_groups(
    live: Sequence[Mapping[str, Any]],
    members: Sequence[set[str]],
    saved: Sequence[Mapping[str, Any]],
    saved_members: Sequence[set[str]] | None,
) -> list[GroupPlan]:
    """For every live group what it takes. ``members`` are the parameters of each, on both sides.

    A group continues the saved groups its parameters were in. Where these disagree on a value, or where live groups
    that continue one saved group were given different values on purpose, the engine's own stays. Where the checkpoint
    does not say which parameters were in which group, groups are taken in order.

    Raises UnsupportedLayoutError where there are then more or fewer than were saved.
    """
    if saved_members is None:
        return [_taken(group, [values]) for group, values in zip(live, _in_order(live, saved), strict=True)]
    origins = [[at for at, names in enumerate(saved_members) if names & own] for own in members]
    plans = []
    for at, group in enumerate(live):
        if not origins[at]:
            # All of its parameters are new, or it has none on this rank; by name or order it may still be known.
            same = [values for values in saved if "name" in group and values.get("name") == group["name"]]
            if not same and not members[at] and len(saved) == len(live):
                same = [saved[at]]
            plans.append(_taken(group, same[:1]))
            continue
        siblings = [other for it, other in enumerate(live) if it != at and set(origins[it]) & set(origins[at])]
        plans.append(_taken(group, [saved[origin] for origin in origins[at]], siblings))
    return plans


def in_saved_order(members: Sequence[set[str]], saved_members: Sequence[set[str]] | None) -> bool:
    """Whether every live group has parameters of the saved group of its number and of no other, as far as is known."""
    saved = enumerate(saved_members or ())
    return all(at == group for at, names in saved for group, own in enumerate(members) if names & own)


def foreign_options(live: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options that every saved group has and no live one: those of another class of optimizer."""
    everywhere = set.intersection(*map(set, saved)) if saved else set()
    return sorted(everywhere.difference(STRUCTURE, OF_THIS_MACHINE, OF_SCHEDULERS, *live))


def take_hyperparameters(groups: Sequence[dict[str, Any]], plans: Sequence[GroupPlan], report: Reporting) -> None:
    """Every group has the values of its plan; what it keeps of its own is in ``report``."""
    import torch

    for at, (group, plan) in enumerate(zip(groups, plans, strict=True)):
        for key, value in plan.values.items():
            if torch.is_tensor(group.get(key)):
                group[key].fill_(value)
            else:
                group[key] = value
        for key, why in plan.kept.items():
            report.left(f"{key} of parameter group {at}", why)


def _in_order(live: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if len(saved) != len(live):
        raise UnsupportedLayoutError(
            f"The checkpoint was saved with {len(saved)} parameter groups and the engine has {len(live)}, and it does "
            "not record which parameters were in which. Build the engine's optimizer with the groups that were saved, "
            "or say load_optimizer_states=False."
        )
    return saved


def _taken(
    group: Mapping[str, Any], origins: Sequence[Mapping[str, Any]], siblings: Sequence[Mapping[str, Any]] = ()
) -> GroupPlan:
    values: dict[str, Any] = {}
    kept: dict[str, str] = {}
    if not origins:
        return GroupPlan({}, {"every hyperparameter": "none of its parameters was in a saved group"})
    for key in group:
        if key in STRUCTURE or key in OF_THIS_MACHINE:
            continue
        found = [origin[key] for origin in origins if key in origin]
        if len(found) < len(origins):
            kept[key] = "it was not saved"
        elif any(value != found[0] for value in found[1:]):
            kept[key] = f"its parameters were in {len(found)} saved groups, with {', '.join(map(repr, found))}"
        elif any(other.get(key) != group[key] for other in siblings):
            if found[0] != group[key]:
                kept[key] = f"{found[0]!r} was saved for one group that is now several, with values of their own"
        elif _is_plain(found[0]):
            values[key] = found[0]
        else:
            kept[key] = f"a {type(found[0]).__name__} was saved, not a plain value"
    return GroupPlan(values, kept)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return not isinstance(value, (StandIn, TensorRef, Global))
