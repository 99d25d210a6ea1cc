"""``ds_affine verify FOLDER --against SOURCE``: what is proved, what is named, and whose fault it is."""

import math
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from converting import convert
from edits import flip, mapped, native_moe
from stored import save_objects
from synthetic import COLUMN, Cut, Param, World, make, random_full, save
from verifying import (
    WORLDS,
    content,
    edit,
    flip_element,
    made,
    rewrite_manifest,
    tensor_of,
    toggle,
    verify,
)

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.commands import verify_elements
from deepspeed_affine.execute import sampling
from deepspeed_affine.ir.ints import coordinates
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.manifest import MANIFEST_NAME
from deepspeed_affine.storage.pt_reader import load_pickle

BOTH = pytest.mark.parametrize("options", [(), ("--quick",)])


def against(folder, source, capsys, *options):
    return verify(folder, capsys, "--against", os.fspath(source), *options)


def assert_fine(folder, source, capsys, *options):
    code, found, said = against(folder, source, capsys, *options)
    assert (code, found["result"], found["findings"], said) == (0, "fine", [], "")
    return found


def only(found):
    (finding,) = found["findings"]
    return finding


# Right outputs.


@pytest.mark.parametrize("world", WORLDS)
@BOTH
def test_a_right_output_is_fine_and_nothing_changes(tmp_path, capsys, world, options):
    source, folder = made(tmp_path, world)
    before = content(tmp_path)
    found = assert_fine(folder, source, capsys, *options)
    assert found["notes"] == []
    assert content(tmp_path) == before


@pytest.mark.parametrize("world", WORLDS)
@BOTH
def test_without_a_manifest_too(tmp_path, capsys, world, options):
    source, folder = made(tmp_path, world)
    os.unlink(folder / MANIFEST_NAME)
    assert_fine(folder, source, capsys, *options)


