"""``ds_affine inspect``: what it says of whole, incomplete and damaged folders, and what it never does."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest
import torch
from converting import convert
from synthetic import COLUMN, ROW, Cut, ExpertLayer, Param, World, make, random_full

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.commands.inspect import describe_folder, format_description
from deepspeed_affine.ir import contiguous_split_map, replicated_map
from deepspeed_affine.storage.pt_reader import load_pickle


def params():
    return [
        Param("emb", random_full((10, 3), 1), Cut("vocab", original_rows=9)),
        Param("up", random_full((4, 3), 2), COLUMN),
        Param("down", random_full((3, 4), 3), ROW),
        Param("norm", random_full((3,), 4)),
    ]


def only_module():
    return [
        Param("fixed", random_full((4, 2), 5), COLUMN, kind="frozen"),
        Param("mean", random_full((3,), 6), kind="buffer"),
        Param("head", random_full((10, 3), 1), Cut("vocab", original_rows=9), kind="alias", alias_of="emb"),
    ]


def experts():
    weights = {f"w{number}": random_full((4, 3, 2), 10 + number) for number in (1, 2, 3)}
    return [ExpertLayer("moe.experts", weights, ((0, 1), (2, 3)))]


def inspect(folder, capsys, *options):
    """``(exit code, document, lines on stderr)``."""
    capsys.readouterr()
    code = ds_affine(["inspect", os.fspath(folder), "--json", *options])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err.splitlines()


def snapshot(folder):
    """Everything below the folder with its bytes and times."""
    found = {}
    for root, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = os.path.join(root, name)
            content = Path(path).read_bytes() if os.path.isfile(path) else None
            found[path] = (content, os.stat(path).st_mtime_ns)
    return found


@pytest.mark.parametrize(
    ("stage", "tp", "pp", "dp", "prefix"),
    [
        (1, 1, 1, 1, ""),
        (2, 2, 1, 2, ""),
        (1, 2, 2, 2, "bf16_"),
        (3, 1, 1, 3, ""),
        (3, 2, 1, 2, "fp16_"),
        (1, 1, 3, 1, ""),
    ],
)
def test_a_whole_checkpoint(tmp_path, capsys, stage, tp, pp, dp, prefix):
    made = make(World(stage=stage, tp=tp, pp=pp, dp=dp, prefix=prefix, layer_files=pp > 1), params())
    folder = made.save(tmp_path / "in")
    code, found, err = inspect(folder, capsys, "--params")
    assert (code, err) == (0, [])
    assert (found["kind"], found["complete"], found["folder"]) == ("deepspeed", True, folder)
    assert found["conversion"]["would"] == "convert"
    assert {key: found["topology"][key] for key in ("zero_stage", "tp", "pp", "dp", "ep")} == {
        "zero_stage": stage,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "ep": 1,
    }
    assert found["missing"] == found["damaged"] == found["faults"] == []
    assert found["versions"] == {"deepspeed": ["0.19.8"], "universal_checkpoint": 0.4, "affine_map": False}
    assert found["steps"] == {"global_steps": 7}
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)}
    kinds = {"model": "model_states.pt", "optimizer": "optim_states.pt", "layer": "layer_"}
    for kind, each in found["files"].items():
        names = [name for name in sizes if kinds[kind] in name and (kind == "layer") == name.startswith("layer_")]
        assert each == {"count": len(names), "bytes": sum(sizes[name] for name in names)}
    assert sum(each["count"] for each in found["files"].values()) == len(sizes)
    elements = 9 * 3 + 12 + 12 + 3
    assert (found["parameters"]["count"], found["parameters"]["elements"]) == (4, elements)
    assert found["parameters"]["bytes"] == 4 * elements
    assert found["states"]["step"] == {"parameters": 4, "dtypes": [], "values": [7.0]}
    assert found["states"]["exp_avg"] == {"parameters": 4, "dtypes": ["float32"], "values": None}
    for key in ("without_fragments", "incomplete", "frozen", "buffers", "tied", "unused_patterns", "experts"):
        assert not found[key], key


@pytest.mark.parametrize("stage", [1, 3])
def test_each_parameter_with_its_shards_rule_and_layout(tmp_path, capsys, stage):
    made = make(World(stage=stage, tp=2, dp=2), params())
    _, found, _ = inspect(made.save(tmp_path / "in"), capsys, "--params")
    by_name = {param["name"]: param for param in found["params"]}
    assert by_name["emb"]["shape"] == [9, 3]
    assert by_name["emb"]["padded_shape"] == [10, 3]
    assert by_name["emb"]["shards"] == {"0": [5, 3], "1": [5, 3]}
    assert by_name["up"]["rule"] == "the default branch"
    assert by_name["down"]["rule"] == "parameter_with_row_parallelism_patterns"
    assert by_name["down"]["pattern"] == "^down$"
    assert by_name["norm"]["rule"] == "tp_replicated_parameter_patterns"
    layouts = {
        "emb": contiguous_split_map((10, 3), (5, 5), 0),
        "up": contiguous_split_map((4, 3), (2, 2), 0),
        "down": contiguous_split_map((3, 4), (2, 2), 1),
        "norm": replicated_map((3,), 2),
    }
    assert {name: param["layout_id"] for name, param in by_name.items()} == {
        name: layout.layout_id() for name, layout in layouts.items()
    }
    assert all(param["dtype"] == "float32" for param in by_name.values())
    # Both data-parallel ranks of both tensor-parallel ranks hold a part of what is not cut off by alignment.
    expected = (
        sum(name in made.optim(dp, tp)["param_slice_mappings"][0] for dp in (0, 1) for tp in (0, 1))
        if (name := "emb") and stage == 1
        else 4
    )
    assert by_name["emb"]["states"]["exp_avg"]["fragments"] == expected


def test_what_only_the_module_holds(tmp_path, capsys):
    made = make(World(tp=2), [*params(), *only_module()])
    _, found, _ = inspect(made.save(tmp_path / "in"), capsys, "--params")
    assert found["frozen"] == ["fixed"]
    assert found["buffers"] == ["mean"]
    assert found["tied"] == {"head": "emb"}
    assert found["parameters"]["count"] == 5
    assert found["parameters"]["optimized"] == 4
    assert found["without_fragments"] == []
    by_name = {param["name"]: param for param in found["params"]}
    assert by_name["fixed"]["shape"] == [4, 2]
    assert by_name["fixed"]["states"] == {}
    assert by_name["head"]["tied_to"] == "emb"
    assert by_name["head"]["layout_id"] == by_name["emb"]["layout_id"]


def test_parameters_without_a_gradient_are_named(tmp_path, capsys):
    made = make(World(dp=2), params())
    for rank in range(2):
        made.optim(rank)["param_slice_mappings"][0].pop("norm", None)
    code, found, _ = inspect(made.save(tmp_path / "in"), capsys)
    assert (code, found["without_fragments"]) == (0, ["norm"])
    assert found["states"]["exp_avg"]["parameters"] == 3


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_and_where_they_live(tmp_path, capsys, tp):
    made = make(World(tp=tp, dp=2), params(), experts())
    code, found, _ = inspect(made.save(tmp_path / "in"), capsys, "--params")
    assert code == 0
    assert found["topology"]["ep"] == 2
    (layer,) = found["experts"]
    assert layer == {"layer": "moe.experts", "experts": 4, "ep": 2, "placement": [[0, 1], [2, 3]]}
    by_name = {param["name"]: param for param in found["params"]}
    assert by_name["moe.experts.w2"]["kind"] == "expert"
    assert by_name["moe.experts.w2"]["shape"] == [4, 3, 2]
    assert by_name["moe.experts.w2"]["shards"] == {"0": [2, 3, 2], "1": [2, 3, 2]}


def test_patterns_that_match_nothing_or_too_much(tmp_path, capsys):
    info = {"parameter_to_average_patterns": ["^gone$", "no.*"], "tp_replicated_parameter_patterns": ["nor", "norm"]}
    made = make(World(tp=2, info=info), params())
    code, found, _ = inspect(made.save(tmp_path / "in"), capsys, "--params")
    assert code == 0, "the folder is complete; whether it converts is another question"
    assert found["conversion"]["would"] == "refuse"
    assert any("norm" in reason and "2 patterns" in reason for reason in found["conversion"]["reasons"])
    assert found["ambiguous_patterns"] == [
        {
            "param": "norm",
            "entry": "tp_replicated_parameter_patterns",
            "patterns": ["nor", "norm"],
            "decided": None,
        }
    ]
    assert "^gone$" in found["unused_patterns"]
    assert "norm" in found["parameters"]["undescribed"]
    assert [fault["param"] for fault in found["layout_faults"]] == ["norm"]


CONVERTS = {
    "tp": (World(tp=2), {}, ()),
    "no info": (World(with_info=False), {}, ("--inject_missing_state",)),
    "unused": (World(info={"parameter_to_average_patterns": ["^gone$"]}), {}, ("--no_strict",)),
    "no info with tp": (World(tp=2, with_info=False), {}, None),
    "zero3": (World(stage=3, dp=2, with_info=False), {}, ()),
    "other shapes": (World(tp=2), {"up": torch.Size([9, 3])}, None),
}


@pytest.mark.parametrize("case", CONVERTS)
def test_the_verdict_is_the_converters(tmp_path, capsys, case):
    world, shapes, options = CONVERTS[case]
    made = make(world, params())
    for name, shape in shapes.items():
        made.model()["param_shapes"][0][name] = shape
    folder = made.save(tmp_path / "in")
    _, found, _ = inspect(folder, capsys)
    conversion = found["conversion"]
    assert conversion["would"] == ("refuse" if options is None else "convert")
    assert tuple(conversion["options"]) == (options or ())
    assert bool(conversion["reasons"]) == (options != ())
    assert convert(folder, tmp_path / "plain") == (0 if options == () else 2)
    assert convert(folder, tmp_path / "with", *(options or ())) == (2 if options is None else 0)
    if options is not None:
        written = sum(len(names) for _, _, names in os.walk(tmp_path / "with"))
        assert written - (tmp_path / "with" / "affine_manifest.json").exists() == conversion["files"]


# Incomplete and damaged folders.


def staged():
    """The parameters spread over two pipeline stages, one of them on both."""
    made = params()
    made[2].stages, made[3].stages = (1,), (0, 1)
    return made


def worlds():
    return {
        "zero2": (World(stage=2, tp=2, dp=2), params(), ()),
        "zero3": (World(stage=3, tp=2, dp=2), params(), ()),
        "pipeline": (World(pp=2, dp=2, layer_files=True), staged(), ()),
        "experts": (World(tp=2, dp=2), params(), experts()),
    }


@pytest.mark.parametrize("case", worlds())
def test_every_missing_file_is_named_and_the_rest_described(tmp_path, capsys, case):
    world, members, layers = worlds()[case]
    made = make(world, members, layers)
    folder = Path(made.save(tmp_path / "in"))
    for name in made.files:
        if name.startswith("layer_"):
            continue  # Layers are not numbered without gaps.
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        code, found, err = inspect(folder, capsys)
        assert code == 2
        assert found["missing"] == [name]
        assert found["damaged"] == []
        assert len(err) == len(found["faults"]) == 1
        assert str(folder / name) in err[0]
        assert "is missing" in err[0]
        assert err[0].startswith("ds_affine: error: ")
        topology = found["topology"]
        assert (topology["zero_stage"], topology["tp"], topology["pp"], topology["dp"]) == (
            world.stage,
            world.tp,
            world.pp,
            world.dp,
        )
        assert found["conversion"]["would"] == "refuse"
        assert set(found["states"]) == {"fp32", "exp_avg", "exp_avg_sq", "step"}
        if "optim" in name:
            assert found["parameters"]["count"] == 4 + 3 * bool(layers)
            assert found["incomplete"], "the weights of this rank are in no file"
        (folder / name).write_bytes(content)
    assert inspect(folder, capsys)[0] == 0


DAMAGE = {
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"not a checkpoint file at all, by any means" * 10,
    "zeros": lambda data: bytes(len(data)),
    "directory": lambda data: data[:-30] + bytes(30),
    "pickle": lambda data: data.replace(b"param_shapes", b"xaram_shapes").replace(b"base_optimizer_state", b"x" * 20),
}


@pytest.mark.parametrize("case", worlds())
@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damaged_file_is_named_with_its_reason(tmp_path, capsys, case, damage):
    world, members, layers = worlds()[case]
    made = make(world, members, layers)
    folder = Path(made.save(tmp_path / "in"))
    for name in made.files:
        content = (folder / name).read_bytes()
        broken = DAMAGE[damage](content)
        if broken == content:
            continue
        (folder / name).write_bytes(broken)
        code, found, err = inspect(folder, capsys)
        assert code == 2, name
        assert [each["file"] for each in found["damaged"]] == [name]
        assert found["damaged"][0]["reason"]
        assert found["missing"] == []
        assert all(line.startswith("ds_affine: error: ") for line in err)
        assert any(name in line for line in err)
        assert len(err) == 1 or damage == "pickle"
        assert found["topology"]["dp"] == world.dp
        assert found["parameters"]["count"] >= 4
        (folder / name).write_bytes(content)


def test_several_faults_at_once(tmp_path, capsys):
    made = make(World(tp=2, dp=4), params())
    folder = Path(made.save(tmp_path / "in"))
    (folder / made.optim_name(1, 0)).unlink()
    (folder / made.optim_name(3, 1)).unlink()
    (folder / made.optim_name(0, 0)).write_bytes(b"")
    (folder / made.optim_name(2, 1)).write_bytes((folder / made.optim_name(2, 1)).read_bytes()[:300])
    (folder / made.model_name(0)).write_bytes(b"PK\x03\x04 but no more")
    code, found, err = inspect(folder, capsys)
    assert code == 2
    assert found["missing"] == sorted([made.optim_name(1, 0), made.optim_name(3, 1)])
    assert [each["file"] for each in found["damaged"]] == sorted(
        [made.optim_name(0, 0), made.optim_name(2, 1), made.model_name(0)]
    )
    assert len(err) == len(found["faults"])
    # The other model file and the other optimizer files still tell everything else.
    assert found["topology"]["tp"] == 2
    assert found["parameters"]["count"] == 4
    assert set(found["states"]) == {"fp32", "exp_avg", "exp_avg_sq", "step"}
    text = "\n".join(format_description(found))
    assert text.index("2 files missing, 3 files damaged") < text.index("topology")


def test_files_that_contradict_each_other_do_not_stop_the_description(tmp_path, capsys):
    made = make(World(tp=2), params())
    made.model(1)["checkpoint_parallel_dimensions"] = {"pp_degree": 2, "tp_degree": 1}
    made.optim(0, 1)["param_slice_mappings"][0]["up"].start = -5
    code, found, err = inspect(made.save(tmp_path / "in"), capsys)
    assert code == 2
    assert found["parameters"]["count"] == 4
    assert any("different degrees" in line for line in err)


def test_absurd_numbers_are_reported_and_do_not_hang(tmp_path, capsys):
    made = make(World(tp=2), params())
    for rank in range(2):
        made.model(rank)["mp_world_size"] = 10**30
        made.model(rank)["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 10**30}
    code, found, _ = inspect(made.save(tmp_path / "in"), capsys)
    assert code == 2
    assert len(found["missing"]) > 100
    assert found["parameters"]["count"] == 4


def test_leftovers(tmp_path, capsys):
    made = make(World(), params())
    folder = Path(made.save(tmp_path / "in"))
    make(World(), params()).save(folder / "backup")
    (folder / "notes.txt").write_text("mine")
    (folder / "mp_rank_00_model_states.pt.tmp").write_bytes(b"half")
    (folder / "offloaded_tensors" / "rank0").mkdir(parents=True)
    code, found, _ = inspect(folder, capsys)
    assert code == 0
    assert found["leftovers"] == {
        "folders": ["backup"],
        "temporary": ["mp_rank_00_model_states.pt.tmp"],
        "files": ["notes.txt"],
    }
    assert found["offloaded"] == ["rank0"]


# Universal folders.


@pytest.fixture
def listed(tmp_path):
    """A universal folder with the manifest our converter writes."""
    made = make(World(tp=2, dp=2), [*params(), *only_module()])
    assert convert(made.save(tmp_path / "in"), tmp_path / "universal") == 0
    return tmp_path / "universal"


@pytest.fixture
def universal(listed):
    """One as DeepSpeed's own converter leaves it."""
    (listed / "affine_manifest.json").unlink()
    return listed


