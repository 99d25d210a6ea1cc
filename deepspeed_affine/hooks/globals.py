"""What a checkpoint holds beside parameters: scheduler, loss scaler, counters, and what the user put into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_affine.errors import AffineError, UnsupportedLayoutError
from deepspeed_affine.hooks.live_values import live_value
from deepspeed_affine.hooks.offered import Offered
from deepspeed_affine.hooks.report import Reporting
from deepspeed_affine.storage.refs import StandIn

__all__ = ["Globals", "place_of", "plan_globals"]

DEEPSPEEDS_OWN = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size"),
        *("mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts"),
        *("ds_autoep_layers", "autoep_layers", "folding", "universal_checkpoint_info"),
    )
)
"""The keys of a model-state file that the engine writes; every other one is the user's."""
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
SCALE = (
    *("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "scale_factor", "scale_window", "min_scale"),
    *("min_loss_scale", "delayed_shift", "consecutive_hysteresis", "raise_error_at_min_scale"),
)
"""What a loss scaler remembers; its classes differ by optimizer and version, the names do not."""
PASSING = frozenset({"verbose", "_is_initial", "_get_lr_called_within_step", "_step_count", "_last_lr"})
"""What torch's schedulers of one kind have beside their state in some versions and not in others."""


@dataclass(slots=True)
class Globals:
    """Values settled before anything is written. ``apply`` gives them to the engine."""

    scheduler: Any = None
    dataset: dict[str, Any] = field(default_factory=dict)
    scale: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    worlds: dict[str, Any] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)

    def apply(self, engine: Any, report: Reporting) -> None:
        """The engine continues where the saved one stopped; what was given to it is in ``report``."""
        if self.scheduler is not None:
            engine.lr_scheduler.load_state_dict(self.scheduler)
            report.restored.append("lr_scheduler")
        if "random_ltd" in self.dataset:
            engine.random_ltd_scheduler.load_state_dict(self.dataset["random_ltd"])
            report.restored.append("random_ltd")
        if "data_sampler" in self.dataset:
            engine.training_dataloader.data_sampler.load_state_dict(self.dataset["data_sampler"])
            report.restored.append("data_sampler")
        if self.scale:
            holder = scale_holder(engine.optimizer)
            for name, value in self.scale.items():
                setattr(holder, name, value)
            report.restored.append(f"loss scale {self.scale.get('cur_scale')}")
        for name, value in self.counters.items():
            setattr(engine, name, value)
            report.restored.append(f"{name} {value}")
        for name, value in self.worlds.items():
            setattr(engine, f"loaded_checkpoint_{name}", value)


def plan_globals(
    engine: Any,
    offered: Offered,
    report: Reporting,
    *,
    with_optimizer: bool,
    with_scheduler: bool,
    with_module_only: bool,
    groups_in_order: bool,
) -> Globals:
    """What of the checkpoint's global state this engine takes; what it cannot take is in ``report``, with reasons.

    ``groups_in_order`` says that the engine's parameter groups continue the saved ones one by one.
    """
    root = offered.model_root(*place_of(engine))
    found = Globals()
    for key, value in root.items():
        if isinstance(key, str) and key not in DEEPSPEEDS_OWN:
            try:
                found.client_state[key] = live_value(value, offered.reader, place=f"client_state[{key!r}]")
            except AffineError as fault:
                report.left(f"client_state[{key!r}]", fault.message)
    if with_module_only:
        report.left("counters, scheduler and optimizer", "load_module_only was said")
        return found
    if with_scheduler:
        _plan_scheduler(engine, root, offered, report, found, groups_in_order=groups_in_order)
    else:
        report.left("lr_scheduler", "load_lr_scheduler_states=False was said")
    _plan_dataset(engine, root, offered, report, found)
    if with_optimizer:
        _plan_scale(engine, root, offered, report, found)
    for name in COUNTERS:
        if type(root.get(name)) is int:
            found.counters[name] = root[name]
    if "global_samples" not in found.counters and "global_steps" in found.counters:
        found.counters["global_samples"] = found.counters["global_steps"] * engine.train_batch_size()
    for name in ("dp_world_size", "mp_world_size"):
        if type(root.get(name)) is int:
            found.worlds[name] = root[name]
    return found


def scale_holder(optimizer: Any) -> Any:
    """The object on which the optimizer keeps its loss scale, None where it scales nothing."""
    for name in ("loss_scaler", "loss_scale_config"):
        if getattr(optimizer, name, None) is not None:
            return getattr(optimizer, name)
    return optimizer if hasattr(optimizer, "cur_scale") and hasattr(optimizer, "cur_iter") else None


def place_of(engine: Any) -> tuple[int, int, int, int]:
    """This process's model-parallel rank and how many there are, its data-parallel rank and how many there are."""
    import torch.distributed as dist

    mp = getattr(engine, "checkpoint_mp_rank", None)
    if mp is None:
        mp = 0 if engine.mpu is None else engine.mpu.get_model_parallel_rank()
    degree = max(int(engine.mp_world_size), int(mp) + 1)
    group = engine.seq_data_parallel_group
    return int(mp), degree, dist.get_rank(group), dist.get_world_size(group)


