"""What a caller, a copy or a disk can get wrong about ``load_checkpoint`` and ``attach``: said, and nothing by half."""

from __future__ import annotations

import shutil

import engines
import pytest
import torch
from test_load_checkpoint import differences, held, save
from test_load_refusals import unchanged_by
from torch import nn

import deepspeed_affine
from deepspeed_affine.cli import ds_to_universal
from deepspeed_affine.errors import CheckpointFormatError, PolicyError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    engine = engines.make_engine(1)
    engines.take_steps(engine, 2)
    return save(engine, tmp_path_factory.mktemp("saved"), client_state={"epoch": 3, "micro_steps": 17})


@pytest.fixture
def copy(saved, tmp_path):
    """A copy that may be spoilt."""
    shutil.copytree(saved, tmp_path / "universal")
    return tmp_path / "universal"


# ---------------------------------------------------------------- what is given


def test_what_is_no_engine_is_refused_by_name(saved):
    engine = engines.make_engine(1, seed=2)
    for wrong in (engine.module, engine.optimizer, (engine, None), saved, None):
        named = f"was given a {type(wrong).__name__}, which has no "
        for call in (
            lambda wrong=wrong: deepspeed_affine.load_checkpoint(wrong, saved),
            lambda wrong=wrong: deepspeed_affine.attach(wrong),
            lambda wrong=wrong: deepspeed_affine.with_universal_info({}, wrong),
        ):
            with pytest.raises(PolicyError, match=named):
                call()


def test_an_engine_is_not_collected_from_under_other_names_than_its_model():
    engine = engines.make_engine(1, seed=2)
    for wrong in (engine, None, engine.optimizer):
        with pytest.raises(PolicyError, match=r"expected the model: pass engine\.module"):
            deepspeed_affine.collect_autotp_universal_checkpoint_info(wrong)


def test_a_handle_is_one_short_line():
    engine = engines.make_engine(1, seed=2)
    handle = deepspeed_affine.attach(engine)
    assert repr(handle) == "<Attachment to a DeepSpeedEngine, 7 parameters>"
    handle.detach()
    assert repr(handle) == "<Attachment no longer to a DeepSpeedEngine, 7 parameters>"


def test_a_parameter_that_cannot_be_described_is_said_when_attaching():
    info = {"autotp_unsupported_parameter_patterns": {r"^up\.bias$": "its rows are shuffled"}}
    with pytest.warns(UserWarning, match=r"1 of the engine's parameters can be described by no map.*rows are shuffled"):
        handle = deepspeed_affine.attach(engines.make_engine(1, seed=2), info=info)
    assert set(handle.refused) == {"up.bias"}


def test_an_attribute_of_the_module_that_is_no_info_is_refused():
    engine = engines.make_engine(1, seed=2)
    engine.module.universal_checkpoint_info = ["mine"]
    with pytest.raises(PolicyError, match="the module's universal_checkpoint_info: info is a list"):
        deepspeed_affine.attach(engine)
    assert engine.module.universal_checkpoint_info == ["mine"]


def test_options_of_another_kind_are_refused_before_anything_is_written(saved):
    engine = engines.make_engine(1, seed=2)
    for threads in (0, "4", 1.5):
        unchanged_by(engine, saved, kind=PolicyError, match="threads is .*at least 1", threads=threads)
    unchanged_by(engine, saved, kind=PolicyError, match="info is a list", info=[1])
    unchanged_by(engine, None, kind=PolicyError, match="load_dir is a NoneType")
    for call in (deepspeed_affine.attach, lambda engine, info: deepspeed_affine.with_universal_info({}, engine, info)):
        with pytest.raises(PolicyError, match="info is a list"):
            call(engine, info=[1])


def test_a_key_of_the_user_is_no_counter_of_the_engine(saved):
    engine = engines.make_engine(1, seed=2)
    report = deepspeed_affine.load_checkpoint(engine, saved)
    assert report.client_state["micro_steps"] == 17
    assert engine.micro_steps == 0


# ---------------------------------------------------------------- what was copied


