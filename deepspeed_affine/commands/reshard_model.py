"""The model-state files of a resharded checkpoint: the module cut for its rank, and everything else carried over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deepspeed_affine.commands.layout_of import DS_CONFIG, zero_config
from deepspeed_affine.commands.reshard_source import ReshardSource
from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.execute.checkpoint import DIMENSIONS
from deepspeed_affine.execute.model_file import UC_INFO
from deepspeed_affine.execute.tensor_files import source_storage
from deepspeed_affine.ir import AffinePiece
from deepspeed_affine.lowering.states import FP32
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout, LayoutParam, LayoutRank
from deepspeed_affine.plan.conversion import ObjectFile, TensorFile
from deepspeed_affine.plan.partition import reserved_numel
from deepspeed_affine.plan.reshard import Placed, flat_tensor
from deepspeed_affine.storage.dtypes import item_size
from deepspeed_affine.storage.plain_values import decode_value
from deepspeed_affine.storage.pt_writer import NewTensor, PtLayout
from deepspeed_affine.storage.refs import TensorRef, TorchSize

__all__ = ["FileBuilder", "model_files"]


class FileBuilder:
    """One output file in the making: its new tensors, each with what fills it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.filled: list[tuple[NewTensor, TensorFile]] = []

    def new(
        self,
        dtype: str,
        shape: tuple[int, ...],
        parts: list[Placed],
        *,
        state: str = FP32,
        numel: int | None = None,
        requires_grad: bool = False,
    ) -> NewTensor:
        """A tensor of that shape, filled from ``parts``, of which the first ``numel`` elements are kept."""
        tensor = NewTensor(dtype, shape, requires_grad)
        task = flat_tensor(self.path, state, dtype, item_size(dtype), tensor.numel if numel is None else numel, parts)
        self.filled.append((tensor, task))
        return tensor

    def copy(self, stored: TensorRef, storage: int, state: str) -> NewTensor:
        """A stored number in a storage of its own; ``storage`` is the index of the one it lies in.

        Groups that shared one would count its steps together.
        """
        tensor = NewTensor(stored.dtype, stored.shape, stored.requires_grad)
        piece = AffinePiece((1,), 0, (1,), stored.offset, (1,), (storage,))
        task = flat_tensor(self.path, state, stored.dtype, item_size(stored.dtype), 1, ())
        self.filled.append((tensor, replace(task, pieces=(piece,))))
        return tensor

    def done(self, root: Any) -> ObjectFile:
        """The file that holds ``root``, which has the new tensors in it."""
        placed = PtLayout(root).storages
        carried = tuple(source_storage(each.source) for each in placed if each.source is not None and each.nbytes)
        return ObjectFile(self.path, root, sum(each.nbytes for each in placed), carried, filled=tuple(self.filled))


def model_files(source: ReshardSource, target: CheckpointLayout, *, same_cut: bool) -> Iterator[ObjectFile]:
    """Every model-state file of ``target``; with ``same_cut`` each rank holds the tensors that it held before."""
    for mp in range(target.mp):
        for dp in range(target.dp if target.stage == 3 else 1):
            yield _ModelFile(source, target, mp, dp, same_cut).build()


