"""Metadata replaced by anything, anywhere: an error that says what is wrong, or the right tensors. Nothing else."""

import copy
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from converting import convert, is_flat, leftovers, wrong
from fuzzing import FuzzError, base_of, campaign
from resharding import reshard
from synthetic import COLUMN, ROW, Cut, ExpertLayer, FragmentAddress, LossScaler, Param, World, make, random_full, save

from deepspeed_affine.cli import ds_affine, ds_to_universal
from deepspeed_affine.commands import convert as command
from deepspeed_affine.errors import AffineError

REPLACEMENTS = (
    None,
    [],
    {},
    (),
    "",
    "x",
    -1,
    0,
    3,
    2**70,
    1.5,
    float("nan"),
    True,
    b"bytes",
    [None],
    {"a": None},
    {3: 4},
    torch.zeros(2),
    torch.zeros(2, 2),
    LossScaler(a=1),
    complex(1, 2),
)
DELETED = object()

MEANING = ("universal_checkpoint_info", "use_data_before_expert_parallelism")
"""Metadata that may say something else and still be metadata: the tensors then follow what it says."""


def dense(tp):
    return [
        Param("emb", random_full((5 * tp, 2), 1), Cut("vocab", original_rows=5 * tp - 1) if tp > 1 else Cut()),
        Param("up", random_full((2 * tp, 3), 2), COLUMN, group=1),
        Param("down", random_full((3, 2 * tp), 3), ROW, group=1),
        Param("qkv", random_full((4 * tp, 2), 4), Cut("sub", sub_sizes=(2 * tp, 2 * tp))),
        Param("frozen", random_full((3,), 5), kind="frozen"),
        Param("buffer", random_full((3,), 6), kind="buffer"),
        Param("emb.alias", random_full((5 * tp, 2), 1), COLUMN, kind="alias", alias_of="emb"),
    ]


def experts(placement, descriptor):
    weights = {w: random_full((4, 2, 3), 40 + i) for i, w in enumerate(("w1", "w2", "w3"))}
    return [ExpertLayer("mlp.experts", weights, placement, descriptor=descriptor, group=2)]


WORLDS = {
    "zero1": lambda: make(World(stage=1, dp=2), dense(1)),
    "zero2-tp2": lambda: make(World(stage=2, tp=2, dp=2), dense(2)),
    "zero1-pp2": lambda: make(
        World(tp=1, pp=2, dp=1, layer_files=True),
        [Param("a", random_full((3,), 1)), Param("b", random_full((3,), 2), stages=(1,))],
    ),
    "zero3": lambda: make(World(stage=3, dp=2), dense(1)),
    "zero3-tp2": lambda: make(World(stage=3, tp=2, dp=2), dense(2)),
    "experts": lambda: make(World(dp=4), dense(1)[:1], experts(((0, 1), (2, 3)), False)),
    "experts-placed": lambda: make(World(dp=2), dense(1)[:1], experts(((3, 1), (2, 0, 1)), True)),
    "experts-folded": lambda: make(World(tp=2, dp=2), dense(2)[:2], experts(((0, 1), (2, 3)), True)),
    "muon": lambda: make(
        World(dp=2, states=("momentum_buffer",), whole_states=("momentum_buffer",)),
        [Param("a", random_full((6, 5), 1)), Param("b", random_full((7, 5), 2))],
    ),
}


def places(value, path=()):
    """Every place in a graph of dictionaries, lists and objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from places(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield (*path, index)
            yield from places(inner, (*path, index))
    elif isinstance(value, FragmentAddress):
        for key in vars(value):
            yield (*path, key)


def replaced(value, path, new):
    """``value`` with the place at ``path`` replaced or, for DELETED, left out."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(value, FragmentAddress):
        state = dict(vars(value))
        state[key] = new
        if new is DELETED:
            del state[key]
        return FragmentAddress(**state)
    if isinstance(value, dict):
        result = type(value)(value)
        if not rest and new is DELETED:
            del result[key]
        else:
            result[key] = replaced(value[key], rest, new)
        return result
    items = list(value)
    if not rest and new is DELETED:
        del items[key]
    else:
        items[key] = replaced(items[key], rest, new)
    return items if isinstance(value, list) else tuple(items)


def outcome(folder, target):
    """The error's class, or None after success; anything but an AffineError comes through."""
    arguments = ["--affine", "--no-fsync", "--input_folder", str(folder), "--output_folder", str(target)]
    seen = []
    real = command.run

    def run(args):
        try:
            return real(args)
        except (AffineError, OSError):
            raise
        except Exception as error:
            seen.append(error)
            raise

    command.run = run
    try:
        code = ds_to_universal(arguments)
    finally:
        command.run = real
    if seen:
        raise seen[0]
    return code