def _plan_scheduler(
    engine: Any,
    root: Mapping[str, Any],
    offered: Offered,
    report: Reporting,
    found: Globals,
    *,
    groups_in_order: bool,
) -> None:
    scheduler = getattr(engine, "lr_scheduler", None)
    saved = root.get("lr_scheduler")
    if scheduler is None:
        if saved is not None:
            report.left("lr_scheduler", "the engine has none")
        return
    if saved is None:
        report.left("lr_scheduler", "the checkpoint was saved without one")
        return
    try:
        state = live_value(saved, offered.reader, place="lr_scheduler")
    except AffineError as fault:
        raise UnsupportedLayoutError(
            f"{fault.message} A schedule that starts again is none that continues: say load_lr_scheduler_states=False, "
            "and set it by hand."
        ) from fault
    if _is_of_another_kind(scheduler, state):
        report.left(
            "lr_scheduler",
            f"what was saved ({', '.join(map(str, state))}) is not what a {type(scheduler).__name__} keeps; set it by "
            "hand, or resume with the kind of scheduler that was saved",
        )
        return
    was, now = (sorted(set(_counts_of_groups(each))) for each in (state, scheduler.state_dict()))
    counts = {*now, len(getattr(engine.optimizer, "param_groups", ()))}
    if was != now:
        raise UnsupportedLayoutError(
            f"lr_scheduler: was saved for {was} parameter groups and the engine's has {now}; one number is expected. "
            "Give the optimizer its groups as saved, or say load_lr_scheduler_states=False and set it by hand."
        )
    if not groups_in_order and any(_differs_by_group(state, count) for count in counts):
        raise UnsupportedLayoutError(
            "lr_scheduler: keeps values of every parameter group by its place, and the engine's groups have other "
            "places or parameters than those that were saved, so that they would get each other's. Give the optimizer "
            "its groups as they were saved, or say load_lr_scheduler_states=False and set it by hand."
        )
    found.scheduler = state


def _counts_of_groups(state: Any) -> Iterator[int]:
    """For how many groups the scheduler keeps a rate, and those that it is made of."""
    if isinstance(state, Mapping):
        rates = state.get("base_lrs")
        if isinstance(rates, (list, tuple)):
            yield len(rates)
    if isinstance(state, (Mapping, list, tuple)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _counts_of_groups(value)


def _differs_by_group(state: Any, count: int) -> bool:
    """Whether anywhere in ``state`` is a list of a value for each of ``count`` groups, and not of one value alone."""
    if isinstance(state, Mapping):
        return any(_differs_by_group(value, count) for value in state.values())
    if not isinstance(state, (list, tuple)):
        return False
    per_group = len(state) == count and any(repr(value) != repr(state[0]) for value in state)
    return per_group or any(_differs_by_group(value, count) for value in state)


def _is_of_another_kind(scheduler: Any, state: Any) -> bool:
    """Whether another kind of scheduler was saved. Most take whatever they are given, and then step by half of it.

    Schedulers of torch and DeepSpeed keep the same entries at all times; others may add some as they go.
    """
    if not isinstance(state, Mapping):
        return True
    keeps: Mapping[str, Any] = scheduler.state_dict()
    lacks, more = set(keeps) - set(state) - PASSING, set(state) - set(keeps) - PASSING
    return bool(lacks) or (bool(more) and type(scheduler).__module__.startswith(("torch.", "deepspeed.")))


def _plan_dataset(engine: Any, root: Mapping[str, Any], offered: Offered, report: Reporting, found: Globals) -> None:
    takes = {
        "random_ltd": engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None,
        "data_sampler": engine.training_dataloader is not None and engine.curriculum_learning_enabled(),
    }
    for name, wanted in takes.items():
        if wanted and root.get(name) is not None:
            try:
                found.dataset[name] = live_value(root[name], offered.reader, place=name)
            except AffineError as fault:
                report.left(name, fault.message)


def _plan_scale(engine: Any, root: Mapping[str, Any], offered: Offered, report: Reporting, found: Globals) -> None:
    holder = scale_holder(engine.optimizer)
    if holder is None:
        return
    saved = _saved_scale(root, offered)
    if not saved:
        return
    dynamic = getattr(holder, "dynamic", getattr(holder, "dynamic_loss_scale", False))
    was = saved.get("dynamic", saved.get("dynamic_loss_scale", False))
    if bool(dynamic) != bool(was):
        kinds = {True: "dynamic", False: "static"}
        report.left("loss scaler", f"it was {kinds[bool(was)]} and the engine's is {kinds[bool(dynamic)]}")
        return
    if dynamic:
        found.scale = {name: saved[name] for name in SCALE if name in saved and hasattr(holder, name)}
    elif saved.get("cur_scale") != holder.cur_scale:
        report.left("loss scaler", f"static {saved.get('cur_scale')} was saved; the engine's {holder.cur_scale} stays")


def _saved_scale(root: Mapping[str, Any], offered: Offered) -> dict[str, Any]:
    """What the saved scaler remembered, whichever optimizer had it."""
    scaler = offered.optimizer.get("loss_scaler")
    if isinstance(scaler, StandIn):
        entries = dict(scaler.stand_in_attributes())
    else:
        unpartitioned = root.get("optimizer")
        entries = dict(unpartitioned) if isinstance(unpartitioned, Mapping) and "cur_scale" in unpartitioned else {}
    return {name: value for name, value in entries.items() if isinstance(value, (bool, int, float))}
