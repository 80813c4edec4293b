"""Engines of the OpenAI API as real HTTP servers, that record what they got and do as a test says.

Refuses to compute anything. A behaviour is a coroutine that gets what was asked, and answers it.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from tests.agents import wait_until

WITHIN_S = 20.0
TICKET = {
    "do_remote_prefill": True,
    "kvbus": 1,
    "endpoint": "tcp://10.0.0.1:5600",
    "num_tokens": 4096,
    "größe": [1, [2, 3.5], None, {"a": 2**53 + 1}],
}


class Gate:
    """Closed until a test opens it; awaited in the engine's thread."""

    def __init__(self) -> None:
        self._opened: Future[None] = Future()

    def open(self) -> None:
        self._opened.set_result(None)

    async def wait(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._opened))


@dataclass
class Asked:
    """One request that an engine got; ``gone`` when its client closed the connection."""

    path: str
    query: str
    headers: dict[str, str]
    body: dict[str, Any]
    send: Callable[[dict[str, Any]], Awaitable[None]]
    break_off: Callable[[], None]
    gone: threading.Event = field(default_factory=threading.Event)

    async def answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        await self.start(status, ("content-length", str(len(body))), *headers)
        await self.send({"type": "http.response.body", "body": body})

    async def start(self, status: int, *headers: tuple[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def more(self, chunk: bytes) -> None:
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})


Behaviour = Callable[[Asked], Awaitable[None]]


def says(status: int, body: object, *headers: tuple[str, str]) -> Behaviour:
    """Answers at once; ``body`` is JSON, or bytes as they are."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def behave(asked: Asked) -> None:
        await asked.answer(status, text, ("content-type", "application/json"), *headers)

    return behave


def offers(params: object = TICKET) -> Behaviour:
    """Answers as a prefill engine does."""
    return says(200, {"choices": [{"text": "a"}], "kv_transfer_params": params})


def after(gate: Gate, then: Behaviour) -> Behaviour:
    """Does nothing until the gate is open."""

    async def behave(asked: Asked) -> None:
        await gate.wait()
        await then(asked)

    return behave


def streams(*parts: bytes | Gate) -> Behaviour:
    """Sends each part as an event stream; waits at the gates between them."""

    async def behave(asked: Asked) -> None:
        await asked.start(200, ("content-type", "text/event-stream; charset=utf-8"))
        for part in parts:
            if isinstance(part, Gate):
                await part.wait()
            else:
                await asked.more(part)
        await asked.end()

    return behave


async def breaks_off(asked: Asked) -> None:
    """Closes the connection instead of an answer."""
    asked.break_off()


class Engine:
    """One engine, in a thread of its own, on a free port of the loopback."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.health = 200
        self.health_gate: Gate | None = None
        self.models: dict[str, Any] = {"data": [{"id": "a-model"}]}
        self.asked: list[Asked] = []
        self.port = 0
        self._running: Running | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [asked.body for asked in self.asked]

    def start(self) -> None:
        """Listen; again on the same port after a `stop`."""
        self._running = Running(self._serve, self.port)
        self.port = self._running.port

    def begin_to_stop(self) -> None:
        """Have `stop` take less time."""
        if self._running is not None:
            self._running.begin_to_stop()

    def stop(self) -> None:
        """Close the port."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def first(self) -> Asked:
        """The first request, once it is there."""
        wait_until(lambda: self.asked, "the engine was asked", WITHIN_S)
        return self.asked[0]

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            if self.health_gate is not None:
                await self.health_gate.wait()
            await _json(send, self.health, {})
        elif scope["path"] == "/v1/models":
            await _json(send, 200, self.models)
        else:
            await self._generate(scope, receive, send)

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        read = b""
        more = True
        while more:
            message = await receive()
            read += message.get("body", b"")
            more = message.get("more_body", False)
        asked = Asked(
            path=scope["path"],
            query=scope["query_string"].decode(),
            headers={name.decode(): value.decode() for name, value in scope["headers"]},
            body=json.loads(read),
            send=send,
            break_off=receive.__self__.transport.abort,
        )
        self.asked.append(asked)
        behaving = asyncio.ensure_future(self.behaviour(asked))
        watching = asyncio.ensure_future(_gone(receive))
        await asyncio.wait([behaving, watching], return_when=asyncio.FIRST_COMPLETED)
        if not behaving.done():
            behaving.cancel()
            asked.gone.set()
        watching.cancel()


class Running:
    """An ASGI application served in a thread until `stop`."""

    def __init__(self, application: Any, port: int = 0, *, lifespan: Any = "off") -> None:
        listening = socket.create_server(("127.0.0.1", port))
        self.port: int = listening.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                application,
                loop="asyncio",
                http="h11",
                ws="none",
                interface="asgi3",
                lifespan=lifespan,
                log_config=None,
                log_level="critical",
                timeout_graceful_shutdown=0,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, "the server started", WITHIN_S)

    def begin_to_stop(self) -> None:
        self._server.should_exit = True

    def stop(self) -> None:
        self.begin_to_stop()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()


@contextmanager
def port_that_accepts_nothing(port: int) -> Iterator[None]:
    """``port`` is bound, and whoever connects waits: its queue is full."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        waiting: list[socket.socket] = []
        while not waiting or _connected(waiting[-1]):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(("127.0.0.1", port))
        try:
            yield
        finally:
            for one in waiting:
                one.close()


def _connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


async def _json(send: Any, status: int, body: object) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
