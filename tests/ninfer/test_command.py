"""``ds_affine ninfer``: exit codes, the error's class first, digests as the samples state them, files taken out."""

from __future__ import annotations

import json

import numpy as np
import pytest
from samples import DATA, EXPECTED, NEGATIVE, entry, small, small_payload, unpacked

from deepspeed_affine import ninfer
from deepspeed_affine.cli import ds_affine


@pytest.mark.parametrize("name", EXPECTED)
def test_inspect_prints_every_digest(name, capsys):
    assert ds_affine(["ninfer", "inspect", str(DATA / name), "--json", "--digests"]) == 0
    found, expected = json.loads(capsys.readouterr().out), EXPECTED[name]
    for key in ("artifact_id", "payload_offset", "payload_bytes", "payload_sha256", "files"):
        assert found[key] == expected[key]
    assert sorted(found["components"]) == sorted(expected["components"])
    for record, other in zip(found["objects"], expected["objects"], strict=True):
        shared = {key: value for key, value in other.items() if key not in ("values_dtype", "first_values")}
        assert {key: record[key] for key in shared} == shared
    for parameter, other in expected["bindings"].items():
        assert {key: found["bindings"][parameter][key] for key in other} == other
    assert ds_affine(["ninfer", "inspect", str(DATA / name)]) == 0
    assert expected["artifact_id"] in capsys.readouterr().out


