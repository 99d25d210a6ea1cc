"""``ds_affine explain`` and ``simulate``: totals that add up, pictures that are right, and refusals."""

import json

import numpy as np
import pytest
from synthetic import COLUMN, REPLICATED, ROW, Cut, Param, World, make, random_full

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.commands.picture import SAMPLES, draw_maps, held_by
from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, contiguous_split_map, replicated_map
from deepspeed_affine.plan.model import ModelPlan
from deepspeed_affine.plan.placement import Placement

PARAMS = [
    Param("a.weight", random_full((8, 6), 1), COLUMN),
    Param("b.weight", random_full((5, 8), 3), ROW),
    Param("norm", random_full((7,), 4), REPLICATED),
]
ELEMENTS = 48 + 40 + 7


def saved(tmp_path, name, world, params=PARAMS):
    return str(make(world, params).save(tmp_path / name))


@pytest.fixture
def two(tmp_path):
    return saved(tmp_path, "source", World(stage=1, tp=2, dp=2)), saved(tmp_path, "target", World(stage=3, tp=1, dp=3))


def explained(capsys, *arguments):
    assert ds_affine(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_totals_add_up(two, capsys):
    found = explained(capsys, *two, "--segments")
    # fp32 and Adam's two moments.
    assert found["moved_bytes"] + found["local_bytes"] == ELEMENTS * 12
    assert sum(row["bytes"] for row in found["traffic"]) == ELEMENTS * 12
    assert found["local_bytes"] == sum(row["bytes"] for row in found["traffic"] if row["local"])
    assert found["source"] == {"path": two[0], "tp": 2, "pp": 1, "dp": 2, "zero_stage": 1}
    assert found["balance"]["ratio"] >= 1
    # ZeRO-3 cuts each parameter in three, the last part being the shortest.
    assert found["largest_target"] == {"rank": 0, "bytes": (16 + 14 + 3) * 12}
    plan = ModelPlan.from_dict(found["plan"])
    assert plan.moved_bytes == found["moved_bytes"]
    assert len(plan.plans) == found["parameters"] == 3
    apart = explained(capsys, *two, "--apart")
    assert (apart["moved_bytes"], apart["local_bytes"]) == (ELEMENTS * 12, 0)


def test_weights_of_every_copy(two, capsys):
    found = explained(capsys, two[1], two[0], "--what", "weights")
    width = 4
    assert found["moved_bytes"] + found["local_bytes"] == 2 * (ELEMENTS + 7) * width
    one = explained(capsys, two[1], two[0], "--what", "weights", "--param", "norm")
    assert one["moved_bytes"] + one["local_bytes"] == 4 * 7 * width


def test_every_parameter_counts_with_the_states_it_has(tmp_path, capsys):
    """Muon's kind: one group has a momentum, the other Adam's two moments."""
    one, other = random_full((6, 4), 5), random_full((9,), 6)
    params = [
        Param("hidden.weight", one, REPLICATED, states={"momentum_buffer": random_full((6, 4), 7)}),
        Param("bias", other, REPLICATED, group=1),
    ]
    folder = saved(tmp_path, "mixed", World(stage=1, tp=1, dp=2), params)
    found = explained(capsys, folder, folder)
    assert (found["moved_bytes"], found["local_bytes"]) == (0, 24 * 8 + 9 * 12)


def test_text_for_a_person(two, capsys):
    assert ds_affine(["explain", *two]) == 0
    said = capsys.readouterr().out
    assert said.startswith("states: TP 2, PP 1, DP 2, ZeRO-1 to TP 1, PP 1, DP 3, ZeRO-3\n")
    assert "heaviest sender" in said
    assert "times the least possible" in said


def test_a_layout_file_is_as_good_as_the_checkpoint(two, tmp_path, capsys):
    layout = str(tmp_path / "target.json")
    assert ds_affine(["layout", two[1], "-o", layout]) == 0
    capsys.readouterr()
    one, other = explained(capsys, two[0], layout), explained(capsys, *two)
    assert one.pop("target")["path"] == layout
    other.pop("target")
    assert one == other


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda document: document["topology"].update(dp=10**30), "'dp' is 1000"),
        (lambda document: document["topology"].update(dp=1 << 20), "shards of"),
        (lambda document: document["params"]["norm"].update(dtype="float7"), "'dtype' of 'norm' is 'float7'"),
        (lambda document: document["optimizer"].update(states=["exp_avg", "exp_avg"]), "each once"),
    ],
)
def test_a_layout_file_that_is_damaged(two, tmp_path, monkeypatch, capsys, change, said):
    """Checked before it is counted: degrees of thirty digits would be counted one by one."""
    file = tmp_path / "layout.json"
    assert ds_affine(["layout", two[0], "-o", str(file)]) == 0
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    monkeypatch.setattr("deepspeed_affine.commands.limits.MOST_SHARDS", 1 << 21)
    capsys.readouterr()
    assert ds_affine(["explain", str(file), two[1]]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(file) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["layout", ""], "CHECKPOINT"),
        (["layout", ".", "-o", ""], "--output"),
        (["inspect", ""], "FOLDER"),
        (["diff", "", "."], "A"),
        (["parity", "--input_folder", ""], "--input_folder"),
        (["parity", "--input_folder", ".", "--workdir", ""], "--workdir"),
        (["explain", ".", ""], "SOURCE or TARGET"),
    ],
)
def test_an_empty_path_is_not_the_folder_it_runs_in(two, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(two[0])
    assert ds_affine(arguments) == 2
    assert capsys.readouterr().err == (
        f"ds_affine: error: {named}: is empty; expected a path. Is a shell variable not set?\n"
    )


def test_two_paddings_of_a_vocabulary(tmp_path, capsys):
    def world(tp):
        return World(stage=1, tp=tp, dp=1)

    sides = []
    for tp, height in ((4, 16), (2, 14)):
        params = [Param("embed", random_full((height, 4), 9), Cut("vocab", original_rows=13))]
        sides.append(saved(tmp_path, str(tp), world(tp), params))
    found = explained(capsys, *sides)
    assert found["moved_bytes"] + found["local_bytes"] == 13 * 4 * 12
    assert found["unfilled_elements"] == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "x.png"], "--param"),
        (["--segments"], "--json"),
        (["--param", "nothing"], "nothing"),
        (["--param", "norm", "--plot", "no/such/folder/x.png"], "cannot be written"),
        (["--param", "norm", "--plot", "x.unknown"], "cannot be written"),
        (["--param", "norm", "--plot", ""], "cannot be written"),
        (["--param", "norm", "--plot", "."], "cannot be written"),
    ],
)
def test_refusals(two, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert ds_affine(["explain", *two, *arguments]) == 2
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_no_checkpoint(two, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    for side in (str(empty), str(tmp_path / "none"), ""):
        assert ds_affine(["explain", two[0], side]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    other = saved(tmp_path, "other", World(stage=1, tp=1, dp=1), [Param("b.weight", random_full((5, 9), 3), COLUMN)])
    assert ds_affine(["explain", two[0], other]) == 2
    assert "(5, 9)" in capsys.readouterr().err


def test_a_picture_is_written(two, tmp_path, capsys):
    picture = tmp_path / "map.png"
    assert ds_affine(["explain", *two, "--param", "b.weight", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_speaks_of_the_processes_of_the_text(two, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("deepspeed_affine.commands.picture.draw_maps", lambda path, name, sides: drawn.extend(sides))
    assert ds_affine(["explain", *two, "--param", "norm", "--plot", str(tmp_path / "map.png")]) == 0
    (before, source), (after, target) = drawn
    assert (source, target) == ("TP 2, PP 1, DP 2, ZeRO-1", "TP 1, PP 1, DP 3, ZeRO-3")
    picture, sets = held_by(after)
    assert sets == [(0,), (1,), (2,)]
    assert picture.tolist() == [[0, 0, 0, 1, 1, 1, 2]]
    # Whole on both tensor-parallel ranks, and cut over the data-parallel ranks of each.
    assert all(len(holders) == 2 for holders in held_by(before)[1])
    weights = Placement(contiguous_split_map((2, 1), (1, 1), 0), {0: (0, 2), 1: (1, 3)}, 4)
    assert held_by(weights)[1] == [(0, 2), (1, 3)]


def test_what_only_one_side_has_is_told(tmp_path, capsys):
    full = saved(tmp_path, "full", World(stage=1, dp=2))
    fewer = saved(tmp_path, "fewer", World(stage=1, dp=2), PARAMS[:2])
    found = explained(capsys, full, fewer)
    assert (found["source_only"], found["new_states"], found["parameters"]) == (["norm"], [], 2)
    assert ds_affine(["explain", full, fewer]) == 0
    assert "the target has no states of norm\n" in capsys.readouterr().out
    none = saved(tmp_path, "none", World(stage=1, dp=2, states=(), step=None), PARAMS[:2])
    found = explained(capsys, none, fewer)
    assert found["new_states"] == ["exp_avg", "exp_avg_sq", "step"]
    assert found["moved_bytes"] + found["local_bytes"] == (48 + 40) * 4


def test_a_name_is_drawn_as_it_is(tmp_path):
    file = tmp_path / "no_ending"
    draw_maps(str(file), r"a$\frac$b$_{$", [(Placement.own(replicated_map((2, 2), 1), 4), "one")])
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UnsupportedLayoutError, match=r"deepspeed-affine\[plot\]"):
        draw_maps(str(tmp_path / "x.png"), "w", [(Placement.own(replicated_map((2, 2), 1), 4), "one")])


def test_a_picture_shows_the_holders_of_every_element():
    layouts = [
        contiguous_split_map((6, 5), (3, 2), 1),
        replicated_map((4,), 3),
        replicated_map((), 2),
        ParamAffineMap(
            (2, 6),
            {0: (6,), 1: (6,)},
            {
                0: [AffinePiece((6,), 0, (2,), 0, (1,), [0])],
                1: [AffinePiece((6,), 1, (2,), 0, (1,), [1])],
            },
        ),
    ]
    for layout in layouts:
        picture, sets = held_by(Placement.own(layout, 4))
        flat = picture.reshape(-1)
        holders = layout.holders()
        assert len(flat) == layout.numel
        assert [frozenset(sets[number]) for number in flat] == [holders[at] for at in range(layout.numel)]


def test_a_large_map_is_sampled():
    picture, sets = held_by(Placement.own(contiguous_split_map((50_000, 30_000), (10_000, 40_000), 0), 4))
    assert picture.shape == (SAMPLES, SAMPLES)
    assert sets == [(0,), (1,)]
    assert abs(np.mean(picture == 0) - 0.2) < 0.01
    hole = contiguous_split_map((4, 4), (2, 2), 0).restrict_rows(0, 3)
    assert (held_by(Placement.own(hole, 4))[0][3] == -1).all()


def simulated(capsys, *arguments):
    assert ds_affine(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_a_simulation_of_thousands_of_ranks(capsys):
    """2,048 ranks to 1,024: every target copy gets its part, and no sender more than it must."""
    found = json.loads(
        simulated(
            capsys,
            *("--model", "llama-7b", "--source", "tp8,pp4,dp64", "--target", "tp4,pp8,dp32", "--json"),
        )
    )
    assert (found["source"]["ranks"], found["target"]["ranks"]) == (2048, 1024)
    norms = (2 * 32 + 1) * 4096
    total = 6_738_415_616 - norms + norms * 4
    assert found["moved_bytes"] + found["local_bytes"] == total * 32 * 2
    assert found["balance"]["ratio"] < 1.05
    assert found["segments"] < 100_000
    states = json.loads(
        simulated(
            capsys,
            *("--model", "llama-7b", "--source", "tp8,pp4,dp64,zero1", "--target", "tp4,pp8,dp32,zero3"),
            *("--what", "states", "--json"),
        )
    )
    assert states["moved_bytes"] + states["local_bytes"] == total * 12


def test_a_target_without_a_stage_has_the_stage_of_the_source(capsys):
    common = ["--model", "llama-7b", "--source", "tp2,dp2,zero1", "--what", "states", "--json"]
    short, full, none = (
        json.loads(simulated(capsys, *common, "--target", text)) for text in ("tp4", "tp4,zero1", "tp4,zero0")
    )
    assert short["target"]["topology"] == "tp4,pp1,dp1,zero1"
    assert short["traffic"] == full["traffic"]
    assert none["target"]["topology"] == "tp4,pp1,dp1,zero0"


def test_two_tensors_of_one_name_are_refused(tmp_path, capsys):
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"tensors": [{"name": "w", "shape": [4]}, {"name": "w", "shape": [8]}]}))
    assert ds_affine(["simulate", "--model", str(file), "--source", "tp2", "--target", "tp4"]) == 2
    assert "'w' twice" in capsys.readouterr().err


def test_a_model_of_ones_own(tmp_path, capsys):
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"tensors": [{"name": "w", "shape": [64, 64], "axis": 0}]}))
    common = ["--model", str(file), "--source", "tp4", "--target", "tp2,dp8"]
    said = simulated(capsys, *common, "--host-ranks", "8", "--apart", "--all")
    assert "4 ranks) to tp2,pp1,dp8,zero0 (16 ranks)" in said
    assert "65.5 KB" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--model", "gpt-9"], "known are"),
        (["--model", "."], "cannot be read"),
        (["--source", "tp2,tp2"], "each once"),
        (["--target", "dp999999"], "shards"),
        (["--source", "tp999999,pp999999,dp999999"], "shards"),
        (["--target", "pp999999,dp999"], "shards"),
        (["--weight-bytes", "0"], "--weight-bytes"),
        (["--host-ranks", "-1"], "--host-ranks"),
    ],
)
def test_refusals_of_a_simulation(capsys, change, said):
    given = {"--model": "llama-7b", "--source": "tp2", "--target": "tp4", change[0]: change[1]}
    assert ds_affine(["simulate", *[part for pair in given.items() for part in pair]]) == 2
    assert said in capsys.readouterr().err
