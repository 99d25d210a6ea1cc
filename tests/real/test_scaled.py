"""Biases held divided by the number of ranks: Yuan's output projection and a convolution, under real training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_shards import read_state, same_bytes
from starts import Environment

BIASES = ("o_proj.bias", "conv2.conv.bias")
STATES = ("fp32", "exp_avg", "exp_avg_sq")
POWERS = {"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2}
SCALE = 0.5

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("scaled")
    command = [sys.executable, str(Path(__file__).with_name("scaled_run.py")), str(root)]
    variables = Environment().variables()
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return root, json.loads((root / "done.json").read_text())


def held(root, name):
    return torch.load(root / f"{name}.pt", weights_only=True)


def test_the_maps_say_the_scale(run):
    _, done = run
    assert done["save"]["ok"], done["save"]["error"]
    for rank in done["save"]["ranks"]:
        assert {name for name, scales in rank["scales"].items() if scales != [1.0]} == set(BIASES)
        assert {tuple(rank["scales"][name]) for name in BIASES} == {(SCALE,)}
        assert rank["sources"]["o_proj.bias"] == rank["sources"]["conv2.conv.bias"] == "probe"


def test_states_of_a_scaled_bias_are_refused_unless_the_user_says_how(run):
    root, done = run
    assert [done[f"convert_{way}"]["ranks"][0]["code"] for way in ("refuse", "reset", "power")] == [2, 0, 0]
    assert not (root / "universal_refuse").exists()
    said = (root / "log_convert_refuse" / "rank0.log").read_text()
    assert all(name in said for name in BIASES)
    assert "--scaled-states" in said


def test_the_weights_are_f_and_the_states_follow_their_powers_or_begin_again(run):
    root, _ = run
    for rank in (0, 1):
        for name in BIASES:
            shard = held(root, f"saved{rank}")[name]
            for state in STATES:
                power = read_state(root / "universal_power", name, state)
                assert torch.equal(power * SCALE ** POWERS[state], shard[state]), (name, state)
                reset = read_state(root / "universal_reset", name, state)
                assert torch.equal(reset, power if state == "fp32" else torch.zeros_like(power))
    assert bool((held(root, "saved0")["o_proj.bias"]["exp_avg"] != 0).any())


def test_restored_at_the_same_degree_the_shards_are_what_they_were(run):
    root, done = run
    assert done["load_power_power_2"]["ok"], done["load_power_power_2"]["error"]
    for rank in (0, 1):
        before, after = held(root, f"saved{rank}"), held(root, f"loaded_power_power_2_{rank}")
        for name, states in before.items():
            for state, tensor in states.items():
                assert same_bytes(after[name][state], tensor), (name, state)


def test_restoring_into_scaled_biases_asks_the_same_question(run):
    root, done = run
    assert not done["load_power_refuse_2"]["ok"]
    assert "o_proj.bias" in done["load_power_refuse_2"]["error"]
    assert "scaled_states" in done["load_power_refuse_2"]["error"]
    for name in ("load_power_reset_2", "load_reset_power_2"):
        assert done[name]["ok"], done[name]["error"]
    before = held(root, "saved0")
    for loaded in ("loaded_power_reset_2_0", "loaded_reset_power_2_0"):
        after = held(root, loaded)
        for name in BIASES:
            assert same_bytes(after[name]["fp32"], before[name]["fp32"])
            assert not bool(after[name]["exp_avg"].any())
        assert same_bytes(after["v_proj.weight"]["exp_avg"], before["v_proj.weight"]["exp_avg"])


def test_at_one_rank_nothing_is_scaled_and_nothing_is_asked(run):
    root, done = run
    assert done["load_power_refuse_1"]["ok"], done["load_power_refuse_1"]["error"]
    alone = held(root, "loaded_power_refuse_1_0")
    for name, states in alone.items():
        for state, tensor in states.items():
            stored = read_state(root / "universal_power", name, state)
            assert same_bytes(tensor.reshape(stored.shape), stored), (name, state)
