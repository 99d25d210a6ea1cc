"""DeepSpeed's own command as the oracle, on synthetic folders that no small training run would give."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from converting import convert, leftovers, wrong
from damage import STORED, storages
from edits import flip
from synthetic import Cut, Param, World, exact, make, random_full

from deepspeed_affine.hooks import stock
from deepspeed_affine.parity import compare_universal

pytestmark = pytest.mark.real


def dense(tp, rows=None, stages=(0,)):
    return [
        Param("emb.weight", random_full((7 * tp, 3), 1), Cut("vocab", original_rows=7 * tp - 3)),
        Param("up.weight", random_full((sum(rows) if rows else 4 * tp, 3), 2), Cut("column", rows)),
        Param("down.weight", random_full((3, sum(rows) if rows else 2 * tp), 3), Cut("row", rows), group=1),
        Param("norm.weight", random_full((5,), 4), stages=stages, group=1),
        Param("qkv.weight", random_full((6 * tp, 2), 5), Cut("sub", sub_sizes=(2 * tp, 4 * tp))),
    ]


def simple():
    return [Param("w", random_full((13, 5), 1)), Param("b", random_full((3,), 2), group=1)]


CASES = {
    "P26 twelve data ranks": lambda: make(World(dp=12), [Param("w", random_full((11, 12), 1))]),
    "P26 twelve data ranks, ZeRO-3": lambda: make(World(stage=3, dp=12), [Param("w", random_full((11, 12), 1))]),
    "P18 padding of several ranks": lambda: make(World(dp=12), [Param("w", random_full((15,), 1))]),
    "alignment between parameters": lambda: make(World(dp=3, align=4), simple()),
    "tp 2": lambda: make(World(tp=2, dp=2), dense(2)),
    "tp 3 uneven": lambda: make(World(tp=3, dp=2, align=4), dense(3, (3, 2, 1))),
    "tp 8": lambda: make(World(stage=2, tp=8), dense(8)),
    "tp 2, ZeRO-3": lambda: make(World(stage=3, tp=2, dp=3), dense(2)),
    "pp 2, tp 2, tied": lambda: make(
        World(tp=2, pp=2, dp=2), [replace(param, group=0) for param in dense(2, stages=(0, 1))]
    ),
    "bf16 moments": lambda: make(World(dp=2, state_dtype=torch.bfloat16), simple()),
    "P08 bf16 prefix": lambda: make(World(dp=2, prefix="bf16_", strip_padding=False), simple()),
    "P12 groups, ZeRO-3": lambda: make(World(stage=3, dp=3), simple()),
    "P32 step as a number": lambda: make(World(dp=2, step=5), simple()),
    "P46 tied": lambda: make(
        World(dp=2), [*simple(), Param("alias", random_full((13, 5), 1), kind="alias", alias_of="w")]
    ),
    "P20 frozen and buffers": lambda: make(
        World(dp=2, info={"tp_replicated_parameter_patterns": [exact("w"), exact("b")]}),
        [
            *simple(),
            Param("frozen", random_full((4,), 7), kind="frozen"),
            Param("n", torch.tensor(5), kind="buffer"),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_deepspeeds(tmp_path, case):
    made = CASES[case]()
    folder = made.save(tmp_path / "in")
    assert convert(folder, tmp_path / "ours") == 0
    flat = made.world.stage == 3 and made.world.tp == 1
    assert wrong(made, tmp_path / "ours", flat=flat) == []
    theirs = stock.convert(folder, tmp_path / "theirs", timeout=300)
    assert theirs.ok, theirs.message
    report = compare_universal(tmp_path / "ours", tmp_path / "theirs")
    assert report.different == ()
    assert len(report.rows) > 5


FAILS = {
    "P49 SGD": (lambda: make(World(dp=2, states=(), step=None), simple()), "IndexError"),
    "P49 Lion": (lambda: make(World(dp=2, states=("exp_avg",)), simple()), "KeyError"),
    "P49 momentum": (lambda: make(World(dp=2, states=("momentum_buffer",)), simple()), "KeyError"),
    "P49 Lion, ZeRO-3": (lambda: make(World(stage=3, dp=2, states=("exp_avg",)), simple()), "KeyError"),
    "P51 before the first step, ZeRO-3": (
        lambda: make(World(stage=3, dp=2, states=(), step=None), simple()),
        "KeyError",
    ),
}


@pytest.mark.parametrize("case", FAILS)
def test_what_deepspeed_cannot_convert_is_converted_here(tmp_path, case):
    """The recorded exceptions make an upstream fix noticed."""
    build, expected = FAILS[case]
    made = build()
    folder = made.save(tmp_path / "in")
    theirs = stock.convert(folder, tmp_path / "theirs", timeout=300)
    assert expected in theirs.message
    assert convert(folder, tmp_path / "ours") == 0
    flat = made.world.stage == 3
    assert wrong(made, tmp_path / "ours", flat=flat) == []


def exchange(folder, name):
    one, other = folder / name.format(0), folder / name.format(1)
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


def averaged():
    made = make(World(tp=2), [Param("w", torch.ones(3), Cut("average"))])
    flip(made, 1, element=0, bit=1 << 20)
    return made


def tied():
    params = [Param("w", random_full((4,), 1), stages=(0, 1)), Param("v", random_full((5,), 2), stages=(1,))]
    made = make(World(pp=2), params)
    flip(made, 1, element=0, bit=1 << 20)
    return made


def without_info(stage):
    params = [Param("row", random_full((3, 4), 1), Cut("row")), Param("norm", random_full((3,), 2))]
    return make(World(stage=stage, tp=2, with_info=False), params)


OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
WRONG = {
    "P01 tensor parallelism without info": (lambda: without_info(1), None),
    "P01 tensor parallelism without info, ZeRO-3": (lambda: without_info(3), None),
    "P35 a mean": (averaged, None),
    "P47 tied across stages and not equal": (tied, None),
    "two ranks exchanged": (lambda: make(World(dp=2), simple()), lambda folder: exchange(folder, OPTIMIZER)),
    "two ranks exchanged, ZeRO-3": (
        lambda: make(World(stage=3, dp=2), simple()),
        lambda folder: exchange(folder, OPTIMIZER),
    ),
    "a rank doubled, ZeRO-3": (
        lambda: make(World(stage=3, dp=2), simple()),
        lambda folder: shutil.copy(folder / OPTIMIZER.format(0), folder / OPTIMIZER.format(1)),
    ),
    "a flipped byte": (
        lambda: make(World(dp=2), simple()),
        lambda folder: STORED["middle"](storages(folder / OPTIMIZER.format(1))[-1])(folder / OPTIMIZER.format(1)),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_deepspeed_converts_wrongly_is_refused_here(tmp_path, case):
    """The day DeepSpeed refuses one of these, or converts it rightly, this test says so."""
    build, edit = WRONG[case]
    made = build()
    folder = Path(made.save(tmp_path / "in"))
    if edit is not None:
        edit(folder)
    theirs = stock.convert(folder, tmp_path / "theirs", inject_missing_state=True, timeout=300)
    assert theirs.ok, theirs.message
    assert wrong(made, tmp_path / "theirs", flat=made.world.stage == 3 and made.world.tp == 1) != []
    assert convert(folder, tmp_path / "ours", "--inject_missing_state") == 2
    assert leftovers(tmp_path / "ours") == []


def test_what_deepspeed_leaves_out_is_written_here(tmp_path):
    """P49: AMSGrad's third state, dropped with exit code 0."""
    made = make(World(dp=2, states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq")), simple())
    folder = made.save(tmp_path / "in")
    theirs = stock.convert(folder, tmp_path / "theirs", timeout=300)
    assert theirs.ok, theirs.message
    assert wrong(made, tmp_path / "theirs") == ["w/max_exp_avg_sq is missing", "b/max_exp_avg_sq is missing"]
    assert convert(folder, tmp_path / "ours") == 0
    assert wrong(made, tmp_path / "ours") == []
