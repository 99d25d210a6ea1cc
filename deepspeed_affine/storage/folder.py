"""A DeepSpeed checkpoint folder as a catalogue: which files there are, and which are missing, by name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from deepspeed_affine.errors import CheckpointFormatError, Faults
from deepspeed_affine.storage.files import FolderEntry, absolute, catalogue, is_folder, join, list_folder, read_small
from deepspeed_affine.storage.pt_reader import load_pickle, preload
from deepspeed_affine.storage.sequence_ranks import without_sequence_ranks

__all__ = [
    "CheckpointFile",
    "CheckpointFolder",
    "FileKind",
    "FolderFaults",
    "parse_name",
    "scan_folder",
    "survey_folder",
]

FileKind = Literal["model", "zero_model", "zero_optim", "layer", "expert", "expert_optim"]

# Applied to the names of files found, never built from one.
_GRAMMAR: tuple[tuple[FileKind, re.Pattern[str]], ...] = (
    ("model", re.compile(r"mp_rank_(?P<mp>[0-9]+)_model_states\.pt", re.ASCII)),
    (
        "zero_model",
        re.compile(r"(?P<prefix>bf16_|fp16_|)zero_pp_rank_(?P<dp>[0-9]+)_mp_rank_(?P<mp>[0-9]+)_model_states\.pt"),
    ),
    (
        "zero_optim",
        # Without its last underscore in files of early releases, which DeepSpeed still loads.
        re.compile(r"(?P<prefix>bf16_|fp16_|)zero_pp_rank_(?P<dp>[0-9]+)_mp_rank_(?P<mp>[0-9]+)_?optim_states\.pt"),
    ),
    ("layer", re.compile(r"layer_(?P<layer>[0-9]+)(?:-model_(?P<mp>[0-9]+))?-model_states\.pt")),
    (
        "expert",
        re.compile(r"(?:layer_(?P<layer>[0-9]+)_)?expert_(?P<expert>[0-9]+)_mp_rank_(?P<mp>[0-9]+)_model_states\.pt"),
    ),
    ("expert_optim", re.compile(r"expp_rank_(?P<dp>[0-9]+)_mp_rank_(?P<mp>[0-9]+)_optim_states\.pt")),
)
_OFFLOADED = "offloaded_tensors"
_GRIDS: tuple[FileKind, ...] = ("zero_optim", "zero_model", "model")
_MOST_HOLES = 1000
_WORLD_KEYS = ("dp_world_size", "mp_world_size")


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file and what its name says of it. ``dp`` is the data-parallel (or expert-parallel) rank, ``mp`` the model's.

    Numbers the name does not carry are None.
    """

    kind: FileKind
    name: str
    path: str
    size: int
    prefix: str = ""
    dp: int | None = None
    mp: int | None = None
    layer: int | None = None
    expert: int | None = None

    @property
    def place(self) -> tuple[str, int, int, int, int]:
        """What the file is for; two files of one place contradict each other. Sorts in numeric order."""
        numbers = (self.layer, self.expert, self.dp, self.mp)
        layer, expert, dp, mp = (-1 if number is None else number for number in numbers)
        return (self.kind, layer, expert, dp, mp)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The files of one checkpoint folder in numeric order, complete for the ranks the checkpoint says it has.

    ``dp_degree`` and ``mp_degree`` count the ranks of the grid of ZeRO files (of the model files where there are
    none, with ``dp_degree`` 0). ``offloaded`` lists the folders of optimizer state DeepSpeed copied from NVMe.
    """

    path: str
    files: tuple[CheckpointFile, ...]
    dp_degree: int
    mp_degree: int
    offloaded: tuple[str, ...]
    other_names: tuple[str, ...]
    keeper: object = field(default=None, repr=False, compare=False)
    """What keeps the metadata read from a URL's files, as long as this object lives."""

    def of_kind(self, kind: FileKind) -> tuple[CheckpointFile, ...]:
        return tuple(file for file in self.files if file.kind == kind)

    @property
    def model_files(self) -> tuple[CheckpointFile, ...]:
        return self.of_kind("model")

    @property
    def zero_model_files(self) -> tuple[CheckpointFile, ...]:
        return self.of_kind("zero_model")

    @property
    def optim_files(self) -> tuple[CheckpointFile, ...]:
        return self.of_kind("zero_optim")

    @property
    def layer_files(self) -> tuple[CheckpointFile, ...]:
        return self.of_kind("layer")

    @property
    def expert_files(self) -> tuple[CheckpointFile, ...]:
        return self.of_kind("expert")

    @property
    def expert_optim_files(self) -> tuple[CheckpointFile, ...]:
        return self.of_kind("expert_optim")

    def find(self, kind: FileKind, *, dp: int | None = None, mp: int | None = None) -> CheckpointFile:
        """Return the file of that kind and rank; raises CheckpointFormatError when the folder has none."""
        for file in self.files:
            if file.kind == kind and file.dp == dp and file.mp == mp:
                return file
        raise CheckpointFormatError(
            f"{self.path}: has no {kind} file for data-parallel rank {dp}, model-parallel rank {mp}; expected one. "
            "Copy it from where the checkpoint was saved.",
            file=self.path,
        )


