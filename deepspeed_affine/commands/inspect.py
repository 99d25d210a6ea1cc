"""``ds_affine inspect``: what a checkpoint folder is and holds, from metadata alone; nothing is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from deepspeed_affine.commands.describe import FORMAT, describe_checkpoint, fault_entries
from deepspeed_affine.commands.describe_universal import describe_universal
from deepspeed_affine.commands.folders import missing_folder, require_folder, require_path
from deepspeed_affine.commands.text import align, counted, listed, say, say_faults, size
from deepspeed_affine.errors import SHOWN_FAULTS, CheckpointFormatError
from deepspeed_affine.storage.files import absolute, list_folder
from deepspeed_affine.storage.folder import parse_name
from deepspeed_affine.storage.universal import is_universal

__all__ = ["add_arguments", "describe_folder", "folder_kind", "format_description", "run"]

DESCRIBED, COULD_NOT = 0, 2
SHORT_ID = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ds_affine inspect``."""
    parser.add_argument("folder", metavar="FOLDER", help="DeepSpeed checkpoint folder, or universal folder")
    parser.add_argument("--params", action="store_true", help="list every parameter too")
    parser.add_argument("--all", action="store_true", help="leave no name of a list out, and no fault")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    """Describe and print; returns 0, or 2 after a folder that is incomplete, damaged, or no checkpoint."""
    require_path("FOLDER", args.folder)
    description = describe_folder(args.folder, with_params=args.params)
    if args.json:
        say(json.dumps(description, indent=1))
    else:
        say("\n".join(format_description(description, every=args.all)))
    faults = [str(fault["message"]) for fault in description["faults"]]
    say_faults("ds_affine", faults, None if args.all else SHOWN_FAULTS)
    return DESCRIBED if description["complete"] else COULD_NOT


def folder_kind(path: str) -> str:
    """``universal`` for what a converter wrote, ``deepspeed`` for all else: reading it says whether it is that."""
    try:
        kinds = {parsed.kind for entry in list_folder(absolute(path)) if (parsed := parse_name(entry.name)) is not None}
    except OSError:
        return "deepspeed"
    return "universal" if "zero_optim" not in kinds and is_universal(path) else "deepspeed"


def describe_folder(path: str, *, with_params: bool = False) -> dict[str, Any]:
    """The description of any folder; one that is no checkpoint is of kind ``other``, with the reason as its fault."""
    try:
        require_folder(absolute(path))
        if folder_kind(path) == "universal":
            return describe_universal(path, with_params=with_params)
        return describe_checkpoint(path, with_params=with_params)
    except CheckpointFormatError as fault:
        return {
            "format": FORMAT,
            "folder": absolute(path),
            "kind": "other",
            "complete": False,
            "faults": fault_entries(fault.faults),
        }


def format_description(found: Mapping[str, Any], *, every: bool = False) -> list[str]:
    """The description as lines, first what matters most."""
    lines = [str(found["folder"])]
    if found["kind"] == "other":
        none = missing_folder(lines[0]) is not None
        return [*lines, "no folder" if none else "neither a DeepSpeed checkpoint nor a universal one"]
    universal = found["kind"] == "universal"
    state = "complete" if found["complete"] else _incomplete(found)
    lines.append(f"{'universal checkpoint' if universal else 'DeepSpeed checkpoint'}, {state}")
    most = None if every else 5
    rows = _universal_rows(found, most) if universal else _checkpoint_rows(found, most)
    lines += align([[label, text] for label, text in rows if text])
    if "params" in found:
        lines += ["", *(_universal_params(found) if universal else _checkpoint_params(found))]
    return lines


def _incomplete(found: Mapping[str, Any]) -> str:
    parts = []
    if found["missing"]:
        parts.append(f"{counted(len(found['missing']), 'file')} missing")
    if found["damaged"]:
        parts.append(f"{counted(len(found['damaged']), 'file')} damaged")
    return "INCOMPLETE: " + ", ".join(parts) if parts else "with faults"


Rows = list[tuple[str, str]]


def _broken_rows(found: Mapping[str, Any], most: int | None) -> Rows:
    rows = [("missing", listed(found["missing"], most))]
    damaged = found["damaged"]
    rows += [("damaged", f"{each['file']}: {each['reason']}") for each in damaged[:most]]
    if most is not None and len(damaged) > most:
        rows.append(("", f"and {len(damaged) - most} more"))
    return rows


def _checkpoint_rows(found: Mapping[str, Any], most: int | None) -> Rows:
    topology, parameters, conversion = found["topology"], found["parameters"], found["conversion"]
    degrees = ", ".join(f"{axis.upper()} {topology[axis]}" for axis in ("tp", "pp", "dp", "ep"))
    return [
        *_broken_rows(found, most),
        ("conversion", _conversion(conversion)),
        *[("", f"because {reason}") for reason in conversion["reasons"][:3] if found["complete"]],
        *[("", f"note: {note}") for note in conversion["notes"][:most]],
        ("topology", f"ZeRO-{topology['zero_stage']}, {degrees}"),
        ("", f"tp, pp: {topology['from']['tp']}"),
        ("saved", _saved(found)),
        ("files", _files(found)),
        ("parameters", _parameters(parameters)),
        ("", ", ".join(f"{rule}: {count:,}" for rule, count in parameters["rules"].items())),
        ("states", _states(found["states"], parameters["optimized"])),
        ("no layout", listed(parameters["undescribed"], most)),
        *[("", each["message"]) for each in found["layout_faults"][:most]],
        ("no fragments", listed(found["without_fragments"], most)),
        ("incomplete", listed(found["incomplete"], most)),
        ("unused", listed([f"pattern {pattern!r}" for pattern in found["unused_patterns"]], most)),
        ("ambiguous", listed([_ambiguous(each) for each in found["ambiguous_patterns"]], most)),
        ("frozen", listed(found["frozen"], most)),
        ("tied", listed([f"{name} = {other}" for name, other in found["tied"].items()], most)),
        ("buffers", listed(found["buffers"], most)),
        ("experts", listed([_expert(each) for each in found["experts"]], most)),
        ("offloaded", listed(found["offloaded"], most)),
        *_leftover_rows(found, most),
    ]


