"""Each key's image, precedence, contradictions, and what stock refuses but the shapes determine."""

import pickle
import re
from typing import ClassVar

import pytest
import torch
from lowering_reference import rebuild

from deepspeed_affine.errors import CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import contiguous_split_map, replicated_map, segmented_map, sub_param_map
from deepspeed_affine.lowering import Rule, StockRules, SubParamEntry, UcInfo, lower_param, unused_patterns

NEW, OLD = StockRules.for_version("0.19.8"), StockRules.for_version("0.19.4")
REPLICATED, AVERAGE = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
ROW, VOCAB = "parameter_with_row_parallelism_patterns", "vocabulary_parameter_patterns"
TWO, SUB = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params"


def sub(shape, dim=0, version=0.2, widths=None, pattern="w"):
    info = {
        "universal_checkpoint_version": version,
        SUB: [{"patterns": [pattern], "shape": shape, "partition_dim": dim}],
    }
    if widths is not None:
        info["sub_param_shard_widths"] = {pattern: widths}
    return info


@pytest.mark.parametrize(
    ("info", "shapes", "expected", "rule"),
    [
        ({}, [(3, 2), (2, 2)], contiguous_split_map((5, 2), (3, 2), 0), Rule.COLUMN_PARALLEL),
        ({}, [(3, 2), (0, 2)], contiguous_split_map((3, 2), (3, 0), 0), Rule.COLUMN_PARALLEL),
        ({ROW: ["w"]}, [(2, 3), (2, 1)], contiguous_split_map((2, 4), (3, 1), 1), Rule.ROW_PARALLEL),
        ({REPLICATED: ["w"]}, [(2, 3), (2, 3)], replicated_map((2, 3), 2), Rule.TP_REPLICATED),
        ({AVERAGE: ["w"]}, [(), ()], replicated_map((), 2), Rule.AVERAGE),
        ({TWO: ["w"]}, [(3, 2), (2, 2)], sub_param_map((5, 2), (3, 2), ((2, 1), (1, 1)), 0), Rule.TWO_SUB_PARAMS),
        (
            sub(((4, 2), 3), version=0.4, widths=[[3, 1], [0, 2]]),
            [(3, 3), (3, 3)],
            sub_param_map((6, 3), (4, 2), ((3, 1), (0, 2)), 0),
            Rule.SUB_PARAMS,
        ),
    ],
)
def test_a_key_lowers_to_the_canonical_form_of_its_image(info, shapes, expected, rule):
    lowered = lower_param(info, "w", shapes)
    assert lowered.map == expected.canonical()
    assert lowered.rule is rule
    assert lowered.average == (rule is Rule.AVERAGE)


def test_one_rank_holds_the_whole_whatever_the_branch():
    for info in ({}, {ROW: ["w"]}, {REPLICATED: ["w"]}):
        assert lower_param(info, "w", [(2, 3)]).map == replicated_map((2, 3), 1).canonical()


def test_a_scalar_of_one_rank_needs_no_key():
    lowered = lower_param({}, "w", [()])
    assert lowered.stored_shape == ()
    assert not lowered.says_split


def test_a_scalar_on_two_ranks_must_be_called_replicated():
    with pytest.raises(UnsupportedLayoutError, match=f"list it under {REPLICATED}"):
        lower_param({}, "w", [(), ()])


def test_a_row_parallel_vector_is_refused():
    with pytest.raises(UnsupportedLayoutError, match="axis 1, but tp rank 0 holds a tensor of 1 dimension"):
        lower_param({ROW: ["w"]}, "w", [(3,), (3,)])


