"""What ``attach`` and ``with_universal_info`` promise, of live engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starts import INSTALLED, Starts, asked

pytestmark = pytest.mark.real

CASES = [
    *(
        pytest.param((INSTALLED, case), id=case)
        for case in ("zero1", "zero3", "zero3_momentum", "zero0", "hand_tp", "moe")
    ),
    pytest.param(("0.16.9", "zero1"), id="zero1-0.16.9"),
    pytest.param(("0.18.9", "moe"), id="moe-0.18.9"),
]


@pytest.fixture(scope="module")
def starts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Starts:
    script = Path(__file__).with_name("attach_run.py")
    return Starts(script, tmp_path_factory.mktemp("contract"), asked(request, "run", tuple))


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, starts: Starts) -> tuple[str, list[dict[str, Any]]]:
    """A case's name and what each of its ranks observed."""
    environment, case = request.param
    done = starts.done(environment, case)
    assert done["ok"], done["error"]
    if environment != INSTALLED:
        assert {rank["version"].split("+")[0] for rank in done["ranks"]} == {environment}
    return case, list(done["ranks"])


def test_what_cannot_be_attached_is_said(run: tuple[str, list[dict[str, Any]]]) -> None:
    for rank in run[1]:
        assert rank["not an engine"].startswith("PolicyError: attach was given a ")
        assert "no 'module'" in rank["not an engine"]
        assert "expected one of ['refuse', 'reset', 'power']" in rank["no policy"]
        assert "is attached already" in rank["twice"]
        assert "Call detach()" in rank["twice"]


def test_the_handle_describes_every_parameter_and_detaches(run: tuple[str, list[dict[str, Any]]]) -> None:
    for rank in run[1]:
        assert (rank["attached"], rank["described"], rank["detached"]) == (True, True, True)


def test_where_saving_does_not_read_the_attribute_one_rank_says_what_to_do(
    run: tuple[str, list[dict[str, Any]]],
) -> None:
    case, ranks = run
    for number, rank in enumerate(ranks):
        version = tuple(int(part) for part in rank["version"].split("+")[0].split("."))
        emits = version >= ((0, 19, 4) if case == "moe" else (0, 18, 9))
        assert rank["emits"] == emits
        assert len(rank["warned"]) == (not emits and number == 0)


def test_a_client_state_gains_the_maps_and_keeps_what_it_has(run: tuple[str, list[dict[str, Any]]]) -> None:
    case, ranks = run
    for rank in ranks:
        client = rank["client"]
        refused = case == "moe" and rank["emits"]
        assert client["untouched"]
        assert client["note"] == ["mine", "mine"]
        assert client["in client state"] == (not refused)
        assert client["none"] == ([] if refused else ["universal_checkpoint_info"])
        assert (client["kept"], client["version"], client["maps"] >= 9) == (True, 0.5, True)


def test_loading_gives_the_same_whichever_way_it_is_asked_for(run: tuple[str, list[dict[str, Any]]]) -> None:
    case, ranks = run
    for rank in ranks:
        if case == "zero0" or (case == "moe" and not rank["emits"]):
            assert rank["loads"].startswith("UnsupportedLayoutError: ")
            assert "deepspeed_affine.load_checkpoint" in rank["loads"]
            continue
        if case == "zero3_momentum":
            assert rank["loads"]["weights alone"] == []
            assert "no exp_avg and no exp_avg_sq is stored" in rank["loads"]["refused"]
            continue
        for refusal in rank["loads"].pop("no such tag"):
            assert "holds no folder 'zero'" in refusal
        assert rank["loads"].pop("spoilt")
        assert rank["loads"] == {"by latest_universal": [], "again, by keywords": [], "by the class's own method": []}
