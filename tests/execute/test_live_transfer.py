"""Live transfers: what each process holds afterwards, what it took, and how all of them end when one does not go on."""

import gc
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import live_transfers
import pytest
import torch
from live_transfers import CASES, ENDINGS, FAULTS, LARGE, LARGE_STAGING, filled

import deepspeed_affine
from deepspeed_affine.errors import AffineError, IntegrityError, PolicyError, UnsupportedLayoutError
from deepspeed_affine.execute import live
from deepspeed_affine.execute.live import transfer
from deepspeed_affine.ir import block_gather_map, contiguous_split_map, replicated_map
from deepspeed_affine.plan.model import plan_model
from deepspeed_affine.plan.placement import Placement
from deepspeed_affine.plan.transfer import plan_transfer

RANKS = Path(live_transfers.__file__).with_name("live_ranks.py")
SMALL = live.LEAST_STAGING_BYTES


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """By what was tried, what every rank has to say of it; all of it runs in one start."""
    root = tmp_path_factory.mktemp("live")
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(RANKS), str(root)]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads((root / "results.json").read_text(encoding="utf-8"))
    assert None not in found["moved"], run.stderr[-3000:]
    return found


def of(ended, name):
    """What the ranks that took part say."""
    return [row[name] for row in ended["moved"]]


@pytest.mark.real
@pytest.mark.parametrize("name", [*CASES, "after all that"])
def test_every_process_ends_with_its_shards_of_f(ended, name):
    took_part = 0
    for rows in of(ended, name):
        for row in filter(None, rows):
            took_part += 1
            assert row["differs"] == []
            assert row["source_changed"] == []
            for what in ("sent", "received", "copied"):
                reported, planned = row[what]
                assert reported == planned
            total = row["sent"][0] + row["received"][0] + row["copied"][0]
            assert row["progress"] == [True, [total, total]]
            batches, sent, received, rounds = row["batches"]
            assert max(sent, received) <= batches <= rounds
    assert took_part >= 2


@pytest.mark.real
def test_staging_stays_within_what_was_said_however_small(ended):
    peaks = [rows[0]["staging"] for name in CASES for rows in of(ended, name) if rows[0]]
    assert max(peaks) <= SMALL
    assert max(peaks) > SMALL // 4


@pytest.mark.real
def test_padding_is_reported_and_left_as_it_was(ended):
    assert [rows[1].get("unfilled") for rows in of(ended, "padded_vocabulary")] == [{}, {}, {}, {"w": 24}]


@pytest.mark.real
def test_what_a_process_holds_is_not_sent(ended):
    for rows in of(ended, "nothing_to_send"):
        assert rows[0]["sent"] == [0, 0]
        assert rows[0]["batches"] == [0, 0, 0, 0]
        assert rows[0]["copied"][0] == 16 * 48 * 4


@pytest.mark.real
def test_the_plan_of_one_parameter_takes_tensors(ended):
    assert [row["differs"] for row in of(ended, "one parameter")] == [[]] * 4
    assert sum(row["sent"] for row in of(ended, "one parameter")) == 3 * 16 * 48 * 4


@pytest.mark.real
@pytest.mark.parametrize("name", LARGE)
def test_memory_beside_the_shards_is_bounded_for_a_tensor_of_100_mib(ended, name):
    rows = [row for row in of(ended, name) if row]
    assert len(rows) == 2
    assert sum(row["moved"] for row in rows) >= 100 << 20
    for row in rows:
        assert row["differs"] == []
        assert row["rounds"] >= 12
        assert row["staging"] <= LARGE_STAGING
        # Python and gloo take some for what they do.
        assert row["grown"] <= LARGE_STAGING + (4 << 20)
    assert max(row["staging"] for row in rows) > LARGE_STAGING // 4


@pytest.mark.real
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_is_the_same_error_on_all_and_nothing_is_written(ended, name):
    rows = of(ended, name)
    assert len({row["text"] for row in rows}) == 1
    assert len({row["kind"] for row in rows}) == 1
    assert all(row["untouched"] for row in rows)
    assert re.search(FAULTS[name], rows[0]["text"], re.S), rows[0]["text"]


