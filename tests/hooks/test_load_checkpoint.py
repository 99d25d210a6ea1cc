"""``load_checkpoint`` in one process: from every kind of optimizer into every other, and what it refuses."""

from __future__ import annotations

import engines
import pytest
import torch

import deepspeed_affine
from deepspeed_affine.cli import ds_to_universal
from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.ir import AffinePiece, ParamAffineMap

BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
KINDS = {
    "zero1": (1, {}),
    "zero2": (2, {}),
    "zero3": (3, {}),
    "zero3 in sub-groups": (3, {"zero": {"sub_group_size": 40}}),
    "zero2 offloaded": (2, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    "zero3 offloaded": (3, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    "zero1 aligned": (1, {"zero": {"parameter_alignment": True}}),
    "zero2 round robin": (2, {"zero": {"round_robin_gradients": True}}),
    "zero0": (0, {}),
    "zero0 bf16": (0, {"dtype": "bf16"}),
    "zero1 bf16": (1, {"dtype": "bf16"}),
    "zero3 bf16": (3, {"dtype": "bf16"}),
    "bf16 optimizer": (1, {"dtype": "bf16", **BF16_OPTIMIZER}),
}
PAIRS = [(a, b) for a in KINDS for b in KINDS if ("bf16" in a) == ("bf16" in b)]


def save(engine, folder, *, tag="saved", client_state=None):
    """Save as DeepSpeed saves, and convert; returns the universal folder."""
    engine.save_checkpoint(str(folder / "ordinary"), tag=tag, client_state=client_state or {})
    universal = folder / "universal" / f"{tag}_universal"
    options = ["--input_folder", str(folder / "ordinary" / tag), "--output_folder", str(universal)]
    assert ds_to_universal(["--affine", *options, "--inject_missing_state", "--no-fsync"]) == 0
    return universal


def held(engine):
    """Everything a step depends on, by name: weights, states, hyperparameters, counters."""
    import deepspeed

    from deepspeed_affine.hooks.optimizers import fragments

    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
    for fragment in fragments(engine):
        found[f"{fragment.name}:fp32"] = fragment.master.clone()
        for state, value in fragment.states().items():
            found[f"{fragment.name}:{state}"] = value.clone()
        step = fragment.partition.states.get("step")
        found[f"{fragment.name}:step"] = torch.as_tensor(float(step)) if step is not None else torch.tensor(0.0)
    for name, buffer in engine.module.named_buffers():
        found[name] = buffer.clone()
    return found


def differences(a, b):
    assert set(a) == set(b)
    return [name for name in a if not torch.equal(a[name].flatten(), b[name].flatten())]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint of every kind, what the engine held, and its next four losses."""
    made = {}

    def get(kind):
        if kind not in made:
            stage, options = KINDS[kind]
            engine = engines.make_engine(stage, **options)
            engines.take_steps(engine, 2)
            engine.module.seen.fill_(7.0)
            universal = save(engine, tmp_path_factory.mktemp("saved"), client_state={"epoch": 3})
            before = held(engine)
            made[kind] = universal, before, engines.take_steps(engine, 4, first=2), held(engine)
        return made[kind]

    return get


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_optimizer_continues_what_every_other_saved(saved, source, target):
    universal, before, losses, after = saved(source)
    stage, options = KINDS[target]
    engine = engines.make_engine(stage, seed=2, **options)
    report = deepspeed_affine.load_checkpoint(engine, universal)
    assert differences(held(engine), before) == []
    assert engine.global_steps == 2
    assert dict(report.client_state) == {"epoch": 3}
    assert report.bytes_read > 0
    assert [str(row) for row in report.not_restored] == []
    next_losses = engines.take_steps(engine, 4, first=2)
    if source == target:
        assert next_losses == losses
        assert differences(held(engine), after) == []
    # Another cut lets torch add up in another order.
    assert next_losses == pytest.approx(losses, rel=1e-3 if "bf16" in source else 1e-6)
    direct = deepspeed_affine.load_checkpoint(engine, universal.parents[1] / "ordinary")
    assert differences(held(engine), before) == []
    assert (direct.client_state, direct.not_restored) == (report.client_state, report.not_restored)


QUARTER = ParamAffineMap((10,), {0: (10,)}, {0: [AffinePiece((10,), 0, (1,), 0, (1,), (0,), 0.25)]})
SCALED = {
    "universal_checkpoint_version": 0.5,
    "affine_map": {"version": 1, "params": {r"^up\.bias$": QUARTER.to_dict()}},
}
"""A bias held divided by four, as layers do that add it once a rank."""


@pytest.mark.parametrize("policy", ["refuse", "reset", "power"])
@pytest.mark.parametrize("target", ["zero1", "zero3", "zero0"])
def test_states_of_a_parameter_held_scaled_follow_the_policy(saved, target, policy):
    universal, before, *_ = saved("zero1")
    engine = engines.make_engine(KINDS[target][0], seed=2)
    if policy == "refuse":
        with pytest.raises(UnsupportedLayoutError, match=r"'up\.bias'.*scaled_states='reset'"):
            deepspeed_affine.load_checkpoint(engine, universal, info=SCALED)
        return
    report = deepspeed_affine.load_checkpoint(engine, universal, info=SCALED, scaled_states=policy)
    now = held(engine)
    assert torch.equal(now["up.bias:fp32"], before["up.bias:fp32"] * 0.25)
    factor = {"reset": (0.0, 0.0), "power": (4.0, 16.0)}[policy]
    assert torch.equal(now["up.bias:exp_avg"], before["up.bias:exp_avg"] * factor[0])
    assert torch.equal(now["up.bias:exp_avg_sq"], before["up.bias:exp_avg_sq"] * factor[1])
    assert torch.equal(now["up.weight:exp_avg"], before["up.weight:exp_avg"])
    said = {row.what for row in report.not_restored}
    assert said == ({"exp_avg of up.bias", "exp_avg_sq of up.bias"} if policy == "reset" else set())


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.9, centered=True),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "of its own class": lambda groups: Signed(groups),
}


class Signed(torch.optim.Optimizer):
    """An optimizer nobody knows: one state called ``trend``, and a count that is a plain number."""

    def __init__(self, groups) -> None:
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["trend"], state["count"] = torch.zeros_like(parameter), 0
                    state["trend"].mul_(0.9).add_(parameter.grad)
                    state["count"] += 1
                    parameter.add_(state["trend"].sign(), alpha=-group["lr"] / state["count"])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("source", "target"), [(1, 1), (1, 3), (3, 1), (0, 3), (3, 0)])
def test_whatever_states_an_optimizer_keeps_are_carried_between_stages(tmp_path, name, source, target):
    engine = engines.make_engine(source, optimizer=OPTIMIZERS[name])
    engines.take_steps(engine, 2)
    universal = save(engine, tmp_path)
    before, losses = held(engine), engines.take_steps(engine, 2, first=2)
    other = engines.make_engine(target, optimizer=OPTIMIZERS[name], seed=2)
    engines.take_steps(other, 1, first=70)
    report = deepspeed_affine.load_checkpoint(other, universal)
    assert differences(held(other), before) == []
    assert report.complete, str(report)
    assert engines.take_steps(other, 2, first=2) == pytest.approx(losses, rel=1e-6)
