"""Where the optimizer of a live engine keeps what: every local fragment of master weights, and the states beside it.

DeepSpeed's optimizers differ in how they cut parameters into flat tensors. Each is read from the optimizer's own lists,
by its own order and process groups, and never from links it sets up as a side effect: those are missing on a rank
without elements, and before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import UnsupportedLayoutError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Fragment",
    "Partition",
    "fragments",
    "inner_optimizer",
    "partitions",
    "refuse_absent",
    "stage_of",
    "stays_on_accelerator",
    "zero3_part",
]


@dataclass(eq=False, slots=True)
class Partition:
    """One tensor that the inner optimizer steps, which is also the key of its states: ``optimizer.state[tensor]``.

    ``group`` is its parameter group. ``members`` are the parameters cut over it and its like on other ranks, in the
    group's order; ``fragments`` are the pieces of them in this one. Between and after these lies padding. ``whole``
    are, where Muon's momentum keeps every parameter that touches the partition whole (ZeRO-1 and 2), the places of
    those in it.
    """

    group: int
    tensor: torch.Tensor
    optimizer: Any
    members: tuple[str, ...] = ()
    fragments: list[Fragment] = field(default_factory=list)
    whole: list[Fragment] = field(default_factory=list)

    @property
    def states(self) -> dict[str, Any]:
        """The optimizer's states of this tensor; empty before they exist, and not to be written to then."""
        return dict(self.optimizer.state[self.tensor]) if self.tensor in self.optimizer.state else {}

    @property
    def whole_numel(self) -> int:
        return sum(fragment.numel for fragment in self.whole)

    def is_whole(self, state: str) -> bool:
        """Whether a state keeps parameters whole and not by the partition's own cut."""
        return bool(self.whole) and state == MUON_STATE


MUON_STATE = "momentum_buffer"


@dataclass(eq=False, frozen=True, slots=True)
class Fragment:
    """Elements ``[start, start + numel)`` of the flattened parameter as this rank has it (its TP or EP shard).

    They lie in ``partition.tensor`` from ``offset`` on. ``name`` is the module's own name of the parameter.
    """

    name: str
    param: torch.nn.Parameter
    start: int
    numel: int
    offset: int
    partition: Partition

    @property
    def master(self) -> torch.Tensor:
        """A flat view of the master weights; writing to it changes them."""
        return self.of(self.partition.tensor)

    def states(self) -> dict[str, torch.Tensor]:
        """Flat views of the states that are kept per element, by name; empty before they exist."""
        import torch

        tensor = self.partition.tensor
        return {
            name: self.of(value)
            for name, value in self.partition.states.items()
            if torch.is_tensor(value) and value.shape == tensor.shape and not self.partition.is_whole(name)
        }

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fragment's place in a tensor shaped like its partition, as a flat view."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


def fragments(engine: Any) -> Iterator[Fragment]:
    """Every fragment of master weights this rank's optimizer holds, those without elements left out."""
    for partition in partitions(engine):
        yield from partition.fragments


def partitions(engine: Any) -> list[Partition]:
    """The tensors this rank's optimizer steps, with the fragments of parameters in each, in the optimizer's order.

    Raises UnsupportedLayoutError for an optimizer whose tensors are not in memory or not known here, by name.
    """
    optimizer = getattr(engine, "optimizer", None)
    # Without an optimizer, ZeRO-3 puts what partitions the parameters in its place.
    if optimizer is None or type(optimizer).__name__ == "DeepSpeedZeRoOffload":
        return []
    names = _Names(engine.module)
    refuse_absent(optimizer)
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _zero3(optimizer, names)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _zero12(optimizer, names)
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return _bf16(optimizer, names)
    if hasattr(optimizer, "fp32_groups_flat"):
        return _flat(optimizer, names)
    if hasattr(optimizer, "fp32_groups"):
        return _one_by_one(optimizer, optimizer.fp16_groups, optimizer.fp32_groups, names)
    if isinstance(getattr(optimizer, "param_groups", None), list) and not hasattr(optimizer, "optimizer"):
        groups = [group["params"] for group in optimizer.param_groups]
        return _one_by_one(optimizer, groups, groups, names)
    raise UnsupportedLayoutError(
        f"The engine's optimizer is a {type(optimizer).__qualname__}, whose master weights cannot be located; expected "
        "one of DeepSpeed's ZeRO, BF16 or FP16 optimizers, or a plain torch optimizer. Load with "
        "load_optimizer_states=False and load_module_only=True, or without this optimizer."
    )


