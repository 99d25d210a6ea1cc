"""The checkpoint an engine saved, loaded straight into the engine that has loaded what was converted of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import live_engines as engines  # sets the environment of what is imported next

# isort: split
import real_shards
import torch
from load_cases import Pair

import deepspeed_affine
from deepspeed_affine.storage.pt_reader import load_pickle

__all__ = ["run_direct", "without_a_file"]

ZIP_TAIL = 22 + 0xFFFF


def run_direct(engine: Any, pair: Pair, saved: Path, held: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from ``held``, and what was read: by the kernel's count, by the report, and at most to find out what
    there is. Nothing in the engine is as it was when ``held`` was taken."""
    spoil(engine)
    before = bytes_read()
    report = deepspeed_affine.load_checkpoint(engine, saved.parent, saved.name, **dict(pair.options))
    read = bytes_read() - before
    now = engines.gather(engine, pair.target)
    return {
        "differs": list(different(comparable(held, pair), comparable(now, pair))),
        "note": report.client_state.get("note"),
        "not_restored": [str(row) for row in report.not_restored],
        "padding": dict(report.padding),
        "needed": report.bytes_read,
        "read": read,
        "metadata": sum(metadata_bytes(path) for path in saved.glob("*.pt")),
    }


def without_a_file(saved: Path, folder: Path) -> Path:
    """Where a copy of the checkpoint is that lacks one rank's optimizer states."""
    shutil.copytree(saved, folder / "copied" / saved.name)
    min((folder / "copied" / saved.name).glob("*_optim_states.pt")).unlink()
    return folder / "copied"


def comparable(held: Mapping[str, Any], pair: Pair) -> dict[str, Any]:
    """What a load decides: no losses, and nothing that only appears in an optimizer as it goes."""
    left = {"next_losses", "after", "scheduler" if "lr_scheduler" in (pair.unrestored or "") else ""}
    buffers = {name: value for name, value in held["buffers"].items() if "tokens_per_expert" not in name}
    groups = [{key: value for key, value in group.items() if key != "step"} for group in held["groups"]]
    return {**{key: value for key, value in held.items() if key not in left}, "groups": groups, "buffers": buffers}


def spoil(engine: Any) -> None:
    """Training changes the rest; this is what it would leave as it was."""
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if not parameter.requires_grad:
                getattr(parameter, "ds_tensor", parameter).data.fill_(0.5)
        saved = engine.module.state_dict()
        for name, buffer in engine.module.named_buffers():
            if name in saved:
                buffer.fill_(1)


def bytes_read() -> int:
    """What this process has read from files so far."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(rows["rchar"])


def metadata_bytes(path: Path) -> int:
    """The most that is read of a file to know what is in it: all but its tensors three times (as a checkpoint, for its
    hyperparameters, and for what positions there are), and its end, in which a zip file's directory is looked for."""
    size = path.stat().st_size
    storages = load_pickle(path).archive.storages.values()
    return 3 * (size - sum(storage.nbytes for storage in storages) + min(size, ZIP_TAIL))


def different(held: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """What of ``held`` is not, byte for byte, in ``now``."""
    for key, value in held.items():
        where, other = f"{place}{key}", now.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from different(value, other, f"{where}:")
        elif isinstance(value, torch.Tensor):
            if not isinstance(other, torch.Tensor) or not real_shards.same_bytes(value, other):
                yield where
        elif value != other:
            yield f"{where}: {other}, not {value}"
