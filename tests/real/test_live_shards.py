"""Weights of live DeepSpeed engines moved into models in the same job: a trainer's into evaluators, and back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starts import Environment

pytestmark = pytest.mark.real

PARAMS = 13


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    root = tmp_path_factory.mktemp("live_shards")
    command = [sys.executable, str(Path(__file__).with_name("live_transfer_run.py")), str(root)]
    ended = subprocess.run(command, env=Environment().variables(), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads((root / "done.json").read_text())
    for name, run in found.items():
        assert run["ok"], f"{name}: {run['error']}"
    return {name: run["ranks"] for name, run in found.items()}


def test_a_model_on_each_process_gets_the_whole_of_what_tensor_parallel_ranks_hold(done):
    for rank in done["tensor_parallel"]:
        assert rank["wrong"] == []
        assert (rank["params"], rank["changed"]) == (PARAMS, PARAMS)
        engine, model = rank["losses"]
        assert engine == pytest.approx(model, rel=1e-5)
        # What both hold whole is not sent.
        assert 0 < rank["sent"] < rank["copied"]


def test_and_the_other_way_each_rank_gets_its_shards(done):
    assert [rank["wrong_back"] for rank in done["tensor_parallel"]] == [[], []]


def test_parts_under_zero_3_are_sent_from_where_they_lie(done):
    first, second = done["partitioned"]
    assert second["wrong"] == []
    assert second["changed"] == PARAMS
    assert first["sent"] == second["copied"] > 0
    assert second["sent"] == 0


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("filled", "rank 0 and 1 more: parameter .* lies in parts under ZeRO-3"),
        ("no model", "rank 0 and 1 more: was given a str"),
        ("absent", "no process of the group holds part 1 of 2"),
        ("unlike", "ranks 0 and 1 describe it differently"),
    ],
)
def test_what_cannot_be_moved_is_one_error_on_all(done, what, message):
    texts = [rank["refusals"][what] for rank in done["partitioned"]]
    assert len(set(texts)) == 1
    assert re.search(message, texts[0])
