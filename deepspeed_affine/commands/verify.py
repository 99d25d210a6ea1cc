"""``ds_affine verify``: an output read again, against its manifest or against the checkpoint it was made from."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from deepspeed_affine.commands.arguments import positive
from deepspeed_affine.commands.folders import require_folder
from deepspeed_affine.commands.text import align, counted, say, say_faults, size
from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, PolicyError
from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift, ScaledStates
from deepspeed_affine.lowering.stock_rules import NEWEST_KNOWN
from deepspeed_affine.storage.files import absolute, is_file, join
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest

if TYPE_CHECKING:
    from deepspeed_affine.commands.verify_findings import Outcome
    from deepspeed_affine.commands.verify_source import Choices

__all__ = ["add_arguments", "format_outcome", "run", "verify_folder"]

SHOWN = 20
SHOWN_NOTES = 5
WITH_SOURCE = (
    "--on-drift",
    "--scaled-states",
    "--identical-shards",
    "--inject_missing_state",
    "--deepspeed",
    "--no-source-crc",
)
"""Options that mean nothing without ``--against``."""

Choice = TypeVar("Choice", OnDrift, ScaledStates, IdenticalShards)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ds_affine verify``."""
    parser.add_argument("folder", metavar="FOLDER", help="universal checkpoint folder, a path or a URL")
    parser.add_argument(
        "--against", metavar="SOURCE", help="prove every element against this DeepSpeed checkpoint, through the maps"
    )
    parser.add_argument("--quick", action="store_true", help="read all metadata, and a random sample of the data")
    parser.add_argument("--seed", type=int, default=None, help="with --quick: choose the sample of that run again")
    parser.add_argument(
        "--workers", type=positive, default=min(4, os.cpu_count() or 1), help="threads (default: %(default)s)"
    )
    options = parser.add_argument_group(
        "with --against, how the folder was converted; default: as its manifest says, else as ds_to_universal does"
    )
    for name, choices in (
        ("--on-drift", OnDrift),
        ("--scaled-states", ScaledStates),
        ("--identical-shards", IdenticalShards),
    ):
        options.add_argument(name, choices=[choice.value for choice in choices], default=None)
    options.add_argument("--inject_missing_state", action="store_true", default=None)
    options.add_argument("--deepspeed", metavar="VERSION", help="the version of DeepSpeed whose habits it follows")
    options.add_argument("--no-source-crc", action="store_true", help="do not check source storages against their CRC")
    parser.add_argument("--all", action="store_true", help=f"show all that is wrong, not the first {SHOWN}")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    """Verify and print; returns 0 where all is right, 1 where something differs, 2 where it cannot be told."""
    for name, given in (("FOLDER", args.folder), ("--against", args.against)):
        if given == "":
            raise PolicyError(f"{name}: is empty; expected a path. Is a shell variable not set?")
    if args.seed is not None and not args.quick:
        raise PolicyError("--seed: chooses a sample, and without --quick everything is read; give both or neither.")
    alone = [option for option in WITH_SOURCE if getattr(args, option.strip("-").replace("-", "_"))]
    if alone and args.against is None:
        raise PolicyError(f"{' and '.join(alone)}: says how to compare with a source; give --against too, or neither.")
    outcome = verify_folder(
        args.folder,
        against=args.against,
        options=vars(args),
        quick=args.quick,
        seed=args.seed,
        workers=args.workers,
        source_crc=not args.no_source_crc,
        progress=sys.stderr.isatty() and not args.json,
    )
    if args.json:
        say(json.dumps(outcome.to_dict(), indent=1))
    else:
        say("\n".join(format_outcome(outcome, every=args.all)))
    say_faults("ds_affine", [fault.message for fault in outcome.source_faults])
    return outcome.exit_code


def verify_folder(
    folder: str,
    *,
    against: str | None = None,
    options: Mapping[str, Any] | None = None,
    quick: bool = False,
    seed: int | None = None,
    workers: int = 4,
    source_crc: bool = True,
    progress: bool = False,
) -> Outcome:
    """The folder verified: by its manifest, or ``against`` the checkpoint it should have been made from.

    ``options`` are those of the conversion that differ from what the manifest says (``on_drift``, ``scaled_states``,
    ``identical_shards``, ``inject_missing_state``, ``deepspeed``). Raises the error of a folder that does not exist, of
    a source that cannot be converted, and without ``against`` of a manifest that is not there or cannot be read.
    """
    # numpy is imported with these, and neither --help nor another verb waits for it.
    from deepspeed_affine.commands.verify_manifest import Settings, verify_alone
    from deepspeed_affine.commands.verify_source import verify_against

    path, settings = absolute(folder), Settings(workers, progress, quick, seed)
    require_folder(path)
    listed = is_file(join(path, MANIFEST_NAME))
    if against is None:
        if not listed:
            raise _no_manifest(path)
        return verify_alone(path, Manifest.read(path), settings)
    source = absolute(against)
    require_folder(source)
    manifest: Manifest | None = None
    unusable: CheckpointFormatError | None = None
    try:
        manifest = Manifest.read(path) if listed else None
    except CheckpointFormatError as fault:
        unusable = fault
    if manifest is not None and manifest.identity.get("options", {}).get("command") == "reshard":
        raise PolicyError(
            f"{path}: is a checkpoint that ds_affine reshard made, and --against compares what ds_to_universal makes. "
            f"Compare the two with 'ds_affine diff --contents {source} {path}'.",
            file=path,
        )
    choices = _choices(manifest, options or {})
    try:
        outcome = verify_against(path, source, manifest, choices, settings, source_crc=source_crc)
    except AffineError as error:
        faults = Faults()
        faults.extend([error] if unusable is None else [unusable, error])
        faults.raise_if_any()
        raise
    if unusable is not None:
        _report_unusable(outcome, unusable, choices)
    return outcome


