"""``ds_affine inspect`` and ``diff`` on checkpoints DeepSpeed saved, and on what both converters made of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.storage.pt_reader import load_pickle

pytestmark = pytest.mark.real

CASES = [
    pytest.param("tp2_zero1_uneven", marks=pytest.mark.quick),
    pytest.param("zero3_frozen", marks=pytest.mark.quick),
    "zero1_tied",
    "tp2dp2_zero2",
    "tp2_zero3_uneven",
    "pp2dp2_zero1",
    "zero2_dp3",
    "moe_zero1",
    "ep2tp2_zero1",
]


def run(capsys, *arguments):
    """``(exit code, document, lines on stderr)`` of one verb."""
    capsys.readouterr()
    code = ds_affine([*map(str, arguments), "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err.splitlines()


def with_bytes(path: Path):
    return [storage for storage in load_pickle(path).archive.storages.values() if storage.nbytes]


@pytest.mark.parametrize("case", CASES)
def test_inspect_describes_it(real, capsys, case):
    trained = real.trained(case)
    code, found, err = run(capsys, "inspect", trained.folder, "--params")
    assert (code, err, found["complete"]) == (0, [], True)
    assert found["conversion"]["would"] == "convert"
    topology = found["topology"]
    for axis in ("tp", "pp", "dp", "ep"):
        digits = case.partition(axis)[2][:1]
        if digits.isdigit() and not (axis == "dp" and topology["ep"] > 1):
            assert topology[axis] == int(digits), axis
    assert topology["zero_stage"] == int(case.partition("zero")[2][0])
    assert found["versions"]["deepspeed"] == [real.deepspeed]
    assert found["steps"]["global_steps"] == trained.case.steps
    files = [path for path in trained.folder.iterdir() if path.is_file()]
    assert sum(each["count"] for each in found["files"].values()) == len(files)
    assert sum(each["bytes"] for each in found["files"].values()) == sum(path.stat().st_size for path in files)
    assert all(param["layout_id"] for param in found["params"])
    assert found["incomplete"] == found["without_fragments"] == found["parameters"]["undescribed"] == []
    assert set(found["states"]) == {"fp32", "exp_avg", "exp_avg_sq", "step"}
    assert found["states"]["step"]["values"] == [float(trained.case.steps)]


@pytest.mark.parametrize("case", ["tp2_zero1_uneven", "zero3_frozen", "pp2dp2_zero1"])
def test_inspect_goes_on_past_missing_and_damaged_files(real, capsys, tmp_path, case):
    folder = tmp_path / "checkpoint"
    shutil.copytree(real.trained(case).folder, folder)
    whole = run(capsys, "inspect", folder)[1]
    optimizers = sorted(folder.glob("*_optim_states.pt"))
    optimizers[-1].unlink()
    optimizers[0].write_bytes(optimizers[0].read_bytes()[:-100])
    code, found, err = run(capsys, "inspect", folder)
    assert code == 2
    assert found["missing"] == [optimizers[-1].name]
    assert [each["file"] for each in found["damaged"]] == [optimizers[0].name]
    assert len(err) == 2
    assert found["parameters"]["count"] == whole["parameters"]["count"]
    assert {key: found["topology"][key] for key in ("tp", "pp", "dp")} == {
        key: whole["topology"][key] for key in ("tp", "pp", "dp")
    }


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_equals_what_it_is_converted_to(real, capsys, case):
    folder = real.trained(case).folder
    code, found, err = run(capsys, "diff", folder, real.ours(case))
    assert (code, found["contents"]["different"], err) == (0, [], [])
    assert found["contents"]["equal_tensors"] > 10
    code, found, _ = run(capsys, "diff", folder, real.ours(case), "--layouts")
    assert (code, found["layouts"]["different"]) == (0, [])
    assert run(capsys, "inspect", real.ours(case))[0] == 0


STOCK_CASES = ["tp2_zero1_uneven", "zero3_frozen", "pp2dp2_zero1", "zero1_tied"]


@pytest.mark.parametrize("case", STOCK_CASES)
def test_both_converters_write_equal_folders(real, capsys, case):
    stock = real.stock(case)
    assert stock.ok, stock.error
    code, found, _ = run(capsys, "diff", stock.folder, real.ours(case))
    assert (code, found["contents"]["different"]) == (0, [])
    assert found["contents"]["only_a"] == found["contents"]["only_b"] == []
    assert run(capsys, "diff", real.trained(case).folder, stock.folder)[0] == 0
    code, found, _ = run(capsys, "inspect", stock.folder)
    assert (code, found["complete"], found["manifest"]) == (0, True, None)


@pytest.mark.parametrize("case", ["tp2_zero1_uneven", "tp2_zero3_uneven", "pp2dp2_zero1"])
def test_a_changed_bit_is_named(real, capsys, tmp_path, case):
    """In a sample of the storages of every file; an element of an optimizer partition that belongs to a parameter is
    named by it, also when it is compared with the universal folder."""
    folder = real.trained(case).folder
    changed = tmp_path / "checkpoint"
    shutil.copytree(folder, changed)
    named = 0
    for path in sorted(changed.glob("*.pt")):
        places = with_bytes(path)
        for storage in {places[at] for at in (0, len(places) // 2, -1) if places}:
            at = storage.byte_offset + storage.nbytes // 2
            for write in (1, 0):
                with open(path, "r+b") as file:
                    file.seek(at)
                    (value,) = file.read(1)
                    file.seek(at)
                    file.write(bytes([value ^ 4]))
                if not write:
                    break
                code, found, _ = run(capsys, "diff", folder, changed)
                rows = [row for row in found["contents"]["different"] if row["kind"] == "tensor"]
                assert code == 1
                assert {row["file"] for row in rows} == {path.name}
                assert all(row["differing"] == 1 for row in rows)
                if "optim" in path.name and rows[0]["param"]:
                    named += 1
                    code, found, _ = run(capsys, "diff", changed, real.ours(case))
                    assert code == 1
                    # ZeRO-3's first rank is there twice: by parameter, and in the optimizer state all share.
                    owners = {(row["param"], row["state"]) for row in found["contents"]["different"]}
                    assert owners - {(None, None)} == {(rows[0]["param"], rows[0]["state"])}
    assert named
    assert run(capsys, "diff", folder, changed)[0] == 0


@pytest.mark.cases("tp2_zero1_uneven", "tp2_zero2_uneven", "zero1_fp32", "zero3_fp32")
def test_other_stages_have_other_layouts_of_the_same_parameters(real, capsys):
    code, found, _ = run(
        capsys, "diff", real.trained("tp2_zero1_uneven").folder, real.trained("tp2_zero2_uneven").folder, "--layouts"
    )
    assert code == 1
    assert [each["key"] for each in found["layouts"]["topology"]] == ["zero_stage"]
    assert found["layouts"]["different"] == []
    code, found, _ = run(
        capsys, "diff", real.trained("zero1_fp32").folder, real.trained("zero3_fp32").folder, "--contents"
    )
    # The same training, summed in another order: the same tensors, a few last bits apart.
    assert found["contents"]["only_a"] == found["contents"]["only_b"] == []
    rows = found["contents"]["different"]
    assert all(row["kind"] == "tensor" and row["max_abs"] < 1e-6 for row in rows)
