"""All that writing an ordinary checkpoint of some topology needs to know, apart from the numbers that go into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from deepspeed_affine.errors import Faults, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.plan.partition import FlatGroup, sub_group_counts

__all__ = ["CheckpointLayout", "LayoutParam", "LayoutRank", "ParamKind"]

ParamKind = Literal["optimized", "frozen", "buffer"]


@dataclass(frozen=True, slots=True)
class LayoutParam:
    """One tensor of the model: how tensor parallelism cuts it, the dtype the module holds it in, and whose it is.

    ``optimized`` tensors are the optimizer's, ``frozen`` ones parameters it does not own.
    """

    layout: ParamAffineMap
    dtype: str
    kind: ParamKind = "optimized"

    def shard_shape(self, tp: int) -> tuple[int, ...]:
        """What tensor-parallel rank ``tp`` holds."""
        return self.layout.shard_shapes[tp]

    def shard_numel(self, tp: int) -> int:
        return prod(self.shard_shape(tp))


@dataclass(frozen=True, slots=True)
class LayoutRank:
    """What one model-parallel rank has.

    ``names`` are its module's entries in order, aliases included, or None where pipeline layer files hold them;
    ``groups`` the optimized parameters in the order in which they lie, group by group; ``aliases`` maps names of tied
    weights to the parameter they stand for. Under ZeRO-3 ``sub_groups`` lists ``(group, number of parameters)`` of each
    sub-group, in order.
    """

    names: tuple[str, ...] | None
    groups: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    sub_groups: tuple[tuple[int, int], ...] = ()

    @property
    def optimized(self) -> Iterator[str]:
        for group in self.groups:
            yield from group

    def sub_group_names(self) -> list[tuple[str, ...]]:
        """The parameters of every sub-group."""
        found: list[tuple[str, ...]] = []
        taken = [0] * len(self.groups)
        for group, count in self.sub_groups:
            found.append(self.groups[group][taken[group] : taken[group] + count])
            taken[group] += count
        return found


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """One topology of one model: degrees, ZeRO stage, the parameters' maps, and the order of everything.

    ``ranks`` are the model-parallel ranks, pipeline stage by stage, ``tp`` of each. ``experts`` gives, by the prefix
    that the parameters of a layer's experts share, how many experts it has in all and on one rank; a group that lists
    experts numbers them from 0 on every rank, and lies over the data-parallel ranks that have the same ones, which are
    neighbours where ``data_before_expert``. ``bf16_optimizer`` says that the optimizer is DeepSpeed's BF16_Optimizer,
    ``prefix`` what the optimizer files' names begin with. ``param_alignment`` counts elements. ``hyperparameters`` are
    the names each parameter group has, ``states`` those of the optimizer's tensors; None where nothing tells.
    ``config``, ``info`` and ``version`` are the DeepSpeed configuration, ``universal_checkpoint_info`` and DeepSpeed
    version that files of this topology carry, the first two encoded as plain JSON; None leaves what the files' source
    has.
    """

    tp: int
    pp: int
    dp: int
    stage: int
    params: Mapping[str, LayoutParam]
    ranks: tuple[LayoutRank, ...]
    experts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    data_before_expert: bool = False
    bf16_optimizer: bool = False
    prefix: str = ""
    param_alignment: int = 1
    hyperparameters: tuple[tuple[str, ...], ...] | None = None
    states: tuple[str, ...] | None = None
    config: Any = field(default=None, repr=False)
    info: Any = field(default=None, repr=False)
    version: str | None = None

    def __post_init__(self) -> None:
        faults = Faults()
        for axis in ("tp", "pp", "dp"):
            if getattr(self, axis) < 1:
                faults.add(InvalidMapError(f"{axis} is {getattr(self, axis)}; a degree of at least 1 is expected."))
        faults.raise_if_any()
        if self.stage not in (1, 2, 3):
            raise UnsupportedLayoutError(f"ZeRO stage {self.stage}: a stage from 1 to 3 is expected.")
        if self.pp > 1 and self.stage > 1:
            raise UnsupportedLayoutError(
                f"ZeRO-{self.stage} with {self.pp} pipeline stages: DeepSpeed has pipeline parallelism with ZeRO-1 or "
                "BF16_Optimizer only. Choose stage 1, or one pipeline stage."
            )
        if len(self.ranks) != self.tp * self.pp:
            raise InvalidMapError(
                f"a layout of {self.pp} pipeline stages of {self.tp} tensor-parallel ranks lists {len(self.ranks)} "
                f"ranks; {self.tp * self.pp} are expected."
            )
        for mp, rank in enumerate(self.ranks):
            faults.extend(self._rank_faults(mp, rank))
        faults.extend(self._expert_faults())
        faults.raise_if_any()
        faults.extend(self._ownership_faults())
        faults.raise_if_any()

    def _rank_faults(self, mp: int, rank: LayoutRank) -> Iterator[InvalidMapError]:
        listed = [*rank.optimized]
        if len(set(listed)) != len(listed):
            yield InvalidMapError(f"model-parallel rank {mp} lists a parameter in two groups, or twice in one.")
        for name in (*listed, *(rank.names or ()), *rank.aliases.values()):
            if name in rank.aliases:
                continue
            param = self.params.get(name)
            if param is None:
                yield InvalidMapError(f"model-parallel rank {mp} has {name!r}, and no map describes it.", param=name)
            elif mp % self.tp not in param.layout.shard_shapes:
                yield InvalidMapError(
                    f"parameter {name!r}: its map has no rank {mp % self.tp} of {self.tp} tensor-parallel ones.",
                    param=name,
                )
        held = [0] * len(rank.groups)
        foreign = False
        for group, count in rank.sub_groups:
            foreign = foreign or group >= len(held)
            if not foreign:
                held[group] += count
        if self.stage == 3 and (foreign or held != [len(group) for group in rank.groups]):
            yield InvalidMapError(f"model-parallel rank {mp}: its sub-groups do not add up to its parameter groups.")

    def _ownership_faults(self) -> Iterator[InvalidMapError]:
        """Every tensor has its place: one that no rank lists would be left out of the files without a word."""
        for mp, rank in enumerate(self.ranks):
            first = self.ranks[mp - mp % self.tp]
            if (rank.names, rank.groups) != (first.names, first.groups):
                yield InvalidMapError(
                    f"model-parallel rank {mp} lists other tensors than the first tensor-parallel rank of its stage, "
                    "or in another order; one order is expected."
                )
        counts = {len(rank.groups) for rank in self.ranks}
        if self.hyperparameters is not None:
            counts.add(len(self.hyperparameters))
        if len(counts) > 1:
            yield InvalidMapError(
                f"its ranks and 'hyperparameters' list {sorted(counts)} parameter groups; one number is expected."
            )
        owned = {name for rank in self.ranks for group in rank.groups for name in self._everywhere(group)}
        held = {name for rank in self.ranks for name in rank.names or ()}
        apart = any(rank.names is None for rank in self.ranks)
        for name, param in self.params.items():
            if (param.kind == "optimized") != (name in owned):
                listed = "a parameter group" if name in owned else "no parameter group"
                yield InvalidMapError(f"{name!r} is {param.kind}, and {listed} lists it.", param=name)
            elif name not in held and not apart and not name.startswith(tuple(self.experts)):
                yield InvalidMapError(f"{name!r}: no rank lists it among its module's entries.", param=name)

    def _everywhere(self, names: Sequence[str]) -> Iterator[str]:
        """What the parameters of a group are called on any rank."""
        first = self.expert_layer(names)
        count, local = (1, 1) if first is None else self.experts[first]
        return (self._global(name, rank) for name in names for rank in range(count // local))

    def _expert_faults(self) -> Iterator[InvalidMapError | UnsupportedLayoutError]:
        for prefix, (count, local) in self.experts.items():
            if local < 1 or count % local:
                yield InvalidMapError(
                    f"expert layer {prefix!r} has {count} experts, {local} on each rank.", param=prefix
                )
            elif self.dp % (count // local):
                yield UnsupportedLayoutError(
                    f"expert layer {prefix!r} lies over {count // local} expert-parallel ranks, and {self.dp} "
                    "data-parallel ranks are no multiple of them. Choose another degree.",
                    param=prefix,
                )
        if self.experts and self.stage == 3:
            yield UnsupportedLayoutError("ZeRO-3 with a mixture of experts: DeepSpeed's own layers have ZeRO-1 and 2.")

    @property
    def scales_loss(self) -> bool:
        """Whether the run trains in float16, whose loss scaler its optimizer files hold."""
        return any(param.kind == "optimized" and param.dtype == "float16" for param in self.params.values())

    @property
    def ep(self) -> int:
        """The largest expert-parallel degree of a layer."""
        return max((count // local for count, local in self.experts.values()), default=1)

    def expert_layer(self, names: Sequence[str]) -> str | None:
        """The prefix of the layer whose experts a group lists, None for any other group."""
        return next((prefix for prefix in self.experts for name in names[:1] if name.startswith(prefix)), None)

    def held_by(self, names: Sequence[str], dp: int) -> tuple[tuple[str, ...], int, int]:
        """What data-parallel rank ``dp`` calls ``names``, counted over all ranks, of a group: with its place among the
        ranks that the group lies over, and their number."""
        first = self.expert_layer(names)
        if first is None:
            return tuple(names), dp, self.dp
        degree = self.experts[first][0] // self.experts[first][1]
        rank, place = divmod(dp, self.dp // degree) if self.data_before_expert else (dp % degree, dp // degree)
        return tuple(self._global(name, rank) for name in names), place, self.dp // degree

    def _global(self, name: str, rank: int) -> str:
        for prefix, (_, local) in self.experts.items():
            number, dot, rest = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and number.isdecimal():
                return f"{prefix}{rank * local + int(number)}{dot}{rest}"
        return name

    @property
    def mp(self) -> int:
        """How many model-parallel ranks there are."""
        return self.tp * self.pp

    def flat_group(self, mp: int, group: int) -> FlatGroup:
        """How a group of a rank lies flat under ZeRO-1, ZeRO-2 or BF16_Optimizer."""
        names = self.ranks[mp].groups[group]
        numels = tuple(self.params[name].shard_numel(mp % self.tp) for name in names)
        return FlatGroup(numels, self.held_by(names, 0)[2], self.param_alignment)

    def reshaped(
        self, *, dp: int, stage: int, sub_group_size: int, bf16_optimizer: bool, param_alignment: int
    ) -> CheckpointLayout:
        """The same model, cut the same way by tensor and pipeline parallelism, at another data-parallel degree or
        stage."""

        def cut(mp: int, rank: LayoutRank) -> LayoutRank:
            if stage != 3:
                return replace(rank, sub_groups=())
            numels = [[self.params[name].shard_numel(mp % self.tp) for name in group] for group in rank.groups]
            counts = [sub_group_counts(group, dp, sub_group_size) for group in numels]
            return replace(rank, sub_groups=tuple((at, count) for at, found in enumerate(counts) for count in found))

        return replace(
            self,
            dp=dp,
            stage=stage,
            bf16_optimizer=bf16_optimizer,
            param_alignment=param_alignment,
            ranks=tuple(cut(mp, rank) for mp, rank in enumerate(self.ranks)),
        )