def test_a_whole_universal_folder(universal, capsys):
    code, found, err = inspect(universal, capsys, "--params")
    assert (code, err) == (0, [])
    assert (found["kind"], found["complete"], found["manifest"]) == ("universal", True, None)
    assert found["versions"] == {"deepspeed": ["0.19.8"], "universal_checkpoint": 0.4, "affine_map": False}
    assert found["parameters"]["count"] == 7
    assert found["states"]["step"] == {"parameters": 4, "dtypes": ["float32"], "values": [7.0]}
    assert found["states"]["exp_avg_sq"]["parameters"] == 4
    assert found["weights_only"] == ["fixed", "head", "mean"]
    assert found["uneven_states"] == {}
    assert found["files"]["parameter"]["count"] == 4 * 4 + 3
    assert found["files"]["model"]["count"] == 2
    on_disk = sum(os.path.getsize(os.path.join(root, name)) for root, _, names in os.walk(universal) for name in names)
    assert sum(each["bytes"] for each in found["files"].values()) == on_disk
    by_name = {param["name"]: param for param in found["params"]}
    assert by_name["emb"]["shape"] == [9, 3]
    assert by_name["down"]["entries"] == ["cat_dim"]
    assert set(by_name["up"]["states"]) == {"fp32", "exp_avg", "exp_avg_sq", "step"}


