"""Loading by one attached engine: DeepSpeed's own, with what it cannot do said before it starts.

A fault that one rank finds in the middle of loading leaves the others waiting in a collective. So every rank looks
first, at names and shapes only, and all of them raise what any of them found.
"""

from __future__ import annotations

import os
import warnings
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, UnsupportedLayoutError
from deepspeed_affine.hooks.agreement import together
from deepspeed_affine.hooks.client_state import knows_universal_experts
from deepspeed_affine.hooks.optimizers import refuse_absent, stays_on_accelerator
from deepspeed_affine.hooks.restoring import Restorer
from deepspeed_affine.hooks.state_forms import state_dtype
from deepspeed_affine.hooks.stock_limits import check_groups, check_states
from deepspeed_affine.hooks.stored_params import FP32, STEP
from deepspeed_affine.hooks.wholeness import check_whole
from deepspeed_affine.storage.universal import scan_universal

if TYPE_CHECKING:
    from deepspeed_affine.hooks.instances import Instances

__all__ = ["bind_guard"]

OURS = "deepspeed_affine.load_checkpoint(engine, load_dir)"
ADAM = (FP32, "exp_avg", "exp_avg_sq")
"""What DeepSpeed's ZeRO-3 loader reads, whatever the optimizer keeps."""

_WEIGHTS_ONLY = "load_module_checkpoint_state_from_checkpoint_dir_stage3"
"""The ZeRO-3 optimizer's method for weights alone; versions without it load the states in any case."""


