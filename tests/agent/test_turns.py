"""Threads that do the jobs of many works: whose turn it is, and when a work is over."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from kvbus.agent import Copiers, FairThreads, Job, LocalEngine, Work
from kvbus.errors import ErrorCode, KVBusError, LocalError
from tests.agents import WITHIN_S, until
from tests.engines import make_spec

pytestmark = pytest.mark.anyio

STOPPED = LocalError("stopped", code=ErrorCode.CANCELLED)


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


def fair_threads(num_threads: int = 1) -> FairThreads:
    return FairThreads(asyncio.get_running_loop(), num_threads=num_threads)


async def test_a_small_work_waits_for_one_job_of_a_large_one() -> None:
    log, threads = Log(), fair_threads()
    threads.start_planned(lambda: log.jobs("large", 9), log.end("large"))
    await until(log.begun.is_set)

    threads.start([log.job("small")], log.end("small"))
    log.gate.set()
    await until(lambda: len(log.ends) == 2)

    assert log.done[:3] == ["large 0", "small", "large 1"]
    assert log.ends == [("small", None), ("large", None)]


async def test_a_stopped_work_begins_no_further_job_and_ends_after_the_one_that_runs() -> None:
    log, threads = Log(), fair_threads()
    work = threads.start_planned(lambda: log.jobs("large", 9), log.end("large"))
    await until(log.begun.is_set)

    work.stop(STOPPED)
    await anyio.lowlevel.checkpoint()
    ended_before = list(log.ends)
    log.gate.set()
    await until(lambda: log.ends)

    assert ended_before == []
    assert log.done == ["large 0"]
    assert log.ends == [("large", STOPPED)]


async def test_a_work_of_several_jobs_that_is_stopped_between_two_ends_with_the_one_that_runs() -> (
    None
):
    log, threads = Log(), fair_threads()
    jobs = [log.job("first"), log.held_job("second"), log.job("third")]
    work = threads.start(jobs, log.end("copy"))
    await until(log.begun.is_set)

    work.stop(STOPPED)
    log.gate.set()
    await until(lambda: log.ends)

    assert log.done == ["first", "second"]
    assert log.ends == [("copy", STOPPED)]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
async def test_a_work_of_several_jobs_ends_once_when_all_are_done(num_threads: int) -> None:
    log, threads = Log(), fair_threads(num_threads)

    threads.start([log.job(name) for name in "abc"], log.end("copy"))
    await until(lambda: log.ends)
    threads.start([log.job("after")], log.end("after"))
    await until(lambda: len(log.ends) == 2)

    assert sorted(log.done) == ["a", "after", "b", "c"]
    assert log.ends == [("copy", None), ("after", None)]


async def test_a_work_that_is_stopped_before_its_turn_is_not_even_planned() -> None:
    log, threads = Log(), fair_threads()
    threads.start([log.held_job("first")], log.end("first"))

    work = threads.start_planned(lambda: log.jobs("late", 2), log.end("late"))
    work.stop(STOPPED)
    log.gate.set()
    await until(lambda: len(log.ends) == 2)

    assert log.done == ["first"]


async def test_a_job_that_fails_ends_its_work_and_no_other() -> None:
    log, threads, failure = Log(), fair_threads(), ValueError("of a job")

    def fail() -> None:
        raise failure

    threads.start_planned(lambda: [fail, log.job("after")], log.end("failing"))
    threads.start([log.job("other")], log.end("other"))
    await until(lambda: len(log.ends) == 2)

    assert log.done == ["other"]
    assert dict(log.ends) == {"failing": failure, "other": None}


async def test_a_plan_that_fails_or_has_no_jobs_ends_the_work() -> None:
    log, threads, failure = Log(), fair_threads(2), ValueError("of a plan")

    def fail() -> list[Job]:
        raise failure

    threads.start_planned(fail, log.end("failing"))
    threads.start_planned(list, log.end("empty"))
    await until(lambda: len(log.ends) == 2)

    assert dict(log.ends) == {"failing": failure, "empty": None}


async def test_jobs_of_one_work_run_on_all_threads_and_it_ends_once_after_the_last() -> None:
    log, threads = Log(), fair_threads(3)
    together = threading.Barrier(3)
    jobs: list[Job] = [lambda: (together.wait(WITHIN_S), None)[1]] * 3

    threads.start_planned(lambda: [*jobs, *(log.job("more") for _ in range(50))], log.end("work"))
    await until(lambda: log.ends)
    await anyio.lowlevel.checkpoint()

    assert log.done == ["more"] * 50
    assert log.ends == [("work", None)]


@dataclass
class EngineCopies:
    """Copies of three jobs for one engine, the first of which has begun."""

    log: Log
    copiers: Copiers
    engine: LocalEngine
    work: Work | None
    errors: list[KVBusError | None]


async def begun_copies() -> EngineCopies:
    log, errors = Log(), list[KVBusError | None]()
    copiers = Copiers(asyncio.get_running_loop(), num_threads=1)
    engine = LocalEngine(make_spec())
    work = copiers.start_jobs(lambda: log.jobs("job", 3), errors.append, engine=engine)
    await until(log.begun.is_set)
    return EngineCopies(log, copiers, engine, work, errors)


async def test_an_engine_that_is_lost_gets_no_further_job_and_waits_for_the_one_that_runs() -> None:
    copies = await begun_copies()
    quiet = anyio.Event()

    async def wait_quiet() -> None:
        await copies.copiers.quiesce(copies.engine)
        quiet.set()

    async with anyio.create_task_group() as tasks:
        copies.engine.lost = True
        copies.copiers.forget(copies.engine)
        tasks.start_soon(wait_quiet)
        await anyio.wait_all_tasks_blocked()
        quiet_before = quiet.is_set()
        copies.log.gate.set()

    assert not quiet_before
    assert copies.log.done == ["job 0"]
    assert [error.code for error in copies.errors if error] == [ErrorCode.ENGINE_LOST]


async def test_a_copy_for_an_engine_that_is_lost_already_fails_at_once() -> None:
    copies = await begun_copies()
    copies.log.gate.set()
    copies.engine.lost = True

    work = copies.copiers.start_jobs(list, copies.errors.append, engine=copies.engine)

    assert work is None
    assert copies.errors[0] is not None
    assert copies.errors[0].code is ErrorCode.ENGINE_LOST


async def test_an_urgent_work_has_its_jobs_done_before_those_that_waited() -> None:
    log, threads = Log(), fair_threads()
    threads.start([log.held_job("first")], log.end("first"))
    await until(log.begun.is_set)
    threads.start_planned(lambda: [log.job("slow")] * 20, log.end("slow"))
    threads.start([log.job("urgent")] * 8, log.end("urgent"), priority=1)
    log.gate.set()
    await until(lambda: len(log.ends) == 3)

    assert log.ends == [("first", None), ("urgent", None), ("slow", None)]
    before = log.done[: len(log.done) - log.done[::-1].index("urgent")]
    assert before.count("slow") <= 2


async def test_a_work_is_not_starved_by_those_that_are_more_urgent() -> None:
    log, threads = Log(), fair_threads()
    threads.start([log.held_job("first")], log.end("first"))
    await until(log.begun.is_set)
    threads.start([log.job("urgent")] * 80, log.end("urgent"), priority=2)
    threads.start_planned(lambda: [log.job("slow")] * 3, log.end("slow"), priority=-1)
    log.gate.set()
    await until(lambda: len(log.ends) == 3)

    assert log.ends == [("first", None), ("slow", None), ("urgent", None)]
