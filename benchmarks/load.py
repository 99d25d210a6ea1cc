"""Resuming two ranks from a checkpoint of four: straight from it, or converted first, by ours or by DeepSpeed.

One ZeRO-1 checkpoint is generated, and engines of two data-parallel ranks are built that have taken no step. What is
timed is from the checkpoint to the engines that hold it: `load_checkpoint` of the ordinary folder; our converter as a
command and `load_checkpoint` of its folder; DeepSpeed's converter and its `load_universal`. The three run in turn,
several times; medians are printed side by side. Bytes read are what the kernel accounts to the processes (converter and
both ranks, page cache included), and memory is the peak of RssAnon + RssShmem: of a converter with its workers, and of
one rank beyond what it had when its engine was built.

    python benchmarks/load.py --gigabytes 1 --runs 3
"""

from __future__ import annotations

import argparse
import json
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
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")

import torch
from convert import BYTES_PER_PARAM, anonymous, below, model_state, shapes

RANKS, SAVED_BY = 2, 4
WAYS = ("direct", "ours", "stock")
NAMES = {
    "direct": "direct load, nothing converted",
    "ours": "our conversion, then our load",
    "stock": "DeepSpeed's conversion and load",
}
COUNT_READS = """
import subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
counted = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
open(sys.argv[1], "w").write(counted["rchar"])
sys.exit(code)
"""


