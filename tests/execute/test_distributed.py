"""Processes of a job exchange values, and a failure or a silence of one becomes the failure of all."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, IntegrityError, PolicyError
from deepspeed_affine.execute import distributed, launched
from deepspeed_affine.execute.distributed import JobGroup, SingleGroup
from deepspeed_affine.execute.launched import open_group, place_in_job
from deepspeed_affine.execute.link import Failure, JobError
from deepspeed_affine.execute.shared import CheckedReader

BEAT, TIMEOUT = 0.05, 1.0
LATE_SECONDS = 30.0
"""Not by the timeout, however busy the machine."""
LAUNCHED = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_aftermath(monkeypatch):
    monkeypatch.setattr(distributed, "AFTERMATH_SECONDS", 0.0)


@pytest.fixture
def store():
    """The port of a store that all groups of a test use."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=5), wait_for_workers=False)
    yield server.port
    del server


def client(port):
    return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=5))


def group_of(port, rank, size, timeout=TIMEOUT):
    return JobGroup(lambda: client(port), rank, size, timeout, start=5.0, beat=BEAT, host=f"host{rank}")


def together(port, size, work, timeout=TIMEOUT):
    """``work(group)`` in as many threads as processes; what each returned or raised."""

    def one(rank):
        try:
            with group_of(port, rank, size, timeout) as group:
                return work(group)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_values_of_all_reach_all_in_order(store, size):
    def work(group):
        found = []
        for turn in range(20):
            found.append(group.gather([group.rank, turn, "é", float("inf")]))
        return found

    expected = [[[rank, turn, "é", float("inf")] for rank in range(size)] for turn in range(20)]
    assert together(store, size, work) == [expected] * size


def test_the_first_alone_works_and_all_get_what_it_returns(store):
    called = []

    def work(group):
        answer = group.first(lambda: called.append(group.rank) or {"job": "x"})
        return answer, group.last(lambda: group.rank)

    assert together(store, 3, work) == [({"job": "x"}, 0)] * 3
    assert called == [0]


def test_values_larger_than_the_store_takes_at_once_arrive_and_are_removed(store, monkeypatch):
    monkeypatch.setattr(distributed, "PART_BYTES", 1000)
    large = ["y" * 700] * 30

    def work(group):
        first = group.gather(large)
        second = group.first(lambda: large)
        return first == [large] * 2, second == large, group.gather(None)

    assert together(store, 2, work) == [(True, True, [None, None])] * 2
    left = client(store).num_keys()
    assert left < 20


def test_keys_do_not_pile_up(store):
    def work(group):
        for turn in range(100):
            group.gather(turn)

    together(store, 3, work)
    assert client(store).num_keys() < 30


@pytest.mark.parametrize("error", [None, IntegrityError("damaged")])
def test_no_thread_is_left_that_the_end_of_the_program_could_meet_in_torch(store, error):
    before = set(threading.enumerate())
    left = []

    def work(group):
        with group.failing():
            group.gather(None)
            if error is not None:
                raise error

    def one(rank):
        try:
            with group_of(store, rank, 2) as group:
                work(group)
        except IntegrityError:
            pass
        left.extend(group._link._threads)

    ranks = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(left) == 4
    assert not any(thread.is_alive() for thread in left)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (IntegrityError("f.pt: is damaged.\nand more"), IntegrityError),
        (CheckpointFormatError("g.pt: is short."), CheckpointFormatError),
        (PolicyError("no such option"), JobError),
        (OSError(5, "Input/output error", "/x/y"), JobError),
        (OSError(28, "No space left on device", "/x/y"), AffineError),
        (KeyboardInterrupt(), JobError),
        (ZeroDivisionError("bug"), JobError),
    ],
)
def test_a_failure_is_raised_where_it_happened_and_ends_the_others_with_the_rank_and_host(store, failing, error, kind):
    def work(group):
        with group.failing():
            group.gather(None)
            if group.rank == failing:
                raise error
            group.gather(None)

    found = together(store, 3, work)
    assert found[failing] is error
    for rank in {0, 1, 2} - {failing}:
        assert type(found[rank]) is kind
        said = str(found[rank])
        assert said.startswith(f"rank {failing} on host{failing} failed: ")
        assert len(said.splitlines()) == 1
        assert found[rank].rank == failing
    if isinstance(error, IntegrityError):
        assert "f.pt: is damaged. (and 1 more lines there)" in str(found[(failing + 1) % 3])
    if isinstance(error, OSError):
        assert "/x/y" in str(found[(failing + 1) % 3])


def test_whoever_reads_gets_to_know_a_failure(store, tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 10)

    def work(group):
        with group.failing(), CheckedReader(group.check) as reader:
            group.gather(None)
            if group.rank == 1:
                raise IntegrityError("damaged")
            end = time.monotonic() + 5
            while time.monotonic() < end:
                reader.read(str(tmp_path / "file"), 0, 10)
                time.sleep(0.001)

    found = together(store, 2, work)
    assert "rank 1 on host1 failed: damaged" in str(found[0])


