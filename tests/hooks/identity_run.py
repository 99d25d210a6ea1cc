"""Attaches, saves, loads and detaches in forked ranks, and reports every attribute of DeepSpeed that any step changed.

``identity_run.py FOLDER CASE`` writes FOLDER/CASE/done.json. DeepSpeed changes module variables of its own when it
saves and loads; so it first does both alone, and what it changed then is what it may change later.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "real"))

from forks import fork_ranks  # sets the environment of what is imported next

# isort: split
import deepspeed
import deepspeed.pipe
import real_models
import torch
import train
from real_cases import Case

CASES = {
    "zero1": Case("zero1"),
    "zero2_bf16": Case("zero2_bf16", stage=2, dtype="bf16"),
    "zero3": Case("zero3", stage=3),
    "autotp": Case("autotp", model="own_tp", tp=2),
    "autotp_zero3": Case("autotp_zero3", model="own_tp", tp=2, stage=3),
    "hand_tp": Case("hand_tp", model="hand_tp", tp=2),
    "pipe": Case("pipe", model="pipe", pp=2),
    "moe": Case("moe", model="moe", ep=2),
}

Snapshot = dict[str, Any]


def snapshot() -> Snapshot:
    """Every attribute of every loaded deepspeed module and class, and what makes up every function, by a name of it."""
    found: Snapshot = {}
    classes: dict[int, type] = {}
    functions: dict[int, FunctionType] = {}

    def note(value: Any) -> None:
        value = getattr(value, "__func__", value)
        if isinstance(value, property):
            for each in (value.fget, value.fset, value.fdel):
                note(each)
        elif isinstance(value, type) and value.__module__.startswith("deepspeed"):
            if id(value) not in classes:
                classes[id(value)] = value
                for name, each in list(vars(value).items()):
                    found[f"{value.__module__}.{value.__qualname__}.{name}"] = each
                    note(each)
        elif isinstance(value, FunctionType) and (value.__module__ or "").startswith("deepspeed"):
            functions[id(value)] = value

    for module_name, module in sorted(sys.modules.items()):
        ours = module_name == "deepspeed_affine" or module_name.startswith("deepspeed_affine.")
        if not isinstance(module, ModuleType) or not module_name.startswith("deepspeed") or ours:
            continue
        for name, value in list(vars(module).items()):
            found[f"{module_name}:{name}"] = value
            note(value)
    for function in functions.values():
        at = f"{function.__module__}.{function.__qualname__}@{id(function)}"
        for name in ("__code__", "__defaults__", "__kwdefaults__", "__closure__"):
            found[f"{at}.{name}"] = getattr(function, name)
        for name, value in vars(function).items():
            found[f"{at}.{name}"] = value
    return found


def changed(before: Snapshot, after: Snapshot) -> list[str]:
    absent = object()
    return sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name, absent) is not after.get(name, absent) and not same_cells(before.get(name), after.get(name))
    )


def same_cells(before: Any, after: Any) -> bool:
    """A function's closure is a new tuple whenever it is asked for; its cells are what stays."""
    if not isinstance(before, tuple) or not isinstance(after, tuple) or len(before) != len(after):
        return False
    return bool(before) and all(a is b and type(a).__name__ == "cell" for a, b in zip(before, after, strict=True))


def own_attributes(engine: Any) -> dict[str, dict[str, Any]]:
    """The instance attributes of everything ``attach`` may set one on."""
    owners = {"engine": engine, "module": engine.module, "optimizer": engine.optimizer}
    owners |= {f"parameter {name}": param for name, param in engine.module.named_parameters()}
    return {owner: dict(vars(value)) for owner, value in owners.items()}


def differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    absent = object()
    return sorted(
        f"{owner}: {name}"
        for owner in before.keys() | after.keys()
        for name in before[owner].keys() | after[owner].keys()
        if before[owner].get(name, absent) is not after[owner].get(name, absent)
    )


def info_of(case: Case) -> dict[str, Any] | None:
    if case.model == "pipe":
        return {"pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.word_embeddings\.weight"]}
    return real_models.HAND_TP_INFO if case.model == "hand_tp" else None


def stock_client(case: Case) -> dict[str, Any]:
    info = info_of(case)
    return {} if info is None else {"universal_checkpoint_info": info}


def run_first(case: Case, folder: Path) -> dict[str, Any]:
    engine = train.build_engine(case, load_universal=False)
    train.train_steps(engine, case, 0, 1)
    engine.save_checkpoint(str(folder), tag="first", client_state=stock_client(case))
    return {}