@pytest.mark.parametrize(
    ("info", "shapes", "message"),
    [
        ({}, [(3, 2), (3, 4)], r"rank 0 has shape \(3, 2\) and rank 1 has \(3, 4\)"),
        ({ROW: ["w"]}, [(3, 2), (2, 2)], "they may differ along that axis only"),
        ({REPLICATED: ["w"]}, [(3, 2), (2, 2)], r"pattern 'w'\) says every tp rank holds the whole"),
        ({AVERAGE: ["w"]}, [(3,), (1,)], r"parameter_to_average_patterns \(pattern 'w'\)"),
        (sub(((4, 2), 3)), [(4, 3), (4, 3)], "shards hold 8 along axis 0"),
        (sub(((4, 2), -1)), [(4, 4), (4, 3)], "28 elements"),
        (sub((5, -1)), [(4, 3), (4, 3)], "counts 5 equal sub-parameters along axis 0, whose extent 8"),
        (sub(((4, 2), 3), version=0.4, widths=[[2, 2]]), [(3, 3)] * 2, "lists 1 sub-parameters.* lists 2"),
        (sub(((4, 2), 3), version=0.4, widths=[[2, 2], [1]]), [(3, 3)] * 2, "1 shard widths for 2 tp ranks"),
        (sub(((4, 2), 3), version=0.4, widths=[[2, 1], [1, 1]]), [(3, 3)] * 2, "sum to 3, its size is 4"),
        (sub(((4, 2), 3), version=0.4, widths=[[3, 1], [1, 1]]), [(3, 3)] * 2, r"describe \(4, 3\) \(12\)"),
    ],
)
def test_metadata_that_contradicts_the_shapes_says_how(info, shapes, message):
    with pytest.raises(InvalidMapError, match=message) as caught:
        lower_param(info, "w", shapes)
    assert caught.value.param == "w"


@pytest.mark.parametrize(
    ("info", "shapes", "message"),
    [
        ({}, [(3, 2), None], r"tp rank\(s\) \[1\]"),
        ({}, [], "0 shard shapes for 0 tp ranks"),
        ({VOCAB: ["w"]}, [(3, 2)], "original_vocab_size is missing"),
        (sub((3, 4), version=0.4, widths=[[1], [1], [1]]), [(3, 4)], "states a tuple of widths there"),
        (sub(((2, 1), 4), version=0.5), [(3, 4)], "sub_param_shard_widths has no entry"),
        ({ROW: ["w", "w.*"]}, [(3, 2)], "'w', 'w.*'"),
        ({VOCAB: ["w", "w.*"], "original_vocab_size": 2}, [(3, 2)], "'w', 'w.*'"),
    ],
)
def test_metadata_that_is_missing_or_ambiguous_is_named(info, shapes, message):
    with pytest.raises(CheckpointFormatError, match=message):
        lower_param(info, "w", shapes)


def test_lists_that_are_not_reached_are_not_asked():
    """DeepSpeed asks for row parallelism in its last branch only, so an ambiguity there is none before."""
    lowered = lower_param({REPLICATED: ["w"], ROW: ["w", "w.*"]}, "w", [(2, 2)] * 2)
    assert lowered.rule is Rule.TP_REPLICATED
    assert lowered.category.used == {"w"}


def test_the_number_of_ranks_is_checked():
    with pytest.raises(CheckpointFormatError, match="1 shard shapes for 2 tp ranks"):
        lower_param({}, "w", [(2, 2)], 2)


class TestVocabulary:
    INFO: ClassVar = {VOCAB: ["w"], "original_vocab_size": 5}

    def test_f_keeps_its_padding_and_the_file_does_not(self):
        lowered = lower_param(self.INFO, "w", [(3, 2), (3, 2)])
        assert lowered.map.logical_shape == (6, 2)
        assert (lowered.truncate_rows, lowered.stored_shape) == (5, (5, 2))
        assert "keeps 5 of 6" in lowered.notes[0]
        assert lowered.entries(NEW) == (("cat_dim", 0), ("vocab_tensor", True))

    def test_a_recorded_padded_height_must_be_the_shards_height(self):
        assert lower_param({**self.INFO, "padded_vocab_size": 6}, "w", [(3, 2), (3, 2)]).stored_shape == (5, 2)
        with pytest.raises(InvalidMapError, match="hold 6 vocabulary rows together, padded_vocab_size states 8"):
            lower_param({**self.INFO, "padded_vocab_size": 8}, "w", [(3, 2), (3, 2)])

    def test_a_vector_is_truncated_too(self):
        assert lower_param(self.INFO, "w", [(3,), (3,)]).stored_shape == (5,)

    def test_fewer_rows_than_the_vocabulary_are_all_kept_and_reported(self):
        lowered = lower_param(self.INFO, "w", [(2, 2), (2, 2)])
        assert lowered.stored_shape == (4, 2)
        assert "fewer than original_vocab_size 5" in lowered.notes[0]

    def test_a_scalar_vocabulary_is_refused(self):
        with pytest.raises(InvalidMapError, match="is a scalar"):
            lower_param({**self.INFO, REPLICATED: ["w"]}, "w", [()])


