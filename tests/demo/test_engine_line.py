"""The driver's end of an engine: each answer reaches who waits for it, a failure all of them."""

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import anyio
import msgspec
import pytest
from anyio.abc import ObjectSendStream

from kvbus.demo.engine_line import EngineLine
from kvbus.demo.step import Step
from kvbus.demo.work import Answer, Failed, Offered, Prefilled
from kvbus.errors import ProtocolError

OFFERED = Offered("a", {"offer_id": "1"})
PREFILLED = Prefilled("a", Step(7, "digest"), 3, 0.5)
FAILED = Failed("a", "busy", "no room")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def line() -> AsyncIterator[tuple[EngineLine, ObjectSendStream[bytes]]]:
    """A line and the other end of its engine's stdout; what it writes is dropped."""
    stdin, _dropped = anyio.create_memory_object_stream[bytes](8)
    write, stdout = anyio.create_memory_object_stream[bytes](8)
    process = SimpleNamespace(stdin=stdin, stdout=stdout)
    child = cast(Any, SimpleNamespace(name="engine", process=process))
    async with anyio.create_task_group() as tasks, stdin, _dropped, write, stdout:
        engine = EngineLine(child)
        tasks.start_soon(engine.listen)
        yield engine, write
        tasks.cancel_scope.cancel()


def lines(*answers: Answer) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in answers)


@pytest.mark.anyio
async def test_two_answers_that_come_at_once_reach_who_waits_for_each() -> None:
    async with line() as (engine, stdout):
        offering, prefilling = engine.expect("a", Offered), engine.expect("a", Prefilled)
        await stdout.send(lines(OFFERED, PREFILLED))
        offered, prefilled = await offering, await prefilling

    assert (offered, prefilled) == (OFFERED, PREFILLED)


@pytest.mark.anyio
async def test_a_failure_is_the_answer_to_all_that_waits_for_its_request() -> None:
    async with line() as (engine, stdout):
        other = engine.expect("b", Offered)
        offering, prefilling = engine.expect("a", Offered), engine.expect("a", Prefilled)
        await stdout.send(lines(FAILED))
        offered, prefilled = await offering, await prefilling

    assert (offered, prefilled) == (FAILED, FAILED)
    assert not other.done()


@pytest.mark.anyio
async def test_an_answer_of_a_kind_that_nobody_waits_for_is_an_error() -> None:
    async def run() -> None:
        async with line() as (engine, stdout):
            engine.expect("a", Prefilled)
            await stdout.send(lines(OFFERED))
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await run()

    assert caught.group_contains(ProtocolError, match="the engine answered Offered")
