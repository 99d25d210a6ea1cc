"""The directory's rules, one by one: what breaks each, and the class it is refused with."""

from __future__ import annotations

import json
import struct

import pytest
from samples import entry, part, small, small_payload

from deepspeed_affine import ninfer
from deepspeed_affine.ninfer.framing import ENTRY_MAGIC, PART_MAGIC, Header, entry_start
from deepspeed_affine.ninfer.parse import directory_of

U64 = 2**64 - 1


def write(folder, directory=None, *, text=None, payload=None):
    path = folder / "a.ninfer"
    path.write_bytes(entry(directory, small_payload() if payload is None else payload, text=text))
    return path


def refused(folder, error, directory=None, **kwargs):
    with pytest.raises(error) as caught:
        ninfer.open(write(folder, directory, **kwargs))
    assert type(caught.value) is error, caught.value
    assert caught.value.file
    return str(caught.value)


def tensor(**changes):
    record = dict(small()["objects"][0], **changes)
    return small(objects=[{k: v for k, v in record.items() if v is not ...}, *small()["objects"][1:]])


def resource(**changes):
    record = dict(small()["objects"][2], **changes)
    return small(objects=[*small()["objects"][:2], {k: v for k, v in record.items() if v is not ...}])


def test_headers():
    made = Header(ENTRY_MAGIC, 4064, bytes(range(16))).to_bytes().hex()
    assert made == "4e494e4645520003e00f000000000000000102030405060708090a0b0c0d0e0f"
    made = Header(PART_MAGIC, 2, bytes(range(16))).to_bytes().hex()
    assert made == "4e494e50525400030200000000000000000102030405060708090a0b0c0d0e0f"
    assert [entry_start(n) for n in (4064, 65504, 4065, 1)] == [4096, 65536, 8192, 4096]


def test_the_small_one_is_right(tmp_path):
    with ninfer.open(write(tmp_path, small())) as artifact:
        assert artifact.read("w").tolist() == [
            [1, 1.0078125, 1.015625, 1.0234375],
            [1.03125, 1.0390625, 1.046875, 1.0546875],
        ]
        assert artifact.read("s") == 2.5
        assert artifact.read_resource("text", "t") == b"hello"
        assert artifact.directory.to_json() == small()


