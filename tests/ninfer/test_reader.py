"""Ranges over many files, laziness, threads, the binder, helpers and the format's own examples."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from counting import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DATA, entry, part, small, small_payload

from deepspeed_affine import ninfer
from deepspeed_affine.errors import PolicyError
from deepspeed_affine.ninfer import artifact as artifact_module
from deepspeed_affine.ninfer.parse import directory_of


def split(folder, sizes, directory=None):
    """The small artifact in files of these payload sizes, with free names."""
    payload, done, listed = small_payload(), 0, []
    for number, size in enumerate(sizes):
        listed.append({"path": f"free name {number}.x" if number else None, "payload_bytes": size})
    root = {**(directory or small()), "files": listed}
    for number, size in enumerate(sizes):
        piece = payload[done : done + size]
        data = part(number, piece) if number else entry(root, piece)
        (folder / (listed[number]["path"] or "a.ninfer")).write_bytes(data)
        done += size
    return folder / "a.ninfer"


@settings(max_examples=60)
@given(st.data())
def test_any_range_over_any_split(tmp_path_factory, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, 264), max_size=8)))
    edges = [0, *cuts, 265]
    folder = tmp_path_factory.mktemp("split")
    path = split(folder, [b - a for a, b in pairwise(edges)])
    offset = data.draw(st.integers(0, 265))
    count = data.draw(st.integers(0, 265 - offset))
    with ninfer.open(path) as artifact:
        assert artifact.read_payload(offset, count) == small_payload()[offset : offset + count]
        assert artifact.read("w").size == 8
        artifact.validate()


def test_files_of_one_byte_each(tmp_path):
    with ninfer.open(split(tmp_path, [1] * 265)) as artifact:
        assert artifact.read_payload(0, 265) == small_payload()


@pytest.mark.parametrize(("offset", "count"), [(0, 266), (266, 0), (-1, 1), (2**64, 1), (0, -1), (True, 1)])
def test_ranges_outside_the_payload(tmp_path, offset, count):
    with ninfer.open(split(tmp_path, [265])) as artifact, pytest.raises(ninfer.RangeError):
        artifact.read_payload(offset, count)


def test_an_empty_range_opens_nothing(tmp_path):
    path = split(tmp_path, [100, 165])
    (tmp_path / "free name 1.x").unlink()
    with ninfer.open(path) as artifact:
        assert artifact.read_payload(265, 0) == b""
        assert artifact.read_range("w", 3, 3).size == 0
        assert artifact.read("w").size == 8
        with pytest.raises(ninfer.FileSetError, match="free name 1"):
            artifact.read("s")


def test_a_part_is_checked_before_anything_is_allocated(tmp_path):
    huge = dict(small()["objects"][0], shape=[2**50], bytes=2**51, offset=256)
    root = small(objects=[huge], bindings={"p": {"object": "w"}}, uses=[], components={"text": {"config": {}}})
    root["files"] = [{"path": None, "payload_bytes": 265}, {"path": "b", "payload_bytes": 2**51}]
    (tmp_path / "a").write_bytes(entry(root, small_payload()))
    (tmp_path / "b").write_bytes(part(1, b"x"))
    with ninfer.open(tmp_path / "a") as artifact:
        for read in (artifact.read, artifact.read_encoded, artifact.read_tensor):
            with pytest.raises(ninfer.FileSetError):
                read("w")
        with pytest.raises(ninfer.FileSetError):
            artifact.read_parameter("p")


@pytest.mark.parametrize("kind", ["pipe", "folder", "cut later", "index"])
def test_other_things_in_place_of_a_part(tmp_path, kind):
    path = split(tmp_path, [100, 165])
    name = tmp_path / "free name 1.x"
    data = name.read_bytes()
    if kind != "cut later":
        name.unlink()
    with ninfer.open(path) as artifact:
        if kind == "pipe":
            os.mkfifo(name)
        elif kind == "folder":
            name.mkdir()
        elif kind == "index":
            name.write_bytes(part(2, data[4096:]))
        else:
            artifact.read("s")
            os.truncate(name, 4096 + 100)
        with pytest.raises(ninfer.FileSetError):
            artifact.read_payload(200, 65)


def another(path):
    data = bytearray(path.read_bytes())
    data[16] ^= 1
    path.write_bytes(data)


AFTERWARDS = {
    "gone": os.unlink,
    "another": another,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "no container": lambda path: path.write_bytes(b"x" * 5000),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_an_entry_that_is_another_when_it_is_opened_again(name, tmp_path):
    """A set of many files keeps few of them open, the entry no longer than others."""
    path = split(tmp_path, [1] * 265)
    with ninfer.open(path) as artifact:
        assert artifact.read_payload(1, 264) == small_payload()[1:]
        AFTERWARDS[name](path)
        with pytest.raises(ninfer.FileSetError, match="the entry"):
            artifact.read_payload(0, 2)


def test_a_disk_that_cannot_be_read_is_a_fault_of_the_file(tmp_path, monkeypatch):
    def broken(*args):
        raise OSError(5, "Input/output error")

    with ninfer.open(split(tmp_path, [100, 165])) as artifact:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(ninfer.FileSetError, match="Input/output"):
            artifact.read("w")
        monkeypatch.setattr(os, "pread", broken)
        with pytest.raises(ninfer.FileSetError, match="Input/output"):
            artifact.read("s")


ASKED = {
    "elements beyond": (ninfer.RangeError, lambda a: a.read_range("w", 0, 9)),
    "elements backwards": (ninfer.RangeError, lambda a: a.read_range("w", 3, 2)),
    "a parameter's beyond": (ninfer.RangeError, lambda a: a.read_parameter_range("p", 0, 9)),
    "bytes beyond": (ninfer.RangeError, lambda a: a.read_encoded_into("w", np.empty(9, np.uint8), 8)),
    "object": (ninfer.ReferenceError_, lambda a: a.read("none")),
    "parameter": (ninfer.ReferenceError_, lambda a: a.read_parameter("none")),
    "values of a resource": (ninfer.ReferenceError_, lambda a: a.read_range("r", 0, 1)),
    "a resource that is a tensor": (ninfer.ReferenceError_, lambda a: a.directory.resource("w")),
    "component": (ninfer.BindingError, lambda a: a.read_resource("vision", "t")),
    "role": (ninfer.BindingError, lambda a: a.read_resource("text", "none")),
    "auxiliary": (ninfer.BindingError, lambda a: a.read_auxiliary(a.uses[0], "none")),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_not_there_is_refused(name, tmp_path):
    error, call = ASKED[name]
    with ninfer.open(split(tmp_path, [265])) as artifact, pytest.raises(error) as caught:
        call(artifact)
    assert type(caught.value) is error


def test_reading_after_closing_is_refused(tmp_path):
    artifact = ninfer.open(split(tmp_path, [265]))
    artifact.close()
    artifact.close()
    assert list(artifact.objects) == ["w", "s", "r"]
    with pytest.raises(PolicyError):
        artifact.read("w")


def test_one_parent_is_decoded_once_by_many_threads(monkeypatch):
    calls, real = [], artifact_module.decode_range

    def counted(geometry, fetch, begin, end, out):
        calls.append(threading.get_ident())
        real(geometry, fetch, begin, end, out)

    monkeypatch.setattr(artifact_module, "decode_range", counted)
    with ninfer.open(DATA / "allfmt.ninfer") as artifact, ThreadPoolExecutor(8) as pool:
        names = ["text/q4", "text/q4_rows_1_3", "mtp/shared"] * 20
        found = list(pool.map(artifact.read_parameter, names))
    assert len(calls) == 1
    assert np.array_equal(found[0].reshape(-1)[130:], found[1])
    assert found[0] is not found[3]
    found[0][0, 0] = 99
    assert found[3][0, 0] != 99


def test_parents_beyond_the_cache_are_decoded_by_rows():
    with ninfer.open(DATA / "allfmt.ninfer", cache_bytes=0) as without, ninfer.open(DATA / "allfmt.ninfer") as kept:
        for name in kept.bindings:
            count = kept.read_parameter(name).size
            assert np.array_equal(without.read_parameter(name), kept.read_parameter(name))
            assert np.array_equal(
                without.read_parameter_range(name, 1, count), kept.read_parameter_range(name, 1, count)
            )


def test_many_threads_read_what_one_reads():
    with ninfer.open(DATA / "allfmt_split.ninfer", cache_bytes=3000) as artifact, ThreadPoolExecutor(8) as pool:
        tensors = [name for name, record in artifact.objects.items() if isinstance(record, ninfer.TensorObject)]
        once = {name: artifact.read(name).tobytes() for name in tensors}
        for name, values in zip(tensors * 20, pool.map(artifact.read, tensors * 20), strict=True):
            assert values.tobytes() == once[name]


def test_parameters_take_the_shape_they_are_asked_in():
    with ninfer.open(DATA / "allfmt.ninfer") as artifact:
        assert artifact.read_parameter("text/mixed_order", (2, 130)).shape == (2, 130)
        assert artifact.read_parameter("text/scalar_part", ()).shape == ()
        for name, shape in (("text/mixed_order", (2, 131)), ("text/q4", (390,)), ("text/q4", (3, 131))):
            with pytest.raises(ninfer.BindingError):
                artifact.read_parameter(name, shape)
        with pytest.raises(ninfer.ReferenceError_):
            artifact.read_parameter("none")
        with pytest.raises(ninfer.ReferenceError_):
            artifact.read("none")


def test_torch_tensors_are_of_the_stored_type():
    import torch

    with ninfer.open(DATA / "allfmt.ninfer") as artifact:
        for name, kind in (("d.bf16", torch.bfloat16), ("d.int32", torch.int32), ("w.q4", torch.float32)):
            found = artifact.read_tensor(name)
            assert found.dtype is kind
            assert tuple(found.shape) == artifact.objects[name].shape
        words = artifact.read_tensor("d.bf16").view(torch.int16).numpy()
        assert words.tobytes() == artifact.read_encoded("d.bf16")


def test_numbers_of_two_kinds_do_not_mix(tmp_path):
    integers = dict(small()["objects"][1], format="int32", id="n")
    objects = [small()["objects"][0], integers, small()["objects"][2]]
    parts = {"parts": [{"object": "n", "range": [0, 1]}, {"object": "w", "range": [0, 1]}]}
    root = small(objects=objects, bindings={"p": parts}, uses=[])
    with ninfer.open(split(tmp_path, [265], root)) as artifact, pytest.raises(ninfer.BindingError, match="int32"):
        artifact.read_parameter("p")


def test_the_binder_reads_nothing_and_names_every_fault(tmp_path):
    (tmp_path / "a.ninfer").write_bytes((DATA / "allfmt_split.ninfer").read_bytes())
    with ninfer.open(tmp_path / "a.ninfer", components=["text"]) as artifact:
        wanted = {
            "text/q4": ((3, 130), ["q4_g64_fp16"]),
            "text/mixed_order": ((2, 130), None),
            "text/nv": ((256, 128), ["nvfp4"]),
        }
        helpers = {("text/nv", "text/in_a"): {"activation_input_divisor": ((), ["fp32"])}}
        bound = artifact.bind(wanted, ["text", "mtp"], targets={"mtp": "text", "text": None}, auxiliaries=helpers)
        assert bound.parameters["text/mixed_order"].parts[0][1:] == (130, 260)
        assert set(bound.objects) == {"w.q4", "w.q5", "w.nvfp4x2", "d.fp32", "r.odd", "r.tail"}
        assert [use.input for use in bound.uses] == ["text/in_a", "text/in_b", "text/in_a"]
        with pytest.raises(ninfer.BindingError) as caught:
            artifact.bind(
                {"text/q4": ((390,), None), "none": ((1,), None), "text/mixed_order": ((261,), ["q4_g64_fp16"])},
                ["vision"],
                targets={"mtp": "vision"},
                auxiliaries={("text/q4", "text/in_a"): {"hadamard_signs": ((130,), None)}, ("x", "y"): {}},
            )
        assert len(caught.value.faults) == 8
        with pytest.raises(ninfer.BindingError):
            ninfer.open(tmp_path / "a.ninfer", components=["vision"])


def test_the_intersection_of_permissions():
    policies = {name: ninfer.ActivationPolicy(name) for name in ("A16Only", "AllowA8", "AllowA4")}
    for one in policies.values():
        for other in policies.values():
            found = ninfer.common_policy([ninfer.Use("p", "a", one), ninfer.Use("q", "b", other)])
            assert found.widths == one.widths & other.widths
    assert ninfer.common_policy([ninfer.Use("p", "a")]) is None


def test_helper_inputs():
    with ninfer.open(DATA / "allfmt.ninfer") as artifact:
        use = artifact.uses_of("text/nv")[0]
        assert ninfer.activation_input_divisor(artifact, use) == 3.0

        def with_helper(role, binding):
            return ninfer.Use("text/nv", "x", None, {role: binding})

        signs = ninfer.hadamard_signs(artifact, with_helper("hadamard_signs", ninfer.Binding("h.signs")))
        assert set(np.abs(signs)) == {1.0}
        part = ninfer.Part("d.fp32v", 1, 2)
        wrong = [
            ("activation_input_divisor", ninfer.Binding("d.fp32v")),
            ("activation_input_divisor", ninfer.Binding("d.bf16")),
            ("activation_input_divisor", ninfer.Binding(parts=(part,))),
            ("activation_input_divisor", ninfer.Binding(parts=(ninfer.Part("d.fp32v", 3, 4),))),
            ("activation_input_divisor", ninfer.Binding(parts=(ninfer.Part("d.fp32v", 0, 2),))),
            ("hadamard_signs", ninfer.Binding("d.bf16")),
            ("hadamard_signs", ninfer.Binding("w.q4")),
            ("input_columns", ninfer.Binding("h.signs")),
        ]
        for role, binding in wrong:
            with pytest.raises(ninfer.BindingError):
                getattr(ninfer, role)(artifact, with_helper(role, binding))
        with pytest.raises(ninfer.BindingError):
            ninfer.hadamard_signs(artifact, use)
        with pytest.raises(ninfer.BindingError):
            ninfer.hadamard_signs(artifact, with_helper("hadamard_signs", ninfer.Binding("h.signs")), width=2048)


PERMUTED = {
    "columns": np.array([2, 0, 3, 1], np.int32), "twice": np.array([0, 0, 1, 2], np.int32),
    "beyond": np.array([1, 2, 3, 4], np.int32), "below": np.array([-1, 0, 1, 2], np.int32),
    "square": np.array([[0, 1], [2, 3]], np.int32), "floats": np.arange(4, dtype=np.float32),
    "signs": np.array([1, -1] * 1024, np.float32), "no signs": np.array([1, 2] * 512, np.float32),
    "short signs": np.ones(1000, np.float32),
}  # fmt: skip


def test_input_columns_and_signs(tmp_path):
    forms = {name: "int32" if v.dtype == np.int32 else "bf16" for name, v in PERMUTED.items()}
    specs = [ninfer.TensorSpec(name, values.shape, forms[name]) for name, values in PERMUTED.items()]
    with ninfer.Writer(tmp_path / "a", specs, {"text": {"config": {}}}, durable=False) as writer:
        for name, values in PERMUTED.items():
            writer.write_values(name, values)

    def use(role, name, *span):
        binding = ninfer.Binding(parts=(ninfer.Part(name, *span),)) if span else ninfer.Binding(name)
        return ninfer.Use("p", "i", None, {role: binding})

    with ninfer.open(tmp_path / "a") as artifact:
        found = ninfer.input_columns(artifact, use("input_columns", "columns"), 4)
        assert found.dtype == np.int32
        # Stored column c multiplies input element p[c].
        matrix, values = np.arange(8.0).reshape(2, 4), np.array([1.0, 10, 100, 1000])
        assert np.array_equal(matrix @ values[found], [1 + 2000 + 30, 400 + 5 + 6000 + 70])
        assert ninfer.input_columns(artifact, use("input_columns", "twice", 1, 4)).tolist() == [0, 1, 2]
        for name in ("twice", "beyond", "below", "square", "floats", "signs"):
            with pytest.raises(ninfer.BindingError):
                ninfer.input_columns(artifact, use("input_columns", name))
        with pytest.raises(ninfer.BindingError, match="an input of 5"):
            ninfer.input_columns(artifact, use("input_columns", "columns"), 5)
        signs = ninfer.hadamard_signs(artifact, use("hadamard_signs", "signs"), 2048)
        assert np.array_equal(signs, PERMUTED["signs"])
        for name in ("no signs", "short signs", "columns", "floats"):
            with pytest.raises(ninfer.BindingError):
                ninfer.hadamard_signs(artifact, use("hadamard_signs", name))


def test_the_hadamard_transform_is_sylvesters():
    matrix = np.array([[1.0]])
    while len(matrix) < 1024:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rng = np.random.default_rng(1)
    signs = rng.choice([-1.0, 1.0], 2048)
    values = rng.integers(-8, 9, (3, 2048)).astype(np.float64)
    expected = np.concatenate([(values * signs)[:, at : at + 1024] @ matrix / 32 for at in (0, 1024)], axis=1)
    assert np.allclose(ninfer.hadamard_transform(values, signs), expected, rtol=0, atol=1e-4)


Q4, Q5, NV = "q4_g64_fp16", "q5_g64_fp16", "nvfp4"
FP8 = "fp8_e4m3fn_row_bf16"
ATTENTION = {
    "two parents": (
        [("A", 7168, Q4, 19_496_960), ("B", 7168, Q5, 24_084_480)],
        [("A", 0, 31457280), ("A", 31457280, 36700160), ("B", 0, 31457280), ("B", 31457280, 36700160)],
    ),
    "one parent": ([("P", 14336, FP8, 73_428_992)], None),
    "one parent, nvfp4": ([("P", 14336, NV, 41_287_684)], None),
}
ONE_PARENT = [("P", 0, 31457280), ("P", 31457280, 36700160), ("P", 36700160, 68157440), ("P", 68157440, 73400320)]


@pytest.mark.parametrize("name", ATTENTION)
def test_the_attention_ranges_of_the_format_description(name):
    """12.3: one parent or two, the same four parameters."""
    parents, ranges = ATTENTION[name]
    objects, at = [], 0
    for owner, rows, form, size in parents:
        assert ninfer.encoded_bytes(form, (rows, 5120)) == size
        layout = ninfer.plan_geometry(form, None, (rows, 5120)).layout
        objects.append(ninfer.TensorObject(owner, (rows, 5120), form, layout, at, size))
        at = -(-(at + size) // 256) * 256
    names = ("query", "key", "gate", "value")
    bindings = {
        each: ninfer.Binding(parts=(ninfer.Part(*part),))
        for each, part in zip(names, ranges or ONE_PARENT, strict=True)
    }
    files = [ninfer.FileRecord(None, at)]
    directory = ninfer.Directory({"text": ninfer.Component({})}, objects, bindings, [], files)
    shapes = dict(zip(names, [(6144, 5120), (1024, 5120), (6144, 5120), (1024, 5120)], strict=True))
    bound = ninfer.bind(directory, {each: (shape, None) for each, shape in shapes.items()}, ["text"])
    assert bound.objects == tuple(owner for owner, *_ in parents)
    # All of the parents and nothing twice: the four are their rows in order.
    for owner, rows, *_ in parents:
        given = sorted(
            r[1:] for b in bound.parameters.values() for r in [(b.parts[0][0].id, *b.parts[0][1:])] if r[0] == owner
        )
        assert [low for low, _ in given] == [0, *(high for _, high in given)][:-1]
        assert given[-1][1] == rows * 5120


def test_row_blocks_reshape_and_sharing(tmp_path):
    """12.4: interleaved row blocks, a reshape, and one object under two names."""
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    payload = ninfer.encode("bf16", values).tobytes()
    root = {
        "components": {"text": {"config": {}}},
        "objects": [{"id": "interleaved", "kind": "tensor", "shape": [8, 4], "format": "bf16",
                     "layout": "contiguous_le_v1", "offset": 0, "bytes": 64}],
        "bindings": {
            "query": {"parts": [{"object": "interleaved", "range": r} for r in ([0, 8], [16, 24])]},
            "gate": {"parts": [{"object": "interleaved", "range": r} for r in ([8, 16], [24, 32])]},
            "reshaped": {"parts": [{"object": "interleaved", "range": [0, 16]}]},
            "embedding": {"object": "interleaved"}, "head": {"object": "interleaved"},
        },
        "uses": [{"parameter": "embedding", "input": "a"}, {"parameter": "head", "input": "b"}],
        "files": [{"path": None, "payload_bytes": 64}],
    }  # fmt: skip
    (tmp_path / "a").write_bytes(entry(root, payload))
    with ninfer.open(tmp_path / "a") as artifact:
        assert np.array_equal(artifact.read_parameter("query", (4, 4)), values[[0, 1, 4, 5]])
        assert np.array_equal(artifact.read_parameter("gate", (4, 4)), values[[2, 3, 6, 7]])
        assert np.array_equal(artifact.read_parameter("reshaped", (2, 2, 4)), values[:4].reshape(2, 2, 4))
        assert artifact.bind({"embedding": ((8, 4), None), "head": ((8, 4), None)}).objects == ("interleaved",)


def test_one_training_parameter_in_two_roles():
    """12.5: key and context_key, apart or sharing one range."""
    shape, context = [6144, 5120], [1024, 5120]
    q8 = {"kind": "tensor", "format": "q8_g32_fp16", "layout": "row_split_k128_v1"}
    sizes = [ninfer.encoded_bytes("q8_g32_fp16", s) for s in (shape, context)]
    start = -(-sizes[0] // 256) * 256
    root = {
        "components": {"text": {"config": {}}, "dflash2": {"config": {}, "target": "text"}},
        "objects": [{"id": "w.draft.qkv", "shape": shape, "offset": 0, "bytes": sizes[0], **q8},
                    {"id": "w.draft.context_key", "shape": context, "offset": start, "bytes": sizes[1], **q8}],
        "bindings": {
            "dflash2/layers/0/attention/key": {"parts": [{"object": "w.draft.qkv", "range": [20971520, 26214400]}]},
            "dflash2/layers/0/attention/context_key": {"object": "w.draft.context_key"}},
        "uses": [
            {"parameter": "dflash2/layers/0/attention/key", "input": "dflash2/layers/0/query_projection_input",
             "activation_policy": "AllowA8"},
            {"parameter": "dflash2/layers/0/attention/context_key", "input": "dflash2/context_input",
             "activation_policy": "AllowA8"}],
        "files": [{"path": None, "payload_bytes": start + sizes[1]}],
    }  # fmt: skip
    names = list(root["bindings"])
    bound = ninfer.bind(directory_of(root), {name: (context, ["q8_g32_fp16"]) for name in names}, ["dflash2"])
    assert bound.objects == ("w.draft.qkv", "w.draft.context_key")
    root["bindings"][names[1]] = root["bindings"][names[0]]
    bound = ninfer.bind(directory_of(root), dict.fromkeys(names, (context, None)))
    assert bound.objects == ("w.draft.qkv",)
    assert [use.activation_policy.value for use in bound.uses] == ["AllowA8", "AllowA8"]


def test_the_failures_of_example_12_6(tmp_path):
    """The format description's table of faults, each with who finds it."""
    objects, weight = small()["objects"], small()["objects"][0]

    def opened(**changes):
        path = tmp_path / "a.ninfer"
        path.write_bytes(entry(small(**changes), small_payload()))
        return ninfer.open(path)

    with pytest.raises(ninfer.DirectoryError):
        opened(objects=[weight, dict(objects[1], id="w"), objects[2]])
    with pytest.raises(ninfer.RangeError):
        opened(objects=[weight, dict(objects[1], offset=8), objects[2]])
    with pytest.raises(ninfer.ReferenceError_):
        opened(bindings={"p": {"parts": [{"object": "w", "range": [0, 9]}]}})
    with opened() as artifact, pytest.raises(ninfer.BindingError):
        artifact.bind({"q": ((5,), None)})
    with opened(objects=[dict(weight, format="new"), *objects[1:]]) as artifact, pytest.raises(ninfer.EncodingError):
        artifact.read("w")
    uses = [{"parameter": "p", "input": "i", "auxiliaries": {"activation_input_divisor": {"object": "w"}}}]
    with opened(uses=uses) as artifact, pytest.raises(ninfer.BindingError):
        ninfer.activation_input_divisor(artifact, artifact.uses[0])
    with opened() as artifact, pytest.raises(ninfer.BindingError):
        artifact.bind({}, ["vision"])
    path = split(tmp_path, [100, 165])
    (tmp_path / "free name 1.x").write_bytes(part(1, small_payload()[100:], bytes(16)))
    with ninfer.open(path) as artifact, pytest.raises(ninfer.FileSetError, match="belongs to artifact"):
        artifact.read("s")
    (tmp_path / "free name 1.x").unlink()
    with ninfer.open(path) as artifact, pytest.raises(ninfer.FileSetError, match="could not be opened"):
        artifact.read("s")