def test_of_two_failures_the_first_that_is_reported_counts(store):
    def work(group):
        with group.failing():
            group.gather(None)
            if group.rank:
                raise IntegrityError(f"damage seen by {group.rank}")
            group.gather(None)

    found = together(store, 3, work)
    own = {rank: f"damage seen by {rank}" for rank in (1, 2)}
    told = {rank: f"rank {rank} on host{rank} failed: {own[rank]}" for rank in (1, 2)}
    said = {rank: str(error) for rank, error in enumerate(found)}
    assert said[0] in told.values()
    # Whoever is still on the way to its own is told of the other's.
    assert said[1] in (own[1], told[2])
    assert said[2] in (own[2], told[1])
    assert said[1] == own[1] or said[2] == own[2]


def test_faults_that_all_have_found_are_told_once_in_full(store):
    def work(group):
        faults = Faults()
        group.raise_together(faults)
        for name in ("a", "b"):
            faults.add(IntegrityError(f"parameter {name}"))
        with group.failing():
            group.raise_together(faults)

    found = together(store, 3, work)
    assert str(found[0]) == "parameter a\nparameter b"
    assert {str(error) for error in found[1:]} == {"rank 0 on host0 failed: parameter a (and 1 more lines there)"}
    assert all(type(error) is IntegrityError for error in found)


def test_the_first_waits_until_the_others_have_stopped(store):
    stopped = []

    def work(group):
        with group.failing():
            group.gather(None)
            if group.rank == 0:
                raise IntegrityError("damaged")
            try:
                group.gather(None)
            finally:
                time.sleep(0.5)
                stopped.append(group.rank)
        return None

    def first(group):
        try:
            return work(group)
        finally:
            if group.rank == 0:
                stopped.append(0)

    together(store, 3, first)
    assert sorted(stopped[:2]) == [1, 2]
    assert stopped[2] == 0


def test_the_first_says_who_has_not_stopped_and_then_nothing_may_be_removed(store, monkeypatch):
    monkeypatch.setattr(distributed, "STOP_SECONDS", 0.4)

    def work(group):
        with group.failing():
            group.gather(None)
            if group.rank == 0:
                raise IntegrityError("damaged")
            time.sleep(1.5)

    found = together(store, 2, work)
    # Of the class after which an output folder is kept.
    assert isinstance(found[0], PolicyError)
    assert str(found[0]).splitlines()[0] == "damaged"
    assert "rank 1 on host1: has not stopped" in str(found[0])


@pytest.mark.parametrize("how", ["silence", "no line"])
def test_nothing_is_removed_where_it_is_not_known_that_the_others_have_stopped(store, monkeypatch, how):
    monkeypatch.setattr(distributed, "STOP_SECONDS", 2 * TIMEOUT)
    release = threading.Event()

    def work(group):
        with group.failing():
            group.gather(None)
            if group.rank:
                group._link._say = lambda store: None
                release.wait(20)
                return None
            try:
                with group.failing():
                    if how == "no line":
                        group._link.report(Failure.of(IntegrityError("damaged"), 0, "rank 0 on host0"))
                        group._link.close()
                    raise IntegrityError("damaged")
            finally:
                release.set()

    found = together(store, 2, work, timeout=60.0 if how == "no line" else TIMEOUT)
    assert type(found[0]) is JobError
    assert "rank 1 on host1: has not stopped" in str(found[0])


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_silent_process_is_lost_to_all_others_and_named(store, silent):
    release = threading.Event()

    def work(group):
        with group.failing():
            group.gather(None)
            if group.rank == silent:
                group._link._say = lambda store: None
                release.wait(LATE_SECONDS)
                return "came back"
            try:
                began = time.monotonic()
                group.gather(None)
            except JobError as error:
                return str(error), error.rank, time.monotonic() - began
            finally:
                release.set()

    found = together(store, 3, work)
    for rank in {0, 1, 2} - {silent}:
        said, lost, took = found[rank]
        assert said.startswith(f"rank {silent} on host{silent} is lost: rank ")
        assert lost == silent
        assert TIMEOUT * 0.9 < took < LATE_SECONDS


def test_time_in_which_this_process_did_not_run_is_no_silence_of_others(store):
    """As after SIGSTOP and SIGCONT of a whole job, or when its virtual machines were moved."""

    def work(group):
        group.gather(None)
        if group.rank == 0:
            group._link._listen(client(store), 3600.0)
        return group.gather(group.rank)

    assert together(store, 2, work) == [[0, 1]] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_a_process_that_never_comes_is_named(store, size):
    def work():
        try:
            with JobGroup(lambda: client(store), 0, size, 60.0, start=TIMEOUT, beat=BEAT):
                return None
        except JobError as error:
            return error

    said = str(work())
    assert f"rank {', '.join(map(str, range(1, size)))} of {size} is not there" in said
    assert "unset WORLD_SIZE" in said
    assert "--rank-timeout" in said


def test_a_store_that_cannot_be_reached_is_an_error_within_the_timeout():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    group = JobGroup(
        lambda: dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=20)), 1, 2, 60.0, start=TIMEOUT
    )
    with pytest.raises(JobError, match="store"), group:
        pass


STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "fact"), [(signal.SIGKILL, "broke"), (signal.SIGSTOP, "has not answered")])
def test_when_the_machine_with_the_store_goes_all_find_out(number, fact):
    with subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            met = threading.Barrier(3)

            def work(group):
                with group.failing():
                    group.gather(None)
                    met.wait(10)
                    if group.rank == 0:
                        os.kill(server.pid, number)
                    began = time.monotonic()
                    try:
                        while time.monotonic() < began + LATE_SECONDS:
                            group.check()
                            group.gather(None)
                    except JobError as error:
                        return str(error), time.monotonic() - began

            found = together(port, 3, work)
        finally:
            server.kill()
    for said, took in found:
        assert said.startswith("rank 0 on host0 is lost")
        assert fact in said
        assert took < LATE_SECONDS


def test_what_happens_to_the_others_at_the_very_end_cannot_fail_the_first(store):
    def work(group):
        with group.failing():
            group.gather(None)
            if group.rank:
                raise IntegrityError("too late")
            return group.last(lambda: time.sleep(1) or "published")

    found = together(store, 2, work)
    assert found[0] == "published"
    assert str(found[1]) == "too late"


def test_a_failure_of_the_first_at_the_very_end_is_everybodys(store):
    def publish():
        raise PolicyError("the target is taken")

    def work(group):
        with group.failing():
            return group.last(publish)

    found = together(store, 2, work)
    assert str(found[0]) == "the target is taken"
    assert str(found[1]) == "rank 0 on host0 failed: the target is taken"


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_signal_to_end_is_explained_by_the_failure_behind_it(store, number):
    told = threading.Event()

    def work(group):
        with group.failing():
            group.gather(None)
            if group.rank == 1:
                told.wait(5)
                raise KeyboardInterrupt(number)
            told.set()
            raise IntegrityError("damaged")

    found = together(store, 2, work)
    assert str(found[1]) == "rank 0 on host0 failed: damaged"
    assert type(found[1]) is IntegrityError


def test_a_signal_to_end_without_a_known_failure_says_what_may_be_behind_it(store):
    def work(group):
        with group.failing():
            group.gather(None)
            if group.rank == 1:
                raise KeyboardInterrupt("SIGTERM")
            group.gather(None)

    found = together(store, 2, work)
    assert "rank 1 on host1: was told to end (SIGTERM). Another process of the job may have failed" in str(found[1])
    assert "rank 1 on host1: was told to end" in str(found[0])


def test_failures_survive_the_way_and_unknown_classes_do_no_harm():
    failure = Failure.of(IntegrityError("x"), 3, "rank 3 on h")
    assert Failure.parse(failure.to_text().encode()) == failure
    for kind in ("os", "Faults", "AffineError", "no such", "SHOWN_FAULTS"):
        assert isinstance(Failure(1, 1, kind, "text").error(), AffineError)


def test_one_process_alone_does_it_all():
    group = SingleGroup()
    assert (group.rank, group.size) == (0, 1)
    assert group.gather("x") == ["x"]
    assert group.first(lambda: 3) == group.last(lambda: 3) == 3
    group.check()
    with pytest.raises(IntegrityError, match="here"), group.failing():
        raise IntegrityError("here")
    group.raise_together(Faults())


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**LAUNCHED, "WORLD_SIZE": "1", "RANK": "0"},
        {name: value for name, value in LAUNCHED.items() if name != "MASTER_ADDR"},
        {name: value for name, value in LAUNCHED.items() if name != "MASTER_PORT"},
        {name: value for name, value in LAUNCHED.items() if name != "RANK"},
        {"WORLD_SIZE": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "3", "RANK": "3"},
        {**LAUNCHED, "WORLD_SIZE": ""},
    ],
)
def test_a_process_that_no_launcher_has_started_is_alone(environment):
    assert place_in_job(environment) is None
    with open_group(1.0, environment) as group:
        assert isinstance(group, SingleGroup)


def test_the_place_in_a_job_is_what_the_launcher_says():
    assert place_in_job(LAUNCHED) == (1, 2)
    for wrong in ({"RANK": "2"}, {"RANK": "-1"}, {"RANK": "x"}, {"WORLD_SIZE": "many"}):
        with pytest.raises(PolicyError, match="unset WORLD_SIZE"):
            place_in_job({**LAUNCHED, **wrong})


def test_several_conversions_in_one_job_do_not_hear_each_other(store, monkeypatch):
    """As when a script that torchrun starts converts twice: the launcher's store outlives the first."""
    found = []

    def run(rank):
        environment = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"}
        monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(client(store), 0, 2)]))
        answers = []
        for turn in range(2):
            group = JobGroup(lambda: launched._job_store(5.0, environment), rank, 2, 5.0, beat=BEAT)
            with group:
                answers.append(group.gather([turn, rank]))
        return answers

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert found == [[[[0, 0], [0, 1]], [[1, 0], [1, 1]]]] * 2
