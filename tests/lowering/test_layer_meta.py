"""Restore metadata lowers to the slices DeepSpeed's own restore takes, or is refused with the reason."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape, _resolve_autotp_partition
from deepspeed.module_inject.layers import _build_param_uc_restore_meta
from lowering_reference import extract

from deepspeed_affine.errors import AffineError, CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir import contiguous_split_map, replicated_map, segmented_map
from deepspeed_affine.lowering import lower_layer_meta

VERSION = "universal_checkpoint_version"


def meta(**fields):
    """Metadata as the installed DeepSpeed's layers build it, with single fields replaced."""
    replaced = {key: fields.pop(key) for key in (VERSION, "conversion") if key in fields}
    fields.setdefault("partition_type", "column")
    return {**_build_param_uc_restore_meta(**fields), **replaced}


CASES = {
    "replicated": (meta(replicated=True, logical_shape=(6, 4)), 3, (6, 4)),
    "replicated-scalar": (meta(replicated=True), 2, ()),
    "even-chunk": (meta(partition_dim=0, logical_shape=(8, 3)), 4, (8, 3)),
    "even-chunk-dim1": (meta(partition_dim=1, logical_shape=(3, 8)), 2, (3, 8)),
    "partition-sizes": (meta(partition_dim=0, logical_shape=(7, 3), partition_sizes=(4, 0, 3)), 3, (7, 3)),
    "partition-sizes-dim1": (meta(partition_dim=1, logical_shape=(3, 7), partition_sizes=(3, 2, 2)), 3, (3, 7)),
    "sub-params": (
        meta(
            partition_dim=0,
            logical_shape=(12, 3),
            sub_param_sizes=(6, 3, 3),
            sub_param_shard_widths=[[4, 2], [2, 1], [3, 0]],
        ),
        2,
        (12, 3),
    ),
    "sub-params-view": (
        meta(partition_dim=1, logical_shape=(2, 6, 2), sub_param_sizes=(4, 2), sub_param_shard_widths=[[3, 1], [1, 1]]),
        2,
        (12, 2),
    ),
    "sub-param-shape-tuple": (
        meta(
            partition_dim=0, logical_shape=(6, 2), sub_param_shape=((4, 2), 2), sub_param_shard_widths=[[3, 1], [1, 1]]
        ),
        2,
        (6, 2),
    ),
    "legacy-sub-params": (
        meta(partition_dim=0, logical_shape=(8, 2), sub_param_sizes=(4, 4), **{VERSION: 0.3}),
        2,
        (8, 2),
    ),
    "legacy-width": (meta(partition_dim=0, logical_shape=(8, 2), sub_param_shape=(8, 2), **{VERSION: 0.2}), 4, (8, 2)),
    "legacy-object": (
        {
            **meta(partition_dim=1, logical_shape=(8, 2), **{VERSION: 0.2}),
            "sub_param_shape": SubparamShape(patterns=["w"], shape=((4, 4), 2), partition_dim=0),
        },
        2,
        (8, 2),
    ),
    "affine-map": (
        meta(
            partition_dim=0,
            logical_shape=(6, 2),
            affine_map=segmented_map((6, 2), [(4, False), (2, True)], 0, 2, [[3, 1]]),
        ),
        2,
        (6, 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_the_slice_that_deepspeed_takes(case):
    metadata, degree, shape = CASES[case]
    full = torch.randn(shape)
    param = SimpleNamespace(ds_autotp_universal_checkpoint_meta=metadata)
    lowered = lower_layer_meta(metadata, degree, shape)
    assert lowered == lowered.canonical()
    assert lowered.ranks == tuple(range(degree))
    for rank in range(degree):
        theirs = _resolve_autotp_partition(param, {}, full, rank, degree)
        assert torch.equal(extract(lowered, full, rank).flatten(), theirs)


@pytest.mark.parametrize("metadata", [None, {}, meta(), meta(partition_dim=0), meta(logical_shape=(4, 2))])
def test_metadata_that_describes_no_layout_gives_no_map(metadata):
    assert lower_layer_meta(metadata, 2, (4, 2)) is None
    param = SimpleNamespace(ds_autotp_universal_checkpoint_meta=metadata)
    assert _resolve_autotp_partition(param, {}, torch.zeros(4, 2), 0, 2) is None


def test_a_legacy_count_is_a_count_of_equal_sub_parameters():
    """DeepSpeed takes it for a width and stops; the count is what the writers meant."""
    metadata = meta(partition_dim=0, logical_shape=(12, 2), sub_param_shape=(3, -1), **{VERSION: 0.2})
    lowered = lower_layer_meta(metadata, 2, (12, 2))
    full = torch.arange(24.0).view(12, 2)
    assert torch.equal(extract(lowered, full, 1), full[[2, 3, 6, 7, 10, 11]])
    param = SimpleNamespace(ds_autotp_universal_checkpoint_meta=metadata)
    with pytest.raises(AssertionError, match="sum to 3"):
        _resolve_autotp_partition(param, {}, full, 0, 2)


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        (meta(unsupported_reason="interleaves"), UnsupportedLayoutError, "interleaves"),
        (meta(partition_dim=0, logical_shape=(7, 2)), UnsupportedLayoutError, "no partition_sizes"),
        (
            meta(partition_dim=0, logical_shape=(7, 2), sub_param_sizes=(4, 3), **{VERSION: 0.3}),
            UnsupportedLayoutError,
            "no sub_param_shard_widths",
        ),
        (meta(partition_dim=0, logical_shape=(7, 2), sub_param_sizes=(4, 3)), CheckpointFormatError, "no sub_param_sh"),
        (meta(replicated=True, partition_dim=0), InvalidMapError, "replicated and partition_dim 0 at once"),
        (meta(partition_dim=0, logical_shape=(6, 2)), InvalidMapError, r"another number of elements than F's \(7, 2\)"),
        (meta(partition_dim=2, logical_shape=(7, 2)), InvalidMapError, "partition_dim 2 is no axis"),
        (
            meta(partition_dim=0, logical_shape=(7, 2), partition_sizes=(4, 2)),
            InvalidMapError,
            r"partition_sizes \[4, 2\] sum to 6, expected 7",
        ),
        (
            meta(partition_dim=0, logical_shape=(7, 2), partition_sizes=(4, 2, 1)),
            InvalidMapError,
            "name 3 ranks, the engine has 2",
        ),
        (
            meta(
                partition_dim=0,
                logical_shape=(7, 2),
                sub_param_sizes=(4, 2),
                sub_param_shard_widths=[[2, 2], [1, 1]],
            ),
            InvalidMapError,
            "sum to 6, axis 0 has 7",
        ),
        (
            meta(partition_dim=0, logical_shape=(7, 2), sub_param_sizes=(4, 3), sub_param_shard_widths=[[2, 2]]),
            InvalidMapError,
            "2 sub-parameters and 1 rows",
        ),
        (
            meta(partition_dim=0, logical_shape=(7, 2), sub_param_shape=(3, -1)),
            InvalidMapError,
            "states 3 along axis 0, whose extent is 7",
        ),
        (
            meta(logical_shape=(8, 2), affine_map=contiguous_split_map((8, 2), (4, 4), 0)),
            InvalidMapError,
            r"describes \(8, 2\) \(16 elements\)",
        ),
        (
            meta(logical_shape=(7, 2), affine_map=contiguous_split_map((7, 2), (3, 2, 2), 0)),
            InvalidMapError,
            r"describes ranks \[0, 1, 2\], the engine has 2",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_refused_and_never_passed_over(metadata, error, message):
    with pytest.raises(error, match=message) as caught:
        lower_layer_meta(metadata, 2, (7, 2), param="model.w")
    assert caught.value.param == "model.w"
    assert "model.w" in str(caught.value)


def test_destination_fields_do_not_enter_the_map():
    plain = meta(partition_dim=0, logical_shape=(8, 2), partition_sizes=(5, 3))
    told = meta(
        partition_dim=0,
        logical_shape=(8, 2),
        partition_sizes=(5, 3),
        output_shape=(99,),
        target_partition_shape=(1, 1),
    )
    assert lower_layer_meta(plain, 2, (8, 2)) == lower_layer_meta(told, 2, (8, 2))


def test_a_scaled_map_keeps_its_scale():
    metadata = meta(logical_shape=(4,), affine_map=replicated_map((4,), 2, scale=0.5))
    assert {piece.scale for _, piece in lower_layer_meta(metadata, 2, (4,)).pieces()} == {0.5}


GOOD = {"partition_dim": 0, "logical_shape": (8, 4)}


@pytest.mark.parametrize(
    "meta",
    [
        5,
        {"conversion": "text"},
        {**GOOD, "partition_dim": "0"},
        {**GOOD, "partition_dim": float("inf")},
        {**GOOD, "partition_dim": 10**6000},
        {**GOOD, "logical_shape": (10**6000, 4)},
        {**GOOD, "sub_param_shape": -1},
        {**GOOD, "sub_param_shape": {1, 2}},
        {**GOOD, "sub_param_shape": ["x", 1]},
        {**GOOD, "sub_param_sizes": (4, 4), "universal_checkpoint_version": 0.4, "sub_param_shard_widths": 4},
        {**GOOD, "sub_param_sizes": (4, 4), "universal_checkpoint_version": "new"},
        {**GOOD, "conversion": {"affine_map": 5}},
    ],
)
def test_metadata_of_another_kind_is_refused_in_words(meta):
    with pytest.raises(AffineError):
        lower_layer_meta(meta, 2, (8, 4), param="w")


@pytest.mark.parametrize(("degree", "shape"), [(0, (8, 4)), (None, (8, 4)), (2, None), (2, ("a",))])
def test_a_target_that_cannot_be_is_refused(degree, shape):
    with pytest.raises(AffineError, match="expected"):
        lower_layer_meta(GOOD, degree, shape)
