"""Main thread of a data process."""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvbus.data.channel import channel_to_control
from kvbus.data.messages import Backends, Configure, FromData, Log
from kvbus.data.nixl import LoadNixl, Nixl, OpenNixlAgent
from kvbus.data.server import DataServer
from kvbus.errors import ClosedError, ProtocolError
from kvbus.memory.bus_errors import BusErrors
from kvbus.threads import started_threads

MAX_MESSAGES_A_PASS = 64


# The channel and the eventfd must be the first descriptors of the process: `select` takes none
# above 1,023, and only `select` has timeouts below 1 ms.
class DataLoop:
    def __init__(self, sock: socket.socket, bus_errors: BusErrors) -> None:
        self._channel, self._bus_errors = channel_to_control(sock), bus_errors
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], object]] = deque()

    def run(self) -> None:
        server = self._configured()
        while True:
            self._wait(server.pause_s())
            while self._calls:
                self._calls.popleft()()
            for _ in range(MAX_MESSAGES_A_PASS):
                received = self._channel.receive()
                if received is None:
                    break
                server.handle(*received)
            server.step()

    def log(self, message: Log) -> None:
        self._send(message)

    def _configured(self) -> DataServer:
        while (received := self._channel.receive()) is None:
            self._wait(None)
        configure, _ = received
        if not isinstance(configure, Configure):
            raise ProtocolError(f"the first message is a {type(configure).__name__}")
        return DataServer(
            configure,
            load_nixl=load_nixl_for(self._bus_errors),
            send=self._send,
            post=self._post,
            new_threads=started_threads,
            clock=time.perf_counter,
            bus_errors=self._bus_errors,
        )

    def _wait(self, pause_s: float | None) -> None:
        writers = [self._channel] if self._channel.has_unsent else []
        if self._calls:
            pause_s = 0.0
        waited: list[Any] = [self._channel, self._wake_fd]
        readable, writable, _ = select.select(waited, writers, [], pause_s)
        if self._wake_fd in readable:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        if writable:
            self._channel.flush()

    def _post(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._wake_fd, 1)

    def _send(self, message: FromData) -> None:
        with suppress(ClosedError):  # the main thread detects that, too
            self._channel.send(message)
        if self._channel.has_unsent:
            os.eventfd_write(self._wake_fd, 1)


def load_nixl_for(bus_errors: BusErrors) -> LoadNixl:
    """Return a loader of NIXL that restores our SIGBUS handler after UCX replaced it."""

    def load(backends: Backends) -> OpenNixlAgent:
        from kvbus.data import nixl_agent  # noqa: PLC0415  # takes 0.2 s and 20 MB

        open_agent = nixl_agent.load(backends)

        def open_one(name: str) -> Nixl:
            agent = open_agent(name)
            bus_errors.install()
            return agent

        return open_one

    return load
