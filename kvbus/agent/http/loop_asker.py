"""Asks an event loop from other threads, and does not wait for one that hangs."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from kvbus.errors import ErrorCode, LocalError

T = TypeVar("T")

ANSWERS_WITHIN_S = 2.0


class LoopAsker:
    """Has functions run by the loop of an agent."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def ask(self, function: Callable[[], T]) -> T:
        """What ``function`` returns in the loop, or raises there.

        Raises `LocalError` (``timeout``) when the loop does not come to it.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:  # it is the asker's
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError as error:  # it is closed
            raise LocalError("the agent has ended", code=ErrorCode.DRAINING) from error
        if not wait([answer], ANSWERS_WITHIN_S).done:
            answer.cancel()
            raise LocalError(
                f"the event loop has not answered within {ANSWERS_WITHIN_S:g} s",
                code=ErrorCode.TIMEOUT,
            )
        return answer.result()
