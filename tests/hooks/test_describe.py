"""``describe``: the layout of a model that holds no values, and what reshard makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from resharding import reshard, wrong_files
from synthetic import COLUMN, ROW, Param, World, make, random_full
from torch import nn

import deepspeed_affine
from deepspeed_affine.errors import PolicyError
from deepspeed_affine.ir import contiguous_split_map, replicated_map
from deepspeed_affine.plan.layout_document import read_layout_document


class Model(nn.Module):
    """What one of ``tp`` ranks holds of it."""

    def __init__(self, tp: int = 1) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8 // tp)
        self.down = nn.Linear(8 // tp, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Parameter(torch.empty(4, 3), requires_grad=False)
        self.register_buffer("mean", torch.empty(2))
        self.register_buffer("scratch", torch.empty(9), persistent=False)


PARAMS = [
    Param("frozen", random_full((4, 3), 7), kind="frozen"),
    Param("mean", random_full((2,), 8), kind="buffer"),
    Param("up.weight", random_full((8, 6), 1), COLUMN),
    Param("up.bias", random_full((8,), 2), COLUMN),
    Param("down.weight", random_full((5, 8), 3), ROW),
    Param("down.bias", random_full((5,), 4), group=1),
    Param("norm.weight", random_full((5,), 5), group=1),
    Param("norm.bias", random_full((5,), 6), group=1),
]
INFO = {
    "universal_checkpoint_version": 0.4,
    "parameter_with_row_parallelism_patterns": [r"^down\.weight$"],
    "tp_replicated_parameter_patterns": [r"^down\.bias$", r"^norm\.", r"^frozen$"],
}
GROUPS = [["up.weight", "up.bias", "down.weight", "frozen"], ["down.bias", "norm.weight", "norm.bias"]]


def meta(tp: int = 1) -> Model:
    with torch.device("meta"):
        return Model(tp)


def mpu(tp: int) -> SimpleNamespace:
    return SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: tp,
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_group=lambda: None,
    )


@pytest.mark.parametrize(("tp", "stage", "dp"), [(1, 3, 3), (2, 1, 2), (2, 3, 2)])
def test_a_meta_model_is_enough_to_reshard_for_it(tmp_path, tp, stage, dp):
    source = make(World(stage=1, tp=1, dp=2), [replace(p, cut=PARAMS[0].cut) for p in PARAMS]).save(tmp_path / "in")
    told = {} if tp == 1 else {"info": INFO, "mpu": mpu(tp)}
    document = deepspeed_affine.describe(meta(tp), dp=dp, zero_stage=stage, groups=GROUPS, **told)
    (tmp_path / "layout.json").write_text(json.dumps(document))
    assert reshard(source, tmp_path / "out", "--layout", tmp_path / "layout.json") == 0
    wanted = World(stage=stage, tp=tp, dp=dp)
    # It has no configuration to put into the files; that of the source is amended.
    assert list(wrong_files(tmp_path / "out", wanted, PARAMS, make(wanted, PARAMS).shards, 7)) == []


def test_groups_are_lists_of_parameters_or_dictionaries_or_names():
    model = meta()
    named = dict(model.named_parameters())
    tensors = [[named[name] for name in group] for group in GROUPS]
    expected = deepspeed_affine.describe(model, dp=2, zero_stage=2, groups=GROUPS)
    assert deepspeed_affine.describe(model, dp=2, zero_stage=2, groups=tensors) == expected
    dictionaries = [{"params": group, "lr": 1.0} for group in tensors]
    assert deepspeed_affine.describe(model, dp=2, zero_stage=2, groups=dictionaries) == expected
    alone = read_layout_document(deepspeed_affine.describe(model, dp=2, zero_stage=2))
    assert alone.ranks[0].groups == (tuple(name for name, p in named.items() if p.requires_grad),)


def test_what_it_says_of_every_tensor():
    layout = read_layout_document(
        deepspeed_affine.describe(meta(2), dp=2, zero_stage=3, sub_group_size=30, info=INFO, mpu=mpu(2))
    )
    assert (layout.tp, layout.pp, layout.dp, layout.stage) == (2, 1, 2, 3)
    assert layout.params["up.weight"].layout == contiguous_split_map((8, 6), (4, 4), 0).canonical()
    assert layout.params["down.weight"].layout == contiguous_split_map((5, 8), (4, 4), 1).canonical()
    kinds = {name: param.kind for name, param in layout.params.items()}
    assert (kinds["frozen"], kinds["mean"], kinds["norm.bias"]) == ("frozen", "buffer", "optimized")
    assert "scratch" not in layout.params
    assert layout.ranks[0].sub_groups == ((0, 5), (0, 1))
    assert layout.ranks[0].names == tuple(meta().state_dict())


def test_ranks_that_hold_parts_of_other_sizes_close_their_sub_groups_elsewhere():
    """Rank 0 holds 24 elements of ``up``, rank 1 has 6: with 20 a sub-group the one closes it and the other goes on."""
    cut = contiguous_split_map((5, 6), (4, 1), 0)
    info = {
        "affine_map": {
            "version": 1,
            "params": {r"^weight$": cut.to_dict(), r"^bias$": replicated_map((4,), 2).to_dict()},
        }
    }
    with torch.device("meta"):
        model = nn.Linear(6, 4)
    layout = read_layout_document(
        deepspeed_affine.describe(model, dp=1, zero_stage=3, sub_group_size=20, info=info, mpu=mpu(2))
    )
    assert [rank.sub_groups for rank in layout.ranks] == [((0, 1), (0, 1)), ((0, 2),)]


def test_tied_weights_are_aliases():
    model = meta()
    model.again = model.up
    layout = read_layout_document(deepspeed_affine.describe(model, dp=1, zero_stage=1))
    assert layout.ranks[0].aliases == {"again.weight": "up.weight", "again.bias": "up.bias"}


def test_bfloat16_names_the_files():
    model = meta().to(torch.bfloat16)
    layout = read_layout_document(deepspeed_affine.describe(model, dp=1, zero_stage=1, bf16_optimizer=True))
    assert (layout.prefix, layout.bf16_optimizer) == ("bf16_", True)
    assert {param.dtype for param in layout.params.values()} == {"bfloat16"}


def test_misuse_is_refused():
    with pytest.raises(PolicyError, match="say dp and zero_stage"):
        deepspeed_affine.describe(meta())
    with pytest.raises(PolicyError, match="was given a str"):
        deepspeed_affine.describe("model")
    with pytest.raises(PolicyError, match="which is no parameter of the model"):
        deepspeed_affine.describe(meta(), dp=1, zero_stage=1, groups=[["nothing"]])
    with pytest.raises(PolicyError, match="which is no parameter of the model"):
        deepspeed_affine.describe(meta(), dp=1, zero_stage=1, groups=[[torch.empty(3)]])
    for groups in (["nope"], "nope", [{"params": "nope"}]):
        with pytest.raises(PolicyError, match="a parameter group is 'nope'; expected a list"):
            deepspeed_affine.describe(meta(), dp=1, zero_stage=1, groups=groups)
