"""``ds_affine demo``: train a tiny model, convert its checkpoint, and show that DeepSpeed's converter agrees."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deepspeed_affine.commands.parity import COULD_NOT, OURS, STOCK, format_table, run_parity
from deepspeed_affine.errors import AffineError, PolicyError

__all__ = ["add_arguments", "run", "train"]

RANKS = 2
STEPS = 5
TIMEOUT = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ds_affine demo``."""
    parser.add_argument("--output", default="ds_affine_demo", help="new folder for everything (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train, convert, compare and print; returns 0 when both converters agree, 1 when not, 2 when one failed."""
    output = Path(os.path.abspath(args.output))
    if output.exists() and any(output.iterdir()):
        raise PolicyError(f"{output}: exists and is not empty; give --output a new folder.")
    output.mkdir(parents=True, exist_ok=True)
    print(
        f"Training a tiny transformer on the CPU: {RANKS} processes, AutoTP {RANKS}, 3 key/value heads ...", flush=True
    )
    began = time.monotonic()
    said = train(output / "checkpoint")
    checkpoint = output / "checkpoint" / f"global_step{STEPS}"
    print(f"  {said} ({time.monotonic() - began:.0f} s)")
    print("Converting with DeepSpeed's converter and with ours ...", flush=True)
    work = output if _takes(output) else _elsewhere()
    result = run_parity(checkpoint, work)
    print(format_table(result))
    print(f"checkpoint:                 {checkpoint}")
    if result.exit_code != COULD_NOT:
        print(f"universal, by us:           {work / OURS / 'universal'}")
        print(f"universal, by DeepSpeed:    {work / STOCK / 'universal'}")
        print("Convert your own:           ds_to_universal --affine --input_folder ... --output_folder ...")
    return result.exit_code


def train(output: Path) -> str:
    """A checkpoint of the demo's model is under ``output``; returns what rank 0 printed last.

    Raises AffineError with the end of a rank's log when training fails or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="ds_affine_ranks_") as meeting:
        logs = [Path(meeting, f"rank{rank}.log") for rank in range(RANKS)]
        ranks = [_start(rank, Path(meeting, "store"), output, log) for rank, log in enumerate(logs)]
        try:
            _wait(ranks)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        said = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    # A rank that was killed here only waited for one that failed by itself.
    failed = sorted((process.returncode < 0, rank) for rank, process in enumerate(ranks) if process.returncode)
    if failed:
        rank = failed[0][1]
        end = "\n".join(said[rank].strip().splitlines()[-15:])
        raise AffineError(
            f"demo: rank {rank} of the training run ended with exit code {ranks[rank].returncode}; expected 0. The end "
            f"of its log:\n{end}",
            rank=rank,
        )
    return said[0].strip().splitlines()[-1]


def _start(rank: int, store: Path, output: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "deepspeed_affine.hooks.demo_train", "--rank", str(rank), "--world", str(RANKS)]
    command += ["--store", str(store), "--output", str(output), "--steps", str(STEPS)]
    # The demo trains on the CPU wherever it runs, and one thread a rank is faster than two that fight.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as sink:
        return subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Return when all ranks ended, or one failed (the others then wait for it in a collective), or time is up."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if all(code is not None for code in codes) or any(codes):
            return
        time.sleep(0.1)


def _takes(folder: Path) -> bool:
    from deepspeed_affine.hooks.stock import is_plain_path

    return is_plain_path(folder)


def _elsewhere() -> Path:
    from deepspeed_affine.hooks.stock import plain_workdir

    return Path(plain_workdir())
