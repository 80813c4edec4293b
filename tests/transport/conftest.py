"""Real peers in real processes, and a transport that reads from them."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from subprocess import PIPE
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kvbus.errors import ClosedError
from kvbus.transport import ReadOutcome, ReadStatus, Transport, TransportLimits
from tests.forked import Forked

Bytes = npt.NDArray[np.uint8]


class Peer:
    """A process that offers memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        command = [sys.executable, "-m", "tests.transport.processes.peer", name]
        self.process = Forked(command, stdin=PIPE, stdout=PIPE)

    def ask(self, op: str, **arguments: object) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def allocate(self, size_bytes: int, seed: int) -> tuple[int, bytes]:
        answer = self.ask("allocate", size_bytes=size_bytes, seed=seed)
        return answer["address"], bytes.fromhex(answer["metadata"])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Reader:
    """A transport with memory to read into."""

    def __init__(self, limits: TransportLimits | None = None, **options: Any) -> None:
        self.threads: list[str] = []
        """On which thread each read has ended."""
        self.transport = Transport("reader/boot", limits=limits, deliver=self._deliver, **options)
        self.transport.start().result(20)
        self.memory = np.zeros(0, np.uint8)
        self.peer_metadata = b""

    def _deliver(self, drain: Callable[[], None]) -> None:
        self.threads.append(threading.current_thread().name)
        drain()

    def allocate(self, size_bytes: int) -> None:
        self.memory = np.zeros(size_bytes, np.uint8)
        self.registration = self.transport.register(self.memory.ctypes.data, size_bytes).result(20)

    def start(
        self, peer: str, address: int, spans: list[tuple[int, int, int]]
    ) -> tuple[Any, Future[ReadOutcome]]:
        """Read (local offset, remote offset, length) spans."""
        base = self.memory.ctypes.data
        local = np.array([(base + to, size, 0) for to, _, size in spans], np.uint64)
        remote = np.array([(address + at, size, 0) for _, at, size in spans], np.uint64)
        ended: Future[ReadOutcome] = Future()
        read = self.transport.read(
            peer, local.reshape(-1, 3), remote.reshape(-1, 3), on_end=ended.set_result
        )
        return read, ended

    def hold_thread(self) -> threading.Event:
        """Keep the transport's thread in a callback, until the event that is returned is set."""
        holds, goes_on = threading.Event(), threading.Event()

        def wait(_: ReadOutcome) -> None:
            holds.set()
            goes_on.wait(20)

        nowhere = np.ones((1, 3), np.uint64)
        self.transport.read("nobody", nowhere, nowhere, on_end=wait)
        assert holds.wait(20)
        return goes_on

    def read(self, peer: str, address: int, spans: list[tuple[int, int, int]]) -> ReadOutcome:
        return self.start(peer, address, spans)[1].result(20)


def content(size_bytes: int, seed: int) -> Bytes:
    """What a peer's memory of this size and seed holds."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def until(condition: Callable[[], bool], within_s: float = 20) -> None:
    """Return once the condition holds; fail at the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.001)


StartPeer = Callable[[str], Peer]
StartReader = Callable[..., Reader]


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    peers: list[Peer] = []

    def start(name: str) -> Peer:
        peers.append(Peer(name))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


class Link(NamedTuple):
    """A peer, and a reader that knows its memory."""

    peer: Peer
    reader: Reader
    name: str
    address: int


MakeLink = Callable[..., Link]
KEPT: list[Reader] = []
"""Their memory is never freed: a transfer may write into it until the process ends."""


@pytest.fixture
def start_reader() -> Iterator[StartReader]:
    readers: list[Reader] = []

    def start(limits: TransportLimits | None = None, **options: Any) -> Reader:
        readers.append(Reader(limits, **options))
        return readers[-1]

    yield start
    for reader in readers:
        with suppress(ClosedError):  # by the test
            if reader.transport.close(timeout_s=2).result(10).num_handles == 0:
                continue
        KEPT.append(reader)


@pytest.fixture
def link(start_peer: StartPeer, start_reader: StartReader) -> MakeLink:
    """A peer with memory of a seed, and a reader with as much, or with ``room`` bytes."""

    def make(
        size_bytes: int = 1 << 20,
        limits: TransportLimits | None = None,
        *,
        seed: int = 1,
        peer: str = "peer/1",
        room: int | None = None,
        connected: bool = False,
        **options: Any,
    ) -> Link:
        holder, reader = start_peer(peer), start_reader(limits, **options)
        address, reader.peer_metadata = holder.allocate(size_bytes, seed=seed)
        reader.allocate(size_bytes if room is None else room)
        name = reader.transport.add_peer(reader.peer_metadata).result(20)
        if connected:
            assert reader.read(name, address, [(0, 0, 4096)]).status is ReadStatus.DONE
        return Link(holder, reader, name, address)

    return make


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX reads its environment when an agent is made: both sides see it."""
    monkeypatch.setenv("UCX_TLS", "tcp")