MISSED = {
    "states": ["zero/up.bias/exp_avg.pt", "zero/up.bias/exp_avg_sq.pt", "zero/up.bias/step.pt"],
    "weights": ["zero/down.weight/fp32.pt"],
    "frozen": ["zero/norm.weight/fp32.pt"],
    "hyperparameters": ["zero/optimizer_state.pt"],
    "model": ["mp_rank_00_model_states.pt"],
}


@pytest.mark.parametrize("missed", MISSED)
def test_a_folder_copied_in_part_is_refused(copy, missed):
    for name in MISSED[missed]:
        (copy / name).unlink()
    error = unchanged_by(
        engines.make_engine(1, seed=2), copy, kind=CheckpointFormatError, match=f"{len(MISSED[missed])} of the 29 files"
    )
    assert "Copy the folder again" in error.message
    assert MISSED[missed][0] in error.message


def test_deepspeeds_own_loader_is_not_let_near_a_folder_copied_in_part(copy):
    engine = engines.make_engine(1, seed=2, checkpoint={"load_universal": True})
    with deepspeed_affine.attach(engine):
        (copy / "zero" / "up.bias" / "exp_avg.pt").write_bytes(b"")
        before = held(engine)
        with pytest.raises(CheckpointFormatError, match="1 of the 29 files"):
            engine.load_checkpoint(str(copy.parent), tag=copy.name)
    assert differences(held(engine), before) == []


def test_weights_that_are_gone_are_not_made_up_from_the_modules(copy):
    (copy / "affine_manifest.json").unlink()
    (copy / "zero" / "down.weight" / "fp32.pt").unlink()
    error = unchanged_by(engines.make_engine(1, seed=2), copy, match=r"optimizer states and no fp32\.pt")
    assert error.faults[0].param == "down.weight"


@pytest.mark.parametrize("stage", [1, 3])
def test_states_that_are_gone_are_missing_and_those_that_never_were_are_not(copy, stage):
    (copy / "affine_manifest.json").unlink()
    for name in ("exp_avg", "exp_avg_sq", "step"):
        (copy / "zero" / "down.weight" / f"{name}.pt").unlink()
    engine = engines.make_engine(stage, model=engines.Small(frozen=False), seed=2)
    error = unchanged_by(engine, copy, match=r"optimizer state 'exp_avg' of down\.weight: is kept by")
    assert {fault.param for fault in error.faults} == {"down.weight"}
    report = deepspeed_affine.load_checkpoint(engine, copy, missing="ignore")
    (row,) = [row for row in report.not_restored if row.what == "optimizer states of norm.weight"]
    assert "it was frozen" in row.why


# ---------------------------------------------------------------- another model


class Shared(nn.Module):
    """One module, with buffers of its own, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.a = self.b = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 13)

    def forward(self, tokens):
        hidden = self.b(self.a(self.embed(tokens).transpose(1, 2))).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_under_two_names_has_its_buffers_once(tmp_path, stage):
    engine = engines.make_engine(stage, model=Shared())
    engines.take_steps(engine, 2)
    universal = save(engine, tmp_path)
    other = engines.make_engine(1, model=Shared(), seed=2)
    report = deepspeed_affine.load_checkpoint(other, universal)
    assert report.complete, str(report)
    assert differences(held(other), held(engine)) == []


class Counting(engines.Small):
    """Buffers that no float32 holds."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(count))
        self.register_buffer("exact", torch.tensor(count / 3, dtype=torch.float64))
        self.register_buffer("phase", torch.tensor([complex(0, count)]))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_buffers_keep_every_bit(tmp_path, stage):
    engine = engines.make_engine(stage, model=Counting((1 << 40) + 1))
    engines.take_steps(engine, 1)
    universal = save(engine, tmp_path)
    other = engines.make_engine(1, model=Counting())
    deepspeed_affine.load_checkpoint(other, universal)
    for name in ("count", "exact", "phase"):
        assert torch.equal(getattr(other.module, name), getattr(engine.module, name)), name


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = engines.Small()

    def forward(self, tokens):
        return self._orig_mod(tokens)


