"""Threads that do the jobs of many works: whose turn it is, and when a work is over."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.agent.copiers import Copiers, Job
from kvbus.agent.engine import LocalEngine
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.table import Key
from tests.agents import WITHIN_S, until
from tests.engines import make_spec

STOPPED = LocalError("stopped", code=ErrorCode.CANCELLED)
FAILED = LocalError("of a job or a plan")


@dataclass
class Log:
    """What was done, in order, and how works ended; ``gate`` holds up what waits for it."""

    done: list[str] = field(default_factory=list)
    ends: list[tuple[str, Exception | None]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def job(self, name: str) -> Job:
        return partial(self.done.append, name)

    def held_job(self, name: str) -> Job:
        def wait() -> None:
            self.begun.set()
            assert self.gate.wait(WITHIN_S)
            self.done.append(name)

        return wait

    def end(self, name: str) -> Callable[[Exception | None], None]:
        return lambda error: self.ends.append((name, error))

    def jobs(self, name: str, count: int) -> list[Job]:
        """The first of them waits at the gate."""
        more = [self.job(f"{name} {number}") for number in range(1, count)]
        return [self.held_job(f"{name} 0"), *more]

    async def over(self, num_works: int) -> None:
        """The gate opens; returns when so many works have ended."""
        self.gate.set()
        await until(lambda: len(self.ends) >= num_works)


def copiers_of(num_threads: int = 1) -> Copiers:
    return Copiers(asyncio.get_running_loop(), num_threads=num_threads)


def fail() -> NoReturn:
    raise FAILED


WORKS = st.tuples(st.integers(0, 20), st.none() | st.integers(0, 20), st.integers(-1, 2))
"""How many jobs it has, which one fails, how urgent it is."""


@given(works=st.lists(WORKS, max_size=6), num_threads=st.sampled_from([1, 2, 5]))
def test_every_work_does_its_jobs_once_and_ends_once_by_the_first_that_fails(
    works: list[tuple[int, int | None, int]], num_threads: int
) -> None:
    log = Log()

    async def run() -> None:
        threads = copiers_of(num_threads)
        for number, (count, failing, priority) in enumerate(works):
            jobs, turn = [log.job(f"{number}") for _ in range(count)], Key(number % 4, priority)
            if failing is not None:
                jobs.insert(failing, fail)
            threads.start_jobs(turn, partial(list, jobs), log.end(f"{number}"))
        threads.start_jobs(Key("no plan"), fail, log.end("no plan"))
        await log.over(len(works) + 1)

    anyio.run(run)

    assert len(log.ends) == len(works) + 1
    ends = dict(log.ends)
    assert ends["no plan"] is FAILED
    for number, (count, failing, _) in enumerate(works):
        assert ends[f"{number}"] == (None if failing is None else FAILED)
        num_done = log.done.count(f"{number}")
        least = count if failing is None else min(failing, count)
        assert least <= num_done <= min(count, least + num_threads * (failing is not None))


@pytest.mark.anyio
async def test_a_stopped_work_begins_no_further_job_and_ends_after_the_one_that_runs() -> None:
    log, threads = Log(), copiers_of()
    jobs = [log.job("first"), *log.jobs("held", 9)]
    work = threads.start_jobs(Key("large"), lambda: jobs, log.end("large"))
    assert work is not None
    await until(log.begun.is_set)

    work.stop(STOPPED)
    await anyio.wait_all_tasks_blocked()
    ended_before = list(log.ends)
    await log.over(1)

    assert ended_before == []
    assert log.done == ["first", "held 0"]
    assert log.ends == [("large", STOPPED)]


@pytest.mark.anyio
async def test_a_small_work_waits_for_one_job_of_a_large_one() -> None:
    log, threads = Log(), copiers_of()
    threads.start_jobs(Key("large"), lambda: log.jobs("large", 9), log.end("large"))
    await until(log.begun.is_set)

    threads.start_jobs(Key("small"), lambda: [log.job("small")], log.end("small"))
    await log.over(2)

    assert log.done[:3] == ["large 0", "small", "large 1"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("num_urgent", "num_slow", "first_over"), [(8, 20, "urgent"), (80, 3, "slow")]
)
async def test_urgent_jobs_are_done_before_those_that_waited_which_have_some_turns_too(
    num_urgent: int, num_slow: int, first_over: str
) -> None:
    log, threads = Log(), copiers_of()
    threads.start_jobs(Key("first"), lambda: [log.held_job("first")], log.end("first"))
    await until(log.begun.is_set)

    threads.start_jobs(Key("a"), lambda: [log.job("slow")] * num_slow, log.end("slow"))
    threads.start_jobs(Key("a", 1), lambda: [log.job("urgent")] * num_urgent, log.end("urgent"))
    await log.over(3)

    assert log.ends[1] == (first_over, None)
    assert log.done[1:9].count("slow") <= 2


@pytest.mark.anyio
async def test_an_engine_that_is_lost_gets_no_further_job_and_waits_for_the_one_that_runs() -> None:
    log, errors, engine = Log(), list[KVBusError | None](), LocalEngine(make_spec())
    copiers, quiet = Copiers(asyncio.get_running_loop(), num_threads=1), anyio.Event()
    copiers.start_jobs(Key("a"), lambda: log.jobs("job", 3), errors.append, engine=engine)
    await until(log.begun.is_set)

    async def wait_quiet() -> None:
        await copiers.quiesce(engine)
        quiet.set()

    async with anyio.create_task_group() as tasks:
        engine.lost = True
        copiers.forget(engine)
        tasks.start_soon(wait_quiet)
        await anyio.wait_all_tasks_blocked()
        quiet_before = quiet.is_set()
        later = copiers.start_jobs(Key("a"), list, errors.append, engine=engine)
        log.gate.set()

    assert (quiet_before, later) == (False, None)
    assert log.done == ["job 0"]
    assert [error.code for error in errors if error] == 2 * [ErrorCode.ENGINE_LOST]


@pytest.mark.anyio
async def test_a_copy_has_a_job_for_each_thread_unless_it_is_small_and_none_above_the_most() -> (
    None
):
    mib = 1 << 20
    threads = copiers_of(4)

    sizes = [threads.job_bytes(num_bytes, most=8 * mib) for num_bytes in (mib, 8 * mib, 64 * mib)]

    assert sizes == [mib, 2 * mib, 8 * mib]
