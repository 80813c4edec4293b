"""Real sockets for the tests of the bus: raw peers, and a wire that loses what a test says."""

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

from kvbus.bus import BusContext, Call, EventListener, new_context
from kvbus.protocol import Notice
from tests.bus.messages import Ask, echo


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
def earlier_context() -> BusContext:
    """For a server that is replaced: once it is terminated, the endpoint's file is really gone."""
    return new_context()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    """A free ipc endpoint."""
    return f"ipc://{tmp_path / 'bus'}"


@pytest.fixture
def running() -> Running:
    """Runs ends of the bus for the length of a ``with`` block."""

    @asynccontextmanager
    async def run_all(*ends: Runs) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            for end in ends:
                tasks.start_soon(end.run)
            yield
            tasks.cancel_scope.cancel()

    return run_all


class RawPeer:
    """A plain ZeroMQ socket that speaks msgpack maps and gives up after ten seconds."""

    def __init__(self, context: BusContext, kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVTIMEO, 10_000)
        self.socket.set(zmq.SNDTIMEO, 10_000)

    def put(self, fields: dict[str, Any], *prefix: bytes) -> None:
        self.socket.send_multipart([*prefix, msgpack.packb(fields)])

    async def frames(self) -> list[bytes]:
        frames: list[bytes] = await anyio.to_thread.run_sync(self.socket.recv_multipart)
        return frames

    async def get(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgpack.unpackb((await self.frames())[-1])
        return fields


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


@pytest.fixture
def lossy_wire() -> Iterator[Callable[[str, str, Loses], LossyWire]]:
    """Makes wires that lose the messages a test picks."""
    wires: list[LossyWire] = []

    def make(front: str, back: str, loses: Loses) -> LossyWire:
        wires.append(LossyWire(front, back, loses))
        return wires[-1]

    yield make
    for wire in wires:
        wire.close()


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


class RawPublisher:
    """An XPUB that knows when it is subscribed to, and numbers as a test says."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    async def subscribed(self) -> None:
        await self.peer.frames()

    def event(self, op: str, seq: int, boot: str = "raw") -> None:
        event = {"v": 1, "op": op, "seq": seq, "boot": boot, "body": {}}
        self.peer.put(event, op.encode())

    def heartbeat(self, seqs: Any, boot: str = "raw") -> None:
        event = {"v": 1, "op": "heartbeat", "seq": 1, "boot": boot, "body": {"seqs": seqs}}
        self.peer.put(event, b"heartbeat")


@pytest.fixture
def publisher(raw_peer, endpoint) -> RawPublisher:
    """A raw publisher at ``endpoint``."""
    return RawPublisher(raw_peer(zmq.XPUB, endpoint))


@pytest.fixture
def record() -> Record:
    """A listener that queues what it is told."""
    return Record()
