"""An attached engine saves its maps and loads by them, through DeepSpeed's own save_checkpoint and load_checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live_checks as checks
import pytest
import real_shards
import torch
from live_cases import PAIRS, Pair, pair_named
from starts import Starts, asked

from deepspeed_affine.parity import compare_universal

pytestmark = pytest.mark.real

LOADED = checks.chosen(PAIRS, lambda pair: pair.error is None)
LOST = checks.chosen(PAIRS, lambda pair: pair.lost is not None)
STOCK = checks.chosen(PAIRS, lambda pair: pair.stock)
REFUSED = checks.chosen(PAIRS, lambda pair: pair.error is not None)


class Run:
    """A pair that was run: how each stage ended, and what its ranks held."""

    def __init__(self, pair: Pair, root: Path, done: dict[str, Any]) -> None:
        self.pair = pair
        self.done = done
        self.source, self.folder, self.universal = pair.source_folder(root), root / pair.name, pair.universal(root)

    def ended(self, *stages: str) -> None:
        for stage in stages:
            assert self.done[stage]["ok"], f"{stage}: {self.done[stage]['error']}"

    @property
    def before(self) -> list[dict[str, Any]]:
        return checks.held(self.source / "held", self.pair.source.world)

    @property
    def now(self) -> list[dict[str, Any]]:
        return checks.held(self.folder / "held", self.pair.target.world)


@pytest.fixture(scope="module")
def attached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """From a pair's name to its run."""
    wanted = asked(request, "pair", lambda name: (pair_named(name).environment, name))
    starts = Starts(Path(__file__).with_name("live.py"), tmp_path_factory.mktemp("attached"), wanted)

    def run(name: str) -> Run:
        pair = pair_named(name)
        return Run(pair, starts.root(pair.environment), starts.done(pair.environment, name))

    return run


def scaled(pair: Pair) -> Callable[[str, str, torch.Tensor], torch.Tensor]:
    """What a rank's share of a scaled bias is: its gradient is divided by the scale, the square of it twice."""

    def stored(name: str, state: str, full: torch.Tensor) -> torch.Tensor:
        if pair.target.name != "scaled" or name != "dense_4h_to_h.bias":
            return full
        if state != "fp32" and pair.attach.get("scaled_states") == "reset":
            return torch.zeros_like(full)
        return full * float((1 / pair.target.tp) ** {"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2}[state])

    return stored


def wrong_states(pair: Pair, universal: Path, now: list[dict[str, Any]]) -> list[str]:
    """Parameters of which other states are stored than all ranks together hold."""
    wrong = []
    for rank, holding in enumerate(now):
        for name in set(holding["params"]) - set(holding["frozen"]):
            folder = universal / "zero" / real_shards.universal_name(pair.target, rank, name)
            stored = {path.stem for path in folder.glob("*.pt")} - {"step"}
            states = {state for other in now for state in other["params"].get(name, ())}
            if stored != states:
                wrong.append(f"{name}: {sorted(stored)} stored, {sorted(states)} held")
    return wrong


@pytest.mark.parametrize("pair", LOADED)
def test_every_rank_holds_its_shard_of_what_was_stored(attached: Callable[[str], Run], pair: str) -> None:
    run = attached(pair)
    run.ended("save", "convert", "load")
    before, now = run.before, run.now
    wrong, compared = checks.wrong_shards(run.pair, run.universal, before, now, scaled(run.pair))
    assert (wrong, wrong_states(run.pair, run.universal, now)) == ([], [])
    assert compared >= 12
    assert {rank["note"] for rank in run.done["load"]["ranks"]} == {"saved with attach"}
    assert {holding["global_steps"] for holding in now} == {before[0]["global_steps"]} != {0}


@pytest.mark.parametrize("pair", LOADED)
def test_training_goes_on_as_if_it_had_not_stopped(attached: Callable[[str], Run], pair: str) -> None:
    run = attached(pair)
    run.ended("load")
    facts, before, now = run.pair, run.before, run.now
    if facts.same_topology:
        wrong = checks.wrong_after(facts.target, before, now)
        assert (wrong == []) == (facts.lost is None), wrong
    elif facts.source.dp == facts.target.dp and facts.source.name != "scaled":
        # A scaled parameter takes other steps at another degree, since lr and eps do not scale with it; that is why
        # its states are refused unless the user says otherwise.
        losses, expected = checks.next_losses(facts, before, now)
        assert losses == expected


@pytest.mark.parametrize("pair", REFUSED)
def test_what_stock_loading_cannot_do_is_said_by_every_rank_before_it_starts(
    attached: Callable[[str], Run], pair: str
) -> None:
    run = attached(pair)
    run.ended("save", "convert")
    assert not run.done["load"]["ok"]
    assert run.pair.error is not None
    for rank in run.done["load"]["ranks"]:
        assert re.search(run.pair.error, rank["error"], re.S), rank["error"]
        assert re.match("(CheckpointFormat|UnsupportedLayout)Error", rank["error"]), rank["error"]


@pytest.mark.parametrize("pair", LOST)
def test_what_stock_loading_leaves_out_is_said(attached: Callable[[str], Run], pair: str) -> None:
    run = attached(pair)
    run.ended("load")
    assert run.pair.lost is not None
    first, *others = [rank["warned"] for rank in run.done["load"]["ranks"]]
    assert len(first) == 1
    assert re.search(run.pair.lost, first[0]), first
    assert "deepspeed_affine.load_checkpoint" in first[0]
    assert others == [[] for _ in others]


@pytest.mark.parametrize("pair", STOCK)
def test_what_is_saved_is_read_by_deepspeed_alone(attached: Callable[[str], Run], pair: str) -> None:
    """Its converter makes the same files of it, and its loader restores every rank's share of them."""
    run = attached(pair)
    run.ended("stock", "stock_load")
    report = compare_universal(run.universal, run.source / "stock")
    assert {row.path: row.detail for row in report.different} == {}
    assert len(report.rows) > 20
    now = checks.held(run.folder / "stock_held", run.pair.target.world)
    wrong, compared = checks.wrong_shards(run.pair, run.source / "stock", run.before, now)
    assert (wrong, compared >= 12) == ([], True)