@BOTH
def test_native_experts(tmp_path, capsys, options):
    source = native_moe()[0].save(tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    assert_fine(tmp_path / "out", source, capsys, *options)


@pytest.mark.parametrize("world", ["zero1", "zero3", "half", "folded"])
def test_the_same_content_saved_by_another_writer_is_fine(tmp_path, capsys, world):
    """Every file of ``zero`` saved anew by torch, dated and padded otherwise, tensors in larger storages."""
    source, folder = made(tmp_path, world)
    os.unlink(folder / MANIFEST_NAME)
    for path in (folder / "zero").rglob("*.pt"):
        root = torch.load(path, weights_only=False)
        if isinstance(root, dict) and "param" in root:
            wide = torch.zeros(root["param"].numel() + 7, dtype=root["param"].dtype)
            view = wide[3 : 3 + root["param"].numel()].view(root["param"].shape)
            root["param"] = view.copy_(root["param"])
            root = dict(reversed(root.items()))
        torch.save(root, path)
    found = assert_fine(folder, source, capsys)
    assert found["files"] == sum(1 for path in folder.rglob("*") if path.is_file())


# Choices that change the output.


def drifted():
    made = make(World(tp=3), [Param("norm.weight", random_full((3, 5), 1)), Param("w", random_full((3, 4), 2), COLUMN)])
    flip(made, 2, state="exp_avg", element=7)
    return made


@pytest.mark.parametrize("policy", ["average", "first"])
@BOTH
def test_drift_is_treated_as_the_manifest_says(tmp_path, capsys, policy, options):
    source = drifted().save(tmp_path / "in")
    assert convert(source, tmp_path / "out", "--on-drift", policy) == 0
    assert_fine(tmp_path / "out", source, capsys, *options)
    os.unlink(tmp_path / "out" / MANIFEST_NAME)
    assert_fine(tmp_path / "out", source, capsys, "--on-drift", policy, *options)


def test_without_a_choice_drift_cannot_be_judged(tmp_path, capsys):
    source = drifted().save(tmp_path / "in")
    assert convert(source, tmp_path / "out", "--on-drift", "average") == 0
    os.unlink(tmp_path / "out" / MANIFEST_NAME)
    code, found, _ = against(tmp_path / "out", source, capsys)
    assert code == 2
    assert "norm.weight" in found["errors"][0]["message"]
    code, found, _ = against(tmp_path / "out", source, capsys, "--on-drift", "first")
    finding = only(found)
    assert (code, finding["kind"], finding["param"], finding["state"]) == (1, "elements", "norm.weight", "exp_avg")


def test_a_wrong_element_of_an_average(tmp_path, capsys):
    source = drifted().save(tmp_path / "in")
    assert convert(source, tmp_path / "out", "--on-drift", "average") == 0
    flip_element(tmp_path / "out" / "zero" / "norm.weight" / "exp_avg.pt", 7, 1)
    rewrite_manifest(tmp_path / "out")
    code, found, _ = against(tmp_path / "out", source, capsys)
    assert code == 1
    assert only(found)["first"] == [1, 2]
    assert "averaged with its copies" in only(found)["source"]


def scaled():
    """A parameter that every rank is said to hold halved."""
    return mapped("w", random_full((2, 3), 1), lambda full, tp: [full.clone()] * tp, 2, scale=0.5)


@pytest.mark.parametrize("policy", ["reset", "power"])
@BOTH
def test_states_of_scaled_parameters(tmp_path, capsys, policy, options):
    source = scaled().save(tmp_path / "in")
    folder = tmp_path / "out"
    assert convert(source, folder, "--scaled-states", policy) == 0
    assert_fine(folder, source, capsys, *options)
    flip_element(folder / "zero" / "w" / "exp_avg.pt", 4, 3)
    rewrite_manifest(folder)
    code, found, _ = against(folder, source, capsys, *options)
    assert (code, only(found)["state"], only(found)["first"]) == (1, "exp_avg", [1, 1])
    assert ("no file: the state was reset to zeros" in only(found)["source"]) == (policy == "reset")
    os.unlink(folder / MANIFEST_NAME)
    code, found, _ = against(folder, source, capsys, *options)
    assert code == 2
    assert "--scaled-states" in found["errors"][0]["message"]
    assert against(folder, source, capsys, "--scaled-states", policy, *options)[0] == 1


def test_a_wrong_zero_is_no_fault_of_a_damaged_source(tmp_path, capsys):
    source = scaled().save(tmp_path / "in")
    folder = tmp_path / "out"
    assert convert(source, folder, "--scaled-states", "reset") == 0
    for path, storage in sources(source):
        if "optim" in path.name and storage.nbytes > 16:
            toggle(path, storage.byte_offset + storage.nbytes - 1)
    flip_element(folder / "zero" / "w" / "exp_avg.pt", 4, 3)
    rewrite_manifest(folder)
    code, found, _ = against(folder, source, capsys, "--on-drift", "first")
    assert [finding["state"] for finding in found["findings"] if finding["decided"]] == ["exp_avg"]
    assert code == 1
    assert found["damaged_source"]


def test_identical_shards_are_treated_as_the_manifest_says(tmp_path, capsys):
    same = torch.cat([random_full((4, 2), 1)] * 2)
    states = {"exp_avg": same.clone(), "exp_avg_sq": same.clone()}
    source = make(World(tp=2), [Param("up", same, COLUMN, states=states)]).save(tmp_path / "in")
    for choice, other in (("replicated", "split"), ("split", "replicated")):
        folder = tmp_path / choice
        assert convert(source, folder, "--identical-shards", choice) == 0
        assert_fine(folder, source, capsys)
        code, found, _ = against(folder, source, capsys, "--identical-shards", other)
        assert code == 1
        assert {finding["kind"] for finding in found["findings"]} == {"metadata", "manifest"}
        assert any(f"option identical_shards was {choice!r}" in note for note in found["notes"])
        os.unlink(folder / MANIFEST_NAME)
        assert against(folder, source, capsys)[0] == 2


def test_injected_information_is_injected_again(tmp_path, capsys):
    source = make(World(with_info=False), [Param("w", random_full((4, 2), 1))]).save(tmp_path / "in")
    assert convert(source, tmp_path / "out", "--inject_missing_state") == 0
    assert_fine(tmp_path / "out", source, capsys)
    os.unlink(tmp_path / "out" / MANIFEST_NAME)
    assert against(tmp_path / "out", source, capsys)[0] == 2
    assert_fine(tmp_path / "out", source, capsys, "--inject_missing_state")


def test_the_habits_of_another_deepspeed(tmp_path, capsys):
    """Entries beside a tensor follow the version that the manifest names, not the one that is installed."""
    source = mapped("w", random_full((6, 4), 1), lambda full, tp: list(full.chunk(tp, 1)), 2).save(tmp_path / "in")
    folder = tmp_path / "out"
    assert convert(source, folder) == 0
    assert_fine(folder, source, capsys)
    code, found, _ = against(folder, source, capsys, "--deepspeed", "0.19.6")
    assert code == 1
    assert {(each["kind"], each["param"], each["place"]) for each in found["findings"]} == {
        ("metadata", "w", "['cat_dim']")
    }
    rewrite_manifest(folder, lambda parts: parts["identity"]["software"].update(deepspeed="0.19.6"))
    assert against(folder, source, capsys)[0] == 1
    assert against(folder, source, capsys, "--deepspeed", "0.19.8")[0] == 0


def test_an_unknown_choice_in_a_manifest(tmp_path, capsys):
    source, folder = made(tmp_path, "flat")
    rewrite_manifest(folder, lambda parts: parts["identity"]["options"].update(on_drift="median"))
    code, found, _ = against(folder, source, capsys)
    assert code == 2
    assert "option on_drift was 'median'" in found["errors"][0]["message"]


# Wrong elements.


def source_value(source, finding, width):
    """The stored bytes that a finding says its first element comes from."""
    file, _, rest = finding["source"].partition(" (")
    key = rest.split("storage '")[1].split("'")[0]
    element = int(rest.rsplit("element ", 1)[1])
    storage = load_pickle(os.path.join(source, file)).archive.storages[key]
    with open(os.path.join(source, file), "rb") as handle:
        handle.seek(storage.byte_offset + element * width)
        return handle.read(width)


@pytest.mark.parametrize("world", ["zero1", "zero2", "zero3", "flat", "half", "pipeline", "experts", "folded"])
def test_any_wrong_element_is_found_though_every_checksum_is_right(tmp_path, capsys, world):
    source, folder = made(tmp_path, world)
    generator = random.Random(7)
    for path in sorted((folder / "zero").glob("*/*.pt")):
        param, state = path.parent.name, path.stem
        intact = path.read_bytes()
        right = tensor_of(torch.load(path, weights_only=False)).clone()
        element, bit = generator.randrange(right.numel()), generator.randrange(3)
        flip_element(path, element, bit)
        rewrite_manifest(folder)
        assert verify(folder, capsys)[0] == 0
        code, found, _ = against(folder, source, capsys)
        finding = only(found)
        assert (code, finding["kind"], finding["file"]) == (1, "elements", f"zero/{param}/{path.name}")
        assert (finding["param"], finding["state"]) == (param, state)
        assert finding["first"] == list(coordinates(element, right.shape))
        assert (finding["differing"], finding["compared"]) == (1, right.numel())
        said = torch.tensor(float(finding["expected"]), dtype=right.dtype)
        assert said.item() == right.reshape(-1)[element].item()
        assert finding["max_ulp"] == 1 << bit
        if state != "step":
            raw = right.reshape(-1).view(torch.uint8).numpy().tobytes()
            width = right.element_size()
            assert source_value(source, finding, width) == raw[element * width : (element + 1) * width]
        path.write_bytes(intact)
    rewrite_manifest(folder)
    assert_fine(folder, source, capsys)


def test_what_is_printed(tmp_path, capsys):
    full = torch.arange(12.0).reshape(3, 4)
    source = make(World(tp=2), [Param("w", full, Cut("row"))]).save(tmp_path / "in")
    folder = tmp_path / "out"
    assert convert(source, folder) == 0
    size = sum(path.stat().st_size for path in folder.rglob("*.pt"))
    capsys.readouterr()
    assert ds_affine(["verify", str(folder), "--against", source]) == 0
    compared = f"(7 files, {size / 1000:.1f} KB compared with {source}, through the maps)"
    assert capsys.readouterr().out == f"{folder}: fine {compared}\n"
    flip_element(folder / "zero" / "w" / "fp32.pt", 6)
    rewrite_manifest(folder)
    assert ds_affine(["verify", str(folder), "--against", source]) == 1
    name = "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    storage = max(load_pickle(os.path.join(source, name)).archive.storages.values(), key=lambda ref: ref.byte_offset)
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: DIFFERENT, 1 file {compared}",
        "  zero/w/fp32.pt  elements  parameter 'w', state 'fp32': first at element (1, 2): 6 expected, "
        "6.00000048 found; "
        f"1 of 12 elements differ, by at most 4.76837e-07, 1 ulp; it should come from {name} (dp 0, mp 1), storage "
        f"{storage.key!r}, element 2",
    ]


