"""Replies of a data process, and work in other threads."""

import traceback
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Literal, TypeVar

from kvbus.data import messages as wire
from kvbus.errors import KVBusError

T = TypeVar("T")


class Replies:
    def __init__(self, send: Callable[[wire.FromData], object]) -> None:
        self.send = send

    def done(self, message: wire.DataRequest, result: wire.Result | None = None) -> None:
        self.send(wire.DataReply(to=message.id, result=result))

    def fail(self, message: wire.DataRequest, error: Exception) -> None:
        self.send(wire.DataReply(to=message.id, error=wire.Failure.of(self.to_error(error))))

    def to_error(self, error: Exception) -> KVBusError:
        """Return a kvbus error. Any other error is a defect, and its trace is logged."""
        if isinstance(error, KVBusError):
            return error
        self.log("error", "step.failed", trace="".join(traceback.format_exception(error)))
        return KVBusError(
            f"internal error: {type(error).__name__}; the agent's log has the details"
        )

    def log(
        self,
        level: Literal["debug", "info", "warning", "error"],
        event: str,
        **fields: str | int | float,
    ) -> None:
        self.send(wire.Log(level=level, event=event, fields=fields))


class Background:
    def __init__(self, threads: Executor, post: Callable[[Callable[[], object]], object]) -> None:
        self._threads, self._post = threads, post

    def start(self, work: Callable[[], T], then: Callable[[T | Exception], object]) -> None:
        """The main thread calls ``then``."""

        def run() -> None:
            outcome: T | Exception
            try:
                outcome = work()
            except Exception as error:
                outcome = error
            self._post(partial(then, outcome))

        try:
            self._threads.submit(run)
        except Exception as error:  # no thread is left
            then(error)