def test_every_missing_file_of_a_universal_folder(universal, capsys):
    files = [Path(root, name) for root, _, names in os.walk(universal) for name in names]
    silent = {"zero/fixed/fp32.pt", "zero/head/fp32.pt", "zero/mean/fp32.pt"}
    for path in files:
        name = path.relative_to(universal).as_posix()
        content = path.read_bytes()
        path.unlink()
        code, found, err = inspect(universal, capsys)
        if name in silent:
            # Nothing but a manifest says that a frozen parameter or a buffer was there.
            assert code == 2 or name.split("/")[1] not in found["weights_only"]
        else:
            assert (code, found["missing"]) == (2, [name])
            assert len(err) == 1
            assert str(path) in err[0]
        path.write_bytes(content)
    assert inspect(universal, capsys)[0] == 0


@pytest.mark.parametrize("damage", ["cut short", "empty", "text", "zeros"])
def test_every_damaged_file_of_a_universal_folder(universal, capsys, damage):
    for path in [Path(root, name) for root, _, names in os.walk(universal) for name in names]:
        content = path.read_bytes()
        path.write_bytes(DAMAGE[damage](content))
        code, found, err = inspect(universal, capsys)
        assert code == 2
        assert [each["file"] for each in found["damaged"]] == [path.relative_to(universal).as_posix()]
        assert len(err) == 1
        path.write_bytes(content)


