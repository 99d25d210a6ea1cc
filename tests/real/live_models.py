"""Tiny models of every fused attention type that AutoTP cuts, each trainable over two ranks.

CodeGen is transformers' own. QWen, ChatGLM and Yuan come with their checkpoints' code, and DeepSpeed 0.19.8 cannot
train transformers' Bloom (its alibi keeps all heads), Falcon (it adds in place to a reduced output), Phi-3 (its
tp_plan is refused) and GPTBigCode (the key is repeated for all heads); small modules with their block names and their
fused layouts stand in for these. AutoTP takes the linear before a norm for row-parallel: the modules' order matters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCAB = 32
WIDTH = 32
HEADS = 8


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head: int) -> torch.Tensor:
    """Causal attention over heads of ``head`` columns; keys and values repeat to the number of queries."""
    batch, length, width = query.shape

    def split(states: torch.Tensor) -> torch.Tensor:
        return states.reshape(batch, length, -1, head).transpose(1, 2)

    query, key, value = split(query), split(key), split(value)
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, length, width)


class _BigCodeAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = WIDTH // HEADS
        self.c_attn = nn.Linear(WIDTH, WIDTH + 2 * self.head)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.c_attn(hidden)
        query, key, value = mixed.split([mixed.shape[-1] - 2 * self.head, self.head, self.head], dim=-1)
        return self.c_proj(_attend(query, key, value, self.head))


class GPTBigCodeBlock(nn.Module):
    """One key and value for all queries: a rank holds its queries, and the key and value whole."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = _BigCodeAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 40), "c_proj": nn.Linear(40, WIDTH)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp["c_proj"](torch.tanh(self.mlp["c_fc"](self.ln_2(hidden))))


class _QWenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.split_size = WIDTH
        self.head = WIDTH // HEADS

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.c_attn(hidden).split(self.split_size, dim=2)
        return self.c_proj(_attend(query, key, value, self.head))


class QWenBlock(nn.Module):
    """Fused query, key and value, each whole; the block's attention knows the width of its query."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = _QWenAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"w1": nn.Linear(WIDTH, 40, bias=False), "c_proj": nn.Linear(40, WIDTH, bias=False)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp["c_proj"](torch.tanh(self.mlp["w1"](self.ln_2(hidden))))


class _GLMAttention(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.head = WIDTH // HEADS
        self.groups = groups
        self.query_key_value = nn.Linear(WIDTH, WIDTH + 2 * groups * self.head)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.query_key_value(hidden)
        # Each rank holds as large a part of the queries as of the keys and values.
        part = mixed.shape[-1] * self.groups // (HEADS + 2 * self.groups)
        query, key, value = mixed.split([mixed.shape[-1] - 2 * part, part, part], dim=-1)
        return self.dense(_attend(query, key, value, self.head))


class GLMBlock(nn.Module):
    """ChatGLM: a few key and value groups behind the queries, and both halves of the gated MLP in one weight."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attention = _GLMAttention(groups)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {"dense_h_to_4h": nn.Linear(WIDTH, 48, bias=False), "dense_4h_to_h": nn.Linear(24, WIDTH, bias=False)}
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        gate, value = self.mlp["dense_h_to_4h"](self.post_attention_layernorm(hidden)).chunk(2, -1)
        return hidden + self.mlp["dense_4h_to_h"](torch.sigmoid(gate) * value)


class _YuanAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = WIDTH // HEADS
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        # An odd number of heads on a rank holds one head of the values twice over the ranks.
        size = min(query.shape[-1], value.shape[-1])
        mixed = _attend(query[..., :size], key[..., :size], value[..., :size], self.head)
        return self.o_proj(functional.pad(mixed, (0, value.shape[-1] - size)))


