"""An output compared with its own manifest: every file is there, is listed, and has the bytes that were written."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deepspeed_affine.commands.verify_findings import Finding, Outcome, Sampled
from deepspeed_affine.errors import AffineError
from deepspeed_affine.execute.progress import Progress
from deepspeed_affine.execute.reread import sum_files
from deepspeed_affine.execute.sampling import group_evenly
from deepspeed_affine.storage.damage import find_damage
from deepspeed_affine.storage.files import ByteReader, join
from deepspeed_affine.storage.listing import list_files
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest
from deepspeed_affine.storage.pt_reader import load_pickle

__all__ = [
    "Name",
    "Names",
    "Settings",
    "compare_names",
    "compare_sizes",
    "compare_spelling",
    "compare_sums",
    "damaged_file",
    "holds",
    "manifest_names",
    "verify_alone",
    "without_file",
]

Name = tuple[str | None, str | None]
"""A parameter and a state, or nothing of either."""

Names = Mapping[str, Name]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a verification runs: threads, whether a bar is shown, and whether only a sample of the data is looked at.

    ``least`` is what a sample holds at least, in bytes (of blocks: on average); None for the usual.
    """

    workers: int = 4
    progress: bool = False
    quick: bool = False
    seed: int | None = None
    least: int | None = None


def verify_alone(folder: str, manifest: Manifest, settings: Settings) -> Outcome:
    """Every file of ``folder`` compared with what ``manifest`` says of it; of each unlike one, what is damaged."""
    outcome = Outcome(folder)
    if not manifest.source_checked:
        outcome.notes.append(
            "the conversion did not compare its source with the checksums its files record (--no-source-crc); "
            "--against SOURCE does"
        )
    names = manifest_names(manifest)
    listing = list_files(folder)
    outcome.findings += compare_names(names, listing, "listed in the manifest")
    outcome.findings += compare_sizes(manifest, listing)
    sizes = {path: file.nbytes for path, file in manifest.files.items() if listing.get(path) == file.nbytes}
    chosen = dict(sizes)
    if settings.quick:
        paths = sorted(sizes)
        groups, sample = group_evenly([sizes[path] for path in paths], seed=settings.seed, least=settings.least)
        chosen = {paths[at]: sizes[paths[at]] for group in sorted(sample.pick()) for at in groups[group]}
        outcome.sampled = Sampled(
            sample, "group", sum(chosen.values()), sum(sizes.values()), files=(len(chosen), len(sizes))
        )
    with ByteReader() as reader:
        outcome.findings += compare_sums(folder, chosen, manifest, reader, settings)
        outcome.findings += compare_spelling(folder, manifest, reader)
    if settings.quick:
        unread = [path for path in sizes if path not in chosen]
        outcome.findings += _unreadable_archives(folder, unread, names, settings.workers)
    outcome.files, outcome.nbytes = len(names), sum(chosen.values())
    return outcome


def manifest_names(manifest: Manifest) -> Names:
    """Every file of an output, and which state of which parameter it holds, if it holds one."""
    return {path: (file.param, file.state) for path, file in manifest.files.items()}


def compare_names(names: Names, listing: Mapping[str, int | None], listed: str) -> list[Finding]:
    """Files that should be there and are not, and files that are there and should not be."""
    findings = []
    for path, name in names.items():
        if listing.get(path) is None:
            fact = "is no regular file" if path in listing else f"is {listed} and not there"
            findings.append(Finding("missing", path, fact + holds(name), *name))
    extra = [path for path in listing if path not in names and path != MANIFEST_NAME]
    return findings + [Finding("extra", path, f"is not {listed}") for path in extra]


def compare_sizes(manifest: Manifest, listing: Mapping[str, int | None]) -> list[Finding]:
    """Files that are not as long as they were when the manifest was written."""
    findings = []
    for path, file in manifest.files.items():
        found = listing.get(path)
        if found is not None and found != file.nbytes:
            fact = f"has {found} bytes and had {file.nbytes} when it was written"
            name = (file.param, file.state)
            findings.append(Finding("size", path, fact + holds(name), *name))
    return findings


def compare_sums(
    folder: str, sizes: Mapping[str, int], manifest: Manifest, reader: ByteReader, settings: Settings
) -> list[Finding]:
    """Those of the files, read whole, that are not what the manifest records: what is damaged in each."""
    findings = []
    with Progress(sum(sizes.values()), len(sizes), shown=settings.progress, what="verifying") as progress:
        sums = sum_files(sizes, folder, reader, settings.workers, advance=progress.advance)
    for path, crc in sums.items():
        file = manifest.files[path]
        name = (file.param, file.state)
        if isinstance(crc, AffineError):
            findings.append(Finding("unreadable", path, crc.message, *name, decided=False))
        elif crc != file.crc32:
            findings += damaged_file(folder, path, name)
    return findings


def compare_spelling(folder: str, manifest: Manifest, reader: ByteReader) -> list[Finding]:
    """A manifest that says what it should in other bytes than were written."""
    path, expected = join(folder, MANIFEST_NAME), manifest.to_bytes()
    if reader.size(path) == len(expected) and reader.read(path, 0, len(expected)) == expected:
        return []
    return [Finding("damaged", MANIFEST_NAME, "is not spelled as it was written, though it says the same")]


def damaged_file(folder: str, path: str, name: Name) -> list[Finding]:
    """What is damaged in a file that has changed since it was written."""
    return [
        Finding("damaged", path, f"{damage.describe()}{holds(name)}", *name, place=damage.place)
        for damage in find_damage(join(folder, path))
    ]


def holds(name: Name) -> str:
    """A tail for a sentence about a file: whose state it holds."""
    param, state = name
    return "" if param is None else f"; parameter {param!r}, state {state!r}"


def without_file(fault: AffineError, path: str) -> str:
    """What a fault says, without the path of the file it says it of."""
    return fault.message.removeprefix(f"{path}: ")


def _unreadable_archives(folder: str, paths: list[str], names: Names, workers: int) -> list[Finding]:
    """Those of the files whose zip directory, headers or pickle are damaged; their tensors are not looked at."""

    def check(path: str) -> list[Finding]:
        try:
            load_pickle(join(folder, path))
        except AffineError as fault:
            said = without_file(fault, join(folder, path)) + holds(names[path])
            return [Finding("damaged", path, said, *names[path])]
        return []

    with ThreadPoolExecutor(workers) as pool:
        return [finding for found in pool.map(check, paths) for finding in found]
