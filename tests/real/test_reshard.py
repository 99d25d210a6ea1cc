"""``ds_affine reshard`` in real jobs: stock DeepSpeed loads what it made, and goes on as the run that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import live_checks as checks
import pytest
import torch
from reshard_cases import PAIRS, Pair, pair_named
from starts import Starts, asked

pytestmark = pytest.mark.real

ALL = checks.chosen(PAIRS, lambda pair: True)


class Run:
    """A pair that was run: what each rank reported of the load, and what the ranks held."""

    def __init__(self, pair: Pair, root: Path, done: dict[str, Any]) -> None:
        for stage, ended in done.items():
            assert ended["ok"], f"{stage}: {ended['error']}"
        self.pair = pair
        self.ranks = done["load"]["ranks"]
        self.universal = pair.universal(root)
        self.before = checks.held(pair.source_folder(root) / "held", pair.source.world)
        self.now = checks.held(root / pair.name / "held", pair.target.world)


@pytest.fixture(scope="module")
def resharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """From a pair's name to its run."""
    wanted = asked(request, "pair", lambda name: (pair_named(name).environment, name))
    starts = Starts(Path(__file__).with_name("live_reshard.py"), tmp_path_factory.mktemp("resharded"), wanted)

    def run(name: str) -> Run:
        pair = pair_named(name)
        return Run(pair, starts.root(pair.environment), starts.done(pair.environment, name))

    return run


@pytest.mark.parametrize("pair", ALL)
def test_stock_deepspeed_holds_what_was_saved_byte_for_byte(resharded: Callable[[str], Run], pair: str) -> None:
    run = resharded(pair)
    wrong, compared = checks.wrong_shards(run.pair, run.universal, run.before, run.now)
    assert wrong == []
    assert compared >= 12 * len(run.now) // run.pair.target.pp
    for holding in run.now:
        for name, low in holding["low"].items():
            master = holding["params"][name]["fp32"]
            assert torch.equal(low, master.reshape(low.shape).to(low.dtype)), name
        for name in holding["frozen"]:
            assert torch.equal(holding["params"][name]["fp32"], run.before[0]["params"][name]["fp32"]), name
        for name, buffer in holding["buffers"].items():
            if name in run.before[0]["buffers"]:
                assert torch.equal(buffer, run.before[0]["buffers"][name]), name


@pytest.mark.parametrize("pair", ALL)
def test_counters_hyperparameters_scheduler_and_client_state_come_along(
    resharded: Callable[[str], Run], pair: str
) -> None:
    run = resharded(pair)
    before = run.before[0]
    for rank, holding in zip(run.ranks, run.now, strict=True):
        assert (rank["note"], rank["epoch"]) == ("saved by stock", [3, 4])
        for key in ("global_steps", "global_samples", "steps", "scheduler", "scale"):
            assert holding[key] == before[key], key
        # A group of experts is named for their degree, by which DeepSpeed finds its ranks.
        named = {f"ep_size_{run.pair.source.ep}": f"ep_size_{run.pair.target.ep}"}
        for mine, theirs in zip(holding["groups"], before["groups"], strict=True):
            assert mine == {key: named.get(value, value) if key == "name" else value for key, value in theirs.items()}


@pytest.mark.parametrize("pair", ALL)
def test_training_goes_on(resharded: Callable[[str], Run], pair: str) -> None:
    run = resharded(pair)
    facts = run.pair
    if facts.same_topology:
        assert checks.wrong_after(facts.target, run.before, run.now) == []
    if facts.source.model_options.get("buffers") and facts.source.dp != facts.target.dp:
        # Every rank normalises over its own part of the batch.
        return
    if facts.source.model == "moe":
        # Tokens are routed among those of another number of ranks.
        return
    losses, expected = checks.next_losses(facts, run.before, run.now)
    assert losses == expected


@pytest.mark.parametrize("pair", checks.chosen(PAIRS, lambda pair: pair.stock))
def test_it_is_what_deepspeed_makes_of_the_converted_checkpoint(resharded: Callable[[str], Run], pair: str) -> None:
    run = resharded(pair)
    for rank, holding in zip(run.ranks, run.now, strict=True):
        assert rank["stock"]["differs"] == []
        assert rank["stock"]["next_losses"] == holding["next_losses"]
