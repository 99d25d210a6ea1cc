"""A conversion shared by several processes writes what one writes, and a failure of one is a clear end of all."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from converting import is_flat, leftovers, wrong
from moments import Moments
from ranks import Job, alone, arguments, by_hand, environment, nodes, torchrun
from synthetic import COLUMN, Cut, ExpertLayer, Param, World, make, random_full

pytestmark = pytest.mark.real

HOST = socket.gethostname()
LOST_SECONDS = 3.0
"""The timeout that tests of lost processes use."""
TOLD_SECONDS = 25.0
"""Well below the timeout everybody else uses, and above what a busy machine needs."""


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def params(tp=2, seed=0, count=12):
    found = [Param(f"p{n}", random_full((16, 10 + n), seed + n), COLUMN) for n in range(count)]
    found += [Param("row", random_full((30, 64), seed + 98), Cut("row")), Param("norm", random_full((7,), seed + 99))]
    if tp == 1:
        found = [Param(param.name, param.full) for param in found]
    return [*found, Param("embedding", random_full((600, 50), seed + 97), COLUMN if tp > 1 else Cut())]


WORLDS = {
    "zero1_tp2": lambda: make(World(stage=1, tp=2, dp=2), params()),
    "zero2_pp2": lambda: make(World(stage=2, pp=2, dp=2), params(tp=1)),
    "zero3": lambda: make(World(stage=3, dp=3), params(tp=1)),
    "zero3_tp2": lambda: make(World(stage=3, tp=2, dp=2), params()),
    "experts": lambda: make(
        World(stage=1, dp=2),
        params(tp=1, count=3),
        [ExpertLayer("moe.experts", {"w1": random_full((4, 6, 5), 50)}, ((0, 1), (2, 3)))],
    ),
}


@pytest.fixture
def source(tmp_path):
    return WORLDS["zero1_tp2"]().save(tmp_path / "in")


@pytest.fixture
def right(source, tmp_path):
    """The output of an undisturbed run of one process."""
    done = alone(arguments(source, tmp_path / "right"))
    assert done.code == 0, done.err
    return contents(tmp_path / "right")


def only_rank_1(*options):
    return json.dumps({"1": [str(option) for option in options]})


def assert_nothing_published(tmp_path):
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "latest_universal").exists() or (tmp_path / "latest_universal").read_text() != "out"


def assert_finished(tmp_path, right):
    assert contents(tmp_path / "out") == right
    assert (tmp_path / "latest_universal").read_text() == "out"
    assert leftovers(tmp_path / "out") == ["out"]


def finished_files(tmp_path):
    return [path for path in (tmp_path / ".out.partial" / "files").rglob("*") if path.is_file()]


def await_files(tmp_path):
    """Some files are written."""
    end = time.monotonic() + 60
    while len(finished_files(tmp_path)) < 6:
        assert time.monotonic() < end
        time.sleep(0.02)


def assert_others_say(ended, failed, fact):
    """Every other rank ends with exit code 2 and one line naming the rank, the host and what it said."""
    for rank, end in ended.items():
        if rank != failed:
            assert end.code == 2, end.err
            assert len(end.errors) == 1, end.err
            assert f"rank {failed} on {HOST}" in end.errors[0]
            assert fact in end.errors[0]
        assert "Traceback" not in end.err
        assert not end.out or rank == 0


def assert_shared_as_alone(tmp_path, world, size, start):
    made = WORLDS[world]()
    source = made.save(tmp_path / "in")
    assert alone(arguments(source, tmp_path / "right")).code == 0
    shared = start(size, arguments(source, tmp_path / "out", "--json"))
    assert shared.code == 0, shared.err
    assert_finished(tmp_path, contents(tmp_path / "right"))
    assert wrong(made, tmp_path / "out", flat=is_flat(made)) == []
    result = shared.result
    assert result["processes"] == size
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != "affine_manifest.json"]
    assert result["bytes_written"] == sum(path.stat().st_size for path in files)
    assert result["reused_files"] == 0


@pytest.mark.parametrize(
    ("world", "size"), [pytest.param("zero1_tp2", 2, marks=pytest.mark.quick), ("zero1_tp2", 3), ("zero3", 3)]
)
def test_torchrun_writes_what_one_process_writes(tmp_path, world, size):
    assert_shared_as_alone(tmp_path, world, size, torchrun)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_several_processes_write_what_one_writes(tmp_path, world, size):
    assert_shared_as_alone(tmp_path, world, size, lambda count, command: by_hand(count, command)[0])


def test_the_module_can_be_started_by_its_name(tmp_path, source, right):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "deepspeed_affine", *arguments(source, tmp_path / "out")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert_finished(tmp_path, right)


def test_more_processes_than_there_is_work(tmp_path):
    source = make(World(dp=1), [Param("w", random_full((2,), 1))]).save(tmp_path / "in")
    assert alone(arguments(source, tmp_path / "right")).code == 0
    ended = by_hand(4, arguments(source, tmp_path / "out"))
    assert [ended[rank].code for rank in range(4)] == [0] * 4, ended
    assert_finished(tmp_path, contents(tmp_path / "right"))


def test_only_the_first_speaks_and_a_second_run_finds_the_output_complete(tmp_path, source, right):
    ended = by_hand(2, arguments(source, tmp_path / "out"))
    assert [ended[rank].code for rank in range(2)] == [0, 0], ended
    assert "in each of 2 processes" in ended[0].out
    assert "written" in ended[0].out
    assert ended[1].out == ended[1].err == ""
    (tmp_path / "latest_universal").unlink()
    again = by_hand(2, arguments(source, tmp_path / "out"))
    assert [again[rank].code for rank in range(2)] == [0, 0], again
    assert "complete already" in again[0].out
    assert again[1].out == ""
    assert_finished(tmp_path, right)
    damaged = tmp_path / "out" / "zero" / "p3" / "fp32.pt"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    refused = by_hand(2, arguments(source, tmp_path / "out"))
    assert refused[0].code == 2
    assert "zero/p3/fp32.pt" in refused[0].err
    assert_others_say(refused, 0, "zero/p3/fp32.pt")
    replaced = by_hand(2, arguments(source, tmp_path / "out", "--overwrite"))
    assert [replaced[rank].code for rank in range(2)] == [0, 0], replaced
    assert_finished(tmp_path, right)


def test_a_dry_run_writes_nothing(tmp_path, source):
    ended = by_hand(2, arguments(source, tmp_path / "out", "--dry-run", "--json"))
    assert [ended[rank].code for rank in range(2)] == [0, 0], ended
    assert ended[0].result["files"] > 10
    assert ended[1].out == ""
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize("killed", [0, 2])
def test_killed_under_torchrun_nothing_is_published_and_any_number_of_processes_goes_on(
    tmp_path, source, right, killed
):
    command = arguments(source, tmp_path / "out", "--json")
    ended = torchrun(3, command, RANK_DOES=f"{killed}:SIGKILL:4", RANK_SLOW="0.1")
    assert ended.code != 0
    assert ended.seconds < 60
    assert_nothing_published(tmp_path)
    assert "Another process of the job may have failed or been killed" in ended.err or f"rank {killed} on" in ended.err
    assert "internal error" not in ended.err
    assert len(finished_files(tmp_path)) >= 4
    if killed:
        ended = torchrun(2, command)
        assert ended.code == 0, ended.err
    else:
        ended = alone(command)
        assert ended.code == 0, ended.err
    assert ended.result["reused_files"] >= 4
    assert_finished(tmp_path, right)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_machine_that_is_gone_is_found_out_on_the_others(tmp_path, source, right, gone):
    """The store is with the launcher of the first machine."""
    command = arguments(source, tmp_path / "out", "--json", "--rank-timeout", str(LOST_SECONDS))
    with nodes(2, command, RANK_SLOW="0.2") as job:
        await_files(tmp_path)
        began = time.monotonic()
        job.kill_machine(gone)
        ended = job.wait()[1 - gone]
    print("machine", gone, "was gone: found out after", f"{job.began + ended.seconds - began:.1f}", "s")
    assert ended.code != 0
    assert len(ended.errors) == 1, ended.err
    assert f"rank {gone} on {HOST} is lost" in ended.errors[0]
    assert_nothing_published(tmp_path)
    last = alone(command)
    assert last.code == 0, last.err
    assert last.result["reused_files"] >= 1
    assert_finished(tmp_path, right)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_killed_on_one_machine_ends_those_on_the_other(tmp_path, source, right, killed):
    command = arguments(source, tmp_path / "out", "--json", "--rank-timeout", str(LOST_SECONDS))
    with nodes(2, command, RANK_SLOW="0.2", RANK_DOES=f"{killed}:SIGKILL:2") as job:
        ended = job.wait()
    assert [end.code != 0 for end in ended] == [True, True]
    assert len(ended[1 - killed].errors) == 1, ended
    assert f"rank {killed} on {HOST} is lost" in ended[1 - killed].errors[0]
    assert_nothing_published(tmp_path)
    with nodes(2, command) as job:
        again = job.wait()
    assert [end.code for end in again] == [0, 0], again
    assert again[0].result["reused_files"] >= 2
    assert_finished(tmp_path, right)


def test_begun_by_one_and_finished_by_several(tmp_path, source, right):
    command = arguments(source, tmp_path / "out", "--json")
    begun = alone(command, RANK_DOES=":SIGKILL:9", RANK_SLOW="0.02")
    assert begun.code == -signal.SIGKILL
    ended = by_hand(3, command)
    assert [ended[rank].code for rank in range(3)] == [0] * 3, ended
    assert ended[0].result["reused_files"] >= 9
    assert ended[0].result["bytes_written"] < sum(map(len, right.values())) - ended[0].result["reused_bytes"] + 1
    assert_finished(tmp_path, right)


def test_a_finished_file_that_was_damaged_since_is_written_again(tmp_path, source, right):
    command = arguments(source, tmp_path / "out", "--json")
    ended = by_hand(2, command, RANK_DOES="1:EIO:6", RANK_SLOW="0.05")
    assert ended[1].code == 2
    found = finished_files(tmp_path)
    assert len(found) >= 6
    for path in found[::2]:
        path.write_bytes(bytes(path.stat().st_size))
    ended = by_hand(3, command)
    assert [ended[rank].code for rank in range(3)] == [0] * 3, ended
    assert 0 < ended[0].result["reused_files"] <= len(found) - len(found[::2])
    assert_finished(tmp_path, right)


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_dies_or_hangs_without_a_launcher_is_found_out(tmp_path, source, right, lost, what):
    command = arguments(source, tmp_path / "out", "--json", "--rank-timeout", str(LOST_SECONDS))
    ended = by_hand(3, command, without=[lost], RANK_DOES=f"{lost}:{what}:3", RANK_SLOW="0.1")
    assert_others_say({rank: end for rank, end in ended.items() if rank != lost}, lost, "is lost")
    assert_nothing_published(tmp_path)
    assert len(finished_files(tmp_path)) >= 3
    assert "are kept in" in ended[0].err
    seconds = [end.seconds for rank, end in ended.items() if rank != lost]
    print(what, "of rank", lost, "of 3: the others ended", [f"{value:.1f}" for value in seconds], "s after the start")
    again = by_hand(2, command)
    assert [again[rank].code for rank in range(2)] == [0, 0], again
    assert again[0].result["reused_files"] >= 3
    assert_finished(tmp_path, right)


@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_the_process_with_the_store_may_be_the_one_that_goes(tmp_path, source, right, what):
    command = arguments(source, tmp_path / "out", "--json", "--rank-timeout", str(LOST_SECONDS))
    job = Job(3, command, RANK_DOES=f"0:{what}:3", RANK_SLOW="0.1")
    moment = _when_stopped(job.pids[0])
    ended = job.wait(without=[0])
    assert_others_say({rank: ended[rank] for rank in (1, 2)}, 0, "is lost")
    took = [job.began + ended[rank].seconds - moment for rank in (1, 2)]
    print(what, "of rank 0: found out after", [f"{value:.1f}" for value in took], "s")
    assert max(took) < TOLD_SECONDS
    assert_nothing_published(tmp_path)
    last = alone(command)
    assert last.code == 0, last.err
    assert last.result["reused_files"] >= 3
    assert_finished(tmp_path, right)


def _when_stopped(pid):
    """The moment at which the process is seen to be stopped or dead."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            state = "X"
        if state in "TZX":
            return time.monotonic()
        time.sleep(0.02)
    raise AssertionError("it was neither stopped nor killed")


