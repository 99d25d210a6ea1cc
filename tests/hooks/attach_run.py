"""What ``attach`` and ``with_universal_info`` promise, observed on live engines in forked ranks.

``attach_run.py FOLDER CASE...`` writes FOLDER/CASE/done.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "real"))

from forks import fork_ranks  # sets the environment of what is imported next

# isort: split
import deepspeed
import real_models
import torch
import train
from real_cases import Case

import deepspeed_affine

CASES = {
    "zero1": Case("zero1"),
    "zero3": Case("zero3", stage=3),
    "zero3_momentum": Case("zero3_momentum", stage=3, optimizer="momentum"),
    "zero0": Case("zero0", stage=0),
    "hand_tp": Case("hand_tp", model="hand_tp", tp=2),
    "moe": Case("moe", model="moe", ep=2),
}


def said(work: Any) -> str:
    """What ``work`` raises, with the kind of error."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_first(case: Case, folder: Path) -> dict[str, Any]:
    engine = train.build_engine(case, load_universal=False)
    info = real_models.HAND_TP_INFO if case.model == "hand_tp" else None
    deepspeed_affine.attach(engine, info=info)
    train.train_steps(engine, case, 0, 2)
    client = deepspeed_affine.with_universal_info({"note": "first"}, engine)
    engine.save_checkpoint(str(folder), tag="first", client_state=client)
    torch.save(train.gather_truth(engine, case)["params"], folder / f"rank{torch.distributed.get_rank()}.pt")
    return {}


def run(case: Case, folder: Path) -> dict[str, Any]:
    engine = train.build_engine(case, load_universal=True)
    info = real_models.HAND_TP_INFO if case.model == "hand_tp" else None
    found: dict[str, Any] = {"version": deepspeed.__version__}
    found["not an engine"] = said(lambda: deepspeed_affine.attach(engine.module))
    found["no policy"] = said(lambda: deepspeed_affine.attach(engine, scaled_states="half"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with deepspeed_affine.attach(engine, info=info) as handle:
            found["attached"] = handle.attached
            found["twice"] = said(lambda: deepspeed_affine.attach(engine))
            found["emits"] = handle.emits
            found["described"] = sorted(handle.params) == sorted(name for name, _ in engine.module.named_parameters())
            found["client"] = client_states(engine, handle)
        found["detached"] = not handle.attached
        handle.detach()
    found["warned"] = [str(each.message) for each in warned if "with_universal_info" in str(each.message)]
    if case.stage and (case.model != "moe" or handle.emits):
        found["loads"] = loads(engine, case, folder, info)
    else:
        with deepspeed_affine.attach(engine):
            found["loads"] = said(lambda: engine.load_checkpoint(str(folder), tag="universal"))
    return found


def client_states(engine: Any, handle: Any) -> dict[str, Any]:
    """What becomes of a user's client state, with and without the user's own keys in it."""
    key = "universal_checkpoint_info"
    mine = {"note": "mine", key: {"universal_checkpoint_version": 0.2, "parameter_to_average_patterns": []}}
    copy = {name: dict(value) if isinstance(value, dict) else value for name, value in mine.items()}
    plain = deepspeed_affine.with_universal_info({"note": "mine"}, engine)
    result = deepspeed_affine.with_universal_info(mine, engine, dict(handle.own))
    in_place = key in result
    written = result[key] if in_place else getattr(engine.module, key)
    return {
        "untouched": mine == copy,
        "note": (plain["note"], result["note"]),
        "in client state": in_place,
        "kept": written["parameter_to_average_patterns"] == [],
        "version": written["universal_checkpoint_version"],
        "maps": len(written["affine_map"]),
        "none": sorted(deepspeed_affine.with_universal_info(None, engine)),
    }


def loads(engine: Any, case: Case, folder: Path, info: Any) -> dict[str, Any]:
    """Every way the same folder is asked for gives the same; without the handle DeepSpeed is asked alone."""
    expected = torch.load(folder / f"rank{torch.distributed.get_rank()}.pt", weights_only=False)

    def same(weights_only: bool = False) -> list[str]:
        now = train.gather_truth(engine, case)["params"]
        return [
            f"{name}:{state}"
            for name, entry in expected.items()
            for state, value in entry.items()
            if state == "fp32" or not weights_only
            # The last row of the vocabulary is padding.
            if not torch.equal(now[name][state][: rows(name, value)], value[: rows(name, value)])
        ]

    def rows(name: str, value: torch.Tensor) -> int:
        last = name == "word_embeddings.weight" and torch.distributed.get_rank() % case.tp == case.tp - 1
        return value.shape[0] - last

    def spoil() -> None:
        train.train_steps(engine, case, 5, 1)

    found = {}
    if case.optimizer == "momentum":
        with deepspeed_affine.attach(engine):
            engine.load_checkpoint(str(folder), "universal", load_optimizer_states=False)
            found["weights alone"] = same(weights_only=True)
            found["refused"] = said(lambda: engine.load_checkpoint(str(folder), "universal"))
        return found
    if torch.distributed.get_rank() == 0:
        (folder / "latest_universal").write_text("universal", encoding="utf-8")
    torch.distributed.barrier()
    with deepspeed_affine.attach(engine, info=info):
        engine.load_checkpoint(str(folder))
        found["by latest_universal"] = same()
        spoil()
        found["spoilt"] = bool(same())
        engine.load_checkpoint(load_dir=str(folder), tag="universal", load_module_strict=True)
        found["again, by keywords"] = same()
        spoil()
        deepspeed.DeepSpeedEngine.load_checkpoint(engine, str(folder), "universal")
        found["by the class's own method"] = same()
        found["no such tag"] = [
            said(lambda: engine.load_checkpoint(str(folder), tag="nowhere")),
            said(lambda: deepspeed.DeepSpeedEngine.load_checkpoint(engine, str(folder), "nowhere")),
        ]
    return found


def main(root: Path, name: str) -> None:
    case = CASES[name]
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    works = {
        "first": (case.world, partial(run_first, case, folder)),
        "convert": (1, partial(train.convert_affine, folder / "first", folder / "universal")),
        "run": (case.world, partial(run, case, folder)),
    }
    for stage, (world, work) in works.items():
        done = fork_ranks(world, work, folder / f"log_{stage}")
        if not done["ok"]:
            break
    (folder / "done.json").write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[2:]:
        main(Path(sys.argv[1]).absolute(), each)
