"""The event loop of an agent: what other threads hand over runs as the agent, not as the thread.

A callback has the context of who schedules it, and passes it on to what it schedules. In the empty
one of a thread anyio does not know its event loop, where sniffio is installed, and starts no task.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TypeVarTuple, Unpack

Ts = TypeVarTuple("Ts")


class AgentLoop(asyncio.SelectorEventLoop):
    """Made where the agent begins to run, whose context it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self._home = copy_context()

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """As asyncio's, in the agent's own context."""
        return super().call_soon_threadsafe(callback, *args, context=context or self._home)