@pytest.mark.parametrize("paused", [[1], [0, 1]])
def test_a_pause_is_no_failure(tmp_path, source, right, paused):
    """One for less than the timeout; all of them for longer, as when a scheduler suspends a job."""
    seconds = LOST_SECONDS / 3 if len(paused) == 1 else 2 * LOST_SECONDS
    command = arguments(source, tmp_path / "out", "--rank-timeout", str(LOST_SECONDS))
    job = Job(2, command, RANK_SLOW="0.1")
    await_files(tmp_path)
    for rank in paused:
        job.send(rank, signal.SIGSTOP)
    time.sleep(seconds)
    for rank in paused:
        job.send(rank, signal.SIGCONT)
    ended = job.wait()
    assert [ended[rank].code for rank in range(2)] == [0, 0], ended
    assert_finished(tmp_path, right)


@pytest.mark.parametrize(("what", "kept"), [("EIO", True), ("ENOSPC", False), ("bug", True)])
@pytest.mark.parametrize("failed", [0, 1])
def test_one_process_that_fails_ends_all_within_seconds(tmp_path, source, what, kept, failed):
    fact = {"EIO": "/the/disk: Input/output error", "ENOSPC": "/the/disk: No space left", "bug": "on purpose"}[what]
    ended = by_hand(2, arguments(source, tmp_path / "out"), RANK_DOES=f"{failed}:{what}:3", RANK_SLOW="0.05")
    assert ended[failed].code == 2
    assert fact in ended[failed].errors[0]
    assert f"rank {failed} on" not in ended[failed].errors[0]
    assert_others_say(ended, failed, fact)
    # Told, and not found out by the timeout; how fast depends on what else the machine does.
    assert abs(ended[0].seconds - ended[1].seconds) < TOLD_SECONDS
    assert_nothing_published(tmp_path)
    assert (leftovers(tmp_path / "out") == [".out.partial"]) == kept
    assert ("are kept in" in ended[0].err) == kept
    assert "are kept in" not in ended[1].err


