"""Metadata taken from DeepSpeed's real layers, built rank by rank: their shards convert to F and restore from it.

The layers are constructed as they are under AutoTP, with a process group whose rank and size are answered here, so
every width, pattern and map comes from DeepSpeed and none from this test.
"""

import pytest
import torch
from deepspeed.module_inject import layers
from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info
from deepspeed.module_inject.tp_shard import AutoTPMeta
from lowering_reference import extract, rebuild, same_bytes

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.lowering import UcInfo, lower_layer_meta, lower_param, unused_patterns

META = "ds_autotp_universal_checkpoint_meta"


def linear(rows, columns, bias=True):
    module = torch.nn.Linear(columns, rows, bias=bias)
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    return module


def fused(block):
    module = torch.nn.Module()
    module.__class__ = type(block, (torch.nn.Module,), {})
    module.attn = torch.nn.Module()
    return module


CASES = {
    "column": (layers.LinearLayer, (14, 6), AutoTPMeta(), {"name": "up"}),
    "column-uneven-heads": (layers.LinearLayer, (20, 6), AutoTPMeta(num_kv_heads=5), {"name": "q"}),
    "row": (layers.LinearAllreduce, (6, 14), AutoTPMeta(), {"name": "down"}),
    "vocab": (layers.VocabParallelLinear, (13, 6), AutoTPMeta(), {"name": "lm_head"}),
    "gate-up": (layers.GateUpPack_LinearLayer, (20, 6), AutoTPMeta(), {"name": "mlp"}),
    "sub-count": (layers.SubParamLinearLayer, (30, 6), AutoTPMeta(), {"name": "qkv", "shape": (3, -1)}),
    "sub-tuple": (
        layers.SubParamLinearLayer,
        (40, 6),
        AutoTPMeta(num_kv_heads=5),
        {"name": "qkv", "shape": ((20, 10, 10), -1)},
    ),
    "sub-3d": (
        layers.SubParamLinearLayer,
        (40, 6),
        AutoTPMeta(),
        {"name": "x", "shape": (2, (10, 5, 5), 6), "partition_dim": 1},
    ),
    "sub-row": (
        layers.SubParamLinearAllreduce,
        (6, 24),
        AutoTPMeta(),
        {"name": "o", "shape": (6, (12, 8, 4)), "partition_dim": 1},
    ),
    "bigcode": (
        layers.fused_LinearLayer,
        (48, 32),
        AutoTPMeta(n_embd=32, num_kv_heads=1),
        {"name": "c_attn", "fused_module": fused("GPTBigCodeBlock")},
    ),
    "phi3": (
        layers.fused_LinearLayer,
        (32, 16),
        AutoTPMeta(num_kv_heads=4, num_attention_heads=8),
        {"name": "qkv_proj", "fused_module": fused("Phi3DecoderLayer")},
    ),
    "chatglm": (
        layers.fused_LinearLayer,
        (48, 32),
        AutoTPMeta(num_kv_heads=2, n_embd=32),
        {"name": "query_key_value", "fused_module": fused("GLMBlock")},
    ),
    "yuan-value": (layers.Yuan_LinearLayer, (32, 8), AutoTPMeta(num_kv_heads=8), {"name": "v_proj"}),
    "codegen": (
        layers.fused_LinearLayer,
        (48, 16),
        AutoTPMeta(num_kv_heads=16),
        {"name": "qkv_proj", "fused_module": fused("CodeGenBlock"), "bias": False},
    ),
    "yuan-o_proj": (
        layers.Yuan_LinearAllreduce,
        (8, 32),
        AutoTPMeta(num_kv_heads=8),
        {"name": "o_proj", "bias": False},
    ),
}

DEGREES = {"yuan-value": (2, 4), "yuan-o_proj": (2, 4), "codegen": (2, 4)}

MAP_ONLY = ("bigcode", "codegen", "yuan-value", "yuan-o_proj")
"""Layouts the pattern lists do not describe. DeepSpeed 0.19.8 nevertheless lists Yuan's output projection as row
parallel and leaves the others to the default branch, so a converter that cannot read maps reassembles them wrongly."""


def build(case, world, rank, monkeypatch):
    kind, shape, meta, options = CASES[case]
    options = dict(options)
    module = linear(*shape, bias=options.pop("bias", True))
    full = {name: param.detach().clone() for name, param in module.named_parameters()}
    monkeypatch.setattr(layers.dist, "get_world_size", lambda group=None: world)
    monkeypatch.setattr(layers.dist, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(layers.pg_utils, "is_parallel", lambda group: world > 1)
    layer = kind(module, object(), tp_meta=meta, **options)
    model = torch.nn.Module()
    model.block = layer
    model.norm = torch.nn.LayerNorm(4)
    return model, {f"block.{name}": tensor for name, tensor in full.items()}


@pytest.fixture
def ranks(request, monkeypatch):
    case, world = request.param
    return world, [build(case, world, rank, monkeypatch) for rank in range(world)]


GRID = [
    pytest.param((case, world), with_maps, id=f"{case}-tp{world}-{'map' if with_maps else 'keys'}")
    for case in CASES
    for world in DEGREES.get(case, (2, 3, 4))
    for with_maps in ((True,) if case in MAP_ONLY else (True, False))
]


@pytest.mark.parametrize(("ranks", "with_maps"), GRID, indirect=["ranks"])
def test_the_shards_of_a_layer_convert_to_f_and_restore_from_it(ranks, with_maps):
    world, built = ranks
    model, full = built[0]
    stored = collect_autotp_universal_checkpoint_info(model)
    if not with_maps:
        stored.pop("affine_map")
    info = UcInfo.parse(stored)
    lowered = []
    for name in [name for name, _ in model.named_parameters()]:
        shards = {rank: dict(other.named_parameters())[name].detach() for rank, (other, _) in enumerate(built)}
        shapes = [tuple(shards[rank].shape) for rank in range(world)]
        metadata = getattr(dict(model.named_parameters())[name], META, None)
        if metadata and not with_maps:
            metadata = {**metadata, "conversion": {**metadata["conversion"], "affine_map": None}}
        lowered.append(lower_param(info, name, shapes, world))
        expected = full[name] if name in full else torch.ones(4) if name.endswith("weight") else torch.zeros(4)
        param = lowered[-1]
        found = rebuild(param.map, shards)
        assert param.truncate_rows in (None, expected.shape[0])
        assert same_bytes(found.reshape(expected.shape), expected), name
        target = lower_layer_meta(metadata, world, expected.shape, param=name)
        assert (target is None) == (metadata is None)
        for rank in range(world) if target is not None else ():
            assert same_bytes(extract(target, found, rank).flatten(), shards[rank].flatten())
    assert len(lowered) == len(list(model.named_parameters()))
    assert unused_patterns(info, lowered) == ()


def test_the_bias_of_yuans_output_projection_is_the_one_thing_left_undescribed(monkeypatch):
    """Its layer cannot be built with a bias (the partition raises), so the metadata is marked without one."""
    layer = layers.Yuan_LinearAllreduce(linear(8, 32), None, tp_meta=AutoTPMeta(num_kv_heads=8), name="o_proj")
    model = torch.nn.Module()
    model.block = layer
    info = UcInfo.parse(collect_autotp_universal_checkpoint_info(model))
    assert info.unsupported.keys == (r"^block\.bias$",)
    with pytest.raises(UnsupportedLayoutError, match="Yuan shared-QK"):
        lower_param(info, "block.bias", [(8,)])
    with pytest.raises(UnsupportedLayoutError, match="Yuan shared-QK"):
        lower_layer_meta(getattr(layer.bias, META), 1, (8,))