def check(made, name, path, new, base, intact):
    root = replaced(made.files[name], path, new)
    folder, target = base / "in", base / "out"
    save(root, folder / name)
    try:
        code = outcome(folder, target)
        assert code in (0, 2)
        if code == 0 and not any(key in MEANING for key in path):
            # A tensor of the module that is no tensor any more is reported, and cannot be written.
            skip = ["emb.alias", "buffer", *(key for key in path if isinstance(key, str))]
            if "state" in path or "param_slice_mappings" in path:
                # A group may have no states yet, a state may be a number, and a parameter without a gradient has
                # no slice: only the weights are certain.
                made = replace(made, truth={entry: made.truth[entry] for entry in made.truth if entry[1] == "fp32"})
            assert wrong(made, target, flat=is_flat(made), skip=skip) == []
        elif code == 2:
            assert leftovers(target) == []
    except Exception as error:
        raise AssertionError(f"{name}: {path} replaced by {new!r}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copyfile(intact / name, folder / name)


def representative(name):
    """One file of each kind is enough: the first rank's and the last's."""
    return "rank_0_" in name or "mp_rank_00_model" in name or "rank_1_mp_rank_01" in name


def run_world(world, step, offset, capsys):
    made = WORLDS[world]()
    base = Path(tempfile.mkdtemp())
    try:
        made.save(base / "in")
        made.save(base / "intact")
        cases = [
            (name, path, new)
            for name, root in made.files.items()
            if representative(name)
            for path in places(root)
            for new in (*REPLACEMENTS, DELETED)
        ]
        assert len(cases) > 1000
        assert len(cases[offset::step]) > 10
        for name, path, new in cases[offset::step]:
            check(made, name, path, copy.deepcopy(new) if new is not DELETED else new, base, base / "intact")
            capsys.readouterr()
    finally:
        shutil.rmtree(base)


@pytest.mark.parametrize("world", WORLDS)
def test_a_sample_of_replacements(world, capsys):
    # A prime step, so that no kind of place always meets the same kind of replacement.
    run_world(world, 97, 5, capsys)


@pytest.mark.heavy
@pytest.mark.parametrize("world", WORLDS)
def test_many_replacements(world, capsys):
    run_world(world, 11, 0, capsys)


RESHARDED = {
    "zero1": ("--zero-stage", "3"),
    "zero2-tp2": ("--zero-stage", "1", "--dp", "3"),
    "zero1-pp2": ("--dp", "2"),
    "zero3": ("--zero-stage", "1"),
    "zero3-tp2": ("--zero-stage", "2", "--dp", "3"),
    "muon": ("--dp", "3"),
}


def reshard_world(world, step, capsys):
    """What ``reshard`` makes of the replacements is refused, or the same numbers as ``diff`` finds in the source."""
    made = WORLDS[world]()
    base = Path(tempfile.mkdtemp())
    source, target = base / "in", base / "out"
    try:
        made.save(source)
        made.save(base / "intact")
        cases = [
            (name, path, new)
            for name, root in made.files.items()
            if representative(name)
            for path in places(root)
            for new in (*REPLACEMENTS, DELETED)
            if "shared_params" not in path
        ]
        ended = {0: 0, 2: 0}
        for name, path, new in cases[::step]:
            save(replaced(made.files[name], path, copy.deepcopy(new) if new is not DELETED else new), source / name)
            code = reshard(source, target, *RESHARDED[world])
            said = capsys.readouterr().err
            where = f"{name}: {path} replaced by {new!r}: {said}"
            ended[code] += 1
            assert "internal error" not in said, where
            if code:
                assert leftovers(target) == [], where
                assert said, where
            else:
                assert ds_affine(["diff", "--contents", str(source), str(target)]) == 0, where + capsys.readouterr().out
                capsys.readouterr()
            shutil.rmtree(target, ignore_errors=True)
            shutil.copyfile(base / "intact" / name, source / name)
        assert min(ended.values()) >= 2
    finally:
        shutil.rmtree(base)


@pytest.mark.parametrize("world", RESHARDED)
def test_a_sample_of_replacements_resharded(world, capsys):
    reshard_world(world, 131, capsys)


@pytest.mark.heavy
@pytest.mark.parametrize("world", RESHARDED)
def test_many_replacements_resharded(world, capsys):
    reshard_world(world, 17, capsys)


def byte_bases(base):
    """Every world as a folder, with its conversion, compared with what the folder was cut from."""
    for name, build in WORLDS.items():
        made = build()
        source, target = base / name / "in", base / name / "universal"
        assert convert(made.save(source), target) == 0
        assert wrong(made, target, flat=is_flat(made), skip=("emb.alias",)) == []
        # A shard of two tensor-parallel ranks is of the shape that one rank's whole parameters are.
        yield base_of(name, name.removesuffix("-tp2").replace("zero2", "zero1"), source, target)


@pytest.mark.parametrize("seed", [1])
def test_changed_bytes_are_refused_or_change_nothing(tmp_path, seed):
    report = campaign(list(byte_bases(tmp_path)), 180, seed)
    assert not report.failures, report.failed
    assert sum(count for (_, outcome), count in report.outcomes.items() if outcome == "refused") > 100


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(2, 5))
def test_many_changed_bytes_are_refused_or_change_nothing(tmp_path, seed):
    report = campaign(list(byte_bases(tmp_path)), 1000, seed)
    assert not report.failures, report.failed


LIKE_OURS = "ds_to_universal: error: {}: is damaged"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda *args: sys.stderr.write("ds_to_universal: error: internal error, KeyError: 1") and 2, "internal error"),
        (lambda *args: sys.stderr.write("ds_to_universal: error: it did not work") and 2, "names no file"),
        (lambda *args: 2, "nothing said"),
        (lambda *args: 1, "exit code 1"),
        (lambda *args: time.sleep(60), "still running"),
        (lambda *args: os.system("true"), "executed"),
        (lambda source, target, *args: os.mkdir(target) or (sys.stderr.write(LIKE_OURS.format(source)) and 2), "left"),
        (lambda source, target, *args: os.mkdir(target) or 0, "is missing"),
    ],
)
def test_a_campaign_sees_what_must_not_happen(tmp_path, monkeypatch, run, said):
    bases = list(byte_bases(tmp_path))[:1]
    monkeypatch.setattr("fuzzing.convert", run)
    monkeypatch.setattr("fuzzing.SECONDS", 1)
    with pytest.raises(FuzzError, match=said):
        campaign(bases, 1, 1)
