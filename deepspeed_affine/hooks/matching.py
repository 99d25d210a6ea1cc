"""Which stored parameter each live one takes its values from, and which of either have no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.hooks.layouts import LiveParam
from deepspeed_affine.hooks.offered import Offered
from deepspeed_affine.plan.placement import wrapper_prefix

if TYPE_CHECKING:
    import torch

__all__ = ["Matching", "aliases_of", "match_params", "of_another_model"]


@dataclass(slots=True)
class Matching:
    """``taken`` has, by the engine's names, the parameters with stored weights, under the stored name. The others say
    why; ``untied`` is for the report."""

    taken: dict[str, LiveParam] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)


def aliases_of(module: torch.nn.Module) -> dict[str, list[str]]:
    """Of every parameter all of its names, under the one it has in ``named_parameters``, which is the first."""
    found: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in found.values()}


def match_params(
    lives: Mapping[str, LiveParam], aliases: Mapping[str, list[str]], known: set[str], offered: Offered
) -> Matching:
    """Match by name, a tied parameter by any of its names. ``known`` are the names any rank's model has."""
    found = Matching()
    for name, live in lives.items():
        names = [live.universal, *(alias for alias in aliases.get(name, ()) if alias != name)]
        stored = [each for each in names if offered.has_weights(each)]
        with_states = [each for each in stored if offered.state_names(each)]
        shared = offered.model.aliases.get(live.universal)
        if not with_states and shared is not None and shared not in names and offered.has_weights(shared):
            # Untied since: both go on from what the saved model kept once.
            stored, with_states = [shared], []
            found.untied.append(f"{name} from {shared}, to which it was tied")
        if not stored:
            if 0 not in live.layout.logical_shape:
                found.missing[name] = "is in the model and not in the checkpoint"
            continue
        chosen = (with_states or stored)[0]
        found.taken[name] = replace(live, universal=chosen)
        for other in with_states[1:]:
            found.unexpected[other] = f"is tied to {name} in the model, and was saved as a parameter of its own"
    for name in sorted(offered.names - known - set(offered.model.aliases)):
        found.unexpected[name] = "is in the checkpoint and not in the model"
    return found


def of_another_model(path: str, known: set[str], stored: set[str]) -> CheckpointFormatError:
    """What to say where no name is on both sides. A wrapper puts one prefix before all names, and is named."""
    ours, theirs = min(known, default="no parameter"), min(stored, default="no parameter")
    fact = f"{path}: holds no parameter of the engine's model; expected some. It has {theirs}, the model has {ours}"
    prefix = wrapper_prefix(known, stored)
    if prefix is not None:
        who, other = ("checkpoint", "engine") if prefix[0] else ("engine", "checkpoint")
        return CheckpointFormatError(
            f"{fact}. The {who}'s names are the {other}'s with {prefix[1]!r} before them, which a wrapper around the "
            "model puts there: give deepspeed.initialize the model as it was when saved, wrapped or not.",
            file=path,
        )
    return CheckpointFormatError(
        f"{fact}. The checkpoint is of another model: build the one that was saved.", file=path
    )
