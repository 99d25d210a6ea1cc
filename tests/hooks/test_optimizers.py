"""Fragments of a live engine: each lies where DeepSpeed steps it, whatever optimizer cut the parameters."""

from __future__ import annotations

import engines
import pytest
import torch

from deepspeed_affine.errors import UnsupportedLayoutError
from deepspeed_affine.hooks.optimizers import fragments, partitions

BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
KINDS = {
    "zero0": (0, {}),
    "zero1": (1, {}),
    "zero2": (2, {}),
    "zero3": (3, {}),
    "zero3 in sub-groups": (3, {"zero": {"sub_group_size": 40}}),
    "zero2 offloaded": (2, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    "zero3 offloaded": (3, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    "zero1 aligned": (1, {"zero": {"parameter_alignment": True}, "groups": 2}),
    "zero2 round robin": (2, {"zero": {"round_robin_gradients": True}}),
    "zero1 bf16": (1, {"dtype": "bf16"}),
    "zero3 bf16": (3, {"dtype": "bf16"}),
    "zero0 bf16": (0, {"dtype": "bf16"}),
    "bf16 optimizer": (1, {"dtype": "bf16", **BF16_OPTIMIZER}),
    "zero1 in groups": (1, {"groups": 2}),
    "zero3 in groups": (3, {"groups": 2}),
}


def weights(engine):
    import deepspeed

    held = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            held[name] = parameter.detach().float().flatten().clone()
    return held


@pytest.mark.parametrize("kind", KINDS)
def test_fragments_are_the_weights_and_follow_them_through_steps(kind):
    stage, options = KINDS[kind]
    engine = engines.make_engine(stage, **options)
    trainable = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    for steps in (0, 1, 1):
        engines.take_steps(engine, steps)
        held = weights(engine)
        found = list(fragments(engine))
        assert {fragment.name for fragment in found} == trainable
        for fragment in found:
            assert (fragment.start, fragment.numel) == (0, held[fragment.name].numel())
            near = fragment.master.to(held[fragment.name].dtype)
            low = next(engine.module.parameters()).dtype
            assert torch.equal(near.to(low).float(), held[fragment.name]), (kind, fragment.name)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_deepspeeds_own(kind):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    stage, options = KINDS[kind]
    engine = engines.make_engine(stage, **options)
    engines.take_steps(engine, 2)
    for fragment in fragments(engine):
        assert set(fragment.states()) == {"exp_avg", "exp_avg_sq"}
        # Without ZeRO there is no link to compare with; the state is then the parameter's own.
        if not stage:
            continue
        assert torch.equal(safe_get_full_fp32_param(fragment.param).flatten(), fragment.master)
        for name, value in fragment.states().items():
            # DeepSpeed links parameters to states once, after the first group's step: later groups have none then.
            linked = getattr(fragment.param, "_hp_mapping", None)
            if linked is None or name in linked.optim_fragment:
                assert torch.equal(safe_get_full_optimizer_state(fragment.param, name).flatten(), value)


def test_writing_a_fragment_changes_what_the_next_step_starts_from():
    engine = engines.make_engine(1)
    fragment = next(iter(fragments(engine)))
    fragment.master.fill_(2.5)
    engine.optimizer.update_lp_params()
    assert bool((fragment.param == 2.5).all())


def test_an_optimizer_of_nobody_is_refused_by_name():
    class Unknown:
        pass

    engine = engines.make_engine(1)
    engine.optimizer = Unknown()
    with pytest.raises(UnsupportedLayoutError, match="Unknown"):
        partitions(engine)


def test_half_precision_weights_flattened_by_group_are_found_and_their_states_placed(tmp_path):
    """The optimizer DeepSpeed puts around FusedAdam, which needs a GPU, around one that does not."""
    from types import SimpleNamespace

    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    from deepspeed_affine.hooks.layouts import live_params
    from deepspeed_affine.hooks.positional import positional_states
    from deepspeed_affine.storage.pt_reader import load_pickle

    engines.start_process_group()
    model = engines.Small().bfloat16()
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() == 1], "lr": 0.1},
    ]
    optimizer = FP16_Optimizer(torch.optim.AdamW(groups), low_precision_dtype=torch.bfloat16)
    for flat in optimizer.fp32_groups_flat:
        flat.data.copy_(torch.arange(float(flat.numel())))
        optimizer.optimizer.state[flat]["exp_avg"].copy_(flat.detach() + 0.5)
    found = list(fragments(SimpleNamespace(module=model, optimizer=optimizer)))
    assert [fragment.name for fragment in found] == [
        *("embed.weight", "up.weight", "down.weight"),
        *("up.bias", "norm.bias", "down.bias"),
    ]
    assert [float(fragment.master[0]) for fragment in found] == [0, 78, 138, 0, 10, 20]
    assert all(torch.equal(fragment.states()["exp_avg"], fragment.master + 0.5) for fragment in found)

    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"optimizer": optimizer.state_dict()}, path)
    lives = live_params(model)
    members = [[lives[fragment.name] for fragment in found if fragment.partition.group == group] for group in (0, 1)]
    placed = positional_states(load_pickle(path).root, members)
    assert set(placed) == {fragment.name for fragment in found}
    for fragment in found:
        for state in ("fp32", "exp_avg"):
            assert placed[fragment.name][state].shape == tuple(fragment.param.shape)
            assert placed[fragment.name][state].offset == fragment.offset
    assert positional_states(load_pickle(path).root, members[::-1]) is None
    assert positional_states(load_pickle(path).root, members[:1]) is None
    assert positional_states({"optimizer": None}, members) == {}


def test_a_parameter_the_module_does_not_have_is_said():
    model = engines.Small()
    extra = torch.nn.Parameter(torch.ones(3))
    engine = engines.make_engine(1, model=model)
    engine.optimizer.bit16_groups[0].append(extra)
    with pytest.raises(UnsupportedLayoutError, match=r"a parameter of shape \(3,\)"):
        partitions(engine)