class TestLegacySubParams:
    def test_equal_sub_parameters_are_cut_equally_so_uneven_shards_determine_the_widths(self):
        lowered = lower_param(sub((3, -1)), "w", [(9, 4), (6, 4)])
        assert lowered.map == sub_param_map((15, 4), (5, 5, 5), ((3, 2),) * 3, 0).canonical()

    def test_the_count_is_along_the_view_and_not_the_stored_axis(self):
        lowered = lower_param(sub((2, 3, 4), 1), "w", [(12, 4), (6, 4)])
        view = sub_param_map((2, 9, 4), (3, 3, 3), ((2, 1),) * 3, 1)
        full = torch.arange(72.0).reshape(2, 9, 4)
        shards = {0: full[:, [0, 1, 3, 4, 6, 7]].reshape(12, 4), 1: full[:, [2, 5, 8]].reshape(6, 4)}
        assert lowered.map.logical_shape == view.logical_shape
        assert lowered.map.shard_shapes == {0: (12, 4), 1: (6, 4)}
        assert torch.equal(rebuild(lowered.map, shards), full)

    @pytest.mark.parametrize("placeholder", [-1, None])
    def test_a_placeholder_at_the_partition_axis_is_one_sub_parameter(self, placeholder):
        lowered = lower_param(sub((placeholder, 4)), "w", [(3, 4), (2, 4)])
        assert lowered.map == contiguous_split_map((5, 4), (3, 2), 0).canonical()

    @pytest.mark.parametrize(
        ("shape", "shapes"),
        [((3, -1), [(4, 4), (2, 4)]), (((4, 2), 3), [(4, 3), (2, 3)]), (((5, 3), 3), [(4, 3), (4, 3)])],
    )
    def test_a_cut_that_several_layouts_explain_is_refused(self, shape, shapes):
        with pytest.raises(UnsupportedLayoutError, match="several cuts fit"):
            lower_param(sub(shape), "w", shapes)

    def test_a_view_with_too_many_open_extents_is_refused(self):
        with pytest.raises(UnsupportedLayoutError, match="leaves 2 extents open"):
            lower_param(sub(((4, 2), -1, -1)), "w", [(6, 4)])

    def test_two_open_extents_are_those_of_a_parameter_of_the_same_rank(self):
        lowered = lower_param(sub(((4, 2), None, -1)), "w", [(3, 5, 7), (3, 5, 7)])
        assert lowered.map.logical_shape == (6, 5, 7)

    def test_recorded_widths_of_another_version_are_not_guessed_into_an_old_one(self):
        with pytest.raises(UnsupportedLayoutError, match="several cuts fit"):
            lower_param(sub(((4, 2), 3), version=0.3, widths=[[3, 1], [1, 1]]), "w", [(4, 3), (2, 3)])

    def test_the_written_shape_spells_a_count_out_where_the_installed_version_does(self):
        lowered = lower_param(sub([3, -1]), "w", [(6, 4), (6, 4)])
        assert lowered.entries(NEW) == (("sub_param_shape", SubParamEntry(["w"], ((4, 4, 4), -1), 0)),)
        assert lowered.entries(OLD) == (("sub_param_shape", SubParamEntry(["w"], [3, -1], 0)),)


