"""What is collected: DeepSpeed's own info with every parameter's map, safe with converters that read none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import affine
from deepspeed.checkpoint.constants import AFFINE_MAP, AFFINE_MAP_PARAMS
from deepspeed.module_inject import layers
from live_layers import CASES, answered, built, collected, cut, full_tensors, merges, model_of, told_shapes

import deepspeed_affine
from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.hooks.layouts import live_params
from deepspeed_affine.ir import pattern_of, read_document, replicated_map
from deepspeed_affine.lowering import UcInfo, lower_param, unused_patterns

SMALL = [
    (name, case.degrees[-1] if case.map_only else case.degrees[1]) for name, case in CASES.items() if case.degrees[1:]
]
IDS = [f"{name}-{degree}" for name, degree in SMALL]


def is_conv(name):
    return CASES[name].kind.startswith("TensorParallel")


@pytest.mark.parametrize(("name", "degree"), SMALL, ids=IDS)
def test_deepspeeds_own_entries_stand_beside_a_map_of_every_parameter(name, degree):
    models = built(name, degree)
    info = collected(models)
    own = layers.collect_autotp_universal_checkpoint_info(models[0])
    document = read_document(info[AFFINE_MAP])
    assert document.spelling == ("draft" if is_conv(name) else "params")
    assert [entry.name for entry in document] == sorted(dict(models[0].named_parameters()))
    assert info["universal_checkpoint_version"] == 0.5
    assert info.get("autotp_unsupported_parameter_patterns") == {}
    if CASES[name].map_only or CASES[name].probed:
        return
    changed = {key for key in {*own, *info} if own.get(key) != info.get(key)}
    assert changed - {AFFINE_MAP} == {"universal_checkpoint_version"}
    for pattern, entry in own[AFFINE_MAP][AFFINE_MAP_PARAMS].items():
        theirs = deepspeed_affine.ParamAffineMap.from_dict(entry).canonical()
        assert deepspeed_affine.ParamAffineMap.from_dict(info[AFFINE_MAP]["params"][pattern]) == theirs


@pytest.mark.parametrize(("name", "degree"), SMALL, ids=IDS)
def test_deepspeeds_reader_of_maps_and_ours_rebuild_f(name, degree):
    """As stored and as JSON; DeepSpeed's does not read JSON's text keys and needs none."""
    models, full = built(name, degree), full_tensors(name)
    info = collected(models)
    ours = UcInfo.parse({**info, AFFINE_MAP: json.loads(json.dumps(info[AFFINE_MAP]))})
    rows = info[AFFINE_MAP].get("params", info[AFFINE_MAP])
    for each, expected in full.items():
        shards = {rank: dict(model.named_parameters())[each].detach() for rank, model in enumerate(models)}
        lowered = lower_param(ours, each, [tuple(shard.shape) for shard in shards.values()])
        assert torch.equal(lowered.map.rebuild(shards).reshape(expected.shape), expected)
        theirs = affine.ParamAffineMap.from_dict(rows[pattern_of(each)])
        rebuilt = theirs.rebuild({rank: shard.flatten() for rank, shard in shards.items()})
        # DeepSpeed divides by the rounded third.
        same = torch.allclose if name == "conv_inputs" else torch.equal
        assert same(rebuilt.reshape(expected.shape), expected)
        for rank, shard in shards.items():
            assert same(theirs.extract(expected, rank).flatten(), shard.flatten())
    params = [lower_param(ours, each, [None] * degree) for each in full]
    assert unused_patterns(ours, params) == ()


@pytest.mark.parametrize(("name", "degree"), SMALL, ids=IDS)
def test_a_converter_gives_f_or_stops_and_never_merges_wrongly(name, degree, tmp_path):
    """With the map the installed DeepSpeed's own merge gives F; without it, as converters of before 0.19.7 see the
    info, it gives F where pattern lists can say so and stops where only a map can."""
    for each, found in merges(name, degree, tmp_path).items():
        bare = each.endswith("!") or is_conv(name)
        only_a_map = CASES[name].map_only or (name == "conv_inputs" and "bias" in each)
        if bare and only_a_map and "norm" not in each:
            assert found.startswith(("AssertionError", "IndexError")), each
        else:
            assert found == "F", each


def test_collecting_changes_nothing_of_deepspeed_and_nothing_of_the_model():
    models = built("bigcode", 2)
    before = everything(models[0])
    with told_shapes(models), answered(2, 0):
        inside = everything(models[0])
        deepspeed_affine.collect_autotp_universal_checkpoint_info(models[0])
        assert everything(models[0]) == inside
    assert everything(models[0]) == before


def everything(model):
    """The identity of every attribute of every DeepSpeed module and class, and of the model's parameters."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "deepspeed":
            for key, value in list(vars(module).items()):
                found[name, key] = id(value)
                if isinstance(value, type) and value.__module__.startswith("deepspeed"):
                    found.update({(name, key, inner): id(each) for inner, each in vars(value).items()})
    for name, param in model.named_parameters():
        found.update({(name, key): id(value) for key, value in vars(param).items()})
    return found


