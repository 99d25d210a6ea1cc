"""The comparator: equal folders are equal, and every planted difference is found and named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))
from synthetic import Foreign, ZeroStage, ZeroStageByName, save

from deepspeed_affine.commands.parity import ParityRun, format_table
from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.parity import FrozenSlices, ParityRow, Verdict, compare_universal

WEIGHT = "zero/layer.weight/fp32.pt"
STEP = "zero/layer.weight/step.pt"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal universal folders, the first with our manifest."""
    theirs = tmp_path / "theirs"
    (theirs / "zero/layer.weight").mkdir(parents=True)
    value = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    value[1, 1] = float("nan")
    torch.save({"cat_dim": 0, "vocab_tensor": True, "param": value}, theirs / WEIGHT)
    torch.save(torch.tensor(2.0), theirs / STEP)
    torch.save({"param_groups": [{"lr": 0.1}]}, theirs / "zero/optimizer_state.pt")
    torch.save({"module": {"layer.weight": value}}, theirs / "mp_rank_00_model_states.pt")
    ours = tmp_path / "ours"
    shutil.copytree(theirs, ours)
    (ours / "affine_manifest.json").write_text("{}")
    return ours, theirs


def resave(path: Path, **changes: object) -> None:
    torch.save({**torch.load(path), **changes}, path)


def only_difference(folders: tuple[Path, Path]) -> ParityRow:
    report = compare_universal(*folders)
    assert not report.equal
    assert len(report.different) == 1
    return report.different[0]


def test_equal_folders_are_equal_and_the_manifest_does_not_count(folders: tuple[Path, Path]) -> None:
    report = compare_universal(*folders)
    assert report.equal
    assert [row.path for row in report.rows] == [
        "mp_rank_00_model_states.pt",
        WEIGHT,
        STEP,
        "zero/optimizer_state.pt",
    ]
    assert {row.verdict for row in report.rows} == {Verdict.EQUAL}
    json.dumps(report.to_dict())


def test_equal_values_in_other_zip_bytes_are_equal(folders: tuple[Path, Path]) -> None:
    value = torch.load(folders[0] / WEIGHT)
    torch.save({**value, "param": value["param"].t().contiguous().t()}, folders[0] / WEIGHT)
    assert (folders[0] / WEIGHT).read_bytes() != (folders[1] / WEIGHT).read_bytes()
    assert compare_universal(*folders).equal


def with_stage(kind: type[ZeroStage], *, stage: int = 1, order: int = 1, value: float = 1.0) -> dict[str, object]:
    entries = [("zero_stage", kind(stage)), ("scaler", Foreign(scale=2.0)), ("moment", torch.full((3,), value))]
    return dict(entries[::order])


def test_a_stage_pickled_by_another_python_is_an_expected_difference(folders: tuple[Path, Path]) -> None:
    shared = "zero/optimizer_state.pt"
    save(with_stage(ZeroStage), folders[0] / shared)
    save(with_stage(ZeroStageByName), folders[1] / shared)
    report = compare_universal(*folders)
    assert [(row.path, row.rule) for row in report.expected] == [(shared, "enumeration_by_name")]
    assert report.equal
    for other in (
        with_stage(ZeroStageByName, stage=2),
        with_stage(ZeroStageByName, order=-1),
        with_stage(ZeroStageByName, value=2.0),
        {**with_stage(ZeroStageByName), "more": 1},
        with_stage(ZeroStage, value=-1.0),
    ):
        save(other, folders[1] / shared)
        assert only_difference(folders).path == shared


@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_of_one_element_is_found(folders: tuple[Path, Path], bit: int) -> None:
    value = torch.load(folders[0] / WEIGHT)["param"].clone()
    words = value.view(torch.int32).view(-1)
    words[6] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    resave(folders[0] / WEIGHT, param=value)
    row = only_difference(folders)
    assert row.path == WEIGHT
    assert "first differing element 6 of 12" in row.detail


def test_another_nan_is_a_difference_though_no_value_compares(folders: tuple[Path, Path]) -> None:
    value = torch.load(folders[0] / WEIGHT)["param"].clone()
    value.view(torch.int32).view(-1)[5] += 1
    assert value.isnan().sum() == 1
    resave(folders[0] / WEIGHT, param=value)
    assert "element 5" in only_difference(folders).detail


def test_dtype_and_shape_are_found_and_named(folders: tuple[Path, Path]) -> None:
    value = torch.load(folders[1] / WEIGHT)["param"]
    resave(folders[0] / WEIGHT, param=value.double())
    assert "torch.float64 against DeepSpeed's torch.float32" in only_difference(folders).detail
    resave(folders[0] / WEIGHT, param=value.reshape(4, 3))
    assert "shape [4, 3] against DeepSpeed's [3, 4]" in only_difference(folders).detail


def test_key_order_and_missing_keys_are_differences(folders: tuple[Path, Path]) -> None:
    value = torch.load(folders[1] / WEIGHT)
    torch.save(dict(reversed(value.items())), folders[0] / WEIGHT)
    assert "keys ['param', 'vocab_tensor', 'cat_dim']" in only_difference(folders).detail
    torch.save({key: value[key] for key in ("cat_dim", "param")}, folders[0] / WEIGHT)
    assert "keys ['cat_dim', 'param']" in only_difference(folders).detail