def test_a_manifest_knows_every_file(listed, capsys):
    code, found, _ = inspect(listed, capsys)
    assert code == 0
    files = [path for path in listed.rglob("*") if path.is_file()]
    assert found["manifest"]["readable"]
    assert found["manifest"]["files"] == len(files) - 1
    assert found["manifest"]["parameters"] == 7
    assert found["manifest"]["software"]["deepspeed_affine"]
    assert found["files"]["manifest"]["count"] == 1
    for path in files:
        name = path.relative_to(listed).as_posix()
        content = path.read_bytes()
        if name == "affine_manifest.json":
            path.write_bytes(content[:-20])
            code, found, err = inspect(listed, capsys)
            assert (code, found["manifest"]["readable"]) == (2, False)
            assert [each["file"] for each in found["damaged"]] == [name]
        else:
            path.unlink()
            code, found, err = inspect(listed, capsys)
            assert (code, found["missing"]) == (2, [name])
            assert any(str(path) in line for line in err)
            path.write_bytes(content + b"more")
            code, found, err = inspect(listed, capsys)
            assert code == 2
            assert [each["file"] for each in found["damaged"]] == [name]
            assert any(f"has {len(content) + 4} bytes" in line for line in err)
        path.write_bytes(content)


def test_ten_faults_are_shown_and_all_when_asked(tmp_path, capsys):
    several = [Param(f"p{at:02d}", random_full((3,), at)) for at in range(6)]
    assert convert(make(World(), several).save(tmp_path / "in"), tmp_path / "u") == 0
    files = sorted((tmp_path / "u" / "zero").rglob("p*/*.pt"))
    size = files[0].stat().st_size
    files[0].write_bytes(files[0].read_bytes() + b"more")
    for path in files[1:]:
        path.unlink()
    code, found, err = inspect(tmp_path / "u", capsys)
    count = len(found["faults"])
    assert (code, len(err)) == (2, 11)
    assert count >= len(files)
    assert any(f"has {size + 4} bytes; affine_manifest.json lists it with {size} bytes. The" in line for line in err)
    assert err[-1] == f"ds_affine: error: and {count - 10} more (--all)"
    assert len(inspect(tmp_path / "u", capsys, "--all")[2]) == count


