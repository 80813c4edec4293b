"""The engine's end of the line to the driver: work in, answers out, each request in its own task.

Refuses work that this engine does not do.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

import anyio
import msgspec

from kvbus.demo.engine import Engine
from kvbus.demo.work import MAX_LINE_BYTES, Answer, EngineSetup, Ready, Settle, Work
from kvbus.errors import KVBusError, ProtocolError, leaves

Handlers = Mapping[type, Callable[[Any], Coroutine[Any, Any, None]]]


def answer(message: Answer) -> None:
    """Write one line to the driver."""
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


async def work_lines() -> AsyncIterator[Work]:
    """What the driver asks, until it closes the pipe."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield msgspec.json.decode(line, type=Work)


async def serve(engine: Engine, agent_endpoint: str, handlers: Handlers) -> None:
    """Handle each line of work in a task of its own, until the driver closes the pipe."""
    answer(Ready(agent_endpoint))
    async with anyio.create_task_group() as tasks:
        async for work in work_lines():
            if isinstance(work, Settle):
                answer(await engine.settle())
            elif type(work) in handlers:
                tasks.start_soon(handlers[type(work)], work)
            else:
                raise ProtocolError(f"this engine does not {type(work).__name__}")
        tasks.cancel_scope.cancel()


def run_engine(main: Callable[[EngineSetup], Awaitable[None]]) -> None:
    """The engine's process: its setup is the argument; an error is one line and exit status 1."""
    setup = msgspec.json.decode(sys.argv[1], type=EngineSetup)
    failures: list[KVBusError] = []
    try:
        anyio.run(main, setup)
    except* KVBusError as errors:
        failures = leaves(errors)
    if failures:
        sys.stderr.writelines(f"error: {error.code}: {error.message}\n" for error in failures)
        raise SystemExit(1)