def _universal_rows(found: Mapping[str, Any], most: int | None) -> Rows:
    manifest = found["manifest"]
    uneven = [f"{name} without {', '.join(states)}" for name, states in found["uneven_states"].items()]
    return [
        *_broken_rows(found, most),
        ("manifest", _manifest(manifest)),
        ("saved", _saved(found)),
        ("files", _files(found)),
        ("parameters", _parameters(found["parameters"])),
        ("states", _states(found["states"], found["parameters"]["count"])),
        ("uneven", listed(uneven, most)),
        ("weights only", listed(found["weights_only"], most)),
        *_leftover_rows(found, most),
    ]


def _manifest(manifest: Mapping[str, Any] | None) -> str:
    if manifest is None:
        return "none: not written by ds_to_universal --affine, or before it wrote one"
    if not manifest["readable"]:
        return "damaged"
    software = ", ".join(f"{name} {version}" for name, version in sorted(manifest["software"].items()))
    return f"{counted(manifest['files'], 'file')}, {software}"


def _conversion(conversion: Mapping[str, Any]) -> str:
    if conversion["would"] == "refuse":
        return "would refuse"
    options = " ".join(conversion["options"])
    return (
        f"would convert{' with ' + options if options else ''}: {counted(conversion['files'], 'file')}, "
        f"{size(conversion['bytes_out'])}"
    )


def _saved(found: Mapping[str, Any]) -> str:
    versions = found["versions"]
    deepspeed = " and ".join(versions["deepspeed"])
    parts = [f"by DeepSpeed {deepspeed}" if deepspeed else "by an unknown DeepSpeed"]
    if found["steps"].get("global_steps") is not None:
        parts.append(f"at step {found['steps']['global_steps']}")
    number = versions["universal_checkpoint"]
    parts.append("no universal_checkpoint_info" if number is None else f"universal checkpoint version {number:g}")
    if versions["affine_map"]:
        parts.append("with affine maps")
    return ", ".join(parts)


def _files(found: Mapping[str, Any]) -> str:
    kinds = [f"{each['count']:,} {kind} ({size(each['bytes'])})" for kind, each in found["files"].items()]
    without = found.get("checksums", {}).get("without")
    return ", ".join(kinds) + (f"; {counted(without, 'storage')} without a checksum" if without else "")


def _parameters(parameters: Mapping[str, Any]) -> str:
    return f"{parameters['count']:,}: {counted(parameters['elements'], 'element')}, {size(parameters['bytes'])}"


def _states(states: Mapping[str, Any], total: int) -> str:
    said = []
    for state, each in states.items():
        details = [] if each["parameters"] == total else [f"of {each['parameters']} of {total}"]
        if each["values"] is not None:
            values = each["values"]
            details.append(listed([f"{value:g}" for value in values], 3) if values else "numbers")
        details += each["dtypes"]
        said.append(f"{state} ({', '.join(details)})" if details else state)
    return ", ".join(said)


def _ambiguous(each: Mapping[str, Any]) -> str:
    decided = each["decided"]
    end = "refused" if decided is None else f"{decided!r} is taken"
    return f"{each['param']} by {' and '.join(map(repr, each['patterns']))} of {each['entry']} ({end})"


def _expert(each: Mapping[str, Any]) -> str:
    return f"{each['layer']}: {each['experts']} over {counted(each['ep'], 'rank')}"


def _leftover_rows(found: Mapping[str, Any], most: int | None) -> Rows:
    return [
        (label if at == 0 else "", f"{kind} {listed(names, most)}")
        for at, (label, kind, names) in enumerate(
            (("leftovers", kind, names) for kind, names in found["leftovers"].items() if names)
        )
    ]


def _checkpoint_params(found: Mapping[str, Any]) -> list[str]:
    rows = [["parameter", "kind", "shape", "shards", "dtype", "layout", "states", "decided by"]]
    for param in found["params"]:
        shards = {tuple(shape) for shape in param["shards"].values()}
        states = {state: each["fragments"] for state, each in param["states"].items()}
        rule = param["rule"] or param["fault"] or ""
        rows.append(
            [
                param["name"],
                param["kind"],
                _shape(param["shape"]),
                f"{len(param['shards'])} of {_shape(next(iter(shards)))}"
                if len(shards) == 1
                else " ".join(_shape(shape) for shape in param["shards"].values()),
                param["dtype"] or "",
                (param["layout_id"] or "")[:SHORT_ID],
                " ".join(f"{state}:{count}" if count else state for state, count in states.items()),
                f"{rule} {param['pattern'] or ''}".rstrip()
                if param["tied_to"] is None
                else f"tied to {param['tied_to']}",
            ]
        )
    return align(rows, indent="")


def _universal_params(found: Mapping[str, Any]) -> list[str]:
    rows = [["parameter", "shape", "dtype", "states", "entries"]]
    for param in found["params"]:
        rows.append(
            [
                param["name"],
                _shape(param["shape"]),
                param["dtype"] or "",
                " ".join(param["states"]),
                "bare tensor" if param["entries"] is None else " ".join(param["entries"]),
            ]
        )
    return align(rows, indent="")


def _shape(shape: Any) -> str:
    return "?" if shape is None else "x".join(map(str, shape)) if shape else "scalar"