@pytest.mark.real
@pytest.mark.parametrize("name", ENDINGS)
def test_a_process_that_is_lost_is_an_error_on_the_others(ended, name):
    first, lost, last = ended[name]
    assert lost is None
    for rank, row in ((0, first), (2, last)):
        assert row["kind"] == "JobError"
        assert f"rank {rank} lost" in row["text"]
        assert "start the job anew" in row["text"]
    if name in ("SIGKILL", "SIGSTOP"):
        assert any("lost rank 1" in row["text"] for row in (first, last))


# ---------------------------------------------------------------- one process, which needs no torch.distributed


def alone(source, target, dtype=torch.float32):
    width = dtype.itemsize
    return plan_model({"w": Placement.own(target, width)}, {"w": Placement.own(source, width)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex128, torch.bfloat16])
def test_one_process_copies_what_it_holds(dtype):
    source = block_gather_map((12, 5), {0: [3, 0, 2, 1]}, 3, 0)
    full = filled((12, 5), dtype, 1)
    target = torch.zeros((12, 5), dtype=dtype)
    calls = []
    report = transfer(
        {"w": source.extract(full, 0), "other": None},
        {"w": target},
        alone(source, replicated_map((12, 5), 1), dtype),
        progress=lambda *call: calls.append(call),
    )
    assert torch.equal(target.view(torch.uint8), full.view(torch.uint8))
    assert (report.bytes_copied, report.bytes_sent, report.messages_sent, report.rounds) == (
        60 * dtype.itemsize,
        0,
        0,
        0,
    )
    assert calls[-1] == (report.bytes_copied,) * 2
    assert report.staging_bytes == 0


def test_parameters_that_require_a_gradient_are_filled_in_place():
    full = torch.randn(6, 4)
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    memory = weight.data_ptr()
    layout = replicated_map((6, 4), 1)
    transfer({"w": torch.nn.Parameter(full.clone())}, {"w": weight}, alone(layout, layout))
    assert torch.equal(weight, full)
    assert weight.data_ptr() == memory
    assert weight.requires_grad
    assert weight.grad_fn is None


def test_shards_may_be_views_into_larger_memory():
    layout = replicated_map((4, 5), 1)
    large = torch.arange(100.0)
    target = torch.zeros(50)
    transfer({"w": large[30:50].view(4, 5)}, {"w": target[7:27]}, alone(layout, layout))
    assert torch.equal(target[7:27], large[30:50])
    assert target[:7].count_nonzero() == target[27:].count_nonzero() == 0


def test_scaled_blocks_are_multiplied_in_parts_that_fit():
    full = torch.randn(3000, 7, dtype=torch.float64)
    source, target = replicated_map((3000, 7), 1, 3.0), replicated_map((3000, 7), 1, 0.5)
    for power in (1, -1, -2, 0):
        filled_in = torch.zeros(3000, 7, dtype=torch.float64)
        report = transfer(
            {"w": full},
            {"w": filled_in},
            alone(source, target, torch.float64),
            staging_bytes=SMALL,
            scale_power=power,
            scaled_states="power",
        )
        torch.testing.assert_close(filled_in, full * (0.5 / 3.0) ** power, rtol=1e-15, atol=0)
        assert report.staging_bytes <= SMALL // 4


def test_scaled_states_are_refused_unless_asked_for():
    plan = alone(replicated_map((4,), 1, 0.5), replicated_map((4,), 1))
    with pytest.raises(UnsupportedLayoutError, match="scaled_states='power'"):
        transfer({"w": torch.ones(4)}, {"w": torch.ones(4)}, plan, scale_power=-1)
    whole = alone(replicated_map((4,), 1, 0.5), replicated_map((4,), 1), torch.int32)
    target = torch.ones(4, dtype=torch.int32)
    with pytest.raises(UnsupportedLayoutError, match="cannot carry"):
        transfer({"w": target.clone()}, {"w": target}, whole)
    extreme = alone(replicated_map((4,), 1, 2.0**-1000), replicated_map((4,), 1, 2.0))
    with pytest.raises(UnsupportedLayoutError, match="moderate"):
        transfer({"w": torch.ones(4)}, {"w": torch.ones(4)}, extreme, scale_power=2, scaled_states="power")


