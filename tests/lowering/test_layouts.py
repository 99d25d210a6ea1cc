"""The layouts DeepSpeed's pattern chain refuses (and the fused ones beside them): maps by running the real code."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import affine
from deepspeed.module_inject.fusedqkv_utils import codegen_block_layout, shared_qk_value_head_ids
from lowering_reference import rebuild, same_bytes

from deepspeed_affine.ir import ParamAffineMap, contiguous_split_map, replicated_map, sub_param_map
from deepspeed_affine.lowering import assert_partition, probe


def _load():
    path = Path(__file__).parents[2] / "benchmarks" / "layouts.py"
    spec = importlib.util.spec_from_file_location("benchmark_layouts", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


layouts = _load()
LAYOUTS = {layout.name: layout for layout in layouts.all_layouts()}


def probed(name):
    layout = LAYOUTS[name]
    return probe(layout.partition, layout.shape, layout.world)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_recovered_from_its_shards(name):
    layout = LAYOUTS[name]
    found = probe(layout.partition, layout.shape, layout.world)
    assert found == found.canonical()
    full = torch.randn(layout.shape, generator=torch.Generator().manual_seed(5))
    shards = {}
    for rank in range(layout.world):
        shard = layout.partition(full.clone(), rank)
        shards[rank] = (shard[0] if isinstance(shard, tuple) else shard).detach()
        assert found.shard_shapes[rank] == tuple(shards[rank].shape)
    # A factor of 1/2 or 1/4 is undone without rounding.
    assert same_bytes(rebuild(found, shards), full)


@pytest.mark.parametrize(
    ("name", "runs", "pieces"),
    [
        ("bigcode", [2, 2, 2, 2], [2, 2, 2, 2]),
        ("Yuan value", [2, 2], [1, 1]),
        ("Yuan o_proj", [2, 2], [1, 1]),
        ("Yuan o_proj bias", [1, 1], [1, 1]),
        ("chatglm (2 kv heads)", [3, 3], None),
        ("phi3", [3, 3], None),
        ("QWen", [3, 3], [1, 1]),
        ("GLM", [3, 3], [1, 1]),
        ("bloom, uneven heads", [1, 1], [1, 1]),
        ("gate-up", [2, 2, 2], [1, 1, 1]),
    ],
)
def test_runs_and_pieces_are_those_of_the_specification(name, runs, pieces):
    found = probed(name)
    assert layouts.run_counts(found) == runs
    if pieces is not None:
        assert layouts.piece_counts(found) == pieces


@pytest.mark.parametrize("hidden", [16, 32, 64, 128, 256])
def test_codegen_has_eleven_runs_and_a_bounded_number_of_pieces_at_every_size(hidden):
    found = probed(f"codegen (hidden {hidden})")
    assert layouts.run_counts(found) == [11, 11]
    assert layouts.piece_counts(found) == layouts.piece_counts(probed("codegen (hidden 16)"))
    assert max(layouts.piece_counts(found)) <= 11


def test_codegen_of_the_smallest_size():
    found = probed("codegen (hidden 8)")
    assert layouts.run_counts(found) == [11, 11]
    assert max(layouts.piece_counts(found)) <= 11


def test_a_column_selection_needs_the_rows_stride_in_each_of_its_runs():
    found = probed("Yuan o_proj")
    for rank in range(2):
        assert [(run.shape, run.source_strides) for run in found.maximal_runs(rank)] == [((8, 8), (32, 1))] * 2


def test_bigcode_says_on_every_rank_who_holds_its_two_parts():
    found = probed("bigcode")
    for rank in range(4):
        assert {piece.locations for piece in found.pieces_by_rank[rank]} == {frozenset({rank}), frozenset(range(4))}


@pytest.mark.parametrize("name", ["Yuan o_proj bias", "Conv2d, input channels, bias"])
def test_a_bias_divided_before_the_sum_is_replicated_and_scaled(name):
    layout = LAYOUTS[name]
    assert probed(name) == replicated_map(layout.shape, layout.world, 1 / layout.world).canonical()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bloom", contiguous_split_map((24, 8), (12, 12), 0)),
        ("bloom, uneven heads", contiguous_split_map((24, 8), (16, 8), 0)),
        ("QWen", sub_param_map((24, 8), (8, 8, 8), ((4, 4),) * 3, 0)),
        ("chatglm (2 kv heads)", sub_param_map((48, 8), (32, 8, 8), ((16, 16), (4, 4), (4, 4)), 0)),
        ("phi3", sub_param_map((32, 16), (16, 8, 8), ((8, 8), (4, 4), (4, 4)), 0)),
        ("gate-up", sub_param_map((24, 8), (12, 12), ((4, 4, 4), (4, 4, 4)), 0)),
        ("conv_LinearLayer, square", contiguous_split_map((6, 6), (3, 3), 1)),
        ("Conv2d, input channels", contiguous_split_map((6, 4, 3, 3), (2, 2), 1)),
        ("Conv2d, output channels", contiguous_split_map((6, 4, 3, 3), (2, 2, 2), 0)),
    ],
)
def test_a_probed_map_is_the_one_its_metadata_would_state(name, expected):
    assert probed(name) == expected.canonical()


def test_the_maps_deepspeed_writes_itself_describe_its_partition_functions():
    stated = {
        "bigcode": affine.segmented_map((48, 8), [(32, False), (16, True)], 0, 4, [[8] * 4]),
        "Yuan value": affine.block_gather_map(
            (32, 8), {rank: shared_qk_value_head_ids(8, 2, rank) for rank in range(2)}, 4, 0
        ),
        "Yuan o_proj": affine.block_gather_map(
            (8, 32), {rank: shared_qk_value_head_ids(8, 2, rank) for rank in range(2)}, 4, 1
        ),
    }
    size, blocks = codegen_block_layout(96, 2, 8)
    stated["codegen (hidden 32)"] = affine.block_gather_map((96, 32), blocks, size, 0)
    for name, theirs in stated.items():
        layout = LAYOUTS[name]
        assert_partition(layout.partition, layout.shape, layout.world, ParamAffineMap.from_dict(theirs.to_dict()))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Yuan o_proj bias", "AttributeError: 'list' object has no attribute 'detach'"),
        ("conv_LinearLayer, not square", "RuntimeError: split_with_sizes expects split_sizes to sum exactly to 12"),
        ("conv_LinearLayer, bias", "RuntimeError: split_with_sizes expects split_sizes to sum exactly to 6"),
        ("Conv_LinearALlreduce, not square", "RuntimeError: split_with_sizes expects split_sizes to sum exactly to 8"),
        ("Conv_LinearALlreduce, bias", "IndexError: Dimension out of range"),
    ],
)
def test_deepspeeds_own_code_still_raises_where_the_intended_partition_is_probed(name, expected):
    """When this fails, upstream has repaired the function: probe the real one instead of the intended one."""
    assert layouts.raised(layouts.refusals()[name]).startswith(expected)


def test_the_table_prints_one_row_per_layout(capsys):
    layouts.main()
    printed = capsys.readouterr().out
    assert all(layout.name in printed for layout in LAYOUTS.values())
    assert all(name in printed for name in layouts.refusals())
