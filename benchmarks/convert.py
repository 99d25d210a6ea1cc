"""Wall time, memory and bytes written of converting one checkpoint: DeepSpeed's converter, ours, and `cp -r`.

All of them, and `ds_affine verify --against`, run in turn on the same generated checkpoint, several times; medians and
their ratios are printed side by side. Memory is the peak of RssAnon + RssShmem summed over every process of the run,
sampled every 10 ms; bytes written are what the kernel accounts to the processes, temporary files included.

    python benchmarks/convert.py --gigabytes 3.2 --stage 1 --runs 5
    python benchmarks/convert.py --gigabytes 3.2 --stage 3 --runs 5
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

HIDDEN = 2048
BYTES_PER_PARAM = 18  # 2 for the bf16 weight, and fp32 master and two moments, both read and kept in the output

COUNT_WRITES = """
import subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
counted = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
open(sys.argv[1], "w").write(counted["write_bytes"])
sys.exit(code)
"""


@dataclass(frozen=True)
class Measured:
    seconds: float
    peak_bytes: int
    written_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="checkpoint size, about: whole layers of 0.6 GB")
    parser.add_argument("--stage", type=int, choices=(1, 3), default=1, help="1: ZeRO-1 with TP 2; 3: ZeRO-3 with DP 2")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="workers of each of DeepSpeed's two phases, and of ours")
    parser.add_argument("--folder", default=None, help="where to work; default: a temporary folder")
    args = parser.parse_args()
    if args.folder is not None and not Path(args.folder).is_dir():
        parser.error(f"--folder {args.folder}: no such folder")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source = Path(folder) / "global_step1"
        source.mkdir()
        (generate_zero1 if args.stage == 1 else generate_zero3)(
            source, int(args.gigabytes * 1e9 / BYTES_PER_PARAM * 1.28)
        )
        size = sum(file.stat().st_size for file in source.iterdir())
        print(f"checkpoint: ZeRO-{args.stage}, {size / 1e9:.2f} GB in {len(list(source.iterdir()))} files")
        report(source, Path(folder), args)


def report(source: Path, folder: Path, args: argparse.Namespace) -> None:
    output = folder / "universal"
    options = ["--input_folder", str(source), "--output_folder", str(output)]
    workers = ["--num_extract_workers", str(args.workers), "--num_merge_workers", str(args.workers)]
    stock = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *options, *workers, "--inject_missing_state"]
    ours = [sys.executable, "-c", "import sys; from deepspeed_affine.cli import ds_to_universal as m; sys.exit(m())"]
    ours += ["--affine", *options, "--workers", str(args.workers), "--inject_missing_state"]
    fast = [*ours, "--no-fsync", "--no-source-crc"]
    sync = ["sync", "-f", str(folder)]
    copied = folder / "copied"
    copy = ["cp", "-r", str(output), str(copied)]
    toolbox = [sys.executable, "-c", "import sys; from deepspeed_affine.cli import ds_affine as m; sys.exit(m())"]
    proof = [*toolbox, "verify", str(output), "--against", str(source), "--workers", str(args.workers)]
    contenders: list[tuple[str, list[list[str]], Path]] = [
        ("DeepSpeed, then sync -f", [stock, sync], output),
        ("DeepSpeed, no sync", [stock], output),
        ("ours, neither", [fast], output),
        ("ours, CRC and fsync", [ours], output),
        ("verify --against", [proof], source),
        ("cp -r, then sync -f", [copy, sync], copied),
        ("cp -r, no sync", [copy], copied),
    ]
    results: dict[str, list[Measured]] = {name: [] for name, _, _ in contenders}
    for run in range(args.runs + 1):
        for name, commands, made in contenders:
            if made == output:
                shutil.rmtree(output, ignore_errors=True)
            shutil.rmtree(copied, ignore_errors=True)
            subprocess.run(sync, check=True)
            measured = measure(commands, folder)
            if run:  # the first round warms the page cache
                results[name].append(measured)
    base = statistics.median(item.seconds for item in results["ours, CRC and fsync"])
    out_size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    mid = {name: statistics.median(item.seconds for item in found) for name, found in results.items()}
    print(f"output: {out_size / 1e9:.2f} GB; medians of {args.runs} interleaved runs, {args.workers} workers")
    print(f"{'':26}{'seconds':>9}{'x ours':>9}{'peak RssAnon+Shmem':>21}{'bytes written':>15}{'/ output':>10}")
    for name, found in results.items():
        seconds = statistics.median(item.seconds for item in found)
        peak = max(item.peak_bytes for item in found)
        written = statistics.median(item.written_bytes for item in found)
        print(
            f"{name:26}{seconds:9.2f}{seconds / base:9.2f}{peak / 1e6:18.0f} MB{written / 1e9:12.2f} GB"
            f"{written / out_size:10.3f}"
        )
    for what, of, to in (
        (
            "DeepSpeed and sync take, of a checked and durable conversion",
            "DeepSpeed, then sync -f",
            "ours, CRC and fsync",
        ),
        ("DeepSpeed takes, of a conversion with neither", "DeepSpeed, no sync", "ours, neither"),
        ("a conversion with both takes, of cp -r and sync", "ours, CRC and fsync", "cp -r, then sync -f"),
        ("a conversion with neither takes, of cp -r", "ours, neither", "cp -r, no sync"),
        ("verify --against takes, of a conversion with both", "verify --against", "ours, CRC and fsync"),
    ):
        print(f"{what}: {mid[of] / mid[to]:.2f} times")


def measure(commands: list[list[str]], folder: Path) -> Measured:
    counted = folder / "written"
    peak = 0
    written = 0
    started = time.perf_counter()
    for command in commands:
        process = subprocess.Popen(
            [sys.executable, "-c", COUNT_WRITES, str(counted), *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
        )
        stop = threading.Event()
        peaks: list[int] = []
        watcher = threading.Thread(target=watch, args=(process.pid, stop, peaks))
        watcher.start()
        _, errors = process.communicate()
        stop.set()
        watcher.join()
        if process.returncode:
            sys.exit(f"{command[:4]} failed:\n{errors.decode()[-2000:]}")
        peak = max(peak, *peaks, 0)
        written += int(counted.read_text())
    return Measured(time.perf_counter() - started, peak, written)


def watch(pid: int, stop: threading.Event, peaks: list[int]) -> None:
    """Append to ``peaks`` the largest RssAnon + RssShmem of all processes below ``pid``, in bytes."""
    peak = 0
    while not stop.wait(0.01):
        peak = max(peak, sum(anonymous(child) for child in below(pid)))
    peaks.append(peak)


def below(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in file.read().split():
                    found += [int(child), *below(int(child))]
    except OSError:
        pass
    return found


def anonymous(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = [line for line in file if line.startswith(("RssAnon", "RssShmem"))]
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines)


def shapes(params: int, tp: int) -> OrderedDict[str, torch.Size]:
    """Shard shapes of a stack of attention and MLP weights with about ``params`` elements on ``tp`` ranks."""
    result: OrderedDict[str, torch.Size] = OrderedDict()
    held = 0
    layer = 0
    while held * tp < params:
        for name, shape in (
            ("query.weight", (HIDDEN // tp, HIDDEN)),
            ("dense.weight", (HIDDEN, HIDDEN // tp)),
            ("up.weight", (4 * HIDDEN // tp, HIDDEN)),
            ("down.weight", (HIDDEN, 4 * HIDDEN // tp)),
        ):
            result[f"layers.{layer}.{name}"] = torch.Size(shape)
            held += shape[0] * shape[1]
        result[f"layers.{layer}.norm.weight"] = torch.Size((HIDDEN,))
        held += HIDDEN
        layer += 1
    return result


def model_state(shards: OrderedDict[str, torch.Size], tp: int, module: OrderedDict[str, torch.Tensor]) -> dict:
    return {
        "module": module,
        "param_shapes": [shards],
        "buffer_names": [],
        "shared_params": {},
        "frozen_param_shapes": None,
        "iteration": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tp},
        "ds_config": {},
        "universal_checkpoint_info": {
            "universal_checkpoint_version": 0.2,
            "parameter_with_row_parallelism_patterns": [r".*\.(dense|down)\.weight"] if tp > 1 else [],
            "tp_replicated_parameter_patterns": [r".*\.norm\.weight"] if tp > 1 else [],
        },
    }


def generate_zero1(folder: Path, params: int) -> None:
    from deepspeed.utils.tensor_fragment import fragment_address

    shards = shapes(params, 2)
    numel = sum(shape.numel() for shape in shards.values())
    for rank in range(2):
        torch.manual_seed(rank)
        states = {"fp32": torch.randn(numel), "exp_avg": torch.randn(numel), "exp_avg_sq": torch.rand(numel)}
        slices: OrderedDict[str, fragment_address] = OrderedDict()
        module: OrderedDict[str, torch.Tensor] = OrderedDict()
        start = 0
        for name, shape in shards.items():
            if "norm" in name:
                for state in states.values():
                    state[start : start + shape.numel()] = 0.5
            slices[name] = fragment_address(numel=shape.numel(), start=start)
            module[name] = states["fp32"][start : start + shape.numel()].bfloat16().view(shape)
            start += shape.numel()
        torch.save(model_state(shards, 2, module), folder / f"mp_rank_{rank:02d}_model_states.pt")
        optimizer = {
            "zero_stage": 1,
            "group_paddings": [0],
            "partition_count": [1],
            "base_optimizer_state": {
                "state": {
                    0: {"step": torch.tensor(1.0), "exp_avg": states["exp_avg"], "exp_avg_sq": states["exp_avg_sq"]}
                },
                "param_groups": [{"lr": 1e-3, "params": [0]}],
            },
            "single_partition_of_fp32_groups": [states["fp32"]],
            "param_slice_mappings": [slices],
            "ds_version": "0.19.8",
        }
        name = f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}, folder / name)


def generate_zero3(folder: Path, params: int) -> None:
    shards = shapes(params, 1)
    numel = sum(-(-shape.numel() // 2) for shape in shards.values())
    for rank in range(2):
        torch.manual_seed(rank)
        state = {"step": torch.tensor(1.0), "exp_avg": torch.randn(numel), "exp_avg_sq": torch.rand(numel)}
        module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in shards)
        torch.save(model_state(shards, 1, module), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        optimizer = {
            "zero_stage": 3,
            "partition_count": 2,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
            "fp32_flat_groups": [torch.randn(numel)],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}, folder / name)


if __name__ == "__main__":
    main()