def inner_optimizer(engine: Any) -> Any:
    """The optimizer that steps and keeps the states, unwrapped; None for an engine without one."""
    optimizer = getattr(engine, "optimizer", None)
    return getattr(optimizer, "optimizer", optimizer)


def stage_of(engine: Any) -> int:
    """The ZeRO stage the engine runs at, 0 without ZeRO."""
    return int(engine.zero_optimization_stage())


class _Names:
    """The module's names of its parameters, by identity."""

    def __init__(self, module: Any) -> None:
        self._known: dict[int, str] = {id(parameter): name for name, parameter in module.named_parameters()}

    def __contains__(self, parameter: Any) -> bool:
        return id(parameter) in self._known

    def __getitem__(self, parameter: Any) -> str:
        found = self._known.get(id(parameter))
        if found is None:
            raise UnsupportedLayoutError(
                f"The engine's optimizer steps a parameter of shape {tuple(parameter.shape)} that the engine's module "
                "does not have; expected all of its parameters under a name. Register it in the module."
            )
        return found

    def of(self, parameters: Sequence[Any]) -> tuple[str, ...]:
        return tuple(self[parameter] for parameter in parameters)


def refuse_absent(optimizer: Any) -> None:
    """Raises UnsupportedLayoutError for an optimizer whose tensors are not in memory or not known here, by name."""
    kind = type(optimizer).__qualname__
    if getattr(optimizer, "swap_optimizer", False):
        raise UnsupportedLayoutError(
            f"The engine's {kind} keeps its states on NVMe (offload_optimizer.device is 'nvme'), and they are not in "
            "memory; expected them on the accelerator or the CPU. Set offload_optimizer.device to 'cpu' for the run "
            "that loads, save from it, and go back to NVMe with DeepSpeed's own checkpoint."
        )
    if getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise UnsupportedLayoutError(
            f"The engine's {kind} keeps parameters on NVMe (offload_param.device is 'nvme'), and they are not in "
            "memory; expected them on the accelerator or the CPU. Set offload_param.device to 'cpu' for the run that "
            "loads, save from it, and go back to NVMe with DeepSpeed's own checkpoint."
        )
    if getattr(optimizer, "offloaded_states", None):
        raise UnsupportedLayoutError(
            "The engine's states are offloaded (engine.offload_states was called); expected them in place. Call "
            "engine.reload_states() first."
        )
    if kind.startswith("MiCS"):
        raise UnsupportedLayoutError(
            f"The engine's optimizer is a {kind} (mics_shard_size is set), which partitions over a part of the ranks "
            "and which DeepSpeed has given up; expected ZeRO-3 over all of them. Leave mics_shard_size out for the run "
            "that loads; zero_hpz_partition_size keeps a partition in each node instead."
        )
    if getattr(optimizer, "zenflow", False) or "SuperOffload" in kind or "ZenFlow" in kind:
        raise UnsupportedLayoutError(
            f"The engine's optimizer is a {kind}, which keeps states in another process or on two devices at once; "
            "expected an optimizer whose states this process holds. Turn zenflow or super_offload off for the run "
            "that loads, and save from it."
        )


def _zero12(optimizer: Any, names: _Names) -> list[Partition]:
    found = []
    for group, tensor in enumerate(optimizer.single_partition_of_fp32_groups):
        ordered = optimizer.round_robin_bit16_groups[group]
        offsets = getattr(optimizer, "round_robin_bit16_offsets", None)
        partition = Partition(group, tensor, optimizer.optimizer, names.of(optimizer.bit16_groups[group]))
        _cut(partition, ordered, offsets[group] if offsets else _end_to_end(ordered), optimizer, names)
        if optimizer.optimizer.param_groups[group].get("use_muon", False) and not optimizer.cpu_offload:
            start = 0
            for parameter in optimizer.params_in_partition[group]:
                name = names[parameter]
                partition.whole.append(Fragment(name, parameter, 0, parameter.numel(), start, partition))
                start += parameter.numel()
        found.append(partition)
    return found