def test_many_parts_take_steps_that_grow_with_them(tmp_path):
    """A row-parallel weight of two shards: every row is two parts."""
    steps = []
    for rows in (500, 1000):
        path = tmp_path / str(rows)
        values = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)
        parts = [{"object": f"s{n}", "range": [4 * row, 4 * row + 4]} for row in range(rows) for n in range(2)]
        specs = [ninfer.TensorSpec(f"s{n}", (rows, 4), "fp32") for n in range(2)]
        bindings = {"p": {"parts": parts}}
        with ninfer.Writer(path, specs, {"text": {"config": {}}}, bindings, durable=False) as writer:
            for n in range(2):
                writer.write_values(f"s{n}", values[:, 4 * n : 4 * n + 4])

        def read(path=path, rows=rows):
            with ninfer.open(path) as artifact:
                whole = artifact.read_parameter("p", (rows, 8))
                return whole, np.concatenate(list(artifact.blocks("p", 1000)))

        lines, (whole, blocks) = lines_run(read)
        steps.append(lines)
        assert np.array_equal(whole, values)
        assert np.array_equal(blocks, values.reshape(-1))
    assert steps[1] < 2.2 * steps[0]


def test_reading_one_component_reads_no_byte_of_another(tmp_path, monkeypatch):
    specs = [ninfer.TensorSpec(name, (64, 128), "q4_g64_fp16") for name in ("text.w", "mtp.w", "text.v")]
    components = {"text": {"config": {}}, "mtp": {"config": {}, "target": "text"}}
    bindings = {name.replace(".", "/"): {"object": name} for name in ("text.w", "mtp.w", "text.v")}
    with ninfer.Writer(tmp_path / "a", specs, components, bindings, durable=False) as writer:
        for spec in specs:
            writer.write_values(spec.id, np.ones(spec.shape, np.float32))
    touched, real = [], os.preadv

    def noted(fd, views, offset):
        count = real(fd, views, offset)
        touched.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", noted)
    with ninfer.open(tmp_path / "a", components=["text"]) as artifact:
        opened = len(touched)
        assert max(end for _, end in touched) <= artifact.payload_offset
        bound = artifact.bind({"text/w": ((64, 128), None), "text/v": ((64, 128), None)}, ["text"])
        assert len(touched) == opened
        for name in bound.parameters:
            artifact.read_parameter(name)
        private = artifact.objects["mtp.w"]
        first = artifact.payload_offset + private.offset
        assert len(touched) > opened
        assert all(end <= first or begin >= first + private.nbytes for begin, end in touched[opened:])


