"""Jobs in threads, taken one by one: however many there are, only those being done exist."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

__all__ = ["run_jobs"]


def run_jobs(jobs: Iterable[Callable[[], None]], workers: int) -> None:
    """Every job has been done, by ``workers`` threads, begun in order; the first failure ends the others and is raised.

    The next job is asked for when a thread is free, by one thread at a time.
    """
    waiting = iter(jobs)
    lock = threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    job = next(waiting, None)
                if job is None:
                    return
                job()
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(work) for _ in range(workers)]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # Also on an interrupt: the pool is left when its threads have ended.
            stopped.set()
    for future in done:
        future.result()
