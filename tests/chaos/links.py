"""The network between decode agents and a prefill agent, with a hand on it: a TCP proxy.

A prefill agent binds at 127.0.0.1 and says that others reach it at 127.0.0.2: there the proxy
listens, at the same port, and at those of its successors. Faults last until `heal`.
"""

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

AGENT_HOST, PROXY_HOST = "127.0.0.1", "127.0.0.2"
READ_BYTES = 1 << 16
MAX_RECORDED_BYTES = 1 << 16
FEWEST_BYTES = 512
"""What is less is a handshake and nothing else."""
GREETING_BYTES = 64
REPLAY_S = 2.0
TRICKLE_S = 0.02
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset."""


@dataclass(eq=False)
class Connection:
    """One connection through the proxy, and what the client has said so far."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    said: bytearray = field(default_factory=bytearray)

    def end(self, *, reset: bool = False) -> None:
        for writer in (self.client, self.server):
            if writer is None:
                continue
            if reset:
                wire = writer.get_extra_info("socket")
                with suppress(OSError):
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.close()


class Link:
    """All connections to one socket of an agent, which may come back at another of its ports.

    ``recorded`` is a conversation from its beginning, ``latest`` what a client said last.
    """

    def __init__(self, *ports: int) -> None:
        self._ports, self._latest_port = ports, ports[0]
        self.connections: set[Connection] = set()
        self.recorded, self.latest = b"", b""
        self._servers: list[asyncio.Server] = []
        self._passes = asyncio.Event()
        self._delay_s, self._trickle_bytes = 0.0, 0
        self.is_down = False
        self._passes.set()

    async def open(self) -> None:
        """Listen."""
        for port in self._ports:
            carry = partial(self._carry, port)
            self._servers.append(await asyncio.start_server(carry, PROXY_HOST, port))

    async def close(self) -> None:
        """End all of it."""
        for server in self._servers:
            server.close()
        self.cut()

    def heal(self) -> None:
        """No fault any more."""
        self.is_down, self._delay_s, self._trickle_bytes = False, 0.0, 0
        self._passes.set()

    def cut(self, *, reset: bool = False) -> None:
        """End what is connected."""
        for one in list(self.connections):
            one.end(reset=reset)

    def take_down(self) -> None:
        """Cut, and let nobody in."""
        self.is_down = True
        self.cut()

    def blacken(self) -> None:
        """Let nothing through, and say nothing of it."""
        self._passes.clear()

    def delay(self, delay_s: float) -> None:
        """Carry everything later."""
        self._delay_s = delay_s

    def trickle(self, num_bytes: int) -> None:
        """Carry few bytes at a time."""
        self._trickle_bytes = num_bytes

    async def replay(self) -> int:
        """Say again, on a connection of its own, what a client has said; bytes of answers."""
        num_heard = 0
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(AGENT_HOST, self._latest_port)
            try:
                async with asyncio.timeout(REPLAY_S):
                    writer.write(self.recorded[:GREETING_BYTES])  # else libzmq waits for more
                    await reader.readexactly(GREETING_BYTES)
                    writer.write(self.recorded[GREETING_BYTES:])
                    while heard := await reader.read(READ_BYTES):
                        num_heard += len(heard)
            finally:
                writer.close()
        return num_heard

    async def _carry(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        one = Connection(writer)
        if self.is_down:
            one.end(reset=True)
            return
        self.connections.add(one)
        try:
            with suppress(OSError):
                upstream, one.server = await asyncio.open_connection(AGENT_HOST, port)
                self._latest_port = port
                ways = (self._pass(reader, one.server, one), self._pass(upstream, writer, None))
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self.connections.discard(one)
            one.end()

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        recorded: Connection | None,
    ) -> None:
        while some := await source.read(READ_BYTES):
            if recorded is not None:
                self._record(some, recorded)
            await self._let(some, is_request=recorded is not None)
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            while some:
                few = self._trickle_bytes
                sink.write(some[: few or None])
                await sink.drain()
                some = some[few:] if few else b""
                if some:
                    await asyncio.sleep(TRICKLE_S)

    def _record(self, some: bytes, connection: Connection) -> None:
        self.latest = some
        if len(connection.said) < MAX_RECORDED_BYTES:
            connection.said += some
            if len(connection.said) > FEWEST_BYTES:
                self.recorded = bytes(connection.said)

    async def _let(self, some: bytes, *, is_request: bool) -> None:
        """Wait until this may pass."""
        await self._passes.wait()