def test_counts_and_distances_over_many_chunks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify_elements, "CHUNK_BYTES", 64)
    full = random_full((40, 6), 1)
    source = make(World(tp=2, dp=2), [Param("w", full, Cut("row"))]).save(tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    generator = random.Random(2)
    elements = sorted(generator.sample(range(full.numel()), 25))

    def change(root):
        for element in elements:
            root["param"].view(-1)[element] += 0.5

    edit(tmp_path / "out" / "zero" / "w" / "fp32.pt", change)
    rewrite_manifest(tmp_path / "out")
    code, found, _ = against(tmp_path / "out", source, capsys)
    finding = only(found)
    assert (code, finding["differing"]) == (1, 25)
    assert finding["first"] == list(coordinates(elements[0], full.shape))
    assert finding["max_abs"] == pytest.approx(0.5, abs=1e-6)


def test_nan_and_signed_zero_are_bytes(tmp_path, capsys):
    full = torch.tensor([float("nan"), 0.0, 1.0, 2.0])
    source = make(World(), [Param("w", full)]).save(tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    path = tmp_path / "out" / "zero" / "w" / "fp32.pt"
    assert_fine(tmp_path / "out", source, capsys)

    def negate(root):
        root["param"][1] = -0.0

    edit(path, negate)
    rewrite_manifest(tmp_path / "out")
    code, found, _ = against(tmp_path / "out", source, capsys)
    assert (code, only(found)["first"], only(found)["max_abs"]) == (1, [1], 0.0)


# Wrong metadata.


def removed(key):
    return lambda root: root.pop(key) and None


def retyped(root):
    root["param"] = root["param"].double()


def reshaped(root):
    root["param"] = root["param"].reshape(-1)


def expanded(root):
    root["param"] = torch.zeros(1).expand(root["param"].shape)


def bare(root):
    return root["param"]


def renamed(root):
    root["params"] = root.pop("param")


def shorter(root):
    root["param"] = root["param"][:-1].clone()


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("down/fp32", lambda root: root.update(cat_dim=0), "['cat_dim']: 1 expected, 0 found"),
        ("down/fp32", removed("cat_dim"), "['cat_dim']: 1 expected, nothing found"),
        ("up/fp32", lambda root: root.update(cat_dim=True), "['cat_dim']: 0 expected, True found"),
        ("up/fp32", lambda root: root.update(more=1), "['more']: nothing expected, 1 found"),
        ("emb/exp_avg", removed("vocab_tensor"), "['vocab_tensor']: True expected, nothing found"),
        ("qkv/fp32", lambda root: root["sub_param_shape"].shape.reverse(), "['sub_param_shape']"),
        ("qkv/fp32", removed("sub_param_shape"), "['sub_param_shape']"),
        ("up/fp32", retyped, "a tensor of float32, shape [4, 3] expected, a tensor of float64, shape [4, 3] found"),
        ("up/fp32", reshaped, "shape [4, 3] expected, a tensor of float32, shape [12] found"),
        ("emb/fp32", shorter, "shape [9, 3] expected, a tensor of float32, shape [8, 3] found"),
        ("up/fp32", expanded, "repeats"),
        ("up/fp32", renamed, "['param']"),
        ("up/fp32", bare, "expected"),
        ("up/step", lambda root: 7, "expected, 7 found"),
    ],
)
@BOTH
def test_wrong_metadata_is_found_though_every_checksum_is_right(tmp_path, capsys, file, change, said, options):
    source, folder = made(tmp_path, "zero1")
    path = folder / "zero" / f"{file}.pt"
    with_classes(path, change)
    rewrite_manifest(folder)
    assert verify(folder, capsys)[0] == 0
    code, found, _ = against(folder, source, capsys, *options)
    assert code == 1
    assert {finding["file"] for finding in found["findings"]} == {f"zero/{file}.pt"}
    assert {finding["kind"] for finding in found["findings"]} == {"metadata"}
    assert any(said in finding["detail"] for finding in found["findings"])
    param, state = file.split("/")
    assert {(finding["param"], finding["state"]) for finding in found["findings"]} == {(param, state)}