class _ModelFile:
    def __init__(self, source: ReshardSource, target: CheckpointLayout, mp: int, dp: int, same_cut: bool) -> None:
        self.source, self.target, self.same_cut = source, target, same_cut
        self.mp, self.tp, self.dp = mp, mp % target.tp, dp
        self.rank: LayoutRank = target.ranks[mp]
        name = f"mp_rank_{mp:02d}_model_states.pt"
        self.file = FileBuilder(f"zero_pp_rank_{dp}_{name}" if target.stage == 3 else name)
        self.origin = source.model_file(mp if same_cut else 0, dp)
        self.old = source.root(self.origin.path)
        self.made: dict[str, Any] = {}

    def build(self) -> ObjectFile:
        source, target = self.source, self.target
        root = dict(self.old)
        root["module"] = self._module()
        if self.rank.names is not None:
            buffers = [name for name in self.rank.names if self._kind(name) == "buffer"]
            if not self.same_cut or set(buffers) != set(self.old.get("buffer_names") or ()):
                root["buffer_names"] = buffers
        root["param_shapes"] = [self._shapes(names) for names in self._shape_groups()]
        frozen = self._frozen()
        # Of a save that left frozen parameters out DeepSpeed restores none, unless an entry says which there are.
        records = target.stage > 1 and (bool(frozen) or self.old.get("frozen_param_shapes") is not None)
        root["frozen_param_shapes"] = self._shapes(frozen) if records else None
        root["frozen_param_fragments"] = self._fragments(frozen) if records else None
        # The first rank of all records the aliases, for the whole model.
        root["shared_params"] = dict(self.rank.aliases) if self.mp == self.dp == 0 else {}
        root["dp_world_size"] = target.dp
        if (source.layout.tp, source.layout.pp) != (target.tp, target.pp):
            root["mp_world_size"] = target.mp
            root[DIMENSIONS] = {"pp_degree": target.pp, "tp_degree": target.tp}
        root[DS_CONFIG] = config_of(self.old.get(DS_CONFIG), target)
        put_info(root, target, same_cut=self.same_cut)
        if target.version is not None:
            root["ds_version"] = target.version
        return self.file.done(root)

    def _module(self) -> Any:
        if self.rank.names is None:
            return None
        if self.same_cut and self.source.layout.stage < 3 and self.target.stage < 3:
            return self.old["module"]
        extra = self.source.extra_states(self.origin.path)
        if extra and not self.same_cut:
            raise UnsupportedLayoutError(
                f"{self.origin.path}: the module holds {sorted(extra)}, which are no tensors and belong to one "
                "tensor-parallel rank; they cannot be cut anew. Save without them.",
                file=self.origin.path,
            )
        module: OrderedDict[str, Any] = OrderedDict()
        for name in self.rank.names:
            module[name] = self._tensor(name)
        module.update(extra)
        return module

    def _tensor(self, name: str) -> Any:
        of = self.rank.aliases.get(name, name)
        param = self.target.params[of]
        if self.target.stage == 3 and param.kind != "buffer":
            # ZeRO-3 takes a parameter's data out of the module; only its dtype is left.
            return self.file.new(param.dtype, (0,), [])
        if of not in self.made:
            self.made[of] = self._whole(of, param)
        return self.made[of]

    def _whole(self, name: str, param: LayoutParam) -> Any:
        """This rank's whole shard of a tensor."""
        old = (self.old.get("module") or {}).get(name)
        fits = isinstance(old, TensorRef) and old.shape == param.shard_shape(self.tp)
        if param.kind == "buffer" and fits and (self.same_cut or self.source.layout.stage == 3):
            return old
        return self.file.new(param.dtype, param.shard_shape(self.tp), self._parts(name, 0, param.shard_numel(self.tp)))

    def _parts(self, name: str, start: int, numel: int) -> list[Placed]:
        return [Placed(self.source.shard(self.target, name, FP32, self.tp), start, numel, 0)]

    def _fragments(self, frozen: list[str]) -> OrderedDict[str, Any]:
        found: OrderedDict[str, Any] = OrderedDict()
        for name in frozen:
            if self.target.stage < 3:
                module = self.file_module()
                found[name] = module[name] if name in module else self._tensor(name)
                continue
            param = self.target.params[name]
            numel = param.shard_numel(self.tp)
            reserved = reserved_numel(numel, self.target.dp)
            start = self.dp * reserved
            held = max(0, min(reserved, numel - start))
            found[name] = self.file.new(param.dtype, (reserved,), self._parts(name, start, held))
        return found

    def file_module(self) -> Mapping[str, Any]:
        """The module as it was, where it is carried over."""
        carried = self.same_cut and self.source.layout.stage < 3
        found: Mapping[str, Any] = (self.old.get("module") or {}) if carried else {}
        return found

    def _kind(self, name: str) -> str:
        return self.target.params[self.rank.aliases.get(name, name)].kind

    def _frozen(self) -> list[str]:
        """The parameters that are frozen, and those that were when it was saved although the optimizer has them:
        DeepSpeed looks up both among the frozen ones."""
        late = {name for file in self.source.checkpoint.model_files for name in file.frozen_shapes}
        return [
            name
            for name in self.rank.names or ()
            if name not in self.rank.aliases
            and (self._kind(name) == "frozen" or (name in late and self._kind(name) == "optimized"))
        ]

    def _shape_groups(self) -> list[tuple[str, ...]]:
        return self.rank.sub_group_names() if self.target.stage == 3 else list(self.rank.groups)

    def _shapes(self, names: Any) -> OrderedDict[str, TorchSize]:
        return OrderedDict((name, TorchSize(self.target.params[name].shard_shape(self.tp))) for name in names)


def config_of(old: Any, target: CheckpointLayout) -> Any:
    """The DeepSpeed configuration that files of ``target`` carry: its own, or the source's with the stage amended."""
    if target.config is not None:
        return decode_value(target.config, "'ds_config' of the layout")
    zero = zero_config(old)
    if not isinstance(old, Mapping) or zero.get("stage") in (None, target.stage):
        return old
    if target.bf16_optimizer and target.stage == 1 and zero.get("stage") == 0:
        return old
    return {**old, "zero_optimization": {**zero, "stage": target.stage}}


def put_info(root: dict[str, Any], target: CheckpointLayout, *, same_cut: bool) -> None:
    """``root`` has the ``universal_checkpoint_info`` of the target, and the source's only where nothing is cut anew."""
    if target.info is not None:
        root[UC_INFO] = decode_value(target.info, f"{UC_INFO!r} of the layout")
    elif not same_cut:
        root.pop(UC_INFO, None)