def run(case: Case, folder: Path) -> dict[str, Any]:
    info = info_of(case)
    engine, other = (train.build_engine(case, load_universal=load) for load in (False, True))
    train.train_steps(engine, case, 0, 1)

    def save(tag: str, client: dict[str, Any]) -> None:
        engine.save_checkpoint(str(folder), tag=tag, client_state=client)

    for _ in range(2):
        # The second time round, what DeepSpeed prepares once is prepared.
        before = snapshot()
        save("again", stock_client(case))
        saved = snapshot()
        other.load_checkpoint(str(folder), tag="universal")
        loaded = snapshot()
    by_stock = {"save": changed(before, saved), "load": changed(saved, loaded)}

    steps: dict[str, list[str]] = {}
    before = snapshot()

    def step(name: str) -> None:
        nonlocal before
        after = snapshot()
        steps[name] = changed(before, after)
        before = after

    imported_before = any(name.split(".")[0] == "deepspeed_affine" for name in sys.modules)
    import deepspeed_affine

    for name in deepspeed_affine.__all__:
        getattr(deepspeed_affine, name)
    step("import")
    untouched = [own_attributes(each) for each in (engine, other)]
    handle = deepspeed_affine.attach(engine, info=info)
    step("attach")
    alone = differences(untouched[1], own_attributes(other))
    second = deepspeed_affine.attach(other, info=info)
    step("attach another")
    client = deepspeed_affine.with_universal_info({"note": "attached"}, engine)
    step("with_universal_info")
    save("attached", client)
    step("save")
    weights = [param.detach().clone() for param in engine.module.parameters()]
    other.load_checkpoint(str(folder), tag="universal")
    step("load")
    attached = [own_attributes(each) for each in (engine, other)]
    moved = [not torch.equal(*pair) for pair in zip(weights, engine.module.parameters(), strict=True)]
    handle.detach()
    step("detach")
    kept = differences(attached[1], own_attributes(other))
    left = [fault for fault in differences(untouched[0], own_attributes(engine)) if not saves_itself(fault)]
    second.detach()
    step("detach another")
    names = {owner: sorted(own) for owner, own in own_attributes(other).items()}
    expected = {owner: sorted(own) for owner, own in untouched[1].items()}
    hooks = [
        fault
        for fault in differences(untouched[1], own_attributes(other))
        if fault.endswith((": load_hp_checkpoint_state", ": load_checkpoint", ": universal_checkpoint_info"))
    ]
    return {
        "imported_before": imported_before,
        "noticed": planted(),
        "by_stock": by_stock,
        "steps": steps,
        "set_by_attach": differences(untouched[0], attached[0]),
        "weights_moved_by_the_other": moved,
        "other_engine_by_attach": alone,
        "other_engine_by_detach": kept,
        "left_behind": left,
        "names_left_behind": [owner for owner in expected if expected[owner] != names[owner]],
        "hooks_left_behind": hooks,
        "looked_at": len(before),
    }


def planted() -> list[list[str]]:
    """What the snapshot says of changes of each kind, made on purpose and undone."""
    from deepspeed.checkpoint import universal_checkpoint as module

    engine, function = deepspeed.DeepSpeedEngine, module.load_hp_checkpoint_state
    before, noticed = snapshot(), []
    places = ((module, "load_hp_checkpoint_state"), (engine, "save_checkpoint"), (engine, "new"), (function, "mark"))
    for owner, name in places:
        held = vars(owner).get(name)
        setattr(owner, name, len)
        noticed.append(changed(before, snapshot()))
        if held is None:
            delattr(owner, name)
        else:
            setattr(owner, name, held)
    return noticed


def saves_itself(fault: str) -> bool:
    """What an engine keeps of its own last save."""
    return fault in ("engine: _curr_ckpt_path", "engine: save_non_zero_checkpoint")


def main(root: Path, name: str) -> None:
    case = CASES[name]
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    source, target = folder / "first", folder / "universal"
    done: dict[str, Any] = {}
    for stage, world, work in (
        ("first", case.world, partial(run_first, case, folder)),
        ("convert", 1, partial(train.convert_affine, source, target)),
        ("steps", case.world, partial(run, case, folder)),
    ):
        # The import itself is one of the steps.
        done = fork_ranks(world, work, folder / f"log_{stage}", never=("deepspeed_affine",))
        if not done["ok"]:
            break
    (folder / "done.json").write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[2:]:
        main(Path(sys.argv[1]).absolute(), each)
