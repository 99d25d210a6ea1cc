"""What an exported artifact is to hold: objects made of weights, bindings, and what a recipe file says of them.

A recipe is one JSON object; its members are described in docs/ninfer.md. Without one there is a component ``text``, an
object for every weight and a binding of the weight's own name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_affine.commands.export_weights import FLOATS, Weight, Weights
from deepspeed_affine.errors import PolicyError, UnsupportedLayoutError
from deepspeed_affine.ir.ints import product, shown
from deepspeed_affine.ninfer.bridge import map_to_bindings
from deepspeed_affine.ninfer.directory import TEXT
from deepspeed_affine.ninfer.errors import EncodingError
from deepspeed_affine.ninfer.fileplan import ResourceSpec, TensorSpec
from deepspeed_affine.ninfer.formats import layout_of_format
from deepspeed_affine.ninfer.json_text import parse_json
from deepspeed_affine.ninfer.layouts import plan_geometry
from deepspeed_affine.ninfer.parse import binding_of, component_of, use_of
from deepspeed_affine.ninfer.records import Binding, Component, Part, Use

__all__ = ["ExportPlan", "ObjectPlan", "Recipe", "plan_export", "read_recipe"]

PROPOSAL = "proposal"
_STORED = {"float32": "fp32", "bfloat16": "bf16", "int32": "int32", "float16": "fp32"}
"""The format that keeps a dtype's values exactly."""
_MEMBERS = frozenset(
    {
        "components",
        "resources",
        "objects",
        "bindings",
        "uses",
        "format",
        "formats",
        "rest",
        "metadata",
        "provenance",
    }
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe as read; ``resources`` are paths, ``objects`` lists of weights to be stacked along the first axis."""

    components: Mapping[str, Component] = field(default_factory=lambda: {TEXT: Component({})})
    resources: Mapping[str, str] = field(default_factory=dict)
    objects: Sequence[Mapping[str, Any]] = ()
    bindings: Mapping[str, Any] | None = None
    uses: Sequence[Use] = ()
    format: str | None = None
    formats: Mapping[str, str] = field(default_factory=dict)
    rest: str = "each"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """One tensor to be written: the weights stacked in it in order."""

    spec: TensorSpec
    weights: tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """An artifact to be written, in full; ``notes`` say what was left out or kept in another format."""

    objects: tuple[ObjectPlan, ...]
    resources: Mapping[str, str]
    specs: tuple[TensorSpec | ResourceSpec, ...]
    recipe: Recipe
    bindings: Mapping[str, Binding]
    notes: tuple[str, ...]


def read_recipe(path: str) -> Recipe:
    """The recipe at ``path``; its resources are relative to the folder it is in."""
    with open(path, "rb") as file:
        root = parse_json(file.read(), path, "the recipe")
    if not isinstance(root, dict) or not root.keys() <= _MEMBERS:
        raise PolicyError(
            f"{path}: is no recipe; expected an object with some of {', '.join(sorted(_MEMBERS))}.", file=path
        )
    kinds: dict[str, type] = {"objects": list, "uses": list, "format": str, "rest": str}
    for name, value in root.items():
        if not isinstance(value, kinds.get(name, dict)):
            raise PolicyError(
                f"{path}: its {name} is {shown(value)}; expected {kinds.get(name, dict).__name__}.", file=path
            )
    if root.get("rest", "each") not in ("each", "leave"):
        raise PolicyError(f"{path}: its rest is {shown(root['rest'])}; expected 'each' or 'leave'.", file=path)
    for kind in ("resources", "formats"):
        for name, value in root.get(kind, {}).items():
            if type(value) is not str:
                raise PolicyError(f"{path}: {kind} {shown(name)} is {shown(value)}; expected text.", file=path)
    folder = os.path.dirname(os.path.abspath(path))
    found = {**root, "resources": {key: os.path.join(folder, name) for key, name in root.get("resources", {}).items()}}
    if "components" in root:
        found["components"] = {
            name: component_of(value, f"{path}: component {shown(name)}") for name, value in root["components"].items()
        }
    found["uses"] = [use_of(value, f"{path}: use {number}") for number, value in enumerate(root.get("uses", []))]
    return Recipe(**found)


def plan_export(
    weights: Weights, recipe: Recipe, *, format_name: str | None = None, shards: bool = False
) -> ExportPlan:
    """The artifact the recipe asks for; ``format_name`` goes before the recipe's own.

    With ``shards`` a weight the source has in shards becomes one object a rank, where a binding can put them together.
    Raises PolicyError for a recipe that names what is not there or fuses private parameters of two components.
    """
    wanted = format_name or recipe.format
    for name in (wanted, *recipe.formats.values()):
        if name is not None:
            layout_of_format(name, "the format of the export")
    notes = list(weights.notes)
    objects: list[ObjectPlan] = []
    places: dict[str, Binding] = {}
    for entry in recipe.objects:
        _add_fused(entry, weights, recipe, wanted, objects, places)
    for name, weight in weights.weights.items():
        if name in places or recipe.rest == "leave":
            continue
        explicit = recipe.formats.get(name)
        chosen, note = _format_of(weight, explicit, wanted)
        if note:
            notes.append(note)
        if chosen is None:
            continue
        if shards and weight.layout is not None and _add_shards(name, weight, chosen, objects, places, notes):
            continue
        objects.append(ObjectPlan(TensorSpec(name, weight.shape, chosen), (weight,)))
        places[name] = Binding(name)
    for alias, name in weights.aliases.items():
        if name in places:
            places.setdefault(alias, places[name])
    if not objects:
        raise PolicyError(
            "Nothing is to be exported: no weight has a format the container knows; expected one or more."
        )
    _require_known(recipe.formats, weights)
    bindings = _bindings(recipe, places, {plan.spec.id: plan.spec.shape for plan in objects})
    _refuse_mixed_owners(recipe, bindings)
    resources = dict(recipe.resources)
    specs: list[TensorSpec | ResourceSpec] = [
        ResourceSpec(key, os.path.getsize(path)) for key, path in resources.items()
    ]
    return ExportPlan(
        tuple(objects), resources, (*specs, *(plan.spec for plan in objects)), recipe, bindings, tuple(notes)
    )


def _format_of(weight: Weight, explicit: str | None, wanted: str | None) -> tuple[str | None, str]:
    """``(format, note)`` of one weight: None where the container has none, and then why."""
    stored = _STORED.get(weight.dtype)
    name = weight.name
    floats = weight.dtype in FLOATS
    for choice in (explicit, wanted if floats else None):
        if choice is not None and choice != stored and (choice == "int32" or not floats):
            raise PolicyError(f"{name}: is {weight.dtype} and cannot be exported as {choice}; expected another format.")
    if explicit is not None:
        plan_geometry(explicit, None, weight.shape, subject=f"parameter {name!r}")
        return explicit, ""
    if not product(weight.shape):
        return None, f"{name}: left out; it has no elements"
    if not floats:
        # A format for weights is not meant for indices and flags.
        note = "" if stored else f"{name}: left out; the container has no format for {weight.dtype}"
        return stored, note
    if wanted is None:
        if stored is None:
            raise UnsupportedLayoutError(
                f"{name}: is {weight.dtype}, for which the container has no format. Choose one with --format, for "
                "example fp32, and values are rounded to it.",
                param=name,
            )
        return stored, ""
    try:
        plan_geometry(wanted, None, weight.shape)
    except EncodingError:
        kept = stored or "fp32"
        return kept, f"{name}: kept as {kept}; shape {weight.shape} has no place in {wanted}"
    return wanted, ""


def _add_fused(
    entry: Any,
    weights: Weights,
    recipe: Recipe,
    wanted: str | None,
    objects: list[ObjectPlan],
    places: dict[str, Binding],
) -> None:
    known = {"id", "parameters", "format", "divisors"}
    names = entry.get("parameters") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not entry.keys() <= known or not isinstance(names, list) or not names:
        raise PolicyError(
            f"The recipe's object {shown(entry)} is none; expected an id, a list of parameters, and perhaps a format "
            "and divisors."
        )
    found = [_weight(weights, name) for name in names]
    shape = found[0].shape
    if any(len(w.shape) < 1 or w.shape[1:] != shape[1:] or w.dtype != found[0].dtype for w in found):
        raise PolicyError(
            f"The recipe's object {shown(entry.get('id'))} stacks {', '.join(names)} of shapes "
            f"{[w.shape for w in found]}; expected parameters of one dtype that differ in their first axis only."
        )
    chosen, note = _format_of(found[0], entry.get("format"), wanted)
    if chosen is None:
        raise PolicyError(f"The recipe's object {shown(entry.get('id'))} cannot be written: {note}.")
    rows = sum(w.shape[0] for w in found)
    spec = TensorSpec(entry.get("id", ""), (rows, *shape[1:]), chosen, entry.get("divisors", 1))
    objects.append(ObjectPlan(spec, tuple(found)))
    at = 0
    for weight in found:
        if weight.name in places:
            raise PolicyError(f"The recipe stores {weight.name!r} twice; expected every parameter in one object.")
        whole = len(found) == 1
        places[weight.name] = Binding(spec.id) if whole else Binding(parts=(Part(spec.id, at, at + weight.numel),))
        at += weight.numel


def _add_shards(
    name: str, weight: Weight, chosen: str, objects: list[ObjectPlan], places: dict[str, Binding], notes: list[str]
) -> bool:
    """Whether the weight is bound to objects that are its shards."""
    layout = weight.layout
    if layout is None:
        return False
    try:
        binding = map_to_bindings(layout, {rank: f"{name}/tp{rank}" for rank in layout.ranks})
        specs = {
            f"{name}/tp{rank}": (rank, TensorSpec(f"{name}/tp{rank}", layout.shard_shapes[rank], chosen))
            for rank in layout.ranks
            if f"{name}/tp{rank}" in binding.objects
        }
    except (UnsupportedLayoutError, EncodingError) as reason:
        notes.append(f"{name}: stored whole; {reason.message}")
        return False
    if len(specs) == 1:
        # Every rank holds all of it: it is no shard of anything.
        return False
    for rank, spec in specs.values():
        objects.append(ObjectPlan(spec, (weight.shard(rank),)))
    places[name] = binding
    return True


def _bindings(
    recipe: Recipe, places: Mapping[str, Binding], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Binding]:
    """Logical names to what they are: the recipe's, then every weight it does not name under its own."""
    found: dict[str, Binding] = {}
    named: set[str] = set()
    taken: set[str] = set()
    for name, value in (recipe.bindings or {}).items():
        if isinstance(value, str):
            if value not in places:
                raise PolicyError(f"The recipe binds {shown(name)} to {shown(value)}, which is no exported parameter.")
            found[name] = places[value]
            named.add(value)
        else:
            found[name] = binding_of(value, f"the recipe's binding {shown(name)}")
            for object_id in found[name].objects:
                if object_id not in shapes:
                    raise PolicyError(f"The recipe binds {shown(name)} to object {shown(object_id)}, which it lacks.")
                taken.add(object_id)
    if recipe.rest == "each":
        for name, binding in places.items():
            if name not in named and name not in found and not set(binding.objects) & taken:
                found[name] = binding
    return found


def _refuse_mixed_owners(recipe: Recipe, bindings: Mapping[str, Binding]) -> None:
    """No object holds what is private to a component beside what another needs without it.

    A parent is loaded whole, so a component that is switched off would be loaded along.
    """
    owned: dict[str, set[frozenset[str]]] = {}
    ranges: dict[str, dict[tuple[int, int], set[str]]] = {}
    helpers = [(use.parameter, binding) for use in recipe.uses for binding in use.auxiliaries.values()]
    for name, binding in [*bindings.items(), *helpers]:
        owner = _owner(name, recipe.components)
        parts = [(part.object, part.begin, part.end) for part in binding.parts]
        for object_id, begin, end in parts or [(str(binding.object), -1, -1)]:
            ranges.setdefault(object_id, {}).setdefault((begin, end), set()).add(owner)
    for object_id, found in ranges.items():
        owned[object_id] = {frozenset(owners) for owners in _cells(found)}
    for object_id, kinds in owned.items():
        everyone = frozenset(owner for owners in kinds for owner in owners)
        private = [owners for owners in kinds if TEXT not in owners and owners != everyone]
        if private:
            raise PolicyError(
                f"Object {shown(object_id)} would hold parameters of {', '.join(sorted(private[0]))} beside others of "
                f"{', '.join(sorted(everyone - private[0]))}; each can be loaded without the other, so each needs "
                "objects of its own. Take them apart in the recipe."
            )


def _cells(found: Mapping[tuple[int, int], set[str]]) -> Iterable[set[str]]:
    """The owners of every stretch between two ends of ranges; a whole object, ``(-1, -1)``, is under all of them."""
    whole = found.get((-1, -1), set())
    events: dict[int, list[tuple[int, str]]] = {}
    for (begin, end), owners in found.items():
        if begin >= 0:
            for owner in owners:
                events.setdefault(begin, []).append((1, owner))
                events.setdefault(end, []).append((-1, owner))
    count: dict[str, int] = {}
    if whole:
        yield whole
    for at in sorted(events):
        for step, owner in events[at]:
            count[owner] = count.get(owner, 0) + step
        here = {owner for owner, times in count.items() if times} | whole
        if here:
            yield here


def _owner(name: str, components: Mapping[str, Component]) -> str:
    """The component a parameter belongs to by its name; ``proposal`` counts as one, since it can be left off."""
    first = name.split("/", 1)[0]
    return first if first in components or first == PROPOSAL else TEXT


def _weight(weights: Weights, name: Any) -> Weight:
    found = weights.weights.get(name) if type(name) is str else None
    if found is None and type(name) is str and name in weights.aliases:
        raise PolicyError(
            f"The recipe names the parameter {shown(name)}, which is tied to {shown(weights.aliases[name])} and stored "
            "as that; name that instead. A binding may name either."
        )
    if found is None:
        raise PolicyError(f"The recipe names the parameter {shown(name)}, which the source does not have.")
    return found


def _require_known(names: Iterable[str], weights: Weights) -> None:
    for name in names:
        _weight(weights, name)
