"""The layouts of two folders compared by layout id, and their topologies; no tensor byte is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_affine.commands.sides import CheckpointSide, Side, UniversalSide
from deepspeed_affine.errors import AffineError, PolicyError
from deepspeed_affine.lowering.states import FP32
from deepspeed_affine.storage.manifest import Manifest

__all__ = ["LayoutDifference", "Layouts", "compare_layouts", "topology"]

Facts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LayoutDifference:
    """One fact of one parameter that differs, as text."""

    param: str
    what: str
    a: str
    b: str


@dataclass(slots=True)
class Layouts:
    """What comparing layouts found; ``topology`` has the degrees that differ."""

    topology: list[tuple[str, int, int]] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    different: list[LayoutDifference] = field(default_factory=list)
    equal_params: int = 0

    @property
    def equal(self) -> bool:
        return not (self.topology or self.only_a or self.only_b or self.different)


def compare_layouts(a: Side, b: Side) -> Layouts:
    """How the folders' parameters lie over ranks, compared as far as both record it.

    Checkpoints record all of it. A universal folder holds every parameter whole: two are compared by shape, dtype and
    states, and by the layouts they were converted from where both have a manifest. Between a checkpoint and a universal
    folder the manifest's layouts are compared; without one, a PolicyError says so.
    """
    found = Layouts()
    one, other = topology(a), topology(b)
    found.topology = [(key, one[key], other[key]) for key in one if key in other and one[key] != other[key]]
    if isinstance(a, CheckpointSide) and isinstance(b, CheckpointSide):
        facts: Sequence[Mapping[str, Facts]] = (_checkpoint_facts(a), _checkpoint_facts(b))
    elif isinstance(a, UniversalSide) and isinstance(b, UniversalSide):
        facts = (_universal_facts(a), _universal_facts(b))
    else:
        facts = [_converted_facts(side) if isinstance(side, UniversalSide) else _convertible(side) for side in (a, b)]
    _compare(found, *facts)
    return found


def topology(side: Side) -> dict[str, int]:
    """The degrees by which a checkpoint is cut; empty for a universal folder, which is not."""
    if isinstance(side, UniversalSide):
        return {}
    checkpoint = side.checkpoint
    layers = {layer.ep_size for layer in checkpoint.experts.values()}
    layers |= {count // local for count, local in checkpoint.native_experts.layers.values()}
    return {
        "zero_stage": checkpoint.stage,
        "tp": checkpoint.tp_degree,
        "pp": checkpoint.pp_degree,
        "dp": checkpoint.dp_degree,
        "ep": max(layers, default=1),
    }


def _compare(found: Layouts, a: Mapping[str, Facts], b: Mapping[str, Facts]) -> None:
    found.only_a, found.only_b = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
    for name in sorted(a.keys() & b.keys()):
        both = [key for key in a[name] if key in b[name]]
        different = [
            LayoutDifference(name, key, a[name][key], b[name][key]) for key in both if a[name][key] != b[name][key]
        ]
        found.different += different
        found.equal_params += not different


def _checkpoint_facts(side: CheckpointSide) -> dict[str, Facts]:
    facts: dict[str, Facts] = {}
    for name, param in side.layouts.params.items():
        states = side.checkpoint.states.get(name)
        kept = sorted({*states.tensors, *states.whole, *states.scalars}) if states else []
        facts[name] = {
            "kind": param.kind,
            "shape": str(list(param.shape)) if param.shape is not None else "unknown",
            "layout": param.layout_id or _why(param.fault),
            "states": ", ".join(kept) or "none",
        }
    return facts


def _why(fault: AffineError | None) -> str:
    return "none" if fault is None else f"none: {fault.message}"


def _universal_facts(side: UniversalSide) -> dict[str, Facts]:
    manifest = _manifest(side)
    facts: dict[str, Facts] = {}
    for (name, state), stored in side.states.items():
        own = {**facts.get(name, {"states": ", ".join(sorted(side.folder.states[name]))})}
        facts[name] = own
        if state == FP32 and stored.tensor is not None:
            own["shape"], own["dtype"] = str(list(stored.tensor.shape)), stored.tensor.dtype
        if manifest is not None and name in manifest.parameters:
            own["layout"] = manifest.parameters[name].layout
    return facts


def _converted_facts(side: UniversalSide) -> dict[str, Facts]:
    manifest = _manifest(side)
    if manifest is None:
        raise PolicyError(
            f"{side.path}: has no manifest, so nothing says which layouts it was converted from. Compare contents, or "
            "convert it again with ds_to_universal --affine."
        )
    return {name: {"layout": param.layout} for name, param in manifest.parameters.items()}


def _convertible(side: CheckpointSide) -> dict[str, Facts]:
    """The layouts a conversion would write into its manifest."""
    return {name: {"layout": layout.layout_id()} for name, layout in side.plan.layouts.items()}


def _manifest(side: UniversalSide) -> Manifest | None:
    return None if side.folder.manifest is None else Manifest.read(side.path)