@pytest.mark.parametrize("told", [0, 1])
def test_told_to_end_all_end_and_what_is_finished_is_kept(tmp_path, source, right, told):
    command = arguments(source, tmp_path / "out", "--json")
    ended = by_hand(2, command, RANK_DOES=f"{told}:SIGTERM:4", RANK_SLOW="0.05")
    assert ended[told].code == 2
    assert "was told to end (SIGTERM). Another process of the job may have failed" in ended[told].errors[0]
    assert_others_say(ended, told, "was told to end")
    assert_nothing_published(tmp_path)
    last = alone(command)
    assert last.code == 0, last.err
    assert last.result["reused_files"] >= 4
    assert_finished(tmp_path, right)


def test_damage_of_the_source_is_told_once_in_full_and_nothing_is_left(tmp_path):
    made = WORLDS["zero1_tp2"]()
    source = made.save(tmp_path / "in")
    name = made.optim_name(1, 1)
    path = os.path.join(source, name)
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        file.write(b"\x13\x37\x13\x37")
    ended = by_hand(3, arguments(source, tmp_path / "out"))
    assert ended[0].code == 2
    assert name in ended[0].errors[0]
    assert "CRC" in ended[0].errors[0]
    assert_others_say(ended, 0, name)
    assert leftovers(tmp_path / "out") == []
    assert by_hand(2, arguments(source, tmp_path / "out", "--no-source-crc"))[0].code == 0


