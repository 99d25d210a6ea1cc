"""``ds_affine diff``: every changed bit is found and named, and nothing else is reported."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from converting import convert
from synthetic import COLUMN, REPLICATED, ROW, Cut, ExpertLayer, Foreign, Param, World, make, random_full, save

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.ir.ints import coordinates
from deepspeed_affine.storage.manifest import MANIFEST_NAME
from deepspeed_affine.storage.pt_reader import load_pickle

STRIDE = 10_000


def interleaved(full, tp):
    """Row ``r`` is on rank ``r % tp``."""
    return [full[rank::tp] for rank in range(tp)]


def params(numbered=False):
    """Parameters of every kind of cut. ``numbered``: every element holds its own address in F, parameters apart."""
    cuts = [
        ("emb", (10, 3), Cut("vocab", original_rows=9)),
        ("up", (4, 3), COLUMN),
        ("down", (3, 4), ROW),
        ("qkv", (12, 2), Cut("sub", sub_sizes=(4, 4, 4))),
        ("norm", (5,), REPLICATED),
    ]
    made = []
    for number, (name, shape, cut) in enumerate(cuts):
        full = random_full(shape, number)
        states = None
        if numbered:
            full = (torch.arange(full.numel(), dtype=torch.float32) + number * STRIDE).reshape(shape)
            states = {"exp_avg": full, "exp_avg_sq": full}
        made.append(Param(name, full, cut, states=states, stages=(0, 1) if name == "norm" else (0,)))
    return made


def only_module(numbered=False):
    fixed, mean = random_full((4, 2), 31), random_full((3,), 32)
    if numbered:
        fixed = (torch.arange(8.0) + 5 * STRIDE).reshape(4, 2)
        mean = torch.arange(3.0) + 6 * STRIDE
    return [Param("fixed", fixed, COLUMN, kind="frozen"), Param("mean", mean, kind="buffer")]


NAMES = ["emb", "up", "down", "qkv", "norm", "fixed", "mean"]
SHAPES = {
    "emb": (10, 3),
    "up": (4, 3),
    "down": (3, 4),
    "qkv": (12, 2),
    "norm": (5,),
    "fixed": (4, 2),
    "mean": (3,),
}


def compact(made):
    """Every tensor in a storage of its own, so that every stored byte is an element."""
    for root in made.files.values():
        for holder in (root, root.get("module"), root.get("frozen_param_fragments")):
            for key, value in (holder or {}).items():
                if isinstance(value, torch.Tensor):
                    holder[key] = value.clone()
    return made


def diff(a, b, capsys, *options):
    """``(exit code, document, lines on stderr)``."""
    capsys.readouterr()
    code = ds_affine(["diff", os.fspath(a), os.fspath(b), "--json", *options])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err.splitlines()


def stored(folder):
    """Every stored storage with bytes: ``(file name, storage)``."""
    for path in sorted(Path(folder).rglob("*.pt")):
        for storage in load_pickle(path).archive.storages.values():
            if storage.nbytes:
                yield path.relative_to(folder).as_posix(), storage


class Flipped:
    """Within the block one bit of a file is the other one."""

    def __init__(self, path, byte, bit):
        self.path, self.byte, self.bit = path, byte, bit

    def toggle(self):
        with open(self.path, "r+b") as file:
            file.seek(self.byte)
            (value,) = file.read(1)
            file.seek(self.byte)
            file.write(bytes([value ^ 1 << self.bit]))

    def __enter__(self):
        self.toggle()

    def __exit__(self, *_):
        self.toggle()


def element(folder, name, storage, at):
    """Element ``at`` of a storage as a number."""
    with open(Path(folder, name), "rb") as file:
        file.seek(storage.byte_offset + 4 * at)
        return torch.frombuffer(bytearray(file.read(4)), dtype=torch.float32).item()


def members(case, numbered=False):
    """A pipeline's frozen parameters and buffers are in layer files, under names no one knows."""
    return [*params(numbered), *([] if case == "pipeline" else only_module(numbered))]


def with_buffers(made):
    """As DeepSpeed saves them under ZeRO-3, where only parameters are placeholders."""
    if made.world.stage == 3:
        for root in made.files.values():
            if "mean" in (root.get("module") or {}):
                root["module"]["mean"] = random_full((3,), 32)
    return made


# Equal folders.


def worlds():
    return {
        "zero1": World(dp=2, align=4),
        "tp": World(tp=2, dp=2, align=4),
        "pipeline": World(tp=2, pp=2, dp=2, layer_files=True),
        "zero3": World(stage=3, dp=3),
        "zero3 tp": World(stage=3, tp=2, dp=2),
    }


