"""A folder as one description, from metadata alone."""

import os

import pytest
import torch
from converting import assert_converts
from synthetic import COLUMN, Foreign, Param, World, ZeroStageByName, make, random_full

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.execute import checkpoint as module
from deepspeed_affine.execute.checkpoint import read_checkpoint, survey_checkpoint
from deepspeed_affine.lowering.states import ShardKey


def params():
    return [Param("up", random_full((4, 3), 1), COLUMN), Param("norm", random_full((3,), 2), stages=(0, 1))]


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 3), (2, 2, 2), (4, 1, 1), (1, 2, 12)])
@pytest.mark.parametrize("record", [True, False])
def test_degrees_and_shapes(tmp_path, tp, pp, dp, record):
    world = World(tp=tp, pp=pp, dp=dp, record_degrees=record, layer_files=pp > 1)
    made = make(world, params())
    found = read_checkpoint(made.save(tmp_path / "in"))
    assert (found.tp_degree, found.pp_degree, found.dp_degree) == (tp, pp, dp)
    assert found.stage == 1
    assert found.shapes["up"] == tuple((4 // tp, 3) for _ in range(tp))
    assert found.shapes["norm"] == ((3,),) * tp
    assert set(found.states["norm"].tensors["fp32"]) == {
        ShardKey(stage, rank) for stage in range(pp) for rank in range(tp)
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_pickled_by_name_is_the_same_stage(tmp_path, stage):
    made = make(World(stage=stage, dp=2), params())
    for rank in range(2):
        made.optim(rank)["zero_stage"] = ZeroStageByName(stage)
    assert read_checkpoint(made.save(tmp_path / "in")).stage == stage
    assert_converts(made, tmp_path)


@pytest.mark.parametrize("stage", [ZeroStageByName(0), Foreign(x=1), [], "weights", True])
def test_what_is_no_stage_is_refused(tmp_path, stage):
    made = make(World(), params())
    made.optim(0)["zero_stage"] = stage
    with pytest.raises(CheckpointFormatError, match="'zero_stage'"):
        read_checkpoint(made.save(tmp_path / "in"))


def test_no_tensor_byte_is_read(tmp_path):
    """Every data byte is overwritten; the description stays the same."""
    from deepspeed_affine.storage.pt_reader import load_pickle

    made = make(World(tp=2, dp=2), params())
    folder = made.save(tmp_path / "in")
    before = read_checkpoint(folder)
    for name in made.files:
        path = os.path.join(folder, name)
        storages = list(load_pickle(path).archive.storages.values())
        with open(path, "r+b") as file:
            for storage in storages:
                file.seek(storage.byte_offset)
                file.write(b"\xee" * storage.nbytes)
    after = read_checkpoint(folder)
    assert after.shapes == before.shapes
    assert after.states.params == before.states.params


@pytest.mark.parametrize("stage", [1, 3])
def test_model_files_are_read_a_bounded_number_of_times(tmp_path, monkeypatch, stage):
    made = make(World(stage=stage, tp=2, dp=2), params())
    folder = made.save(tmp_path / "in")
    calls = []
    real = module.load_checkpoint_file
    monkeypatch.setattr(module, "load_checkpoint_file", lambda path: calls.append(path) or real(path))
    read_checkpoint(folder)
    assert len(calls) == len(made.files) + 1  # the first optimizer file says which stage it is


def test_files_of_two_runs_that_record_other_degrees(tmp_path):
    made = make(World(tp=2), params())
    made.model(1)["checkpoint_parallel_dimensions"] = {"pp_degree": 2, "tp_degree": 1}
    with pytest.raises(CheckpointFormatError, match="different degrees"):
        read_checkpoint(made.save(tmp_path / "in"))


def test_degrees_that_do_not_multiply_to_the_ranks(tmp_path):
    made = make(World(tp=2), params())
    for rank in range(2):
        made.model(rank)["checkpoint_parallel_dimensions"] = {"pp_degree": 2, "tp_degree": 2}
    with pytest.raises(CheckpointFormatError, match="need 4"):
        read_checkpoint(made.save(tmp_path / "in"))


def test_tied_shapes_that_differ_between_stages(tmp_path):
    made = make(World(pp=2, layer_files=True), params())
    made.model(1)["param_shapes"][0]["norm"] = torch.Size([4])
    with pytest.raises(CheckpointFormatError, match=r"'norm'.*\(3,\) and \(4,\)"):
        read_checkpoint(made.save(tmp_path / "in"))


@pytest.mark.parametrize("stage", [0, 4, -1, "1", None, True, 1.0])
def test_stages_that_are_none(tmp_path, stage):
    made = make(World(), params())
    made.optim()["zero_stage"] = stage
    with pytest.raises(CheckpointFormatError, match="zero_stage"):
        read_checkpoint(made.save(tmp_path / "in"))


def test_the_bf16_optimizer_records_no_stage(tmp_path):
    made = make(World(prefix="bf16_", dp=2), params())
    for rank in range(2):
        del made.optim(rank)["zero_stage"]
    assert read_checkpoint(made.save(tmp_path / "in")).stage == 1


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_survey_of_a_whole_folder_is_the_checkpoint(tmp_path, stage):
    made = make(World(stage=max(stage, 1), tp=2, dp=2), params())
    if not stage:
        made.files = {name: root for name, root in made.files.items() if "optim" not in name}
    folder = made.save(tmp_path / "in")
    found, read = survey_checkpoint(folder), read_checkpoint(folder)
    assert (found.missing, found.faults) == ((), ())
    assert found.checkpoint.shapes == read.shapes
    assert found.checkpoint.states.params == read.states.params
    degrees = [(each.stage, each.tp_degree, each.pp_degree, each.dp_degree) for each in (found.checkpoint, read)]
    assert degrees[0] == degrees[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_survey_names_what_reading_refuses_and_reads_on(tmp_path, stage):
    made = make(World(stage=stage, tp=2, dp=3), params())
    folder = made.save(tmp_path / "in")
    os.unlink(os.path.join(folder, made.optim_name(1, 1)))
    with open(os.path.join(folder, made.optim_name(0, 0)), "wb") as file:
        file.write(b"PK\x03\x04")
    found = survey_checkpoint(folder)
    assert found.missing == (os.path.join(folder, made.optim_name(1, 1)),)
    assert {os.path.basename(fault.file) for fault in found.faults} == {made.optim_name(1, 1), made.optim_name(0, 0)}
    checkpoint = found.checkpoint
    assert (checkpoint.stage, checkpoint.tp_degree, checkpoint.dp_degree) == (stage, 2, 3)
    assert set(checkpoint.states) == {"up", "norm"}
    held = checkpoint.states["up"].tensors["fp32"]
    assert sum(fragment.numel for fragment in held[ShardKey(0, 1)]) < 6
    with pytest.raises(CheckpointFormatError, match="missing"):
        read_checkpoint(folder)


def test_a_survey_reads_each_file_through_the_given_reader(tmp_path):
    from deepspeed_affine.storage.pt_reader import load_pickle

    made = make(World(tp=2, dp=2), params())
    folder = made.save(tmp_path / "in")
    seen = []
    survey_checkpoint(folder, lambda path: seen.append(os.path.basename(path)) or load_pickle(path))
    assert set(seen) == set(made.files)
