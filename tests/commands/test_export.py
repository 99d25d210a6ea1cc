"""``ds_affine export`` on small universal folders: every format, recipes, refusals, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepspeed_affine import ninfer
from deepspeed_affine.cli import ds_affine
from deepspeed_affine.commands.export_recipe import plan_export, read_recipe
from deepspeed_affine.commands.export_weights import open_weights
from deepspeed_affine.errors import AffineError, PolicyError
from deepspeed_affine.storage.files import ByteReader

TENSORS = {
    "embed.weight": torch.randn(300, 128, generator=torch.Generator().manual_seed(1)),
    "layer.q": torch.randn(256, 128, generator=torch.Generator().manual_seed(2)),
    "layer.k": torch.randn(128, 128, generator=torch.Generator().manual_seed(3)),
    "layer.norm": torch.ones(128),
    "mtp.proj": torch.randn(128, 128, generator=torch.Generator().manual_seed(4)),
    "scale": torch.tensor(0.5),
    "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
    "steps": torch.tensor([3, 4], dtype=torch.int32),
}


@pytest.fixture
def universal(tmp_path):
    folder = tmp_path / "universal"
    for name, tensor in TENSORS.items():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor, "cat_dim": 0}, folder / "zero" / name / "fp32.pt")
        torch.save({"param": torch.zeros_like(tensor)}, folder / "zero" / name / "exp_avg.pt")
    torch.save({}, folder / "zero" / "optimizer_state.pt")
    return folder


def export(folder, target, *options, to="ninfer"):
    return ds_affine(["export", "--to", to, "--input_folder", str(folder), "--output", str(target), *options])


def test_without_a_recipe_every_weight_is_an_object(universal, tmp_path, capsys):
    target = tmp_path / "m.ninfer"
    assert export(universal, target, "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == len(TENSORS)
    with ninfer.open(target) as artifact:
        artifact.validate()
        assert list(artifact.components) == ["text"]
        assert not artifact.uses
        assert set(artifact.bindings) == set(TENSORS)
        assert artifact.provenance["source"] == {"kind": "universal", "folder": "universal"}
        for name, tensor in TENSORS.items():
            assert artifact.bindings[name] == ninfer.Binding(name)
            assert artifact.objects[name].format == ("int32" if name == "steps" else "fp32")
            assert np.array_equal(artifact.read_parameter(name, tensor.shape), tensor.to(torch.float32).numpy())


@pytest.mark.parametrize("name", ["bf16", "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "nvfp4",
                                  "fp8_e4m3fn_row_bf16"])  # fmt: skip
def test_every_format(name, universal, tmp_path, capsys):
    target = tmp_path / "m.ninfer"
    assert export(universal, target, "--format", name, "--max-file-bytes", "32768") == 0
    said = capsys.readouterr().out
    with ninfer.open(target) as artifact:
        artifact.validate()
        assert len(artifact.files) > 1
        for weight in ("layer.q", "mtp.proj"):
            values = TENSORS[weight].numpy()
            if name == "bf16":
                expected = TENSORS[weight].to(torch.bfloat16).view(torch.int16).numpy().tobytes()
            else:
                expected = ninfer.encode(name, values).tobytes()
            assert artifact.read_encoded(weight) == expected
        if name != "bf16":
            assert artifact.objects["layer.norm"].format == "fp32"
            assert "layer.norm: kept as fp32" in said
        assert artifact.objects["steps"].format == "int32"
        if name == "nvfp4":
            # 300 rows are no multiple of 128.
            assert artifact.objects["embed.weight"].format == "fp32"


RECIPE = {
    "components": {
        "text": {"config": {"architectures": ["Toy"]}, "resources": {"tokenizer.json": "r.tok"}},
        "mtp": {"config": {}, "target": "text"},
    },
    "resources": {"r.tok": "tok.json"},
    "objects": [{"id": "w.qk", "parameters": ["layer.q", "layer.k"], "format": "q5_g64_fp16"}],
    "bindings": {
        "text/embedding": "embed.weight",
        "text/head": "embed.weight",
        "text/query": "layer.q",
        "text/key": "layer.k",
        "text/first_rows": {"parts": [{"object": "w.qk", "range": [0, 256]}]},
        "mtp/proj": "mtp.proj",
        "mtp/head": "embed.weight",
    },
    "uses": [{"parameter": "text/query", "input": "text/in", "activation_policy": "AllowA8"}],
    "format": "bf16",
    "formats": {"mtp.proj": "q8_g32_fp16"},
    "rest": "leave",
    "metadata": {"name": "toy"},
    "provenance": {"recipe": "a test"},
}


def with_recipe(universal, tmp_path, recipe):
    (tmp_path / "tok.json").write_bytes(b"{}")
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    return export(universal, tmp_path / "m.ninfer", "--recipe", str(tmp_path / "recipe.json"))


def test_a_recipe(universal, tmp_path):
    recipe = {**RECIPE, "rest": "each", "bindings": {**RECIPE["bindings"], "text/norm": "layer.norm"}}
    assert with_recipe(universal, tmp_path, recipe) == 0
    with ninfer.open(tmp_path / "m.ninfer") as artifact:
        artifact.validate()
        assert artifact.read_resource("text", "tokenizer.json") == b"{}"
        assert artifact.metadata == {"name": "toy"}
        assert artifact.provenance["recipe"] == "a test"
        assert artifact.provenance["encoders"]["q5_g64_fp16"] == "MAXABS_F16_RECIP_RNE_V1"
        assert artifact.uses_of("text/query")[0].activation_policy.value == "AllowA8"
        both = torch.cat([TENSORS["layer.q"], TENSORS["layer.k"]]).numpy()
        assert artifact.read_encoded("w.qk") == ninfer.encode("q5_g64_fp16", both).tobytes()
        values = artifact.read("w.qk")
        assert np.array_equal(artifact.read_parameter("text/query", (256, 128)), values[:256])
        assert np.array_equal(artifact.read_parameter("text/key", (128, 128)), values[256:])
        assert artifact.bindings["text/head"] == artifact.bindings["mtp/head"] == ninfer.Binding("embed.weight")
        assert artifact.objects["mtp.proj"].format == "q8_g32_fp16"
        # What the recipe does not name keeps its own name.
        assert "scale" in artifact.bindings


def test_the_rest_can_be_left(universal, tmp_path):
    recipe = {
        **RECIPE,
        "objects": [
            *RECIPE["objects"],
            {"id": "w.embed", "parameters": ["embed.weight"]},
            {"id": "w.mtp", "parameters": ["mtp.proj"]},
        ],
    }
    assert with_recipe(universal, tmp_path, recipe) == 0
    with ninfer.open(tmp_path / "m.ninfer") as artifact:
        assert set(artifact.objects) == {"r.tok", "w.qk", "w.embed", "w.mtp"}
        assert set(artifact.bindings) == set(RECIPE["bindings"])


def fused(*names, bindings):
    return {**RECIPE, "objects": [{"id": "w.x", "parameters": list(names), "format": "bf16"}], "bindings": bindings,
            "uses": [], "rest": "each"}  # fmt: skip


BAD = {
    "text and mtp": fused("layer.q", "mtp.proj", bindings={"text/q": "layer.q", "mtp/p": "mtp.proj"}),
    "text and proposal": fused("layer.q", "layer.k", bindings={"text/q": "layer.q", "proposal/head": "layer.k"}),
    "mtp private beside shared": fused(
        "layer.q", "mtp.proj", bindings={"text/q": "layer.q", "mtp/q": "layer.q", "mtp/p": "mtp.proj"}
    ),
    "unknown member": {**RECIPE, "extra": 1},
    "unknown parameter": {**RECIPE, "bindings": {"x": "none"}},
    "unknown object": {**RECIPE, "bindings": {"x": {"object": "none"}}},
    "twice": {**RECIPE, "objects": [{"id": "a", "parameters": ["layer.q"]}, {"id": "b", "parameters": ["layer.q"]}]},
    "shapes": {**RECIPE, "objects": [{"id": "a", "parameters": ["layer.q", "layer.norm"]}]},
    "no list": {**RECIPE, "objects": [{"id": "a", "parameters": "layer.q"}]},
    "floats of integers": {**RECIPE, "rest": "each", "formats": {"steps": "bf16"}},
    "format": {**RECIPE, "formats": {"mtp.proj": "q9"}},
    "ternary": {**RECIPE, "objects": [], "formats": {"layer.q": "t2_g128_fp16"}, "rest": "each"},
    "two bit": {**RECIPE, "objects": [], "formats": {"layer.q": "q2_g64_fp16"}, "rest": "each"},
    "formats of none": {**RECIPE, "rest": "each", "formats": {"none": "bf16"}},
    "components": {**RECIPE, "components": {"text": {}}},
    "uses": {**RECIPE, "uses": [{"parameter": "text/none", "input": "i"}]},
    "rest": {**RECIPE, "rest": "some"},
    "resource": {**RECIPE, "resources": {"r.tok": "absent.json"}},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_recipe_is_refused_and_nothing_is_left(name, universal, tmp_path, capsys):
    assert with_recipe(universal, tmp_path, BAD[name]) == 2
    said = capsys.readouterr().err
    assert "internal error" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.json", "tok.json", "universal"]
    if "beside" in name or " and " in name:
        assert "objects of its own" in said


def test_shared_data_of_two_components_is_no_mixture(universal, tmp_path):
    recipe = fused("layer.q", "layer.k", bindings={"text/q": "layer.q", "mtp/q": "layer.q", "text/k": "layer.k"})
    assert with_recipe(universal, tmp_path, recipe) == 0


def test_safetensors(universal, tmp_path):
    target = tmp_path / "hf"
    assert export(universal, target, to="safetensors") == 0
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    found = load_file(target / "model.safetensors")
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        expected = tensor if name == "steps" else tensor.to(torch.float32)
        assert found[name].dtype is expected.dtype
        assert torch.equal(found[name], expected)
    assert export(universal, target, to="safetensors") == 2


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_safetensors_in_many_files(kind, universal, tmp_path):
    target = tmp_path / "hf"
    assert export(universal, target, "--format", kind, "--max-file-bytes", "70000", to="safetensors") == 0
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(target.iterdir())) - 1 > 2
    total = 0
    for name, file in index["weight_map"].items():
        tensor = load_file(target / file)[name]
        expected = TENSORS[name] if name == "steps" else TENSORS[name].to(torch.float32).to(getattr(torch, kind))
        assert torch.equal(tensor, expected)
        total += tensor.nbytes
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize(
    "options",
    [
        ["--to", "safetensors", "--format", "q4_g64_fp16"], ["--to", "safetensors", "--objects", "shards"],
        ["--to", "ninfer", "--format", "q4"], ["--to", "ninfer", "--format", "int32"],
        ["--to", "ninfer", "--recipe", "none.json"],
        ["--to", "ninfer", "--max-file-bytes", "100"], ["--to", "ninfer", "--output", ""],
        ["--to", "ninfer", "--output", "s3://x/y"],
        ["--to", "ninfer", "--output", "no/such/m"], ["--to", "safetensors", "--output", "no/such/m"],
        ["--to", "ninfer", "--input_folder", "none"],
    ],
)  # fmt: skip
def test_bad_options(options, universal, tmp_path, capsys):
    before = sorted(path.name for path in tmp_path.iterdir())
    arguments = ["export", "--input_folder", str(universal), "--output", str(tmp_path / "x"), *options]
    assert ds_affine(arguments) == 2
    assert "internal error" not in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_any_recipe_is_taken_or_refused(universal, tmp_path):
    """Recipes with a member removed, replaced or misplaced: a plan or an error of ours, never another."""
    from deepspeed_affine.commands.export_recipe import plan_export, read_recipe
    from deepspeed_affine.commands.export_weights import open_weights
    from deepspeed_affine.storage.files import ByteReader

    rng = random.Random(5)
    values = [None, True, 0, -1, 1.5, "", "x", "layer.q", "q4_g64_fp16", [], {}, ["layer.k"], {"object": "w.qk"}, [[]]]
    (tmp_path / "tok.json").write_bytes(b"{}")

    def places(value, path=()):
        yield path
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in inner:
            yield from places(item, (*path, key))

    planned = 0
    with ByteReader() as reader:
        weights = open_weights(str(universal), reader)
        for _ in range(1500):
            recipe = json.loads(json.dumps({**RECIPE, "rest": "each"}))
            *path, key = rng.choice([place for place in places(recipe) if place])
            owner = recipe
            for step in path:
                owner = owner[step]
            if rng.random() < 0.2:
                del owner[key]
            else:
                owner[key] = rng.choice(values)
            (tmp_path / "recipe.json").write_text(json.dumps(recipe))
            with suppress(AffineError, OSError):
                plan_export(weights, read_recipe(str(tmp_path / "recipe.json")))
                planned += 1
    assert planned > 100


PROGRAM = """
import sys, threading, time
from deepspeed_affine.cli import ds_affine