def test_a_folder_that_does_not_exist(tmp_path, capsys):
    (tmp_path / ".nope.partial").mkdir()
    assert ds_affine(["inspect", str(tmp_path / "nope")]) == 2
    said = capsys.readouterr()
    assert said.out.splitlines() == [str(tmp_path / "nope"), "no folder"]
    assert f"{tmp_path / 'nope'}: does not exist; .nope.partial beside it" in said.err


def test_states_that_others_have_are_no_fault_where_the_manifest_lists_what_there_is(tmp_path, capsys):
    """Two groups with optimizers of their own: one keeps a state more."""
    made = make(World(dp=1), [*params()[:3], Param("norm", random_full((3,), 4), group=1)])
    states = made.optim()["base_optimizer_state"]["state"]
    del states[1]["exp_avg_sq"]
    assert convert(made.save(tmp_path / "in"), tmp_path / "u") == 0
    code, found, _ = inspect(tmp_path / "u", capsys)
    assert (code, found["missing"], found["uneven_states"]) == (0, [], {"norm": ["exp_avg_sq"]})
    (tmp_path / "u" / "affine_manifest.json").unlink()
    code, found, _ = inspect(tmp_path / "u", capsys)
    assert (code, found["missing"]) == (2, ["zero/norm/exp_avg_sq.pt"])


