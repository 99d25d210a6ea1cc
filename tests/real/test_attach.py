"""An attached engine saves its maps and loads by them, through DeepSpeed's own save_checkpoint and load_checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import real_shards
import torch
from conftest import HERE, Environment
from live_cases import PAIRS, Pair, pair_named

from deepspeed_affine.parity import compare_universal

pytestmark = pytest.mark.real

Done = tuple[Pair, Path, dict[str, Any]]
Attached = Callable[[str], Done]


@pytest.fixture(scope="module")
def attached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Attached:
    """From a pair's name to the pair, its folder and how it ended; one process start runs all that are asked."""
    wanted: dict[str, list[str]] = defaultdict(list)
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and item.path == Path(__file__) and "pair" in callspec.params:
            name = callspec.params["pair"]
            if name not in wanted[pair_named(name).environment]:
                wanted[pair_named(name).environment].append(name)
    root = tmp_path_factory.mktemp("attached")
    ran: set[str] = set()

    def run(name: str) -> Done:
        pair = pair_named(name)
        if pair.environment not in ran:
            ran.add(pair.environment)
            _launch(_environment(pair.environment), root, wanted[pair.environment])
        folder = root / name
        return pair, folder, json.loads((folder / "done.json").read_text(encoding="utf-8"))

    return run


def _environment(name: str) -> Environment:
    if name == "installed":
        return Environment(name, "")
    variable = "DEEPSPEED_AFFINE_TRANSFORMERS5" if name == "hf5" else "DEEPSPEED_AFFINE_VERSIONS"
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"{variable} is not set; it names where {name} is")
    folder = Path(found).absolute()
    return Environment(name, "", (folder if name == "hf5" else folder / name,))


