"""Runs copies on all ranks of an engine; here, of those in this process.

Refuses to end before what was started has: a thread that copies cannot be stopped.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import anyio

from kvbus.engine.bounce.buffer import CopyBlocks, Direction, HostBuffer
from kvbus.engine.bounce.copies import BlockCopy
from kvbus.errors import ErrorCode, LocalError


class Copier(Protocol):
    """Copies on every rank, and returns when all have; raises what a rank's copy raised.

    An engine of several processes has one of its own, which has each worker call `HostBuffer.run`.
    It is never cancelled, and must not end while a copy goes on.
    """

    async def __call__(self, direction: Direction, copies: Sequence[BlockCopy]) -> None: ...


class LocalCopier:
    """For an engine whose ranks are in this process; at most ``num_threads`` copy at once."""

    def __init__(
        self, buffers: Iterable[HostBuffer], copy: CopyBlocks, *, num_threads: int = 1
    ) -> None:
        self._buffers, self._copy = tuple(buffers), copy
        self._num_threads = num_threads
        self._limiter: anyio.CapacityLimiter | None = None  # belongs to the event loop's run

    async def __call__(self, direction: Direction, copies: Sequence[BlockCopy]) -> None:
        """Each rank in a thread of its own, as far as there are threads.

        Raises what a rank's copy raised; as a `LocalError` what is no `Exception`.
        """
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self._num_threads)
        failures: list[BaseException] = []

        async def run(buffer: HostBuffer) -> None:
            call = partial(buffer.run, direction, copies, self._copy)
            try:
                await anyio.to_thread.run_sync(call, limiter=self._limiter)
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for buffer in self._buffers:
                tasks.start_soon(run, buffer)
        for failure in failures:
            if isinstance(failure, Exception):
                raise failure
            message = f"the engine's copy function ended with {type(failure).__name__}: {failure}"
            raise LocalError(message, code=ErrorCode.INTERNAL) from failure