peak, running = 0, True


def watch():
    global peak
    while running:
        with open("/proc/self/status") as file:
            peak = max(peak, next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024)
        time.sleep(0.005)


thread = threading.Thread(target=watch)
thread.start()
code = ds_affine(sys.argv[1:])
running = False
thread.join()
print(peak)
sys.exit(code)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["fp32", "bf16", "q4_g64_fp16", "nvfp4"])
def test_a_large_weight_is_never_in_memory(name, tmp_path):
    import subprocess
    import sys

    folder = tmp_path / "universal"
    (folder / "zero" / "w").mkdir(parents=True)
    torch.save({"param": torch.ones(32_768, 8192)}, folder / "zero" / "w" / "fp32.pt")
    torch.save({}, folder / "zero" / "optimizer_state.pt")
    arguments = ["export", "--to", "ninfer", "--input_folder", str(folder), "--output", str(tmp_path / "m")]
    command = [sys.executable, "-c", PROGRAM, *arguments, "--format", name, "--no-fsync"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    peak = int(ended.stdout.split()[-1])
    print(f"{name}: 1 GB of weights, at most {peak} bytes of anonymous memory")
    assert peak < 200 * 10**6


def planned(universal, tmp_path, recipe, **aliases):
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    with ByteReader() as reader:
        weights = dataclasses.replace(open_weights(str(universal), reader), aliases=aliases)
        return plan_export(weights, read_recipe(str(tmp_path / "recipe.json")))


def test_whatever_the_recipe_does_not_bind_is_bound(universal, tmp_path):
    """Also what shares an object with something that is: a tied name, and what is stacked beside it."""
    recipe = {
        "objects": [{"id": "w.qk", "parameters": ["layer.q", "layer.k"]}],
        "bindings": {"text/query": "layer.q", "text/head": "head.weight"},
    }
    found = planned(universal, tmp_path, recipe, **{"head.weight": "embed.weight"}).bindings
    assert found["text/head"] == found["embed.weight"] == ninfer.Binding("embed.weight")
    assert found["layer.k"] == ninfer.Binding(parts=(ninfer.Part("w.qk", 256 * 128, 384 * 128),))
    assert set(found) == {"text/query", "text/head", *TENSORS} - {"layer.q"}


def test_a_binding_by_parts_is_all_that_its_objects_get(universal, tmp_path):
    recipe = {"bindings": {"text/rows": {"parts": [{"object": "layer.q", "range": [0, 128]}]}}}
    assert set(planned(universal, tmp_path, recipe).bindings) == {"text/rows", *TENSORS} - {"layer.q"}


@pytest.mark.parametrize(
    "recipe", [{"objects": [{"id": "h", "parameters": ["head.weight"]}]}, {"formats": {"head.weight": "bf16"}}]
)
def test_a_tied_name_is_said_to_be_one(recipe, universal, tmp_path):
    with pytest.raises(PolicyError, match=r"'head\.weight', which is tied to 'embed\.weight'"):
        planned(universal, tmp_path, recipe, **{"head.weight": "embed.weight"})


def test_a_recipe_that_is_no_json_is_called_a_recipe(universal, tmp_path, capsys):
    (tmp_path / "r.json").write_bytes(b'\xef\xbb\xbf{"rest": "each"}')
    assert export(universal, tmp_path / "m.ninfer", "--recipe", str(tmp_path / "r.json")) == 2
    said = capsys.readouterr().err
    assert "the recipe is no JSON" in said
    assert "directory" not in said
