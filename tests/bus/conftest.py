"""Ends of the bus at real sockets, raw peers of them, and a wire that loses what a test says."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgpack
import pytest
import zmq

from kvbus.bus import (
    BusContext,
    Call,
    EventListener,
    EventPublisher,
    EventSubscriber,
    RequestClient,
    RequestServer,
    new_context,
)
from kvbus.protocol import Notice
from tests.bus.messages import Ask, echo, serve

TCP = "tcp://127.0.0.1:*"


class Runs(Protocol):
    """An end of the bus."""

    async def run(self) -> None: ...


Running = Callable[..., AbstractAsyncContextManager[None]]


@pytest.fixture
def context() -> Iterator[BusContext]:
    """A context that complains about sockets which a test left open."""
    with new_context() as context:
        yield context


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    """A free ipc endpoint."""
    return f"ipc://{tmp_path / 'bus'}"


@asynccontextmanager
async def run_all(*ends: Runs) -> AsyncIterator[None]:
    """Runs ends of the bus for the length of the block."""
    async with anyio.create_task_group() as tasks:
        for end in ends:
            tasks.start_soon(end.run)
        yield
        tasks.cancel_scope.cancel()


@pytest.fixture
def running() -> Running:
    """Runs ends of the bus for the length of a ``with`` block."""
    return run_all


class RawPeer:
    """A plain ZeroMQ socket that speaks msgpack maps and gives up after ten seconds."""

    def __init__(self, context: BusContext, kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVTIMEO, 10_000)
        self.socket.set(zmq.SNDTIMEO, 10_000)
        self.identity = b""

    def put(self, fields: dict[str, Any], *prefix: bytes) -> None:
        self.socket.send_multipart([*prefix, msgpack.packb(fields)])

    async def frames(self) -> list[bytes]:
        frames: list[bytes] = await anyio.to_thread.run_sync(self.socket.recv_multipart)
        return frames

    async def get(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgpack.unpackb((await self.frames())[-1])
        return fields

    async def ask(self, fields: dict[str, Any]) -> dict[str, Any]:
        """What comes back next."""
        self.put(fields)
        return await self.get()

    async def asked(self) -> dict[str, Any]:
        """As a server: the next request; `answer` and `notify` go to who sent it."""
        self.identity, frame = await self.frames()
        fields: dict[str, Any] = msgpack.unpackb(frame)
        return fields

    def answer(self, request_id: int, boot: str = "server", **ok: Any) -> None:
        self.put({"v": 1, "re": request_id, "boot": boot, "ok": ok}, self.identity)

    def notify(self, seq: int, boot: str = "server", **body: Any) -> None:
        notice = {"v": 1, "op": "n", "seq": seq, "boot": boot, "body": body}
        self.put(notice, self.identity)

    def event(self, op: str, seq: int, boot: str = "raw") -> None:
        """As a publisher."""
        event = {"v": 1, "op": op, "seq": seq, "boot": boot, "body": {}}
        self.put(event, op.encode())

    def heartbeat(self, seqs: Any, boot: str = "raw") -> None:
        event = {"v": 1, "op": "heartbeat", "seq": 1, "boot": boot, "body": {"seqs": seqs}}
        self.put(event, b"heartbeat")


@pytest.fixture
def raw_peer(context: BusContext) -> Iterator[Callable[..., RawPeer]]:
    """Makes a plain socket: bound when it is a ROUTER or XPUB, connected otherwise."""
    peers: list[RawPeer] = []

    def make(kind: int, endpoint: str, other: BusContext | None = None) -> RawPeer:
        peer = RawPeer(other or context, kind)
        if kind in (zmq.ROUTER, zmq.XPUB):
            peer.socket.bind(endpoint)
        else:
            peer.socket.connect(endpoint)
        peers.append(peer)
        return peer

    yield make
    for peer in peers:
        peer.socket.close(linger=0)


Loses = Callable[[dict[str, Any]], bool]


class LossyWire:
    """A ROUTER and a DEALER in a thread that carry frames between a client and a server."""

    def __init__(self, front: str, back: str, loses: Loses) -> None:
        self._context: BusContext = new_context()
        self._loses = loses
        self._front, self._back = (self._context.socket(k) for k in (zmq.ROUTER, zmq.DEALER))
        self._front.bind(front)
        self._back.connect(back)
        self._stop = threading.Event()
        self._client = b""
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _carry(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(20))
            if self._front in ready:
                self._client, frame = self._front.recv_multipart()
                if not self._loses(msgpack.unpackb(frame)):
                    self._back.send(frame)
            if self._back in ready:
                frame = self._back.recv()
                if not self._loses(msgpack.unpackb(frame)):
                    self._front.send_multipart([self._client, frame])


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
    """A handler that keeps its calls for the test to answer."""
    return Hold()


class Record(EventListener):
    """Queues what a subscriber tells, as tuples that start with its name."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    async def next(self) -> tuple[Any, ...]:
        return await self.told.get()

    async def until(self, name: str) -> list[tuple[Any, ...]]:
        told = [await self.next()]
        while told[-1][0] != name:
            told.append(await self.next())
        return told

    def on_event(self, endpoint: str, event: Notice) -> None:
        del endpoint
        self.told.put_nowait(("event", event.op, event.seq))

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        del endpoint
        self.told.put_nowait(("gap", boot, topic))

    def on_boot(self, endpoint: str, boot: str) -> None:
        self.told.put_nowait(("boot", endpoint, boot))

    def on_silence(self, endpoint: str, boot: str | None) -> None:
        self.told.put_nowait(("silence", endpoint, boot))

    def on_alive(self, endpoint: str, boot: str) -> None:
        self.told.put_nowait(("alive", endpoint, boot))


@pytest.fixture
def record() -> Record:
    """A listener that queues what it is told."""
    return Record()


class Bus:
    """Makes ends of the bus and plain peers, at one free endpoint unless a test says another."""

    def __init__(self, context: BusContext, endpoint: str, raw: Callable[..., RawPeer]) -> None:
        self.context, self.endpoint, self._raw = context, endpoint, raw
        self.wires: list[LossyWire] = []

    running = staticmethod(run_all)

    def server(
        self, handler: Callable[[Any, Call], None] = echo, at: str = "", **options: Any
    ) -> RequestServer:
        return serve(options.pop("context", self.context), at or self.endpoint, handler, **options)

    def client(self, boot: str = "client", at: str = "", **options: Any) -> RequestClient:
        return RequestClient(self.context, at or self.endpoint, boot=boot, **options)

    @asynccontextmanager
    async def pair(
        self, handler: Callable[[Any, Call], None] = echo, /, **options: Any
    ) -> AsyncIterator[tuple[RequestServer, RequestClient]]:
        """A server and a client of it that run; ``server`` has the server's options."""
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
        subscriber = EventSubscriber(self.context, listener, **{"silence_s": 30, **options})
        for endpoint in at or (self.endpoint,):
            subscriber.add(endpoint)
        return subscriber

    def raw(self, kind: int, at: str = "", context: BusContext | None = None) -> RawPeer:
        return self._raw(kind, at or self.endpoint, context)

    def lossy_wire(self, back: str, loses: Loses) -> LossyWire:
        """From our endpoint to the one at its ``back``."""
        self.wires.append(LossyWire(self.endpoint, back, loses))
        return self.wires[-1]


@pytest.fixture
def bus(context: BusContext, endpoint: str, raw_peer: Callable[..., RawPeer]) -> Iterator[Bus]:
    """Ends of the bus at a free endpoint."""
    bus = Bus(context, endpoint, raw_peer)
    yield bus
    for wire in bus.wires:
        wire.close()