def with_classes(path, change):
    """As ``edit``, with DeepSpeed's own classes."""
    root = torch.load(path, weights_only=False)
    changed = change(root)
    torch.save(root if changed is None else changed, path)


@pytest.mark.parametrize("world", ["zero1", "zero3"])
@BOTH
def test_the_shared_optimizer_state(tmp_path, capsys, world, options):
    source, folder = made(tmp_path, world)
    path = folder / "zero" / "optimizer_state.pt"
    intact = path.read_bytes()

    def learning_rate(root):
        root["param_groups"][0]["lr"] = 0.02

    def stage(root):
        root["partition_count"] = 17

    for change, said in ((learning_rate, "['param_groups'][0]['lr']: 0.01 expected, 0.02 found"), (stage, "17 found")):
        resaved(path, change)
        rewrite_manifest(folder)
        code, found, _ = against(folder, source, capsys, *options)
        assert (code, only(found)["kind"]) == (1, "metadata")
        assert said in only(found)["detail"]
        path.write_bytes(intact)
    if world == "zero3":
        storage = load_pickle(path).archive.storages["1"]
        toggle(path, storage.byte_offset + 5, 4)
        rewrite_manifest(folder)
        code, found, _ = against(folder, source, capsys, *options)
        finding = only(found)
        assert (code, finding["kind"], finding["file"]) == (1, "elements", "zero/optimizer_state.pt")
        assert finding["first"] == [1]
        assert finding["place"].startswith("[")
        assert "zero_pp_rank_0_mp_rank_00_optim_states.pt (dp 0, mp 0), storage" in finding["source"]


def resaved(path, change):
    """A file with classes that need not be importable is changed as what it is, inert, and written by the package."""
    root = load_pickle(path).root
    change(root)
    save_objects(f"{path}.new", root)
    os.replace(f"{path}.new", path)


@pytest.mark.parametrize("world", ["zero1", "zero3", "folded"])
@BOTH
def test_model_state_files(tmp_path, capsys, world, options):
    source, folder = made(tmp_path, world)
    path = sorted(folder.glob("*_model_states.pt"))[-1]
    intact = path.read_bytes()

    def step(root):
        root["global_steps"] = 8

    resaved(path, step)
    rewrite_manifest(folder)
    code, found, _ = against(folder, source, capsys, *options)
    assert (code, only(found)["kind"], only(found)["file"]) == (1, "metadata", path.name)
    assert "['global_steps']: 7 expected, 8 found" in only(found)["detail"]
    path.write_bytes(intact)
    tensors = load_pickle(path).root["module"].values()
    tensor = next((tensor for tensor in tensors if tensor.numel), None)
    if tensor is not None:
        toggle(path, tensor.byte_offset + 1, 4)
        rewrite_manifest(folder)
        code, found, _ = against(folder, source, capsys, *options)
        assert (code, only(found)["kind"], only(found)["file"]) == (1, "elements", path.name)
        assert only(found)["first"][0] == 0
        assert path.name in only(found)["source"]


@pytest.mark.parametrize("world", ["zero1", "folded"])
def test_bytes_of_a_model_state_file_that_no_tensor_shows(tmp_path, capsys, world):
    """A view is saved with all of its storage; a copied file and an amended one keep all of it."""
    source, folder = made(tmp_path, world)
    path = folder / "mp_rank_01_model_states.pt"
    loaded = load_pickle(path)
    tensor = loaded.root["module"]["up"]
    assert tensor.storage.nbytes > tensor.nbytes
    hidden = tensor.storage.byte_offset if tensor.offset else tensor.storage.byte_offset + tensor.storage.nbytes - 4
    toggle(path, hidden, 1)
    rewrite_manifest(folder)
    code, found, _ = against(folder, source, capsys)
    assert (code, only(found)["file"], only(found)["kind"]) == (1, path.name, "elements")
    assert only(found)["place"] == f"storage {tensor.storage.key!r}"
    assert only(found)["differing"] == 1
    assert f"{path.name} (mp 1), storage" in only(found)["source"]