SCHEMA = {
    "root": [],
    "member": {**small(), "extra": 1},
    "no uses": {k: v for k, v in small().items() if k != "uses"},
    "components empty": small(components={}),
    "components list": small(components=[]),
    "component name": small(components={"": {"config": {}}}),
    "component null": small(components={"text": None}),
    "component member": small(components={"text": {"config": {}, "x": 1}}),
    "target null": small(components={"text": {"config": {}, "target": None}}),
    "target number": small(components={"text": {"config": {}, "target": 1}}),
    "resources null": small(components={"text": {"config": {}, "resources": None}}),
    "resources list": small(components={"text": {"config": {}, "resources": ["r"]}}),
    "resource role": small(components={"text": {"config": {}, "resources": {"": "r"}}}),
    "resource id": small(components={"text": {"config": {}, "resources": {"t": 1}}}),
    "proposal null": small(components={"text": {"config": {}, "proposal": None}}),
    "proposal member": small(components={"text": {"config": {}, "proposal": {"domain": "full", "x": 1}}}),
    "proposal no rows": small(components={"text": {"config": {}, "proposal": {"domain": "indexed"}}}),
    "proposal rows null": small(components={"text": {"config": {}, "proposal": {"domain": "full", "rows": None}}}),
    "proposal rows bool": small(components={"text": {"config": {}, "proposal": {"domain": "indexed", "rows": True}}}),
    "objects empty": small(objects=[]),
    "objects object": small(objects={}),
    "object null": small(objects=[None]),
    "kind list": small(objects=[{"kind": ["tensor"]}]),
    "id number": tensor(id=1),
    "id empty": tensor(id=""),
    "id nul": tensor(id="a\0b"),
    "format null": tensor(format=None),
    "layout missing": tensor(layout=...),
    "shape null": tensor(shape=None),
    "shape zero": tensor(shape=[0]),
    "shape bool": tensor(shape=[True, 8]),
    "shape rank": tensor(shape=[1] * 17),
    "shape big": tensor(shape=[2**64]),
    "offset negative": tensor(offset=-1),
    "offset text": tensor(offset="0"),
    "offset float": tensor(offset=0.0),
    "offset big": tensor(offset=2**64),
    "bytes bool": tensor(bytes=True),
    "divisors zero": tensor(divisors=0),
    "divisors null": tensor(divisors=None),
    "encoding in a tensor": tensor(encoding="raw_bytes_v1"),
    "shape in a resource": resource(shape=[5]),
    "encoding missing": resource(encoding=...),
    "bindings list": small(bindings=[]),
    "binding name": small(bindings={"": {"object": "w"}}, uses=[]),
    "binding null": small(bindings={"p": None}, uses=[]),
    "binding object null": small(bindings={"p": {"object": None}}, uses=[]),
    "binding object null with parts": small(
        bindings={"p": {"object": None, "parts": [{"object": "w", "range": [0, 1]}]}}, uses=[]
    ),
    "binding member": small(bindings={"p": {"object": "w", "x": 1}}, uses=[]),
    "parts empty": small(bindings={"p": {"parts": []}}, uses=[]),
    "parts object": small(bindings={"p": {"parts": {}}}, uses=[]),
    "part member": small(bindings={"p": {"parts": [{"object": "w", "range": [0, 1], "x": 1}]}}, uses=[]),
    "part range bool": small(bindings={"p": {"parts": [{"object": "w", "range": [False, 1]}]}}, uses=[]),
    "part range big": small(bindings={"p": {"parts": [{"object": "w", "range": [0, 2**64]}]}}, uses=[]),
    "part range text": small(bindings={"p": {"parts": [{"object": "w", "range": "01"}]}}, uses=[]),
    "uses null": small(uses=None),
    "use list": small(uses=[[]]),
    "use input": small(uses=[{"parameter": "p", "input": ""}]),
    "use policy": small(uses=[{"parameter": "p", "input": "i", "activation_policy": "allowA8"}]),
    "use policy list": small(uses=[{"parameter": "p", "input": "i", "activation_policy": ["AllowA8"]}]),
    "use role": small(uses=[{"parameter": "p", "input": "i", "auxiliaries": {"": {"object": "s"}}}]),
    "use aux null": small(uses=[{"parameter": "p", "input": "i", "auxiliaries": None}]),
    "files empty": small(files=[]),
    "file null": small(files=[None]),
    "file path number": small(files=[{"path": None, "payload_bytes": 265}, {"path": 1, "payload_bytes": 1}]),
    "file bytes float": small(files=[{"path": None, "payload_bytes": 265.0}]),
    "metadata null": small(metadata=None),
    "metadata list": small(metadata=[]),
    "metadata name": small(metadata={"name": ""}),
    "metadata name number": small(metadata={"name": 5}),
    "provenance null": small(provenance=None),
}


@pytest.mark.parametrize("name", SCHEMA)
def test_schema(name, tmp_path):
    refused(tmp_path, ninfer.SchemaError, SCHEMA[name])


def files(*names):
    return small(files=[{"path": None, "payload_bytes": 265}, *({"path": n, "payload_bytes": 1} for n in names)])


OTHERS = {
    ninfer.DirectoryError: [
        small(objects=[*small()["objects"][:2], dict(small()["objects"][2], id="w")]),
        small(uses=[{"parameter": "p", "input": "i"}, {"parameter": "p", "input": "i", "auxiliaries": {}}]),
        files("a.ninfer"),
        files("b", "b"),
        files("a\\b"),
        files(".."),
    ],
    ninfer.RangeError: [
        tensor(shape=[2**33, 2**33]),
        tensor(bytes=257),
        resource(bytes=6),
        resource(offset=255),
        resource(offset=U64, bytes=U64),
        small(files=[{"path": None, "payload_bytes": 265}, {"path": "b", "payload_bytes": U64}]),
        small(files=[{"path": None, "payload_bytes": 264}]),
    ],
    ninfer.ReferenceError_: [
        small(components={"text": {"config": {}, "target": "vision"}}),
        small(components={"text": {"config": {}, "resources": {"t": "w"}}}),
        small(bindings={"p": {"object": "r"}}, uses=[]),
        small(bindings={"p": {"parts": [{"object": "r", "range": [0, 1]}]}}, uses=[]),
        small(bindings={"p": {"parts": [{"object": "w", "range": [0, 9]}]}}, uses=[]),
        small(bindings={"p": {"parts": [{"object": "w", "range": [3, 2]}]}}, uses=[]),
        small(uses=[{"parameter": "x", "input": "i"}]),
        small(uses=[{"parameter": "p", "input": "i", "auxiliaries": {"d": {"object": "r"}}}]),
        small(
            uses=[{"parameter": "p", "input": "i", "auxiliaries": {"d": {"parts": [{"object": "s", "range": [0, 2]}]}}}]
        ),
    ],
}


