"""Models that cut their layers over ranks themselves, beyond those every real test trains."""

from __future__ import annotations

from typing import Any

import real_models as models
import torch
from real_cases import Case
from torch import nn

import deepspeed_affine

__all__ = ["PIPE_INFO", "TP_PIPE_INFO", "ScaledTp", "build_tp_pipe", "scaled_info"]


class ScaledTp(models.HandTp):
    """The last bias is added before the sum over ranks, so every rank holds it divided by their number."""

    def __init__(self, rank: int, world: int, **sizes: int) -> None:
        super().__init__(rank, world, **sizes)
        self.dense_4h_to_h["bias"].data /= world

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.word_embeddings["weight"]
        mine = (tokens >= self.vocab_start) & (tokens < self.vocab_start + table.shape[0])
        hidden = table[(tokens - self.vocab_start).clamp(0, table.shape[0] - 1)] * mine.unsqueeze(-1)
        hidden = models._SumGradient.apply(self.norm(models._Sum.apply(hidden, self.group)), self.group)
        gate, value = torch.nn.functional.linear(hidden, self.swiglu["weight"]).chunk(2, -1)
        up = self.dense_h_to_4h
        inner = torch.tanh(torch.nn.functional.linear(hidden, up["weight"], up["bias"])) + torch.sigmoid(gate) * value
        down = self.dense_4h_to_h
        out = models._Sum.apply(torch.nn.functional.linear(inner, down["weight"], down["bias"]), self.group)
        return (out.float() - 1).square().mean()


def scaled_info(tp: int) -> dict[str, Any]:
    """As a user says it: a map of the one parameter that no list of patterns describes."""
    ranks = tuple(range(tp))
    piece = deepspeed_affine.AffinePiece((6,), 0, (1,), 0, (1,), ranks, 1 / tp)
    layout = deepspeed_affine.ParamAffineMap((6,), dict.fromkeys(ranks, (6,)), dict.fromkeys(ranks, (piece,)))
    document = {"version": 1, r"^dense_4h_to_h\.bias$": layout.to_dict()}
    return {**models.HAND_TP_INFO, "affine_map": document}


class TpBlock(nn.Module):
    """A column and a row parallel matrix behind a norm, cut by hand, for a pipeline."""

    def __init__(self, tp: int, width: int = 6, inner: int = 8) -> None:
        super().__init__()
        self.group = model_group(tp)
        rank = torch.distributed.get_rank() % tp
        self.norm = nn.LayerNorm(width)
        self.up = nn.ParameterDict(
            {"weight": nn.Parameter((torch.randn(inner, width) * 0.3).chunk(tp, 0)[rank].clone())}
        )
        self.down = nn.ParameterDict(
            {"weight": nn.Parameter((torch.randn(width, inner) * 0.3).chunk(tp, 1)[rank].clone())}
        )
        for name, parameter in self.named_parameters():
            parameter.tensor_model_parallel = "norm" not in name

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = models._SumGradient.apply(self.norm(hidden), self.group)
        inner = torch.tanh(nn.functional.linear(inner, self.up["weight"]))
        return hidden + models._Sum.apply(nn.functional.linear(inner, self.down["weight"]), self.group)


_groups: dict[int, Any] = {}


def model_group(tp: int) -> Any:
    """The tensor-parallel group: neighbours, as PipeModelDataParallelTopology orders its last axis."""
    if tp not in _groups:
        for start in range(0, torch.distributed.get_world_size(), tp):
            ranks = list(range(start, start + tp))
            group = torch.distributed.new_group(ranks)
            if torch.distributed.get_rank() in ranks:
                _groups[tp] = group
    return _groups[tp]


def build_tp_pipe(case: Case) -> nn.Module:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    model_group(case.tp)
    layers = [
        TiedLayerSpec("embed", models.PipeEmbedding, tied_weight_attr="weight"),
        *(LayerSpec(TpBlock, case.tp) for _ in range(3)),
        TiedLayerSpec("embed", models.PipeEmbedding, forward_fn=models._logits, tied_weight_attr="weight"),
    ]
    topology = PipeModelDataParallelTopology(case.pp, case.tp, case.dp)
    # A seed of the module itself would draw the same numbers for both halves of a matrix.
    return PipelineModule(layers=layers, topology=topology, loss_fn=models.pipe_loss, partition_method="uniform")


TP_PIPE_INFO = {
    "universal_checkpoint_version": 0.2,
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.word_embeddings\.weight"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
    "tp_replicated_parameter_patterns": [r"\d+\.norm\.(weight|bias)", r"tied_modules\..*"],
}
PIPE_INFO = {
    key: TP_PIPE_INFO[key] for key in ("universal_checkpoint_version", "pipeline_replicated_parameter_patterns")
}
