"""A fault of DeepSpeed's that a universal folder inherits: slices recorded in an order the weights were not in.

With ``round_robin_gradients`` and several data-parallel ranks, ZeRO-1 and 2 lay parameters out in another order than
the one they record in ``param_slice_mappings``; every version up to 0.19.8 does. What a converter makes of that is well
formed and wrong. The module's own weights, in the model-state file, show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from deepspeed_affine.errors import CheckpointFormatError, Faults
from deepspeed_affine.hooks.live_values import read_tensor
from deepspeed_affine.hooks.offered import Offered
from deepspeed_affine.hooks.stored_params import FP32
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["check_order"]

MOST_COMPARED = 8
MOST_ELEMENTS = 1 << 20


def check_order(offered: Offered, faults: Faults) -> None:
    """Note a fault where a folder of a run with ``round_robin_gradients`` contradicts the weights the module had."""
    root = offered.model.root
    config = root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if not isinstance(zero, Mapping) or not zero.get("round_robin_gradients"):
        return
    for name, module, master in _comparable(offered):
        held, stored = read_tensor(module, offered.reader), read_tensor(master, offered.reader)
        if not held.equal(stored.to(held.dtype)):
            faults.add(
                CheckpointFormatError(
                    f"parameter {name!r}: {master.storage.path} is not what the module held when it was saved "
                    f"({module.storage.path}); expected the same weights. The run had round_robin_gradients on, and "
                    "DeepSpeed then records the wrong slices. Load the checkpoint with DeepSpeed, in the run's own "
                    "topology and with that setting; or take the module's weights alone from the model-state file.",
                    param=name,
                    file=master.storage.path,
                )
            )
            return


def _comparable(offered: Offered) -> Iterator[tuple[str, TensorRef, TensorRef]]:
    """A few parameters that the model-state file holds whole, the small ones first."""
    names = sorted(offered.model.shapes, key=lambda name: prod(offered.model.shapes[name]))
    compared = 0
    for name in names:
        module = (offered.model.module or {}).get(name)
        master = offered.whole(name) if FP32 in offered.folder.states.get(name, ()) else None
        if isinstance(module, TensorRef) and master is not None and module.shape == master.shape:
            if module.numel > MOST_ELEMENTS or compared == MOST_COMPARED:
                return
            compared += 1
            yield name, module, master
