"""Real peers in real processes, and transports that read from them."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from subprocess import PIPE
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvbus.agent.data_plane import UCX_INTERFACES
from kvbus.errors import ClosedError
from kvbus.transport import Read, ReadOutcome, ReadStatus, Transport, TransportLimits
from tests.agents import wait_until
from tests.forked import Forked
from tests.inside_agents import INTERFACE

Bytes = npt.NDArray[np.uint8]
Span = tuple[int, int, int]
"""Where it lands, where it is read, and its length."""
WITHIN_S = 60.0
MIB = 1 << 20

until = partial(wait_until, what="the condition held")


class Peer:
    """A process that offers memory."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "tests.transport.processes.peer", name]
        self.process = Forked(command, stdin=PIPE, stdout=PIPE)

    def ask(self, op: str, **arguments: object) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def metadata(self, op: str, **arguments: object) -> bytes:
        """That of an answer."""
        return bytes.fromhex(self.ask(op, **arguments)["metadata"])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Place:
    """Memory of a peer, all of which can be read by that name of it."""

    peer: Peer
    name: str
    address: int
    size_bytes: int
    seed: int
    metadata: bytes

    @property
    def content(self) -> Bytes:
        """What it holds."""
        return np.random.default_rng(self.seed).integers(0, 256, self.size_bytes, np.uint8)


class Reader:
    """A transport with memory to read into; the peers that it meets are of its ``peers``."""

    def __init__(
        self, peers: list[Peer], limits: TransportLimits | None, room: int, **options: Any
    ) -> None:
        self.threads: list[str] = []
        """On which thread each read has ended."""
        self._peers = peers
        self.transport = Transport("reader-boot", limits=limits, deliver=self._deliver, **options)
        self.transport.start().result(WITHIN_S)
        self.allocate(room)

    def _deliver(self, drain: Callable[[], None]) -> None:
        self.threads.append(threading.current_thread().name)
        drain()

    def allocate(self, size_bytes: int) -> None:
        """Have other memory from now on."""
        self.memory = np.zeros(size_bytes, np.uint8)
        registered = self.transport.register(self.memory.ctypes.data, size_bytes)
        self.registration = registered.result(WITHIN_S)

    def meet(self, name: str = "peer-1", size_bytes: int = MIB, seed: int = 1) -> Place:
        """Memory of a peer that is started for it."""
        self._peers.append(peer := Peer(name))
        return self.add(self.told(peer, size_bytes, seed))

    def told(self, peer: Peer, size_bytes: int, seed: int) -> Place:
        """Memory that a peer has from now on, and that NIXL knows nothing of yet."""
        answer = peer.ask("allocate", size_bytes=size_bytes, seed=seed)
        metadata = bytes.fromhex(answer["metadata"])
        return Place(peer, "", answer["address"], size_bytes, seed, metadata)

    def add(self, place: Place) -> Place:
        """NIXL knows it from now on."""
        place.name = self.transport.add_peer(place.metadata).result(WITHIN_S)
        return place

    def start(self, place: Place, *spans: Span) -> tuple[Read, Future[ReadOutcome]]:
        """Read spans of it, or all."""
        base, spans = self.memory.ctypes.data, spans or ((0, 0, place.size_bytes),)
        local = np.array([(base + to, size, 0) for to, _, size in spans], np.uint64)
        remote = np.array([(place.address + at, size, 0) for _, at, size in spans], np.uint64)
        ended: Future[ReadOutcome] = Future()
        return self.transport.read(place.name, local, remote, on_end=ended.set_result), ended

    def read(self, place: Place, *spans: Span) -> ReadOutcome:
        return self.start(place, *spans)[1].result(WITHIN_S)

    def can_read(self, place: Place) -> bool:
        """Whether all of it arrives."""
        is_done = self.read(place).status is ReadStatus.DONE
        return is_done and np.array_equal(self.memory[: place.size_bytes], place.content)

    def hold_thread(self) -> threading.Event:
        """Keep the transport's thread in a callback, until the event that is returned is set."""
        holds, goes_on = threading.Event(), threading.Event()

        def wait(_: ReadOutcome) -> None:
            holds.set()
            goes_on.wait(WITHIN_S)

        nowhere = np.ones((1, 3), np.uint64)
        self.transport.read("nobody", nowhere, nowhere, on_end=wait)
        assert holds.wait(WITHIN_S)
        return goes_on


MakeReader = Callable[..., Reader]
Meet = Callable[..., tuple[Reader, Place]]
KEPT: list[Reader] = []
"""Their memory is never freed: a transfer may write into it until the process ends."""


@pytest.fixture
def make_reader() -> Iterator[MakeReader]:
    """Makes readers with ``room`` bytes."""
    readers, peers = list[Reader](), list[Peer]()

    def make(limits: TransportLimits | None = None, *, room: int = MIB, **options: Any) -> Reader:
        readers.append(Reader(peers, limits, room, **options))
        return readers[-1]

    yield make
    for peer in peers:
        peer.end()
    for reader in readers:
        with suppress(ClosedError, AttributeError):  # it was closed, or taken, by the test
            if reader.transport.close(timeout_s=2).result(WITHIN_S) == 0:
                continue
        KEPT.append(reader)


@pytest.fixture
def meet(make_reader: MakeReader) -> Meet:
    """A reader, and a place of a peer that it has read from if they are ``connected``."""

    def make(
        size_bytes: int = MIB,
        limits: TransportLimits | None = None,
        *,
        room: int = 0,
        connected: bool = False,
        **options: Any,
    ) -> tuple[Reader, Place]:
        reader = make_reader(limits, room=room or size_bytes, **options)
        place = reader.meet(size_bytes=size_bytes)
        if connected:
            assert reader.read(place, (0, 0, 4096)).status is ReadStatus.DONE
        return reader, place

    return make


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What UCX listens at outlives a test: agents of later ones in this process would end of it."""
    monkeypatch.setenv(UCX_INTERFACES, INTERFACE)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX reads its environment when an agent is made: both sides see it."""
    monkeypatch.setenv("UCX_TLS", "tcp")
