"""What is read of a stored parameter is what its map says; what does not fit is refused by name before it is read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.errors import AffineError, CheckpointFormatError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.hooks.layouts import LiveParam
from deepspeed_affine.hooks.stored_params import StoredParams, is_same_view
from deepspeed_affine.ir import AffinePiece, ParamAffineMap, contiguous_split_map
from deepspeed_affine.lowering.policy import ScaledStates

FULL = torch.arange(1.0, 43.0).reshape(7, 6)
STATES = {"fp32": FULL, "exp_avg": FULL + 100, "exp_avg_sq": FULL + 200}


def store(tmp_path, name="layer.weight", **states):
    folder = tmp_path / "zero" / name
    folder.mkdir(parents=True, exist_ok=True)
    for state, value in states.items():
        torch.save(value, folder / f"{state}.pt")
    return str(tmp_path / "zero")


def stored_as_files(tmp_path, states=STATES, **entries):
    return store(tmp_path, **{state: {"param": value, **entries} for state, value in states.items()})


def live_param(layout, rank=0, universal="layer.weight"):
    return LiveParam("layer.weight", universal, layout, rank, "patterns")


ROWS = contiguous_split_map((7, 6), [3, 4], 0)
COLUMNS = contiguous_split_map((7, 6), [2, 4], 1)


def scaled(factor):
    piece = AffinePiece((7, 6), 0, (6, 1), 0, (6, 1), (0, 1), factor)
    return ParamAffineMap((7, 6), {0: (7, 6), 1: (7, 6)}, {0: (piece,), 1: (piece,)})


@pytest.mark.parametrize("layout", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("rank", [0, 1])
def test_any_part_of_any_state_is_the_shards(tmp_path, layout, rank):
    stored = StoredParams(stored_as_files(tmp_path), ScaledStates.REFUSE)
    live = live_param(layout, rank)
    for state, full in STATES.items():
        shard = layout.extract(full, rank).flatten()
        for start in range(0, shard.numel(), 5):
            out = torch.full((shard.numel() - start,), math.nan)
            stored.fill(live, state, start, out)
            assert torch.equal(out, shard[start:])
    stored.close()


def test_a_native_expert_is_found_under_its_global_name(tmp_path):
    zero = store(tmp_path, "experts.5.weight", fp32={"param": FULL})
    stored = StoredParams(zero, ScaledStates.REFUSE)
    out = torch.empty(18)
    stored.fill(live_param(ROWS, universal="experts.5.weight"), "fp32", 0, out)
    assert torch.equal(out, FULL[:3].flatten())


@pytest.mark.parametrize("factor", [0.5, 0.25, -2.0])
def test_scaled_pieces_follow_the_policy(tmp_path, factor):
    zero, live = stored_as_files(tmp_path), live_param(scaled(factor), 1)
    out = torch.full((42,), math.nan)
    for policy in ScaledStates:
        StoredParams(zero, policy).fill(live, "fp32", 0, out)
        assert torch.equal(out, FULL.flatten() * factor)
    for state, power in (("exp_avg", -1), ("exp_avg_sq", -2)):
        with pytest.raises(UnsupportedLayoutError, match=rf"'layer\.weight'.*'{state}' would not follow") as refused:
            StoredParams(zero, ScaledStates.REFUSE).fill(live, state, 0, out)
        assert refused.value.param == "layer.weight"
        StoredParams(zero, ScaledStates.RESET).fill(live, state, 0, out)
        assert not out.any()
        StoredParams(zero, ScaledStates.POWER).fill(live, state, 0, out)
        assert torch.equal(out, STATES[state].flatten() * factor**power)


def test_no_power_is_guessed(tmp_path):
    zero = stored_as_files(tmp_path, {"fp32": FULL, "momentum_buffer": FULL})
    with pytest.raises(UnsupportedLayoutError, match=r"known for \['exp_avg', 'exp_avg_sq', 'fp32'\] only"):
        StoredParams(zero, ScaledStates.POWER).part(live_param(scaled(0.5)), "momentum_buffer", 0, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_padding_rows_of_a_vocabulary_are_zero(tmp_path, rank):
    padded = contiguous_split_map((10, 6), [5, 5], 0)
    stored = StoredParams(stored_as_files(tmp_path, vocab_tensor=True), ScaledStates.REFUSE)
    expected = torch.cat([FULL, torch.zeros(3, 6)])[5 * rank : 5 * rank + 5].flatten()
    out = torch.full((30,), math.nan)
    stored.fill(live_param(padded, rank), "fp32", 0, out)
    assert torch.equal(out, expected)


def test_rows_may_be_missing_of_a_vocabulary_only(tmp_path):
    padded = live_param(contiguous_split_map((10, 6), [5, 5], 0))
    with pytest.raises(CheckpointFormatError, match="Only a tensor marked 'vocab_tensor' may have fewer rows"):
        StoredParams(stored_as_files(tmp_path), ScaledStates.REFUSE).part(padded, "fp32", 0, 1)
    shorter = live_param(contiguous_split_map((5, 6), [3, 2], 0))
    with pytest.raises(CheckpointFormatError, match=r"holds shape \(7, 6\), the engine's parameter has \(5, 6\)"):
        StoredParams(stored_as_files(tmp_path, vocab_tensor=True), ScaledStates.REFUSE).part(shorter, "fp32", 0, 1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "fp32.pt").unlink(), r"holds no fp32\.pt"),
        (lambda folder: (folder / "fp32.pt").write_bytes(b"PK"), r"fp32\.pt"),
        (lambda folder: torch.save({"param": FULL.t().contiguous()}, folder / "fp32.pt"), r"holds shape \(6, 7\)"),
        (lambda folder: torch.save(3, folder / "fp32.pt"), "holds a number"),
        (lambda folder: torch.save({"param": [1]}, folder / "fp32.pt"), "holds a list"),
        (lambda folder: folder.rename(folder.parent / "other"), "cannot be listed"),
    ],
)
def test_what_does_not_fit_is_one_error_that_names_the_file(tmp_path, spoil, said):
    zero = stored_as_files(tmp_path)
    spoil(tmp_path / "zero" / "layer.weight")
    stored, live = StoredParams(zero, ScaledStates.REFUSE), live_param(ROWS)

    def look():
        stored.states(live)
        stored.part(live, "fp32", 0, 1)

    with pytest.raises(AffineError, match=said) as refused:
        look()
    assert refused.value.file is not None
    assert refused.value.file.startswith(str(tmp_path))


def test_a_rank_the_map_does_not_know_is_refused(tmp_path):
    stored = StoredParams(stored_as_files(tmp_path), ScaledStates.REFUSE)
    with pytest.raises(InvalidMapError, match=r"describes ranks \[0, 1\], this process is rank 2"):
        stored.part(live_param(ROWS, 2), "exp_avg", 0, 1)


@pytest.mark.parametrize(
    ("stored_value", "expected"),
    [(torch.tensor(5.0), torch.tensor(5.0)), (torch.tensor(5), torch.tensor(5)), (5, 5), (2.5, 2.5)],
)
def test_numbers_keep_their_kind(tmp_path, stored_value, expected):
    stored = StoredParams(store(tmp_path, fp32={"param": FULL}, step=stored_value), ScaledStates.REFUSE)
    found = stored.number(live_param(ROWS), "step")
    assert type(found) is type(expected)
    assert found == expected
    if torch.is_tensor(expected):
        assert found.dtype == expected.dtype
    assert stored.number(live_param(ROWS), "fp32") is None


shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(shapes, shapes)
def test_one_shape_splits_axes_of_the_other_or_they_are_different_views(shape, other):
    """Splitting an axis in two, or leaving out an axis of extent 1, again and again is all that is allowed."""

    def coarsenings(of):
        of = tuple(extent for extent in of if extent != 1)
        found, waiting = set(), [of]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                waiting += [(*each[:at], each[at] * each[at + 1], *each[at + 2 :]) for at in range(len(each) - 1)]
        return found

    plain = tuple(tuple(extent for extent in each if extent != 1) for each in (shape, other))
    expected = plain[0] in coarsenings(other) or plain[1] in coarsenings(shape)
    assert is_same_view(shape, other) == is_same_view(other, shape) == expected


def test_views_without_elements():
    assert is_same_view((0, 4), (0, 4))
    assert is_same_view((0,), (3, 0))
    assert not is_same_view((0, 4), (4, 0))
    assert not is_same_view((0,), (1,))
