"""Every layer's map is what its class does to a parameter, byte for byte, whichever way the map was found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from deepspeed.module_inject import layers
from live_layers import CASES, GRID, answered, built, check, cut, full_tensors, model_of, source_module, told_shapes

from deepspeed_affine.errors import AffineError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.hooks import thin
from deepspeed_affine.hooks.layouts import live_params
from deepspeed_affine.hooks.versions import metadata_attribute
from deepspeed_affine.ir import replicated_map

IDS = [f"{name}-{degree}" for name, degree in GRID]
FORGETTING = [(name, degree) for name, degree in GRID if "view" not in name and degree in (2, 3)]


def blocks(params):
    return [param for name, param in params.items() if not name.startswith("norm.")]


@pytest.mark.parametrize(("name", "degree"), GRID, ids=IDS)
def test_the_map_gives_every_rank_the_bytes_it_holds(name, degree):
    found = check(name, degree)[0]
    # DeepSpeed describes CodeGen's permutation from two ranks on.
    expected = "probe" if CASES[name].probed or (name, degree) == ("codegen", 1) else "metadata"
    assert {param.source for param in blocks(found)} == {expected}
    assert found["norm.weight"].source == "untouched"
    assert found["norm.weight"].layout == replicated_map((4,), degree).canonical()


@pytest.mark.parametrize(("name", "degree"), FORGETTING, ids=[f"{name}-{degree}" for name, degree in FORGETTING])
def test_without_metadata_the_partition_function_says_the_same(name, degree, monkeypatch):
    stated = check(name, degree)[0]
    monkeypatch.setattr("deepspeed_affine.hooks.layouts.layer_metadata", lambda param: None)
    probed = check(name, degree)[0]
    assert {param.source for param in blocks(probed)} == {"probe"}
    assert {each: param.layout for each, param in probed.items()} == {
        each: param.layout for each, param in stated.items()
    }


@pytest.mark.parametrize(
    ("name", "degree"),
    [("column_uneven", 3), ("row_uneven", 2), ("bigcode", 4), ("codegen", 2), ("shared_value_odd", 2), ("glm", 3)],
)
def test_what_a_layer_was_cut_from_is_found_from_the_shards_alone(name, degree, monkeypatch):
    """As on versions whose layers do not remember the shape of F."""
    expected = check(name, degree)[0]
    monkeypatch.setattr("deepspeed_affine.hooks.layouts.layer_metadata", lambda param: None)
    models = built(name, degree)
    for model in models:
        vars(model.block).pop("_orig_weight_shape")
        vars(model.block).pop("_orig_bias_shape", None)
    with told_shapes(models), answered(degree, 1):
        found = live_params(models[1])
    assert {each: param.layout for each, param in found.items()} == {
        each: param.layout for each, param in expected.items()
    }


@pytest.mark.parametrize(("name", "degree"), [("phi3", 8), ("bigcode", 4), ("codegen", 4), ("row_uneven", 3)])
def test_a_matrix_probed_thin_has_the_map_of_the_whole(name, degree, monkeypatch):
    """phi3's function computes head sizes from the other axis, which a thin matrix does not have."""
    monkeypatch.setattr("deepspeed_affine.hooks.layouts.layer_metadata", lambda param: None)
    whole = check(name, degree)[0]
    monkeypatch.setattr(thin, "THIN_FROM", 1)
    assert check(name, degree)[0] == whole


def test_a_head_on_two_ranks_is_a_replicated_piece():
    layout = check("shared_value_odd", 2)[0]["block.weight"].layout
    assert {piece.locations for _, piece in layout.pieces()} == {
        frozenset({0}),
        frozenset({1}),
        frozenset({0, 1}),
    }


def test_a_bias_that_is_divided_by_the_ranks_is_scaled():
    for degree in (2, 3, 4):
        layout = check("conv_inputs", degree)[0]["block.conv.bias"].layout
        assert {piece.scale for _, piece in layout.pieces()} == {1.0 / degree}


class RepairedYuan(layers.Yuan_LinearAllreduce):
    """Yuan's output projection with a bias: DeepSpeed's own function computes it and then fails to wrap it."""

    def _tp_partition(self, params_list):
        bias = params_list[1]
        super()._tp_partition([params_list[0], None])
        if bias is not None:
            params_list[1].data = (bias / float(self.tp_world_size)).detach()


@pytest.mark.parametrize("degree", [2, 4])
def test_the_bias_of_yuans_output_projection_is_scaled(degree, monkeypatch):
    expected = check("shared_output", degree)[0]["block.weight"].layout
    monkeypatch.setattr(layers, "Yuan_LinearAllreduce", RepairedYuan)
    monkeypatch.setitem(CASES, "repaired", replace(CASES["shared_output"], bias=True))
    found = check("repaired", degree)[0]
    assert found["block.weight"].layout == expected
    assert found["block.bias"].layout == replicated_map((8,), degree, 1.0 / degree).canonical()


