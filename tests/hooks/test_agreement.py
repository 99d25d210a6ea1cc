"""What one rank finds, all raise: none waits for another that has given up, and none goes on alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks was told, by situation."""
    store = tmp_path_factory.mktemp("agreement") / "store"
    command = [sys.executable, str(HERE / "agreement_run.py")]
    started = [
        subprocess.Popen([*command, str(rank), str(store)], cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return [json.loads(out.splitlines()[-1]) for out in ended]


def test_copies_of_one_checkpoint_are_one(ranks):
    assert [rank["copies"] for rank in ranks] == ["fine: None"] * 2


@pytest.mark.parametrize(
    ("situation", "message"),
    [
        ("two checkpoints", "CheckpointFormatError: /folder: is what rank 0 found, and rank 1 found another"),
        ("options", "PolicyError: load_checkpoint: load_module_only is False on rank 0 and True on rank 1"),
        ("fault", "CheckpointFormatError: of rank 1"),
        ("bug described", "AffineError: half done:\nthe block: ZeroDivisionError: of rank 1"),
        ("info", "CheckpointFormatError: affine_map is a int"),
        ("no engine", "PolicyError: /folder: 2 faults\nload_checkpoint was given a NoneType"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_alike_by_both(ranks, situation, message):
    assert ranks[0][situation].startswith(message)
    assert ranks[1][situation] == ranks[0][situation]


def test_a_bug_is_itself_where_it_happened_and_named_elsewhere(ranks):
    assert [rank["bug"] for rank in ranks] == [
        "AffineError: the block: ZeroDivisionError: of rank 1",
        "ZeroDivisionError: of rank 1",
    ]


def test_names_are_those_of_any_rank(ranks):
    assert [rank["names"] for rank in ranks] == [["a", "of 0", "of 1"]] * 2