def test_a_source_that_one_process_cannot_read_is_named_by_it(tmp_path, source):
    shutil.copytree(source, tmp_path / "other")
    gone = sorted((tmp_path / "other").glob("*optim_states.pt"))[0]
    gone.unlink()
    options = only_rank_1("--input_folder", tmp_path / "other")
    ended = by_hand(2, arguments(source, tmp_path / "out"), RANK_OPTIONS=options)
    assert ended[1].code == 2
    assert gone.name in ended[1].errors[0]
    assert_others_say(ended, 1, gone.name)
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--on-drift", "first"], "on_drift"),
        (["--no-source-crc"], "no_source_crc"),
        (["--overwrite"], "overwrite"),
        (["--dry-run"], "dry_run"),
        (["--no_strict"], "strict"),
    ],
)
def test_processes_started_with_different_options_say_so_alike(tmp_path, source, options, fact):
    ended = by_hand(3, arguments(source, tmp_path / "out"), RANK_OPTIONS=only_rank_1(*options))
    for end in ended.values():
        assert end.code == 2
        assert len(end.errors) == 1
        assert f"rank 1 on {HOST}: would do another job than rank 0 on {HOST}" in end.errors[0]
        assert fact in end.errors[0]
    assert leftovers(tmp_path / "out") == []


