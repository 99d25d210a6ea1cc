"""``load_checkpoint`` in real jobs: any topology continues what stock DeepSpeed saved at any other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live_checks as checks
import pytest
import torch
from load_cases import PAIRS, Pair, pair_named
from starts import Starts, asked

pytestmark = pytest.mark.real

LOADED = checks.chosen(PAIRS, lambda pair: pair.error is None)
REFUSED = checks.chosen(PAIRS, lambda pair: pair.error is not None)


class Run:
    """A pair that was run: what each rank reported of the load, and what the ranks held."""

    def __init__(self, pair: Pair, root: Path, done: dict[str, Any]) -> None:
        for stage, ended in done.items():
            assert ended["ok"], f"{stage}: {ended['error']}"
        self.pair = pair
        self.ranks = done["load"]["ranks"]
        self.source = pair.source_folder(root)
        self.folder = root / pair.name

    @property
    def before(self) -> list[dict[str, Any]]:
        return checks.held(self.source / "held", self.pair.source.world)

    @property
    def now(self) -> list[dict[str, Any]]:
        return checks.held(self.folder / "held", self.pair.target.world)


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """From a pair's name to its run."""
    wanted = asked(request, "pair", lambda name: (pair_named(name).environment, name))
    starts = Starts(Path(__file__).with_name("live_load.py"), tmp_path_factory.mktemp("loaded"), wanted)

    def run(name: str) -> Run:
        pair = pair_named(name)
        return Run(pair, starts.root(pair.environment), starts.done(pair.environment, name))

    return run


@pytest.mark.parametrize("pair", LOADED)
def test_every_rank_holds_its_shard_of_what_was_stored_byte_for_byte(loaded: Callable[[str], Run], pair: str) -> None:
    run = loaded(pair)
    wrong, compared = checks.wrong_shards(run.pair, run.source / "universal", run.before, run.now)
    assert wrong == []
    has_states = run.pair.source.stage and run.pair.source.steps
    assert compared >= (12 if has_states else 5)


@pytest.mark.parametrize("pair", LOADED)
def test_low_precision_weights_follow_and_frozen_ones_and_buffers_come_back(
    loaded: Callable[[str], Run], pair: str
) -> None:
    run = loaded(pair)
    before = run.before
    # ZeRO-3 saves every rank's buffers, which BatchNorm makes of its own part of the batch; other stages the first's.
    own = run.pair.source.stage == 3 and run.pair.source.dp == run.pair.target.dp
    for rank, holding in enumerate(run.now):
        for name, low in holding["low"].items():
            master = holding["params"][name]["fp32"]
            assert torch.equal(low, master.reshape(low.shape).to(low.dtype)), name
        for name in holding["frozen"]:
            assert torch.equal(holding["params"][name]["fp32"], before[0]["params"][name]["fp32"]), name
        buffers = before[rank if own else 0]["buffers"]
        for name, buffer in holding["buffers"].items():
            if name in buffers and "tokens_per_expert" not in name:
                assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("pair", LOADED)
def test_the_report_says_what_was_restored_and_what_not(loaded: Callable[[str], Run], pair: str) -> None:
    run = loaded(pair)
    facts, before, now = run.pair, run.before, run.now
    for rank in run.ranks:
        assert (rank["note"], rank["epoch"]) == ("saved by stock", [3, 4])
        left = [row for row in rank["not_restored"] if not re.search(facts.unrestored or "(?!)", row)]
        assert left == []
        assert (facts.unrestored is None) or any(re.search(facts.unrestored, row) for row in rank["not_restored"])
        assert f"{rank['bytes_read']} bytes read by this rank" in rank["text"]
    for holding in now:
        for count in ("global_steps", "global_samples"):
            assert holding[count] == before[0][count]
        fresh = "optimizer states of" in (facts.unrestored or "") and 0.0 in holding["steps"]
        assert fresh or holding["steps"] == before[0]["steps"] or not before[0]["steps"] or not holding["steps"]
        assert holding["scale"] == before[0]["scale"]
        assert holding["scheduler"] == before[0]["scheduler"] or "lr_scheduler" in (facts.unrestored or "")
    if facts.unrestored is None and len(now[0]["groups"]) == len(before[0]["groups"]):
        for holding in now:
            for mine, theirs in zip(holding["groups"], before[0]["groups"], strict=True):
                assert {key: mine[key] for key in mine if key in theirs and key not in ("name", "step")} == {
                    key: theirs[key] for key in mine if key in theirs and key not in ("name", "step")
                }
    needed = sum(
        value.nbytes
        for holding in now
        for kind in ("params", "plain")
        for states in holding[kind].values()
        for value in states.values()
    )
    # Replicas along data parallelism are read once a fragment, never whole.
    assert sum(rank["bytes_read"] for rank in run.ranks) <= needed + 8 * len(now) * 100


@pytest.mark.parametrize("pair", LOADED)
def test_training_goes_on(loaded: Callable[[str], Run], pair: str) -> None:
    run = loaded(pair)
    facts, before, now = run.pair, run.before, run.now
    if facts.same_topology and facts.unrestored is None:
        assert checks.wrong_after(facts.target, before, now) == []
        return
    if facts.unrestored is not None or facts.source.model in ("moe", "mixtral"):
        # Other states or hyperparameters, or tokens routed among those of another number of ranks.
        return
    if facts.source.model_options.get("buffers") and facts.source.dp != facts.target.dp:
        # Every rank normalises over its own part of the batch.
        return
    losses, expected = checks.next_losses(facts, before, now)
    assert losses == expected


@pytest.mark.parametrize("pair", LOADED)
def test_what_the_engine_saved_gives_the_same_without_a_conversion(loaded: Callable[[str], Run], pair: str) -> None:
    run = loaded(pair)
    for rank in run.ranks:
        direct = rank["direct"]
        assert direct["differs"] == []
        assert [direct[key] for key in ("note", "not_restored", "padding")] == [
            rank[key] for key in ("note", "not_restored", "padding")
        ]
        # What of it is metadata is nearly all here, and next to nothing in tests/hooks/test_direct_size.py.
        assert direct["needed"] < direct["read"] <= 1.05 * direct["needed"] + direct["metadata"]


@pytest.mark.parametrize("pair", checks.chosen(PAIRS, lambda pair: pair.stock))
def test_it_is_what_deepspeeds_own_loader_makes_of_the_folder(loaded: Callable[[str], Run], pair: str) -> None:
    run = loaded(pair)
    for rank, holding in zip(run.ranks, run.now, strict=True):
        assert rank["stock"]["differs"] == []
        assert rank["stock"]["next_losses"] == holding["next_losses"]


@pytest.mark.parametrize("pair", REFUSED)
def test_a_fault_of_one_rank_ends_all_of_them_and_changes_nothing(loaded: Callable[[str], Run], pair: str) -> None:
    run = loaded(pair)
    said = {rank["refused"] for rank in run.ranks}
    for text in said:
        assert re.search(run.pair.error, text, re.DOTALL), text
    assert all(rank["changed"] == [] for rank in run.ranks)
    if run.pair.fault != "bug":
        assert len(said) == 1