def test_where_deepspeeds_own_function_cannot_be_asked_its_bias_is_described_all_the_same():
    layer = cut("shared_output", 4, 1)
    layer.bias = torch.nn.Parameter(torch.ones(8) / 4)
    layer._mark_uc_metadata()
    with answered(4, 1):
        found = live_params(model_of(layer))
    assert found["block.bias"].layout == replicated_map((8,), 4, 0.25).canonical()
    assert found["block.bias"].source == "probe"


@pytest.mark.parametrize("name", ["column_uneven", "codegen", "shared_value_odd", "conv_inputs", "qwen", "conv_row"])
def test_nothing_of_the_model_and_no_random_number_is_touched(name):
    model = model_of(cut(name, 2, 1))
    before = {each: param.detach().clone() for each, param in model.named_parameters()}
    places = {each: param.data_ptr() for each, param in model.named_parameters()}
    attributes = seen(model)
    models = built(name, 2)
    drawn = torch.get_rng_state()
    with told_shapes(models), answered(2, 1):
        live_params(model)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert {each: param.data_ptr() for each, param in model.named_parameters()} == places
    assert all(torch.equal(param, before[each]) for each, param in model.named_parameters())
    assert seen(model) == attributes


def seen(model):
    """Every attribute of every module and parameter, by identity."""
    return [{key: id(value) for key, value in vars(each).items()} for each in [*model.modules(), *model.parameters()]]


@pytest.mark.parametrize("name", ["column_heads", "row_uneven", "bigcode", "shared_value_odd", "conv_column"])
def test_parameters_without_data_are_described_alike(name):
    """On the meta device, and partitioned by ZeRO-3, which leaves an empty tensor and the shape."""
    degree = CASES[name].degrees[-1]
    expected = {each: param.layout for each, param in check(name, degree)[0].items()}
    for strip in (to_meta, partition_as_zero3_does):
        models = built(name, degree)
        shapes = told_shapes(models)
        with shapes, answered(degree, 0):
            strip(models[0])
            found = live_params(models[0])
        assert {each: param.layout for each, param in found.items()} == expected


def to_meta(model):
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(param.detach().to("meta")))
            vars(getattr(module, name)).update(vars(param))


def partition_as_zero3_does(model):
    for param in model.parameters():
        param.ds_shape = param.shape
        param.data = torch.empty(0)


def test_a_layer_that_was_not_cut_as_its_class_does_it_is_refused_by_name():
    whole = layers.LinearLayer(source_module(CASES["column"]), None, name="up")
    with answered(2, 0):
        skipped = layers.LinearLayer(source_module(CASES["column"]), object(), skip_partition=True, name="up")
    assert {param.source for param in blocks(live_params(model_of(whole)))} == {"untouched"}
    with pytest.raises(InvalidMapError, match=r"block\.weight.*holds \(16, 6\).*says \(8, 6\)") as raised:
        live_params(model_of(skipped))
    assert [fault.param for fault in raised.value.faults] == ["block.weight", "block.bias"]


def test_a_partition_function_that_fails_is_refused_with_what_it_said():
    class Failing(layers.LinearLayer):
        def _tp_partition(self, params_list):
            if self.weight.shape == (16, 6):
                return super()._tp_partition(params_list)
            raise KeyError("no such thing")

    with answered(2, 0):
        layer = Failing(source_module(CASES["column"]), object(), name="up")
        layer._orig_weight_shape = (18, 6)
        with pytest.raises(UnsupportedLayoutError, match=r"block\.weight \(Failing\).*KeyError: 'no such thing'"):
            live_params(model_of(layer))


class Unit:
    """A model-parallel unit as Megatron has it."""

    def __init__(self, degree, rank):
        self.degree, self.rank = degree, rank

    def get_model_parallel_world_size(self):
        return self.degree

    def get_model_parallel_rank(self):
        return self.rank

    def get_model_parallel_group(self):
        return None


INFO = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r".*dense\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\..*"],
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "original_vocab_size": 13,
}


def hand_cut():
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(7, 4)
    model.dense = torch.nn.Linear(3, 4, bias=False)
    model.up = torch.nn.Linear(4, 5)
    model.norm = torch.nn.LayerNorm(4)
    return model


