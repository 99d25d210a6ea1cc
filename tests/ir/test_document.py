"""The stored document: both spellings, strict reading, one error for each departure."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from deepspeed_affine.errors import AffineError, CheckpointFormatError, InvalidMapError
from deepspeed_affine.ir import (
    AFFINE_MAP_FORMAT_VERSION,
    ParamAffineMap,
    contiguous_split_map,
    exact_name,
    pattern_of,
    read_document,
    replicated_map,
    segmented_map,
    write_document,
)

MAPS = {
    "transformer.h.0.attn.c_attn.weight": segmented_map((48, 8), [(32, False), (16, True)], 0, 4, [[8] * 4]),
    "layer[0].bias+x é": replicated_map((5,), 4, 0.25),
    "scalar": replicated_map((), 2),
    "empty": contiguous_split_map((0, 3), [0, 0], 0),
}


@pytest.mark.parametrize("spelling", ["params", "draft"])
@pytest.mark.parametrize("rank_keys", ["int", "str"])
def test_what_is_written_is_read_back_canonical(spelling: Any, rank_keys: Any) -> None:
    document = write_document(MAPS, spelling, rank_keys=rank_keys)
    assert document["version"] == AFFINE_MAP_FORMAT_VERSION
    rows = document["params"] if spelling == "params" else {k: v for k, v in document.items() if k != "version"}
    assert list(rows) == [f"^{re.escape(name)}$" for name in sorted(MAPS)]
    assert {type(key) for row in rows.values() for key in row["ranks"]} == {int if rank_keys == "int" else str}
    for each in (document, json.loads(json.dumps(document))):
        read = read_document(each)
        assert read.spelling == spelling
        assert len(read) == len(MAPS)
        for name, layout in MAPS.items():
            assert read.find(name) == layout.canonical()
        assert read.find("transformer.h.0.attn.c_attn.weight.more") is None
        assert read.find("transformerxh.0.attn.c_attn.weight") is None


def test_a_scale_of_one_is_left_out() -> None:
    assert "scale" not in json.dumps(write_document({"scalar": MAPS["scalar"]}))
    assert json.dumps(write_document(MAPS)).count('"scale": 0.25') == 4


def test_the_drafts_own_example_reads() -> None:
    example = {
        "version": 1,
        "^transformer.h.0.attn.c_attn.weight$": {
            "logical_shape": [24, 8],
            "ranks": {
                r: {
                    "shard_shape": [16, 8],
                    "pieces": [
                        {"shape": [8, 8], "source": [64 * r, [8, 1]], "dest": [0, [8, 1]], "locations": [r]},
                        {"shape": [8, 8], "source": [128, [8, 1]], "dest": [64, [8, 1]], "locations": [0, 1]},
                    ],
                }
                for r in (0, 1)
            },
        },
    }
    read = read_document(example)
    (entry,) = read
    assert entry.name is None
    layout = read.find("transformer.h.0.attn.c_attn.weight")
    assert layout is not None
    layout.validate()


@pytest.mark.parametrize("name", ["a.b", "a\\b", "x[0]+(1)", "é/ü", "a b-c", "^a$", "", "tab\there", "#1"])
def test_exact_keys_give_their_name_back(name: str) -> None:
    assert exact_name(pattern_of(name)) == name


@pytest.mark.parametrize("key", ["a.b", "^a.b$", "^a|b$", r"^\d$", "^a*$", "^(a)$", "$", "^", "^a\\$"])
def test_other_keys_are_patterns(key: str) -> None:
    assert exact_name(key) is None


def test_a_name_with_special_characters_is_not_a_pattern() -> None:
    read = read_document(write_document({"w.0+": MAPS["scalar"]}))
    assert read.find("w.0+") is not None
    assert read.find("wx00") is None


def test_a_legacy_pattern_matches_from_the_start_as_deepspeed_does() -> None:
    entry = MAPS["scalar"].to_dict()
    read = read_document({"version": 1, "params": {r"layers\.\d+\.w": entry}})
    assert read.find("layers.3.weight") is not None
    assert read.find("my.layers.3.w") is None


def test_two_keys_with_different_layouts_are_ambiguous() -> None:
    one, other = MAPS["scalar"].to_dict(), replicated_map((), 3).to_dict()
    read = read_document({"version": 1, "params": {"lay.*": one, "^layer$": other}})
    with pytest.raises(CheckpointFormatError, match="ambiguous") as caught:
        read.find("layer")
    assert caught.value.param == "layer"
    assert read_document({"version": 1, "params": {"lay.*": one, "^layer$": one}}).find("layer") is not None


def entry() -> dict[str, Any]:
    return contiguous_split_map((4, 6), [2, 2], 0).to_dict()


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    row = entry()
    at: Any = row
    for step in path[:-1]:
        at = at[step]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return row


PIECE = ["ranks", 1, "pieces", 0]
BROKEN = {
    "logical shape missing": (["logical_shape"], KeyError, CheckpointFormatError, "lacks logical_shape"),
    "ranks missing": (["ranks"], KeyError, CheckpointFormatError, "lacks ranks"),
    "unknown key": (["extra"], 1, CheckpointFormatError, "unknown keys 'extra'"),
    "ranks a list": (["ranks"], [], CheckpointFormatError, "ranks of type list"),
    "shape a string": (["logical_shape"], "46", CheckpointFormatError, "logical_shape '46' of type str"),
    "shape of floats": (["logical_shape"], [4.0, 6], CheckpointFormatError, "4.0 of type float"),
    "shape of bools": (["logical_shape"], [True, 6], CheckpointFormatError, "True of type bool"),
    "shape negative": (["logical_shape"], [-4, 6], CheckpointFormatError, "-4 in its logical_shape"),
    "shape too large": (["logical_shape"], [2**62, 6], InvalidMapError, "64 signed bits can count"),
    "shard shape missing": (["ranks", 1, "shard_shape"], KeyError, CheckpointFormatError, "rank 1, lacks shard_shape"),
    "shard shape negative": (["ranks", 1, "shard_shape"], [2, -6], CheckpointFormatError, "-6 in its shard_shape"),
    "pieces missing": (["ranks", 1, "pieces"], KeyError, CheckpointFormatError, "lacks pieces"),
    "pieces a mapping": (["ranks", 1, "pieces"], {}, CheckpointFormatError, "pieces of type dict"),
    "piece a list": (PIECE, [1], CheckpointFormatError, "piece 0 is a list"),
    "piece without dest": ([*PIECE, "dest"], KeyError, CheckpointFormatError, "lacks dest"),
    "piece with another key": ([*PIECE, "dtype"], "x", CheckpointFormatError, "unknown keys 'dtype'"),
    "source without strides": ([*PIECE, "source"], [0], CheckpointFormatError, r"expected \[offset, strides\]"),
    "source offset a string": ([*PIECE, "source"], ["0", [6, 1]], CheckpointFormatError, "'0' of type str"),
    "source offset negative": ([*PIECE, "source"], [-6, [6, 1]], CheckpointFormatError, "-6 in its source offset"),
    "negative stride": ([*PIECE, "source"], [0, [-6, 1]], CheckpointFormatError, "-6 in its source strides"),
    "strides of another length": ([*PIECE, "source"], [12, [1]], InvalidMapError, "1 source strides"),
    "dest strides of another length": ([*PIECE, "dest"], [0, [6, 1, 1]], InvalidMapError, "3 dest strides"),
    "stride zero": ([*PIECE, "dest"], [0, [0, 1]], InvalidMapError, "zero stride along 2"),
    "offset beyond 64 bits": ([*PIECE, "source"], [2**64, [6, 1]], InvalidMapError, "64 signed bits"),
    "locations a number": ([*PIECE, "locations"], 1, CheckpointFormatError, "locations 1 of type int"),
    "locations empty": ([*PIECE, "locations"], [], InvalidMapError, "name no rank"),
    "location twice": ([*PIECE, "locations"], [1, 1], CheckpointFormatError, "one of them twice"),
    "location a stranger": ([*PIECE, "locations"], [1, 9], InvalidMapError, r"\[9\], which are no ranks"),
    "location without itself": ([*PIECE, "locations"], [0], InvalidMapError, "without rank 1 itself"),
    "scale zero": ([*PIECE, "scale"], 0, InvalidMapError, "scale is zero"),
    "scale not a number": ([*PIECE, "scale"], float("nan"), InvalidMapError, "scale is nan"),
    "scale infinite": ([*PIECE, "scale"], float("inf"), InvalidMapError, "scale is inf"),
    "scale a string": ([*PIECE, "scale"], "2", CheckpointFormatError, "scale '2' of type str"),
    "scale a bool": ([*PIECE, "scale"], True, CheckpointFormatError, "scale True of type bool"),
    "outside F": ([*PIECE, "source"], [18, [6, 1]], InvalidMapError, "reaches element 29 of a parameter of 24"),
    "outside the shard": ([*PIECE, "dest"], [1, [6, 1]], InvalidMapError, "reaches address 12 of a shard of 12"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_departure_is_its_own_error(case: str) -> None:
    path, value, kind, text = BROKEN[case]
    row = changed(path, value)
    with pytest.raises(kind, match=text):
        ParamAffineMap.from_dict(row)
    with pytest.raises(kind, match=text) as caught:
        read_document({"version": 1, "params": {"^layer\\.w$": row}})
    assert all(fault.param == "layer.w" for fault in caught.value.faults)


@pytest.mark.parametrize("key", ["x", "01", "-1", "1.0", "", True, 1.0, None, -1, "٣"])
def test_a_rank_key_is_an_integer_or_its_text(key: Any) -> None:
    row = entry()
    row["ranks"][key] = row["ranks"].pop(1)
    with pytest.raises(CheckpointFormatError, match="rank key"):
        ParamAffineMap.from_dict(row)


def test_a_rank_named_twice_is_refused() -> None:
    row = entry()
    row["ranks"]["0"] = copy.deepcopy(row["ranks"][0])
    with pytest.raises(CheckpointFormatError, match="names rank 0 twice, as 0 and as '0'"):
        ParamAffineMap.from_dict(row)


def test_a_missing_rank_leaves_f_uncovered() -> None:
    row = entry()
    del row["ranks"][0]
    layout = ParamAffineMap.from_dict(row)
    with pytest.raises(InvalidMapError, match=r"No rank holds element \(0, 0\).*\[0:2, 0:6\]"):
        layout.validate()


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (None, "is a NoneType"),
        ([], "is a list"),
        ({"params": {}}, "no version"),
        ({"version": "1"}, "version '1'"),
        ({"version": True}, "version True"),
        ({"version": 0}, "version 0"),
        ({"version": 2, "params": {}}, "version 2, newer than 1"),
        ({"version": 1, "params": []}, "params are a list"),
        ({"version": 1, "params": {}, "^a$": {}}, "both params and keys beside it, such as '\\^a\\$'"),
        ({"version": 1, 3: {}}, "key 3"),
        ({"version": 1, "a(": {}}, "no pattern"),
    ],
)
def test_a_document_that_is_none_is_refused(document: Any, text: str) -> None:
    with pytest.raises(CheckpointFormatError, match=text):
        read_document(document)


def test_one_parameter_under_two_spellings_of_its_key_is_refused() -> None:
    row = entry()
    with pytest.raises(CheckpointFormatError, match="names a-b twice"):
        read_document({"version": 1, "params": {"^a\\-b$": row, "^a-b$": row}})


def test_all_faults_of_a_document_are_reported_together() -> None:
    rows = {f"^w{i}$": changed([*PIECE, "scale"], 0) for i in range(12)}
    with pytest.raises(AffineError, match="and 2 more") as caught:
        read_document({"version": 1, "params": rows})
    assert len(caught.value.faults) == 12


@pytest.mark.parametrize("digits", [20, 5000])
def test_a_rank_key_of_many_digits_is_refused_in_a_short_message(digits: int) -> None:
    entry = contiguous_split_map((4,), [2, 2], 0).to_dict()
    entry["ranks"]["9" * digits] = entry["ranks"].pop(1)
    with pytest.raises(CheckpointFormatError, match="rank key") as caught:
        ParamAffineMap.from_dict(entry)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("path", ["logical_shape", "shard_shape", "offset", "strides", "locations", "scale"])
def test_a_number_python_cannot_spell_out_is_refused(path: str) -> None:
    entry = contiguous_split_map((4,), [2, 2], 0).to_dict()
    piece = entry["ranks"][0]["pieces"][0]
    huge = 10**6000
    if path == "logical_shape":
        entry["logical_shape"] = [huge]
    elif path == "shard_shape":
        entry["ranks"][0]["shard_shape"] = [huge]
    elif path == "offset":
        piece["source"][0] = huge
    elif path == "strides":
        piece["source"][1] = [huge]
    elif path == "locations":
        piece["locations"] = [huge]
    else:
        piece["scale"] = huge
    with pytest.raises(AffineError, match=r"too long to show|64 signed bits") as caught:
        ParamAffineMap.from_dict(entry)
    assert len(caught.value.message) < 600