@pytest.mark.parametrize("case", worlds())
def test_a_copy_is_equal(tmp_path, capsys, case):
    folder = compact(make(worlds()[case], members(case))).save(tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b")
    code, found, err = diff(folder, tmp_path / "b", capsys)
    assert (code, err, found["equal"]) == (0, [], True)
    assert found["layouts"]["equal_parameters"] == len(members(case))
    contents = found["contents"]
    assert contents["method"] == "files"
    assert contents["equal_tensors"] >= sum(1 for _ in stored(folder))
    assert contents["bytes"] == sum(storage.nbytes for _, storage in stored(folder))
    assert contents["equal_values"] > 50
    assert contents["different"] == contents["only_a"] == contents["only_b"] == []
    assert diff(folder, folder, capsys)[0] == 0


@pytest.mark.parametrize("case", worlds())
def test_a_checkpoint_and_what_it_converts_to_are_equal(tmp_path, capsys, case):
    folder = make(worlds()[case], members(case)).save(tmp_path / "a")
    assert convert(folder, tmp_path / "universal") == 0
    for a, b in ((folder, tmp_path / "universal"), (tmp_path / "universal", folder)):
        code, found, _ = diff(a, b, capsys)
        assert (code, found["contents"]["different"]) == (0, [])
        assert found["contents"]["method"] == "parameters"
        assert found["contents"]["equal_tensors"] >= 15
        assert found["layouts"] is None
    assert diff(tmp_path / "universal", tmp_path / "universal", capsys)[0] == 0


# Every bit of two checkpoints of one layout.


@pytest.mark.parametrize("agree", [True, False])
def test_what_only_the_modules_hold_and_nothing_names_is_one_tensor_where_ranks_agree(tmp_path, capsys, agree):
    made = make(World(tp=2), [Param("w", random_full((8, 4), 1), COLUMN)])
    for rank in range(2):
        made.model(rank)["module"]["gate.weight"] = random_full((3, 5), 2 if agree else rank)
    assert convert(made.save(tmp_path / "in"), tmp_path / "out") == 0
    assert diff(tmp_path / "in", tmp_path / "out", capsys)[0] == 0
    full = torch.load(tmp_path / "out/zero/gate.weight/fp32.pt", weights_only=False)["param"]
    assert full.shape == ((3, 5) if agree else (6, 5))


@pytest.mark.parametrize("case", worlds())
def test_every_changed_bit_of_a_checkpoint_is_named(tmp_path, capsys, case):
    """Expected names come from a second checkpoint, laid out the same, whose elements hold their own address in F."""
    world = worlds()[case]
    a = compact(make(world, members(case))).save(tmp_path / "a")
    shutil.copytree(a, tmp_path / "b")
    numbered = compact(make(world, members(case, True))).save(tmp_path / "numbered")
    chosen = random.Random(case)
    tried = padding = 0
    for (name, storage), (_, twin) in zip(list(stored(tmp_path / "b")), list(stored(numbered)), strict=True):
        assert storage.numel == twin.numel
        for at in sorted({0, storage.numel - 1, *(chosen.randrange(storage.numel) for _ in range(3))}):
            bit = chosen.randrange(32)
            with Flipped(tmp_path / "b" / name, storage.byte_offset + 4 * at + bit // 8, bit % 8):
                code, found, _ = diff(a, tmp_path / "b", capsys, "--contents")
            tried += 1
            assert code == 1
            (row,) = found["contents"]["different"]
            assert (row["kind"], row["file"], row["differing"]) == ("tensor", name, 1)
            expected = element(numbered, name, twin, at)
            if "optim" not in name:
                # A copy in the module, in the coordinates of this rank's shard, or a whole tensor outside of it.
                assert row["param"] in NAMES or "layer_" in name
                assert row["place"] is not None or row["param"] in ("fixed", "mean")
            elif storage.numel == 1:
                assert row["place"].endswith("['step']")
            elif math.isnan(expected):
                padding += 1
                assert row["param"] is None
                assert row["first"] == [at]
            else:
                number, address = divmod(int(expected), STRIDE)
                assert row["param"] == NAMES[number]
                assert row["first"] == list(coordinates(address, SHAPES[NAMES[number]]))
                assert row["state"] in ("fp32", "exp_avg", "exp_avg_sq")
    assert tried > 30
    assert padding or case not in ("zero1", "tp", "zero3")
    assert diff(a, tmp_path / "b", capsys)[0] == 0


def test_every_state_is_told_apart(tmp_path, capsys):
    made = make(World(tp=2, dp=2), params())
    a = made.save(tmp_path / "a")
    for state in ("exp_avg", "exp_avg_sq"):
        other = made.copy()
        flat = other.optim(0, 1)["base_optimizer_state"]["state"][0][state]
        where = other.optim(0, 1)["param_slice_mappings"][0]["up"].start
        flat[where + 1] += 2.0
        b = other.save(tmp_path / state)
        code, found, _ = diff(a, b, capsys)
        (row,) = found["contents"]["different"]
        assert (code, row["param"], row["state"], row["differing"]) == (1, "up", state, 1)
        assert row["file"] == "zero_pp_rank_0_mp_rank_01_optim_states.pt"
        assert row["first"] == [2, 1], "rank 1 holds rows 2 and 3"
        assert row["max_abs"] == pytest.approx(2.0)
        assert float(row["b"]) == pytest.approx(float(row["a"]) + 2.0, abs=1e-6)


def test_padding_and_parameters_changed_together_are_both_reported(tmp_path, capsys):
    made = make(World(dp=2, align=8, strip_padding=False), params())
    a = made.save(tmp_path / "a")
    other = made.copy()
    flat = other.optim(1)["single_partition_of_fp32_groups"][0]
    places = [at for at in range(len(flat)) if torch.isnan(flat[at])]
    assert places
    flat[places[0]] = 1.0
    flat[0] += 1.0
    _, found, _ = diff(a, other.save(tmp_path / "b"), capsys)
    named, rest = found["contents"]["different"]
    assert named["param"] is not None
    assert named["differing"] == 1
    assert rest["param"] is None
    assert rest["differing"] == 2
    assert rest["note"] == "1 of them belong to no parameter"


def test_the_copy_of_a_rank_is_named_with_its_holder(tmp_path, capsys):
    made = make(World(tp=2), params())
    a = made.save(tmp_path / "a")
    other = made.copy()
    where = other.optim(0, 1)["param_slice_mappings"][0]["norm"].start
    other.optim(0, 1)["single_partition_of_fp32_groups"][0][where + 3] = 9.0
    _, found, _ = diff(a, other.save(tmp_path / "b"), capsys)
    (row,) = found["contents"]["different"]
    assert (row["param"], row["state"], row["holder"], row["first"]) == ("norm", "fp32", "tp 1", [3])


def test_nan_is_equal_to_itself_and_zero_has_a_sign(tmp_path, capsys):
    made = make(World(), params())
    flat = made.optim()["single_partition_of_fp32_groups"][0]
    flat[0], flat[1] = math.nan, 0.0
    a, b = made.save(tmp_path / "a"), made.copy().save(tmp_path / "b")
    assert diff(a, b, capsys)[0] == 0
    other = made.copy()
    other.optim()["single_partition_of_fp32_groups"][0][1] = -0.0
    code, found, _ = diff(a, other.save(tmp_path / "c"), capsys)
    (row,) = found["contents"]["different"]
    assert (code, row["a"], row["b"], row["max_abs"]) == (1, "0", "-0", 0.0)
    other.optim()["single_partition_of_fp32_groups"][0][1] = math.nan
    _, found, _ = diff(a, other.save(tmp_path / "d"), capsys)
    assert found["contents"]["different"][0]["max_abs"] == "inf", "JSON has no word for it"


# Plain values.


def change(made, what):
    model, optim = made.model(), made.optim()
    if what == "counter":
        model["global_steps"] = 8
        return "mp_rank_00_model_states.pt", "['global_steps']"
    if what == "rate":
        optim["base_optimizer_state"]["param_groups"][0]["lr"] = 0.010000000000000002
        where = "['optimizer_state_dict']['base_optimizer_state']['param_groups'][0]['lr']"
        return made.optim_name(), where
    if what == "attribute":
        optim["loss_scaler"].cur_scale = 2.0
        return made.optim_name(), "['optimizer_state_dict']['loss_scaler']['cur_scale']"
    if what == "slice":
        optim["param_slice_mappings"][0]["up"].numel = 5
        return made.optim_name(), "['optimizer_state_dict']['param_slice_mappings'][0]['up']['numel']"
    if what == "type":
        model["global_steps"] = 7.0
        return "mp_rank_00_model_states.pt", "['global_steps']"
    if what == "flag":
        optim["overflow"] = 0
        return made.optim_name(), "['optimizer_state_dict']['overflow']"
    if what == "more":
        model["note"] = {"deep": [1, {"x": Foreign(a=1)}]}
        return "mp_rank_00_model_states.pt", "['note']"
    if what == "fewer":
        del model["global_steps"]
        return "mp_rank_00_model_states.pt", "['global_steps']"
    if what == "longer":
        optim["base_optimizer_state"]["param_groups"][0]["betas"] = (0.9, 0.999, 0.5)
        where = "['optimizer_state_dict']['base_optimizer_state']['param_groups'][0]['betas']"
        return made.optim_name(), where
    if what == "shape":
        model["module"]["up"] = model["module"]["up"].reshape(3, 4)
        return "mp_rank_00_model_states.pt", "['module']['up']"
    assert what == "dtype"
    model["module"]["up"] = model["module"]["up"].to(torch.bfloat16)
    return "mp_rank_00_model_states.pt", "['module']['up']"


KINDS = ["counter", "rate", "attribute", "slice", "type", "flag", "more", "fewer", "longer", "shape", "dtype"]


@pytest.mark.parametrize("what", KINDS)
def test_every_changed_value_is_named(tmp_path, capsys, what):
    made = make(World(), params())
    a = made.save(tmp_path / "a")
    other = made.copy()
    file, place = change(other, what)
    b = other.save(tmp_path / "b")
    code, found, _ = diff(a, b, capsys, "--contents")
    assert code == 1
    rows = found["contents"]["different"]
    assert [(row["kind"], row["file"], row["place"]) for row in rows] == [("value", file, place)]
    assert rows[0]["a"] != rows[0]["b"]
    # Seen from the other side the two values change places.
    _, reverse, _ = diff(b, a, capsys, "--contents")
    assert (reverse["contents"]["different"][0]["a"], reverse["contents"]["different"][0]["b"]) == (
        rows[0]["b"],
        rows[0]["a"],
    )


def test_what_is_no_content_is_not_reported(tmp_path, capsys):
    made = make(World(), params())
    a = made.save(tmp_path / "a")
    other = made.copy()
    for name, root in other.files.items():
        other.files[name] = dict(reversed(root.items()))
    module = other.model()["module"]
    module["up"] = module["up"].requires_grad_()
    # The same values as a view into a larger storage, and in another order of strides.
    module["down"] = module["down"].t().contiguous().t()
    other.files = dict(reversed(other.files.items()))
    assert diff(a, other.save(tmp_path / "b"), capsys)[0] == 0


def test_tensors_stored_in_unusual_ways(tmp_path, capsys):
    made = make(World(), params())
    model = made.model()
    model["expanded"] = torch.ones(1, 3).expand(4, 3)
    model["meta"] = torch.empty(3, 3, device="meta")
    model["empty"] = torch.empty(0, 4)
    model["shared"] = [model["module"]["up"], model["module"]["up"]]
    model["wide"] = torch.ones(3, dtype=torch.complex128)
    model["half"] = torch.ones(3, dtype=torch.float16)
    model["untyped"] = torch.ones(3).untyped_storage()
    a = made.save(tmp_path / "a")
    other = made.copy()
    assert diff(a, other.save(tmp_path / "b"), capsys)[0] == 0
    base = torch.ones(1, 3)
    base[0, 2] = 2.0
    other.model()["expanded"] = base.expand(4, 3)
    other.model()["wide"][1] = 2j
    other.model()["untyped"][4] = 7
    code, found, _ = diff(a, other.save(tmp_path / "c"), capsys)
    rows = {row["place"]: row for row in found["contents"]["different"]}
    assert code == 1
    assert set(rows) == {"['expanded']", "['wide']", "['untyped']"}
    assert (rows["['expanded']"]["first"], rows["['expanded']"]["differing"]) == ([0, 2], 1)
    assert rows["['wide']"]["first"] == [1]
    assert rows["['wide']"]["max_abs"] == "nan"


# Checkpoints laid out differently.


def others():
    return {
        "tp 2": World(tp=2, dp=1),
        "dp 3": World(dp=3, align=4),
        "zero2 tp 2": World(stage=2, tp=2, dp=2, align=2),
        "pipeline": World(pp=2, dp=2, layer_files=True),
        "zero3": World(stage=3, dp=2),
        "zero3 tp 2": World(stage=3, tp=2, dp=3),
    }


@pytest.mark.parametrize("case", others())
def test_the_same_values_in_another_layout(tmp_path, capsys, case):
    a = make(World(), members(case)).save(tmp_path / "a")
    b = with_buffers(make(others()[case], members(case))).save(tmp_path / "b")
    code, found, err = diff(a, b, capsys, "--contents")
    assert (code, found["contents"]["different"], err) == (0, [], [])
    assert found["contents"]["method"] == "parameters"
    assert found["contents"]["equal_tensors"] >= 3 * 5 + len(members(case)) - 5
    assert found["contents"]["only_a"] == found["contents"]["only_b"] == []
    code, found, _ = diff(a, b, capsys)
    assert (code, found["layouts"]["equal"]) == (1, False)
    assert found["contents"]["equal"]
    keys = {each["key"] for each in found["layouts"]["topology"]}
    assert ("tp" in keys) == ("tp" in case)


@pytest.mark.parametrize("case", others())
def test_every_changed_element_is_found_through_the_maps(tmp_path, capsys, case):
    a = make(World(), params()).save(tmp_path / "a")
    world = others()[case]
    made = make(world, params())
    b = made.save(tmp_path / "b")
    numbered = make(world, params(True)).save(tmp_path / "numbered")
    chosen = random.Random(case)
    tried = 0
    for (name, storage), (_, twin) in zip(list(stored(b)), list(stored(numbered)), strict=True):
        if "optim" not in name or storage.numel == 1:
            continue
        for at in {chosen.randrange(storage.numel) for _ in range(4)}:
            expected = element(numbered, name, twin, at)
            with Flipped(Path(b, name), storage.byte_offset + 4 * at + 1, chosen.randrange(8)):
                code, found, _ = diff(a, b, capsys, "--contents")
            rows = found["contents"]["different"]
            if math.isnan(expected):
                assert (code, rows) == (0, []), "padding is no content of F"
                continue
            number, address = divmod(int(expected), STRIDE)
            param, where = NAMES[number], list(coordinates(address, SHAPES[NAMES[number]]))
            if param == "emb" and where[0] == 9:
                assert code == 0, "the padding of the vocabulary is cut off"
                continue
            tried += 1
            assert code == 1
            assert {row["param"] for row in rows} == {param}
            tensors = [row for row in rows if row["kind"] == "tensor"]
            holders = [row for row in rows if row["kind"] == "holders"]
            # The copy that is read differs from A; another copy differs from it.
            assert len(tensors) <= 1
            assert tensors or holders
            assert all(row["first"] == where and row["differing"] == 1 for row in tensors)
            assert all("of B" in row["holder"] and f"{tuple(where)}" in row["note"] for row in holders)
    assert tried > 8


def test_numbers_and_counters_are_compared_across_layouts(tmp_path, capsys):
    a = make(World(), params()).save(tmp_path / "a")
    made = make(World(tp=2, dp=2, step=torch.tensor(8.0)), params())
    for rank in range(2):
        made.model(rank)["global_steps"] = 9
        for dp in range(2):
            made.optim(dp, rank)["base_optimizer_state"]["param_groups"][0]["lr"] = 0.5
    code, found, _ = diff(a, made.save(tmp_path / "b"), capsys, "--contents")
    assert code == 1
    rows = found["contents"]["different"]
    steps = {(row["param"], row["state"]) for row in rows if row["state"] == "step"}
    assert steps == {(name, "step") for name in NAMES[:5]}
    places = {row["place"] for row in rows if row["state"] is None}
    assert places == {"['global_steps']", "['param_groups'][0]['lr']"}


def test_a_rank_that_disagrees_with_the_others_about_a_number(tmp_path, capsys):
    a = make(World(), params()).save(tmp_path / "a")
    made = make(World(dp=2), params())
    made.optim(1)["base_optimizer_state"]["state"][0]["step"] = torch.tensor(6.0)
    code, _, err = diff(a, made.save(tmp_path / "b"), capsys, "--contents")
    assert code in (1, 2)
    assert code == 1 or "step" in err[0]


def test_what_only_one_side_has(tmp_path, capsys):
    a = make(World(), params()).save(tmp_path / "a")
    b = make(World(dp=2), params()[1:]).save(tmp_path / "b")
    code, found, _ = diff(a, b, capsys)
    assert code == 1
    assert found["layouts"]["only_a"] == ["emb"]
    assert found["contents"]["only_a"] == ["emb/exp_avg", "emb/exp_avg_sq", "emb/fp32", "emb/step"]
    assert found["contents"]["only_b"] == []
    c = make(World(dp=2, states=("exp_avg",)), params()).save(tmp_path / "c")
    code, found, _ = diff(a, c, capsys, "--contents")
    assert (code, found["contents"]["only_a"]) == (1, [f"{name}/exp_avg_sq" for name in sorted(NAMES[:5])])


def test_other_shapes_and_dtypes(tmp_path, capsys):
    a = make(World(), params()).save(tmp_path / "a")
    altered = params()
    altered[4] = Param("norm", random_full((6,), 4))
    code, found, _ = diff(a, make(World(dp=2), altered).save(tmp_path / "b"), capsys, "--contents")
    rows = found["contents"]["different"]
    assert code == 1
    assert {row["param"] for row in rows} == {"norm"}
    assert all("[5]" in row["a"] and "[6]" in row["b"] for row in rows)
    c = make(World(dp=2, state_dtype=torch.bfloat16), params()).save(tmp_path / "c")
    _, found, _ = diff(a, c, capsys, "--contents")
    rows = found["contents"]["different"]
    assert {row["state"] for row in rows} == {"exp_avg", "exp_avg_sq"}
    assert all(row["a"].startswith("float32") and row["b"].startswith("bfloat16") for row in rows)


def test_experts_over_other_ranks(tmp_path, capsys):
    weights = {f"w{number}": random_full((4, 3, 2), 10 + number) for number in (1, 2, 3)}
    layers = [[ExpertLayer("moe.experts", weights, placement)] for placement in (((0, 1, 2, 3),), ((3, 1), (0, 2)))]
    layers[1][0].descriptor = True
    a = make(World(dp=2), params(), layers[0]).save(tmp_path / "a")
    b = make(World(dp=2), params(), layers[1]).save(tmp_path / "b")
    code, found, _ = diff(a, b, capsys)
    assert code == 1
    assert found["contents"]["equal"]
    assert {each["key"] for each in found["layouts"]["topology"]} == {"ep"}
    assert {each["param"] for each in found["layouts"]["different"]} == {f"moe.experts.w{n}" for n in (1, 2, 3)}


# Layouts.


def test_layouts_are_compared_by_what_they_are(tmp_path, capsys):
    a = make(World(tp=2), params()).save(tmp_path / "a")
    # The same layout, said by other patterns.
    info = {"tp_replicated_parameter_patterns": ["^no"], "parameter_with_row_parallelism_patterns": ["down"]}
    b = make(World(tp=2, info=info), params()).save(tmp_path / "b")
    code, found, _ = diff(a, b, capsys, "--layouts")
    assert (code, found["layouts"]["equal"], found["contents"]) == (0, True, None)
    altered = params()
    altered[1] = Param("up", altered[1].full, Cut(pieces=interleaved, kind="column"))
    altered[2] = Param("down", altered[2].full, Cut("row", sizes=(1, 3)))
    c = make(World(tp=2), altered).save(tmp_path / "c")
    code, found, _ = diff(a, c, capsys, "--layouts")
    assert code == 1
    assert [(each["param"], each["what"]) for each in found["layouts"]["different"]] == [("down", "layout")]
    assert all(len(each["a"]) == 64 for each in found["layouts"]["different"])
    assert found["layouts"]["equal_parameters"] == 4


@pytest.mark.parametrize("kind", ["checkpoint", "universal"])
def test_layouts_read_no_tensor(tmp_path, capsys, kind):
    a = make(World(tp=2, dp=2), [*params(), *only_module()]).save(tmp_path / "a")
    if kind == "universal":
        assert convert(a, tmp_path / "u") == 0
        a = tmp_path / "u"
    shutil.copytree(a, tmp_path / "b")
    for name, storage in list(stored(tmp_path / "b")):
        with open(tmp_path / "b" / name, "r+b") as file:
            file.seek(storage.byte_offset)
            file.write(b"\xee" * storage.nbytes)
    code, found, _ = diff(a, tmp_path / "b", capsys, "--layouts")
    assert (code, found["layouts"]["equal_parameters"]) == (0, 7)
    assert diff(a, tmp_path / "b", capsys, "--contents")[0] == 1


def test_layouts_of_a_checkpoint_and_of_what_it_was_converted_to(tmp_path, capsys):
    a = make(World(tp=2, dp=2), params()).save(tmp_path / "a")
    assert convert(a, tmp_path / "u") == 0
    code, found, _ = diff(a, tmp_path / "u", capsys, "--layouts")
    assert (code, found["layouts"]["equal_parameters"]) == (0, 5)
    b = make(World(), params()).save(tmp_path / "b")
    code, found, _ = diff(b, tmp_path / "u", capsys, "--layouts")
    assert (code, {each["what"] for each in found["layouts"]["different"]}) == (1, {"layout"})
    (tmp_path / "u" / "affine_manifest.json").unlink()
    code, found, err = diff(a, tmp_path / "u", capsys, "--layouts")
    assert code == 2
    assert "has no manifest" in err[0]


# Universal folders.


def test_every_changed_bit_of_a_universal_folder_is_named(tmp_path, capsys):
    source = compact(make(World(tp=2, dp=2), [*params(), *only_module()])).save(tmp_path / "in")
    assert convert(source, tmp_path / "a") == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    chosen = random.Random(5)
    tried = 0
    for name, storage in list(stored(tmp_path / "b")):
        size = storage.nbytes // storage.numel
        for at in {0, storage.numel - 1, chosen.randrange(storage.numel)}:
            bit = chosen.randrange(8 * size)
            with Flipped(tmp_path / "b" / name, storage.byte_offset + size * at + bit // 8, bit % 8):
                code, found, _ = diff(tmp_path / "a", tmp_path / "b", capsys)
            tried += 1
            (row,) = found["contents"]["different"]
            assert (code, row["kind"], row["file"], row["differing"]) == (1, "tensor", name, 1)
            if name.startswith("zero/") and name != "zero/optimizer_state.pt":
                _, param, state = name.removesuffix(".pt").split("/")
                assert (row["param"], row["state"]) == (param, state)
                shape = (9, 3) if param == "emb" else SHAPES[param]
                assert row["first"] == list(coordinates(at, shape if state != "step" else ()))
    assert tried > 50


def test_files_and_entries_of_universal_folders(tmp_path, capsys):
    source = make(World(tp=2), params()).save(tmp_path / "in")
    assert convert(source, tmp_path / "a") == 0
    (tmp_path / "a" / MANIFEST_NAME).unlink()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "zero" / "up" / "exp_avg.pt").rename(tmp_path / "b" / "zero" / "up" / "moved.pt")
    path = tmp_path / "b" / "zero" / "down" / "fp32.pt"
    value = torch.load(path, weights_only=False)
    value["cat_dim"] = 0
    torch.save(value, path)
    state = torch.load(tmp_path / "b" / "zero" / "norm" / "fp32.pt", weights_only=False)
    state["param"] = state["param"].double()
    torch.save(state, tmp_path / "b" / "zero" / "norm" / "fp32.pt")
    code, found, _ = diff(tmp_path / "a", tmp_path / "b", capsys)
    contents = found["contents"]
    assert code == 1
    assert (contents["only_a"], contents["only_b"]) == (["zero/up/exp_avg.pt"], ["zero/up/moved.pt"])
    rows = {(row["param"], row["place"]): row for row in contents["different"]}
    assert set(rows) == {("down", "['cat_dim']"), ("norm", "['param']")}
    assert (rows["down", "['cat_dim']"]["a"], rows["down", "['cat_dim']"]["b"]) == ("1", "0")
    assert "float64" in rows["norm", "['param']"]["b"]


@pytest.mark.parametrize("options", [(), ("--layouts",), ("--contents",)])
def test_a_universal_folder_without_files_its_manifest_lists_cannot_be_compared(tmp_path, capsys, options):
    source = make(World(tp=2), [*params(), *(Param(f"p{at:02d}", random_full((3,), at)) for at in range(12))])
    assert convert(source.save(tmp_path / "in"), tmp_path / "a") == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    gone = tmp_path / "b" / "zero" / "up" / "exp_avg.pt"
    gone.unlink()
    for a, b in (("a", "b"), ("b", "a"), ("b", "b"), ("in", "b")):
        code, found, err = diff(tmp_path / a, tmp_path / b, capsys, *options)
        assert (code, [error["file"] for error in found["errors"]]) == (2, [str(gone)])
        assert err == [
            f"ds_affine: error: {gone}: is missing; {MANIFEST_NAME} lists it. The folder was changed after it was "
            "written: convert again, or copy again."
        ]
    for at in range(12):
        (tmp_path / "b" / "zero" / f"p{at:02d}" / "fp32.pt").unlink()
    code, found, err = diff(tmp_path / "a", tmp_path / "b", capsys, *options)
    assert (code, len(found["errors"]), len(err)) == (2, 13, 11)
    # What nobody promised is no hole: neither side's manifest, nor a damaged one, says what there should be.
    (tmp_path / "b" / MANIFEST_NAME).write_text("{")
    if options == ("--contents",):
        assert diff(tmp_path / "b", tmp_path / "b", capsys, *options)[0] == 0
        assert diff(tmp_path / "a", tmp_path / "b", capsys, *options)[0] == 1


def test_universal_folders_from_other_layouts_hold_the_same(tmp_path, capsys):
    """ZeRO-3 without tensor parallelism writes bare flat tensors; they are the same elements."""
    folders = []
    for name, world in {"one": World(), "tp": World(tp=2, dp=2), "flat": World(stage=3, dp=2)}.items():
        source = make(world, params()).save(tmp_path / f"in {name}")
        assert convert(source, tmp_path / name, *(["--json"])) == 0
        folders.append(tmp_path / name)
    for a, b in ((0, 1), (0, 2), (2, 1)):
        _, found, _ = diff(folders[a], folders[b], capsys)
        tensors = [row for row in found["contents"]["different"] if row["kind"] == "tensor" and row["param"]]
        assert [row for row in tensors if row["param"] != "emb"] == []
    checkpoint = make(World(tp=2, pp=2, dp=2), params()).save(tmp_path / "other")
    for folder in folders[:2]:
        code, found, _ = diff(checkpoint, folder, capsys)
        assert (code, found["contents"]["different"]) == (0, [])


# How it is used.


def test_folders_that_cannot_be_compared(tmp_path, capsys):
    made = make(World(tp=2, dp=2), params())
    a = made.save(tmp_path / "a")
    shutil.copytree(a, tmp_path / "b")
    (tmp_path / "b" / made.optim_name(1, 1)).unlink()
    path = tmp_path / "b" / made.optim_name(0, 0)
    path.write_bytes(path.read_bytes()[:500])
    for options in ((), ("--layouts",), ("--contents",)):
        code, found, err = diff(a, tmp_path / "b", capsys, *options)
        assert code == 2
        assert any(made.optim_name(1, 1) in line for line in err)
        assert all(line.startswith("ds_affine: error: ") for line in err)
        assert found["errors"]
    for wrong in ([a, tmp_path / "nothing"], ["", a], [a, a, "--layouts", "--contents"]):
        assert ds_affine(["diff", *map(str, wrong)]) == 2
    for folders in ([a, tmp_path / "nothing"], [tmp_path / "nothing", a]):
        assert diff(*folders, capsys)[2] == [
            f"ds_affine: error: {tmp_path / 'nothing'}: does not exist. Check the path."
        ]


def test_a_checkpoint_no_converter_takes_is_compared_file_by_file(tmp_path, capsys):
    made = make(World(info={"tp_replicated_parameter_patterns": ["nor", "norm"]}), params())
    a = made.save(tmp_path / "a")
    assert convert(a, tmp_path / "u") == 2
    other = made.copy()
    assert diff(a, other.save(tmp_path / "b"), capsys)[0] == 0
    other.optim()["single_partition_of_fp32_groups"][0][4] = 5.0
    code, found, _ = diff(a, other.save(tmp_path / "c"), capsys)
    (row,) = found["contents"]["different"]
    assert (code, row["first"]) == (1, [4])
    assert row["place"] == "['optimizer_state_dict']['single_partition_of_fp32_groups'][0]"


def test_the_first_ten_of_each_kind_and_all(tmp_path, capsys):
    several = [Param(f"p{number:02d}", random_full((3,), number)) for number in range(15)]
    a = make(World(), several).save(tmp_path / "a")
    changed = [Param(one.name, one.full + 1, states=None) for one in several]
    made = make(World(), changed)
    made.model()["ds_config"] = {f"key{number}": number for number in range(12)}
    b = made.save(tmp_path / "b")
    assert ds_affine(["diff", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("A  ")
    assert lines[-1] == "DIFFERENT: contents"
    assert sum(line.startswith("  tensor ") for line in lines) == 10
    assert sum(line.startswith("  value ") for line in lines) == 10
    assert sum("--all shows them" in line for line in lines) == 2
    assert ds_affine(["diff", a, b, "--all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    # Every parameter's weights, and its copy in the module.
    assert sum(line.startswith("  tensor ") for line in lines) == 30
    assert not any("--all" in line for line in lines)


def test_nothing_is_written_and_torch_not_imported(tmp_path):
    a = make(World(tp=2, dp=2), params()).save(tmp_path / "a")
    b = make(World(), params()).save(tmp_path / "b")
    assert convert(a, tmp_path / "u") == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code = (
        "import sys; from deepspeed_affine.cli import ds_affine; code = ds_affine(); "
        "sys.exit(code if 'torch' not in sys.modules and 'deepspeed' not in sys.modules else 7)"
    )
    for folders, expected in (([a, a], 0), ([a, str(tmp_path / "u")], 0), ([a, b, "--contents"], 0), ([a, b], 1)):
        run = subprocess.run(
            [sys.executable, "-c", code, "diff", *folders], capture_output=True, text=True, check=False
        )
        assert run.returncode == expected, run.stderr
        assert run.stderr == ""
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_odd_names(tmp_path, capsys):
    several = [Param("a/b c[0]", random_full((4, 3), 2)), Param("ünï'\"", random_full((2,), 3))]
    made = make(World(), several)
    a = made.save(tmp_path / "a [x] ü")
    other = made.copy()
    other.model()["module"]["ünï'\""][1] = 4.0
    b = other.save(tmp_path / "b (y)")
    code, found, _ = diff(a, b, capsys)
    (row,) = found["contents"]["different"]
    assert (code, row["param"], row["first"]) == (1, "ünï'\"", [1])
    assert convert(a, tmp_path / "u") == 0
    assert diff(a, tmp_path / "u", capsys)[0] == 0


@pytest.mark.heavy
def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """Two universal folders of one tensor of 400 MB each are compared in less memory than half of one."""
    script = (
        "import sys; from deepspeed_affine.commands.diff import compare_folders; "
        "found = compare_folders(*sys.argv[1:], workers=2); assert found.equal; "
        "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    for name in ("a", "b"):
        folder = tmp_path / name / "zero" / "w"
        folder.mkdir(parents=True)
        torch.save({"param": torch.arange(100_000_000, dtype=torch.float32)}, folder / "fp32.pt")
        save({"param_groups": []}, tmp_path / name / "zero" / "optimizer_state.pt")
        save(
            {"module": {}, "param_shapes": [{"w": torch.Size([100_000_000])}]},
            tmp_path / name / "mp_rank_00_model_states.pt",
        )
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    run = subprocess.run([sys.executable, "-c", script, *folders], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 200 << 10
