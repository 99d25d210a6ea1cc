"""Nothing in any deepspeed module, class or function is replaced or set, and detach leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starts import INSTALLED, Starts, asked

pytestmark = pytest.mark.real

CASES = ("zero1", "zero2_bf16", "zero3", "autotp", "autotp_zero3", "hand_tp", "pipe", "moe")
STEPS = ("import", "attach", "attach another", "with_universal_info", "save", "load", "detach", "detach another")


@pytest.fixture(scope="module")
def starts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Starts:
    script = Path(__file__).with_name("identity_run.py")
    return Starts(script, tmp_path_factory.mktemp("identity"), asked(request, "ranks", lambda case: (INSTALLED, case)))


@pytest.fixture(scope="module", params=CASES)
def ranks(request: pytest.FixtureRequest, starts: Starts) -> list[dict[str, Any]]:
    done = starts.done(INSTALLED, request.param)
    assert done["ok"], done["error"]
    return list(done["ranks"])


def test_no_attribute_of_deepspeed_changes_at_any_step(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert not rank["imported_before"]
        assert rank["looked_at"] > 10_000
        assert tuple(rank["steps"]) == STEPS
        for step, changes in rank["steps"].items():
            by_stock = set(rank["by_stock"].get(step, ()))
            assert set(changes) <= by_stock, step


def test_a_change_of_each_kind_would_be_noticed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        replaced, overridden, added, marked = rank["noticed"]
        assert any(name.endswith(":load_hp_checkpoint_state") for name in replaced)
        assert any(name.endswith("DeepSpeedEngine.save_checkpoint") for name in overridden)
        assert any(name.endswith("DeepSpeedEngine.new") for name in added)
        assert any("load_hp_checkpoint_state@" in name and name.endswith(".mark") for name in marked)


def test_only_instances_are_set_and_detach_leaves_no_trace(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        owners = {fault.split(":")[0].split(" ")[0] for fault in rank["set_by_attach"]}
        assert owners <= {"engine", "module", "optimizer", "parameter"}
        assert {"engine: _load_checkpoint", "engine: _load_zero_checkpoint"} <= set(rank["set_by_attach"])
        assert any(fault.endswith(": load_hp_checkpoint_state") for fault in rank["set_by_attach"])
        assert (rank["left_behind"], rank["names_left_behind"], rank["hooks_left_behind"]) == ([], [], [])


def test_another_engine_is_not_disturbed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (rank["other_engine_by_attach"], rank["other_engine_by_detach"]) == ([], [])
        assert len(rank["weights_moved_by_the_other"]) >= 5
        assert not any(rank["weights_moved_by_the_other"])
