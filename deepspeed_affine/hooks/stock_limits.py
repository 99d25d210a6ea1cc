"""What DeepSpeed's loader takes for granted of the parameter groups it fills, looked at before it starts.

That of ZeRO-1 and 2 goes through the engine's groups and the saved ones side by side, stops where either ends, wants
one step of a group, and gives the optimizer whatever states are stored. That of ZeRO-3 gives it Adam's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import AffineError, Faults, UnsupportedLayoutError
from deepspeed_affine.hooks.state_forms import kept_states
from deepspeed_affine.hooks.stored_params import FP32, STEP, StoredParams
from deepspeed_affine.storage.files import is_file, join
from deepspeed_affine.storage.pt_reader import load_pickle

if TYPE_CHECKING:
    from deepspeed_affine.hooks.restoring import Restorer

__all__ = ["check_groups", "check_states"]


def check_groups(restorer: Restorer, zero: str, instead: str, faults: Faults) -> None:
    """Note a fault for every parameter group of the engine that the loader would leave unfilled or fill wrongly.

    ``instead`` is the call that loads it. Parameters that are not there or of another shape are for others to note.
    """
    saved = _saved_groups(zero)
    if saved is not None and saved != len(restorer.groups):
        faults.add(
            UnsupportedLayoutError(
                f"{zero}: was saved with {saved} parameter group(s), the engine has {len(restorer.groups)}. "
                "DeepSpeed's load_checkpoint takes them in order and leaves the rest as it is. Call "
                f"{instead} instead.",
                file=zero,
            )
        )
        return
    stored = restorer.source(zero)
    for index, group in enumerate(restorer.groups):
        try:
            _check_group(restorer, stored, index, group, instead)
        except AffineError as fault:
            faults.add(fault)


def _check_group(restorer: Restorer, stored: StoredParams, index: int, group: Sequence[Any], instead: str) -> None:
    found: set[str] = set()
    first: tuple[str, float | None] | None = None
    for param in group:
        if getattr(param, "_hp_mapping", None) is None:
            continue
        live = restorer.live(param)
        states = stored.states(live)
        found.update(states)
        value = stored.number(live, STEP) if STEP in states else None
        step = None if value is None else float(value)
        first = first or (live.name, step)
        if step != first[1]:
            raise UnsupportedLayoutError(
                f"parameter {live.name!r}: {_said(step)} is stored, and {_said(first[1])} of {first[0]!r} in the same "
                f"parameter group; DeepSpeed's load_checkpoint wants one step of a group. Call {instead} instead.",
                param=live.name,
            )
    if found - {FP32}:
        check_states(restorer.optimizer.optimizer, index, found, instead)


def check_states(optimizer: Any, index: int, given: Collection[str], instead: str) -> None:
    """The states that are ``given`` to parameter group ``index`` are all it takes to step; UnsupportedLayoutError
    otherwise."""
    kept = kept_states(optimizer, optimizer.param_groups[index])
    lacking = sorted(set(kept.required).difference(given)) if kept is not None else []
    if lacking:
        raise UnsupportedLayoutError(
            f"parameter group {index}: DeepSpeed's load_checkpoint would give it {sorted({*given} - {FP32})} and no "
            f"{' and no '.join(lacking)}, without which the engine's {type(optimizer).__name__} cannot step. Build the "
            f"optimizer that was saved, or call {instead}."
        )


def _said(step: float | None) -> str:
    return "no step" if step is None else f"step {step:g}"


def _saved_groups(zero: str) -> int | None:
    """How many parameter groups were saved, None where the file does not say."""
    path = join(zero, "optimizer_state.pt")
    root = load_pickle(path).root if is_file(path) else None
    groups = root.get("param_groups") if isinstance(root, Mapping) else None
    return len(groups) if isinstance(groups, (list, tuple)) else None