def test_continuations_are_found_after_the_process_has_gone_elsewhere(tmp_path, monkeypatch):
    split(tmp_path, [100, 100, 65])
    monkeypatch.chdir(tmp_path)
    with ninfer.open("a.ninfer") as artifact:
        monkeypatch.chdir("/")
        assert artifact.path == "a.ninfer"
        assert artifact.read_payload(0, 265) == small_payload()


def test_ranges_may_be_numpy_integers_and_nothing_else(tmp_path):
    with ninfer.open(split(tmp_path, [100, 100, 65])) as artifact:
        expected = artifact.read("w").reshape(-1)[1:3]
        one, three = np.int64(1), np.uint8(3)
        assert np.array_equal(artifact.read_range("w", one, three), expected)
        assert np.array_equal(artifact.read_parameter_range("p", one, three), expected)
        assert artifact.read_payload(one, three) == small_payload()[1:4]
        for wrong in (1.0, True, "1", None):
            for read in (artifact.read_range, artifact.read_parameter_range):
                with pytest.raises(ninfer.RangeError, match="expected an integer"):
                    read("w" if read == artifact.read_range else "p", wrong, 3)
            with pytest.raises(ninfer.RangeError, match="expected an integer"):
                artifact.read_payload(wrong, 3)
        for size in (0, -1, 1.5):
            with pytest.raises(ninfer.RangeError, match="size of a block"):
                next(artifact.blocks("p", size))