@pytest.mark.parametrize(
    ("error", "directory"),
    [(error, d) for error, listed in OTHERS.items() for d in listed],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_names_ranges_and_references(error, directory, tmp_path):
    refused(tmp_path, error, directory)


def test_a_sum_of_part_lengths_beyond_64_bits_is_a_range():
    huge = {"id": "h", "kind": "tensor", "shape": [2**63], "format": "new", "layout": "new", "offset": 0, "bytes": 1}
    parts = [{"object": "h", "range": [0, 2**63]}] * 2
    root = small(objects=[huge], bindings={"p": {"parts": parts}}, uses=[], components={"text": {"config": {}}})
    with pytest.raises(ninfer.RangeError):
        directory_of(root)
    root["bindings"] = {"p": {"parts": parts[:1]}}
    assert directory_of(root).elements_of(directory_of(root).bindings["p"]) == 2**63


def raw(text):
    return json.dumps(small()).encode().replace(b'"config": {}', b'"config": ' + text, 1)


JSON = {
    "empty object text": b"   ",
    "comma": json.dumps(small()).encode()[:-1] + b",}",
    "two values": json.dumps(small()).encode() + b"{}",
    "latin": json.dumps(small()).encode().replace(b'"text"', b'"t\xe9xt"'),
    "bom": b"\xef\xbb\xbf" + json.dumps(small()).encode(),
    "nul": json.dumps(small()).encode() + b"\0",
    "duplicate at the root": json.dumps(small()).encode()[:-1] + b', "uses": []}',
    "duplicate in config": raw(b'{"a": {"b": [{"c": 1, "c": 1}]}}'),
    "duplicate by escape": raw(b'{"a": 1, "\\u0061": 2}'),
    "nan": raw(b'{"a": NaN}'),
    "infinity": raw(b'{"a": -Infinity}'),
    "beyond a double": raw(b'{"a": 1e999}'),
    "single quotes": raw(b"{'a': 1}"),
    "control character": raw(b'{"a": "\n"}'),
    "leading zero": raw(b'{"a": 01}'),
    "deep": raw(b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
}


@pytest.mark.parametrize("name", JSON)
def test_json(name, tmp_path):
    refused(tmp_path, ninfer.JsonError, text=JSON[name])


def test_integers_of_thousands_of_digits_are_refused(tmp_path):
    refused(tmp_path, ninfer.SchemaError, text=raw(b'{"a": 1' + b"0" * 5000 + b"}"))


def test_spelling_carries_no_meaning(tmp_path):
    text = json.dumps(small(), indent=3).encode().replace(b'"bf16"', b'"b\\u006616"') + b" \t\r\n"
    with ninfer.open(write(tmp_path, text=text)) as artifact:
        assert artifact.directory.to_json() == small()
        assert artifact.objects["w"].format == "bf16"


def test_names_are_compared_code_point_by_code_point(tmp_path):
    root = small(
        bindings={"\u00e9": {"object": "w"}, "e\u0301": {"object": "s"}, "\U0001f600": {"object": "w"}}, uses=[]
    )
    with ninfer.open(write(tmp_path, root)) as artifact:
        assert len(artifact.bindings) == 3


def test_lone_surrogates_are_no_names(tmp_path):
    refused(tmp_path, ninfer.SchemaError, small(bindings={"\ud800": {"object": "w"}}, uses=[]))
    refused(tmp_path, ninfer.DirectoryError, files("\udc00"))
    # What nobody here interprets is kept.
    with ninfer.open(write(tmp_path, small(metadata={"x": "\ud800"}))) as artifact:
        assert artifact.metadata["x"] == "\ud800"


def test_framing(tmp_path):
    good = entry(small(), small_payload())
    path = tmp_path / "a.ninfer"
    cases = {
        "empty": b"",
        "short": good[:31],
        "v2": good[:7] + b"\2" + good[8:],
        "part": part(1, b"x"),
        "json beyond": good[:8] + struct.pack("<Q", U64) + good[16:],
        "json to the end": good[:8] + struct.pack("<Q", len(good) - 31) + good[16:],
        "long": good + b"\0",
        "cut": good[:-1],
    }
    for name, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(ninfer.FramingError) as caught:
            ninfer.open(path)
        assert type(caught.value) is ninfer.FramingError, name
    with pytest.raises(ninfer.FramingError):
        ninfer.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        ninfer.open(tmp_path / "none")


def test_the_gap_before_the_payload_is_not_looked_at(tmp_path):
    data = bytearray(entry(small(), small_payload()))
    data[4000] = 7
    path = tmp_path / "a.ninfer"
    path.write_bytes(data)
    with ninfer.open(path) as artifact:
        artifact.validate()


def test_no_text_component_and_a_gap_and_a_tail_are_legal(tmp_path):
    root = small(components={"ngram": {"config": {}}}, files=[{"path": None, "payload_bytes": 300}])
    with ninfer.open(write(tmp_path, root, payload=small_payload() + bytes(35))) as artifact:
        artifact.validate()


def test_records_check_themselves():
    with pytest.raises(ninfer.SchemaError):
        ninfer.Binding()
    with pytest.raises(ninfer.SchemaError):
        ninfer.Binding("w", (ninfer.Part("w", 0, 1),))
    with pytest.raises(ninfer.ReferenceError_):
        ninfer.Part("w", 1, 1)
    with pytest.raises(ninfer.SchemaError):
        ninfer.Proposal("full", 3)
    assert ninfer.Use("p", "i", "AllowA8").activation_policy is ninfer.ActivationPolicy.ALLOW_A8
    with pytest.raises(AttributeError):
        directory_of(small()).files = ()


@pytest.mark.parametrize("auxiliaries", [None, [], "x"])
def test_auxiliaries_that_are_no_mapping(auxiliaries):
    with pytest.raises(ninfer.SchemaError, match="auxiliaries"):
        ninfer.Use("p", "i", None, auxiliaries)


GROUPED, BLOCKS = "row_split_k128_v1", "block_scale_k16_m128x4_v1"
UNREADABLE = {
    "pair": {"format": "q4_g64_fp16"},
    "pair of words": {"layout": GROUPED},
    "rank": {"format": "q4_g64_fp16", "layout": GROUPED, "shape": [2, 2, 2]},
    "scalar": {"format": "fp8_e4m3fn_row_bf16", "layout": "row_scale_v1", "shape": []},
    "tile": {"format": "nvfp4", "layout": BLOCKS, "shape": [64, 64]},
    "block": {"format": "nvfp4", "layout": BLOCKS, "shape": [128, 16]},
    "size": {"bytes": 18},
    "place": {"offset": 128},
    "divisors of words": {"divisors": 2},
    "divisors of groups": {"format": "q4_g64_fp16", "layout": GROUPED, "divisors": 2},
    "format of tomorrow": {"format": "q3_g64_fp16"},
    "layout of tomorrow": {"layout": "contiguous_le_v2"},
    "resource's encoding as a layout": {"layout": "raw_bytes_v1"},
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_interpreted_is_found_when_it_is_read(name, tmp_path):
    root = {**tensor(**UNREADABLE[name]), "bindings": {"p": {"object": "w"}}}
    with ninfer.open(write(tmp_path, root)) as artifact:
        assert artifact.read("s") == 2.5
        assert artifact.read("r") == b"hello"
        assert len(artifact.read_encoded("w")) == artifact.objects["w"].nbytes
        for read in (artifact.read, artifact.geometry, artifact.read_tensor):
            with pytest.raises(ninfer.EncodingError) as caught:
                read("w")
            assert type(caught.value) is ninfer.EncodingError
        with pytest.raises(ninfer.EncodingError):
            artifact.read_parameter("p")
        with pytest.raises(ninfer.EncodingError):
            artifact.validate()


def test_divisors_that_do_not_divide_a_matrix(tmp_path):
    size = ninfer.encoded_bytes("nvfp4", (256, 64))
    for divisors, bytes_ in ((3, size + 8), (4, size + 12), (1, size + 4), (2, size)):
        record = {"id": "w", "kind": "tensor", "shape": [256, 64], "format": "nvfp4", "layout": BLOCKS, "offset": 0,
                  "bytes": bytes_, "divisors": divisors}  # fmt: skip
        root = small(objects=[record], bindings={}, uses=[], components={"text": {"config": {}}})
        root["files"] = [{"path": None, "payload_bytes": bytes_}]
        path = write(tmp_path, root, payload=bytes(bytes_))
        with ninfer.open(path) as artifact, pytest.raises(ninfer.EncodingError):
            artifact.read("w")


def test_every_class_of_fault_is_where_others_look_for_it():
    """Who catches a damaged checkpoint, a map that contradicts itself or bytes that disagree catches a container's."""
    from deepspeed_affine import errors

    parents = {
        errors.CheckpointFormatError: ("FramingError", "JsonError", "SchemaError", "DirectoryError", "RangeError",
                                       "ReferenceError_", "EncodingError", "FileSetError"),
        errors.InvalidMapError: ("BindingError",),
        errors.IntegrityError: ("ValueDomainError",),
        errors.AffineError: ("WriterError",),
    }  # fmt: skip
    for parent, names in parents.items():
        assert all(getattr(ninfer, name).__bases__ == (parent,) for name in names)
    assert issubclass(errors.AffineError, ValueError)