def bind_guard(engine: Any, restorer: Restorer, instances: Instances) -> None:
    """``engine`` loads a universal checkpoint by way of ``restorer``, however its ``load_checkpoint`` is called.

    That method asks two of the instance's own for all it does, also where a caller takes it from the class:
    ``_load_checkpoint``, with the tag it has found, and then ``_load_zero_checkpoint``.
    """
    stock, stock_zero = engine._load_checkpoint, engine._load_zero_checkpoint

    def load(engine: Any, load_dir: str, tag: Any, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, once every rank has found that it can do what it is about to do."""
        if not engine.load_universal_checkpoint():
            return stock(load_dir, tag, *args, **kwargs)
        options = signature(stock).bind(load_dir, tag, *args, **kwargs).arguments
        weights_only = options.get("load_module_only", False) or not options.get("load_optimizer_states", True)
        try:
            with together(os.path.join(load_dir, str(tag))) as faults, restorer.stand_ins():
                _check(engine, restorer, load_dir, str(tag), bool(weights_only), faults)
            return stock(load_dir, tag, *args, **kwargs)
        except BaseException:
            restorer.forget()
            raise

    def load_zero(engine: Any, load_dir: str, tag: Any, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, with every parameter cut by its own map under ``load_universal``."""
        if not engine.load_universal_checkpoint():
            return stock_zero(load_dir, tag, *args, **kwargs)
        try:
            restorer.link()
            with restorer.stand_ins():
                result = stock_zero(load_dir, tag, *args, **kwargs)
            restorer.link()
        finally:
            restorer.forget()
        _warn_of_the_rest(engine, restorer)
        return result

    instances.put(engine, "_load_checkpoint", MethodType(load, engine))
    instances.put(engine, "_load_zero_checkpoint", MethodType(load_zero, engine))


def _check(engine: Any, restorer: Restorer, load_dir: str, tag: str, weights_only: bool, faults: Faults) -> None:
    folder = os.path.join(load_dir, tag)
    if not engine.zero_optimization():
        raise UnsupportedLayoutError(
            f"{folder}: DeepSpeed's load_checkpoint loads a universal checkpoint into ZeRO stages 1 to 3 only, and "
            f"this engine runs without ZeRO. Call {OURS} instead."
        )
    if engine.zero_nvme_offload_optimizer():
        raise UnsupportedLayoutError(
            f"{folder}: DeepSpeed's load_checkpoint does not read a universal checkpoint into an optimizer offloaded "
            "to NVMe; it copies swap files of the same topology instead. Set offload_optimizer.device to 'cpu'."
        )
    if engine.has_moe_layers and not knows_universal_experts():
        raise UnsupportedLayoutError(
            f"{folder}: before 0.19.4 DeepSpeed's load_checkpoint reads the expert files of an ordinary checkpoint, "
            f"which a universal one does not have. Call {OURS} instead."
        )
    refuse_absent(engine.optimizer)
    _refuse_loss(restorer, folder)
    if _deals_out(engine.optimizer):
        raise UnsupportedLayoutError(
            f"{folder}: with round_robin_gradients on several ranks, DeepSpeed's load_checkpoint fills the master "
            f"weights in another order than the engine's parameters lie in. Call {OURS} instead."
        )
    if not os.path.isdir(os.path.join(folder, "zero")):
        raise CheckpointFormatError(
            f"{folder}: holds no folder 'zero'; expected a universal checkpoint. Convert first: ds_to_universal "
            "--affine --input_folder ... --output_folder ...",
            file=folder,
        )
    check_whole(scan_universal(folder))
    _check_model_files(engine, folder, load_dir, tag)
    stage3 = (FP32,) if weights_only and hasattr(engine.optimizer, _WEIGHTS_ONLY) else ADAM
    _check_params(restorer, os.path.join(folder, "zero"), stage3, faults)
    if faults:
        return
    if not restorer.is_stage3:
        check_groups(restorer, os.path.join(folder, "zero"), OURS, faults)
    elif stage3 is ADAM:
        inner = restorer.optimizer.optimizer
        for index in range(len(inner.param_groups)):
            check_states(inner, index, ADAM, OURS)


def _check_model_files(engine: Any, folder: str, load_dir: str, tag: str) -> None:
    """DeepSpeed takes counters and client state from the model-state files, whose number and names it expects."""
    from deepspeed.pipe import PipelineModule

    count = len(engine._get_all_ckpt_names(load_dir, tag))
    if not count:
        stage = int(engine.zero_optimization_stage())
        there = sorted(name for name in os.listdir(folder) if name.endswith("_model_states.pt"))[:2]
        raise UnsupportedLayoutError(
            f"{folder}: DeepSpeed's load_checkpoint finds no model-state file of the name it wants at ZeRO stage "
            f"{stage}; the folder has {there or 'none at all'}. It loads a universal checkpoint only at the stage it "
            f"was converted from (and reads a folder's name as a pattern). Call {OURS} instead.",
            file=folder,
        )
    picks = "checkpoint_mp_world_size" in type(engine)._load_checkpoint.__code__.co_varnames
    if picks or isinstance(engine.module, PipelineModule) or count == engine.mp_world_size:
        return
    from deepspeed import __version__

    raise UnsupportedLayoutError(
        f"{folder}: was saved at model-parallel degree {count}, this engine has {engine.mp_world_size}. DeepSpeed "
        f"{__version__} then merges or splits the model-state files as Megatron's, before it asks any parameter. Call "
        f"{OURS} instead, or use DeepSpeed 0.19.8.",
        file=folder,
    )


def _check_params(restorer: Restorer, zero: str, stage3: tuple[str, ...], faults: Faults) -> None:
    """Every parameter this rank holds a fragment of is stored, with what is asked for, in a shape that fits.

    ``stage3`` are the states a ZeRO-3 engine asks for; others take what is there.
    """
    stored = restorer.source(zero)
    for group in restorer.groups:
        for param in group:
            if not restorer.is_stage3 and getattr(param, "_hp_mapping", None) is None:
                continue
            try:
                live = restorer.live(param)
                states = stored.states(live)
                if restorer.is_stage3:
                    missing = sorted(set(stage3) - set(states))
                    if missing:
                        raise UnsupportedLayoutError(
                            f"parameter {live.name!r}: no {' and no '.join(missing)} is stored, which is what "
                            f"DeepSpeed's ZeRO-3 loader reads for every optimizer; there are {list(states)}. Call "
                            f"{OURS} instead.",
                            param=live.name,
                        )
                    states = stage3
                for state in states:
                    if state == STEP or stored.number(live, state) is not None:
                        continue
                    _refuse_whole(param, live.name, state)
                    stored.part(live, state, 0, 0)
            except AffineError as fault:
                faults.add(fault)


def _refuse_loss(restorer: Restorer, folder: str) -> None:
    """UnsupportedLayoutError where the loader would give states to another optimizer, or round them."""
    import torch

    optimizer = restorer.optimizer
    if not restorer.is_stage3:
        flats = [restorer.flat(index) for index, group in enumerate(restorer.groups) if group]
    else:
        flats = list(optimizer.fp32_partitioned_groups_flat)
        if any(stays_on_accelerator(optimizer, index) for index in range(len(flats))):
            raise UnsupportedLayoutError(
                f"{folder}: with offload_optimizer.ratio below 1, DeepSpeed's load_checkpoint gives the states of the "
                "sub-groups that stay on the accelerator to the CPU's optimizer, which does not step them. Call "
                f"{OURS} instead."
            )
    for flat in flats:
        kept = state_dtype(optimizer.optimizer, flat, torch.float32)
        if kept != flat.dtype:
            raise UnsupportedLayoutError(
                f"{folder}: the engine keeps master weights in {flat.dtype} and their states in {kept}; DeepSpeed's "
                f"load_checkpoint makes the states {flat.dtype} too. Call {OURS} instead."
            )


def _deals_out(optimizer: Any) -> bool:
    """Whether the optimizer's links from parameters to master weights lead to other parameters'."""
    dealt, given = (getattr(optimizer, f"{kind}bit16_groups", ()) for kind in ("round_robin_", ""))
    moved = any(
        [id(param) for param in row] != [id(param) for param in order] for row, order in zip(dealt, given, strict=False)
    )
    # Where parameters are aligned, the links are made from where they lie.
    return moved and not any(any(row) for row in getattr(optimizer, "round_robin_bit16_padding", ()))


def _refuse_whole(param: Any, name: str, state: str) -> None:
    if state == "momentum_buffer" and getattr(param, "use_muon", False):
        raise UnsupportedLayoutError(
            f"parameter {name!r}: Muon keeps its {state} whole on every rank the parameter touches, and DeepSpeed's "
            f"load_checkpoint cuts every state by the weights' own fragments. Call {OURS} instead.",
            param=name,
        )


def _warn_of_the_rest(engine: Any, restorer: Restorer) -> None:
    """Say, once a load and on one rank, what DeepSpeed's loader leaves as it was."""
    module = engine.module
    left = []
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    if frozen:
        left.append(f"{len(frozen)} frozen parameter(s) ({', '.join(frozen[:3])}{', ...' if len(frozen) > 3 else ''})")
    buffers = [
        f"{at}.{name}" if at else name
        for at, part in module.named_modules()
        for name, value in part.named_buffers(recurse=False)
        if value is not None and name not in part._non_persistent_buffers_set
    ]
    if buffers:
        left.append(f"{len(buffers)} buffer(s) ({', '.join(buffers[:3])}{', ...' if len(buffers) > 3 else ''})")
    if restorer.is_stage3 and len(restorer.optimizer.optimizer.param_groups) > 1:
        left.append("the hyperparameters of all parameter groups but the first")
    if left and engine.global_rank == 0:
        warnings.warn(
            f"DeepSpeed's load_checkpoint does not restore {', '.join(left)} from a universal checkpoint: they keep "
            f"the values this process started with. {OURS} restores them.",
            stacklevel=4,
        )