def _launch(environment: Environment, root: Path, names: list[str]) -> None:
    command = [sys.executable, str(HERE / "live.py"), str(root), *names]
    timeout = 120.0 + 60.0 * len(names)
    ended = subprocess.run(command, env=environment.variables(), capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


def held(folder: Path, world: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def faults(facts: Pair, universal: Path, before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Every shard cut out of ``universal``, without a word of the code under test, that is not what its rank holds."""
    wrong, compared = [], 0
    for rank, mine in enumerate(now):
        for name, states in mine["params"].items():
            if name in mine["frozen"]:
                # DeepSpeed's loader leaves them as they were; that this is said is another test's.
                continue
            known = real_shards.universal_name(facts.target, rank, name)
            written = {path.stem for path in (universal / "zero" / known).glob("*.pt")} - {"step"}
            if written != {state for other in now for state in other["params"].get(name, ())}:
                wrong.append(f"{known}: {sorted(written)} stored, {sorted(states)} held")
            for state, shard in states.items():
                full = real_shards.read_state(universal, known, state)
                if facts.source.stage == 3 and facts.source.tp == 1:
                    # ZeRO-3 files without tensor parallelism are flat.
                    whole = before[0]["params"][name]["fp32"].shape
                    full = full if real_shards.is_expert(facts.target, name) else full.reshape(whole)
                shards = [other["params"].get(name, {}).get(state, shard) for other in now]
                if facts.target.name == "scaled" and name == "dense_4h_to_h.bias":
                    factor = scale(facts, state)
                    full = full * factor if factor else torch.zeros_like(full)
                expected = real_shards.cut(full, facts.target, name, rank, shards)
                compared += 1
                if not real_shards.same_bytes(expected, shard[: expected.shape[0]] if shard.dim() else shard):
                    wrong.append(f"rank {rank}: {name}:{state} differs")
    return wrong if compared >= 12 else [*wrong, f"only {compared} shards compared"]


def scale(facts: Pair, state: str) -> float:
    """What a rank's share of the bias is multiplied by: its gradient is divided by that, the square of it twice."""
    if state != "fp32" and (facts.attach or {}).get("scaled_states") == "reset":
        return 0.0
    power = {"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2}[state]
    return float((1 / facts.target.tp) ** power)


QUICK = ("plain_zero1_fp32", "plain_zero3_fp32", "tp1to2_zero1", "hand2to1", "stage1to3")


def params(pairs: Iterable[Pair]) -> list[Any]:
    marks = {name: [pytest.mark.quick] for name in QUICK}
    return [pytest.param(pair.name, id=pair.name, marks=marks.get(pair.name, [])) for pair in pairs]


LOADED = params(pair for pair in PAIRS if pair.error is None)
LOST = params(pair for pair in PAIRS if pair.lost is not None)
STOCK = params(pair for pair in PAIRS if pair.stock)
REFUSED = params(pair for pair in PAIRS if pair.error is not None)


@pytest.mark.parametrize("pair", LOADED)
def test_every_rank_holds_its_shard_of_what_was_stored(attached: Attached, pair: str) -> None:
    facts, folder, done = attached(pair)
    for stage in ("save", "convert", "load"):
        assert done[stage]["ok"], f"{stage}: {done[stage]['error']}"
    before, now = held(folder / "saved", facts.source.world), held(folder / "held", facts.target.world)
    assert faults(facts, folder / "universal", before, now) == []
    assert {rank["note"] for rank in done["load"]["ranks"]} == {"saved with attach"}
    assert {rank["global_steps"] for rank in done["load"]["ranks"]} == {facts.source.steps}


@pytest.mark.parametrize("pair", LOADED)
def test_training_goes_on_as_if_it_had_not_stopped(attached: Attached, pair: str) -> None:
    facts, folder, done = attached(pair)
    assert done["load"]["ok"], done["load"]["error"]
    before, now = held(folder / "saved", facts.source.world), held(folder / "held", facts.target.world)
    if facts.same_topology:
        for saved, loaded in zip(before, now, strict=True):
            assert (loaded["losses"] == saved["next_losses"]) == (facts.lost is None)
            for name, states in saved["params"].items():
                if name in saved["frozen"]:
                    continue
                for state, value in states.items():
                    rows = slice(None)
                    if name == "word_embeddings.weight" and facts.target.model == "hand_tp":
                        # Rows of vocabulary padding are not in a universal checkpoint; they start as zeros.
                        rows = slice(0, _real_rows(facts, loaded))
                        assert not loaded["params"][name][state][rows.stop :].any()
                    assert real_shards.same_bytes(value[rows], loaded["params"][name][state][rows]), (name, state)
        return
    if facts.source.dp == facts.target.dp and facts.source.name != "scaled":
        # The same batches in another order of summation. A scaled parameter takes other steps at another degree, since
        # lr and eps do not scale with it; that is why its states are refused unless the user says otherwise.
        tolerance = 1e-6 if facts.source.dtype == "fp32" else 1e-3
        assert now[0]["losses"] == pytest.approx(before[0]["next_losses"], rel=tolerance)


def _real_rows(facts: Pair, loaded: dict[str, Any]) -> int:
    height = loaded["params"]["word_embeddings.weight"]["fp32"].shape[0]
    return max(0, min(height, 13 - loaded["tp_rank"] * height))


@pytest.mark.parametrize("pair", REFUSED)
def test_what_stock_loading_cannot_do_is_said_by_every_rank_before_it_starts(attached: Attached, pair: str) -> None:
    facts, _, done = attached(pair)
    assert done["convert"]["ok"], done["convert"]["error"]
    assert not done["load"]["ok"]
    assert facts.error is not None
    for rank in done["load"]["ranks"]:
        assert re.search(facts.error, rank["error"], re.S), rank["error"]
        assert re.match("(CheckpointFormat|UnsupportedLayout)Error", rank["error"]), rank["error"]


@pytest.mark.parametrize("pair", LOST)
def test_what_stock_loading_leaves_out_is_said(attached: Attached, pair: str) -> None:
    facts, _, done = attached(pair)
    assert done["load"]["ok"], done["load"]["error"]
    assert facts.lost is not None
    first, *others = [rank["warned"] for rank in done["load"]["ranks"]]
    assert len(first) == 1
    assert re.search(facts.lost, first[0]), first
    assert "deepspeed_affine.load_checkpoint" in first[0]
    assert others == [[] for _ in others]


@pytest.mark.parametrize("pair", STOCK)
def test_what_is_saved_is_read_by_deepspeed_alone(attached: Attached, pair: str) -> None:
    """Its converter makes the same files of it, and its loader restores every rank's share of them."""
    facts, folder, done = attached(pair)
    for stage in ("stock", "stock_load"):
        assert done[stage]["ok"], f"{stage}: {done[stage]['error']}"
    report = compare_universal(folder / "universal", folder / "stock")
    assert {row.path: row.detail for row in report.different} == {}
    assert len(report.rows) > 20
    before, now = held(folder / "saved", facts.source.world), held(folder / "stock_held", facts.target.world)
    assert faults(facts, folder / "stock", before, now) == []
