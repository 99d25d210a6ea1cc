"""From a checkpoint's description to a conversion plan: every output file, and the stored bytes it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.execute.agreement import check_groups, check_model_files, partition_numbers
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.execute.module_tensors import ModuleTensors
from deepspeed_affine.execute.other_files import copied_files, object_files
from deepspeed_affine.execute.tensor_files import BARE, ConversionOptions, Entries, Source, TensorFiles
from deepspeed_affine.ir import ParamAffineMap, exact_name, replicated_map
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.experts import expert_map
from deepspeed_affine.lowering.lowered import LoweredParam, Rule, SubParamEntry
from deepspeed_affine.lowering.merge import lower_param, unused_patterns
from deepspeed_affine.lowering.states import FP32, ParamStates, shape_numel
from deepspeed_affine.lowering.uc_info import UcInfo
from deepspeed_affine.lowering.zero import check_consecutive
from deepspeed_affine.plan.conversion import ConversionPlan, ShardPieces
from deepspeed_affine.plan.paths import check_paths
from deepspeed_affine.storage.refs import Global, StandIn

__all__ = ["ConversionOptions", "PlanBuilder", "Suspect", "build_plan", "patterns_without_parameter"]

UC_VERSION = 0.4


@dataclass(frozen=True, slots=True)
class Suspect:
    """A parameter whose metadata says split; if the shards of every state are identical, the metadata is wrong.

    ``states`` lists, for each state, one stored shard a rank. ``unnamed`` says that only the module holds it and no
    pattern names it, so that nothing but a default says split.
    """

    param: str
    states: tuple[tuple[ShardPieces, ...], ...]
    unnamed: bool = False


def build_plan(checkpoint: Checkpoint, options: ConversionOptions) -> tuple[ConversionPlan, tuple[Suspect, ...]]:
    """The plan of converting ``checkpoint``, and the parameters whose metadata its bytes may contradict.

    P1, P5 and P6 of every map are proved here; P2 is the executor's to prove, from ``TensorFile.replicas``.
    Raises one error listing the faults of all parameters.
    """
    return PlanBuilder(checkpoint, options).build()


class PlanBuilder:
    """A plan in the making: ``files`` has what was planned so far, ``lowered`` the layouts that decided it.

    ``build`` plans everything; ``prepare`` and then ``param`` and ``module_tensors`` plan what is asked for.
    """

    def __init__(self, checkpoint: Checkpoint, options: ConversionOptions) -> None:
        _refuse_without_weights(checkpoint)
        self.checkpoint = checkpoint
        self.options = options
        self.info = UcInfo.parse(_required_info(checkpoint, options))
        self.files = TensorFiles(options, checkpoint.pp_degree)
        self.suspects: list[Suspect] = []
        self.lowered: list[LoweredParam] = []
        self.leaving: frozenset[tuple[int, str]] = frozenset()

    @property
    def flat(self) -> bool:
        """Whether DeepSpeed writes bare flat tensors: ZeRO-3 without tensor parallelism."""
        return self.checkpoint.stage == 3 and self.checkpoint.tp_degree == 1

    def prepare(self) -> None:
        """What the model-state files say together is one thing, or refused; comes before anything is planned."""
        check_model_files(self.checkpoint, self.info)
        self.leaving = partition_numbers(self.checkpoint, self.files)

    def build(self) -> tuple[ConversionPlan, tuple[Suspect, ...]]:
        """The whole plan, as ``build_plan`` says."""
        checkpoint, files = self.checkpoint, self.files
        self.prepare()
        faults = Faults()
        for name in sorted({*checkpoint.shapes, *checkpoint.states}):
            _collect(faults, self.param, name)
        module = ModuleTensors(checkpoint, files, self._lower)
        _collect(faults, self.module_tensors, module)
        self._suspect_unnamed(module)
        folder = checkpoint.folder
        for file in (*folder.layer_files, *folder.expert_files, *folder.expert_optim_files):
            _collect(faults, files.check, file.path)
        faults.raise_if_any()
        check_groups(checkpoint, files, self.leaving)
        self._require_all()
        self._report_unused()
        self._report_empty()
        objects = (*files.objects, *object_files(checkpoint))
        copies = copied_files(checkpoint)
        plan = ConversionPlan(files.storages, tuple(files.tensors), objects, copies, tuple(files.notes), files.layouts)
        check_paths(plan.paths)
        return plan, tuple(self.suspects)

    def module_tensors(self, module: ModuleTensors | None = None) -> None:
        """What only the module holds is planned."""
        module = module or ModuleTensors(self.checkpoint, self.files, self._lower)
        if self.checkpoint.stage < 3:
            module.add_unsliced()
        elif not self.flat:
            module.add_frozen_partitions()

    def param(self, name: str) -> None:
        """Every state of a parameter that the optimizer files hold is planned."""
        states = self.checkpoint.states.get(name)
        shapes = self.checkpoint.shapes.get(name)
        if shapes is None:
            raise CheckpointFormatError(
                f"parameter {name!r} has optimizer slices but no model-state file records its shape. The files come "
                "from different saves: take all of them from one.",
                param=name,
            )
        if name in self.checkpoint.experts:
            self._expert(name, states, shapes)
            return
        if self.flat:
            layout = replicated_map((shape_numel(shapes[0] or ()),), 1)
            self._states(name, states, layout, None)
            return
        lowered = self._lower(name, shapes)
        if states is None:
            return
        stateless = self.checkpoint.stage < 3 and set(states.tensors) == {FP32} and not states.scalars
        if stateless and states.group in self.checkpoint.states.stateless_groups:
            # DeepSpeed takes such a parameter from the module, with nothing beside it.
            self._states(name, states, lowered.map, BARE, lowered=lowered)
            return
        stored = ((key, _stored(value)) for key, value in lowered.entries(self.options.rules))
        entries = (*stored, (keys.PARAM, None))
        self._states(name, states, lowered.map, entries, truncate=lowered.truncate_rows, lowered=lowered)
        self.files.notes += [note for note in lowered.notes if note not in self.files.notes]

    def _expert(self, name: str, states: ParamStates | None, shapes: Sequence[tuple[int, ...] | None]) -> None:
        layer = self.checkpoint.experts[name]
        shape = next((shape for shape in shapes if shape), None)
        if shape is None:
            raise CheckpointFormatError(
                f"expert parameter {name!r}: no rank records the shape of its experts, stacked along the first axis. "
                "The model-state files are damaged: use another checkpoint.",
                param=name,
            )
        entries: Entries = (
            (keys.PARAM, None),
            (keys.CAT_DIM, 0),
            ("is_expert_param", True),
            ("ep_num_experts", layer.num_experts),
        )
        self._states(name, states, expert_map(layer, name, shape[1:]), entries, axis="ep")

    def _lower(self, name: str, shapes: Sequence[tuple[int, ...] | None]) -> LoweredParam:
        lowered = lower_param(self.info, name, shapes, self.checkpoint.tp_degree)
        if lowered.category.contradicted_by and self.options.strict:
            listed = " and ".join((lowered.rule.value, *lowered.category.contradicted_by))
            raise InvalidMapError(
                f"parameter {name!r}: {listed} all list it by its exact name and say different things of its layout; "
                "one is expected. Remove it from the others where the training script defines them, or convert with "
                "--no_strict, which takes the first.",
                param=name,
            )
        if name in self.options.replicated:
            lowered = lowered.as_replicated()
        self.lowered.append(lowered)
        return lowered

    def _states(
        self,
        name: str,
        states: ParamStates | None,
        layout: ParamAffineMap,
        entries: Entries | None,
        *,
        truncate: int | None = None,
        lowered: LoweredParam | None = None,
        axis: str = "tp",
    ) -> None:
        if states is None:
            return
        for shard, fragments in states.tensors.get(FP32, {}).items() if self.checkpoint.stage < 3 else ():
            if len({fragment.rank for fragment in fragments}) == len(fragments):
                # Stored more than once, the copies are compared instead.
                label = shard.label(self.checkpoint.pp_degree, axis)
                check_consecutive(fragments, param=name, label=label)
        average = lowered is not None and lowered.average
        sources: list[Source] = []
        for state in sorted({*states.tensors, *states.whole}, key=lambda key: (key != FP32, key)):
            source = self.files.optimizer_source(name, state, states, layout, axis)
            sources.append(source)
            self.files.add(name, state, source, layout, entries, truncate=truncate, average=average)
        for state, values in states.scalars.items():
            if (states.group, state) in self.leaving:
                continue
            # ZeRO-3's numbers stay in the shared optimizer state, as DeepSpeed's loader expects.
            self.files.scalar(name, state, values, write=self.checkpoint.stage < 3)
        if lowered is not None and lowered.rule.value != keys.AFFINE_MAP and self._may_be_identical(lowered):
            ranks = sorted(layout.shard_shapes)
            self.suspects.append(
                Suspect(name, tuple(tuple(source.shards[rank][0] for rank in ranks) for source in sources))
            )

    def _may_be_identical(self, lowered: LoweredParam) -> bool:
        """Whether the ranks are said to hold different parts, of one shape that is not empty."""
        shapes = lowered.map.shard_shapes
        same = len(set(shapes.values())) == 1 and len(shapes) == self.checkpoint.tp_degree
        return lowered.says_split and same and shape_numel(shapes[0]) > 0

    def _suspect_unnamed(self, module: ModuleTensors) -> None:
        lowered = {param.name: param for param in self.lowered}
        for name, shards in module.split.items():
            param = lowered[name]
            if param.rule is Rule.COLUMN_PARALLEL and self._may_be_identical(param):
                self.suspects.append(Suspect(name, (tuple(shards[rank][0] for rank in sorted(shards)),), unnamed=True))

    def _require_all(self) -> None:
        """Every parameter with elements has found its weights somewhere."""
        written = {task.param for task in self.files.tensors}
        faults = Faults()
        for name, shapes in self.checkpoint.shapes.items():
            if name not in written and any(shape_numel(shape) for shape in shapes if shape is not None):
                faults.add(
                    CheckpointFormatError(
                        f"parameter {name!r}: no optimizer file has a slice of it and no model-state file its weight; "
                        "one of them is expected. The files come from different saves, or one is damaged.",
                        param=name,
                    )
                )
        faults.raise_if_any()

    def _report_unused(self) -> None:
        if self.flat or not self.lowered:
            return
        unused = patterns_without_parameter(self.checkpoint, self.info, self.lowered)
        if unused and self.options.strict:
            raise CheckpointFormatError(
                f"universal_checkpoint_info: no parameter matches {list(unused)}; every pattern must match one. "
                "Correct the pattern where the training script defines it, or convert with --no_strict."
            )
        if unused:
            self.files.notes.append(f"patterns that match no parameter: {list(unused)}")

    def _report_empty(self) -> None:
        if self.checkpoint.states.empty_states:
            names = ", ".join(sorted(self.checkpoint.states.empty_states))
            self.files.notes.append(f"optimizer states saved as None, nothing to carry: {names}")
        if self.leaving:
            names = ", ".join(sorted({state for _, state in self.leaving}))
            self.files.notes.append(f"left out, a number each rank computed of its own partition: {names}")


def patterns_without_parameter(
    checkpoint: Checkpoint, info: UcInfo, lowered: Sequence[LoweredParam]
) -> tuple[str, ...]:
    """The patterns of ``info`` that decide nothing about ``lowered`` and match nothing else of the checkpoint."""
    # Experts are placed by their own records, frozen parameters and aliases come from the module; a pattern that
    # names one of them has still found its parameter.
    names = {*checkpoint.experts}
    for file in checkpoint.model_files:
        names.update(file.module or (), file.frozen_shapes, file.aliases)
    # A save may leave frozen parameters out; what was collected of the live model has a map of each.
    names.update(name for key in info.maps if (name := exact_name(key)) is not None)
    names.difference_update(param.name for param in lowered)
    placed = {key for name in names for key in info.category_patterns_of(name)}
    return tuple(key for key in unused_patterns(info, lowered) if key not in placed)


def _collect(faults: Faults, step: Callable[..., None], *args: object) -> None:
    try:
        step(*args)
    except AffineError as fault:
        faults.add(fault)


def _refuse_without_weights(checkpoint: Checkpoint) -> None:
    if checkpoint.stage == 0 and all(file.module is None for file in checkpoint.model_files):
        raise UnsupportedLayoutError(
            f"{checkpoint.folder.path}: saved by a pipeline engine without ZeRO, so its weights are in layer files "
            "under names local to each layer, and nothing records the parameters' full names. Load it in DeepSpeed "
            "with ZeRO stage 1 and save again.",
            file=checkpoint.folder.path,
        )


def _required_info(checkpoint: Checkpoint, options: ConversionOptions) -> Mapping[str, Any]:
    info = checkpoint.uc_info
    if info is not None:
        return info
    path, degree = checkpoint.model_files[0].path, checkpoint.tp_degree
    if options.info is not None:
        # Patterns go by name and hold at any degree; what is of one degree does not, and one rank cuts nothing.
        taken = set(options.info) - {keys.AFFINE_MAP, keys.PADDED_VOCAB}
        taken &= taken if degree > 1 else {keys.VOCABULARY, keys.ORIGINAL_VOCAB}
        return {keys.VERSION: UC_VERSION, **{key: options.info[key] for key in taken}}
    if degree == 1 and (options.inject_missing_state or checkpoint.stage in (0, 3)):
        return {keys.VERSION: UC_VERSION}
    if degree == 1:
        advice = "If the model is not tensor-parallel, convert with --inject_missing_state"
    else:
        advice = (
            f"The files are of {degree} tensor-parallel ranks: save with the info in the client state (AutoTP of "
            "DeepSpeed 0.18.9 and later adds it by itself)"
        )
    raise CheckpointFormatError(
        f"{path}: 'universal_checkpoint_info' is missing, so nothing says how parameters are split. {advice}.",
        file=path,
    )


def _stored(value: object) -> object:
    """``value`` as it is pickled: a sub-parameter entry as an instance of DeepSpeed's own class."""
    if not isinstance(value, SubParamEntry):
        return value
    entry = StandIn(Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"), (), "newobj")
    entry.stand_in_state = {"patterns": value.patterns, "shape": value.shape, "partition_dim": value.partition_dim}
    return entry