@dataclass(frozen=True)
class Measured:
    """One way once. ``loading`` is the slower rank's part of ``seconds``; ``converter`` and ``rank`` are peaks."""

    seconds: float
    loading: float
    read: int
    converter: int
    rank: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="checkpoint size, about: whole layers of 0.6 GB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--stage", type=int, choices=(1, 2), default=1, help="ZeRO stage of the engines")
    parser.add_argument("--folder", default=None, help="where to work; default: a temporary folder")
    parser.add_argument("--rank", nargs=4, metavar=("WAY", "RANK", "STORE", "LAYERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        way, rank, store, layers = args.rank
        print(json.dumps(run_rank(way, int(rank), store, int(layers), args.stage, Path(args.folder))), flush=True)
        # DeepSpeed keeps its groups, and a thread of one that drops its last tensor while Python ends aborts.
        os._exit(0)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source = Path(folder) / "global_step1"
        source.mkdir()
        layers = generate(source, int(args.gigabytes * 1e9 / BYTES_PER_PARAM * 1.28))
        (Path(folder) / "latest").write_text(source.name)
        size = sum(file.stat().st_size for file in source.iterdir())
        print(f"checkpoint: ZeRO-1 of {SAVED_BY} ranks, {size / 1e9:.2f} GB in {len(list(source.iterdir()))} files")
        report(Path(folder), layers, size, args)


def report(folder: Path, layers: int, size: int, args: argparse.Namespace) -> None:
    results: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for run in range(args.runs + 1):
        for way in WAYS:
            shutil.rmtree(folder / "universal", ignore_errors=True)
            (folder / "latest_universal").unlink(missing_ok=True)
            subprocess.run(["sync", "-f", str(folder)], check=True)
            read_once(folder / "global_step1")
            measured = measure(way, folder, layers, args.stage)
            if run:  # the first round compiles and caches what the later ones find
                results[way].append(measured)
    base = statistics.median(item.seconds for item in results["direct"])
    print(f"medians of {args.runs} interleaved runs; {RANKS} ranks, ZeRO-{args.stage}")
    columns = ("seconds", "x direct", "loading", "bytes read", "/ saved", "converter", "one rank")
    print(f"{'':33}" + "".join(f"{column:>12}" for column in columns))
    for way, found in results.items():
        seconds, loading, read = (
            statistics.median(getattr(item, name) for item in found) for name in ("seconds", "loading", "read")
        )
        converter, rank = max(item.converter for item in found), max(item.rank for item in found)
        times = f"{seconds:12.2f}{seconds / base:12.2f}{loading:12.2f}"
        bytes_read = f"{read / 1e9:9.2f} GB{read / size:12.2f}"
        print(f"{NAMES[way]:33}{times}{bytes_read}{converter / 1e6:9.0f} MB{rank / 1e6:9.0f} MB")


def measure(way: str, folder: Path, layers: int, stage: int) -> Measured:
    began = time.perf_counter()
    read, peak = convert(way, folder) if way != "direct" else (0, 0)
    converting = time.perf_counter() - began
    store = folder / "store"
    store.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--folder", str(folder), "--stage", str(stage), "--rank", way]
    ranks = [
        subprocess.Popen([*command, str(rank), str(store), str(layers)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(RANKS)
    ]
    told: list[dict[str, Any]] = []
    for process in ranks:
        out, errors = process.communicate()
        if process.returncode:
            sys.exit(f"loading ({way}) failed:\n{errors.decode()[-2000:]}")
        told.append(json.loads(out.decode().splitlines()[-1]))
    if len({each["digest"] for each in told}) != 1 or told[0]["digest"] != expected(folder):
        sys.exit(f"loading ({way}) gave other weights than were saved")
    loading = max(each["seconds"] for each in told)
    return Measured(
        converting + loading,
        loading,
        read + sum(each["read"] for each in told),
        peak,
        max(each["peak"] for each in told),
    )


def read_once(folder: Path) -> None:
    """The files of ``folder`` are in the page cache, whatever the way before has pushed out."""
    buffer = bytearray(16 << 20)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def convert(way: str, folder: Path) -> tuple[int, int]:
    """Bytes read and peak memory of a conversion."""
    options = ["--input_folder", str(folder / "global_step1"), "--output_folder", str(folder / "universal")]
    options += ["--num_extract_workers", "2", "--num_merge_workers", "2", "--inject_missing_state"]
    if way == "stock":
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *options]
    else:
        code = "import sys; from deepspeed_affine.cli import ds_to_universal as m; sys.exit(m())"
        command = [sys.executable, "-c", code, "--affine", *options]
    counted = folder / "read"
    process = subprocess.Popen(
        [sys.executable, "-c", COUNT_READS, str(counted), *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    stop, peaks = threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.01):
            peaks.append(max(peaks.pop(), sum(anonymous(child) for child in below(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    stop.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"converting ({way}) failed:\n{errors.decode()[-2000:]}")
    return int(counted.read_text()), peaks[0]


def run_rank(way: str, rank: int, store: str, layers: int, stage: int, folder: Path) -> dict[str, Any]:
    """One rank: what its load took, and a number that the weights it then has make."""
    import deepspeed

    import deepspeed_affine

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    engine = build_engine(layers, stage, universal=way == "stock")
    _ = deepspeed_affine.load_checkpoint  # what it imports is not timed
    peak, stop = [resident()], threading.Event()
    before, first = rchar(), peak[0]

    def watch() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], resident())

    threading.Thread(target=watch, daemon=True).start()
    torch.distributed.barrier()
    began = time.perf_counter()
    if way == "stock":
        path, _ = engine.load_checkpoint(str(folder), tag="universal")
        if path is None:
            raise RuntimeError("nothing was loaded")
    else:
        deepspeed_affine.load_checkpoint(engine, folder, "global_step1" if way == "direct" else "universal")
    seconds = time.perf_counter() - began
    stop.set()
    digest = sum(float(parameter.detach().double().sum()) for parameter in engine.module.parameters())
    return {"seconds": seconds, "read": rchar() - before, "peak": peak[0] - first, "digest": digest}


def build_engine(layers: int, stage: int, *, universal: bool) -> Any:
    import deepspeed

    model = torch.nn.Module()
    for name, shape in layered(layers).items():
        place, *path = name.split(".")
        at = model
        for part in [place, *path[:-1]]:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(path[-1], torch.nn.Parameter(torch.zeros(shape)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def layered(layers: int) -> OrderedDict[str, torch.Size]:
    found = shapes(1, 1)
    return OrderedDict(
        (name.replace("layers.0.", f"layers.{layer}."), shape)
        for layer in range(layers)
        for name, shape in found.items()
    )


def generate(folder: Path, params: int) -> int:
    """A ZeRO-1 checkpoint of ``SAVED_BY`` data-parallel ranks with about ``params`` elements; returns its layers."""
    from deepspeed.utils.tensor_fragment import fragment_address

    layers = max(1, round(params / sum(shape.numel() for shape in shapes(1, 1).values())))
    held = layered(layers)
    total = sum(shape.numel() for shape in held.values())
    length = total // SAVED_BY
    torch.manual_seed(0)
    master = torch.randn(total)
    module: OrderedDict[str, torch.Tensor] = OrderedDict()
    starts, at = {}, 0
    for name, shape in held.items():
        starts[name] = at
        module[name] = master[at : at + shape.numel()].bfloat16().view(shape)
        at += shape.numel()
    state = model_state(held, 1, module)
    state["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2}
    counters = {"global_steps": 1, "global_samples": 4, "skipped_steps": 0, "lr_scheduler": None, "optimizer": None}
    world = {"dp_world_size": SAVED_BY, "mp_world_size": 1}
    torch.save({**state, **counters, **world}, folder / "mp_rank_00_model_states.pt")
    for rank in range(SAVED_BY):
        low, high = rank * length, (rank + 1) * length
        slices: OrderedDict[str, fragment_address] = OrderedDict()
        for name, shape in held.items():
            begin, end = max(low, starts[name]), min(high, starts[name] + shape.numel())
            if begin < end:
                slices[name] = fragment_address(numel=end - begin, start=begin - low)
        part = master[low:high].clone()
        states = {"step": torch.tensor(1.0), "exp_avg": part * 0.5, "exp_avg_sq": part.square()}
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}]
        optimizer = {
            "zero_stage": 1,
            "group_paddings": [0],
            "partition_count": [SAVED_BY],
            "base_optimizer_state": {"state": {0: states}, "param_groups": groups},
            "single_partition_of_fp32_groups": [part],
            "param_slice_mappings": [slices],
            "ds_version": "0.19.8",
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}, folder / name)
    return layers


def expected(folder: Path) -> float:
    """The number that the saved weights make."""
    path = folder / "global_step1" / "mp_rank_00_model_states.pt"
    module = torch.load(path, weights_only=False, mmap=True)["module"]
    return sum(float(value.double().sum()) for value in module.values())


def rchar() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def resident() -> int:
    return anonymous(os.getpid())


if __name__ == "__main__":
    main()