class YuanDecoderLayer(nn.Module):
    """Yuan: queries and keys share heads, so a rank holds the values of two runs of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attn = _YuanAttention()
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {"up_proj": nn.Linear(WIDTH, 40, bias=False), "down_proj": nn.Linear(40, WIDTH, bias=False)}
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp["down_proj"](torch.tanh(self.mlp["up_proj"](self.post_attention_layernorm(hidden))))


class _HeadMajorAttention(nn.Module):
    """Bloom's and Falcon's fused weight: for each group of heads its queries, then its key, then its value."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.head = WIDTH // HEADS
        self.queries = HEADS // groups
        self.query_key_value = nn.Linear(WIDTH, groups * (self.queries + 2) * self.head)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.query_key_value(hidden)
        mixed = mixed.reshape(*mixed.shape[:-1], -1, self.queries + 2, self.head)
        query, key, value = (part.flatten(-3) for part in mixed.split([self.queries, 1, 1], dim=-2))
        return self.dense(_attend(query, key, value, self.head))


class BloomBlock(nn.Module):
    """One key and value to a query."""

    groups = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attention = _HeadMajorAttention(self.groups)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"dense_h_to_4h": nn.Linear(WIDTH, 40), "dense_4h_to_h": nn.Linear(40, WIDTH)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        inner = torch.tanh(self.mlp["dense_h_to_4h"](self.post_attention_layernorm(hidden)))
        return hidden + self.mlp["dense_4h_to_h"](inner)


class FalconDecoderLayer(BloomBlock):
    """Falcon's newer form: several queries to a key and value."""

    groups = 4


class _Phi3Attention(nn.Module):
    groups = 4

    def __init__(self) -> None:
        super().__init__()
        self.head = WIDTH // HEADS
        self.qkv_proj = nn.Linear(WIDTH, WIDTH + 2 * self.groups * self.head, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.qkv_proj(hidden)
        part = mixed.shape[-1] * self.groups // (HEADS + 2 * self.groups)
        query, key, value = mixed.split([mixed.shape[-1] - 2 * part, part, part], dim=-1)
        return self.o_proj(_attend(query, key, value, self.head))


class Phi3DecoderLayer(nn.Module):
    """Phi-3: queries, keys and values behind one another, and gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attn = _Phi3Attention()
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {"gate_up_proj": nn.Linear(WIDTH, 48, bias=False), "down_proj": nn.Linear(24, WIDTH, bias=False)}
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        gate, value = self.mlp["gate_up_proj"](self.post_attention_layernorm(hidden)).chunk(2, -1)
        return hidden + self.mlp["down_proj"](torch.sigmoid(gate) * value)


class OwnModel(nn.Module):
    """A language model around one block."""

    def __init__(self, block: nn.Module, kind: str, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            hidden_size=WIDTH, num_attention_heads=HEADS, vocab_size=VOCAB, model_type=kind, **config
        )
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([block])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(self.norm(hidden))
        return SimpleNamespace(loss=functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()))


def _codegen() -> nn.Module:
    from transformers import CodeGenConfig, CodeGenForCausalLM

    config = CodeGenConfig(
        vocab_size=VOCAB, n_positions=32, n_ctx=32, n_embd=WIDTH, n_layer=1, n_head=HEADS, rotary_dim=4, n_inner=40,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return CodeGenForCausalLM(config)


BUILDERS = {
    "bigcode": lambda: OwnModel(GPTBigCodeBlock(), "gpt_bigcode", num_key_value_heads=HEADS),
    "codegen": _codegen,
    "bloom": lambda: OwnModel(BloomBlock(), "bloom"),
    "falcon": lambda: OwnModel(FalconDecoderLayer(), "falcon", num_kv_heads=4),
    "phi3": lambda: OwnModel(Phi3DecoderLayer(), "phi", num_key_value_heads=4),
    "qwen": lambda: OwnModel(QWenBlock(), "qwen"),
    "glm": lambda: OwnModel(GLMBlock(2), "chatglm", multi_query_group_num=2),
    "yuan": lambda: OwnModel(YuanDecoderLayer(), "yuan", num_key_value_heads=HEADS),
}


def build(kind: str) -> nn.Module:
    """The model of this kind; equal in every process of a job."""
    torch.manual_seed(1234)
    model: nn.Module = BUILDERS[kind]()
    generator = torch.Generator().manual_seed(99)
    for param in model.parameters():
        # Zeros and ones of fresh biases and norms would let a wrong order pass.
        param.data = torch.randn(param.shape, generator=generator) * 0.2
    return model
