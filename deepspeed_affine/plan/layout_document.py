"""A checkpoint layout as a plain JSON document, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults
from deepspeed_affine.ir import ParamAffineMap
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.plan.checkpoint_layout import CheckpointLayout, LayoutParam, LayoutRank

__all__ = ["LAYOUT_FORMAT", "layout_digest", "layout_document", "read_layout_document"]

LAYOUT_FORMAT = 1
"""Of the document; a reader refuses a newer one."""

KIND = "deepspeed_affine checkpoint layout"
KINDS = ("optimized", "frozen", "buffer")
T = TypeVar("T")


def layout_document(layout: CheckpointLayout) -> dict[str, Any]:
    """The document of ``layout``: plain scalars, lists and dictionaries with text keys.

    Maps are listed once each, since a model's layers repeat, and parameters name theirs by number.
    """
    maps: dict[ParamAffineMap, int] = {}
    params = {}
    for name, param in layout.params.items():
        number = maps.setdefault(param.layout.canonical(), len(maps))
        params[name] = {"map": number, "dtype": param.dtype, "kind": param.kind}
    return {
        "kind": KIND,
        "format": LAYOUT_FORMAT,
        "topology": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "zero_stage": layout.stage},
        "experts": {prefix: list(counts) for prefix, counts in layout.experts.items()},
        "data_before_expert": layout.data_before_expert,
        "optimizer": {
            "bf16_optimizer": layout.bf16_optimizer,
            "file_prefix": layout.prefix,
            "param_alignment": layout.param_alignment,
            "hyperparameters": None if layout.hyperparameters is None else [list(g) for g in layout.hyperparameters],
            "states": None if layout.states is None else list(layout.states),
        },
        "maps": [_map(entry) for entry in maps],
        "params": params,
        "ranks": [
            {
                "names": None if rank.names is None else list(rank.names),
                "groups": [list(group) for group in rank.groups],
                "aliases": dict(rank.aliases),
                "sub_groups": [list(entry) for entry in rank.sub_groups],
            }
            for rank in layout.ranks
        ],
        "ds_config": layout.config,
        "universal_checkpoint_info": layout.info,
        "ds_version": layout.version,
    }


def layout_digest(layout: CheckpointLayout) -> str:
    """The same text for equal layouts, and for no others."""
    text = json.dumps(layout_document(layout), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_layout_document(document: object, subject: str = "the layout") -> CheckpointLayout:
    """The layout that ``document`` describes; ``subject`` names it to a person, a file for example.

    Raises one AffineError listing what is wrong: CheckpointFormatError where it is no such document or a newer one,
    InvalidMapError or UnsupportedLayoutError where it contradicts itself.
    """
    read = _Reader(subject)
    top = read.mapping(document, "it")
    if top.get("kind") != KIND:
        raise read.fault(f"'kind' is {shown(top.get('kind'))}; {KIND!r} is expected. Write one with ds_affine layout")
    version = read.count(top.get("format"), "'format'", least=1)
    if version > LAYOUT_FORMAT:
        raise read.fault(
            f"has format {version}, newer than {LAYOUT_FORMAT}, the newest this package reads. Update deepspeed_affine"
        )
    topology = read.mapping(top.get("topology"), "'topology'")
    optimizer = read.mapping(top.get("optimizer"), "'optimizer'")
    hyperparameters = optimizer.get("hyperparameters")
    states = optimizer.get("states")
    try:
        maps = read.maps(top.get("maps"))
        return CheckpointLayout(
            tp=read.count(topology.get("tp"), "'tp'", least=1),
            pp=read.count(topology.get("pp"), "'pp'", least=1),
            dp=read.count(topology.get("dp"), "'dp'", least=1),
            stage=read.count(topology.get("zero_stage"), "'zero_stage'"),
            params={
                name: read.param(entry, name, maps)
                for name, entry in read.mapping(top.get("params"), "'params'").items()
            },
            ranks=tuple(read.rank(entry) for entry in read.sequence(top.get("ranks"), "'ranks'")),
            experts={
                prefix: read.pair(counts, f"'experts' of {prefix!r}")
                for prefix, counts in read.mapping(top.get("experts", {}), "'experts'").items()
            },
            data_before_expert=read.flag(top.get("data_before_expert", False), "'data_before_expert'"),
            bf16_optimizer=read.flag(optimizer.get("bf16_optimizer", False), "'bf16_optimizer'"),
            prefix=read.text(optimizer.get("file_prefix", ""), "'file_prefix'"),
            param_alignment=read.count(optimizer.get("param_alignment", 1), "'param_alignment'", least=1),
            hyperparameters=read.optional(
                hyperparameters, lambda value: tuple(read.names(group) for group in read.sequence(value, "a group"))
            ),
            states=read.optional(states, read.distinct),
            config=top.get("ds_config"),
            info=top.get("universal_checkpoint_info"),
            version=read.optional(top.get("ds_version"), lambda value: read.text(value, "'ds_version'")),
        )
    except AffineError as error:
        faults = Faults()
        for fault in error.faults:
            if not str(fault).startswith(subject):
                fault = type(fault)(f"{subject}: {fault}", param=fault.param)
            faults.add(fault)
        faults.raise_if_any()
        raise


def _map(layout: ParamAffineMap) -> dict[str, Any]:
    entry = layout.to_dict()
    return {**entry, "ranks": {str(rank): shard for rank, shard in entry["ranks"].items()}}


class _Reader:
    """Strict reading; every fault names the document and the place."""

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def fault(self, fact: str, param: str | None = None) -> CheckpointFormatError:
        return CheckpointFormatError(f"{self.subject}: {fact}.", param=param)

    def _wrong(self, what: str, value: object, expected: str) -> CheckpointFormatError:
        return self.fault(f"{what} is {shown(value)}; {expected} is expected. The document was edited or is damaged")

    def optional(self, value: object, read: Callable[[Any], T]) -> T | None:
        return None if value is None else read(value)

    def mapping(self, value: object, what: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self._wrong(what, value, "an object")
        return value

    def sequence(self, value: object, what: str) -> Sequence[Any]:
        if not isinstance(value, (list, tuple)):
            raise self._wrong(what, value, "a list")
        return value

    def count(self, value: object, what: str, least: int = 0) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(what, value, f"a number of at least {least}")
        return value

    def flag(self, value: object, what: str) -> bool:
        if not isinstance(value, bool):
            raise self._wrong(what, value, "true or false")
        return value

    def text(self, value: object, what: str) -> str:
        if not isinstance(value, str):
            raise self._wrong(what, value, "text")
        return value

    def names(self, value: object) -> tuple[str, ...]:
        return tuple(self.text(name, "a name") for name in self.sequence(value, "a list of names"))

    def distinct(self, value: object) -> tuple[str, ...]:
        found = self.names(value)
        if len(set(found)) < len(found):
            raise self._wrong("a list of names", value, "each once")
        return found

    def maps(self, value: object) -> list[ParamAffineMap]:
        faults = Faults()
        found: list[ParamAffineMap] = []
        for entry in self.sequence(value, "'maps'"):
            try:
                layout = ParamAffineMap.from_dict(entry)
                layout.validate()
                found.append(layout)
            except AffineError as error:
                faults.extend(error.faults)
        faults.raise_if_any()
        return found

    def param(self, value: object, name: str, maps: Sequence[ParamAffineMap]) -> LayoutParam:
        entry = self.mapping(value, f"parameter {name!r}")
        number = self.count(entry.get("map"), f"'map' of {name!r}")
        if number >= len(maps):
            raise self.fault(f"parameter {name!r} has map {number} of {len(maps)}", name)
        kind = entry.get("kind", "optimized")
        if kind not in KINDS:
            raise self._wrong(f"'kind' of {name!r}", kind, "one of 'optimized', 'frozen' and 'buffer'")
        return LayoutParam(maps[number], self.text(entry.get("dtype"), f"'dtype' of {name!r}"), kind)

    def rank(self, value: object) -> LayoutRank:
        entry = self.mapping(value, "an entry of 'ranks'")
        aliases = self.mapping(entry.get("aliases", {}), "'aliases'")
        return LayoutRank(
            names=self.optional(entry.get("names"), self.names),
            groups=tuple(self.names(group) for group in self.sequence(entry.get("groups"), "'groups'")),
            aliases={alias: self.text(name, "an alias") for alias, name in aliases.items()},
            sub_groups=tuple(
                self.pair(pair, "a sub-group") for pair in self.sequence(entry.get("sub_groups", ()), "'sub_groups'")
            ),
        )

    def pair(self, value: object, what: str) -> tuple[int, int]:
        pair = self.sequence(value, what)
        if len(pair) != 2:
            raise self._wrong(what, value, "two numbers")
        return self.count(pair[0], f"the first number of {what}"), self.count(pair[1], f"the second number of {what}")