def test_a_copied_file_is_compared_byte_for_byte(tmp_path, capsys):
    """Though its content is the same."""
    source, folder = made(tmp_path, "zero1")
    path = folder / "mp_rank_00_model_states.pt"
    os.unlink(folder / MANIFEST_NAME)
    data = path.read_bytes()
    toggle(path, data.index(b"FB") + 8, 1)
    code, found, _ = against(folder, source, capsys)
    assert (code, only(found)["kind"], only(found)["file"]) == (1, "bytes", path.name)
    assert f"byte {data.index(b'FB') + 8} is the first that differs" in only(found)["detail"]


# Files.


@BOTH
def test_files_missing_and_too_many(tmp_path, capsys, options):
    source, folder = made(tmp_path, "zero1")
    os.unlink(folder / MANIFEST_NAME)
    shutil.rmtree(folder / "zero" / "up")
    os.unlink(folder / "zero" / "emb" / "step.pt")
    shutil.copytree(folder / "zero" / "down", folder / "zero" / "other")
    (folder / "notes.txt").write_text("")
    code, found, _ = against(folder, source, capsys, *options)
    assert code == 1
    listed = sorted((finding["kind"], finding["file"]) for finding in found["findings"])
    assert listed == [
        ("extra", "notes.txt"),
        *[("extra", f"zero/other/{state}.pt") for state in ("exp_avg", "exp_avg_sq", "fp32", "step")],
        ("missing", "zero/emb/step.pt"),
        *[("missing", f"zero/up/{state}.pt") for state in ("exp_avg", "exp_avg_sq", "fp32", "step")],
    ]
    assert {finding["param"] for finding in found["findings"] if finding["kind"] == "missing"} == {"emb", "up"}


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
@BOTH
def test_truncated_files(tmp_path, capsys, keep, options):
    source, folder = made(tmp_path, "zero3")
    os.unlink(folder / MANIFEST_NAME)
    for path in (folder / "zero" / "up" / "fp32.pt", folder / "zero" / "optimizer_state.pt", next(folder.glob("*.pt"))):
        intact = path.read_bytes()
        size = int(len(intact) * keep) if isinstance(keep, float) else keep if keep >= 0 else len(intact) + keep
        path.write_bytes(intact[:size])
        code, found, _ = against(folder, source, capsys, *options)
        assert (code, only(found)["kind"]) == (1, "damaged")
        assert only(found)["file"] == path.relative_to(folder).as_posix()
        assert str(folder) not in only(found)["detail"]
        path.write_bytes(intact)


def test_a_flip_anywhere_is_found_by_content_or_by_manifest(tmp_path, capsys):
    source, folder = made(tmp_path, "flat")
    generator = random.Random(3)
    for path in sorted(path for path in folder.rglob("*.pt")):
        for byte in generator.sample(range(path.stat().st_size), 30):
            toggle(path, byte, byte % 8)
            code, found, _ = against(folder, source, capsys)
            assert (code, {finding["file"] for finding in found["findings"]}) == (
                1,
                {path.relative_to(folder).as_posix()},
            )
            toggle(path, byte, byte % 8)
    assert_fine(folder, source, capsys)


def test_a_manifest_that_contradicts_right_files(tmp_path, capsys):
    source, folder = made(tmp_path, "zero1")

    def change(parts):
        from deepspeed_affine.storage.manifest import ManifestFile, ManifestParameter

        files = parts["files"]
        first = files["zero/up/fp32.pt"]
        files["zero/up/fp32.pt"] = ManifestFile(first.nbytes, first.crc32 ^ 1, "up", "fp32")
        files["zero/gone.pt"] = ManifestFile(1, 1)
        files["zero/up/exp_avg.pt"] = replace(files["zero/up/exp_avg.pt"], param="down", state="exp_avg_sq")
        del files["zero/down/fp32.pt"]
        parts["parameters"]["down"] = ManifestParameter(parts["parameters"]["down"].layout, (4, 3))
        parts["parameters"]["up"] = ManifestParameter("0" * 64, parts["parameters"]["up"].shape)

    rewrite_manifest(folder, change)
    code, found, _ = against(folder, source, capsys)
    assert code == 1
    assert {finding["kind"] for finding in found["findings"]} == {"manifest"}
    details = " | ".join(f"{finding['file']} {finding['detail']}" for finding in found["findings"])
    for said in (
        "zero/up/fp32.pt its manifest records",
        "does not list zero/down/fp32.pt",
        "lists zero/gone.pt",
        "[4, 3]",
        "says zero/up/exp_avg.pt holds state 'exp_avg_sq' of parameter 'down'; it holds state 'exp_avg' of",
    ):
        assert said in details
    assert found["notes"] == ["since the conversion: the layout of parameter 'up' is another"]