def test_inspect_says_what_cannot_be_read(tmp_path, capsys):
    unknown = dict(small()["objects"][0], format="gguf_q4")
    path = tmp_path / "a"
    path.write_bytes(entry(small(objects=[unknown, *small()["objects"][1:]]), small_payload()))
    assert ds_affine(["ninfer", "inspect", str(path), "--json", "--digests"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["objects"][0]["values_sha256"] is None
    assert found["objects"][0]["fault"].startswith("EncodingError")
    assert found["bindings"]["p"]["values_sha256"] is None
    assert found["objects"][1]["values_sha256"]


@pytest.mark.parametrize("case", NEGATIVE, ids=lambda case: case["name"])
def test_validate_ends_with_the_class_first(case, tmp_path, capsys):
    path = unpacked(case, tmp_path)
    code = ds_affine(["ninfer", "validate", str(path)])
    said = capsys.readouterr()
    if case["category"] == "valid":
        assert (code, said.err) == (0, "")
        return
    assert code == 2
    label = case["category"].replace("_", "")
    assert said.out == ""
    if label == "files":
        assert said.err.startswith(("SchemaError:", "DirectoryError:"))
    else:
        assert said.err.split(":")[0].rstrip("_").lower() == f"{label}error"


def test_validate_as_json_and_without_a_file(tmp_path, capsys):
    assert ds_affine(["ninfer", "validate", str(DATA / "allfmt.ninfer"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True, "errors": []}
    assert ds_affine(["ninfer", "validate", str(tmp_path / "none"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["kind"] == "FileNotFoundError"
    assert ds_affine(["ninfer", "validate", str(tmp_path), "--debug"]) == 2


def test_codes_outside_their_format_are_found_by_validate_only(tmp_path, capsys):
    with ninfer.open(DATA / "allfmt.ninfer") as artifact:
        place = artifact.payload_offset + artifact.objects["w.q8"].offset
    data = bytearray((DATA / "allfmt.ninfer").read_bytes())
    data[place] = 0x80
    (tmp_path / "a").write_bytes(data)
    assert ds_affine(["ninfer", "validate", str(tmp_path / "a")]) == 2
    assert capsys.readouterr().err.startswith("ValueDomainError: ")
    with ninfer.open(tmp_path / "a") as artifact:
        artifact.read("w.q8")


def test_extract(tmp_path, capsys):
    folder = tmp_path / "out"
    assert ds_affine(["ninfer", "extract", str(DATA / "allfmt_split.ninfer"), "--output", str(folder)]) == 0
    with ninfer.open(DATA / "allfmt.ninfer") as artifact:
        for name in artifact.bindings:
            values = np.load(folder / f"{name.replace('/', '%2F')}.npy")
            assert np.array_equal(values, artifact.read_parameter(name), equal_nan=True)
        data = (folder / "text%2Ftokenizer.json").read_bytes()
        assert data == artifact.read_resource("text", "tokenizer.json")
        assert len(list(folder.iterdir())) == len(artifact.bindings) + 2
        few = tmp_path / "few"
        arguments = ["--object", "w.q5", "--object", "r.tail", "--parameter", "text/q4"]
        assert ds_affine(["ninfer", "extract", str(DATA / "allfmt.ninfer"), "--output", str(few), *arguments]) == 0
        assert sorted(path.name for path in few.iterdir()) == ["r.tail.bin", "text%2Fq4.npy", "w.q5.npy"]
        raw = tmp_path / "raw"
        arguments = ["--object", "w.q5", "--encoded"]
        assert ds_affine(["ninfer", "extract", str(DATA / "allfmt.ninfer"), "--output", str(raw), *arguments]) == 0
        assert (raw / "w.q5.bin").read_bytes() == artifact.read_encoded("w.q5")
    assert ds_affine(["ninfer", "extract", str(DATA / "allfmt.ninfer"), "--output", str(raw)]) == 2
    assert ds_affine(["ninfer", "extract", str(DATA / "allfmt.ninfer"), "--output", f"{raw}2", "--object", "x"]) == 2
    assert ds_affine(["ninfer", "extract", str(DATA / "allfmt.ninfer"), "--output", str(tmp_path / "no" / "x")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few", "out", "raw"]


def test_what_a_killed_run_left_is_removed_and_a_conversions_is_not(tmp_path, capsys):
    from pathlib import Path

    from deepspeed_affine.storage.private import PrivateFolder

    arguments = ["ninfer", "extract", str(DATA / "allfmt.ninfer"), "--output", str(tmp_path / "out")]
    private = PrivateFolder.take(str(tmp_path / "out"))
    Path(private.files).mkdir()
    (Path(private.files) / "half").write_bytes(b"x")
    private.release()
    assert ds_affine(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "half").exists()
    private = PrivateFolder.take(str(tmp_path / "other"))
    Path(private.journal(0)).write_bytes(b"")
    private.release()
    assert ds_affine([*arguments[:-1], str(tmp_path / "other")]) == 2
    assert Path(private.journal(0)).exists()


def test_split(tmp_path, capsys):
    arguments = ["--output", str(tmp_path / "b"), "--max-file-bytes", "16384"]
    assert ds_affine(["ninfer", "split", str(DATA / "allfmt.ninfer"), *arguments]) == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["b", "b.part-0001", "b.part-0002"]
    assert ds_affine(["ninfer", "split", str(tmp_path / "b"), "--output", str(tmp_path / "c")]) == 0
    with ninfer.open(tmp_path / "c") as made, ninfer.open(DATA / "allfmt.ninfer") as source:
        assert made.read_payload(0, made.payload_bytes) == source.read_payload(0, source.payload_bytes)
    assert ds_affine(["ninfer", "split", str(DATA / "allfmt.ninfer"), *arguments]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


LONG = "x/" * 200


def test_names_no_file_system_takes(tmp_path, capsys):
    names = [LONG + "a", LONG + "b", "..", "\N{GRINNING FACE}" * 100]
    path = tmp_path / "a"
    path.write_bytes(entry(small(bindings={name: {"object": "w"} for name in names}, uses=[]), small_payload()))
    assert ds_affine(["ninfer", "extract", str(path), "--output", str(tmp_path / "out")]) == 0
    with ninfer.open(path) as artifact:
        expected = artifact.read("w")
    found = sorted((tmp_path / "out").glob("*.npy"))
    assert len(found) == len(names)
    assert all(len(file.name) <= 255 and np.array_equal(np.load(file), expected) for file in found)


def test_inspect_prints_no_codes_a_terminal_obeys(tmp_path, capsys):
    path = tmp_path / "a"
    directory = small(metadata={"name": "a\x1b[31m\nfile  forged"})
    path.write_bytes(entry(directory, small_payload()))
    assert ds_affine(["ninfer", "inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\nfile  forged" not in said


@pytest.mark.parametrize("options", [["--encoded"], ["--encoded", "--parameter", "p"]])
def test_encoded_is_of_objects(options, tmp_path, capsys):
    path = tmp_path / "a"
    path.write_bytes(entry(small(), small_payload()))
    assert ds_affine(["ninfer", "extract", str(path), "--output", str(tmp_path / "out"), *options]) == 2
    assert "--object" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("action", ["extract", "split"])
def test_an_empty_output_is_named(action, tmp_path, capsys):
    path = tmp_path / "a"
    path.write_bytes(entry(small(), small_payload()))
    assert ds_affine(["ninfer", action, str(path), "--output", ""]) == 2
    assert "--output: is empty" in capsys.readouterr().err
