"""What a pickle holds beside tensors, through JSON and back; and nothing else."""

import json
from collections import OrderedDict

import pytest

from deepspeed_affine.errors import CheckpointFormatError, UnsupportedLayoutError
from deepspeed_affine.storage.plain_values import decode_value, encode_value
from deepspeed_affine.storage.refs import Global, StandIn, TorchSize, new_instance

VALUES = [
    None,
    True,
    -3,
    2.5,
    "text",
    [1, [2, "a"], {}],
    (1, (2,)),
    {"a": {"b": (1, 2)}, "c": [None]},
    {1: "x", (2, 3): "y", "$z": 4},
    {"$size": [1]},
    OrderedDict([("b", 1), ("a", 2)]),
    TorchSize((3, 4)),
    {3, 1},
    Global("torch", "float16"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_with_its_types(value):
    found = decode_value(json.loads(json.dumps(encode_value(value, "it"), allow_nan=False)), "it")
    assert found == value
    assert type(found) is type(value)


def test_what_json_has_no_number_for():
    found = decode_value(
        json.loads(json.dumps(encode_value([float("inf"), float("nan")], "it"), allow_nan=False)), "it"
    )
    assert found[0] == float("inf")
    assert found[1] != found[1]


def test_an_object_keeps_its_class_and_attributes():
    made = new_instance("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", {"shape": (2, (3, 4))})
    found = decode_value(encode_value({"a": made}, "it"), "it")["a"]
    assert found.stand_in_class == made.stand_in_class
    assert found.stand_in_op == "newobj"
    assert found.shape == (2, (3, 4))


@pytest.mark.parametrize(
    "value",
    [object(), StandIn(Global("os", "system"), ("x",)), b"bytes", {"a": [1j]}],
    ids=["object", "call", "b", "j"],
)
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(UnsupportedLayoutError, match=r"^it: holds"):
        encode_value(value, "it")


def test_values_that_do_not_end():
    endless = []
    endless.append(endless)
    with pytest.raises(UnsupportedLayoutError, match="nested"):
        encode_value(endless, "it")


@pytest.mark.parametrize(
    "value",
    [{"$no": 1}, {"$tuple": 1}, {"$size": [1], "b": 2}, {"$object": ["a"]}, {"$float": "x"}, {"$dict": [[1]]}],
    ids=repr,
)
def test_what_was_not_written_so_is_refused(value):
    with pytest.raises(CheckpointFormatError, match=r"^it: holds"):
        decode_value(value, "it")
