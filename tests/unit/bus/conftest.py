"""Endpoints of the bus at real sockets, and plain peers of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgpack
import pytest
import zmq

from kvbus.bus import (
    BusContext,
    Call,
    ClientCurve,
    EventListener,
    EventPublisher,
    EventSubscriber,
    RequestClient,
    RequestServer,
    new_context,
)
from kvbus.protocol import Notice
from tests.unit.bus.messages import Ask, echo

TCP = "tcp://127.0.0.1:*"


class Runs(Protocol):
    async def run(self) -> None: ...


@pytest.fixture
def context() -> Iterator[BusContext]:
    """A context that fails if a test left sockets open."""
    with new_context() as context:
        yield context


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'bus'}"


@asynccontextmanager
async def run_all(*ends: Runs) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        for end in ends:
            tasks.start_soon(end.run)
        yield
        tasks.cancel_scope.cancel()


class RawPeer:
    """A plain ZeroMQ socket that speaks msgpack maps and gives up after ten seconds."""

    def __init__(self, context: BusContext, kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVTIMEO, 10_000)
        self.socket.set(zmq.SNDTIMEO, 10_000)
        self.identity = b""

    @property
    def endpoint(self) -> str:
        return str(self.socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())

    def put(self, fields: dict[str, Any], *prefix: bytes) -> None:
        self.socket.send_multipart([*prefix, msgpack.packb(fields)])

    async def frames(self) -> list[bytes]:
        frames: list[bytes] = await anyio.to_thread.run_sync(self.socket.recv_multipart)
        return frames

    async def get(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgpack.unpackb((await self.frames())[-1])
        return fields

    async def ask(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.put(fields)
        return await self.get()

    async def asked(self) -> dict[str, Any]:
        """Return the next request, as a server; `answer` and `notify` go to its sender."""
        self.identity, frame = await self.frames()
        fields: dict[str, Any] = msgpack.unpackb(frame)
        return fields

    def answer(self, request_id: int, boot: str = "server", **ok: Any) -> None:
        self.put({"v": 1, "re": request_id, "boot": boot, "ok": ok}, self.identity)

    def event(self, op: str, seq: int, boot: str = "raw") -> None:
        event = {"v": 1, "op": op, "seq": seq, "boot": boot, "body": {}}
        self.put(event, op.encode())

    def heartbeat(self, seqs: Any, boot: str = "raw") -> None:
        event = {"v": 1, "op": "heartbeat", "seq": 1, "boot": boot, "body": {"seqs": seqs}}
        self.put(event, b"heartbeat")


class Hold:
    """A handler that keeps its calls for the test to answer."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.calls: list[Call] = []
        self.arrived: asyncio.Queue[Call] = asyncio.Queue()

    def __call__(self, asked: Ask, call: Call) -> None:
        self.asked.append(asked)
        self.calls.append(call)
        self.arrived.put_nowait(call)

    async def echo_next(self) -> None:
        await self.arrived.get()
        echo(self.asked[-1], self.calls[-1])


@pytest.fixture
def hold() -> Hold:
    return Hold()


class Record(EventListener):
    """A listener that queues its calls as tuples."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    async def until(self, name: str) -> list[tuple[Any, ...]]:
        told = [await self.told.get()]
        while told[-1][0] != name:
            told.append(await self.told.get())
        return told

    def on_event(self, endpoint: str, event: Notice) -> None:
        self.told.put_nowait(("event", event.op, event.seq))

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        self.told.put_nowait(("gap", boot, topic))

    def on_boot(self, endpoint: str, boot: str) -> None:
        self.told.put_nowait(("boot", endpoint, boot))


@pytest.fixture
def record() -> Record:
    return Record()


class Bus:
    """Makes endpoints of the bus and plain peers, at one free address by default."""

    def __init__(self, context: BusContext, endpoint: str, stack: ExitStack) -> None:
        self.context, self.endpoint, self._stack = context, endpoint, stack

    running = staticmethod(run_all)

    def server(
        self, handler: Callable[[Any, Call], None] = echo, at: str = "", **options: Any
    ) -> RequestServer:
        options = {"context": self.context, "boot": "server", **options}
        server = RequestServer(options.pop("context"), at or self.endpoint, **options)
        server.on({Ask: handler})
        return server

    def client(self, boot: str = "client", at: str = "", **options: Any) -> RequestClient:
        return RequestClient(self.context, at or self.endpoint, boot=boot, **options)

    @asynccontextmanager
    async def pair(
        self, handler: Callable[[Any, Call], None] = echo, /, **options: Any
    ) -> AsyncIterator[tuple[RequestServer, RequestClient]]:
        server = self.server(handler, **options.pop("server", {}))
        client = self.client(at=server.endpoint, **options)
        async with run_all(server, client):
            yield server, client

    def publisher(self, boot: str = "source", at: str = "", **options: Any) -> EventPublisher:
        options = {"heartbeat_s": 0.02, **options}
        return EventPublisher(
            options.pop("context", self.context), at or self.endpoint, boot=boot, **options
        )

    def subscriber(self, listener: EventListener, *at: str, **options: Any) -> EventSubscriber:
        subscriber = EventSubscriber(self.context, listener, **options)
        for endpoint in at or (self.endpoint,):
            subscriber.add(endpoint)
        return subscriber

    def raw(
        self,
        kind: int,
        at: str = "",
        *,
        context: BusContext | None = None,
        curve: ClientCurve | None = None,
    ) -> RawPeer:
        """Bound when it is a ROUTER or an XPUB, connected otherwise."""
        peer = RawPeer(context or self.context, kind)
        self._stack.callback(peer.socket.close, linger=0)
        if curve is not None:
            curve.apply(peer.socket)
        if kind in (zmq.ROUTER, zmq.XPUB):
            peer.socket.bind(at or self.endpoint)
        else:
            peer.socket.connect(at or self.endpoint)
        return peer


@pytest.fixture
def bus(context: BusContext, endpoint: str) -> Iterator[Bus]:
    with ExitStack() as stack:
        yield Bus(context, endpoint, stack)
