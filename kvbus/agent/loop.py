"""The event loop of an agent, its threads, and steps of requests that fail alone.

A callback has the context of who schedules it, and passes it on to what it schedules. In the empty
one of a thread anyio does not know its event loop, where sniffio is installed, and starts no task.
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
"""For what would block the event loop: name servers, files, memory that engines pass."""
LOOK_S = 0.02


class AgentLoop(asyncio.SelectorEventLoop):
    """Made where the agent begins to run, whose context it keeps."""

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
        """As asyncio's, in the agent's own context."""
        return super().call_soon_threadsafe(callback, *args, context=context or self._home)


async def in_thread(function: Callable[[Unpack[Ts]], Result], *args: *Ts) -> Result:
    """What ``function`` returns in a thread of the event loop; a cancelled caller waits for it."""
    await checkpoint_if_cancelled()
    call = partial(copy_context().run, function, *args)
    called = asyncio.get_running_loop().run_in_executor(None, call)
    with anyio.CancelScope(shield=True):
        await asyncio.wait([called])
    return called.result()


async def until(is_so: Callable[[], bool]) -> None:
    """Return when it is; looked at again and again, for ends that are rare and take their time."""
    while not is_so():  # noqa: ASYNC110 - no event would be for it alone
        await anyio.sleep(LOOK_S)


async def guarded(
    step: Callable[[], Awaitable[None]], on_failure: Callable[[KVBusError], None]
) -> None:
    """Await ``step``; ``on_failure`` gets the error that it ended with, if it did."""
    try:
        await step()
    except Exception as error:  # a task that fails would take the whole agent with it
        on_failure(failure(error))


def failure(error: Exception) -> KVBusError:
    """Return ``error`` as one of kvbus; a foreign one is a defect, and logged with its trace."""
    if isinstance(error, KVBusError):
        return error
    log.error("step.failed", exc_info=error)
    return KVBusError(f"failed inside: {type(error).__name__}; the agent's log says more")
