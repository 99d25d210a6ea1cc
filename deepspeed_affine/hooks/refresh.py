"""After master weights and states were written: everything DeepSpeed keeps of them elsewhere follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed_affine.hooks.optimizers import Partition

__all__ = ["after_writing", "before_writing"]


def before_writing(engine: Any) -> None:
    """Every ZeRO-3 parameter is partitioned, so that no rank trains on with a gathered copy of what it was, and no
    gradient of the weights that were is left."""
    optimizer = engine.optimizer
    _drop_gradients(engine)
    for name in ("checkpoint_event_prologue", "partition_all_parameters"):
        prepare = getattr(optimizer, name, None)
        if prepare is not None:
            prepare()
            return


def _drop_gradients(engine: Any) -> None:
    """The next step is made of the micro-batches that follow, as many as a step has.

    DeepSpeed's optimizers forget most with ``zero_grad``; ZeRO also counts micro-batches, and keeps their sum.
    """
    engine.zero_grad()
    optimizer = engine.optimizer
    if hasattr(optimizer, "zero_grad"):
        optimizer.zero_grad()
    if hasattr(optimizer, "micro_step_id"):
        optimizer.micro_step_id = 0 if hasattr(optimizer, "fp32_partitioned_groups_flat") else -1
    for name in ("averaged_gradients", "all_grad_tensors"):
        sums = getattr(optimizer, name, None) or {}
        for group in sums:
            sums[group] = None
    # A boundary that the training script sets is none of DeepSpeed's counting.
    if getattr(engine, "_is_gradient_accumulation_boundary", None) is None:
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    if hasattr(engine, "_unmanaged_backward_count"):
        engine._unmanaged_backward_count = 0


def after_writing(engine: Any, partitions: Sequence[Partition]) -> None:
    """Weights of low precision equal the rounded master weights on every rank, no copy is stale, and DeepSpeed's links
    from parameters lead to the master weights and states. A collective."""
    import torch

    optimizer = engine.optimizer
    with torch.no_grad():
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            for index in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
        elif hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        else:
            for partition in partitions:
                for fragment in partition.fragments:
                    place = fragment.param.data.view(-1).narrow(0, fragment.start, fragment.numel)
                    if place.data_ptr() != fragment.master.data_ptr():
                        place.copy_(fragment.master)
        _drop_secondary(engine.module)
        finish = getattr(optimizer, "checkpoint_event_epilogue", None)
        if finish is not None:
            finish()
    _link(optimizer, partitions)


def _drop_secondary(module: Any) -> None:
    """hpZeRO keeps a second partition inside a node, and gathers from it as long as there is one."""
    for parameter in module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None


def _link(optimizer: Any, partitions: Sequence[Partition]) -> None:
    if not hasattr(optimizer, "_hp_optimizer_states_linked"):
        return
    for partition in partitions:
        for fragment in partition.fragments:
            mapping: Any = getattr(fragment.param, "_hp_mapping", None)
            if mapping is None:
                continue
            address = mapping.hp_fragment_address
            if (address.start, address.numel) != (fragment.offset, fragment.numel):
                continue
            if mapping.hp_fragment.data_ptr() != fragment.master.data_ptr():
                # Loading with DeepSpeed before 0.19.8 leaves the link on the last moment it read.
                mapping.hp_fragment = partition.tensor.narrow(0, fragment.offset, fragment.numel)
            if partition.states:
                mapping.set_optim_state_fragment(partition.tensor, partition.states)
    # Where some have no states yet, DeepSpeed links all of them after the next step.
    optimizer._hp_optimizer_states_linked = all(partition.states for partition in partitions)