class FolderFaults(Faults):
    """What is wrong with a folder, one fault a file; ``missing`` are the paths of those that should be there."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: list[str] = []

    def add_missing(self, path: str, reason: str) -> None:
        self.missing.append(path)
        self.add(_fault(path, f"is missing; expected, because {reason}. Copy it from where it was saved"))


def parse_name(name: str, path: str = "", size: int = 0) -> CheckpointFile | None:
    """Return what a file's name says, or None for a name DeepSpeed gives to no checkpoint file."""
    for kind, pattern in _GRAMMAR:
        match = pattern.fullmatch(name)
        if match is not None:
            groups = match.groupdict()
            prefix = groups.pop("prefix", None) or ""
            numbers = {key: int(digits) for key, digits in groups.items() if digits is not None}
            return CheckpointFile(kind, name, path, size, prefix, **numbers)
    return None


def scan_folder(path: str | os.PathLike[str]) -> CheckpointFolder:
    """Return the catalogue of the checkpoint folder at ``path``, from names and the metadata of one file.

    Only the folder's own files count. Raises one CheckpointFormatError naming every file that is missing, empty,
    superfluous or there twice; for a folder that is no checkpoint it says which folder was probably meant.
    """
    folder, faults = survey_folder(path)
    faults.raise_if_any()
    return folder


def survey_folder(path: str | os.PathLike[str]) -> tuple[CheckpointFolder, FolderFaults]:
    """Return the catalogue of a folder that may have holes, and all that ``scan_folder`` would refuse in it.

    Raises CheckpointFormatError only for a folder without one checkpoint file.
    """
    folder = absolute(path)
    entries, keeper = _list(folder)
    faults = FolderFaults()
    files: list[CheckpointFile] = []
    irregular: set[str] = set()
    others: list[str] = []
    for entry in entries:
        parsed = parse_name(entry.name)
        if parsed is None:
            others.append(entry.name)
            continue
        file_path = join(folder, entry.name)
        if entry.size is None:
            what = "a folder" if entry.is_folder else "a link to nothing, or no regular file"
            faults.add(_fault(file_path, f"is {what}; expected a checkpoint file. Copy the file itself"))
            irregular.add(file_path)
        elif entry.size == 0:
            faults.add(_fault(file_path, "is empty; expected a checkpoint file. Copy it again"))
        files.append(parse_name(entry.name, file_path, entry.size or 0) or parsed)
    if len(files) == len(irregular):
        faults.raise_if_any()
        raise _not_a_checkpoint(folder, entries)
    files.sort(key=lambda file: file.place)
    preload(file.path for file in files if file.path not in irregular)
    _check_contradictions(folder, files, faults)
    world = _stated_world(files, faults)
    without_sequence_ranks(files, *world)
    dp_degree, mp_degree = _check_grids(folder, files, world, faults)
    files = [file for file in files if file.path not in irregular]
    offloaded = _offloaded(folder, entries)
    others.sort()
    found = CheckpointFolder(folder, tuple(files), dp_degree, mp_degree, offloaded, tuple(others), keeper)
    return found, faults


