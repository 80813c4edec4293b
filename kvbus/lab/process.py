"""Child processes of a tool: agents, and engines that it controls through a socket.

tool ──{"id": 7, "do": "offer", "with": {…}}──▶ process of engines
tool ◀──{"id": 7, "reply": …} or {"id": 7, "code": …, "error": …}──

Replies come in any order. A process ends when the tool closes the socket, its stdin.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec

from kvbus.errors import ErrorCode, KVBusError, ProtocolError, RequestRefused, leaves, reason_of
from kvbus.protocol.engine import Fetched
from kvbus.spawn import Child, write_agent_config

MAX_LINE_BYTES = 1 << 24
END_TIMEOUT_S = 60.0

T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)
Settings = Mapping[str, str | float | list[str]]


class ChildRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    id: int
    do: str
    given: dict[str, Any] = msgspec.field(name="with", default_factory=dict)


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    id: int
    reply: msgspec.Raw = msgspec.Raw(b"null")
    code: ErrorCode = ErrorCode.INTERNAL
    error: str | None = None


class TimedFetch(msgspec.Struct, frozen=True):
    """``at_s`` is its end by `time.monotonic`."""

    fetched: Fetched
    seconds: float
    at_s: float


class EngineChild:
    def __init__(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.child = child
        self._reader, self._writer = reader, writer
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._num_requests = 0

    async def request(self, kind: type[T], do: str, **given: Any) -> T:
        """Return the reply, decoded as ``kind``; raise `RequestRefused` for an error in the child.

        If the process ends, the block of `engine_process` is cancelled.
        """
        self._num_requests += 1
        request = ChildRequest(self._num_requests, do, given)
        answered = self._pending[request.id] = asyncio.get_running_loop().create_future()
        try:
            await _send(self._writer, request)
            answer = await answered
        finally:
            del self._pending[request.id]
        if answer.error is not None:
            raise RequestRefused(answer.error, code=answer.code)
        return msgspec.json.decode(answer.reply, type=kind)

    async def listen(self) -> None:
        async for answer in _lines(self._reader, Answer):
            pending = self._pending.get(answer.id)
            if pending is not None and not pending.done():
                pending.set_result(answer)
        await self.child.ended()
        raise self.child.lost()

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def engine_process(
    name: str, module: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[EngineChild]:
    """Run ``python -m module``, which calls `serve`, until the block ends.

    Raises `PeerLost` if the process ends early, fails, or does not end.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", module, *arguments]
        child = Child.start(
            name, command, log=log, stdin=theirs.fileno(), env=env, own_session=True
        )
    process = EngineChild(
        child, *await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_BYTES)
    )
    async with _running(child, process.listen, process.close):
        yield process


def start_agent(role: str, folder: Path, *, log: Path, settings: Settings) -> Child:
    config = write_agent_config(role, folder, **settings)
    command = [sys.executable, "-m", f"kvbus_{role}", str(config)]
    return Child.start(f"{role} agent", command, log=log, own_session=True)


@asynccontextmanager
async def agent_process(
    role: str, folder: Path, *, log: Path, settings: Settings
) -> AsyncIterator[Child]:
    child = start_agent(role, folder, log=log, settings=settings)

    async def watch() -> None:
        await child.ended()
        raise child.lost()

    async with _running(child, watch, child.request_end):
        yield child


@asynccontextmanager
async def _running(
    child: Child, watch: Callable[[], Coroutine[Any, Any, None]], request_end: Callable[[], None]
) -> AsyncIterator[None]:
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            yield
            tasks.cancel_scope.cancel()
        request_end()
        with anyio.move_on_after(END_TIMEOUT_S):
            await child.ended()
        if child.process.poll() != 0:
            raise child.lost(f"did not end within {END_TIMEOUT_S:g} s")
    finally:
        request_end()
        await child.end_async()


async def serve(engine: object) -> None:
    stdin = socket.socket(fileno=sys.stdin.fileno())
    reader, writer = await asyncio.open_unix_connection(sock=stdin, limit=MAX_LINE_BYTES)

    async def answer(request: ChildRequest) -> None:
        try:
            reply = getattr(engine, request.do)(**request.given)
            if isinstance(reply, Awaitable):
                reply = await reply
            await _send(writer, Answer(request.id, msgspec.Raw(msgspec.json.encode(reply))))
        except* KVBusError as errors:
            first = leaves(errors)[0]
            await _send(writer, Answer(request.id, code=first.code, error=first.message))

    async with anyio.create_task_group() as tasks:
        async for request in _lines(reader, ChildRequest):
            tasks.start_soon(answer, request)
        tasks.cancel_scope.cancel()
    writer.close()


def run_program(main: Callable[[], Awaitable[None]]) -> None:
    failures: list[KVBusError] = []
    try:
        anyio.run(main)
    except* KVBusError as errors:
        failures = leaves(errors)
    if failures:
        sys.stderr.writelines(f"error: {error.code}: {error.message}\n" for error in failures)
        raise SystemExit(1)


async def _send(writer: asyncio.StreamWriter, message: ChildRequest | Answer) -> None:
    with suppress(OSError):
        writer.write(msgspec.json.encode(message) + b"\n")
        await writer.drain()


async def _lines(reader: asyncio.StreamReader, kind: type[M]) -> AsyncIterator[M]:
    with suppress(OSError):
        while line := await reader.readline():
            try:
                yield msgspec.json.decode(line, type=kind)
            except msgspec.DecodeError as error:
                raise ProtocolError(f"{line[:200]!r} is no message: {reason_of(error)}") from error
