"""The manifest: the same bytes for the same content, read strictly, and identities compared in words."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestFile,
    ManifestParameter,
    identity_differences,
)
from deepspeed_affine.storage.records import canonical, parse_object, plain

IDENTITY = {
    "source": [
        {"name": "mp_rank_00_model_states.pt", "bytes": 100, "digest": "aa"},
        {"name": "zero_pp_rank_0_mp_rank_00_optim_states.pt", "bytes": 200, "digest": "bb"},
    ],
    "options": {"on_drift": "error", "strict": True},
    "software": {"deepspeed": "0.19.8", "deepspeed_affine": "0.1.0"},
}
FILES = {
    "zero/x/fp32.pt": ManifestFile(10, 0x0A1B2C3D, "x", "fp32"),
    "zero/日本 \n/fp32.pt": ManifestFile(0, 0, "日本 \n", "fp32"),
    "zero/optimizer_state.pt": ManifestFile(7, 0xFFFFFFFF),
}
PARAMETERS = {"x": ManifestParameter("ab" * 32, (2, 5)), "日本 \n": ManifestParameter("cd" * 32, ())}


def manifest(**changed):
    return Manifest(**{"identity": IDENTITY, "files": FILES, "parameters": PARAMETERS, **changed})


def test_written_and_read_back():
    made = manifest()
    data = made.to_bytes()
    assert Manifest.from_bytes(data) == made
    assert json.loads(data)["files"]["zero/x/fp32.pt"] == {
        "bytes": 10,
        "crc32": "0a1b2c3d",
        "param": "x",
        "state": "fp32",
    }
    assert json.loads(data)["parameters"]["x"] == {"layout": "ab" * 32, "shape": [2, 5]}
    assert json.loads(data)["format_version"] == 1
    assert data.isascii()
    assert data.endswith(b"\n")
    assert made.nbytes == 17


def test_the_same_content_in_any_order_is_the_same_bytes():
    def reverse(mapping):
        return dict(reversed(list(mapping.items())))

    other = manifest(identity=reverse(IDENTITY), files=reverse(FILES), parameters=reverse(PARAMETERS))
    assert other.to_bytes() == manifest().to_bytes()
    assert Manifest.from_bytes(manifest().to_bytes()).to_bytes() == manifest().to_bytes()


def test_a_manifest_cannot_be_changed():
    made = manifest()
    for changed in (made.files, made.parameters, made.identity):
        with pytest.raises(TypeError):
            changed["x"] = 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"files": {"../x": ManifestFile(1, 1)}}, "no relative path"),
        ({"files": {"/x": ManifestFile(1, 1)}}, "no relative path"),
        ({"files": {"\ud800": ManifestFile(1, 1)}}, "not valid text"),
        ({"files": {"a\0": ManifestFile(1, 1)}}, "NUL"),
        ({"files": {"a": ManifestFile(1, 1), "a/b": ManifestFile(1, 1)}}, "a is a file and the folder of a/b"),
        ({"files": {MANIFEST_NAME: ManifestFile(1, 1)}}, "itself"),
        ({"files": {"a": ManifestFile(1, 1, "w", "fp32")}}, "not among the parameters"),
        ({"identity": {"x": 1.5}}, "float"),
        ({"identity": {1: 1}}, "no text"),
    ],
)
def test_contradictions_are_refused(changed, said):
    with pytest.raises(CheckpointFormatError, match=said):
        manifest(**changed)


def spoiled(change):
    said = json.loads(manifest().to_bytes())
    change(said)
    return json.dumps(said).encode()


DAMAGED = {
    "empty": (b"", "Expecting value"),
    "text": (b"hello", "Expecting value"),
    "a list": (b"[]", "a list where an object"),
    "not UTF-8": (b"\xff", "codec"),
    "deep": (b"[" * 100_000, "nested"),
    "deep identity": (spoiled(lambda m: m["identity"].update(x=json.loads("[" * 200 + "]" * 200))), "nested"),
    "huge number": (b'{"format_version":' + b"9" * 5000 + b"}", "."),
    "truncated": (manifest().to_bytes()[:-20], "."),
    "a key twice": (b'{"format_version":1,"format_version":1}', "'format_version' twice"),
    "a fraction": (spoiled(lambda m: m["files"]["zero/x/fp32.pt"].update(bytes=1.5)), "1.5, which is no integer"),
    "NaN": (b'{"format_version":NaN}', "NaN"),
    "no version": (spoiled(lambda m: m.pop("format_version")), "'format_version' is missing"),
    "version 0": (spoiled(lambda m: m.update(format_version=0)), "0, expected 1"),
    "a true version": (spoiled(lambda m: m.update(format_version=True)), "True, expected a count"),
    "no files": (spoiled(lambda m: m.pop("files")), "'files' is missing"),
    "files in a list": (spoiled(lambda m: m.update(files=[])), "'files' is \\[\\], expected an object"),
    "unknown key": (spoiled(lambda m: m.update(more=1)), "unknown key 'more'"),
    "unknown key of a file": (spoiled(lambda m: m["files"]["zero/x/fp32.pt"].update(a=1)), "zero/x/fp32.pt.*unknown"),
    "negative size": (spoiled(lambda m: m["files"]["zero/x/fp32.pt"].update(bytes=-1)), "zero/x/fp32.pt.*-1"),
    "upper-case checksum": (spoiled(lambda m: m["files"]["zero/x/fp32.pt"].update(crc32="0A1B2C3D")), "eight hex"),
    "short checksum": (spoiled(lambda m: m["files"]["zero/x/fp32.pt"].update(crc32="1")), "eight hex"),
    "number for a checksum": (spoiled(lambda m: m["files"]["zero/x/fp32.pt"].update(crc32=1)), "eight hex"),
    "state without param": (spoiled(lambda m: m["files"]["zero/x/fp32.pt"].pop("param")), "without a parameter"),
    "param is a number": (spoiled(lambda m: m["files"]["zero/x/fp32.pt"].update(param=1)), "'param' is 1"),
    "file is a list": (spoiled(lambda m: m["files"].update(a=[])), "'a': \\[\\] where an object"),
    "bad shape": (spoiled(lambda m: m["parameters"]["x"].update(shape=[-1])), "'x': 'shape'"),
    "true in a shape": (spoiled(lambda m: m["parameters"]["x"].update(shape=[True])), "'x': 'shape'"),
    "no layout": (spoiled(lambda m: m["parameters"]["x"].update(layout="")), "'x': 'layout'"),
    "evil path": (spoiled(lambda m: m["files"].update({"../x": {"bytes": 1, "crc32": "00000000"}})), "no relative"),
    "unlisted param": (spoiled(lambda m: m["parameters"].pop("x")), "not among the parameters"),
    "identity is text": (spoiled(lambda m: m.update(identity="x")), "'identity' is 'x'"),
    "another digit": (
        spoiled(lambda m: m["identity"]["source"][0].update(digest="ab")),
        "content whose checksum is .*, and records",
    ),
    "another size": (
        spoiled(lambda m: m["files"]["zero/x/fp32.pt"].update(bytes=11)),
        "content whose checksum is .*, and records",
    ),
    "no checksum": (spoiled(lambda m: m.pop("crc32")), "'crc32' is missing"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_named(kind):
    data, said = DAMAGED[kind]
    with pytest.raises(CheckpointFormatError, match=said) as caught:
        Manifest.from_bytes(data, "/out/affine_manifest.json")
    assert caught.value.file == "/out/affine_manifest.json"
    assert caught.value.message.startswith("/out/affine_manifest.json: has ") or "contradicts" in caught.value.message
    assert caught.value.message.count("\n") == 0


def test_a_newer_manifest_is_refused_by_name():
    data = spoiled(lambda m: m.update(format_version=2, files="whatever it has"))
    with pytest.raises(CheckpointFormatError, match=r"format 2.*reads format 1.*newer version"):
        Manifest.from_bytes(data)


def test_any_flipped_byte_is_an_error_or_says_the_same():
    """Reading never fails in another way, and never takes changed bytes for another manifest."""
    data = manifest().to_bytes()
    for position in range(len(data)):
        for bit in (0x01, 0x20, 0x80):
            changed = bytearray(data)
            changed[position] ^= bit
            try:
                found = Manifest.from_bytes(bytes(changed))
            except CheckpointFormatError:
                continue
            # The digits of an escape may be in either case.
            assert found == manifest()
            assert chr(changed[position]) in "ABCDEF"
            assert bit == 0x20


def test_reading_from_a_folder(tmp_path):
    folder = str(tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"cannot be read \(No such file"):
        Manifest.read(folder)
    (tmp_path / MANIFEST_NAME).write_bytes(manifest().to_bytes())
    assert Manifest.read(folder) == manifest()
    os.remove(tmp_path / MANIFEST_NAME)
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(CheckpointFormatError, match="cannot be read"):
        Manifest.read(folder)


def test_missing_and_short_files_are_listed(tmp_path):
    os.makedirs(tmp_path / "zero" / "x")
    (tmp_path / "zero" / "x" / "fp32.pt").write_bytes(b"0123456789")
    (tmp_path / "zero" / "optimizer_state.pt").write_bytes(b"short")
    lines = list(manifest().missing(str(tmp_path)))
    assert lines[0] == "file zero/日本 \n/fp32.pt cannot be found (No such file or directory)"
    assert lines[1] == "file zero/optimizer_state.pt has 5 bytes and had 7 when it was written"
    assert len(lines) == 2


def changed_identity(change):
    copy = json.loads(json.dumps(IDENTITY))
    change(copy)
    return copy


DIFFERENCES = [
    (lambda i: i["options"].update(on_drift="first"), ["option on_drift was 'error' and is 'first'"]),
    (lambda i: i["options"].pop("on_drift"), ["option on_drift was 'error' and is not there"]),
    (lambda i: i["options"].update(new=1), ["option new was not there and is 1"]),
    (lambda i: i["options"].update(strict=1), ["option strict was True and is 1"]),
    (lambda i: i["software"].update(deepspeed="0.19.9"), ["deepspeed was '0.19.8' and is '0.19.9'"]),
    (
        lambda i: i["source"][0].update(bytes=101),
        ["source file mp_rank_00_model_states.pt had 100 bytes and has 101"],
    ),
    (
        lambda i: i["source"][0].update(digest="ab"),
        ["source file mp_rank_00_model_states.pt has the same size and other content"],
    ),
    (lambda i: i["source"].pop(0), ["source file mp_rank_00_model_states.pt is gone"]),
    (lambda i: i["source"].append({"name": "z.pt"}), ["source file z.pt is new"]),
    (lambda i: i["source"].reverse(), ["source lists the same files in another order"]),
    (lambda i: i.update(source="x"), ["source was [{'name': 'mp_rank_00_model_states.pt', 'by... "]),
    (lambda i: i.pop("options"), ["options was {'on_drift': 'error', 'strict': True} and is not there"]),
    (lambda i: i.update(more={"a": 1}), ["more was not there and is {'a': 1}"]),
    (
        lambda i: (i["software"].update(deepspeed="1"), i["options"].update(strict=False), i["source"].pop(1)),
        [
            "source file zero_pp_rank_0_mp_rank_00_optim_states.pt is gone",
            "option strict was True and is False",
            "deepspeed was '0.19.8' and is '1'",
        ],
    ),
]


@pytest.mark.parametrize(("change", "lines"), DIFFERENCES, ids=[lines[0][:40] for _, lines in DIFFERENCES])
def test_identities_are_compared_in_words(change, lines):
    found = identity_differences(IDENTITY, changed_identity(change))
    assert len(found) == len(lines)
    for line, expected in zip(found, lines, strict=True):
        assert line.startswith(expected.removesuffix("... "))


def test_equal_identities_do_not_differ():
    assert identity_differences(IDENTITY, changed_identity(lambda i: None)) == []
    assert identity_differences({"source": ({"name": "a"},)}, {"source": [{"name": "a"}]}) == []
    assert identity_differences({}, {}) == []
    assert identity_differences({}, {"source": None}) == ["source was not there and is None"]


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner))
objects = st.dictionaries(st.sampled_from(["source", "options", "software", "other"]), values)


@given(objects, objects)
def test_no_difference_means_equal(one, other):
    assert bool(identity_differences(one, other)) == (canonical(one) != canonical(other))
    assert identity_differences(one, one) == []
    assert all(type(line) is str for line in identity_differences(one, other))


@given(objects)
def test_canonical_is_what_is_read_back(value):
    assert parse_object(canonical(value)) == plain(value)


@pytest.mark.parametrize("value", [1.0, {1: 2}, {"a": {3}}, b"x", float("nan"), object()])
def test_what_json_changes_is_refused(value):
    with pytest.raises(ValueError, match=r"."):
        canonical(value)
