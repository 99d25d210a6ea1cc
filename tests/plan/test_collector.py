"""Planning and the garbage collector of the process that plans."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from deepspeed_affine import ParamAffineMap, Placement, contiguous_split_map, plan_model, plan_transfer
from deepspeed_affine.errors import InvalidMapError
from deepspeed_affine.plan.collector import collector_paused


@pytest.fixture
def collections() -> Iterator[list[str]]:
    seen: list[str] = []

    def note(phase: str, _: object) -> None:
        seen.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def split(parts: int) -> ParamAffineMap:
    return contiguous_split_map((840, 8), (840 // parts,) * parts, 0)


def placed(parts: int) -> dict[str, Placement]:
    return {"w": Placement.own(split(parts), 4)}


@pytest.mark.parametrize(
    "work", [lambda: plan_transfer(split(420), split(840)), lambda: plan_model(placed(420), placed(840))]
)
def test_nothing_is_collected_while_a_plan_is_made(
    work: Callable[[], object], collections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[int] = []
    enable, disable = gc.enable, gc.disable

    def disabled() -> None:
        disable()
        collections.clear()

    def enabled() -> None:
        before.append(len(collections))
        enable()

    monkeypatch.setattr(gc, "disable", disabled)
    monkeypatch.setattr(gc, "enable", enabled)
    work()
    assert before == [0]
    assert gc.isenabled()


def test_the_same_work_with_the_collector_does_collect(collections: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = split(420), split(840)
    monkeypatch.setattr(gc, "disable", lambda: None)
    del collections[:]
    plan_transfer(target, source)
    assert collections


def test_after_an_error_the_collector_is_as_it_was() -> None:
    with pytest.raises(InvalidMapError):
        plan_transfer(split(4), contiguous_split_map((840, 9), (420, 420), 0))
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        plan_transfer(split(4), split(2))
        assert not gc.isenabled()
    finally:
        gc.enable()