def test_processes_that_see_other_files_say_so_alike(tmp_path, source):
    other = make(World(stage=1, tp=2, dp=2), params(seed=5)).save(tmp_path / "other")
    ended = by_hand(2, arguments(source, tmp_path / "out"), RANK_OPTIONS=only_rank_1("--input_folder", other))
    for end in ended.values():
        assert end.code == 2
        assert "would do another job" in end.errors[0]
        assert "source file" in end.errors[0]
    assert leftovers(tmp_path / "out") == []


def test_a_copy_of_the_source_elsewhere_is_the_same_source(tmp_path, source, right):
    shutil.copytree(source, tmp_path / "mounted elsewhere")
    options = only_rank_1("--input_folder", tmp_path / "mounted elsewhere")
    ended = by_hand(2, arguments(source, tmp_path / "out"), RANK_OPTIONS=options)
    assert [ended[rank].code for rank in range(2)] == [0, 0], ended
    assert_finished(tmp_path, right)


def test_an_output_folder_that_is_not_shared_is_an_error(tmp_path, source):
    options = only_rank_1("--output_folder", tmp_path / "elsewhere")
    ended = by_hand(2, arguments(source, tmp_path / "out", "--rank-timeout", "3"), RANK_OPTIONS=options)
    assert ended[1].code == 2
    assert "is not seen from here" in ended[1].errors[0]
    assert_others_say(ended, 1, "is not seen from here")
    assert leftovers(tmp_path / "out") == leftovers(tmp_path / "elsewhere") == []


def test_a_plain_run_inside_an_allocation_is_one_process(tmp_path, source, right):
    slurm = {"WORLD_SIZE": "8", "RANK": "3", "SLURM_NTASKS": "8", "SLURM_PROCID": "3"}
    done = alone(arguments(source, tmp_path / "out", "--json"), **slurm)
    assert done.code == 0, done.err
    assert done.result["processes"] == 1
    assert_finished(tmp_path, right)


def drifted():
    made = make(World(stage=1, tp=2, dp=2), params())
    for rank in (0, 1):
        for name, part in made.optim(rank, 1)["base_optimizer_state"]["state"][0].items():
            if name == "exp_avg":
                part += 1e-3
    return made