def test_a_half_written_universal_folder_is_recognised(universal, capsys):
    for path in universal.glob("mp_rank_*"):
        path.unlink()
    (universal / "zero" / "optimizer_state.pt").unlink()
    (universal / "tmp").mkdir()
    code, found, err = inspect(universal, capsys)
    assert (code, found["kind"]) == (2, "universal")
    assert found["missing"] == ["zero/optimizer_state.pt"]
    assert any("no model-state file" in line for line in err)
    assert found["leftovers"]["temporary"] == ["tmp"]


def test_a_parameter_with_slashes_and_odd_names(tmp_path, capsys):
    made = make(World(), [Param("a/b c[0]", random_full((4, 3), 2)), Param("ünï", random_full((2,), 3))])
    assert convert(made.save(tmp_path / "in"), tmp_path / "u") == 0
    code, found, _ = inspect(tmp_path / "u", capsys, "--params")
    assert code == 0
    assert [param["name"] for param in found["params"]] == ["a/b c[0]", "ünï"]


# Folders that are neither, and what inspect never does.


def test_folders_that_are_no_checkpoint(tmp_path, capsys):
    made = make(World(), params())
    inner = made.save(tmp_path / "run" / "global_step7")
    (tmp_path / "run" / "latest").write_text("global_step7")
    (tmp_path / "empty").mkdir()
    for folder, part in (
        (tmp_path / "run", inner),
        (tmp_path / "empty", "0 entries"),
        (tmp_path / "gone", "gone: does not exist. Check"),
    ):
        code, found, err = inspect(folder, capsys)
        assert (code, found["kind"], found["complete"]) == (2, "other", False)
        assert len(err) == 1
        assert part in err[0]
    assert ds_affine(["inspect", ""]) == 2
    assert "is empty" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["checkpoint", "universal"])
