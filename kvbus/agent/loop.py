"""The event loop of an agent, and its threads and tasks."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import structlog
from anyio.lowlevel import checkpoint_if_cancelled

from kvbus.errors import KVBusError
from kvbus.threads import started_threads

log = structlog.get_logger()

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")

NUM_THREADS = 8
CHECK_S = 0.02


class AgentLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._home = copy_context()
        self.set_default_executor(started_threads(NUM_THREADS, "kvbus-blocking"))

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Use the agent's context: in a thread's empty one, sniffio finds no event loop."""
        return super().call_soon_threadsafe(callback, *args, context=context or self._home)


async def in_thread(function: Callable[[Unpack[Ts]], Result], *args: *Ts) -> Result:
    """Run ``function`` in a thread; a cancelled caller waits for its end."""
    await checkpoint_if_cancelled()
    call = partial(copy_context().run, function, *args)
    called = asyncio.get_running_loop().run_in_executor(None, call)
    with anyio.CancelScope(shield=True):
        await asyncio.wait([called])
    return called.result()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - an event would serve this loop only
        await anyio.sleep(CHECK_S)


async def guarded(
    step: Callable[[], Awaitable[None]], on_failure: Callable[[KVBusError], None]
) -> None:
    try:
        await step()
    except Exception as error:  # a failed task would end the whole agent
        on_failure(failure(error))


def failure(error: Exception) -> KVBusError:
    """Log an error of another type as a defect."""
    if isinstance(error, KVBusError):
        return error
    log.error("step.failed", exc_info=error)
    return KVBusError(f"internal error: {type(error).__name__}; the agent's log has the details")