@pytest.mark.parametrize("policy", ["error", "average", "first"])
def test_all_come_to_the_same_decision_about_drift(tmp_path, policy):
    source = drifted().save(tmp_path / "in")
    one = alone(arguments(source, tmp_path / "right", "--on-drift", policy, "--json"))
    ended = by_hand(2, arguments(source, tmp_path / "out", "--on-drift", policy, "--json"))
    assert ended[0].code == one.code == (2 if policy == "error" else 0), ended
    if policy == "error":
        assert ended[0].errors == one.errors
        assert "norm" in ended[0].errors[0]
        assert_others_say(ended, 0, "norm")
        return
    assert ended[0].result["drift"] == one.result["drift"] != []
    assert ended[0].result["averaged"] == one.result["averaged"]
    assert_finished(tmp_path, contents(tmp_path / "right"))


@pytest.mark.parametrize("policy", ["refuse", "replicated", "split"])
def test_all_come_to_the_same_decision_about_identical_shards(tmp_path, policy):
    half = random_full((4, 5), 3)
    names = [f"same{n}" for n in range(5)]
    moments = {"exp_avg": half * 2, "exp_avg_sq": half * 3}
    doubled = {state: value.repeat(2, 1) for state, value in moments.items()}
    same = [Param(name, half.repeat(2, 1), COLUMN, states=doubled) for name in names]
    source = make(World(stage=1, tp=2, dp=2), [*params(), *same]).save(tmp_path / "in")
    options = ["--identical-shards", policy]
    one = alone(arguments(source, tmp_path / "right", *options))
    ended = by_hand(3, arguments(source, tmp_path / "out", *options))
    assert ended[0].code == one.code == (2 if policy == "refuse" else 0), ended
    if policy == "refuse":
        assert ended[0].errors == one.errors
        assert all(any(name in line for line in one.errors) for name in names)
        assert_others_say(ended, 0, names[0])
        return
    assert_finished(tmp_path, contents(tmp_path / "right"))


@pytest.mark.heavy
@pytest.mark.parametrize("world", ["zero1_tp2", "zero3"])
def test_a_kill_at_a_random_moment_costs_nothing(tmp_path, world):
    """Of one process, or of all at once; then another number of them goes on. Some jobs are torchrun's."""
    source = WORLDS[world]().save(tmp_path / "in")
    assert alone(arguments(source, tmp_path / "right")).code == 0
    right = contents(tmp_path / "right")
    command = arguments(source, tmp_path / "out", "--json", "--rank-timeout", "3")
    began = time.monotonic()
    assert by_hand(2, arguments(source, tmp_path / "timed"), RANK_SLOW="0.03")[0].code == 0
    whole = time.monotonic() - began
    moments = Moments(whole, world)
    choice = moments.random.choice
    stopped = reused = 0
    for turn in range(15):
        size = choice([2, 3])
        who = choice(["all", *range(size)])
        # At a moment of the clock, or when it has written some of its files.
        moment = f"{moments.between(0.1, 0.9):.3f}s" if turn % 3 else choice(range(1, len(right) // size))
        does = f"{who}:SIGKILL:{moment}"
        variables = {"RANK_DOES": does, "RANK_SLOW": "0.03"}
        if turn % 5 == 4:
            codes = [torchrun(size, command, **variables).code]
        else:
            codes = [ended.code for ended in by_hand(size, command, **variables).values()]
        if any(codes):
            stopped += 1
        elif turn % 3 and turn % 5 != 4:
            # By torchrun, starting and ending takes much longer than the run.
            moments.was_late()
        if (tmp_path / "out").exists():
            assert contents(tmp_path / "out") == right
        last = by_hand(choice([2, 3]), command)[0] if turn % 2 else alone(command)
        assert last.code == 0, (does, last.err)
        reused += last.result.get("reused_files", 0)
        assert_finished(tmp_path, right)
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "latest_universal").unlink()
    # The test is worth nothing where kills come too early or too late.
    assert stopped >= 7
    assert reused >= 15
