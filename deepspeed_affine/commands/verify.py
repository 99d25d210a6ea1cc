"""``ds_affine verify``: an output read again, against its manifest or against the checkpoint it was made from."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from deepspeed_affine.commands.text import align, counted, say, say_faults, size
from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift, ScaledStates
from deepspeed_affine.lowering.stock_rules import NEWEST_KNOWN
from deepspeed_affine.storage.files import absolute, is_file, is_folder, join
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest

if TYPE_CHECKING:
    from deepspeed_affine.commands.verify_findings import Outcome
    from deepspeed_affine.commands.verify_source import Choices

__all__ = ["add_arguments", "format_outcome", "run", "verify_folder"]

SHOWN = 20
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
        "--workers", type=int, default=min(4, os.cpu_count() or 1), help="threads (default: %(default)s)"
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
    if args.workers < 1:
        raise PolicyError(f"--workers: {args.workers}; expected at least 1.")
    if args.seed is not None and not args.quick:
        raise PolicyError("--seed: chooses a sample, and without --quick everything is read; give both or neither.")
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
    ``identical_shards``, ``inject_missing_state``, ``deepspeed``). Raises the error of a manifest that is not there
    or cannot be read, and of a source that cannot be converted.
    """
    # numpy is imported with these, and neither --help nor another verb waits for it.
    from deepspeed_affine.commands.verify_manifest import Settings, verify_alone
    from deepspeed_affine.commands.verify_source import verify_against

    path, settings = absolute(folder), Settings(workers, progress, quick, seed)
    if against is None:
        return verify_alone(path, Manifest.read(path), settings)
    if not is_folder(path):
        raise CheckpointFormatError(
            f"{path}: is no folder; expected a universal checkpoint. Check the path.", file=path
        )
    manifest = Manifest.read(path) if is_file(join(path, MANIFEST_NAME)) else None
    choices = _choices(manifest, options or {})
    return verify_against(path, absolute(against), manifest, choices, settings, source_crc=source_crc)


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
        ordered = sorted(findings, key=lambda finding: (finding.file, finding.kind, finding.detail))
        kind = "" if findings is different else "cannot tell"
        lines += align([[_shown(finding.file), kind or finding.kind, finding.describe()] for finding in ordered[:most]])
        if most is not None and len(ordered) > most:
            lines.append(f"  and {len(ordered) - most} more; --all shows them")
    if outcome.sampled is not None:
        lines += outcome.sampled.describe()
    return lines + [f"note: {line}" for line in outcome.notes]


def _shown(path: str) -> str:
    """A name from a folder, without what a terminal would take for a command."""
    return path if path.isprintable() else repr(path)