def _no_manifest(folder: str) -> CheckpointFormatError:
    path = join(folder, MANIFEST_NAME)
    return CheckpointFormatError(
        f"{path}: there is no such file; expected the manifest of an output of ds_to_universal --affine. DeepSpeed's "
        "own converter writes none: verify its outputs with --against the checkpoint they were made from.",
        file=path,
    )


def _report_unusable(outcome: Outcome, fault: CheckpointFormatError, choices: Choices) -> None:
    """A manifest that cannot be read is wrong itself, and says nothing of how the folder was converted."""
    from deepspeed_affine.commands.verify_findings import Finding
    from deepspeed_affine.commands.verify_manifest import without_file

    said = without_file(fault, join(outcome.folder, MANIFEST_NAME))
    outcome.findings.append(Finding("manifest", MANIFEST_NAME, said))
    taken = ", ".join(f"{name} {value}" for name, value in choices.to_dict().items())
    outcome.notes.append(
        "the manifest cannot be used: how the folder was converted is taken from the options, else as ds_to_universal "
        f"does ({taken}, the habits of DeepSpeed {choices.deepspeed})"
    )


def _choices(manifest: Manifest | None, given: Mapping[str, Any]) -> Choices:
    from deepspeed_affine.commands.verify_source import Choices

    identity: Mapping[str, Any] = {} if manifest is None else manifest.identity
    recorded, software = (
        part if isinstance(part := identity.get(name), Mapping) else {} for name in ("options", "software")
    )

    def chosen(name: str, default: Choice) -> Choice:
        value = given.get(name)
        return _choice(type(default), name, recorded.get(name, default.value) if value is None else value)

    inject = given.get("inject_missing_state")
    return Choices(
        str(given.get("deepspeed") or software.get("deepspeed") or _installed()),
        chosen("on_drift", OnDrift.ERROR),
        chosen("scaled_states", ScaledStates.REFUSE),
        chosen("identical_shards", IdenticalShards.REFUSE),
        bool(recorded.get("inject_missing_state", False) if inject is None else inject),
    )


def _choice(kind: type[Choice], name: str, value: object) -> Choice:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(choice.value for choice in kind)
        raise CheckpointFormatError(
            f"{MANIFEST_NAME}: says option {name} was {value!r}; expected one of {known}. A newer version of "
            "deepspeed_affine wrote it: install that version."
        ) from None


def _installed() -> str:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return NEWEST_KNOWN


def format_outcome(outcome: Outcome, *, every: bool = False) -> list[str]:
    """The verification as lines: the verdict, then every finding, then what else there is to know."""
    from deepspeed_affine.commands.verify_findings import in_order

    most = None if every else SHOWN
    different, undecided = outcome.different, outcome.undecided
    checked = f"{counted(outcome.files, 'file')}, {size(outcome.nbytes)} compared"
    by = f"with {outcome.against}, through the maps" if outcome.against else "with its manifest"
    if different:
        unlike = len({finding.file for finding in different})
        lines = [f"{outcome.folder}: DIFFERENT, {counted(unlike, 'file')} ({checked} {by})"]
    elif outcome.exit_code:
        lines = [f"{outcome.folder}: CANNOT TELL ({checked} {by})"]
    else:
        lines = [f"{outcome.folder}: fine ({checked} {by})"]
    for findings in (different, undecided):
        ordered = in_order(findings)
        kind = "" if findings is different else "cannot tell"
        lines += align([[_shown(finding.file), kind or finding.kind, finding.describe()] for finding in ordered[:most]])
        if most is not None and len(ordered) > most:
            lines.append(f"  and {len(ordered) - most} more; --all shows them")
    if outcome.sampled is not None:
        lines += outcome.sampled.describe()
    notes = outcome.notes if every else outcome.notes[:SHOWN_NOTES]
    lines += [f"note: {line}" for line in notes]
    hidden = len(outcome.notes) - len(notes)
    return [*lines, f"and {counted(hidden, 'more note')}; --all shows them"] if hidden else lines


def _shown(path: str) -> str:
    """A name from a folder, without what a terminal would take for a command."""
    return path if path.isprintable() else repr(path)