def newer(data):
    return data.replace(b'"format_version": 1', b'"format_version": 2')


def a_name_changed(data):
    return data.replace(b"zero/w/fp32.pt", b"zero/v/fp32.pt")


def a_digit_changed(data):
    at = data.index(b'"crc32": "') + len(b'"crc32": "')
    return data[:at] + (b"1" if data[at : at + 1] == b"0" else b"0") + data[at + 1 :]


@pytest.mark.parametrize("harm", [newer, a_name_changed, a_digit_changed, lambda data: b"[", lambda data: b""])
@BOTH
def test_a_manifest_that_cannot_be_read_is_a_finding_and_all_else_is_compared(tmp_path, capsys, harm, options):
    source, folder = made(tmp_path, "flat")
    path = folder / MANIFEST_NAME
    path.write_bytes(harm(path.read_bytes()))
    code, found, _ = against(folder, source, capsys, *options)
    assert (code, found["result"]) == (1, "different")
    assert (only(found)["kind"], only(found)["file"]) == ("manifest", MANIFEST_NAME)
    assert str(folder) not in only(found)["detail"]
    assert found["files"] == len([path for path in folder.rglob("*") if path.is_file()]) - 1
    (note,) = found["notes"]
    assert "the manifest cannot be used: " in note
    assert "on_drift error" in note
    flip_element(folder / "zero" / "w" / "exp_avg.pt", 1)
    code, found, _ = against(folder, source, capsys, *options, "--on-drift", "first")
    assert (code, sorted(finding["kind"] for finding in found["findings"])) == (1, ["elements", "manifest"])
    assert "on_drift first" in found["notes"][0]


def test_a_manifest_that_cannot_be_read_beside_a_source_that_needs_its_options(tmp_path, capsys):
    source = drifted().save(tmp_path / "in")
    assert convert(source, tmp_path / "out", "--on-drift", "average") == 0
    (tmp_path / "out" / MANIFEST_NAME).write_text("{")
    code, found, err = against(tmp_path / "out", source, capsys)
    assert code == 2
    assert MANIFEST_NAME in found["errors"][0]["message"]
    assert "--on-drift" in err
    assert against(tmp_path / "out", source, capsys, "--on-drift", "average")[0] == 1


# The source.


