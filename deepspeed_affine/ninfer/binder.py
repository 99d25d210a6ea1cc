"""What a model asks of an artifact, resolved by the directory alone: no byte of any object is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from deepspeed_affine.errors import Faults
from deepspeed_affine.ir.ints import product, shown
from deepspeed_affine.ninfer.directory import Directory
from deepspeed_affine.ninfer.errors import BindingError
from deepspeed_affine.ninfer.integers import extents
from deepspeed_affine.ninfer.records import ActivationPolicy, Binding, Component, Part, TensorObject, Use

__all__ = ["Bound", "BoundParameter", "Demand", "bind", "common_policy"]

Demand: TypeAlias = tuple[Sequence[int], Sequence[str] | None]
"""``(shape, formats)``: the shape a parameter has, and the formats its consumer takes, None for any."""


@dataclass(frozen=True, slots=True)
class BoundParameter:
    """A parameter resolved: its shape, and its elements as ranges of stored tensors, in order."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[TensorObject, int, int], ...]
    binding: Binding


@dataclass(frozen=True, slots=True)
class Bound:
    """Everything that was asked for: parameters, the components, and every use of the parameters with its helpers."""

    parameters: Mapping[str, BoundParameter]
    components: Mapping[str, Component]
    uses: tuple[Use, ...]
    auxiliaries: Mapping[tuple[str, str], Mapping[str, BoundParameter]]

    @property
    def objects(self) -> tuple[str, ...]:
        """The objects all this needs, each once; no other is read."""
        held = [*self.parameters.values(), *(b for roles in self.auxiliaries.values() for b in roles.values())]
        resources = [r for component in self.components.values() for r in component.resources.values()]
        return tuple(dict.fromkeys([record.id for bound in held for record, _, _ in bound.parts] + resources))


def bind(
    directory: Directory,
    wanted: Mapping[str, Demand],
    components: Iterable[str] = (),
    *,
    targets: Mapping[str, str | None] | None = None,
    auxiliaries: Mapping[tuple[str, str], Mapping[str, Demand]] | None = None,
) -> Bound:
    """All of it resolved, or one ``BindingError`` with every fault found.

    ``wanted`` names parameters with their shapes and formats; ``components`` those that must be there, with the
    component they belong to also among them or in the artifact; ``targets`` which component each must belong to;
    ``auxiliaries`` the roles a use, ``(parameter, input)``, must have.
    """
    faults = Faults()
    chosen: dict[str, Component] = {}
    for name in components:
        found = directory.components.get(name)
        if found is None:
            faults.add(
                BindingError(f"Component {shown(name)} is not in the artifact; expected it, or do not ask for it.")
            )
        else:
            chosen[name] = found
    for name, target in (targets or {}).items():
        found = directory.components.get(name)
        if found is None or found.target != target:
            has = "is not in the artifact" if found is None else f"belongs to {shown(found.target)}"
            faults.add(BindingError(f"Component {shown(name)} {has}; expected one that belongs to {shown(target)}."))
    parameters: dict[str, BoundParameter] = {}
    for name, demand in wanted.items():
        binding = directory.bindings.get(name)
        if binding is None:
            faults.add(BindingError(f"Parameter {shown(name)} has no binding; expected one.", param=name))
            continue
        parameter = _resolved(directory, name, binding, demand, faults)
        if parameter is not None:
            parameters[name] = parameter
    uses = {(use.parameter, use.input): use for use in directory.uses}
    helpers: dict[tuple[str, str], dict[str, BoundParameter]] = {}
    for place, roles in (auxiliaries or {}).items():
        use = uses.get(place)
        if use is None:
            faults.add(
                BindingError(f"Parameter {shown(place[0])} has no use with input {shown(place[1])}; expected one.")
            )
            continue
        for role, demand in roles.items():
            what = f"{place[0]} with {place[1]}: {role}"
            binding = use.auxiliaries.get(role)
            if binding is None:
                faults.add(BindingError(f"The use {shown(what)} is missing; expected this auxiliary.", param=place[0]))
                continue
            helper = _resolved(directory, what, binding, demand, faults)
            if helper is not None:
                helpers.setdefault(place, {})[role] = helper
    faults.raise_if_any()
    used = tuple(use for use in directory.uses if use.parameter in parameters)
    return Bound(parameters, chosen, used, helpers)


def _resolved(
    directory: Directory, name: str, binding: Binding, demand: Demand, faults: Faults
) -> BoundParameter | None:
    formats = demand[1]
    before = len(faults)
    try:
        shape = extents(demand[0], f"The shape of parameter {shown(name)}")
    except BindingError as fault:
        faults.add(fault)
        return None
    if binding.object is not None:
        record = directory.tensor(binding.object)
        parts = [Part(record.id, 0, record.elements)]
        if record.shape != shape:
            faults.add(
                BindingError(
                    f"Parameter {shown(name)}: is the whole object {shown(record.id)} of shape {record.shape}; "
                    f"expected shape {shape}.",
                    param=name,
                )
            )
    else:
        parts = list(binding.parts)
        count = sum(part.elements for part in parts)
        if count != product(shape):
            faults.add(
                BindingError(
                    f"Parameter {shown(name)}: its parts have {count} elements; expected {product(shape)}, for shape "
                    f"{shape}.",
                    param=name,
                )
            )
    held = tuple((directory.tensor(part.object), part.begin, part.end) for part in parts)
    for record, _, _ in held:
        if formats is not None and record.format not in formats:
            faults.add(
                BindingError(
                    f"Parameter {shown(name)}: object {shown(record.id)} has format {record.format}; expected one of "
                    f"{', '.join(formats)}.",
                    param=name,
                )
            )
    return BoundParameter(name, shape, held, binding) if len(faults) == before else None


def common_policy(uses: Iterable[Use]) -> ActivationPolicy | None:
    """What all of the uses permit, for activations quantised once for them; None where none states a policy."""
    stated = [use.activation_policy for use in uses if use.activation_policy is not None]
    return min(stated, key=lambda policy: len(policy.widths)) if stated else None
