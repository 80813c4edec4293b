"""The driver's end of an engine: each answer reaches who waits for it, in order."""

import contextlib
import socket
from collections.abc import AsyncIterator

import anyio
import pytest

from kvbus.demo.messages import Failed, FirstToken, Line, Offered, Prefilled, Step
from kvbus.demo.processes import EngineLine
from kvbus.errors import ErrorCode, ProtocolError, RequestRefused

OFFERED = Offered("a", {"offer_id": "1"})
PREFILLED = Prefilled("a", Step(7, "digest"), 3, 0.5)
FAILED = Failed("a", ErrorCode.BUSY, "no room")


@contextlib.asynccontextmanager
async def lines() -> AsyncIterator[tuple[EngineLine, Line]]:
    """Both ends of a line; the driver listens."""
    ours, theirs = socket.socketpair()
    driver, engine = await EngineLine.over(ours), await Line.over(theirs)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(driver.listen)
            yield driver, engine
            tasks.cancel_scope.cancel()
    finally:
        driver.close()
        engine.close()


@pytest.mark.anyio
async def test_answers_that_come_at_once_reach_who_waits_for_each() -> None:
    other = Offered("b", {"offer_id": "2"})
    async with lines() as (driver, engine):
        for answer in (OFFERED, other, PREFILLED):
            await engine.send(answer)
        got = [
            await driver.answer("a", Offered),
            await driver.answer("a", Prefilled),
            await driver.answer("b", Offered),
        ]

    assert got == [OFFERED, PREFILLED, other]


@pytest.mark.anyio
async def test_a_failure_is_the_answer_whatever_was_waited_for() -> None:
    async with lines() as (driver, engine):
        await engine.send(FAILED)
        with pytest.raises(RequestRefused, match="no room") as caught:
            await driver.answer("a", Offered)

    assert caught.value.code is ErrorCode.BUSY


@pytest.mark.anyio
async def test_an_answer_of_another_kind_is_an_error() -> None:
    async with lines() as (driver, engine):
        await engine.send(OFFERED)
        with pytest.raises(ProtocolError, match="an engine answered Offered to 'a'"):
            await driver.answer("a", Prefilled)


@pytest.mark.anyio
async def test_a_line_that_is_no_message_is_an_error() -> None:
    async def run() -> None:
        async with lines() as (_, engine):
            await engine.send({"type": "nonsense"})
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await run()

    assert caught.group_contains(ProtocolError, match="nonsense")


@pytest.mark.anyio
async def test_an_engine_gets_work_until_the_driver_closes_the_line() -> None:
    work = [FirstToken("a", 7), FirstToken("b", 8)]
    async with lines() as (driver, engine):
        for one in work:
            await driver.send(one)
        driver.close()
        got = [one async for one in engine]

    assert got == work
