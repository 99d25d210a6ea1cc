"""Real checkpoints exported: as F, as shards with parts, as safetensors; all equal to what stock tools make."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from deepspeed_affine import ninfer
from deepspeed_affine.cli import ds_affine

pytestmark = pytest.mark.real

SHARDED = [
    pytest.param("tp2_zero1_uneven", marks=pytest.mark.quick),
    "tp2_zero3_uneven",
    "tp2_zero1_tied",
    "tp2dp2_zero2",
]
CASES = [*SHARDED, "zero1_fp32", "zero3_frozen", "zero3_tied", "zero2_bf16", "pp2dp2_zero1", "ep2_zero1"]


def export(trained, target, *options, to="ninfer"):
    arguments = ["--to", to, "--input_folder", str(trained), "--output", str(target), "--no-fsync", *options]
    assert ds_affine(["export", *arguments]) == 0


def converted(folder):
    """F of every parameter, from the universal folder the converter makes."""
    found = {}
    for path in sorted((folder / "zero").glob("*/fp32.pt")):
        value = torch.load(path, weights_only=False)
        found[path.parent.name] = value["param"] if isinstance(value, dict) else value
    return found


def same(values, tensor):
    return np.array_equal(values.reshape(-1), tensor.detach().to(torch.float32).reshape(-1).numpy())


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_the_converters_f(real, case, tmp_path):
    trained = real.trained(case)
    expected = converted(real.ours(case))
    export(trained.folder, tmp_path / "full")
    if case == "zero3_frozen":
        # As DeepSpeed's own output of ZeRO-3: frozen parameters stay in partitions in the model-state files.
        arguments = ["--input_folder", str(real.ours(case)), "--output", str(tmp_path / "universal")]
        assert ds_affine(["export", "--to", "ninfer", *arguments]) == 2
    else:
        export(real.ours(case), tmp_path / "universal")
    other_path = tmp_path / ("full" if case == "zero3_frozen" else "universal")
    with ninfer.open(tmp_path / "full") as full, ninfer.open(other_path) as other:
        full.validate()
        assert set(expected) <= set(full.bindings)
        for name, tensor in expected.items():
            assert same(full.read_parameter(name), tensor), name
            assert same(other.read_parameter(name), tensor), name
        assert full.provenance["source"]["kind"] == "deepspeed"


@pytest.mark.parametrize("case", SHARDED)
def test_shards_with_parts_are_the_same_tensors(real, case, tmp_path):
    trained = real.trained(case)
    expected = converted(real.ours(case))
    export(trained.folder, tmp_path / "shards", "--objects", "shards")
    export(trained.folder, tmp_path / "full")
    with ninfer.open(tmp_path / "shards") as shards, ninfer.open(tmp_path / "full") as full:
        shards.validate()
        assert any(name.endswith("/tp1") for name in shards.objects)
        assert set(shards.bindings) == set(full.bindings)
        for name in shards.bindings:
            shape = full.read_parameter(name).shape
            assert np.array_equal(shards.read_parameter(name).reshape(shape), full.read_parameter(name))
        for name, tensor in expected.items():
            assert same(shards.read_parameter(name), tensor), name
        for name in shards.bindings:
            bound = ninfer.bindings_to_map(shards.directory, name, full.objects[full.bindings[name].object].shape)
            bound.map.validate(partial=True, whole_parameter=True)
            assert ninfer.map_to_bindings(bound.map, bound.objects) == shards.bindings[name]


ZERO_TO_FP32 = ["zero1_fp32", "zero2_bf16", "zero3_frozen", "zero3_fp32", "zero1_fp16"]


@pytest.mark.parametrize("case", ZERO_TO_FP32)
def test_safetensors_are_those_of_zero_to_fp32(real, case, tmp_path):
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    trained = real.trained(case)
    folder, tag = trained.folder.parent, trained.folder.name
    convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(tmp_path / "stock"), safe_serialization=True, tag=tag)
    export(trained.folder, tmp_path / "ours", to="safetensors")
    stock, ours = (load_file(tmp_path / side / "model.safetensors") for side in ("stock", "ours"))
    assert set(ours) == set(stock)
    for name, tensor in stock.items():
        assert ours[name].dtype is tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (
        tmp_path / "stock" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("limit", [300, 700, 1200])
@pytest.mark.parametrize("case", ["zero1_fp32", "zero3_frozen"])
def test_safetensors_in_several_files(real, case, limit, tmp_path):
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    trained = real.trained(case)
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    convert_zero_checkpoint_to_fp32_state_dict(
        str(trained.folder.parent), str(stock), limit, safe_serialization=True, tag=trained.folder.name
    )
    export(trained.folder, ours, "--max-file-bytes", str(limit), to="safetensors")
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in stock.iterdir())
    for path in stock.iterdir():
        assert (ours / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("case", ["zero1_tied", "zero3_tied"])
def test_tied_names_are_written_once_and_named(real, case, tmp_path):
    """zero_to_fp32 fails on them, since the library refuses tensors that share memory."""
    trained = real.trained(case)
    export(trained.folder, tmp_path / "ours", to="safetensors")
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        tied = {alias: name for alias, name in file.metadata().items() if alias != "format"}
        assert tied
        assert not set(tied) & set(file.keys())
        assert set(tied.values()) <= set(file.keys())