def test_a_source_saved_again_with_the_same_content_is_a_note(tmp_path, capsys):
    world, params, _ = WORLDS["zero1"]
    made_once = make(world, params)
    source = made_once.save(tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    again = made_once.files[made_once.optim_name()]
    again["ds_version"] = "0.19.7"
    save(again, os.path.join(source, made_once.optim_name()))
    found = assert_fine(tmp_path / "out", source, capsys)
    assert found["notes"] == [
        f"since the conversion: source file {made_once.optim_name()} has the same size and other content"
    ]
    assert ds_affine(["verify", str(tmp_path / "out"), "--against", source]) == 0
    assert f"note: {found['notes'][0]}" in capsys.readouterr().out


def test_another_checkpoint_differs_in_content_and_is_told_apart(tmp_path, capsys):
    _, folder = made(tmp_path, "zero2")
    world, params, _ = WORLDS["zero2"]
    other = [
        Param(param.name, random_full(param.full.shape, 100 + at), param.cut, param.group)
        for at, param in enumerate(params)
    ]
    source = make(world, other).save(tmp_path / "other")
    code, found, _ = against(folder, source, capsys)
    assert code == 1
    assert any("since the conversion: source file" in note for note in found["notes"])
    assert {finding["param"] for finding in found["findings"] if finding["state"] == "fp32"} == {p.name for p in params}
    assert (found["findings"][0]["kind"], found["findings"][0]["file"]) == ("source", MANIFEST_NAME)
    assert [finding["kind"] for finding in found["findings"]].count("source") == 1


def test_another_checkpoint_is_said_first_and_once(tmp_path, capsys):
    _, folder = made(tmp_path, "zero1")
    params = [Param(f"p{at:02d}", random_full((3,), at)) for at in range(40)]
    source = make(World(stage=1, tp=4, dp=4), params).save(tmp_path / "other")
    capsys.readouterr()
    assert ds_affine(["verify", str(folder), "--against", source]) == 1
    verdict, first, *rest = capsys.readouterr().out.splitlines()
    assert "DIFFERENT" in verdict
    assert first.split()[:2] == [MANIFEST_NAME, "source"]
    assert "this output was made from another checkpoint: source file " in first
    assert first.endswith(" more")
    assert len(rest) == 19 + 1 + 5 + 1
    assert rest[19].endswith("more; --all shows them")
    assert rest[-1].endswith("more notes; --all shows them")
    assert ds_affine(["verify", str(folder), "--against", source, "--all"]) == 1
    assert len(capsys.readouterr().out.splitlines()) > 100


def test_another_checkpoint_that_does_not_convert(tmp_path, capsys):
    _, folder = made(tmp_path, "zero1")
    code, found, err = against(folder, drifted().save(tmp_path / "other"), capsys)
    assert code == 2
    assert len(found["errors"]) == 2
    assert "--on-drift" in err
    assert f"{folder / MANIFEST_NAME}: says that this output was made from another checkpoint: source file" in err


def sources(folder):
    """Every stored byte range of a checkpoint: ``(path, storage)``."""
    for path in sorted(Path(folder).glob("*.pt")):
        for storage in load_pickle(path).archive.storages.values():
            if storage.nbytes:
                yield path, storage


@pytest.mark.parametrize("world", ["zero1", "zero3", "folded"])
def test_damage_in_the_source_is_not_called_a_wrong_output(tmp_path, capsys, world):
    source, folder = made(tmp_path, world)
    compared = 0
    for path, storage in sources(source):
        toggle(path, storage.byte_offset + storage.nbytes // 2, 5)
        code, found, said = against(folder, source, capsys)
        toggle(path, storage.byte_offset + storage.nbytes // 2, 5)
        if code == 0:
            # Nothing of it reaches an output.
            assert "model_states" in path.name or "layer" in path.name
            continue
        assert code == 2, found
        if "errors" in found:
            # Copies that disagree are looked into before anything is compared.
            assert path.name in said
            compared += 1
            continue
        assert found["result"] == "cannot tell"
        assert [fault["file"] for fault in found["damaged_source"]] == [str(path)]
        assert path.name in said
        assert not any(finding["decided"] for finding in found["findings"])
        compared += 1
    assert compared > 3


@BOTH
def test_a_wrong_output_is_found_beside_a_damaged_source(tmp_path, capsys, options):
    source, folder = made(tmp_path, "flat")
    storage = next(
        ref for path, ref in sources(source) if "rank_1" in path.name and "optim" in path.name and ref.nbytes > 16
    )
    toggle(storage.path, storage.byte_offset + 8, 5)
    assert against(folder, source, capsys, *options)[0] == 2
    # An element that comes from another file.
    flip_element(folder / "zero" / "w" / "fp32.pt", 0, 1)
    flip_element(folder / "zero" / "w" / "exp_avg.pt", 1, 1)
    flip_element(folder / "zero" / "w" / "exp_avg_sq.pt", 2, 1)
    rewrite_manifest(folder)
    code, found, said = against(folder, source, capsys, *options)
    assert code == 1
    decided = [finding for finding in found["findings"] if finding["decided"]]
    assert [finding["first"] for finding in sorted(decided, key=lambda item: item["file"])] == [[1], [2], [0]]
    assert all(finding["differing"] == 1 for finding in decided)
    assert os.path.basename(storage.path) in said


def test_without_the_check_a_damaged_source_makes_a_right_output_look_wrong(tmp_path, capsys):
    source, folder = made(tmp_path, "flat")
    storage = next(ref for path, ref in sources(source) if "optim" in path.name and ref.nbytes > 16)
    toggle(storage.path, storage.byte_offset + 8, 5)
    assert against(folder, source, capsys, "--no-source-crc")[0] == 1
    assert against(folder, source, capsys)[0] == 2


@pytest.mark.parametrize("harm", ["missing", "truncated", "universal", "no folder"])
def test_a_source_that_cannot_be_converted(tmp_path, capsys, harm):
    source, folder = made(tmp_path, "zero1")
    path = os.path.join(source, "mp_rank_01_model_states.pt")
    if harm == "missing":
        os.unlink(path)
    elif harm == "truncated":
        os.truncate(path, 1000)
    elif harm == "universal":
        source = folder
    else:
        source = tmp_path / "nothing"
    code, found, said = against(folder, source, capsys)
    assert code == 2
    assert found["errors"]
    assert harm != "no folder" or f"{source}: does not exist. Check the path." in said
    assert "Traceback" not in said
    assert "internal error" not in said


@pytest.mark.parametrize("folder", ["nothing", "empty", "in"])
def test_folders_that_are_no_outputs(tmp_path, capsys, folder):
    source, _ = made(tmp_path, "flat")
    (tmp_path / "empty").mkdir()
    (tmp_path / "in").mkdir()
    shutil.copy(os.path.join(source, os.listdir(source)[0]), tmp_path / "in")
    code, found, _ = against(tmp_path / folder, source, capsys)
    assert code == (2 if folder == "nothing" else 1)
    if folder == "nothing":
        assert "nothing: does not exist" in found["errors"][0]["message"]
    else:
        assert any(finding["kind"] == "missing" for finding in found["findings"])


# How it is done.


def counted(monkeypatch):
    original, reads = ByteReader.read_into, []

    def read_into(self, path, offset, out):
        reads.append((path, offset, offset + out.nbytes))
        original(self, path, offset, out)

    monkeypatch.setattr(ByteReader, "read_into", read_into)
    return reads


@pytest.mark.parametrize("world", ["split", "flat"])
def test_every_byte_of_source_and_output_is_read_once(tmp_path, capsys, monkeypatch, world):
    params = [Param("up", random_full((4000, 3), 2), COLUMN), Param("down", random_full((30, 4000), 3), Cut("row"))]
    shape = World(stage=1, tp=2, dp=2) if world == "split" else World(stage=3, dp=2)
    source = make(shape, params).save(tmp_path / "in")
    # Otherwise a little of every tensor is read before, to see whether the ranks hold the same.
    assert convert(source, tmp_path / "out", "--identical-shards", "split") == 0
    reads = counted(monkeypatch)
    assert_fine(tmp_path / "out", source, capsys)
    for path in (tmp_path / "out").rglob("*.pt"):
        ranges = sorted((start, stop) for name, start, stop in reads if name == str(path))
        assert all(one[1] == other[0] for one, other in pairwise(ranges)), path
        assert (ranges[0][0], ranges[-1][1]) == (0, path.stat().st_size)
    # Of the source nothing is read twice but short runs, and ZeRO-3's first file, which goes into two outputs.
    for path in Path(source).glob("*optim_states.pt"):
        nbytes = sum(stop - start for name, start, stop in reads if name == str(path))
        assert nbytes <= (2.1 if world == "flat" and "rank_0_" in path.name else 1.05) * path.stat().st_size


def test_memory_does_not_grow_with_a_tensor(tmp_path, capsys):
    """One tensor of 160 MB on each side, and ZeRO-3's optimizer state of 240 MB."""
    source = make(World(stage=3, dp=2), [Param("w", torch.zeros(40 << 20))]).save(tmp_path / "in")
    assert convert(source, tmp_path / "out", "--workers", "2") == 0
    for options in ((), ("--against", source), ("--against", source, "--quick")):
        tracemalloc.start()
        assert verify(tmp_path / "out", capsys, *options)[0] == 0
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 45 << 20


def test_torch_is_imported_only_to_measure_a_difference(tmp_path):
    source, folder = made(tmp_path, "zero1")
    code = (
        "import sys; from deepspeed_affine.cli import ds_affine\n"
        f"code = ds_affine(['verify', {str(folder)!r}, '--against', {str(source)!r}])\n"
        "sys.exit(code or 10 * any(name in sys.modules for name in ('torch', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_either_side_may_be_elsewhere(memory, tmp_path, capsys):
    source, folder = made(tmp_path, "zero3")
    there, copy = memory.copy_in(folder, "out"), memory.copy_in(source, "in")
    for one, other in ((there, source), (folder, copy), (there, copy)):
        for options in ((), ("--quick",)):
            assert_fine(one, other, capsys, *options)
    flip_element(folder / "zero" / "up" / "fp32.pt", 5)
    memory.write("out/zero/up/fp32.pt", (folder / "zero" / "up" / "fp32.pt").read_bytes())
    code, found, _ = against(there, copy, capsys)
    assert code == 1
    assert {finding["file"] for finding in found["findings"]} == {"zero/up/fp32.pt"}
    assert {finding["kind"] for finding in found["findings"]} == {"elements"}


# Samples.


@pytest.fixture
def small_samples(monkeypatch):
    """Blocks of a few bytes, so that a small folder has many; what would be 64 MB is nothing."""
    monkeypatch.setattr(sampling, "LEAST_BYTES", 1)
    monkeypatch.setattr(verify_elements, "BLOCK_BYTES", 32)


def test_a_sample_of_blocks_finds_a_wrong_element_as_often_as_it_says(tmp_path, capsys, monkeypatch, small_samples):
    monkeypatch.setattr(sampling, "SHARE", sampling.Fraction(1, 5))
    source = make(World(tp=2), [Param("up", random_full((20, 6), 2), COLUMN)]).save(tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    flip_element(tmp_path / "out" / "zero" / "up" / "exp_avg.pt", 77)
    rewrite_manifest(tmp_path / "out")
    tries, hits, stated = 250, 0, set()
    for seed in range(tries):
        code, found, _ = against(tmp_path / "out", source, capsys, "--quick", "--seed", str(seed))
        if code:
            assert only(found)["first"] == list(coordinates(77, (20, 6)))
        hits += code
        stated.add(found["sample"]["single_byte_found"])
    (probability,) = stated
    assert abs(hits - tries * probability) <= 4 * math.sqrt(tries * probability * (1 - probability))
    assert 0.2 <= probability < 0.25
    assert found["sample"]["unit"] == "block"
    assert found["sample"]["bytes"] < 0.3 * found["sample"]["total_bytes"]


def test_a_sample_reads_little_and_only_what_it_says(tmp_path, capsys, monkeypatch, small_samples):
    source = make(World(), [Param("w", random_full((20_000,), 1))]).save(tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    reads = counted(monkeypatch)
    found = assert_fine(tmp_path / "out", source, capsys, "--quick", "--seed", "3")
    sample = found["sample"]
    data = [stop - start for path, start, stop in reads if path.startswith(str(tmp_path / "out" / "zero" / "w"))]
    assert sum(data) <= sample["bytes"] + 5000
    assert 0.009 * sample["total_bytes"] < sample["bytes"] < 0.011 * sample["total_bytes"]
    assert sample["chosen"] == math.ceil(sample["units"] / 100)


def test_a_damaged_source_does_not_spoil_a_sample(tmp_path, capsys):
    source, folder = made(tmp_path, "flat")
    wanted = (ref for path, ref in sources(source) if "rank_1" in path.name and "optim" in path.name)
    storage = next(ref for ref in wanted if ref.nbytes > 16)
    toggle(storage.path, storage.byte_offset + 4, 3)
    code, found, _ = against(folder, source, capsys, "--quick")
    assert (code, found["result"]) == (2, "cannot tell")
    assert found["damaged_source"]