def _bf16(optimizer: Any, names: _Names) -> list[Partition]:
    found = []
    for group, tensor in enumerate(optimizer.fp32_groups_flat_partition):
        members = optimizer.bf16_groups[group]
        partition = Partition(group, tensor, optimizer.optimizer, names.of(members))
        _cut(partition, members, _end_to_end(members), optimizer, names)
        found.append(partition)
    return found


def _cut(partition: Partition, ordered: Sequence[Any], offsets: Sequence[int], optimizer: Any, names: _Names) -> None:
    """Add what of the group's parameters, which lie at ``offsets`` of one long tensor, falls into this rank's cut."""
    import torch.distributed as dist

    length = partition.tensor.numel()
    first = dist.get_rank(optimizer.real_dp_process_group[partition.group]) * length
    for parameter, at in zip(ordered, offsets, strict=True):
        begin, end = max(at, first), min(at + parameter.numel(), first + length)
        if begin < end:
            name = names[parameter]
            partition.fragments.append(Fragment(name, parameter, begin - at, end - begin, begin - first, partition))


def _zero3(optimizer: Any, names: _Names) -> list[Partition]:
    import torch.distributed as dist

    found = []
    for index, tensor in enumerate(optimizer.fp32_partitioned_groups_flat):
        group = optimizer.sub_group_to_group_id[index]
        inner = optimizer.optimizer
        if stays_on_accelerator(optimizer, index):
            inner = optimizer.backup_optimizer
        partition = Partition(group, tensor, inner, names.of(optimizer.fp16_groups[index]))
        offset = 0
        for parameter in optimizer.fp16_groups[index]:
            length: int = parameter.partition_numel()
            start, held = zero3_part(parameter, dist)
            if held:
                name = names[parameter]
                partition.fragments.append(Fragment(name, parameter, start, held, offset, partition))
            offset += length
        found.append(partition)
    return found


def stays_on_accelerator(optimizer: Any, index: int) -> bool:
    """Whether a ZeRO-3 sub-group stays on the accelerator under partial offload, stepped by an optimizer of its own."""
    devices = getattr(optimizer, "subgroup_to_device", None) or {}
    group = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[index]]
    return devices.get(index, "cpu") != "cpu" and not group.get("use_muon", False)


def zero3_part(parameter: Any, dist: Any) -> tuple[int, int]:
    """Which elements of a ZeRO-3 parameter this rank's partition holds: the first, and how many, without padding."""
    length: int = parameter.partition_numel()
    start = min(dist.get_rank(parameter.ds_process_group) * length, parameter.ds_numel)
    return start, min(length, parameter.ds_numel - start)


def _flat(optimizer: Any, names: _Names) -> list[Partition]:
    found = []
    for group, tensor in enumerate(optimizer.fp32_groups_flat):
        members = optimizer.fp16_groups[group]
        partition = Partition(group, tensor, optimizer.optimizer, names.of(members))
        for parameter, offset in zip(members, _end_to_end(members), strict=True):
            if parameter.numel():
                name = names[parameter]
                partition.fragments.append(Fragment(name, parameter, 0, parameter.numel(), offset, partition))
        found.append(partition)
    return found


def _one_by_one(optimizer: Any, groups: Any, masters: Any, names: _Names) -> list[Partition]:
    inner = getattr(optimizer, "optimizer", optimizer)
    found = []
    for group, (members, tensors) in enumerate(zip(groups, masters, strict=True)):
        for parameter, tensor in zip(members, tensors, strict=True):
            # A parameter the optimizer was given and the module does not have is nobody's to restore.
            if not parameter.requires_grad or parameter not in names:
                continue
            name = names[parameter]
            partition = Partition(group, tensor, inner, (name,))
            if parameter.numel():
                partition.fragments.append(Fragment(name, parameter, 0, parameter.numel(), 0, partition))
            found.append(partition)
    return found


def _end_to_end(parameters: Sequence[Any]) -> list[int]:
    offsets, at = [], 0
    for parameter in parameters:
        offsets.append(at)
        at += parameter.numel()
    return offsets
