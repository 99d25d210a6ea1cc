"""The optimizer files of a resharded checkpoint: flat partitions of master weights and states, and their tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed_affine.commands.layout_of import DS_CONFIG, param_groups_of
from deepspeed_affine.commands.reshard_model import FileBuilder, config_of, put_info
from deepspeed_affine.commands.reshard_source import ReshardSource
from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.execute.model_file import UC_INFO
from deepspeed_affine.lowering.states import FP32, MUON_STATE
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout
from deepspeed_affine.plan.conversion import ObjectFile
from deepspeed_affine.plan.partition import FlatGroup, Run, zero3_runs
from deepspeed_affine.plan.reshard import Placed
from deepspeed_affine.storage.refs import Global, StandIn, TensorRef, new_instance

__all__ = ["optimizer_files"]

Parts = Sequence[tuple[str, Run]]
PADDINGS = "param_alignment_paddings"
ONLY_ZERO12 = (
    *("base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings", PADDINGS, "clip_grad"),
    *("param_slice_mappings", "ds_version", UC_INFO),
)
SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow")
ONLY_ZERO3 = ("optimizer_state_dict", "fp32_flat_groups", "ds_zero_partition_groups")


def optimizer_files(source: ReshardSource, target: CheckpointLayout, *, same_cut: bool) -> Iterator[ObjectFile]:
    """Every optimizer file of ``target``; with ``same_cut`` each model-parallel rank goes on from its own old file."""
    for mp in range(target.mp):
        count = len(target.ranks[mp].groups) if target.stage < 3 else 0
        flat = [target.flat_group(mp, group) for group in range(count)]
        for dp in range(target.dp):
            yield _OptimizerFile(source, target, mp, dp, flat, same_cut).build()


class _OptimizerFile:
    def __init__(
        self,
        source: ReshardSource,
        target: CheckpointLayout,
        mp: int,
        dp: int,
        flat: Sequence[FlatGroup],
        same_cut: bool,
    ) -> None:
        """``flat`` are the groups of the rank ``mp`` as they lie over all data-parallel ranks; none for ZeRO-3."""
        self.source, self.target, self.same_cut, self.flat = source, target, same_cut, flat
        self.mp, self.tp, self.dp = mp, mp % target.tp, dp
        self.rank = target.ranks[mp]
        self.file = FileBuilder(f"{target.prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
        folder = source.checkpoint.folder
        path = folder.find("zero_optim", dp=0, mp=mp if same_cut else 0).path
        self.old = source.root(path)
        self.param_groups = param_groups_of(source.checkpoint, self.old["optimizer_state_dict"])

    def build(self) -> ObjectFile:
        root = dict(self.old)
        old = dict(root["optimizer_state_dict"])
        root["optimizer_state_dict"] = self._zero3(old) if self.target.stage == 3 else self._zero12(old)
        root[DS_CONFIG] = config_of(self.old.get(DS_CONFIG), self.target)
        if self.target.version is not None:
            root["ds_version"] = self.target.version
        return self.file.done(root)

    # ---------------------------------------------------------------- ZeRO-1, ZeRO-2 and BF16_Optimizer

    def _zero12(self, old: dict[str, Any]) -> dict[str, Any]:
        target = self.target
        count = len(self.rank.groups)
        groups = self.flat
        # Experts have another name on each rank than over all, and other ranks to lie over.
        held = [target.held_by(names, self.dp) for names in self.rank.groups]
        runs = [
            [(names[run.index], run) for run in group.runs_of(place)]
            for (names, place, _), group in zip(held, groups, strict=True)
        ]
        paddings = [group.padding_of(place) for (_, place, _), group in zip(held, groups, strict=True)]
        masters, states = [], {}
        for at, group in enumerate(groups):
            # BF16_Optimizer keeps the padding at the end of a group.
            kept = group.partition_size - (0 if target.bf16_optimizer else paddings[at])
            masters.append(self._master(held[at][0], runs[at], kept))
            found = self._states(held[at][0], runs[at], group.partition_size, at)
            if found:
                states[at] = found
        if target.bf16_optimizer:
            paddings = [
                group.partition_size * group.dp - group.end if place == group.dp - 1 else 0
                for (_, place, _), group in zip(held, groups, strict=True)
            ]
        made = self._common(old, [*ONLY_ZERO3, *(("zero_stage", "loss_scaler") if target.bf16_optimizer else ())])
        if target.bf16_optimizer:
            for key in ("dynamic_loss_scale", "overflow", PADDINGS):
                made.pop(key, None)
        made["base_optimizer_state"] = {
            "state": states,
            "param_groups": self._param_groups([[at] for at in range(count)]),
        }
        made["single_partition_of_fp32_groups"] = masters
        if not target.bf16_optimizer:
            made["zero_stage"] = _stage(target.stage)
        made["group_paddings"] = paddings
        if not target.bf16_optimizer and (PADDINGS in old or self.source.layout.stage == 3 or "zero_stage" not in old):
            made[PADDINGS] = [list(group.paddings) for group in groups]
        made["partition_count"] = [parts for _, _, parts in held]
        made["ds_version"] = target.version or old.get("ds_version") or self.old.get("ds_version")
        made["param_slice_mappings"] = [
            OrderedDict((names[run.index], _address(run)) for _, run in found)
            for names, found in zip(self.rank.groups, runs, strict=True)
        ]
        if UC_INFO in old:
            made[UC_INFO] = old[UC_INFO]
            put_info(made, target, same_cut=self.same_cut)
        return made

    # ---------------------------------------------------------------- ZeRO-3

    def _zero3(self, old: dict[str, Any]) -> dict[str, Any]:
        target = self.target
        masters, states = [], {}
        members: list[list[int]] = [[] for _ in self.rank.groups]
        subs = zip(self.rank.sub_groups, self.rank.sub_group_names(), strict=True)
        for number, ((group, _), names) in enumerate(subs):
            members[group].append(number)
            numels = [target.params[name].shard_numel(self.tp) for name in names]
            found, length = zero3_runs(numels, target.dp, self.dp)
            runs = [(names[run.index], run) for run in found]
            masters.append(self._master(names, runs, length))
            kept = self._states(names, runs, length, group)
            if kept:
                states[number] = kept
        made = {"zero_stage": _stage(3), **self._common(old, [*ONLY_ZERO12, *ONLY_ZERO3])}
        made["zero_stage"] = _stage(3)
        made["partition_count"] = target.dp
        made["optimizer_state_dict"] = {"state": states, "param_groups": self._param_groups(members)}
        made["fp32_flat_groups"] = masters
        return made

    # ---------------------------------------------------------------- both

    def _common(self, old: dict[str, Any], without: Sequence[str]) -> dict[str, Any]:
        """What the two kinds of file have in common and is carried over, or made where the old kind has none."""
        if self.source.layout.scales_loss and not self.target.scales_loss:
            without = [*without, *SCALER]
        kept = {key: value for key, value in old.items() if key not in without}
        if self.target.bf16_optimizer:
            return kept
        # BF16_Optimizer scales no loss, and says so in nothing.
        scaler = new_instance("deepspeed.runtime.fp16.loss_scaler", "LossScaler", {"cur_scale": 1.0, "dynamic": False})
        return {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False, **kept}

    def _param_groups(self, members: list[list[int]]) -> list[dict[str, Any]]:
        return [
            {
                key: list(numbers) if key == "params" else self._group_name(value, at) if key == "name" else value
                for key, value in group.items()
            }
            for at, (group, numbers) in enumerate(zip(self.param_groups, members, strict=True))
        ]

    def _group_name(self, name: Any, group: int) -> Any:
        """DeepSpeed names a group of experts for their expert-parallel degree, and finds its ranks by that name."""
        layer = self.target.expert_layer(self.rank.groups[group])
        if layer is None:
            return name
        old, new = (
            count // local for count, local in (each.experts[layer] for each in (self.source.layout, self.target))
        )
        return f"ep_size_{new}" if name == f"ep_size_{old}" else name

    def _master(self, names: Sequence[str], runs: Parts, numel: int) -> Any:
        dtype = self._dtype(names, FP32)
        parts = [self._placed(name, FP32, run) for name, run in runs]
        return self.file.new(dtype, (numel,), parts, requires_grad=True)

    def _dtype(self, names: Sequence[str], state: str) -> str:
        dtypes = sorted({self.source.stored(name, state).dtype for name in names})
        if len(dtypes) > 1:
            what = "master weights" if state == FP32 else f"states {state!r}"
            raise UnsupportedLayoutError(
                f"parameters {names[0]!r} and others are to lie in one flat tensor and have {what} of dtypes {dtypes}; "
                "one is expected."
            )
        return dtypes[0] if dtypes else "float32"

    def _states(self, names: Sequence[str], runs: Parts, numel: int, group: int) -> dict[str, Any]:
        states = self.source.states_of(names)
        found: dict[str, Any] = {}
        for state in states.order:
            if state in states.values:
                value = states.values[state]
                is_stored = isinstance(value, TensorRef)
                found[state] = self.file.copy(value, self.source.storage(value), state) if is_stored else value
                continue
            stored = self.source.stored(names[0], state)
            held, length = self._whole(runs) if self._is_whole(state, group) else (runs, numel)
            parts = [self._placed(name, state, run) for name, run in held]
            found[state] = self.file.new(
                self._dtype(names, state), (length,), parts, state=state, requires_grad=stored.requires_grad
            )
        return found

    def _is_whole(self, state: str, group: int) -> bool:
        """Whether ZeRO-1 and ZeRO-2 keep this state whole for every parameter that touches the partition."""
        muon = bool(self.param_groups[group].get("use_muon"))
        return state == MUON_STATE and muon and self.target.stage < 3 and not self.target.bf16_optimizer

    def _whole(self, runs: Parts) -> tuple[Parts, int]:
        found: list[tuple[str, Run]] = []
        offset = 0
        for name, run in runs:
            numel = self.target.params[name].shard_numel(self.tp)
            found.append((name, Run(run.index, 0, numel, offset)))
            offset += numel
        return found, offset

    def _placed(self, name: str, state: str, run: Run) -> Placed:
        return Placed(self.source.shard(self.target, name, state, self.tp), run.start, run.numel, run.offset)


def _stage(stage: int) -> StandIn:
    return StandIn(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def _address(run: Run) -> StandIn:
    attributes = {"numel": run.numel, "start": run.offset}
    return new_instance("deepspeed.utils.tensor_fragment", "fragment_address", attributes)