def test_deepspeeds_lists_are_corrected_where_only_a_map_describes_the_layout():
    """0.19.8 lists Yuan's output projection as row-parallel, and GPTBigCode's fused weight nowhere."""
    info = collected(built("shared_output", 2))
    assert info["parameter_with_row_parallelism_patterns"] == []
    assert r"^block\.weight$" in info["tp_replicated_parameter_patterns"]
    assert r"^block\.weight$" in collected(built("bigcode", 2))["tp_replicated_parameter_patterns"]


def test_a_scaled_vector_stops_an_old_converter_although_its_ranks_hold_equal_bytes():
    info = collected(built("conv_inputs", 2))
    assert info["parameter_with_row_parallelism_patterns"] == [r"^block\.conv\.bias$", r"^block\.conv\.weight$"]
    assert info["universal_checkpoint_version"] == 0.5
    assert info["tp_replicated_parameter_patterns"] == [r"^norm\.bias$", r"^norm\.weight$"]


def test_a_vocabulary_of_another_height_keeps_its_rows():
    """DeepSpeed takes a name with 'embed' in it for a vocabulary, and the first such height for all."""
    with answered(2, 0):
        model = torch.nn.Module()
        model.embed_head = layers.LinearLayer(torch.nn.Linear(4, 6, bias=False), object(), name="a")
        model.patch_embed = layers.LinearLayer(torch.nn.Linear(4, 10, bias=False), object(), name="b")
        info = deepspeed_affine.collect_autotp_universal_checkpoint_info(model)
    assert info["original_vocab_size"] == 6
    assert info["vocabulary_parameter_patterns"] == [r"^embed_head\.weight$"]
    lowered = lower_param({**info, AFFINE_MAP: None}, "patch_embed.weight", [(5, 4), (5, 4)])
    assert lowered.stored_shape == (10, 4)


class Shuffled(layers.LinearLayer):
    """A partition that is no view of the parameter."""

    def _tp_partition(self, params_list):
        for param in params_list:
            if param is not None:
                param.data = param.data.split(self._partition_sizes, 0)[self.tp_index].cumsum(0)


def test_what_no_map_can_describe_is_listed_with_the_reason_and_nowhere_else():
    with answered(2, 0):
        layer = Shuffled(torch.nn.Linear(4, 6), object(), name="embed")
        model = model_of(layer, "embed")
        info = deepspeed_affine.collect_autotp_universal_checkpoint_info(model)
        with pytest.raises(UnsupportedLayoutError, match="mixing"):
            live_params(model)
    reasons = info["autotp_unsupported_parameter_patterns"]
    assert list(reasons) == [r"^embed\.bias$", r"^embed\.weight$"]
    assert "mixing" in reasons[r"^embed\.weight$"]
    assert info["vocabulary_parameter_patterns"] == []
    assert list(info[AFFINE_MAP]["params"]) == [r"^norm\.bias$", r"^norm\.weight$"]


def test_a_tied_parameter_is_listed_under_the_name_that_is_stored():
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(12, 4)
    model.lm_head = torch.nn.Linear(4, 12, bias=False)
    model.lm_head.weight = model.embed.weight
    with answered(2, 0):
        model.lm_head = layers.LinearLayer(model.lm_head, object(), name="lm_head")
        info = deepspeed_affine.collect_autotp_universal_checkpoint_info(model)
    assert info["vocabulary_parameter_patterns"] == [r"^embed\.weight$"]
    assert list(info[AFFINE_MAP]["params"]) == [r"^embed\.weight$"]


class Unit:
    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_rank(self):
        return 1

    def get_model_parallel_group(self):
        return None


BY_HAND = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r".*dense\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\..*"],
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "original_vocab_size": 13,
    "iteration": 7,
}


def hand_cut():
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(7, 4)
    model.dense = torch.nn.Linear(3, 4, bias=False)
    model.swiglu = torch.nn.Linear(4, 6, bias=False)
    model.norm = torch.nn.LayerNorm(4)
    return model


