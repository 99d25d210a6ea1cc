"""Every sample reads with every digest, and every damaged one ends at its stage with the error of its class."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from samples import DATA, EXPECTED, NEGATIVE, unpacked

from deepspeed_affine import ninfer

CLASSES = {
    "schema": ninfer.SchemaError,
    "json": ninfer.JsonError,
    "framing": ninfer.FramingError,
    "range": ninfer.RangeError,
    "reference": ninfer.ReferenceError_,
    "directory": ninfer.DirectoryError,
    "encoding": ninfer.EncodingError,
    "file_set": ninfer.FileSetError,
}
BAD_NAMES = {"files1_path_dot", "files1_path_slash", "files1_path_empty", "files1_path_nul", "files_dup_path"}


def sha(data):
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_reads_with_every_digest(name):
    expected = EXPECTED[name]
    with ninfer.open(DATA / name) as artifact:
        assert artifact.artifact_id == expected["artifact_id"]
        assert artifact.payload_offset == expected["payload_offset"]
        assert artifact.payload_bytes == expected["payload_bytes"]
        assert sha(artifact.read_payload(0, artifact.payload_bytes)) == expected["payload_sha256"]
        assert sorted(artifact.components) == sorted(expected["components"])
        for file, record in zip(expected["files"], artifact.files, strict=True):
            assert record.payload_bytes == file["payload_bytes"]
            assert record.path in (None, file["name"])
        assert [record["id"] for record in expected["objects"]] == list(artifact.objects)
        for record in expected["objects"]:
            found = artifact.objects[record["id"]].to_json()
            assert all(found[key] == record[key] for key in found)
            assert sha(artifact.read_encoded(record["id"])) == record["encoded_sha256"]
            if record["kind"] == "tensor":
                values = artifact.read(record["id"])
                assert list(values.shape) == record["shape"]
                assert sha(values) == record["values_sha256"]
        for parameter, record in expected["bindings"].items():
            values = artifact.read_parameter(parameter)
            assert values.size == record["elements"]
            assert sha(values) == record["values_sha256"]
            assert sha(np.concatenate(list(artifact.blocks(parameter, 100)))) == record["values_sha256"]
        artifact.validate()


@pytest.mark.parametrize("case", NEGATIVE, ids=lambda case: case["name"])
def test_a_damaged_file_ends_at_its_stage(case, tmp_path):
    path = unpacked(case, tmp_path)
    category, stage = case["category"], case["stage"]
    if category == "files":
        error = ninfer.DirectoryError if case["name"] in BAD_NAMES else ninfer.SchemaError
    else:
        error = CLASSES.get(category)
    if stage == "open":
        with pytest.raises(error) as caught:
            ninfer.open(path)
        assert type(caught.value) is error
        assert caught.value.file == str(path)
        return
    with ninfer.open(path) as artifact:
        for object_id in ("w", "s", "r"):
            if stage == f"read:{object_id}":
                with pytest.raises(error) as caught:
                    artifact.read(object_id)
                assert type(caught.value) is error
                break
            artifact.read(object_id)
        else:
            assert stage == "ok"
            artifact.validate()


def test_a_renamed_entry_finds_its_parts(tmp_path):
    names = [file["name"] for file in EXPECTED["allfmt_split.ninfer"]["files"]]
    for name in names:
        target = "renamed.bin" if name == names[0] else name
        (tmp_path / target).write_bytes((DATA / name).read_bytes())
    with ninfer.open(tmp_path / "renamed.bin") as artifact:
        assert sha(artifact.read_payload(0, artifact.payload_bytes)) == EXPECTED["allfmt.ninfer"]["payload_sha256"]


def test_what_lies_in_absent_parts_alone_cannot_be_read(tmp_path):
    (tmp_path / "allfmt_split.ninfer").write_bytes((DATA / "allfmt_split.ninfer").read_bytes())
    with ninfer.open(tmp_path / "allfmt_split.ninfer") as artifact:
        assert artifact.read("d.int32").size == 7
        assert artifact.read_payload(12_288, 0) == b""
        for object_id in ("w.nvfp4x2", "h.signs", "r.tail"):
            with pytest.raises(ninfer.FileSetError):
                artifact.read(object_id)
        with pytest.raises(ninfer.FileSetError):
            artifact.validate()
