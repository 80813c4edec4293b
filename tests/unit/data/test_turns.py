"""Threads that do the parts of many jobs: turns, and ends of jobs."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.data.copiers import Copiers, CopyJob, Part
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.fair import Key
from tests.support.agents import WITHIN_S, wait_until

STOPPED = LocalError("stopped", code=ErrorCode.CANCELLED)
FAILED = LocalError("of a part or a plan")


@dataclass
class Log:
    """Parts and ends of jobs, in order; held parts wait for ``gate``."""

    done: list[str] = field(default_factory=list)
    ends: list[tuple[str, Exception | None]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def part(self, name: str, *, is_held: bool = False) -> Part:
        def add() -> int:
            if is_held:
                self.begun.set()
                assert self.gate.wait(WITHIN_S)
            self.done.append(name)
            return 1

        return add

    def job(self, name: str, turn: Key, parts: Callable[[], list[Part]]) -> CopyJob:
        return CopyJob(turn, parts, lambda job: self.ends.append((name, job.error)))

    def parts(self, name: str, count: int) -> list[Part]:
        """Parts of which the first waits at the gate."""
        return [self.part(f"{name} {number}", is_held=not number) for number in range(count)]

    def over(self, num_jobs: int) -> None:
        """Open the gate; return when so many jobs have ended."""
        self.gate.set()
        wait_until(lambda: len(self.ends) >= num_jobs, what="the jobs have ended")


def as_ours(error: Exception) -> KVBusError:
    return error if isinstance(error, KVBusError) else KVBusError(str(error))


@contextmanager
def copiers_of(num_threads: int = 1) -> Iterator[Copiers]:
    with ThreadPoolExecutor(num_threads) as threads:
        yield Copiers(threads, num_threads, clock=time.perf_counter, to_error=as_ours)


def fail() -> NoReturn:
    raise FAILED


JOBS = st.tuples(st.integers(0, 20), st.none() | st.integers(0, 20), st.integers(-1, 2))
"""How many parts it has, which one fails, how urgent it is."""


@given(jobs=st.lists(JOBS, max_size=6), num_threads=st.sampled_from([1, 2, 5]))
def test_each_part_is_done_once(jobs: list[tuple[int, int | None, int]], num_threads: int) -> None:
    log = Log()
    with copiers_of(num_threads) as threads:
        for number, (count, failing, priority) in enumerate(jobs):
            parts, turn = [log.part(f"{number}") for _ in range(count)], Key(number % 4, priority)
            if failing is not None:
                parts.insert(failing, fail)
            threads.start(log.job(f"{number}", turn, partial(list, parts)))
        threads.start(log.job("no plan", Key("no plan"), fail))
        log.over(len(jobs) + 1)

    ends = dict(log.ends)
    assert len(ends) == len(log.ends) == len(jobs) + 1
    assert ends["no plan"] is FAILED
    for number, (count, failing, _) in enumerate(jobs):
        assert ends[f"{number}"] == (None if failing is None else FAILED)
        num_done = log.done.count(f"{number}")
        least = count if failing is None else min(failing, count)
        assert least <= num_done <= min(count, least + num_threads * (failing is not None))


def test_stopped_job_begins_no_part_and_ends_after_running_one() -> None:
    log = Log()
    parts = [log.part("first"), *log.parts("held", 9)]
    with copiers_of() as threads:
        job = log.job("large", Key("large"), lambda: parts)
        threads.start(job)
        assert log.begun.wait(WITHIN_S)
        job.stop(STOPPED)
        ended_before = list(log.ends)
        log.over(1)
    assert (ended_before, log.ends) == ([], [("large", STOPPED)])
    assert (log.done, job.num_bytes) == (["first", "held 0"], 2)


def test_a_small_job_waits_for_one_part_of_a_large_one() -> None:
    log = Log()
    with copiers_of() as threads:
        threads.start(log.job("large", Key("large"), lambda: log.parts("large", 9)))
        assert log.begun.wait(WITHIN_S)
        threads.start(log.job("small", Key("small"), lambda: [log.part("small")]))
        log.over(2)
    assert log.done[:3] == ["large 0", "small", "large 1"]


@pytest.mark.parametrize(("num_urgent", "num_slow", "first"), [(8, 20, "urgent"), (80, 3, "slow")])
def test_urgent_parts_go_first_mostly(num_urgent: int, num_slow: int, first: str) -> None:
    log = Log()
    with copiers_of() as threads:
        threads.start(log.job("first", Key("first"), lambda: log.parts("first", 1)))
        assert log.begun.wait(WITHIN_S)
        threads.start(log.job("slow", Key("a"), lambda: [log.part("slow")] * num_slow))
        threads.start(log.job("urgent", Key("a", 1), lambda: [log.part("urgent")] * num_urgent))
        log.over(3)
    assert log.ends[1] == (first, None)
    assert log.done[1:9].count("slow") <= 2


def test_large_copy_has_part_per_thread_and_none_over_maximum() -> None:
    with copiers_of(4) as threads:
        sizes = [threads.part_bytes(size << 20, most=8 << 20) for size in (1, 8, 64)]
    assert sizes == [1 << 20, 2 << 20, 8 << 20]