class Stranger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_a_checkpoint_without_one_name_of_the_model_is_never_ignored_away(saved, tmp_path):
    lenient = {"missing": "ignore", "unexpected": "ignore"}
    wrapped = engines.make_engine(1, model=Wrapper())
    unchanged_by(
        wrapped, saved, match="The engine's names are the checkpoint's with '_orig_mod.' before them", **lenient
    )
    stranger = engines.make_engine(1, model=Stranger())
    unchanged_by(
        stranger, saved, match=r"has down\.bias, the model has weight\. The checkpoint is of another", **lenient
    )
    universal = save(wrapped, tmp_path)
    unchanged_by(engines.make_engine(1), universal, match="The checkpoint's names are the engine's with '_orig_mod.'")


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_that_a_save_leaves_out_do_not_stand_in_the_way(tmp_path, stage):
    engine = engines.make_engine(stage)
    engines.take_steps(engine, 1)
    with deepspeed_affine.attach(engine):
        engine.save_checkpoint(str(tmp_path), tag="saved", exclude_frozen_parameters=True)
    universal = tmp_path / "universal"
    folders = ["--input_folder", str(tmp_path / "saved"), "--output_folder", str(universal)]
    assert ds_to_universal(["--affine", *folders, "--no-fsync"]) == 0
    other = engines.make_engine(1, seed=2)
    unchanged_by(
        other, universal, match="1 missing.*\nparameter norm.weight: is in the model and not in the checkpoint"
    )
    report = deepspeed_affine.load_checkpoint(other, universal, missing="ignore")
    assert set(report.weights) == {name for name, _ in other.module.named_parameters()} - {"norm.weight"}


# ---------------------------------------------------------------- another optimizer


def adamax(groups):
    return torch.optim.Adamax(groups, lr=1e-2)


def with_amsgrad(groups):
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_loaded_without_some_of_its_states_can_step(saved, copy, stage):
    engine = engines.make_engine(stage, optimizer=adamax, seed=2)
    report = deepspeed_affine.load_checkpoint(engine, saved, missing="ignore", unexpected="ignore")
    assert dict(report.states) == {"exp_avg": 6}
    engines.take_steps(engine, 1)

    (copy / "affine_manifest.json").unlink()
    for name in ("step.pt", "exp_avg_sq.pt"):
        for path in copy.glob(f"zero/*/{name}"):
            path.unlink()
    (copy / "zero" / "optimizer_state.pt").unlink()
    engine = engines.make_engine(stage, optimizer=with_amsgrad, seed=2)
    report = deepspeed_affine.load_checkpoint(engine, copy, missing="ignore")
    assert "optimizer state 'max_exp_avg_sq': the checkpoint has none. It starts afresh" in map(
        str, report.not_restored
    )
    engines.take_steps(engine, 1)


class Unknown(torch.optim.SGD):
    """An optimizer of the user's, with options of its own and the states of nobody."""

    def __init__(self, groups) -> None:
        super().__init__(groups, lr=0.01)
        for group in self.param_groups:
            for option in ("dampening", "nesterov", "maximize"):
                del group[option]

    def step(self, closure=None):
        return None


def test_an_unknown_optimizer_is_not_given_the_states_of_one_with_other_options(saved, tmp_path):
    engine = engines.make_engine(1, optimizer=Unknown, seed=2)
    error = unchanged_by(
        engine, saved, match="amsgrad, betas, .* of the optimizer that was saved: are none of the engine's"
    )
    assert "another optimizer's. Say unexpected='ignore'" in error.message
    assert dict(deepspeed_affine.load_checkpoint(engine, saved, unexpected="ignore").states) == {
        "exp_avg": 6,
        "exp_avg_sq": 6,
    }
    universal = save(engine, tmp_path)
    other = engines.make_engine(3, optimizer=Unknown, seed=3)
    assert deepspeed_affine.load_checkpoint(other, universal).complete


