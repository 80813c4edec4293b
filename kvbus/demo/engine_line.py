"""The driver's end of an engine: sends it work as JSON lines and hands each answer to who waits.

Refuses to say that an engine died: its `Child` does.
"""

import asyncio
from contextlib import suppress
from typing import Any, TypeVar

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
        self._waiting: dict[str, dict[type, asyncio.Future[Any]]] = {}
        self._ready = self.expect("ready", Ready)

    async def ready(self) -> Ready:
        """Return once the engine is registered with its agent."""
        answer = await self._ready
        if isinstance(answer, Failed):
            raise self._unexpected(answer)
        return answer

    def expect(self, request_id: str, kind: type[A]) -> "asyncio.Future[A | Failed]":
        """The answer of this kind that will come for a request, or its failure."""
        future: asyncio.Future[A | Failed] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, {})[kind] = future
        return future

    async def tell(self, work: Work) -> None:
        """Send one line."""
        stdin = self.child.process.stdin
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            if stdin is not None:
                await stdin.send(msgspec.json.encode(work) + b"\n")

    async def ask(self, work: Work, kind: type[A]) -> A | Failed:
        """The answer to ``work``; waits for ever when the engine dies."""
        answer = self.expect(work.request_id, kind)
        await self.tell(work)
        return await answer

    async def listen(self) -> None:
        """Hand out answers until the engine closes its stdout."""
        stdout = self.child.process.stdout
        if stdout is None:
            return
        lines = BufferedByteReceiveStream(stdout)
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            while True:
                self._settle(await lines.receive_until(b"\n", MAX_LINE_BYTES))

    def _settle(self, line: bytes) -> None:
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the {self.child.name} wrote {line[:200]!r}: {error}") from error
        waiting = self._waiting.get(answer.request_id, {})
        kinds = list(waiting) if isinstance(answer, Failed) else [type(answer)]
        for kind in kinds:
            if kind not in waiting:
                raise self._unexpected(answer)
            future = waiting.pop(kind)
            if not future.done():
                future.set_result(answer)

    def _unexpected(self, answer: Answer) -> ProtocolError:
        return ProtocolError(f"the {self.child.name} answered {type(answer).__name__}")
