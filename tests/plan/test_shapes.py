"""The tensors of well-known models, and of a description."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.ir.ints import product
from deepspeed_affine.plan.shapes import MODELS, model_tensors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads", [{"num_key_value_heads": 2}, {"head_dim": 24}, {}])
def test_a_llama_has_the_tensors_that_transformers_makes(tied, heads):
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        vocab_size=50,
        tie_word_embeddings=tied,
        **heads,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    expected = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert {each.name: each.shape for each in model_tensors(config.to_dict())} == expected


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_configuration_of_the_llama_kind_is_planned_for_its_own_parameters(kind):
    config = AutoConfig.for_model(kind, **SMALL)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert {each.name: each.shape for each in model_tensors(config.to_dict())} == expected


@pytest.mark.parametrize("kind", ["mixtral", "qwen2", "qwen3", "gpt_neox", "gemma", "bert"])
def test_a_configuration_with_other_parameters_is_refused(kind):
    """They all have the sizes of a Llama."""
    with pytest.raises(PolicyError, match=f"model_type is {kind!r}"):
        model_tensors(AutoConfig.for_model(kind, **SMALL).to_dict())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "experts"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": 10**15}, "more elements than 64 bits count"),
    ],
)
def test_a_configuration_that_is_not_planned_for(change, said):
    assert model_tensors(SMALL)
    with pytest.raises(PolicyError, match=said):
        model_tensors({**SMALL, **change})


@pytest.mark.parametrize(("name", "billions"), [("llama-7b", 6.738), ("llama-70b", 68.977), ("llama3-405b", 405.853)])
def test_published_sizes(name, billions):
    tensors = model_tensors(MODELS[name])
    assert sum(product(each.shape) for each in tensors) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_a_list_of_tensors():
    listed = [{"name": "w", "shape": [6, 4], "axis": 1, "units": 2}, {"name": "b", "shape": [], "place": 1}]
    first, second = model_tensors({"tensors": listed})
    assert (first.shape, first.axis, first.units, first.place) == ((6, 4), 1, 2, 0.0)
    assert (second.shape, second.axis, second.place) == ((), None, 1)


@pytest.mark.parametrize(
    "description",
    [
        None,
        [],
        {},
        {"hidden_size": "4"},
        {**MODELS["llama-7b"], "num_hidden_layers": 0},
        {"tensors": []},
        {"tensors": {}},
        {"tensors": [3]},
        {"tensors": [{"name": "w"}]},
        {"tensors": [{"name": "w", "shape": [0]}]},
        {"tensors": [{"name": "w", "shape": [4], "axis": 1}]},
        {"tensors": [{"name": "w", "shape": [4], "axis": True}]},
        {"tensors": [{"name": "w", "shape": [4], "place": 2}]},
        {"tensors": [{"name": "w", "shape": [4], "split": 0}]},
    ],
)
def test_anything_else_is_refused(description):
    with pytest.raises(PolicyError):
        model_tensors(description)