def test_no_tensor_is_read_and_nothing_written(tmp_path, capsys, monkeypatch, which):
    made = make(World(tp=2, dp=2), [*params(), *only_module()])
    folder = Path(made.save(tmp_path / "in"))
    if which == "universal":
        assert convert(folder, tmp_path / "out") == 0
        folder = tmp_path / "out"
    stored: dict[str, list[tuple[int, int]]] = {}
    for path in folder.rglob("*.pt"):
        places = [s for s in load_pickle(path).archive.storages.values() if s.numel > 1]
        stored[str(path)] = [(place.byte_offset, place.byte_offset + place.nbytes) for place in places]
    assert sum(map(len, stored.values())) > 10
    before = snapshot(tmp_path)
    paths: dict[int, str] = {}
    read: list[tuple[str, int, int]] = []
    opened, pread, preadv = os.open, os.pread, os.preadv

    def spy_open(path, flags, *rest, **more):
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        fd = opened(path, flags, *rest, **more)
        paths[fd] = os.fspath(path)
        return fd

    def spy_pread(fd, count, offset):
        read.append((paths[fd], offset, offset + count))
        return pread(fd, count, offset)

    def spy_preadv(fd, buffers, offset):
        read.append((paths[fd], offset, offset + sum(map(len, buffers))))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "open", spy_open)
    monkeypatch.setattr(os, "pread", spy_pread)
    monkeypatch.setattr(os, "preadv", spy_preadv)
    monkeypatch.setattr("builtins.open", lambda *args, **more: pytest.fail(f"opened {args}"))
    description = describe_folder(os.fspath(folder), with_params=True)
    monkeypatch.undo()
    assert description["complete"]
    assert {path for path, _, _ in read} >= set(stored)
    for path, start, stop in read:
        # The end of a zip is read in one piece whose length is not known; small tensors before it come along.
        tail = stop >= os.path.getsize(path)
        for low, high in stored.get(path, []):
            assert tail or stop <= low or start >= high, (path, start, stop, low, high)
    assert snapshot(tmp_path) == before


def test_tensor_bytes_do_not_matter(tmp_path, capsys):
    made = make(World(tp=2, dp=2), [*params(), *only_module()])
    folder = made.save(tmp_path / "in")
    before = inspect(folder, capsys, "--params")
    for name in made.files:
        path = os.path.join(folder, name)
        places = [s for s in load_pickle(path).archive.storages.values() if s.numel > 1]
        with open(path, "r+b") as file:
            for place in places:
                file.seek(place.byte_offset)
                file.write(b"\xee" * place.nbytes)
    assert inspect(folder, capsys, "--params") == before


def test_text_for_people(tmp_path, capsys):
    made = make(World(tp=2, dp=2), [*params(), *only_module()])
    folder = made.save(tmp_path / "in")
    assert ds_affine(["inspect", folder, "--params"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [folder, "DeepSpeed checkpoint, complete"]
    text = "\n".join(lines)
    for part in (
        "ZeRO-1, TP 2, PP 1, DP 2, EP 1",
        "would convert",
        "head = emb",
        "step (7)",
        "default branch: ",
        "emb",
        "9x3",
    ):
        assert part in text
    assert max(map(len, lines[:20])) < 160
    (head,) = [line for line in lines if line.startswith("parameter ")]
    columns = [head.index(word) for word in ("kind", "shape", "shards", "dtype", "layout")]
    (row,) = [line for line in lines if line.startswith("down ")]
    assert [row[at - 1] for at in columns] == [" "] * 5
    assert [row[at] != " " for at in columns] == [True] * 5


JUNK = [None, "x", -1, 0, [], {}, 10**30, (1, 2), True, 1.5, math.nan, [[]], {"a": 1}, {1: 2}, b"z", torch.zeros(2, 2)]


def places(value):
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from places(value[key])
    elif isinstance(value, list):
        for key in range(len(value)):
            yield value, key
            yield from places(value[key])


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_file_says_is_described_or_named(tmp_path, capsys, seed):
    """Any entry of any file replaced or removed: a document and an exit code, never an internal error."""
    chosen = random.Random(seed)
    world, members, layers = chosen.choice(list(worlds().values()))
    made = make(world, [*members, *only_module()], layers)
    for _ in range(chosen.randint(1, 3)):
        holder, key = chosen.choice(list(places(made.files[chosen.choice(list(made.files))])))
        if chosen.random() < 0.3 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = chosen.choice(JUNK)
    code, found, err = inspect(made.save(tmp_path / "in"), capsys, "--params", "--all")
    assert code == (0 if found["complete"] else 2)
    assert len(err) == sum(len(fault["message"].splitlines()) for fault in found["faults"])
    assert not any("internal error" in line for line in err)
    assert format_description(found, every=True)