def test_a_model_cut_by_hand_is_described_by_its_users_patterns():
    found = live_params(hand_cut(), info=INFO, mpu=Unit(2, 1))
    assert {name: (param.layout.logical_shape, param.source, param.rank) for name, param in found.items()} == {
        "embed.weight": ((14, 4), "patterns", 1),
        "dense.weight": ((4, 6), "patterns", 1),
        "up.weight": ((10, 4), "patterns", 1),
        "up.bias": ((10,), "patterns", 1),
        "norm.weight": ((4,), "patterns", 1),
        "norm.bias": ((4,), "patterns", 1),
    }
    alone = live_params(hand_cut(), mpu=Unit(2, 1))
    assert {param.source for param in alone.values()} == {"untouched"}
    assert {len(param.layout.ranks) for param in alone.values()} == {2}
    assert {len(param.layout.ranks) for param in live_params(hand_cut()).values()} == {1}


def test_every_parameter_that_cannot_be_described_is_in_the_one_error():
    info = {**INFO, "autotp_unsupported_parameter_patterns": {"up": "shuffled", "dense": "secret"}}
    with pytest.raises(AffineError) as raised:
        live_params(hand_cut(), info=info, mpu=Unit(2, 0))
    assert [fault.param for fault in raised.value.faults] == ["dense.weight", "up.weight", "up.bias"]
    assert "shuffled" in str(raised.value)
    assert "secret" in str(raised.value)


def test_a_unit_that_states_several_ranks_and_cannot_say_which_is_refused():
    class Half:
        def get_model_parallel_world_size(self):
            return 2

    with pytest.raises(AffineError, match=r"Half: .*get_model_parallel_rank"):
        live_params(hand_cut(), mpu=Half())


def test_a_tied_parameter_has_one_name_and_the_layers_own_cut(monkeypatch):
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(13, 6)
    with answered(2, 0):
        model.head = head_tied_to(model.embed)
        for without in (False, True):
            if without:
                monkeypatch.setattr("deepspeed_affine.hooks.layouts.layer_metadata", lambda param: None)
            found = live_params(model)
            assert list(found) == ["embed.weight"]
            assert dict(found["embed.weight"].layout.shard_shapes) == {0: (7, 6), 1: (6, 6)}


def head_tied_to(embedding):
    head = torch.nn.Linear(6, 13, bias=False)
    head.weight = embedding.weight
    return layers.LinearLayer(head, object(), name="lm_head")


def test_native_experts_are_stored_under_their_global_numbers():
    from deepspeed.moe.layer import MoE

    model = torch.nn.Module()
    model.moe = MoE(hidden_size=4, expert=torch.nn.Linear(4, 4), num_experts=4, ep_size=2)
    found = live_params(model)
    names = {name: param.universal for name, param in found.items() if param.source == "experts"}
    prefix = "moe.deepspeed_moe.experts.deepspeed_experts."
    # Without a process group this process is the first of its expert-parallel ranks.
    assert set(names) == {f"{prefix}{local}.{kind}" for local in (0, 1) for kind in ("weight", "bias")}
    assert all(name == universal for name, universal in names.items())
    model.moe.deepspeed_moe.ep_group = "second"
    monkeypatch_rank = pytest.MonkeyPatch()
    with monkeypatch_rank.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        patched.setattr(torch.distributed, "get_rank", lambda group: {"second": 1}[group])
        second = live_params(model)
    assert second[f"{prefix}1.weight"].universal == f"{prefix}3.weight"
    assert second[f"{prefix}1.weight"].layout == replicated_map((4, 4), 1).canonical()


def test_the_attribute_of_the_metadata_is_deepspeeds():
    layer = cut("column", 2, 0)
    assert hasattr(layer.weight, metadata_attribute())
    assert full_tensors("column").keys() == dict(model_of(layer).named_parameters()).keys()


def test_what_leaves_no_trace_is_taken_from_the_users_patterns():
    """As the embeddings that a partition_config slices before 0.19.6."""
    with answered(2, 1):
        model = model_of(cut("column", 2, 1))
        model.sliced = torch.nn.Embedding(9, 4)
        alone = live_params(model)
        told = live_params(model, info={"parameter_with_row_parallelism_patterns": [r"^sliced\.weight$"]})
    assert alone["sliced.weight"].source == "untouched"
    assert told["sliced.weight"].source == "patterns"
    assert told["sliced.weight"].layout.logical_shape == (9, 8)
    assert {name: param for name, param in told.items() if "sliced" not in name} == {
        name: param for name, param in alone.items() if "sliced" not in name
    }


@pytest.mark.parametrize(
    "document",
    [
        [1],
        {"version": 2, "params": {}},
        {"version": 1, "params": [1]},
        {"version": 1, "params": {}, "^up$": {}},
        {"params": {}},
        {"^up$": {}},
        {"version": 2, "^up$": {}},
    ],
)
def test_an_info_whose_maps_cannot_be_read_is_refused(document):
    with pytest.raises(AffineError, match="affine"):
        live_params(hand_cut(), info={**INFO, "affine_map": document}, mpu=Unit(2, 0))
