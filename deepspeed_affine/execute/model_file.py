"""One model-state file, read into typed fields: what the optimizer files do not say of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.lowering.reading import as_mapping, as_names, as_shape, as_stored, refuse
from deepspeed_affine.lowering.states import ShardKey
from deepspeed_affine.storage.refs import TensorRef

__all__ = ["AUTOEP_KEYS", "UC_INFO", "ModelFile", "read_model_file"]

UC_INFO = "universal_checkpoint_info"
AUTOEP_KEYS = ("ds_autoep_layers", "autoep_layers")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What one model-state file says, tensors as references. ``rank`` is its data-parallel rank under ZeRO-3.

    ``module`` is the module's state dictionary, None where pipeline layer files hold it. ``groups`` gives the shapes
    of the optimized parameters' shards, one mapping a parameter group, and ``shapes`` all of them. ``aliases`` maps
    names that stand for another parameter (tied weights) to that parameter's. ``frozen_shapes`` are the shards'
    shapes of parameters the optimizer does not own, ``frozen_fragments`` their stored values, under ZeRO-3 one
    partition a data-parallel rank. ``autoep`` is the record of expert layers, unread, or None.
    """

    path: str
    shard: ShardKey
    rank: int
    root: Mapping[str, Any]
    module: Mapping[str, Any] | None
    groups: tuple[Shapes, ...]
    shapes: Shapes
    aliases: Mapping[str, str]
    buffers: frozenset[str]
    frozen_shapes: Shapes
    frozen_fragments: Mapping[str, TensorRef]
    autoep: Any

    def turns(self) -> tuple[Shapes, ...] | None:
        """The shapes of every group in the order in which they lie, where the run had ``round_robin_gradients``.

        Raises UnsupportedLayoutError where it had and the file does not record that order.
        """
        config = self.root.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
        if not isinstance(zero, Mapping) or not zero.get("round_robin_gradients"):
            return None
        if self.root.get("param_shapes") is None:
            raise UnsupportedLayoutError(
                f"{self.path}: was saved with round_robin_gradients and records no 'param_shapes', so that the order "
                "of the parameters is not known; DeepSpeed's slices are in another one. Go on in DeepSpeed with the "
                "same ranks and configuration, set round_robin_gradients to false and save again.",
                file=self.path,
            )
        return self.groups


def read_model_file(path: str, shard: ShardKey, rank: int, root: Any) -> ModelFile:
    """The file at ``path`` whose object graph is ``root``; raises CheckpointFormatError naming a malformed entry."""
    state = as_mapping(root, "the model state", path)
    module = state.get("module")
    groups = tuple(_groups(state.get("param_shapes"), path))
    aliases = as_mapping(state.get("shared_params") or {}, "'shared_params'", path)
    for alias, name in aliases.items():
        if not isinstance(name, str):
            raise refuse(path, f"'shared_params' of {alias!r}", name, "a parameter name", alias)
    fragments = as_mapping(state.get("frozen_param_fragments") or {}, "'frozen_param_fragments'", path)
    return ModelFile(
        path=path,
        shard=shard,
        rank=rank,
        root=state,
        module=None if module is None else as_mapping(module, "'module'", path),
        groups=groups,
        shapes={name: shape for group in groups for name, shape in group.items()},
        aliases=dict(aliases),
        buffers=as_names(state.get("buffer_names"), "'buffer_names'", path),
        frozen_shapes=_shapes(state.get("frozen_param_shapes") or {}, "'frozen_param_shapes'", path),
        frozen_fragments={
            name: as_stored(value, f"the frozen parameter {name!r}", path) for name, value in fragments.items()
        },
        autoep=next((state[key] for key in AUTOEP_KEYS if state.get(key) is not None), None),
    )


def _groups(value: Any, path: str) -> Iterator[Shapes]:
    if value is None:
        return
    # One group may be stored without the list around it.
    for group in value if isinstance(value, (list, tuple)) else (value,):
        yield _shapes(group, "'param_shapes'", path)


def _shapes(value: Any, subject: str, path: str) -> Shapes:
    return {
        name: as_shape(shape, f"{subject} of {name!r}", path)
        for name, shape in as_mapping(value, subject, path).items()
    }