class TestMaps:
    STORED = segmented_map((6, 2), [(4, False), (2, True)], 0, 2, [[3, 1]])

    def document(self, stored, *, draft=False, key="^w$"):
        entry = {key: stored.to_dict()}
        return {"affine_map": {"version": 1, **entry} if draft else {"version": 1, "params": entry}}

    def test_a_map_is_preferred_and_its_categories_count_as_used(self):
        info = UcInfo.parse(
            {
                **self.document(self.STORED),
                REPLICATED: ["w"],
                ROW: ["w", "w.*"],
                SUB: [{"patterns": ["^w$"], "shape": ((2, 2), 2), "partition_dim": 0}],
            }
        )
        lowered = lower_param(info, "w", [(5, 2), (3, 2)])
        assert (lowered.rule, lowered.pattern) == (Rule.AFFINE_MAP, "^w$")
        assert lowered.map == self.STORED.canonical()
        assert unused_patterns(info, [lowered]) == ()

    def test_the_entries_follow_what_the_installed_reader_saw(self):
        stored = contiguous_split_map((2, 6), (3, 3), 1)
        shapes = [(2, 3)] * 2
        nested = lower_param({**self.document(stored), ROW: ["w"]}, "w", shapes)
        draft = lower_param({**self.document(stored, draft=True), ROW: ["w"]}, "w", shapes)
        assert nested.entries(NEW) == ()
        assert nested.entries(OLD) == draft.entries(NEW) == draft.entries(OLD) == (("cat_dim", 1),)

    def test_a_map_supplies_the_shapes_that_no_file_records(self):
        lowered = lower_param(self.document(self.STORED), "w", [None, (3, 2)])
        assert lowered.map.shard_shapes[0] == (5, 2)

    def test_a_vocabulary_is_truncated_after_its_map(self):
        info = {**self.document(self.STORED), VOCAB: ["w"], "original_vocab_size": 5}
        lowered = lower_param(info, "w", [(5, 2), (3, 2)])
        assert (lowered.map.logical_shape, lowered.stored_shape) == ((6, 2), (5, 2))
        assert lowered.entries(NEW) == (("vocab_tensor", True),)

    def test_a_map_of_another_topology_or_shape_is_refused(self):
        with pytest.raises(InvalidMapError, match=r"describes ranks \[0, 1\], the checkpoint has 3"):
            lower_param(self.document(self.STORED), "w", [(5, 2), (3, 2), (3, 2)])
        with pytest.raises(InvalidMapError, match=r"tp rank 1: the shard has shape \(4, 2\) \(8 elements\)"):
            lower_param(self.document(self.STORED), "w", [(5, 2), (4, 2)])

    def test_a_stored_map_with_a_hole_is_refused_by_parameter(self):
        row = contiguous_split_map((4, 2), (2, 2), 0).to_dict()
        row["ranks"][1]["pieces"][0]["source"][0] = 0
        with pytest.raises(InvalidMapError, match=r"^Parameter w: ") as caught:
            lower_param({"affine_map": {"version": 1, "params": {"^w$": row}}}, "w", [(2, 2), (2, 2)])
        assert caught.value.param == "w"

    def test_two_map_patterns_for_one_parameter_must_say_the_same(self):
        entry, other = self.STORED.to_dict(), contiguous_split_map((6, 2), (5, 1), 0).to_dict()
        agreed = {"affine_map": {"version": 1, "params": {"w.?": entry, "w": entry}}}
        assert lower_param(agreed, "w", [(5, 2), (3, 2)]).pattern == "w.?"
        info = {"affine_map": {"version": 1, "params": {"w.?": entry, "w": other}}}
        with pytest.raises(CheckpointFormatError, match=re.escape("'w.?', 'w'")):
            lower_param(info, "w", [(5, 2), (3, 2)])

    def test_the_map_of_the_exact_name_wins_over_patterns(self):
        entry, other = self.STORED.to_dict(), contiguous_split_map((6, 2), (5, 1), 0).to_dict()
        info = {"affine_map": {"version": 1, "params": {"w": other, "^w$": entry, ".*": other}}}
        found = lower_param(info, "w", [(5, 2), (3, 2)])
        assert (found.pattern, found.map.canonical()) == ("^w$", self.STORED.canonical())

    def test_only_the_undescribed_among_the_unsupported_are_refused(self):
        info = {
            "autotp_unsupported_parameter_patterns": {"^w$": "interleaves", "^v$": "pre-divided"},
            **self.document(self.STORED),
        }
        assert lower_param(info, "w", [(5, 2), (3, 2)]).rule is Rule.AFFINE_MAP
        assert lower_param(info, "u", [(5, 2), (3, 2)]).rule is Rule.COLUMN_PARALLEL
        with pytest.raises(UnsupportedLayoutError, match=r"\(pre-divided\), and no affine_map describes it") as caught:
            lower_param(info, "v", [(5, 2), (3, 2)])
        assert caught.value.param == "v"


class TestIdenticalShards:
    def test_only_metadata_that_gives_ranks_different_parts_says_split(self):
        assert lower_param({}, "w", [(2, 2)] * 2).says_split
        assert not lower_param({}, "w", [(2, 2)]).says_split
        assert not lower_param({}, "w", [(2, 2), (0, 2)]).says_split
        assert not lower_param({REPLICATED: ["w"]}, "w", [(2, 2)] * 2).says_split
        assert not lower_param({AVERAGE: ["w"]}, "w", [(2, 2)] * 2).says_split
        partly = segmented_map((6, 2), [(4, False), (2, True)], 0, 2, [[2, 2]]).to_dict()
        assert lower_param({"affine_map": {"version": 1, "^w$": partly}}, "w", [(4, 2)] * 2).says_split

    def test_taken_as_replicas_they_are_written_as_a_replicated_parameter(self):
        taken = lower_param({ROW: ["w"]}, "w", [(2, 2)] * 2).as_replicated()
        assert taken.map == replicated_map((2, 2), 2).canonical()
        assert taken.entries(NEW) == ()
        assert not taken.says_split

    def test_shards_of_different_shapes_are_no_replicas(self):
        with pytest.raises(InvalidMapError, match="cannot be copies"):
            lower_param({}, "w", [(2, 2), (3, 2)]).as_replicated()