@pytest.mark.parametrize("shape", [(-2, -2), (4.0,), (True, 4), "4", 4, (0,), (-4,)])
def test_a_shape_that_is_none_is_a_binding_error(shape, tmp_path):
    directory = small(bindings={"p": {"parts": [{"object": "w", "range": [0, 4]}]}})
    with ninfer.open(split(tmp_path, [265], directory)) as artifact:
        with pytest.raises(ninfer.BindingError):
            artifact.read_parameter("p", shape)
        with pytest.raises(ninfer.BindingError):
            artifact.bind({"p": (shape, None)})
        assert artifact.read_parameter("p", np.array([2, 2])).shape == (2, 2)
        assert artifact.bind({"p": ([np.int64(4)], None)}).parameters["p"].shape == (4,)


@pytest.mark.parametrize(
    ("inputs", "signs"),
    [((2, 1536), (1536,)), ((2, 1000), (1000,)), ((2, 1024), (1,)), ((2, 1024), (2, 1024)), ((), ())],
)
def test_a_rotation_never_mixes_two_inputs(inputs, signs):
    with pytest.raises(ninfer.BindingError, match="multiples of 1024"):
        ninfer.hadamard_transform(np.ones(inputs, np.float32), np.ones(signs, np.float32))


@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.uint16])
def test_bytes_are_read_into_an_array_of_any_type(kind, tmp_path):
    with ninfer.open(split(tmp_path, [5, 100, 160])) as artifact:
        found = np.zeros(8 // np.dtype(kind).itemsize, kind)
        artifact.read_encoded_into("w", found, 2)
        assert found.tobytes() == small_payload()[2:10]
        with pytest.raises(ninfer.RangeError, match="gaps"):
            artifact.read_encoded_into("w", np.zeros(8, kind)[::2])
