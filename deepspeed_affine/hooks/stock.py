"""The installed DeepSpeed's own converter: run as it is, called by piece, and asked what it is."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepspeed_affine.errors import CheckpointFormatError, PolicyError

__all__ = [
    "StockRun",
    "convert",
    "hand_over",
    "installed_version",
    "is_plain_path",
    "merge_tp_slices",
    "plain_folder",
    "plain_workdir",
    "takes_rank_shapes",
]

MODULE = "deepspeed.checkpoint.ds_to_universal"
_PLAIN_PATH = re.compile(r"[\w/.-]+", re.ASCII)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)\b")


@dataclass(frozen=True, slots=True)
class StockRun:
    """One finished run of DeepSpeed's converter: how it ended, what it said and where its output is."""

    exit_code: int
    output_folder: str
    log: str
    seconds: float

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise PolicyError(f"a run cannot take {self.seconds} s; expected a duration of at least 0.")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def message(self) -> str:
        """The exception the converter ended with, as its traceback printed it; empty after success."""
        if self.ok:
            return ""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        raised = [line for line in lines if _EXCEPTION.match(line)]
        if raised:
            return raised[-1]
        return lines[-1] if lines else f"exit code {self.exit_code} and no output"


def installed_version() -> str:
    """The version of the DeepSpeed that ``import deepspeed`` would give, found without importing it."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        raise PolicyError(
            "deepspeed: not installed, and its own converter is needed here. Install it: pip install deepspeed."
        ) from None


def hand_over(arguments: Sequence[str]) -> int:
    """Run DeepSpeed's own ``ds_to_universal`` with ``arguments``, in this process, and return its exit code.

    Its exceptions and its exit on wrong options pass through unchanged: whoever asked for DeepSpeed's command
    gets DeepSpeed's command.
    """
    installed_version()
    from deepspeed.checkpoint import ds_to_universal as stock

    before = sys.argv
    sys.argv = [before[0] if before else "ds_to_universal", *arguments]
    try:
        stock.main(stock.parse_arguments())
    finally:
        sys.argv = before
    return 0


def convert(
    input_folder: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    inject_missing_state: bool = False,
    workers: int = 1,
    timeout: float | None = None,
) -> StockRun:
    """Run DeepSpeed's converter in a process of its own and return how it ended; a failure is not raised.

    DeepSpeed walks into nested folders and reads the output path as a regular expression, so the input should
    come from ``plain_folder`` and the output path may hold only letters, digits, ``_``, ``-``, ``.`` and ``/``.
    """
    source, target = os.path.abspath(input_folder), os.path.abspath(output_folder)
    if not is_plain_path(target):
        raise PolicyError(
            f"{target}: DeepSpeed's converter reads its output path as a regular expression; expected a path of "
            "letters, digits, '_', '-', '.' and '/'. Choose another working folder."
        )
    command = [sys.executable, "-m", MODULE, "--input_folder", source, "--output_folder", target]
    command += ["--num_extract_workers", str(workers), "--num_merge_workers", str(workers)]
    command += [] if strict else ["--no_strict"]
    command += ["--inject_missing_state"] if inject_missing_state else []
    began = time.monotonic()
    try:
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            # The converter moves bytes on the CPU; a GPU must not be initialised for it.
            env={**os.environ, "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")},
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else str(late.stdout or "")
        return StockRun(124, target, f"{said}\nTimeoutError: no result after {timeout} s", time.monotonic() - began)
    return StockRun(ended.returncode, target, ended.stdout, time.monotonic() - began)


def plain_folder(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> tuple[str, ...]:
    """Make ``target`` a folder of links to the files of ``source`` itself; return the nested folders left out."""
    origin, copy = Path(os.path.abspath(source)), Path(target)
    if not origin.is_dir():
        message = f"{origin}: is not a folder; expected a DeepSpeed checkpoint folder."
        raise CheckpointFormatError(message, file=str(origin))
    copy.mkdir(parents=True)
    nested = []
    for entry in sorted(origin.iterdir(), key=lambda path: path.name):
        if entry.is_dir():
            nested.append(entry.name)
        else:
            (copy / entry.name).symlink_to(entry)
    return tuple(nested)


def is_plain_path(path: str | os.PathLike[str]) -> bool:
    """Whether DeepSpeed's converter, which reads its output path as a regular expression, can take ``path``."""
    return _PLAIN_PATH.fullmatch(os.path.abspath(path)) is not None


def plain_workdir() -> str:
    """A new temporary folder whose path DeepSpeed's converter can take as an output path."""
    made = tempfile.mkdtemp(prefix="ds_affine_")
    if is_plain_path(made):
        return made
    os.rmdir(made)
    return tempfile.mkdtemp(prefix="ds_affine_", dir="/tmp")


class _Checkpoint:
    """What ``merge_tp_slices`` of before 0.19.4 asks its checkpoint argument for."""

    def __init__(self, uc_info: Mapping[str, Any]) -> None:
        self._uc_info = uc_info

    def get_checkpoint_info(self, key: str) -> Mapping[str, Any]:
        return self._uc_info


def takes_rank_shapes() -> bool:
    """Whether the installed ``merge_tp_slices`` takes one shape per rank (from 0.19.4) or one for all."""
    from deepspeed.checkpoint import ds_to_universal as stock

    return "uc_info" in inspect.signature(stock.merge_tp_slices).parameters


def merge_tp_slices(
    uc_info: Mapping[str, Any],
    output_folder: str | os.PathLike[str],
    slice_folder: str | os.PathLike[str],
    name: str,
    shapes: Sequence[Sequence[int]],
) -> set[str]:
    """Merge the slices of one parameter with DeepSpeed's own function; return the patterns it did not use.

    ``shapes`` lists every rank's shard shape. Versions that take one shape for all ranks are refused unequal ones.
    """
    from deepspeed.checkpoint import ds_to_universal as stock

    rank_shapes = [list(shape) for shape in shapes]
    checkpoint: Any = uc_info
    merged_shape: Any = rank_shapes
    if not takes_rank_shapes():
        if any(shape != rank_shapes[0] for shape in rank_shapes):
            raise PolicyError(
                f"parameter {name!r}: DeepSpeed {installed_version()} merges shards of one shape only, and these "
                f"differ: {rank_shapes}. Use DeepSpeed 0.19.4 or later.",
                param=name,
            )
        checkpoint, merged_shape = _Checkpoint(uc_info), rank_shapes[0]
    folders = str(output_folder), str(slice_folder)
    return set(stock.merge_tp_slices(checkpoint, *folders, len(rank_shapes), (name, merged_shape)))
