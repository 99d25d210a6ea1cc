"""What optimizer files hold, as a table: parameters, their states, and the fragments that make up every shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.lowering.zero import Fragment

__all__ = ["STEP", "GroupRecord", "Hyperparameters", "ParamStates", "Place", "ShardKey", "StateTable", "StoredScalar"]

STEP = "step"
"""The state that counts an optimizer's steps, in every optimizer that counts them per parameter."""


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """Which shard a fragment belongs to: its pipeline stage and its tensor-parallel rank."""

    pp: int
    tp: int

    def label(self, pp_degree: int, axis: str = "tp") -> str:
        return f"{axis} {self.tp}" if pp_degree == 1 else f"pp {self.pp}, {axis} {self.tp}"


@dataclass(frozen=True, slots=True)
class StoredScalar:
    """One rank's value of a state that is one number: a number, or a stored zero-dimensional tensor."""

    shard: ShardKey
    rank: int
    value: Any
    file: str


@dataclass(slots=True)
class ParamStates:
    """What the optimizer files hold of one parameter.

    ``tensors[state][shard]`` lists fragments in the order they were read, which tile the shard together;
    ``whole[state][shard]`` lists fragments each of which is the whole shard (Muon's momentum);
    ``scalars[state]`` lists every rank's value of a state that is one number.
    """

    tensors: dict[str, dict[ShardKey, list[Fragment]]] = field(default_factory=dict)
    whole: dict[str, dict[ShardKey, list[Fragment]]] = field(default_factory=dict)
    scalars: dict[str, list[StoredScalar]] = field(default_factory=dict)
    group: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where one file's part of a parameter belongs: under which name, in which shard, and which of its fragments."""

    name: str
    shard: ShardKey
    rank: int


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One parameter group in one file: the parameters it has elements of there, and the values of its states.

    ``states`` holds stored tensors, numbers, and None for a state that was saved as such.
    """

    group: int
    places: tuple[Place, ...]
    states: Mapping[str, Any]
    file: str


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The parameter groups of the optimizer in one file, as they were saved."""

    shard: ShardKey
    groups: Sequence[Mapping[str, Any]]
    file: str


class StateTable:
    """All parameters the optimizer files know, in the order the files name them."""

    def __init__(self) -> None:
        self.params: dict[str, ParamStates] = {}
        self.groups: list[GroupRecord] = []
        self.hyperparameters: list[Hyperparameters] = []
        self.empty_states: set[str] = set()
        self.stateless_groups: set[int] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.params

    def __getitem__(self, name: str) -> ParamStates:
        return self.params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def get(self, name: str) -> ParamStates | None:
        return self.params.get(name)

    def add_group(self, group: int, places: Sequence[Place], states: Mapping[str, Any], file: str) -> None:
        """What ``file`` holds of a group; a group without elements there says nothing and is not kept."""
        if places:
            self.groups.append(GroupRecord(group, tuple(places), states, file))

    def add_hyperparameters(self, shard: ShardKey, groups: Any, file: str) -> None:
        """What ``file`` has as parameter groups; where these are none, whoever needs them refuses the file."""
        if isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups):
            self.hyperparameters.append(Hyperparameters(shard, groups, file))

    def add_fragment(self, at: Place, state: str, fragment: Fragment, group: int) -> None:
        self._entry(at, group).tensors.setdefault(state, {}).setdefault(at.shard, []).append(fragment)

    def add_whole(self, at: Place, state: str, fragment: Fragment, group: int) -> None:
        self._entry(at, group).whole.setdefault(state, {}).setdefault(at.shard, []).append(fragment)

    def add_scalar(self, at: Place, state: str, value: Any, group: int, file: str) -> None:
        self._entry(at, group).scalars.setdefault(state, []).append(StoredScalar(at.shard, at.rank, value, file))

    def _entry(self, at: Place, group: int) -> ParamStates:
        entry = self.params.setdefault(at.name, ParamStates(group=group))
        if entry.group != group:
            raise CheckpointFormatError(
                f"parameter {at.name!r}: is in parameter group {entry.group} and in group {group}; one is expected in "
                "every file. The files come from different saves: take all of them from one.",
                param=at.name,
            )
        return entry
