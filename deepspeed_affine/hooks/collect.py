"""The ``universal_checkpoint_info`` of a live model: DeepSpeed's own, completed, with the map of every parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed_affine.errors import AffineError
from deepspeed_affine.hooks.expert_layouts import native_expert_families
from deepspeed_affine.hooks.given import require_info, require_model
from deepspeed_affine.hooks.layouts import LiveParam, described
from deepspeed_affine.hooks.legacy_keys import LegacyKeys
from deepspeed_affine.hooks.topology import over_stages
from deepspeed_affine.hooks.versions import layer_metadata, metadata_attribute, stock_collect, stock_ucp_version
from deepspeed_affine.ir import ParamAffineMap, pattern_of, write_document
from deepspeed_affine.ir.document import Spelling
from deepspeed_affine.lowering import keys
from deepspeed_affine.lowering.experts import NATIVE_EXPERT

__all__ = ["UCP_VERSION", "collect_autotp_universal_checkpoint_info"]

UCP_VERSION = 0.5
"""The universal-checkpoint version of metadata that holds a map of every parameter beside all that 0.4 holds."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one pipeline stage knows: its parameters, what cannot be described, its lists, and names of tied copies."""

    params: tuple[LiveParam, ...]
    refused: Mapping[str, AffineError]
    entries: Mapping[str, Any]
    aliases: frozenset[str]
    by_layers: bool


def collect_autotp_universal_checkpoint_info(
    model: torch.nn.Module, *, info: Mapping[str, Any] | None = None, mpu: Any = None
) -> dict[str, Any]:
    """What DeepSpeed's function of this name returns, completed, with a map of every parameter under ``affine_map``.

    For a model cut by hand ``info`` is its user's own ``universal_checkpoint_info``, whose entries are kept, and
    ``mpu`` the unit that knows the tensor-parallel group. ``autotp_unsupported_parameter_patterns`` lists only what no
    map can describe, with the reason. The version is 0.5, or what it was where sub-parameter widths are not known.
    Call it on every rank of the tensor-parallel and pipeline groups; all get equal entries. Nothing of the model and
    nothing of DeepSpeed is changed.
    """
    require_model(model, "collect_autotp_universal_checkpoint_info")
    require_info(info, "collect_autotp_universal_checkpoint_info")
    stages = over_stages(_stage(model, info, mpu), model, mpu)
    entries: dict[str, Any] = {}
    for stage in stages:
        _join(entries, stage.entries)
    params = list({param.universal: param for stage in stages for param in stage.params}.values())
    by_layers = any(stage.by_layers for stage in stages)
    legacy = LegacyKeys(entries)
    for stage in stages:
        legacy.forget_aliases(stage.aliases)
    for param in params:
        if param.source == "experts" and not _is_native(param):
            # They are merged over their own group by lists of its own; DeepSpeed's converter would find these unused.
            legacy.remove(param.universal)
    if info is None or by_layers:
        whole = [param.universal for param in params if param.source == "untouched" or _is_native(param)]
        legacy.add(keys.TP_REPLICATED, whole)
        legacy.measure_vocabulary(params)
        legacy.write_widths(params)
    else:
        legacy.record_padding(params)
    if legacy.widths_are_written():
        entries[keys.VERSION] = UCP_VERSION
    legacy.agree_with(param for param in params if param.source != "experts" or _is_native(param))
    legacy.list_unsupported({name: fault for stage in stages for name, fault in stage.refused.items()})
    maps = {param.universal: param.layout for param in params}
    entries[keys.AFFINE_MAP] = _document(maps, "params" if by_layers else "draft")
    return entries


def _document(maps: Mapping[str, ParamAffineMap], spelling: Spelling) -> dict[str, Any]:
    """The document of these maps, equal maps being one object: a model's layers repeat, and a file stores it once."""
    first: dict[ParamAffineMap, str] = {}
    for name, layout in maps.items():
        first.setdefault(layout, name)
    document = write_document({name: layout for layout, name in first.items()}, spelling)
    written = document.get("params", document)
    rows = {pattern_of(name): written[pattern_of(first[maps[name]])] for name in sorted(maps)}
    head = {"version": document["version"]}
    return {**head, "params": rows} if spelling == "params" else {**head, **rows}


def _stage(model: torch.nn.Module, info: Mapping[str, Any] | None, mpu: Any) -> _Stage:
    found, refused = described(model, info=info, mpu=mpu)
    params = list(found.values())
    for local, names in native_expert_families(model).items():
        # The ranks' experts are alike, so this rank can describe those of the others too.
        params += [replace(found[local], universal=name) for name in names if local in found]
    by_layers = any(layer_metadata(param) is not None for param in model.parameters())
    entries = {} if info is not None and not by_layers else _stock(model)
    _join(entries, _besides(entries, info or {}))
    entries.pop(keys.AFFINE_MAP, None)
    own = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return _Stage(tuple(params), refused, entries, frozenset(every - own), by_layers)


def _besides(entries: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """``info`` without the sub-parameter rules of parameters that ``entries`` has a rule of already."""
    known = [rule.get("patterns") for rule in entries.get(keys.SUB_PARAMS) or () if isinstance(rule, Mapping)]
    rules = info.get(keys.SUB_PARAMS)
    if not known or not isinstance(rules, list | tuple):
        return dict(info)
    kept = [rule for rule in rules if not isinstance(rule, Mapping) or rule.get("patterns") not in known]
    return {**info, keys.SUB_PARAMS: kept}


def _is_native(param: LiveParam) -> bool:
    """Whether the parameter is one of DeepSpeed's own experts, which every tensor-parallel rank holds whole."""
    return NATIVE_EXPERT.fullmatch(param.universal) is not None


def _stock(model: torch.nn.Module) -> dict[str, Any]:
    """DeepSpeed's own result, the parameters' metadata being as it was; of versions without one, an empty info."""
    collect = stock_collect()
    if collect is None:
        return {keys.VERSION: stock_ucp_version()}
    with _metadata_kept(model):
        return dict(collect(model))


@contextmanager
def _metadata_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back what DeepSpeed's function writes onto the parameters: after ZeRO-3 has partitioned them it writes the
    shapes of empty tensors."""
    attribute = metadata_attribute() or ""
    before = {param: vars(param).get(attribute) for param in model.parameters()}
    try:
        yield
    finally:
        for param, meta in before.items():
            if meta is not None:
                setattr(param, attribute, meta)
            elif hasattr(param, attribute):
                delattr(param, attribute)


def _join(entries: dict[str, Any], more: Mapping[str, Any]) -> None:
    """``entries`` with everything ``more`` says besides; where both state one value, the first stays."""
    for key, value in more.items():
        kept = entries.get(key)
        if kept is None:
            entries[key] = list(value) if isinstance(value, list) else dict(value) if type(value) is dict else value
        elif isinstance(kept, list) and isinstance(value, list | tuple):
            kept += [one for one in value if one not in kept]
        elif isinstance(kept, dict) and isinstance(value, Mapping):
            for name, one in value.items():
                kept.setdefault(name, one)