def test_a_plan_serves_again_and_again_and_nothing_keeps_it():
    source, target = block_gather_map((12, 5), {0: [3, 0, 2, 1]}, 3, 0), replicated_map((12, 5), 1)
    plan = alone(source, target)
    for seed in range(3):
        full, filled_in = filled((12, 5), torch.float32, seed), torch.zeros(12, 5)
        transfer({"w": source.extract(full, 0)}, {"w": filled_in}, plan)
        assert torch.equal(filled_in, full)
    # Another width of element, by the same segments.
    wide = torch.zeros(12, 5, dtype=torch.float64)
    with pytest.raises(IntegrityError, match="elements of 4 bytes"):
        transfer({"w": wide.clone()}, {"w": wide}, plan)
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None


def test_a_plan_of_one_parameter_has_no_name():
    layout = contiguous_split_map((6,), (6,), 0)
    target = torch.zeros(6)
    transfer(torch.arange(6.0), target, plan_transfer(layout, layout))
    assert torch.equal(target, torch.arange(6.0))
    with pytest.raises(IntegrityError, match="source shard: none is given"):
        transfer(None, target, plan_transfer(layout, layout))
    with pytest.raises(IntegrityError, match=r": the parameter: this process holds torch.float32 and torch.float64"):
        transfer(torch.arange(6.0).double(), target, plan_transfer(layout, layout))
    with pytest.raises(PolicyError, match=r"source is a ndarray; expected a mapping .*, or a tensor for the plan of"):
        transfer(torch.arange(6.0).numpy(), target, plan_transfer(layout, layout))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staging_bytes": 100}, "staging_bytes is 100"),
        ({"staging_bytes": 1e9}, "staging_bytes is 1000000000.0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": "1"}, "timeout is '1'"),
        ({"scale_power": 0.5}, "scale_power is 0.5"),
        ({"scale_power": 10**6}, "scale_power is 1000000"),
        ({"scaled_states": "reset"}, "scaled_states is 'reset'"),
        ({"scaled_states": [1]}, "scaled_states is"),
        ({"group": object()}, "not initialized|expected what torch"),
    ],
)
def test_options_that_say_nothing_are_refused(options, message):
    layout = replicated_map((4,), 1)
    target = torch.zeros(4)
    with pytest.raises(PolicyError, match=message):
        transfer({"w": torch.ones(4)}, {"w": target}, alone(layout, layout), **options)
    assert not target.any()


def test_a_plan_for_more_processes_than_there_are_is_refused():
    plan = alone(contiguous_split_map((4,), (2, 2), 0), replicated_map((4,), 1))
    with pytest.raises(AffineError, match="names process 1, but the group has 1"):
        transfer({"w": torch.ones(2)}, {"w": torch.ones(4)}, plan)
    with pytest.raises(PolicyError, match="a mapping from parameter name"):
        transfer([torch.ones(2)], {}, plan)


def test_two_targets_that_share_memory_are_refused():
    layout = replicated_map((4,), 1)
    places = {name: Placement.own(layout, 4) for name in ("a", "b")}
    memory, source = torch.zeros(6), torch.ones(4)
    # Sources may: a tied weight is sent under two names.
    for at in (0, 2):
        with pytest.raises(PolicyError, match="share memory"):
            transfer(
                {"a": source, "b": source}, {"a": memory[:4], "b": memory[at : at + 4]}, plan_model(places, places)
            )
    assert not memory.any()
    transfer({"a": source, "b": source}, {"a": memory[:4], "b": torch.zeros(4)}, plan_model(places, places))
    assert memory.tolist() == [1, 1, 1, 1, 0, 0]


def test_it_is_exported():
    assert deepspeed_affine.transfer is transfer
    assert deepspeed_affine.TransferReport is live.TransferReport