def test_a_users_own_info_is_kept_and_the_map_beside_it_has_the_drafts_spelling():
    """DeepSpeed 0.19.8 does not see that spelling, and so writes the axis its loader needs."""
    given = {**BY_HAND, "parameter_with_2_sub_params_cat_dim_0": [r"swiglu\.weight"]}
    kept = json.loads(json.dumps(given))
    info = deepspeed_affine.collect_autotp_universal_checkpoint_info(hand_cut(), info=given, mpu=Unit())
    assert given == kept
    document = read_document(info.pop(AFFINE_MAP))
    assert document.spelling == "draft"
    assert {entry.name: entry.layout.logical_shape for entry in document} == {
        "embed.weight": (14, 4),
        "dense.weight": (4, 6),
        "swiglu.weight": (12, 4),
        "norm.weight": (4,),
        "norm.bias": (4,),
    }
    assert info == {
        **given,
        "universal_checkpoint_version": 0.5,
        "padded_vocab_size": 14,
        "parameter_with_sub_params": [],
    }


@pytest.mark.parametrize(
    ("rule", "widths", "version"),
    [
        ({"patterns": [r"swiglu\.weight"], "shape": [[6, 6], 4], "partition_dim": 0}, None, 0.2),
        ({"patterns": [r"swiglu\.weight"], "shape": [2, 4], "partition_dim": 0}, None, 0.2),
        (
            {"patterns": [r"swiglu\.weight"], "shape": [[6, 6], 4], "partition_dim": 0},
            {r"swiglu\.weight": [[3, 3], [3, 3]]},
            0.5,
        ),
    ],
)
def test_the_old_version_stays_where_widths_are_not_known(rule, widths, version):
    """Version 0.4 made DeepSpeed require them."""
    given = {**BY_HAND, "parameter_with_sub_params": [rule]}
    if widths is not None:
        given["sub_param_shard_widths"] = widths
    info = deepspeed_affine.collect_autotp_universal_checkpoint_info(hand_cut(), info=given, mpu=Unit())
    assert info["universal_checkpoint_version"] == version
    assert info["parameter_with_sub_params"] == [rule]
    bare = {key: value for key, value in info.items() if key != AFFINE_MAP}
    assert (
        lower_param(bare, "swiglu.weight", [(6, 4), (6, 4)]).map
        == lower_param(info, "swiglu.weight", [(6, 4), (6, 4)]).map
    )


def test_a_plain_model_is_held_whole_by_its_one_rank():
    info = deepspeed_affine.collect_autotp_universal_checkpoint_info(hand_cut())
    document = read_document(info[AFFINE_MAP])
    assert document.spelling == "draft"
    assert all(entry.layout == replicated_map(entry.layout.logical_shape, 1).canonical() for entry in document)
    assert len(info["tp_replicated_parameter_patterns"]) == len(document) == 5


def test_a_model_of_llama_70bs_shape_stays_within_the_drafts_bytes_and_allocates_nothing():
    sys.path.insert(0, str(Path(deepspeed_affine.__file__).parents[1] / "benchmarks"))
    try:
        import collect as benchmark
    finally:
        sys.path.pop(0)
    row = benchmark.measure(8, 3, 80)
    assert (row["tensors"], row["allocated"], row["version"]) == (723, 0, 0.5)
    assert row["bytes"] < benchmark.LIMIT_BYTES
    assert row["pickled"] * 5 < row["bytes"]


def test_collecting_again_gives_the_same():
    models = built("sub_uneven", 2)
    first = collected(models)
    models[0].universal_checkpoint_info = first
    assert collected(models) == first
    assert cut("column", 2, 0).weight.shape == (8, 6)


@pytest.mark.parametrize("name", ["sub_count", "bigcode", "shared_output_odd", "lm_head", "row"])
def test_an_info_collected_before_changes_nothing(name):
    """As an engine's own attribute is handed on when it is attached: from DeepSpeed's, or from this function."""
    models = built(name, 2)
    expected = collected(models)
    for before in (layers.collect_autotp_universal_checkpoint_info(models[0]), expected):
        assert collected(models, info=before) == expected


def test_a_layer_that_cannot_be_described_is_taken_at_its_users_word():
    with answered(2, 0):
        model = model_of(Shuffled(torch.nn.Linear(4, 6), object(), name="up"))
        own = layers.collect_autotp_universal_checkpoint_info(model)
        by_hand = deepspeed_affine.contiguous_split_map((6, 4), (3, 3), 0)
        swapped = deepspeed_affine.block_gather_map((6, 4), {0: [1], 1: [0]}, 3, 0)
        for given, taken in ((by_hand, False), (swapped, True)):
            info = {**own, AFFINE_MAP: {"version": 1, "params": {r"^block\.weight$": given.to_dict()}}}
            found = deepspeed_affine.collect_autotp_universal_checkpoint_info(model, info=info)
            # DeepSpeed says the first of the layer too, which inherits that description from another class.
            assert (r"^block\.weight$" in found[AFFINE_MAP]["params"]) is taken
            assert (r"^block\.weight$" in found["autotp_unsupported_parameter_patterns"]) is not taken