@pytest.mark.parametrize(("changed", "said"), [(1, "1 against DeepSpeed's 0"), (False, "bool against DeepSpeed's int")])
def test_non_tensors_are_compared_by_type_and_value(folders: tuple[Path, Path], changed: object, said: str) -> None:
    resave(folders[0] / WEIGHT, cat_dim=changed)
    assert only_difference(folders).detail == f"['cat_dim']: {said}"


def test_step_files_are_compared_by_type(folders: tuple[Path, Path]) -> None:
    torch.save(2, folders[0] / STEP)
    assert only_difference(folders).detail == "the file: int against DeepSpeed's Tensor"
    torch.save(2, folders[1] / STEP)
    assert compare_universal(*folders).equal


@pytest.mark.parametrize("side", [0, 1])
def test_a_missing_file_is_a_difference_on_either_side(folders: tuple[Path, Path], side: int) -> None:
    (folders[side] / STEP).unlink()
    row = only_difference(folders)
    assert (row.path, row.detail) == (STEP, "only DeepSpeed wrote it" if side == 0 else "only we wrote it")


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero/optimizer_state.pt"])
def test_whole_files_must_agree_byte_for_byte(folders: tuple[Path, Path], name: str) -> None:
    value = torch.load(folders[0] / name)
    torch.save(value, folders[0] / name, _use_new_zipfile_serialization=False)
    assert only_difference(folders).detail.startswith("first differing byte 0")


def test_a_truncated_file_is_a_difference_and_no_crash(folders: tuple[Path, Path]) -> None:
    whole = (folders[0] / WEIGHT).read_bytes()
    (folders[0] / WEIGHT).write_bytes(whole[: len(whole) // 2])
    assert only_difference(folders).detail.startswith("cannot be read")


def test_storage_slack_is_expected_only_on_their_side(folders: tuple[Path, Path]) -> None:
    padded = torch.cat([torch.load(folders[1] / WEIGHT)["param"], torch.ones(1, 4)])
    resave(folders[1] / WEIGHT, param=padded[:3])
    report = compare_universal(*folders)
    assert report.equal
    assert [(row.path, row.rule, row.detail) for row in report.expected] == [
        (WEIGHT, "storage_slack", "16 bytes behind the tensor")
    ]
    resave(folders[1] / WEIGHT, param=padded[1:])
    assert not compare_universal(*folders).equal


def test_frozen_slices_are_allowed_by_name_and_shape_only(folders: tuple[Path, Path]) -> None:
    ours, theirs = folders
    for rank in (0, 1):
        state = {"frozen_param_shapes": {"layer.weight": torch.Size([3, 2])}}
        for folder in folders:
            torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
    resave(theirs / WEIGHT, param=torch.ones(3, 2))
    report = compare_universal(ours, theirs)
    assert [(row.path, row.rule) for row in report.expected] == [(WEIGHT, "frozen_under_autotp")]
    (theirs / WEIGHT).unlink()
    assert compare_universal(ours, theirs).expected[0].detail == "DeepSpeed wrote nothing"
    torch.save({"cat_dim": 0, "vocab_tensor": True, "param": torch.ones(2, 2)}, theirs / WEIGHT)
    assert not compare_universal(ours, theirs).equal
    (theirs / STEP).unlink()
    assert {row.path for row in compare_universal(ours, theirs).different} == {WEIGHT, STEP}


def test_without_tensor_parallelism_no_frozen_difference_is_allowed(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        torch.save({"frozen_param_shapes": {"layer.weight": (3, 2)}}, folder / "mp_rank_00_model_states.pt")
    assert FrozenSlices.of(folders[1]).shapes == {}
    resave(folders[1] / WEIGHT, param=torch.ones(3, 2))
    assert not compare_universal(*folders).equal


def test_the_table_counts_every_file_and_lists_what_differs(folders: tuple[Path, Path]) -> None:
    resave(folders[0] / WEIGHT, cat_dim=1)
    run = ParityRun(compare_universal(*folders), "0.0.0")
    table = format_table(run)
    assert run.exit_code == 1
    assert f"DIFFERENT: {WEIGHT}: ['cat_dim']: 1 against DeepSpeed's 0" in table
    assert table.splitlines()[-1] == "1 files differ"
    total = next(line.split() for line in table.splitlines() if line.split()[0] == "all")
    assert (total[1], total[3:]) == ("4", ["3", "0", "1"])
    assert ParityRun(None, "0.0.0", stock_error="KeyError: 'x'").exit_code == 2


def test_a_missing_folder_and_an_unknown_rule_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="is not a folder"):
        compare_universal(tmp_path / "none", tmp_path)
    with pytest.raises(PolicyError, match="no parity rule"):
        ParityRow("x", Verdict.EXPECTED, rule="invented")
    with pytest.raises(PolicyError, match="belongs to an expected difference"):
        ParityRow("x", Verdict.DIFFERENT, rule="storage_slack")


def test_frozen_parameters_no_file_lists_are_what_only_the_module_knows(tmp_path: Path) -> None:
    for rank in (0, 1):
        state = {
            "module": {name: torch.zeros(3, 2) for name in ("frozen", "trained", "mean", "tied")},
            "frozen_param_shapes": None,
            "param_shapes": [{"trained": torch.Size([3, 2])}],
            "buffer_names": ["mean"],
            "shared_params": {"tied": "trained"},
        }
        torch.save(state, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    assert FrozenSlices.of(tmp_path).shapes == {"frozen": ((3, 2), (3, 2))}
