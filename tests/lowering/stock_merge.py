"""Run DeepSpeed's own ``merge_tp_slices`` over a table of cases, in a process of its own.

    python stock_merge.py CASES.pt RESULTS.pt

The DeepSpeed is whichever comes first on PYTHONPATH. It took one shape for all ranks and the checkpoint object up
to 0.18.9, and per-rank shapes and the info dictionary from 0.19.4; the signature tells which. Nothing of
the package under test is imported here.
"""

import inspect
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch


class _Checkpoint:
    """The one method of DeepSpeedCheckpoint that the older merge asks for."""

    def __init__(self, info):
        self.info = info

    def get_checkpoint_info(self, key):
        return self.info


def _write_fragments(folder: Path, case: dict) -> None:
    for state, shards in case["states"].items():
        for tp, shard in enumerate(shards):
            if shard is None:
                continue
            base = folder / case["name"] / str(tp)
            base.mkdir(parents=True, exist_ok=True)
            flat = shard.reshape(-1)
            for dp, fragment in enumerate(torch.tensor_split(flat, case["dp"])):
                torch.save(fragment.clone(), base / f"{state}.{dp:02d}")


def _plain(value):
    if type(value).__name__ == "SubparamShape":
        return ("SubparamShape", value.patterns, value.shape, value.partition_dim)
    return value


def _run(case: dict, module, folder: Path) -> dict:
    slices, output = folder / "tmp", folder / "zero"
    _write_fragments(slices, case)
    if next(iter(inspect.signature(module.merge_tp_slices).parameters)) == "uc_info":
        source, shapes = case["info"], case["shapes"]
    else:
        source, shapes = _Checkpoint(case["info"]), case["shapes"][0]
    try:
        unmatched = module.merge_tp_slices(source, str(output), str(slices), case["tp"], (case["name"], shapes))
        files = {}
        for path in sorted((output / case["name"]).iterdir()):
            stored = torch.load(path, weights_only=False)
            files[path.stem] = [(key, _plain(value)) for key, value in stored.items()]
    except Exception as fault:
        return {"error": f"{type(fault).__name__}: {fault}"}
    return {"files": files, "unmatched": sorted(unmatched)}


def main(cases_path: str, results_path: str) -> None:
    import deepspeed
    from deepspeed.checkpoint import ds_to_universal as module

    cases = torch.load(cases_path, weights_only=False)
    results = {"version": deepspeed.__version__}
    with tempfile.TemporaryDirectory() as root:
        for number, case in enumerate(cases):
            folder = Path(root) / str(number)
            folder.mkdir()
            results[case["id"]] = _run(case, module, folder)
    torch.save(results, results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
