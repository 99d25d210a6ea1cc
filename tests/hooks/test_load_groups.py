"""Parameter groups continue the saved groups their parameters were in; states take the form their optimizer gives."""

from __future__ import annotations

import engines
import pytest
import torch

import deepspeed_affine
from deepspeed_affine.errors import AffineError, CheckpointFormatError, UnsupportedLayoutError
from deepspeed_affine.hooks.agreement import together
from deepspeed_affine.hooks.param_groups import match_groups, take_hyperparameters
from deepspeed_affine.hooks.report import Reporting
from deepspeed_affine.hooks.state_forms import keeps_step_in_group, kept_states, number_in_form, state_dtype


def taken(live, members, saved, saved_members):
    groups = [dict(group) for group in live]
    report = Reporting("here")
    take_hyperparameters(groups, match_groups(groups, members, saved, saved_members), report)
    return groups, {str(row) for row in report.not_restored}


A, B = {"lr": 0.1, "weight_decay": 0.5, "params": [1]}, {"lr": 0.2, "weight_decay": 0.0, "params": [2]}
NEW = {"lr": 9.0, "weight_decay": 9.0, "params": [7]}


def test_groups_are_matched_by_their_parameters_and_not_by_their_order():
    groups, left = taken([NEW, NEW], [{"b"}, {"a", "c"}], [A, B], [{"a", "c"}, {"b"}])
    assert groups == [{**B, "params": [7]}, {**A, "params": [7]}]
    assert left == set()


def test_one_group_of_several_takes_what_they_agree_on():
    groups, left = taken([NEW], [{"a", "b"}], [A, {**B, "lr": 0.1}], [{"a"}, {"b"}])
    assert groups == [{"lr": 0.1, "weight_decay": 9.0, "params": [7]}]
    assert left == {"weight_decay of parameter group 0: its parameters were in 2 saved groups, with 0.5, 0.0"}


def test_several_groups_of_one_keep_what_tells_them_apart():
    live = [{**NEW, "weight_decay": 1.0}, {**NEW, "weight_decay": 0.0}]
    groups, left = taken(live, [{"a"}, {"b"}], [A], [{"a", "b"}])
    assert [group["lr"] for group in groups] == [0.1, 0.1]
    assert [group["weight_decay"] for group in groups] == [1.0, 0.0]
    assert len(left) == 2


def test_a_group_of_new_parameters_keeps_its_own():
    groups, left = taken([NEW, NEW], [{"a"}, {"n"}], [A], [{"a"}])
    assert groups == [{**A, "params": [7]}, NEW]
    assert left == {"every hyperparameter of parameter group 1: none of its parameters was in a saved group"}


def test_without_names_order_decides_and_another_number_is_refused():
    groups, _ = taken([NEW, NEW], [{"b"}, {"a"}], [A, B], None)
    assert [group["lr"] for group in groups] == [0.1, 0.2]
    with pytest.raises(UnsupportedLayoutError, match="2 parameter groups and the engine has 1"):
        match_groups([NEW], [{"a"}], [A, B], None)


def test_how_this_machine_steps_is_not_taken_and_a_tensor_rate_is_filled():
    rate = torch.tensor(9.0)
    live = [{"lr": rate, "fused": True, "betas": (0.5, 0.5), "params": []}]
    saved = [{"lr": 0.1, "fused": False, "betas": (0.9, 0.95), "step": 3, "params": []}]
    groups, _ = taken(live, [{"a"}], saved, [{"a"}])
    assert groups[0]["lr"] is rate
    assert rate == 0.1
    assert (groups[0]["fused"], groups[0]["betas"], "step" in groups[0]) == (True, (0.9, 0.95), False)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
)
def test_what_is_known_of_torchs_optimizers_is_what_they_do(make):
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = make([weight])
    weight.grad = torch.ones(5)
    optimizer.step()
    state = {name: value for name, value in optimizer.state[weight].items() if value is not None}
    kept = kept_states(optimizer, optimizer.param_groups[0])
    elements = {name for name, value in state.items() if value.shape == weight.shape}
    assert set(kept.required) <= elements <= set(kept.required) | set(kept.optional)
    assert set(kept.numbers) == set(state) - elements
    for name in elements:
        assert state_dtype(optimizer, weight, torch.float64) == state[name].dtype
    for name in kept.numbers:
        made = number_in_form(optimizer, optimizer.param_groups[0], weight, name, None, 1)
        assert (type(made), made.dtype, made.shape) == (type(state[name]), state[name].dtype, state[name].shape)
        assert number_in_form(optimizer, optimizer.param_groups[0], weight, name, state[name], 5) is state[name]
        assert float(state[name]) == 5.0


@pytest.mark.parametrize(("source", "target"), [(1, 3), (3, 0), (0, 1)])
@pytest.mark.parametrize("plain", [True, False], ids=["into a number", "into a tensor"])
def test_a_rate_kept_as_a_tensor_comes_back(tmp_path, source, target, plain):
    def build(stage, seed, rate):
        make = lambda groups: torch.optim.AdamW(groups, lr=rate, foreach=False)  # noqa: E731
        return engines.make_engine(stage, optimizer=make, seed=seed)

    engine = build(source, 1, torch.tensor(0.02))
    engine.optimizer.param_groups[0]["lr"].fill_(0.007)
    engines.take_steps(engine, 1)
    engine.save_checkpoint(str(tmp_path), tag="saved")
    mine = 0.5 if plain else torch.tensor(0.5)
    other = build(target, 2, mine)
    report = deepspeed_affine.load_checkpoint(other, tmp_path)
    assert report.complete, str(report)
    rate = other.optimizer.param_groups[0]["lr"]
    assert (type(rate), float(rate)) == (type(mine), float(torch.tensor(0.007)))
    assert engines.take_steps(other, 2, first=1) == pytest.approx(engines.take_steps(engine, 2, first=1), rel=1e-6)


def test_the_form_of_a_step_is_the_optimizers():
    class Fused(torch.optim.SGD):
        pass

    mine = Fused([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert kept_states(mine, {}) is None
    assert number_in_form(mine, {}, None, "step", None, 3) == 3
    assert type(number_in_form(mine, {}, None, "step", 1, torch.tensor(3.0))) is int
    Fused.__module__ = "deepspeed.ops.adam.fused_adam"
    assert type(number_in_form(mine, {}, None, "step", None, torch.tensor(3.0))) is int
    assert not keeps_step_in_group(mine, {"step": 0}, {"step": 1})
    Fused.__module__ = "apex.optimizers.fused_adam"
    assert keeps_step_in_group(mine, {}, {})


def test_faults_of_one_process_are_one_error_and_a_bug_is_itself():
    def at_fault(kind):
        with together("about") as faults:
            faults.add(CheckpointFormatError("first"))
            faults.add(CheckpointFormatError("first"))
            raise kind("second")

    with pytest.raises(CheckpointFormatError, match="about: 2 faults\nfirst\nsecond") as caught:
        at_fault(AffineError)
    assert len(caught.value.faults) == 2
    with pytest.raises(ZeroDivisionError):
        at_fault(ZeroDivisionError)
    with together("about") as faults:
        assert not faults
