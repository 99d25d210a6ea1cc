"""``load_checkpoint`` in real jobs: any topology continues what stock DeepSpeed saved at any other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import real_shards
import torch
from conftest import HERE, Environment
from load_cases import PAIRS, Pair, pair_named

pytestmark = pytest.mark.real

Done = tuple[Pair, Path, Path, dict[str, Any]]
Loaded = Callable[[str], Done]


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """From a pair's name to the pair, its folder, its source's, and how it ended; one process start runs all of an
    environment that are asked for in this session."""
    wanted: dict[str, list[str]] = defaultdict(list)
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and item.path == Path(__file__) and "pair" in callspec.params:
            name = callspec.params["pair"]
            if name not in wanted[pair_named(name).environment]:
                wanted[pair_named(name).environment].append(name)
    root = tmp_path_factory.mktemp("loaded")
    ran: set[str] = set()

    def run(name: str) -> Done:
        pair = pair_named(name)
        if pair.environment not in ran:
            ran.add(pair.environment)
            _launch(_environment(pair.environment), root, wanted[pair.environment])
        folder = root / name
        done = json.loads((folder / "done.json").read_text(encoding="utf-8"))
        for stage in ("save", "convert", "load"):
            assert done[stage]["ok"], f"{stage}: {done[stage]['error']}"
        return pair, folder, root / "sources" / pair.source.name, done["load"]

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
    command = [sys.executable, str(HERE / "live_load.py"), str(root), *names]
    timeout = 120.0 + 60.0 * len(names)
    ended = subprocess.run(command, env=environment.variables(), capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


def held(folder: Path, world: int) -> list[dict[str, Any]]:
    return [torch.load(folder / "held" / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def chosen(condition: Callable[[Pair], bool]) -> list[Any]:
    return [
        pytest.param(pair.name, marks=[pytest.mark.quick] if pair.quick else [], id=pair.name)
        for pair in PAIRS
        if condition(pair)
    ]


LOADED = chosen(lambda pair: pair.error is None)
REFUSED = chosen(lambda pair: pair.error is not None)


def stored_whole(pair: Pair, universal: Path, name: str, state: str, before: list[dict[str, Any]]) -> torch.Tensor:
    """F of one state, in its shape: files of ZeRO-3 without tensor parallelism are flat."""
    full = real_shards.read_state(universal, name, state)
    if full.dim() == 1 and pair.source.tp == 1 and not real_shards.is_expert(pair.source, name):
        for rank in before:
            for local, states in rank["params"].items():
                if real_shards.universal_name(pair.source, 0, local) == name and states["fp32"].numel() == full.numel():
                    return full.reshape(states["fp32"].shape)
    return full


def real_rows(pair: Pair, rank: int, height: int) -> int:
    """How many rows of its part of the vocabulary belong to a token; the others are padding."""
    return max(0, min(height, 13 - rank % pair.target.tp * height))


@pytest.mark.parametrize("pair", LOADED)
def test_every_rank_holds_its_shard_of_what_was_stored_byte_for_byte(loaded: Loaded, pair: str) -> None:
    facts, folder, source, _ = loaded(pair)
    before, now = held(source, facts.source.world), held(folder, facts.target.world)
    compared, universal = 0, source / "universal"
    for rank, holding in enumerate(now):
        for name, states in holding["params"].items():
            known = real_shards.universal_name(facts.target, rank, name)
            for state, shard in states.items():
                if name in holding["frozen"] or not (universal / "zero" / known / f"{state}.pt").is_file():
                    continue
                full = stored_whole(facts, universal, known, state, before)
                shards = [other["params"].get(name, {}).get(state, shard) for other in now]
                mine = real_shards.cut(full, replace(facts.target, stage=1), name, rank, shards)
                if name == "word_embeddings.weight" and facts.target.model == "hand_tp":
                    kept = real_rows(facts, rank, shard.shape[0])
                    assert not shard[kept:].any(), "padding of the vocabulary starts as zeros"
                    mine, shard = mine[:kept], shard[:kept]
                assert real_shards.same_bytes(mine, shard), f"rank {rank}: {name}:{state}"
                compared += 1
    has_states = facts.source.stage and facts.source.steps
    assert compared >= (12 if has_states else 5)


@pytest.mark.parametrize("pair", LOADED)
def test_low_precision_weights_follow_and_frozen_ones_and_buffers_come_back(loaded: Loaded, pair: str) -> None:
    facts, folder, source, _ = loaded(pair)
    before, now = held(source, facts.source.world), held(folder, facts.target.world)
    for holding in now:
        for name, low in holding["low"].items():
            master = holding["params"][name]["fp32"]
            assert torch.equal(low, master.reshape(low.shape).to(low.dtype)), name
        for name in holding["frozen"]:
            assert torch.equal(holding["params"][name]["fp32"], before[0]["params"][name]["fp32"]), name
        for name, buffer in holding["buffers"].items():
            if name in before[0]["buffers"] and "tokens_per_expert" not in name:
                assert torch.equal(buffer, before[0]["buffers"][name]), name


@pytest.mark.parametrize("pair", LOADED)
def test_the_report_says_what_was_restored_and_what_not(loaded: Loaded, pair: str) -> None:
    facts, folder, source, done = loaded(pair)
    before, now = held(source, facts.source.world), held(folder, facts.target.world)
    for rank in done["ranks"]:
        assert (rank["note"], rank["epoch"]) == ("saved by stock", [3, 4])
        left = [row for row in rank["not_restored"] if not re.search(facts.unrestored or "(?!)", row)]
        assert left == []
        assert (facts.unrestored is None) or any(re.search(facts.unrestored, row) for row in rank["not_restored"])
        assert f"{rank['bytes_read']} bytes read by this rank" in rank["text"]
    for holding in now:
        assert (holding["global_steps"], holding["global_samples"]) == (facts.source.steps, before[0]["global_samples"])
        assert holding["steps"] == before[0]["steps"] or not before[0]["steps"] or not holding["steps"]
        assert holding["scale"] == before[0]["scale"]
        assert holding["scheduler"] == before[0]["scheduler"] or "lr_scheduler" in (facts.unrestored or "")
    if facts.unrestored is None and len(now[0]["groups"]) == len(before[0]["groups"]):
        for holding in now:
            for mine, theirs in zip(holding["groups"], before[0]["groups"], strict=True):
                assert {key: mine[key] for key in mine if key in theirs and key not in ("name", "step")} == {
                    key: theirs[key] for key in mine if key in theirs and key not in ("name", "step")
                }
    needed = sum(states[state].nbytes for holding in now for states in holding["params"].values() for state in states)
    # Replicas along data parallelism are read once a fragment, never whole.
    assert sum(rank["bytes_read"] for rank in done["ranks"]) <= needed + 8 * len(now) * 100


@pytest.mark.parametrize("pair", LOADED)
def test_training_goes_on(loaded: Loaded, pair: str) -> None:
    facts, folder, source, _ = loaded(pair)
    before, now = held(source, facts.source.world), held(folder, facts.target.world)
    if facts.same_topology:
        for rank, (saved, continued) in enumerate(zip(before, now, strict=True)):
            assert continued["next_losses"] == saved["next_losses"]
            assert continued["after"]["steps"] == saved["after"]["steps"]
            assert continued["after"]["step_types"] == saved["after"]["step_types"]
            assert continued["after"]["groups"] == saved["after"]["groups"]
            for name, states in saved["after"]["params"].items():
                for state, value in states.items():
                    rows = slice(None)
                    if name == "word_embeddings.weight" and facts.target.model == "hand_tp":
                        rows = slice(0, real_rows(facts, rank, value.shape[0]))
                    got = continued["after"]["params"][name][state][rows]
                    assert real_shards.same_bytes(value[rows], got), f"{name}:{state}"
        return
    if facts.unrestored is not None or facts.source.model in ("moe", "mixtral"):
        # Other states or hyperparameters, or tokens routed among those of another number of ranks.
        return
    if facts.source.model_options.get("buffers") and facts.source.dp != facts.target.dp:
        # Every rank normalises over its own part of the batch.
        return
    dtypes = {facts.source.dtype, facts.target.dtype}
    tolerance = 1e-2 if len(dtypes) > 1 else 1e-6 if dtypes == {"fp32"} else 1e-3
    assert now[0]["next_losses"] == pytest.approx(before[0]["next_losses"], rel=tolerance)


@pytest.mark.parametrize("pair", chosen(lambda pair: pair.stock))
def test_it_is_what_deepspeeds_own_loader_makes_of_the_folder(loaded: Loaded, pair: str) -> None:
    facts, folder, _, done = loaded(pair)
    for rank, holding in zip(done["ranks"], held(folder, facts.target.world), strict=True):
        assert rank["stock"]["differs"] == []
        assert rank["stock"]["next_losses"] == holding["next_losses"]


@pytest.mark.parametrize("pair", REFUSED)
def test_a_fault_of_one_rank_ends_all_of_them_and_changes_nothing(loaded: Loaded, pair: str) -> None:
    facts, _, _, done = loaded(pair)
    said = {rank["refused"] for rank in done["ranks"]}
    for text in said:
        assert re.search(facts.error, text, re.DOTALL), text
    assert all(rank["changed"] == [] for rank in done["ranks"])
    if facts.fault != "bug":
        assert len(said) == 1