def test_a_group_of_frozen_parameters_does_not_shift_the_states_of_the_others(tmp_path):
    def build(seed):
        model = engines.Small()
        frozen = {"params": [p for p in model.parameters() if not p.requires_grad], "lr": 0.5}
        make = lambda groups: torch.optim.AdamW([frozen, *groups], lr=1e-2)  # noqa: E731
        return engines.make_engine(0, model=model, optimizer=make, seed=seed)

    engine = build(1)
    engines.take_steps(engine, 2)
    universal = save(engine, tmp_path)
    other = build(2)
    report = deepspeed_affine.load_checkpoint(other, universal)
    assert report.complete, str(report)
    assert "optimizer states by position (saved without ZeRO, they have no names)" in report.restored
    assert differences(held(other), held(engine)) == []


def adafactor(groups):
    return torch.optim.Adafactor(groups, lr=1e-2)


@pytest.mark.parametrize("stage", [0, 1])
def test_states_by_position_that_do_not_fit_are_missing_and_not_begun_again_unasked(tmp_path, stage):
    engine = engines.make_engine(0, model=engines.Small(frozen=False))
    engines.take_steps(engine, 2)
    engine.save_checkpoint(str(tmp_path), tag="thawed")
    other = engines.make_engine(stage, seed=2)
    error = unchanged_by(other, tmp_path, match="optimizer states: .* other numbers or shapes, .*missing='ignore'")
    assert "1 missing" in error.message
    report = deepspeed_affine.load_checkpoint(other, tmp_path, missing="ignore")
    assert "optimizer states" in [str(row).split(":")[0] for row in report.not_restored]
    engines.take_steps(other, 1)


class Odd(torch.optim.SGD):
    """An optimizer that keeps more than tensors and steps."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(begun=True, rate=0.25, nothing=None, mean=parameter.detach() + 1)
                self.state[parameter].update({"why": self.why} if hasattr(self, "why") else {})


@pytest.mark.parametrize("target", [0, 1, 3])
def test_states_by_position_may_be_numbers_and_flags_and_nothing_else(tmp_path, target):
    odd = lambda groups: Odd(groups, lr=0.01)  # noqa: E731
    engine = engines.make_engine(0, optimizer=odd)
    engines.take_steps(engine, 1)
    engine.save_checkpoint(str(tmp_path), tag="saved")
    other = engines.make_engine(target, optimizer=odd, seed=2)
    report = deepspeed_affine.load_checkpoint(other, tmp_path)
    assert dict(report.states) == {"mean": 6}
    inner = getattr(other.optimizer, "optimizer", other.optimizer)
    for state in inner.state.values():
        assert (state["begun"], state["rate"]) == (True, 0.25)
    engine.optimizer.why = "text"
    engines.take_steps(engine, 1)
    engine.save_checkpoint(str(tmp_path), tag="text")
    unchanged_by(other, tmp_path, match=r"optimizer state 'why' of \S+: is a str in the checkpoint; expected a tensor")


def test_states_of_rows_and_columns_are_not_taken_for_those_of_elements(tmp_path):
    for stage in (0, 3):
        engine = engines.make_engine(stage, optimizer=adafactor)
        engines.take_steps(engine, 2)
        engine.save_checkpoint(str(tmp_path), tag=f"zero{stage}")
    other = engines.make_engine(0, optimizer=adafactor, seed=2)
    unchanged_by(other, tmp_path, "zero0", match="keeps states of other shapes")
    unchanged_by(
        other, tmp_path, "zero3", match=r"of up\.weight: are kept for every element .* a Adafactor without ZeRO"
    )
    # Partitions are flat, whatever their parameters are.
    report = deepspeed_affine.load_checkpoint(engines.make_engine(1, optimizer=adafactor, seed=2), tmp_path, "zero3")
    assert dict(report.states) == {"variance": 6}


def test_a_report_says_what_is_left_out_once_a_reason(tmp_path):
    universal = save(engines.make_engine(1), tmp_path, client_state={"mine": Unknown})
    report = deepspeed_affine.load_checkpoint(engines.make_engine(1, seed=2), universal)
    assert len(report.not_restored) == 7
    lines = str(report).split("not restored:")[1].split("\n")[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        "optimizer states of embed.weight and 5 more like it",
        "client_state['mine']",
    ]