def _fault(subject: str, fact: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{subject}: {fact}.", file=subject)


def _list(folder: str) -> tuple[list[FolderEntry], object]:
    try:
        return catalogue(folder)
    except NotADirectoryError:
        raise _fault(folder, "is a file; expected a checkpoint folder. Pass the folder it lies in") from None
    except OSError as exc:
        raise _fault(
            folder, f"cannot be listed ({exc.strerror}); expected a checkpoint folder. Check the path"
        ) from exc


def _offloaded(folder: str, entries: Sequence[FolderEntry]) -> tuple[str, ...]:
    if any(entry.name == _OFFLOADED and entry.is_folder for entry in entries):
        return tuple(inner.name for inner in list_folder(join(folder, _OFFLOADED)) if inner.is_folder)
    return ()


def _not_a_checkpoint(folder: str, entries: Sequence[FolderEntry]) -> CheckpointFormatError:
    expected = "expected files such as mp_rank_00_model_states.pt"
    names = {entry.name for entry in entries}
    if "latest" in names:
        try:
            tag = read_small(join(folder, "latest"), 4096).decode().strip()
        except (OSError, UnicodeDecodeError):
            tag = ""
        if tag and is_folder(join(folder, tag)):
            inner = join(folder, tag)
            return _fault(folder, f"holds checkpoints and is none itself; {expected}. Pass {inner!r}, its latest one")
    inside = [entry.name for entry in entries if entry.is_folder and _holds_checkpoint(join(folder, entry.name))]
    if inside:
        shown = ", ".join(repr(join(folder, name)) for name in inside[:5])
        more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
        return _fault(folder, f"has no checkpoint files of its own; {expected}. Pass one of {shown}{more}")
    if "zero" in names and is_folder(join(folder, "zero")):
        return _fault(folder, f"looks like a universal checkpoint; {expected}. Pass the folder it was converted from")
    return _fault(
        folder,
        f"has no checkpoint file among {len(entries)} entries; {expected}. Pass the folder save_checkpoint wrote",
    )


def _holds_checkpoint(path: str) -> bool:
    try:
        return any(parse_name(entry.name) is not None for entry in list_folder(path))
    except OSError:
        return False


def _check_contradictions(folder: str, files: list[CheckpointFile], faults: Faults) -> None:
    by_place: dict[tuple[object, ...], CheckpointFile] = {}
    for file in files:
        earlier = by_place.setdefault((*file.place, file.prefix), file)
        if earlier is not file:
            faults.add(
                _fault(file.path, f"is for the same rank as {earlier.name!r}; expected one of them. Remove the other")
            )
    for kind in ("zero_optim", "zero_model"):
        prefixes = sorted({file.prefix for file in files if file.kind == kind})
        if len(prefixes) > 1:
            firsts = [next(f.name for f in files if f.kind == kind and f.prefix == prefix) for prefix in prefixes]
            faults.add(
                _fault(folder, f"mixes two checkpoints: {' and '.join(firsts)}; expected one prefix. Separate them")
            )
    kinds = {file.kind for file in files}
    if {"model", "zero_model"} <= kinds:
        plain = next(file.name for file in files if file.kind == "model")
        zero = next(file.name for file in files if file.kind == "zero_model")
        faults.add(
            _fault(
                folder,
                f"mixes two checkpoints: {plain} is written by ZeRO 0 to 2 and {zero} by ZeRO 3; expected one of "
                "these kinds. Separate them",
            )
        )


def _stated_world(files: list[CheckpointFile], faults: Faults) -> tuple[int | None, int | None]:
    """Return the degrees the first model file states, so that ranks missing at the end are noticed too."""
    for file in files:
        if file.kind in ("model", "zero_model") and file.size:
            try:
                root = load_pickle(file.path).root
            except CheckpointFormatError as exc:
                faults.add(exc)
                continue
            values = [root.get(key) if isinstance(root, dict) else None for key in _WORLD_KEYS]
            dp, mp = (value if type(value) is int and value > 0 else None for value in values)
            return dp, mp
    return None, None


def _check_grids(
    folder: str, files: list[CheckpointFile], world: tuple[int | None, int | None], faults: FolderFaults
) -> tuple[int, int]:
    degrees: dict[FileKind, tuple[int, int]] = {}
    for kind in _GRIDS:
        grid = [file for file in files if file.kind == kind]
        if grid:
            degrees[kind] = _check_grid(folder, grid, world, faults)
    if "zero_optim" in degrees and not degrees.keys() & {"model", "zero_model"}:
        faults.add(
            _fault(
                folder,
                "has optimizer files and no model file; expected mp_rank_00_model_states.pt (ZeRO 1 and 2) or "
                "zero_pp_rank_0_mp_rank_00_model_states.pt (ZeRO 3). Copy them from where the checkpoint was saved",
            )
        )
    dp_degree = max((dp for dp, _ in degrees.values()), default=0)
    mp_degree = max((mp for _, mp in degrees.values()), default=1)
    for kind, (dp, mp) in degrees.items():
        if mp != mp_degree or dp not in (0, dp_degree):
            name = next(file.name for file in files if file.kind == kind)
            faults.add(
                _fault(
                    folder,
                    f"has files like {name} of {dp or 1} x {mp} ranks (data x model) and others of {dp_degree} x "
                    f"{mp_degree}; expected one grid. Copy the missing files",
                )
            )
    _check_layers(folder, files, faults)
    return dp_degree, mp_degree


def _check_grid(
    folder: str, grid: list[CheckpointFile], world: tuple[int | None, int | None], faults: FolderFaults
) -> tuple[int, int]:
    """Report the holes of a rank grid and the ranks beyond it; return its degrees (0 where names carry no dp rank)."""
    sample = grid[0]
    has_dp = sample.dp is not None
    dp_degree = (world[0] or 1 + max(file.dp or 0 for file in grid)) if has_dp else 1
    mp_degree = world[1] or 1 + max(file.mp or 0 for file in grid)
    shape = f"{dp_degree} x {mp_degree} ranks (data x model)" if has_dp else f"{mp_degree} ranks"
    stated = (world[0] if has_dp else None) or world[1]
    reason = f"{'the checkpoint states' if stated else 'its largest ranks imply'} {shape}"
    present = {(file.dp or 0, file.mp or 0) for file in grid}
    # Lazily: a damaged file may state, and a stray name may imply, any number of ranks.
    holes = ((dp, mp) for dp in range(dp_degree) for mp in range(mp_degree) if (dp, mp) not in present)
    for dp, mp in islice(holes, _MOST_HOLES):
        faults.add_missing(join(folder, _rank_name(sample, dp, mp)), reason)
    for file in grid:
        if (file.dp or 0) >= dp_degree or (file.mp or 0) >= mp_degree:
            faults.add(
                _fault(file.path, f"is left from another save: {reason}; expected only those. Move it elsewhere")
            )
    return (dp_degree if has_dp else 0, mp_degree)


def _rank_name(sample: CheckpointFile, dp: int, mp: int) -> str:
    suffix = "optim_states.pt" if sample.kind == "zero_optim" else "model_states.pt"
    if sample.dp is None:
        return f"mp_rank_{mp:02d}_{suffix}"
    return f"{sample.prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_{suffix}"


def _check_layers(folder: str, files: list[CheckpointFile], faults: FolderFaults) -> None:
    """Report holes among the model-parallel ranks of pipeline layers and among the experts of a layer.

    Layers need not be numbered without gaps (one without parameters has no file), and an expert need not have a
    file of every model-parallel rank (AutoEP folds these ranks into its own).
    """
    layers = [file for file in files if file.kind == "layer"]
    ranks = {file.mp for file in layers}
    missing = [
        f"layer_{layer:02d}{'' if mp is None else f'-model_{mp:02d}'}-model_states.pt"
        for layer in sorted({file.layer or 0 for file in layers})
        for mp in _and_below(ranks) - {file.mp for file in layers if file.layer == layer}
    ]
    experts = [file for file in files if file.kind == "expert"]
    for layer in {file.layer for file in experts}:
        own = {file.expert for file in experts if file.layer == layer}
        start = "" if layer is None else f"layer_{layer}_"
        mp = min(file.mp or 0 for file in experts if file.layer == layer)
        missing += [f"{start}expert_{expert}_mp_rank_{mp:02d}_model_states.pt" for expert in _and_below(own) - own]
    for name in sorted(missing):
        faults.add_missing(join(folder, name), "files of higher ranks exist")


def _and_below(numbers: set[int | None]) -> set[int | None]:
    """Return the numbers and, where they are numbers, every smaller one (up to a bound, should a name be absurd)."""
    found = set(numbers)
    if None not in numbers:
        found.update(range(min(_MOST_HOLES, max((number or 0 for number in numbers), default=0))))
    return found
