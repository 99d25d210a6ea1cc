"""Small DeepSpeed checkpoint folders, cut from known full tensors by torch alone and written with torch.save.

Nothing here uses the package under test. Padding is filled with NaN, so that reading one element of it shows.
Objects of DeepSpeed's classes are pickled by name; DeepSpeed need not be installed to write them.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

FP32 = "fp32"
NAN = float("nan")


# Objects of classes that need not be importable.


class _Named:
    """An instance pickled as one of another class, whose name is all that is needed."""

    target = ("builtins", "object")

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


class FragmentAddress(_Named):
    target = ("deepspeed.utils.tensor_fragment", "fragment_address")


class LossScaler(_Named):
    target = ("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


class Foreign(_Named):
    target = ("my_training.package", "SomeSchedule")


class ZeroStage:
    target = ("deepspeed.runtime.zero.config", "ZeroStageEnum")

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def __reduce__(self) -> Any:
        return ZeroStage, (self.stage,)


class ZeroStageByName(ZeroStage):
    """As Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __reduce__(self) -> Any:
        return getattr, (ZeroStage, ("disabled", "optimizer_states", "gradients", "weights")[self.stage])


class Deep:
    """Lists within lists, pickled without recursion."""

    def __init__(self, levels: int) -> None:
        self.levels = levels


class _Pickler(pickle._Pickler):
    def save_global(self, obj: Any, name: str | None = None) -> None:
        target = getattr(obj, "target", None)
        if isinstance(target, tuple):
            self.write(pickle.GLOBAL + "{}\n{}\n".format(*target).encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    def save_deep(self, obj: Deep) -> None:
        self.write(pickle.EMPTY_LIST * obj.levels + pickle.APPEND * (obj.levels - 1))

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, type: save_global, Deep: save_deep}


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    torch.save(obj, os.fspath(path), pickle_module=SimpleNamespace(__name__="synthetic", Pickler=_Pickler))


# How tensor parallelism cuts.


