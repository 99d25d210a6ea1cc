"""Tiny models whose sizes are odd on purpose, so that every kind of padding occurs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCAB = 13
WIDTH = 6


class Plain(nn.Module):
    """Embedding, two linears, a norm and a head; the options add the parameters that trip converters."""

    def __init__(
        self,
        *,
        tied: bool = False,
        frozen: bool = False,
        buffers: bool = False,
        unused: bool = False,
        empty: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.batch_norm = nn.BatchNorm1d(WIDTH) if buffers else None
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.up.weight.requires_grad_(False)
            self.norm.bias.requires_grad_(False)
        self.unused = nn.Linear(3, 5) if unused else None
        self.scale = nn.Parameter(torch.tensor([1.5]))
        if empty:
            self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = self.down(torch.tanh(self.norm(self.up(hidden)))) * self.scale
        if self.batch_norm is not None:
            hidden = self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


class OwnAttention(nn.Module):
    """Grouped-query attention with three key/value heads: two ranks cannot share them evenly."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        width = heads * head_dim
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv_heads * head_dim)
        self.v_proj = nn.Linear(width, kv_heads * head_dim)
        self.o_proj = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape

        def split(states: torch.Tensor) -> torch.Tensor:
            return states.view(batch, length, -1, self.head_dim).transpose(1, 2)

        query, key, value = split(self.q_proj(hidden)), split(self.k_proj(hidden)), split(self.v_proj(hidden))
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class OwnTransformer(nn.Module):
    """One block that AutoTP cuts by a partition config; needs no transformers."""

    def __init__(
        self, *, heads: int = 6, kv_heads: int = 3, head_dim: int = 4, vocab: int = 31, inner: int = 33, mix: int = 0
    ) -> None:
        super().__init__()
        width = heads * head_dim
        self.config = SimpleNamespace(
            num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=width, model_type="own"
        )
        self.embed = nn.Embedding(vocab, width)
        self.attention = OwnAttention(heads, kv_heads, head_dim)
        # Replicated and large, behind layers cut unevenly: data parallelism divides it elsewhere on each TP rank.
        self.mix = nn.Linear(width, mix) if mix else None
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.attention(self.norm(hidden))
        if self.mix is not None:
            hidden = hidden + torch.tanh(self.mix(hidden))[..., : hidden.shape[-1]]
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


OWN_PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*attention\.[qkv]_proj\.weight$", r".*\bup\.weight$"], "partition_type": "column"},
        {"patterns": [r".*attention\.o_proj\.weight$", r".*\bdown\.weight$"], "partition_type": "row"},
    ],
}


class HandTp(nn.Module):
    """Megatron-like layers cut by hand: vocabulary rows, columns, rows, a fused pair, and replicated norms."""

    def __init__(self, rank: int, world: int, *, vocab: int = 14, width: int = 6, inner: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def full(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.3

        def cut(tensor: torch.Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(tensor.chunk(world, dim)[rank].clone())

        self.vocab_start = rank * (vocab // world)
        self.word_embeddings = nn.ParameterDict({"weight": cut(full(vocab, width), 0)})
        self.dense_h_to_4h = nn.ParameterDict({"weight": cut(full(inner, width), 0), "bias": cut(full(inner), 0)})
        gate, value = full(inner, width), full(inner, width)
        self.swiglu = nn.ParameterDict(
            {"weight": nn.Parameter(torch.cat([cut(gate, 0).data, cut(value, 0).data]).clone())}
        )
        self.dense_4h_to_h = nn.ParameterDict({"weight": cut(full(width, inner), 1), "bias": nn.Parameter(full(width))})
        self.norm = nn.LayerNorm(width)
        self.group: Any = None
        for name, parameter in self.named_parameters():
            parameter.tensor_model_parallel = "norm" not in name and name != "dense_4h_to_h.bias"  # type: ignore[attr-defined]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.word_embeddings["weight"]
        mine = (tokens >= self.vocab_start) & (tokens < self.vocab_start + table.shape[0])
        hidden = table[(tokens - self.vocab_start).clamp(0, table.shape[0] - 1)] * mine.unsqueeze(-1)
        # Replicated parameters stay replicated only if the gradient that comes back from the cut layers is summed.
        hidden = _SumGradient.apply(self.norm(_Sum.apply(hidden, self.group)), self.group)
        gate, value = functional.linear(hidden, self.swiglu["weight"]).chunk(2, -1)
        inner = torch.tanh(functional.linear(hidden, self.dense_h_to_4h["weight"], self.dense_h_to_4h["bias"]))
        inner = inner + torch.sigmoid(gate) * value
        out = (
            _Sum.apply(functional.linear(inner, self.dense_4h_to_h["weight"]), self.group) + self.dense_4h_to_h["bias"]
        )
        return (out.float() - 1).square().mean()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        result = tensor.clone()
        torch.distributed.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


HAND_TP_INFO = {
    "universal_checkpoint_version": 0.2,
    "vocabulary_parameter_patterns": [r"word_embeddings\.weight"],
    "original_vocab_size": 13,
    "parameter_with_row_parallelism_patterns": [r"dense_4h_to_h\.weight"],
    "tp_replicated_parameter_patterns": [r"norm\.(weight|bias)", r"dense_4h_to_h\.bias"],
    "parameter_with_2_sub_params_cat_dim_0": [r"swiglu\.weight"],
}


class PipeEmbedding(nn.Module):
    def __init__(self, vocab: int = VOCAB, width: int = WIDTH) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width)

    @property
    def weight(self) -> torch.Tensor:
        return self.word_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(tokens)


def _logits(layer: PipeEmbedding, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, layer.word_embeddings.weight)


class PipeBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


def pipe_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def build_pipe(stages: int) -> nn.Module:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("embed", PipeEmbedding, tied_weight_attr="weight"),
        *(LayerSpec(PipeBlock) for _ in range(3)),
        TiedLayerSpec("embed", PipeEmbedding, forward_fn=_logits, tied_weight_attr="weight"),
    ]
    return PipelineModule(layers=layers, num_stages=stages, loss_fn=pipe_loss, partition_method="uniform")


class MoeNet(nn.Module):
    """DeepSpeed's native MoE layer between two linears."""

    def __init__(self, experts: int = 4, ep_size: int = 2) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.moe = MoE(
            hidden_size=WIDTH,
            expert=nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, WIDTH)),
            num_experts=experts,
            ep_size=ep_size,
            k=1,
            use_rts=False,
            min_capacity=4,
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.moe(hidden)[0]
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def build_llama(
    *, heads: int, kv_heads: int, vocab: int, tied: bool = False, frozen: bool = False, inner: int | None = None
) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=heads * 4,
        intermediate_size=inner or 2 * heads * 4 + 1,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=4,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if frozen:
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
        model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
        model.model.norm.weight.requires_grad_(False)
    return model


def build_mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        use_cache=False,
        output_router_logits=False,
    )
    return MixtralForCausalLM(config)
