"""The proxy as it is run, before two engines of each kind that do as a test says.

Engines are real HTTP servers that compute nothing. A behaviour is a coroutine that gets what was
asked, and answers it.
"""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kvbus.spawn import Child
from tests.agents import wait_logged, wait_until

COMMAND = (sys.executable, "-m", "kvbus.integrations.proxy")
WITHIN_S = 60.0
ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0.0}
TICKET = {"do_remote_prefill": True, "endpoint": "tcp://10.0.0.1:5600", "größe": [1, [2, 3.5]]}
ANSWER = {"choices": [{"text": "abc"}]}


class Gate:
    """Closed until a test opens it; awaited in an engine's thread."""

    def __init__(self) -> None:
        self._opened: Future[None] = Future()

    def open(self) -> None:
        self._opened.set_result(None)

    async def wait(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._opened))


@dataclass
class Asked:
    """One request that an engine got; ``gone`` when its client closed the connection."""

    server: str
    path: str
    query: str
    headers: dict[str, str]
    body: dict[str, Any]
    send: Callable[[dict[str, Any]], Awaitable[None]]
    break_off: Callable[[], None]
    gone: threading.Event = field(default_factory=threading.Event)

    async def start(self, status: int, kind: str, **headers: str) -> None:
        named = {"content-type": kind, **headers}.items()
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def more(self, chunk: bytes, *, ends: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": chunk, "more_body": not ends})


Behaviour = Callable[[Asked], Awaitable[None]]


def says(status: int, body: object, **headers: str) -> Behaviour:
    """Answers at once; ``body`` is JSON, or bytes as they are."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def behave(asked: Asked) -> None:
        length = str(len(text))
        await asked.start(status, "application/json", content_length=length, **headers)
        await asked.more(text, ends=True)

    return behave


def offers(params: object = TICKET) -> Behaviour:
    """Answers as a prefill engine does."""
    return says(200, {**ANSWER, "kv_transfer_params": params})


async def breaks_off(asked: Asked) -> None:
    """Closes the connection, before an answer or in the middle of one."""
    asked.break_off()


def streams(*parts: "bytes | Gate | Behaviour", kind: str = "text/event-stream") -> Behaviour:
    """Sends parts as they are, waits at the gates between them, and may break off."""

    async def behave(asked: Asked) -> None:
        await asked.start(200, kind)
        for part in parts:
            match part:
                case bytes():
                    await asked.more(part)
                case Gate():
                    await part.wait()
                case _:
                    await part(asked)
                    return
        await asked.more(b"", ends=True)

    return behave


def after(gate: Gate, then: Behaviour) -> Behaviour:
    """Does nothing until the gate is open."""

    async def behave(asked: Asked) -> None:
        await gate.wait()
        await then(asked)

    return behave


class Kind:
    """Both engines of a kind: the first of what they do is for the first request of the test.

    The last is for all that follow.
    """

    def __init__(self, usual: Behaviour) -> None:
        self._usual = usual
        self.engines = [Engine(self) for _ in range(2)]
        self.rest()

    def rest(self) -> None:
        """Be as at first."""
        self.health, self.asked = 200, list[Asked]()
        self.does(self._usual)
        for engine in self.engines:
            engine.start()

    def does(self, *behaviours: Behaviour) -> None:
        self._behaviours = list(behaviours)

    def behaviour(self) -> Behaviour:
        """What is done with one request."""
        return self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [asked.body for asked in self.asked]

    def wait_asked(self, number: int = 1) -> Asked:
        """The latest request, once there are so many."""
        wait_until(lambda: len(self.asked) >= number, f"{number} requests", WITHIN_S)
        return self.asked[-1]


class Engine:
    """One engine, in a thread of its own, on a port of the loopback that it keeps."""

    def __init__(self, kind: Kind) -> None:
        self._kind, self.port = kind, 0
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, if it does not yet."""
        if self._server is not None:
            return
        listening = socket.create_server(("127.0.0.1", self.port))
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            self._serve,
            interface="asgi3",
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            timeout_graceful_shutdown=0,
        )
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        self._thread.start()
        wait_until(lambda: server.started, "the engine listens", WITHIN_S)

    def begin_to_stop(self) -> None:
        """Have `stop` take less time."""
        if self._server is not None:
            self._server.should_exit = True

    def stop(self) -> None:
        """Close the port."""
        self.begin_to_stop()
        self._thread.join(WITHIN_S)
        self._server = None

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in ("/health", "/v1/models"):
            status = self._kind.health if scope["path"] == "/health" else 200
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(self.url).encode()})
            return
        read, more = b"", True
        while more:
            message = await receive()
            read, more = read + message.get("body", b""), message.get("more_body", False)
        asked = Asked(
            server=self.url,
            path=scope["path"],
            query=scope["query_string"].decode(),
            headers={name.decode(): value.decode() for name, value in scope["headers"]},
            body=json.loads(read),
            send=send,
            break_off=receive.__self__.transport.abort,
        )
        behaving = asyncio.ensure_future(self._kind.behaviour()(asked))
        self._kind.asked.append(asked)
        watching = asyncio.ensure_future(_gone(receive))
        await asyncio.wait([behaving, watching], return_when=asyncio.FIRST_COMPLETED)
        if not behaving.done():
            behaving.cancel()
            asked.gone.set()
        watching.cancel()


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Site:
    """The proxy's process, its engines and a client of it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.prefill, self.decode = Kind(offers()), Kind(says(200, ANSWER))
        self._kinds = (("--prefill", self.prefill), ("--decode", self.decode))
        servers = [
            part for flag, kind in self._kinds for e in kind.engines for part in (flag, e.url)
        ]
        command = [*COMMAND, "--port", "0", *servers, *options]
        self.process = Child.start("proxy", command, log=folder / "log")
        wait_logged(self.process, '"proxy.started"', WITHIN_S)
        self._num_skipped = 0
        self.client = httpx.Client(
            base_url=self.logged("proxy.started")[0]["url"],
            timeout=WITHIN_S,
            trust_env=False,
            verify=False,  # noqa: S501 - it only speaks plain HTTP
        )

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The lines of ``event`` that this test has caused; each line is JSON, or this fails."""
        text = self.process.log_text()
        lines = text[: text.rfind("\n") + 1].splitlines()[self._num_skipped :]
        told = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in told if line["event"] == event]

    def logged(self, event: str, number: int = 1) -> list[dict[str, Any]]:
        """`lines`, once there are so many: an answer comes before its line."""
        wait_until(lambda: len(self.lines(event)) >= number, f"{number} {event}", WITHIN_S)
        return self.lines(event)

    def ask(self, path: str = "/v1/completions", *, headers: Any = None, **keys: Any) -> Any:
        """The answer to a request with these keys besides `ASKED`."""
        return self.client.post(path, json={**ASKED, **keys}, headers=headers)

    def health(self) -> dict[str, Any]:
        """What the proxy says of itself and of each server."""
        told: dict[str, Any] = self.client.get("/health").json()
        return told

    def rest(self) -> None:
        """Be as at first, with nothing in flight, for the next test."""
        for _, kind in self._kinds:
            kind.rest()
        wait_until(
            lambda: set(self.health().values()) == {True, 0, "healthy"}, "all are well", WITHIN_S
        )
        self._num_skipped = self.process.log_text().count("\n")

    def end(self) -> None:
        self.client.close()
        self.process.end()
        engines = [engine for _, kind in self._kinds for engine in kind.engines]
        for engine in engines:
            engine.begin_to_stop()
        for engine in engines:
            engine.stop()
