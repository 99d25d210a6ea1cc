"""Malformed metadata is refused by key; what is merely unusual is read."""

import subprocess
import sys

import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.ir import contiguous_split_map
from deepspeed_affine.lowering import UcInfo, keys
from deepspeed_affine.storage.pt_reader import load_pickle


def test_an_empty_dictionary_describes_plain_concatenation():
    info = UcInfo.parse({})
    assert info.version == 0.0
    assert not info.category_patterns()
    assert info.affine_map("w") is None


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ([], "universal_checkpoint_info is a list"),
        ({"universal_checkpoint_version": "new"}, "universal_checkpoint_version is 'new'"),
        ({"universal_checkpoint_version": True}, "universal_checkpoint_version is True"),
        ({"tp_replicated_parameter_patterns": "w"}, "tp_replicated_parameter_patterns is 'w'"),
        ({"vocabulary_parameter_patterns": 3}, "vocabulary_parameter_patterns is 3"),
        ({"parameter_with_row_parallelism_patterns": ["("]}, r"parameter_with_row_parallelism_patterns holds.*'\('"),
        ({"original_vocab_size": -1}, "original_vocab_size is -1"),
        ({"padded_vocab_size": 1.5}, "padded_vocab_size is 1.5"),
        ({"parameter_with_sub_params": {}}, "parameter_with_sub_params is {}"),
        ({"parameter_with_sub_params": [{"patterns": ["w"], "shape": (3, 4)}]}, "no 'partition_dim'"),
        (
            {"parameter_with_sub_params": [{"patterns": "w", "shape": (3, 4), "partition_dim": 0}]},
            "patterns 'w'; expected a list",
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": (3, 4), "partition_dim": 2}]},
            "partition_dim 2; expected an axis",
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": ("x", 4), "partition_dim": 0}]},
            "entry 'x' is no extent",
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": ((), 4), "partition_dim": 0}]},
            r"entry \(\) is no extent",
        ),
        ({"sub_param_shard_widths": []}, r"sub_param_shard_widths is \[\]"),
        ({"sub_param_shard_widths": {"w": [4, 4]}}, "sub_param_shard_widths of 'w'"),
        ({"sub_param_shard_widths": {"w": [[4, -4]]}}, "sub_param_shard_widths of 'w'"),
        ({"autotp_unsupported_parameter_patterns": 1}, "autotp_unsupported_parameter_patterns is 1"),
        ({"autotp_unsupported_parameter_patterns": {1: "x"}}, "holds the key 1"),
    ],
)
def test_a_malformed_entry_is_named(info, message):
    with pytest.raises(CheckpointFormatError, match=message):
        UcInfo.parse(info)


def test_none_stands_for_an_absent_entry():
    info = UcInfo.parse(
        dict.fromkeys(
            (
                "universal_checkpoint_version",
                "tp_replicated_parameter_patterns",
                "parameter_with_sub_params",
                "sub_param_shard_widths",
                "autotp_unsupported_parameter_patterns",
                "original_vocab_size",
                "affine_map",
            )
        )
    )
    assert info == UcInfo.parse({})


def test_a_sub_param_rule_is_read_from_an_object_as_from_a_dictionary(tmp_path):
    """Training scripts store DeepSpeed's own class too, which arrives as an inert stand-in."""
    fields = {"patterns": ["w"], "shape": [(4, 2), -1], "partition_dim": 0}
    torch.save({"parameter_with_sub_params": [SubparamShape(**fields)]}, tmp_path / "info.pt")
    stored = load_pickle(tmp_path / "info.pt").root
    assert not isinstance(stored["parameter_with_sub_params"][0], SubparamShape)
    from_dict = UcInfo.parse({"parameter_with_sub_params": [fields]}).sub_params[0]
    assert UcInfo.parse(stored).sub_params[0] == from_dict
    assert from_dict.shape == ((4, 2), None)
    assert from_dict.stored_shape is fields["shape"]


def test_pipeline_copies_are_skipped_after_the_first_stage_only():
    info = UcInfo.parse({"pipeline_replicated_parameter_patterns": [r"tied\.", "exact"]})
    assert not info.skipped_on_stage("tied.embed.weight", 0)
    assert info.skipped_on_stage("tied.embed.weight", 1)
    assert info.skipped_on_stage("exact.more", 3)
    assert not info.skipped_on_stage("layer.tied.weight", 1)


def test_expert_patterns_are_searched_because_one_writer_does_not_anchor_them():
    name = "model.layers.0.mlp.experts.w1"
    for pattern in (r"\.experts\.w[123]$", r".*\.experts\.w[123]$"):
        info = UcInfo.parse({"expert_parameter_patterns": [pattern]})
        assert info.is_expert(name)
        assert not info.is_expert(name + ".bias")


def test_both_spellings_of_the_map_document_are_read_and_told_apart():
    entry = contiguous_split_map((4, 2), (1, 3), 0).to_dict()
    nested = UcInfo.parse({"affine_map": {"version": 1, "params": {"^w$": entry}}})
    draft = UcInfo.parse({"affine_map": {"version": 1, "^w$": entry}})
    assert nested.affine_map("w") == draft.affine_map("w") == ("^w$", contiguous_split_map((4, 2), (1, 3), 0))
    assert (nested.maps_under_params, draft.maps_under_params) == (True, False)
    assert nested.affine_map("w2") is None


def test_a_map_document_of_a_newer_version_is_refused():
    with pytest.raises(CheckpointFormatError, match="99"):
        UcInfo.parse({"affine_map": {"version": 99, "params": {}}})


def test_reading_metadata_imports_neither_torch_nor_numpy():
    code = (
        "import sys\n"
        "from deepspeed_affine.lowering import lower_layer_meta, lower_param\n"
        "lower_param({}, 'w', [(2, 3), (2, 3)])\n"
        "lower_layer_meta({'replicated': True}, 2, (4,))\n"
        "print([name for name in ('torch', 'numpy', 'deepspeed') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("stored", "read"), [("0.4", 0.4), (1, 1.0), (None, 0.0), (0.2, 0.2)])
def test_the_version_may_be_a_number_or_its_text(stored, read):
    assert UcInfo.parse({keys.VERSION: stored}).version == read


@pytest.mark.parametrize("stored", ["new", float("nan"), True, [0.4], pytest.param(10**6000, id="huge")])
def test_a_version_that_is_no_number_is_refused(stored):
    with pytest.raises(CheckpointFormatError, match="expected a number"):
        UcInfo.parse({keys.VERSION: stored})


HUGE = 10**6000
UNUSABLE = [
    (keys.TP_REPLICATED, {1, "x"}),
    (keys.TP_REPLICATED, HUGE),
    (keys.ORIGINAL_VOCAB, HUGE),
    (keys.ROW_PARALLEL, ["a{99999999999}"]),
    (keys.ROW_PARALLEL, ["(" * 5000]),
    (keys.SHARD_WIDTHS, {"x": [[HUGE]]}),
    (keys.SUB_PARAMS, [{"patterns": ["x"], "shape": (HUGE, 4), "partition_dim": 0}]),
    (keys.AFFINE_MAP, {"version": 1, "params": {"a{99999999999}": {}}}),
]


@pytest.mark.parametrize("case", range(len(UNUSABLE)))
def test_what_no_python_call_can_take_is_refused_by_its_key(case):
    key, value = UNUSABLE[case]
    with pytest.raises(CheckpointFormatError, match=r"expected|not a regular|no pattern") as caught:
        UcInfo.parse({key: value})
    assert len(caught.value.message) < 700
