"""The tensors of well-known models, from the few numbers that determine them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from deepspeed_affine.errors import PolicyError
from deepspeed_affine.ir.ints import shown
from deepspeed_affine.plan.grid import Tensor

__all__ = ["MODELS", "llama_tensors", "model_tensors"]

MODELS: Mapping[str, Mapping[str, int]] = {
    "llama-7b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008},
    "llama-13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824},
    "llama-70b": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
    "llama3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "llama3-405b": {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53248,
        "vocab_size": 128256,
    },
}
"""Sizes as the models' published configurations have them, under the names of a Hugging Face ``config.json``."""

VOCABULARY = 32000

LIKE_LLAMA = ("llama", "mistral")
"""Values of ``model_type`` whose parameters are these and no others."""

MOST_LAYERS = 1 << 16

_LISTED = (
    'Give a config.json of the Llama kind, or a list of tensors: {"tensors": [{"name": ..., "shape": [...], "axis": '
    "...}]}."
)


def model_tensors(description: object) -> list[Tensor]:
    """The tensors of a model given as a ``config.json`` of the Llama kind, or as a list of tensors.

    The list is ``{"tensors": [{"name", "shape", "axis", "units", "place"}, ...]}``, the last three as ``Tensor`` has
    them. Raises PolicyError for anything else.
    """
    if not isinstance(description, Mapping):
        raise PolicyError(f"the model is {shown(description)}; expected a config.json or a list of tensors.")
    listed = description.get("tensors")
    if listed is None:
        return llama_tensors(description)
    if not isinstance(listed, list) or not listed:
        raise PolicyError(f"the model's tensors are {shown(listed)}; expected a list of one or more.")
    found = [_tensor(entry, number / len(listed)) for number, entry in enumerate(listed)]
    twice = next((name for name, count in Counter([each.name for each in found]).items() if count > 1), None)
    if twice is not None:
        raise PolicyError(f"the model's tensors name {shown(twice)} twice; expected one of a name.")
    return found


def _tensor(entry: object, place: float) -> Tensor:
    if not isinstance(entry, Mapping) or set(entry) - {"name", "shape", "axis", "units", "place"}:
        raise PolicyError(f"tensor {shown(entry)}: expected name and shape, and axis, units and place where known.")
    name, shape, axis = entry.get("name"), entry.get("shape"), entry.get("axis")
    units, where = entry.get("units", 0), entry.get("place", place)
    fits = (
        isinstance(name, str)
        and isinstance(shape, list)
        and all(type(extent) is int and extent > 0 for extent in shape)
        and (axis is None or type(axis) is int)
        and type(units) is int
        and units >= 0
        and type(where) in (int, float)
        and 0 <= where <= 1
    )
    if not fits:
        raise PolicyError(
            f"tensor {shown(entry)}: expected a name, a shape of positive numbers, an axis or null, units of 0 or "
            "more, and a place from 0 to 1."
        )
    return Tensor(str(name), tuple(shape or ()), axis, units, where)


def llama_tensors(config: Mapping[str, Any]) -> list[Tensor]:
    """Every parameter of a Llama of these sizes, cut as DeepSpeed's AutoTP cuts it: whole heads stay together.

    Raises PolicyError where a size is missing or no number, or the configuration is of a model with other parameters.
    """
    _require_llama(config)
    hidden = _size(config, "hidden_size")
    layers = _size(config, "num_hidden_layers")
    heads = _size(config, "num_attention_heads")
    if layers > MOST_LAYERS:
        raise PolicyError(f"the model's num_hidden_layers is {shown(layers)}; expected {MOST_LAYERS:,} at the most.")
    shared = _size(config, "num_key_value_heads", heads)
    inner = _size(config, "intermediate_size")
    vocabulary = _size(config, "vocab_size", VOCABULARY)
    width = _size(config, "head_dim", hidden // heads)
    found = [Tensor("model.embed_tokens.weight", (vocabulary, hidden), 0, 0, 0.0)]
    for layer in range(layers):
        place, prefix = layer / layers, f"model.layers.{layer}."
        found += [
            Tensor(f"{prefix}self_attn.q_proj.weight", (heads * width, hidden), 0, heads, place),
            Tensor(f"{prefix}self_attn.k_proj.weight", (shared * width, hidden), 0, shared, place),
            Tensor(f"{prefix}self_attn.v_proj.weight", (shared * width, hidden), 0, shared, place),
            Tensor(f"{prefix}self_attn.o_proj.weight", (hidden, heads * width), 1, heads, place),
            Tensor(f"{prefix}mlp.gate_proj.weight", (inner, hidden), 0, 0, place),
            Tensor(f"{prefix}mlp.up_proj.weight", (inner, hidden), 0, 0, place),
            Tensor(f"{prefix}mlp.down_proj.weight", (hidden, inner), 1, 0, place),
            Tensor(f"{prefix}input_layernorm.weight", (hidden,), None, 0, place),
            Tensor(f"{prefix}post_attention_layernorm.weight", (hidden,), None, 0, place),
        ]
    found.append(Tensor("model.norm.weight", (hidden,), None, 0, 1.0))
    if not config.get("tie_word_embeddings", False):
        found.append(Tensor("lm_head.weight", (vocabulary, hidden), 0, 0, 1.0))
    return found


def _require_llama(config: Mapping[str, Any]) -> None:
    """The configuration names no parameters that a Llama does not have: its sizes alone would tell nothing of them."""
    kind = config.get("model_type", LIKE_LLAMA[0])
    if kind not in LIKE_LLAMA:
        raise PolicyError(
            f"the model's model_type is {shown(kind)}; expected {' or '.join(LIKE_LLAMA)}, since others have other "
            f"parameters. {_LISTED}"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise PolicyError(f"the model has {key}, and biases are not planned for. {_LISTED}")
    tied = config.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise PolicyError(f"the model's tie_word_embeddings is {shown(tied)}; expected true or false. {_LISTED}")
    experts = sorted(key for key in config if "experts" in key and config[key])
    if experts:
        raise PolicyError(f"the model has {experts[0]}, and experts are not planned for. {_LISTED}")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None and default is not None:
        value = default
    if type(value) is not int or value < 1:
        raise PolicyError(f"the model's {key} is {shown(value)}; expected a positive number. {_LISTED}")
    return value
