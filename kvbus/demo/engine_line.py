"""The driver's end of an engine: sends it work as JSON lines and hands each answer to who waits.

Refuses to say that an engine died: its `Child` does.
"""

import asyncio
from contextlib import suppress
from typing import TypeVar

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from kvbus.demo.child import Child
from kvbus.demo.work import MAX_LINE_BYTES, Answer, Failed, Ready, Work
from kvbus.errors import ProtocolError

A = TypeVar("A", bound=Answer)


class EngineLine:
    """One engine. `listen` runs in a task of the driver."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._ready = self._await_answer("ready")

    async def ready(self) -> Ready:
        """Return once the engine is registered with its agent."""
        answer = await self._ready
        if not isinstance(answer, Ready):
            raise self._unexpected(answer)
        return answer

    async def ask(self, work: Work, expected: type[A]) -> A | Failed:
        """The answer to ``work``; waits for ever when the engine dies."""
        answer = self._await_answer(work.request_id)
        stdin = self.child.process.stdin
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            if stdin is not None:
                await stdin.send(msgspec.json.encode(work) + b"\n")
        arrived = await answer
        if not isinstance(arrived, expected | Failed):
            raise self._unexpected(arrived)
        return arrived

    async def listen(self) -> None:
        """Hand out answers until the engine closes its stdout."""
        stdout = self.child.process.stdout
        if stdout is None:
            return
        lines = BufferedByteReceiveStream(stdout)
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            while True:
                self._settle(await lines.receive_until(b"\n", MAX_LINE_BYTES))

    def _await_answer(self, request_id: str) -> "asyncio.Future[Answer]":
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        return future

    def _settle(self, line: bytes) -> None:
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the {self.child.name} wrote {line[:200]!r}: {error}") from error
        future = self._waiting.pop(answer.request_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def _unexpected(self, answer: Answer) -> ProtocolError:
        return ProtocolError(f"the {self.child.name} answered {type(answer).__name__}")