@dataclass(frozen=True)
class Cut:
    """One way of cutting F over the tensor-parallel ranks; ``sizes`` are the ranks' extents, even where left out."""

    kind: str = "replicated"
    sizes: tuple[int, ...] | None = None
    original_rows: int | None = None
    sub_sizes: tuple[int, ...] = ()
    pieces: Callable[[torch.Tensor, int], list[torch.Tensor]] | None = None

    def shards(self, full: torch.Tensor, tp: int) -> list[torch.Tensor]:
        if self.pieces is not None:
            return [shard.contiguous() for shard in self.pieces(full, tp)]
        if self.kind in ("replicated", "average"):
            return [full.clone() for _ in range(tp)]
        if self.kind == "sub":
            parts = torch.split(full, list(self.sub_sizes), dim=0)
            cut = [torch.chunk(part, tp, dim=0) for part in parts]
            return [torch.cat([part[rank] for part in cut]).contiguous() for rank in range(tp)]
        dim = 1 if self.kind == "row" else 0
        sizes = list(self.sizes) if self.sizes else [full.shape[dim] // tp] * tp
        return [shard.contiguous() for shard in torch.split(full, sizes, dim=dim)]


REPLICATED, COLUMN, ROW = Cut(), Cut("column"), Cut("row")


@dataclass
class Param:
    """A parameter, its full tensor, and the optimizer's states of it, all of F's shape.

    ``states`` None means the world's usual two moments. ``stages`` are the pipeline stages that hold it.
    """

    name: str
    full: torch.Tensor
    cut: Cut = REPLICATED
    group: int = 0
    stages: tuple[int, ...] = (0,)
    states: dict[str, torch.Tensor] | None = None
    kind: str = "optimized"
    alias_of: str | None = None


@dataclass
class ExpertLayer:
    """Stacked experts as AutoEP keeps them: ``weights[w]`` is F, ``placement[r]`` the experts of expert rank r."""

    prefix: str
    weights: dict[str, torch.Tensor]
    placement: tuple[tuple[int, ...], ...]
    descriptor: bool = False
    group: int = 1


@dataclass
class World:
    """Degrees and the many habits of the optimizers that save."""

    stage: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    prefix: str = ""
    align: int = 1
    strip_padding: bool = True
    whole_padding_on_last: bool = False
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype | None = None
    module_dtype: torch.dtype = torch.float32
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    whole_states: tuple[str, ...] = ()
    step: Any = field(default_factory=lambda: torch.tensor(7.0))
    scalars: dict[str, Any] = field(default_factory=dict)
    record_degrees: bool = True
    version: float = 0.4
    info: dict[str, Any] = field(default_factory=dict)
    with_info: bool = True
    layer_files: bool = False
    data_before_expert: bool = False
    turns: bool = False
    """``round_robin_gradients``: of n ranks every n-th parameter lies beside the others of its turn, and slices are
    recorded as if it did not, unless alignment leaves gaps."""

    @property
    def ds_config(self) -> dict[str, Any]:
        zero = {"stage": self.stage, **({"round_robin_gradients": True} if self.turns else {})}
        config: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": zero}
        return {**config, "use_data_before_expert_parallelism": True} if self.data_before_expert else config

    def expert_place(self, dp: int, ep_size: int) -> tuple[int, int]:
        """Which expert-parallel rank a data-parallel rank is, and its place among that rank's holders."""
        return divmod(dp, self.dp // ep_size) if self.data_before_expert else (dp % ep_size, dp // ep_size)


@dataclass
class Made:
    """The files by name, as they are to be saved, and the full tensors they were cut from."""

    world: World
    files: dict[str, Any]
    truth: dict[tuple[str, str], torch.Tensor]
    shards: dict[tuple[str, str, int], torch.Tensor]
    scalars: dict[tuple[str, str], Any]

    def optim(self, dp: int = 0, mp: int = 0) -> dict[str, Any]:
        return self.files[self.optim_name(dp, mp)]["optimizer_state_dict"]

    def optim_name(self, dp: int = 0, mp: int = 0) -> str:
        return f"{self.world.prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"

    def model(self, mp: int = 0, dp: int = 0) -> dict[str, Any]:
        return self.files[self.model_name(mp, dp)]

    def model_name(self, mp: int = 0, dp: int = 0) -> str:
        if self.world.stage == 3:
            return f"{self.world.prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"
        return f"mp_rank_{mp:02d}_model_states.pt"

    def save(self, folder: str | os.PathLike[str]) -> str:
        os.makedirs(folder, exist_ok=True)
        for name, root in self.files.items():
            save(root, os.path.join(folder, name))
        return os.fspath(folder)

    def copy(self) -> Made:
        return copy.deepcopy(self)


def random_full(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32).to(dtype)


def make(world: World, params: Sequence[Param], experts: Sequence[ExpertLayer] = ()) -> Made:
    """A checkpoint of ``params`` saved in ``world``; shapes, names, groups and stages as given."""
    truth: dict[tuple[str, str], torch.Tensor] = {}
    cut: dict[tuple[str, str, int], torch.Tensor] = {}
    for index, param in enumerate(params):
        values = _values(world, param, 1000 * index)
        for state, full in values.items():
            # DeepSpeed's ZeRO-3 files without tensor parallelism are flat, and keep the padding.
            rows = None if world.stage == 3 and world.tp == 1 else param.cut.original_rows
            in_module_only = param.kind != "optimized" and (param.kind != "frozen" or world.tp == 1)
            if not (world.stage == 3 and in_module_only):
                # Under ZeRO-3 DeepSpeed leaves these in the model-state files.
                truth[param.name, state] = full if rows is None else full[:rows]
            for rank, shard in enumerate(param.cut.shards(full, world.tp)):
                cut[param.name, state, rank] = shard
    expert_cut: dict[tuple[str, str, int], torch.Tensor] = {}
    for index, layer in enumerate(experts):
        for weight, full in layer.weights.items():
            name = f"{layer.prefix}.{weight}"
            values = _values(world, Param(name, full), 500_000 + 1000 * index)
            for state, value in values.items():
                truth[name, state] = value
                for rank, placed in enumerate(layer.placement):
                    expert_cut[name, state, rank] = value[list(placed)].contiguous()
    made = Made(world, {}, truth, cut, {})
    groups = 1 + max([param.group for param in params] + [layer.group for layer in experts], default=0)
    _model_files(made, params, experts, groups)
    for pp in range(world.pp):
        for tp in range(world.tp):
            _optim_files(made, pp, tp, params, experts, expert_cut, groups)
    for param in params:
        if param.kind == "optimized":
            for key, value in {"step": world.step, **world.scalars}.items():
                made.scalars[param.name, key] = value
    return made


def _values(world: World, param: Param, seed: int) -> dict[str, torch.Tensor]:
    values = {FP32: param.full.to(world.dtype)}
    if param.kind == "buffer":
        return {FP32: param.full.float()}
    if param.kind != "optimized":
        return {FP32: param.full.to(world.module_dtype).float()}
    states = param.states
    if states is None:
        states = {
            state: random_full(param.full.shape, seed + number + 1, world.state_dtype or world.dtype)
            for number, state in enumerate(world.states)
        }
    return {**values, **states}


def exact(name: str) -> str:
    return f"^{re.escape(name)}$"


def uc_info(world: World, params: Sequence[Param]) -> dict[str, Any]:
    def names(*kinds: str) -> list[str]:
        return [exact(param.name) for param in params if param.cut.kind in kinds and param.kind != "alias"]

    info: dict[str, Any] = {
        "universal_checkpoint_version": world.version,
        "parameter_with_row_parallelism_patterns": names("row"),
        "tp_replicated_parameter_patterns": names("replicated"),
        "parameter_to_average_patterns": names("average"),
        "vocabulary_parameter_patterns": names("vocab"),
        "parameter_with_sub_params": [
            {
                "patterns": [exact(param.name)],
                "shape": [tuple(param.cut.sub_sizes), *param.full.shape[1:]],
                "partition_dim": 0,
            }
            for param in params
            if param.cut.kind == "sub"
        ],
        "sub_param_shard_widths": {
            exact(param.name): [[size // world.tp] * world.tp for size in param.cut.sub_sizes]
            for param in params
            if param.cut.kind == "sub"
        },
    }
    rows = [param.cut.original_rows for param in params if param.cut.kind == "vocab"]
    if rows:
        info["original_vocab_size"] = rows[0]
    return {**info, **world.info}


def _model_files(made: Made, params: Sequence[Param], experts: Sequence[ExpertLayer], count: int) -> None:
    world = made.world
    for pp in range(world.pp):
        for tp in range(world.tp):
            mp = pp * world.tp + tp
            module: dict[str, torch.Tensor] = OrderedDict()
            groups: dict[int, dict[str, torch.Size]] = {group: OrderedDict() for group in range(count)}
            frozen: dict[str, torch.Size] = OrderedDict()
            fragments: dict[str, torch.Tensor] = OrderedDict()
            shared: dict[str, str] = {}
            for param in params:
                if pp not in param.stages:
                    continue
                shard = made.shards[param.name, FP32, tp]
                module[param.name] = shard.to(param.full.dtype if param.kind == "buffer" else world.module_dtype)
                if param.kind == "optimized":
                    groups[param.group][param.name] = shard.shape
                elif param.kind == "frozen":
                    frozen[param.name] = shard.shape
                    fragments[param.name] = module[param.name]
                elif param.kind == "alias":
                    shared[param.name] = str(param.alias_of)
            for layer in experts:
                ep = tp if world.tp > 1 else 0
                for weight, full in layer.weights.items():
                    shape = torch.Size((len(layer.placement[ep]), *full.shape[1:]))
                    groups[layer.group][f"{layer.prefix}.{weight}"] = shape
            state = {
                "module": module if not world.layer_files else None,
                "buffer_names": [param.name for param in params if param.kind == "buffer"],
                "optimizer": None,
                "param_shapes": [
                    OrderedDict((name, groups[key][name]) for name in _laid_out(world, list(groups[key]), world.dp))
                    for key in sorted(groups)
                ],
                "frozen_param_shapes": frozen or None,
                "shared_params": shared,
                "frozen_param_fragments": fragments or None,
                "lr_scheduler": None,
                "global_steps": 7,
                "dp_world_size": world.dp,
                "mp_world_size": world.pp * world.tp,
                "ds_config": world.ds_config,
                "ds_version": "0.19.8",
            }
            if world.record_degrees and world.stage < 3:
                state["checkpoint_parallel_dimensions"] = {"pp_degree": world.pp, "tp_degree": world.tp}
            if world.with_info:
                state["universal_checkpoint_info"] = uc_info(world, params)
            if experts:
                state["ds_autoep_layers"] = [_layer_record(layer, index) for index, layer in enumerate(experts)]
            if world.stage == 3:
                for dp in range(world.dp):
                    own = {**state, "module": OrderedDict((name, torch.empty(0)) for name in module)}
                    own["frozen_param_fragments"] = {
                        name: _partition(value.reshape(-1), world.dp, dp) for name, value in fragments.items()
                    } or None
                    made.files[made.model_name(mp, dp)] = own
            else:
                made.files[made.model_name(mp)] = state
                if world.layer_files:
                    for number, (name, value) in enumerate(module.items()):
                        made.files[f"layer_{10 * pp + number:02d}-model_{tp:02d}-model_states.pt"] = {name: value}


def _layer_record(layer: ExpertLayer, index: int) -> dict[str, Any]:
    count = sum(len(experts) for experts in layer.placement)
    record: dict[str, Any] = {
        "moe_layer_id": index,
        "module_path": layer.prefix.rpartition(".")[0],
        "expert_key_prefix": layer.prefix,
        "num_experts": 1 + max(max(experts) for experts in layer.placement if experts),
        "num_local_experts": max(1, count // len(layer.placement)),
        "ep_size": len(layer.placement),
        "ep_rank": 0,
    }
    if layer.descriptor:
        record["expert_placement"] = {
            "version": 1,
            "num_experts": record["num_experts"],
            "ep_size": record["ep_size"],
            "ranks": [{"rank": rank, "experts": list(experts)} for rank, experts in enumerate(layer.placement)],
        }
    return record


def _partition(flat: torch.Tensor, count: int, rank: int) -> torch.Tensor:
    """ZeRO-3's part of one parameter, padded with NaN."""
    size = -(-flat.numel() // count)
    padded = torch.full((size * count,), NAN, dtype=flat.dtype)
    padded[: flat.numel()] = flat
    return padded[rank * size : (rank + 1) * size].clone()


def _optim_files(
    made: Made,
    pp: int,
    tp: int,
    params: Sequence[Param],
    experts: Sequence[ExpertLayer],
    expert_cut: Mapping[tuple[str, str, int], torch.Tensor],
    groups: int,
) -> None:
    world = made.world
    mp = pp * world.tp + tp
    for dp in range(world.dp):
        masters, states, paddings, mappings, gaps, expert_ranks = [], {}, [], [], [], {}
        for group in range(groups):
            members = [p for p in params if p.group == group and p.kind == "optimized" and pp in p.stages]
            layers = [layer for layer in experts if layer.group == group]
            names = [p.name for p in members]
            source: dict[str, dict[str, torch.Tensor]] = {}
            for name in names:
                for (known, state, rank), shard in made.shards.items():
                    if known == name and rank == tp:
                        source.setdefault(state, {})[name] = shard
            count, part = world.dp, dp
            for layer in layers:
                ep = len(layer.placement)
                folded = world.tp > 1
                ep_rank, part = (tp, dp) if folded else world.expert_place(dp, ep)
                count = world.dp if folded else world.dp // ep
                for weight in layer.weights:
                    name = f"{layer.prefix}.{weight}"
                    names.append(name)
                    expert_ranks[name] = (ep_rank, part, count)
                    for (known, state, rank), shard in expert_cut.items():
                        if known == name and rank == ep_rank:
                            source.setdefault(state, {})[name] = shard
            if world.stage == 3:
                flat = {
                    state: torch.cat([_partition(shards[name].reshape(-1), count, part) for name in names])
                    for state, shards in source.items()
                }
                mapping = OrderedDict()
                padding = 0
            else:
                flat, mapping, padding = flat_partition(world, names, source, count, part)
            masters.append(flat.pop(FP32) if FP32 in flat else torch.empty(0))
            scalars = {} if world.step is None else {"step": copy.deepcopy(world.step)}
            scalars.update(copy.deepcopy(world.scalars))
            if flat or scalars:
                states[group] = {**scalars, **flat}
            paddings.append(padding)
            mappings.append(mapping)
            gaps.append(_gaps(world, names, source, count))
        param_groups = [{"lr": 0.01, "betas": (0.9, 0.999), "params": [group]} for group in range(groups)]
        common = {"loss_scaler": LossScaler(cur_scale=1.0, dynamic=False), "overflow": False}
        if world.stage == 3:
            optimizer = {
                "zero_stage": ZeroStage(3),
                **common,
                "partition_count": world.dp,
                "optimizer_state_dict": {"state": states, "param_groups": param_groups},
                "fp32_flat_groups": masters,
            }
        else:
            optimizer = {
                **common,
                "base_optimizer_state": {"state": states, "param_groups": param_groups},
                "single_partition_of_fp32_groups": masters,
                "zero_stage": ZeroStage(world.stage),
                "group_paddings": paddings,
                "partition_count": [world.dp] * groups,
                **({"param_alignment_paddings": gaps} if world.turns else {}),
                "ds_version": "0.19.8",
                "param_slice_mappings": mappings,
            }
        root: dict[str, Any] = {
            "optimizer_state_dict": optimizer,
            "ds_config": world.ds_config,
            "ds_version": "0.19.8",
        }
        if experts and world.tp > 1:
            root["folding"] = _folding(world, tp, dp, params, experts)
        made.files[made.optim_name(dp, mp)] = root


def _folding(world: World, tp: int, dp: int, params: Sequence[Param], experts: Sequence[ExpertLayer]) -> dict[str, Any]:
    families: dict[str, Any] = {}
    for param in params:
        families[param.name] = {
            "family": "dense",
            "zero_partition_group": "dense_dp",
            "zero_partition_rank": dp,
            "zero_partition_count": world.dp,
        }
    for layer in experts:
        for weight in layer.weights:
            families[f"{layer.prefix}.{weight}"] = {
                "family": "routed_expert",
                "zero_partition_group": "edp",
                "zero_partition_rank": dp,
                "zero_partition_count": world.dp,
            }
    return {
        "version": 1,
        "tp_size": world.tp,
        "tp_rank": tp,
        "ep_size": len(experts[0].placement),
        "ep_rank": tp,
        "zero_partition_rank": dp,
        "zero_partition_count": world.dp,
        "param_families": families,
    }


def flat_partition(
    world: World, names: Sequence[str], source: Mapping[str, Mapping[str, torch.Tensor]], count: int, rank: int
) -> tuple[dict[str, torch.Tensor], dict[str, FragmentAddress], int]:
    """One rank's part of a ZeRO-1/2 group: aligned parameters, padded at the end to equal parts."""
    given, names = names, _laid_out(world, names, count)
    sizes = {name: source[FP32][name].numel() for name in names}
    starts, end = _starts(names, sizes, world.align)
    size = -(-end // (count * world.align)) * world.align
    low, high = rank * size, (rank + 1) * size
    held = _slices(starts, sizes, low, high)
    mapping = held
    if world.turns and world.align == 1:
        mapping = _slices(_starts(given, sizes, 1)[0], sizes, low, high)
    padding = min(size, max(0, high - end))
    flat: dict[str, torch.Tensor] = {}
    for state, shards in source.items():
        dtype = next(iter(shards.values())).dtype if shards else torch.float32
        if state in world.whole_states:
            touched = [shards[name].reshape(-1) for name in names if name in held]
            flat[state] = torch.cat(touched) if touched else torch.empty(0, dtype=dtype)
            continue
        buffer = torch.full((size * count,), NAN if dtype.is_floating_point else 99, dtype=dtype)
        for name in names:
            buffer[starts[name] : starts[name] + shards[name].numel()] = shards[name].reshape(-1)
        part = buffer[low:high].clone()
        if state == FP32 and world.strip_padding:
            part = part[: size - padding].clone()
        flat[state] = part
    if world.whole_padding_on_last:
        # As DeepSpeed saved it before 0.16.4: all of the group's padding on the last rank, more than it holds.
        padding = size * count - end if rank == count - 1 else 0
    return flat, mapping, padding


def _laid_out(world: World, names: Sequence[str], count: int) -> list[str]:
    """A group's parameters in the order in which they lie in its buffer."""
    turns = range(count if world.turns and world.stage < 3 else 1)
    return [name for turn in turns for name in names[turn :: len(turns)]]


def _starts(names: Sequence[str], sizes: Mapping[str, int], align: int) -> tuple[dict[str, int], int]:
    """Where each parameter begins, and where the last one ends."""
    starts: dict[str, int] = {}
    end = 0
    for name in names:
        starts[name] = -(-end // align) * align
        end = starts[name] + sizes[name]
    return starts, end


def _gaps(
    world: World, names: Sequence[str], source: Mapping[str, Mapping[str, torch.Tensor]], count: int
) -> list[int]:
    """The padding after each parameter in the order in which they lie; none is recorded after the last."""
    names = _laid_out(world, names, count)
    sizes = {name: source[FP32][name].numel() for name in names}
    starts, end = _starts(names, sizes, world.align)
    return [later - starts[name] - sizes[name] for name, later in zip(names, [*starts.values(), end][1:], strict=True)]


def _slices(starts: Mapping[str, int], sizes: Mapping[str, int], low: int, high: int) -> dict[str, FragmentAddress]:
    """What of every parameter lies in ``[low, high)``."""
    found: dict[str, FragmentAddress] = OrderedDict()
    for name, start in starts.items():
        first, last = max(start, low), min(start + sizes[name], high)
        if last > first:
            found[name] = FragmentAddress(numel=last - first, start=first - low)
    return found
