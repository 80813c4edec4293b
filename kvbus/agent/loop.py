"""The event loop of an agent, its threads, and tasks of requests that fail alone.

A callback inherits the context of its scheduler. A thread has an empty one: if sniffio is
installed, anyio cannot find its event loop there, and starts no tasks.
"""

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
LOOK_S = 0.02


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
        """Schedule a callback, by default in the agent's context."""
        return super().call_soon_threadsafe(callback, *args, context=context or self._home)


async def in_thread(function: Callable[[Unpack[Ts]], Result], *args: *Ts) -> Result:
    """Return the result of ``function`` in a thread; a cancelled caller waits for its end."""
    await checkpoint_if_cancelled()
    call = partial(copy_context().run, function, *args)
    called = asyncio.get_running_loop().run_in_executor(None, call)
    with anyio.CancelScope(shield=True):
        await asyncio.wait([called])
    return called.result()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - an event would serve this loop only
        await anyio.sleep(LOOK_S)


async def guarded(
    step: Callable[[], Awaitable[None]], on_failure: Callable[[KVBusError], None]
) -> None:
    """Await ``step``, and pass the error that ends it to ``on_failure``."""
    try:
        await step()
    except Exception as error:  # a failed task would end the whole agent
        on_failure(failure(error))


def failure(error: Exception) -> KVBusError:
    """Return a `KVBusError`; an error of another type is logged as a defect."""
    if isinstance(error, KVBusError):
        return error
    log.error("step.failed", exc_info=error)
    return KVBusError(f"failed inside: {type(error).__name__}; the agent's log says more")
