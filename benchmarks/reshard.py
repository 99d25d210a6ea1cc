"""Wall time, memory and bytes written of resharding one checkpoint, beside `cp -r` of it and DeepSpeed's converter.

A ZeRO-1 checkpoint of four data-parallel ranks becomes one of three, and one of ZeRO-3 on two. DeepSpeed has no command
that does this: its way is to convert (timed here) and then to load and save again in as many processes as the new
topology has. All run in turn, several times; medians and their ratios are printed side by side. Everything ends on the
disk: ours syncs what it writes, the others are followed by `sync -f`.

    python benchmarks/reshard.py --gigabytes 1 --runs 5
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from convert import BYTES_PER_PARAM, Measured, measure
from load import SAVED_BY, generate, read_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="checkpoint size, about: whole layers of 0.6 GB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to work; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source = Path(folder) / "global_step1"
        source.mkdir()
        generate(source, int(args.gigabytes * 1e9 / BYTES_PER_PARAM * 1.28))
        size = sum(file.stat().st_size for file in source.iterdir())
        print(f"checkpoint: ZeRO-1 of {SAVED_BY} ranks, {size / 1e9:.2f} GB in {len(list(source.iterdir()))} files")
        report(source, Path(folder), args.runs)


def report(source: Path, folder: Path, runs: int) -> None:
    made = folder / "made" / "global_step1"
    toolbox = [sys.executable, "-c", "import sys; from deepspeed_affine.cli import ds_affine as m; sys.exit(m())"]
    ours = [*toolbox, "reshard", "--input_folder", str(source), "--output_folder", str(made)]
    stock = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(source)]
    stock += ["--output_folder", str(made), "--num_extract_workers", "2", "--num_merge_workers", "2"]
    sync = ["sync", "-f", str(folder)]
    contenders: dict[str, list[list[str]]] = {
        "reshard --dp 3": [[*ours, "--dp", "3"]],
        "reshard --dp 2 --zero-stage 3": [[*ours, "--dp", "2", "--zero-stage", "3"]],
        "cp -r, then sync -f": [["cp", "-r", str(source), str(made)], sync],
        "DeepSpeed's converter, then sync -f": [[*stock, "--inject_missing_state"], sync],
    }
    results: dict[str, list[Measured]] = {name: [] for name in contenders}
    sizes: dict[str, int] = {}
    for run in range(runs + 1):
        for name, commands in contenders.items():
            shutil.rmtree(made.parent, ignore_errors=True)
            made.parent.mkdir()
            subprocess.run(sync, check=True)
            read_once(source)
            measured = measure(commands, folder)
            sizes[name] = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
            if run:  # the first round compiles and caches what the later ones find
                results[name].append(measured)
    base = statistics.median(item.seconds for item in results["reshard --dp 3"])
    print(f"medians of {runs} interleaved runs")
    print(f"{'':37}{'seconds':>9}{'x first':>9}{'peak RssAnon+Shmem':>21}{'bytes written':>15}{'/ output':>10}")
    for name, found in results.items():
        seconds = statistics.median(item.seconds for item in found)
        written = statistics.median(item.written_bytes for item in found)
        print(
            f"{name:37}{seconds:9.2f}{seconds / base:9.2f}{max(item.peak_bytes for item in found) / 1e6:18.0f} MB"
            f"{written / 1e9:12.2f} GB{written / sizes[name]:10.3f}"
        )


if __name__ == "__main__":
    main()