def test_unused_patterns_are_those_no_parameter_needed():
    info = UcInfo.parse(
        {
            REPLICATED: ["norm", "typo"],
            ROW: ["norm"],
            SUB: [{"patterns": ["qkv", "gone"], "shape": ((2, 2), 2), "partition_dim": 0}],
        }
    )
    lowered = [lower_param(info, "norm.weight", [(4,)] * 2), lower_param(info, "qkv.weight", [(2, 2)] * 2)]
    # "norm" was used as a replicated pattern; DeepSpeed keeps one set of strings for all lists.
    assert unused_patterns(info, lowered) == ("gone", "typo")


def test_what_was_lowered_survives_pickling():
    lowered = lower_param(sub((3, -1)), "w", [(6, 4), (6, 4)])
    assert pickle.loads(pickle.dumps(lowered)) == lowered


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("0.16.9", (False, False, False, False, False)),
        ("0.18.9", (False, False, False, False, False)),
        ("0.19.4", (False, False, False, True, False)),
        ("0.19.6", (False, True, True, True, False)),
        ("0.19.7", (True, True, True, True, False)),
        ("0.19.8+cpu", (True, True, True, True, True)),
        ("0.20.0", (True, True, True, True, True)),
    ],
)
def test_the_rules_of_each_version(version, flags):
    rules = StockRules.for_version(version)
    assert flags == (
        rules.reads_affine_map,
        rules.normalises_sub_param_shape,
        rules.reads_shard_widths,
        rules.per_rank_shapes,
        rules.skips_absent_states,
    )


def test_halves_of_a_parameter_without_elements_are_joined_as_deepspeed_joins_them():
    info = {"parameter_with_2_sub_params_cat_dim_0": ["x"]}
    assert lower_param(info, "x", [(4, 2, 0)]).map.logical_shape == (4, 2, 0)
    assert lower_param(info, "x", [(4, 0), (4, 0)]).map.logical_shape == (8, 0)


@pytest.mark.parametrize("shape", [("a", 2), (-1, 2), (2**63, 2), (1.5,)])
def test_a_recorded_shape_that_is_none_is_refused_with_the_parameter(shape):
    with pytest.raises(InvalidMapError, match="Parameter x: A recorded shard shape") as caught:
        lower_param({}, "x", [shape])
    assert caught.value.param == "x"


class TestExactKeys:
    """A key that is the name itself decides before any pattern, whatever list it is in."""

    @pytest.mark.parametrize(
        ("key", "rule"),
        [
            (REPLICATED, Rule.TP_REPLICATED),
            ("parameter_to_average_patterns", Rule.AVERAGE),
            ("parameter_with_2_sub_params_cat_dim_0", Rule.TWO_SUB_PARAMS),
            ("parameter_with_row_parallelism_patterns", Rule.ROW_PARALLEL),
        ],
    )
    def test_in_each_list_over_patterns_of_every_list(self, key, rule):
        lists = [
            REPLICATED,
            "parameter_to_average_patterns",
            "parameter_with_2_sub_params_cat_dim_0",
            "parameter_with_row_parallelism_patterns",
        ]
        info = {name: ["w", "w.*"] for name in lists} | {key: ["w", r"^w\.a$", "w.*"]}
        found = lower_param(info, "w.a", [(4, 4)] * 2)
        assert (found.rule, found.pattern) == (rule, r"^w\.a$")
        assert found.category.contradicted_by == ()
        assert found.category.used == {"w", r"^w\.a$", "w.*"}
        with pytest.raises(CheckpointFormatError, match=r"w\.b.*'w', 'w\.\*'"):
            lower_param(info, "w.b", [(4, 4)] * 2)

    def test_two_exact_keys_of_different_lists_are_noticed(self):
        info = {REPLICATED: ["^w$"], "parameter_with_row_parallelism_patterns": ["^w$"]}
        found = lower_param(info, "w", [(4, 4)] * 2)
        assert found.rule is Rule.TP_REPLICATED
        assert found.category.contradicted_by == ("parameter_with_row_parallelism_patterns",)
