"""Jobs in threads: all done, in order, none held in advance, the first failure ends the rest."""

import threading

import pytest

from deepspeed_affine.execute.pulling import run_jobs


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_every_job_is_done_once_and_none_is_made_in_advance(workers):
    lock = threading.Lock()
    done, made = [], 0

    def job(number):
        with lock:
            done.append(number)

    def jobs():
        nonlocal made
        for number in range(500):
            # What was asked for and is not done yet is in the hands of a thread.
            assert made - len(done) <= workers
            made += 1
            yield lambda number=number: job(number)

    run_jobs(jobs(), workers)
    assert sorted(done) == list(range(500))
    if workers == 1:
        assert done == sorted(done)


def test_the_first_failure_ends_the_others_and_is_raised():
    begun = []

    def job(number):
        begun.append(number)
        if number == 10:
            raise KeyError(number)

    with pytest.raises(KeyError):
        run_jobs((lambda number=number: job(number) for number in range(100_000)), 2)
    assert len(begun) < 50_000


def test_a_failure_of_the_jobs_themselves():
    def jobs():
        yield lambda: None
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        run_jobs(jobs(), 2)


def test_no_jobs():
    run_jobs([], 3)
