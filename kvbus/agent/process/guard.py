"""Runs one step of one request, so that its failure is that request's and nobody else's."""

from collections.abc import Awaitable, Callable

import structlog

from kvbus.errors import KVBusError

log = structlog.get_logger()


async def guarded(
    step: Callable[[], Awaitable[None]], on_failure: Callable[[KVBusError], None]
) -> None:
    """Await ``step``; ``on_failure`` gets the error that it ended with, if it did."""
    try:
        await step()
    except KVBusError as error:
        on_failure(error)
    except Exception as error:  # a task that fails would take the whole agent with it
        log.exception("step.failed")
        on_failure(KVBusError(f"failed inside: {type(error).__name__}; the agent's log says more"))
